"""Whether questions to train on share anything with questions to test on. Gives ids, never text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octopus_trl.agent.reward import normalise_answer

NUM_WORDS = 13


@dataclass(frozen=True, slots=True)
class Overlap:
    """Ids of the first set that share something with the second.

    `same` have an equal normalised question, `shared` a run of `NUM_WORDS` words (a question with
    fewer words counts whole), `documents` an address in `gold_urls`.
    """

    same: tuple[str, ...]
    shared: tuple[str, ...]
    documents: tuple[str, ...]

    @property
    def ids(self) -> set[str]:
        """All of them: what to leave out of training."""
        return {*self.same, *self.shared, *self.documents}


def find_overlap(
    rows: Iterable[Mapping[str, Any]], held_out: Iterable[Mapping[str, Any]], n: int = NUM_WORDS
) -> Overlap:
    """Compare rows with `id`, `question` and perhaps `gold_urls`."""
    whole: set[str] = set()
    grams: set[tuple[str, ...]] = set()
    urls: set[str] = set()
    for row in held_out:
        words = normalise_answer(row["question"]).split()
        whole.add(" ".join(words))
        grams |= _grams(words, n)
        urls |= {_address(url) for url in row.get("gold_urls") or ()}
    same, shared, documents = [], [], []
    for row in rows:
        words = normalise_answer(row["question"]).split()
        if " ".join(words) in whole:
            same.append(row["id"])
        if _grams(words, n) & grams:
            shared.append(row["id"])
        if {_address(url) for url in row.get("gold_urls") or ()} & urls:
            documents.append(row["id"])
    return Overlap(tuple(same), tuple(shared), tuple(documents))


def _grams(words: list[str], n: int) -> set[tuple[str, ...]]:
    if not words:
        return set()
    return {tuple(words[at : at + n]) for at in range(max(1, len(words) - n + 1))}


def _address(url: str) -> str:
    """Give an address without scheme, `www.`, fragment and last slash."""
    bare = url.strip().lower().partition("#")[0].rpartition("://")[2]
    return bare.removeprefix("www.").rstrip("/")
