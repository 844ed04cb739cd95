"""A corpus of any size with the word statistics of web pages, for measuring the build of an index.

python -m tests.agent.large_corpus FOLDER --documents 100195
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

WORDS_A_DOCUMENT = 5_179  # mean of BrowseComp-Plus (arXiv 2508.06600, section 3.4)
VOCABULARY = 3_000_000
_LETTERS = "etaoinshrdlucmfwygpbvkxjqz"


def write_large_corpus(
    folder: Path,
    documents: int,
    *,
    words: int = WORDS_A_DOCUMENT,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> Path:
    """Write `corpus.jsonl` of made-up words: frequencies by Zipf, lengths log-normal.

    A third of a document's words come from topics of its own (bursts), as a page repeats its names.

    Args:
        words: mean words of a document.
        vocabulary: different words that may come up.
    """
    generator = np.random.default_rng(seed)
    known = np.array([_word(rank) for rank in range(vocabulary)], dtype=object)
    weights = 1.0 / (np.arange(vocabulary) + 2.7)
    ladder = np.cumsum(weights / weights.sum())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.jsonl"
    spread = 0.6
    with path.open("w", encoding="utf-8") as stream:
        for number in range(documents):
            mean = np.log(words) - spread**2 / 2
            count = max(20, int(generator.lognormal(mean, spread)))
            ranks = np.searchsorted(ladder, generator.random(count))
            topics = generator.integers(vocabulary, size=40)
            burst = generator.random(count) < 1 / 3
            ranks[burst] = topics[generator.integers(len(topics), size=int(burst.sum()))]
            text = " ".join(known[np.minimum(ranks, vocabulary - 1)])
            stream.write(json.dumps({"docid": str(number), "text": text}) + "\n")
    return path


def _word(rank: int) -> str:
    """Give the word of a rank: its digits in base 26 and two more, as long as words of pages."""
    letters = []
    rank = (rank + 1) * 676 + rank * 7919 % 676
    while rank:
        rank, at = divmod(rank, 26)
        letters.append(_LETTERS[at])
    return "".join(letters)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=100_195)
    parser.add_argument("--words", type=int, default=WORDS_A_DOCUMENT)
    asked = parser.parse_args()
    written = write_large_corpus(asked.folder, asked.documents, words=asked.words)
    sys.stdout.write(f"{written}\n")
