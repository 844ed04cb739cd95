"""Lengths in tokens of a pinned tokenizer, and the snippets and pages that are cut by them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from octopus_trl.errors import ConfigError, ToolError
from octopus_trl.protocols import Page

TokenEnds = Callable[[str], list[int]]
Spans = tuple[tuple[int, int], ...]


def word_ends(text: str) -> list[int]:
    """Give the end of each word: the measure of pages and snippets without a tokenizer."""
    return [match.end() for match in re.finditer(r"\S+", text)]


class TokenMeasure:
    """The measure that counts tokens; special tokens in a text count as the plain text they are.

    Attributes:
        identity: hash of the tokenizer's whole definition; part of a backend's fingerprint.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        definition = tokenizer.to_str()
        # A copy: the caller's own may be set to truncate, or to read special tokens in text.
        self._tokenizer = Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.identity = _sha256(self._tokenizer)
        self._tokenizer.encode_special_tokens = True

    def __call__(self, text: str) -> list[int]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return [end for _, end in encoded.offsets]


def token_ends(tokenizer: Any) -> TokenMeasure:
    """Give the measure that counts tokens of a fast Hugging Face tokenizer.

    Raises:
        ConfigError: the tokenizer is a slow one and knows no offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"tokenizer is {type(tokenizer).__name__}; pages are cut at token offsets, which only "
            "fast tokenizers know; load it with use_fast=True or leave the tokenizer out"
        )
    return TokenMeasure(tokenizer.backend_tokenizer)


def measure_name(ends: TokenEnds) -> str:
    """Name a measure in a fingerprint."""
    return str(getattr(ends, "identity", None) or getattr(ends, "__qualname__", repr(ends)))


class TextCutter:
    """How every backend shows a document: the snippet of its head, and its pages.

    Args:
        snippet_tokens: length of a hit's snippet, the head of the document; 0 for none.
        page_tokens: most tokens of an opened page.
        ends: measure of both lengths; `word_ends` counts words, `token_ends(tokenizer)` tokens.
    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self, *, snippet_tokens: int = 64, page_tokens: int = 8192, ends: TokenEnds = word_ends
    ) -> None:
        if snippet_tokens < 0 or page_tokens < 1:
            raise ConfigError(
                f"snippet_tokens={snippet_tokens}, page_tokens={page_tokens}: a snippet has at "
                "least 0 tokens and a page at least 1"
            )
        self.snippet_tokens, self.page_tokens, self.ends = snippet_tokens, page_tokens, ends

    @property
    def identity(self) -> dict[str, Any]:
        """What a fingerprint says of it."""
        return {
            "snippet_tokens": self.snippet_tokens,
            "page_tokens": self.page_tokens,
            "measure": measure_name(self.ends),
        }

    def snippet(self, text: str) -> str:
        """Give the head of a text, its blanks squeezed."""
        return cut_snippet(text, self.snippet_tokens, self.ends)

    def spans(self, text: str) -> Spans:
        """Give the pages of a text as ranges of characters."""
        return split_pages(text, self.page_tokens, self.ends)

    def page(self, docid: str, title: str, text: str, page: int, spans: Spans) -> Page:
        """Give one page of a document.

        Raises:
            ToolError: no such page; the text is for the model.
        """
        if not 1 <= page <= len(spans):
            raise ToolError(f"no page {page} of {docid}; its pages are 1 to {len(spans)}")
        start, end = spans[page - 1]
        return Page(docid, title, text[start:end], page, len(spans))


def check_weights(k1: float, b: float) -> None:
    """Refuse BM25 weights out of range.

    Raises:
        ConfigError: k1 is negative or not finite, or b lies outside [0, 1].
    """
    if not 0 <= k1 < float("inf") or not 0 <= b <= 1:
        raise ConfigError(f"k1={k1}, b={b}: k1 must be finite and at least 0, b lie in [0, 1]")


def unknown_document(docid: str) -> ToolError:
    """Give the message for a docid that no document has."""
    return ToolError(f"no document {docid!r}; open takes a docid that search returned")


def cut_snippet(text: str, limit: int, ends: TokenEnds) -> str:
    """Give the head of a text, at most `limit` tokens, with its blanks squeezed."""
    if limit == 0:
        return ""
    # Only as much of the head as can hold the snippet is measured; documents may be long.
    room = 16 * limit
    marks = ends(text[:room])
    while len(marks) <= limit and room < len(text):
        room *= 4
        marks = ends(text[:room])
    cut = len(text) if len(marks) <= limit else marks[limit - 1]
    return " ".join(text[:cut].split())


def split_pages(text: str, limit: int, ends: TokenEnds) -> Spans:
    """Cut a text into spans of at most `limit` tokens that join to the whole text.

    A cut falls after white space where the last eighth of the page has some. A piece is measured
    again by itself, since the tokens of a part may outnumber its share of the whole.
    """
    marks = ends(text)
    if len(marks) <= limit:
        return ((0, len(text)),)
    spans: list[tuple[int, int]] = []
    start, taken = 0, 0
    while start < len(text):
        if len(marks) - taken <= limit:
            end = len(text)
        else:
            end = max(marks[taken + limit - 1], start + 1)
            space = max(text.rfind(mark, start, end) for mark in ("\n", " "))
            if space > end - (end - start) // 8:
                end = space + 1
        while end > start + 1 and len(ends(text[start:end])) > limit:
            end -= max(1, (end - start) // 64)
        spans.append((start, end))
        start = end
        while taken < len(marks) and marks[taken] <= start:
            taken += 1
    return tuple(spans)


def _sha256(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
