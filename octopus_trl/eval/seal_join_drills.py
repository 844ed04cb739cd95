"""Drills for the warm start: what a small policy must be able to do before it can be an agent.

Looking a fact up is hard to learn from episodes alone, where one code in a thousand tokens is
asked for. A drill asks for every fact of its pages (dense queries), first in the thread's own
text, then in text that it reads only through a mount; and a run of random tokens, repeated, makes
copying appear early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octopus_trl.eval.seal_join import World
from octopus_trl.trace import Segment, ThreadRecord, Trace

MAX_REPEATED = 160  # tokens of a run that the repetition drill shows twice
MAX_FILLER = 64  # tokens around it
FEW_TOKENS = 48  # vocabulary of every second run


class Drills:
    """Draws drill traces of one world in one tokenizer's ids.

    Args:
        tokenizer: encodes page text and queries.
        vocab: token ids that the repetition drill draws from.
    """

    def __init__(self, world: World, tokenizer: Any, *, vocab: Sequence[int]) -> None:
        self._world = world
        self._tokenizer = tokenizer
        self._vocab = np.asarray(vocab, dtype=np.int64)
        self._pages = {document.docid: document.text for document in world.documents()}

    def repeat(self, rng: np.random.Generator) -> Trace:
        """A random run in the prompt, and the same run again as an action.

        Every second one draws from few tokens, so that one token of context does not settle what
        comes next.
        """
        few = rng.random() < 0.5
        vocab = rng.choice(self._vocab, size=FEW_TOKENS, replace=False) if few else self._vocab
        run = rng.choice(vocab, size=int(rng.integers(16, MAX_REPEATED))).tolist()
        filler = rng.choice(vocab, size=int(rng.integers(1, MAX_FILLER))).tolist()
        at = int(rng.integers(0, len(filler) + 1))
        cue = run[:2]  # given again, so that what follows is determined
        prompt = filler[:at] + run + filler[at:] + cue
        return _assemble("repeat", [(0, None, "prompt", prompt, [])] + _ask(0, 0, [([], run[2:])]))

    def own_page(self, rng: np.random.Generator) -> Trace:
        """Pages in the thread's own text, then every fact of them asked for."""
        row = self._row(rng, int(rng.integers(1, 3)))
        text = " ".join(self._page(row, guild) for guild in self._world.truth(row).guilds)
        prompt = self._encode(text)
        return _assemble(
            "own_page", [(0, None, "prompt", prompt, [])] + _ask(0, 0, self._facts(rng, row))
        )

    def mounted_pages(self, rng: np.random.Generator) -> Trace:
        """A page in each child, mounted by the root, then every fact of them asked for."""
        row = self._row(rng, int(rng.integers(1, 4)))
        guilds = self._world.truth(row).guilds
        parts: list[_Part] = [(0, None, "prompt", self._encode(row["question"]), [])]
        for child, guild in enumerate(guilds, start=1):
            parts.append((child, 0, "tool", self._encode(self._page(row, guild)), []))
        mounts = list(range(1, len(guilds) + 1))
        facts = self._facts(rng, row)
        parts.append((0, 0, "tool", self._encode(" mounted."), mounts))
        return _assemble("mounted_pages", parts + _ask(0, len(parts) - 1, facts))

    def _row(self, rng: np.random.Generator, branches: int) -> dict[str, Any]:
        index, salt = int(rng.integers(0, 1 << 30)), int(rng.integers(0, 1 << 30))
        return self._world.question("train", "late", branches, index, salt_seed=salt)

    def _page(self, row: dict[str, Any], guild: str) -> str:
        docid = self._world.docid[guild, 2]
        return self._world.fill(docid, self._pages[docid], row)

    def _facts(
        self, rng: np.random.Generator, row: dict[str, Any]
    ) -> list[tuple[list[int], list[int]]]:
        """(cue, answer) of every seal, and of the chair, in random order."""
        truth = self._world.truth(row)
        facts = [("the chair is", f" {truth.guilds[truth.chair]} and names {truth.named}.")]
        for guild in truth.guilds:
            for seal_class in self._world.classes:
                slot = f"{{{seal_class}}}"
                seal = self._world.fill(self._world.docid[guild, 2], slot, row)
                facts.append((f"{guild} {seal_class} seal", f" {seal}."))
        order = rng.permutation(len(facts))
        return [(self._encode(f" {facts[i][0]}"), self._encode(facts[i][1])) for i in order]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


_Part = tuple[int, int | None, str, list[int], list[int]]  # thread, parent, kind, tokens, mounts


def _ask(thread: int, parent: int, facts: list[tuple[list[int], list[int]]]) -> list[_Part]:
    """Continue a chain with cue (tool) and answer (action) segments; ids count up from parent."""
    parts: list[_Part] = []
    for cue, answer in facts:
        if cue:
            parts.append((thread, parent, "tool", cue, []))
            parent = parent + 1
        parts.append((thread, parent, "action", answer, []))
        parent = parent + 1
    return parts


def _assemble(source: str, parts: list[_Part]) -> Trace:
    segments = [
        Segment(index, thread, parent, kind, tokens, mounts)
        for index, (thread, parent, kind, tokens, mounts) in enumerate(parts)
    ]
    trace = Trace(source, source, segments=segments, meta={"source": source})
    trace.place()
    heads = {segment.thread: segment.id for segment in segments}
    trace.threads = [
        ThreadRecord(thread, 0 if thread else None, status="committed", head=head)
        for thread, head in sorted(heads.items())
    ]
    return trace
