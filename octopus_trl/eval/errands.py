"""Probes of two threads on two errands: which of the two does a reader go on with.

Natural text for any causal LM: both threads keep a log of searches in one format and each looks
for something else. Nothing in the sibling's log bears on the reader's errand.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from octopus_trl.errors import ConfigError
from octopus_trl.eval.probes import Encode
from octopus_trl.eval.readings import Crossing

_WANTED = (
    "height of the tower", "name of the mayor", "year of the flood", "length of the bridge",
    "price of the ferry", "colour of the flag", "depth of the lake", "age of the mill",
    "owner of the inn", "number of the bus", "date of the fair", "width of the gate",
)  # fmt: skip
_PLACES = (
    "Alder", "Bramley", "Carrow", "Dunmore", "Eskdale", "Farley", "Glenrow", "Harwick", "Ingleby",
    "Jarrow", "Kelso", "Lorton", "Marden", "Norley", "Orwell", "Penrith", "Quorn", "Rothbury",
)  # fmt: skip
_FOUND = (
    "a timetable of the harbour", "a letter to the council", "a list of old street names",
    "a report on the harvest", "a map without a scale", "a poem about the river",
    "minutes of a meeting", "an advertisement for soap",
)  # fmt: skip


def errand_probes(
    encode: Encode,
    num: int,
    *,
    seed: int = 0,
    sibling_searches: int = 4,
    own_searches: int = 4,
    begin: Sequence[int] = (),
) -> list[Crossing]:
    """Draw probes of two errands.

    The question asks what the sibling's last search had found, so that a read is worth something.

    Args:
        encode: text -> token ids, without special tokens.
        sibling_searches, own_searches: searches in each log; more of the sibling's put it ahead.
        begin: token ids before every prompt.
    Raises:
        ConfigError: a count is below 1.
    """
    for name, value in (
        ("num", num),
        ("sibling_searches", sibling_searches),
        ("own_searches", own_searches),
    ):
        if value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    draw = random.Random(f"errands-{seed}")
    probes = []
    for index in range(num):
        wants, places = draw.sample(_WANTED, 2), draw.sample(_PLACES, 2)
        searches = [f"{want} in {place}" for want, place in zip(wants, places, strict=True)]
        founds = [
            [draw.choice(_FOUND) for _ in range(count)]
            for count in (own_searches, sibling_searches)
        ]
        own, sibling = (
            f"\nErrand: find the {search}.\n"
            + "".join(f"Search: {search}\nFound: {found}.\n" for found in found_there)
            for search, found_there in zip(searches, founds, strict=True)
        )
        texts = {
            "prompt": "Search logs. Each worker has one errand and searches until it is done.\n",
            "sibling": sibling,
            "own": own,
            "question": f"Question: what did the last search for the {searches[1]} find?\nAnswer:",
            "answer": f" {founds[1][-1]}.",
            "own_next": f" {searches[0]}",
            "cue": "Search:",
            "sibling_next": f" {searches[1]}",
        }
        ids = {name: tuple(encode(text)) for name, text in texts.items()}
        ids["prompt"] = (*begin, *ids["prompt"])
        probes.append(Crossing(id=f"errand-{seed}-{index}", **ids))
    return probes
