"""Text that nobody trusts, as ids that are nothing but text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from octopus_trl.agent.calls import clean
from octopus_trl.protocols import Tokenizer

_MOST_CACHED_IDS = 1 << 20  # ids of encoded texts that are kept


class PlainText:
    """Encodes text so that no id of it is a control token or a template's tag."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._markup, self._literals = _control_tokens(tokenizer)
        self._texts: dict[str, tuple[int, ...]] = {}
        self._num_cached_ids = 0

    def encode(self, text: str) -> tuple[int, ...]:
        """Give the ids of a text without the blanks around it."""
        ids = self._texts.get(text)
        if ids is None:
            plain = clean(text).strip()
            ids = tuple(self._encode_plain(plain)) if plain else ()
            self._texts[text] = ids
            self._num_cached_ids += len(ids) + 1
            while self._num_cached_ids > _MOST_CACHED_IDS:
                oldest = next(iter(self._texts))
                self._num_cached_ids -= len(self._texts.pop(oldest)) + 1
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        # Literals are cut apart rather than encoded with `split_special_tokens`: that leaves tags
        # alone that are added but not special, as `</tool_response>` is in Qwen's vocabularies,
        # and it is a switch on a tokenizer that snippets use on other OS threads.
        ids: list[int] = []
        for part in _cut_literals(text, self._literals):
            ids += self._tokenizer.encode(part, add_special_tokens=False)
        if self._markup.isdisjoint(ids):
            return ids
        # A normaliser can make a tag of what was none; single characters cannot be one.
        ids = []
        for character in text:
            ids += self._tokenizer.encode(character, add_special_tokens=False)
        return [token for token in ids if token not in self._markup]


def _control_tokens(tokenizer: Tokenizer) -> tuple[frozenset[int], re.Pattern[str]]:
    """Find the ids that only the template and the model may write, and their literals."""
    found = {
        token_id: str(token)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if len(str(token)) > 1 and (token.special or str(token).startswith("<"))
    }
    literals = sorted(found.values(), key=len, reverse=True)
    pattern = "|".join(re.escape(literal) for literal in literals) or r"(?!)"
    return frozenset(found), re.compile(pattern)


def _cut_literals(text: str, literals: re.Pattern[str]) -> list[str]:
    """Cut text after the first character of every literal, until no part holds one."""
    parts, rest = [], text
    while (match := literals.search(rest)) is not None:
        parts.append(rest[: match.start() + 1])
        rest = rest[match.start() + 1 :]
    return [part for part in (*parts, rest) if part]


def cut(ids: Sequence[int], limit: int, sign: Sequence[int]) -> tuple[int, ...]:
    """Keep the first ids and a sign that something is missing, `limit` ids in all."""
    if limit <= len(sign):
        return tuple(ids[:limit])
    return (*ids[: limit - len(sign)], *sign)


def fit(payloads: list[tuple[int, ...]], room: int, sign: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut the longest payloads to one common length so that all fit."""
    total = sum(len(payload) for payload in payloads)
    if total <= room:
        return payloads
    kept = sorted(len(payload) for payload in payloads)
    left, limit = room, 0
    for index, length in enumerate(kept):
        share = left // (len(kept) - index)
        limit = share
        if length > share:
            break
        left -= length
    return [cut(ids, limit, sign) if len(ids) > limit else ids for ids in payloads]
