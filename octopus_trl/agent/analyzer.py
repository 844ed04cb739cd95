"""One analyzer for every backend: what counts as an index term.

A backend that sends terms to a server sends these, so that no server's own analyzer takes part.
"""

from __future__ import annotations

import re
import threading

import Stemmer

ANALYZER = "lower, \\w+, Lucene's 33 stop words, Porter"
_WORD = re.compile(r"\w+")
_STOP = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)
STOP_WORDS = frozenset(_STOP.split(" "))
_local = threading.local()


def analyze(text: str) -> list[str]:
    """Split a text into index terms: lower-cased words less stop words, stemmed by Porter."""
    return _stemmer().stemWords(words(text))


def words(text: str) -> list[str]:
    """Split a text into lower-cased words less stop words: `analyze` before its stemmer."""
    return [word for word in split(text) if word not in STOP_WORDS]


def split(text: str) -> list[str]:
    """Split a text into lower-cased words, stop words included."""
    return _WORD.findall(text.lower())


def stem(word: str) -> str:
    """Give the term of one word."""
    return _stemmer().stemWord(word)


def _stemmer() -> Stemmer.Stemmer:
    stemmer = getattr(_local, "stemmer", None)
    if stemmer is None:  # PyStemmer's objects must not be shared between threads
        stemmer = _local.stemmer = Stemmer.Stemmer("porter")
    return stemmer
