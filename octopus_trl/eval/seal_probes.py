"""Probes of the seal join world: a seal that only the sibling's page holds."""

from __future__ import annotations

import random
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.readings import Crossing
from octopus_trl.eval.seal_join import World


def seal_probes(
    world: World,
    tokenizer: Any,
    num: int,
    *,
    seed: int = 0,
    sibling_pages: int = 1,
    own_pages: int = 1,
) -> list[Crossing]:
    """Draw probes on held-out guilds: sibling and reader each opened guild pages, then one seal of
    the sibling's last page is asked for, as the drills of the warm start ask.

    The reader's own continuation is the seal of one class on its own page, the sibling's the seal
    of the same class on the page that it opened last.

    Args:
        sibling_pages, own_pages: pages of each; more of the sibling's put it ahead.
    Raises:
        ConfigError: a count is below 1.
    """
    if min(num, sibling_pages, own_pages) < 1:
        raise ConfigError(
            f"{num} probes of {sibling_pages} and {own_pages} pages: each must be at least 1"
        )
    pages = {document.docid: document.text for document in world.documents()}
    draw = random.Random(f"seals-{seed}")
    probes = []
    for index in range(num):
        row = world.question(
            "test",
            "late",
            sibling_pages + own_pages,
            draw.randrange(1 << 30),
            salt_seed=draw.randrange(1 << 30),
        )
        guilds = world.truth(row).guilds
        texts = [world.fill(world.docid[g, 2], pages[world.docid[g, 2]], row) for g in guilds]
        there, here = guilds[sibling_pages - 1], guilds[-1]
        asked, other = draw.choice(world.classes), draw.choice(world.classes)

        def seal(guild: str, name: str, row: dict[str, Any] = row) -> str:
            return f" {world.fill(world.docid[guild, 2], f'{{{name}}}', row)}."

        parts = {
            "prompt": row["question"],
            "sibling": " ".join(texts[:sibling_pages]),
            "own": " ".join(texts[sibling_pages:]),
            "question": f" mounted. {there} {asked} seal",
            "answer": seal(there, asked),
            "own_next": seal(here, other),
            "cue": f" mounted. {here} {other} seal",
            "sibling_next": seal(there, other),
        }
        ids = {
            name: tuple(tokenizer.encode(text, add_special_tokens=False))
            for name, text in parts.items()
        }
        probes.append(Crossing(id=f"seal-{seed}-{index}", **ids))
    return probes
