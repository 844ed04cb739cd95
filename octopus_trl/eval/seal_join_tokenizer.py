"""The tokenizer of the seal join world: byte-level BPE of about a thousand entries.

Every word of the world is one token with and without a space before it, every capital and digit
is a token of its own (a seal of n symbols is n tokens), and the tags of Qwen3.5's template are
single tokens. Any other text falls back to bytes, so that a round trip is exact.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octopus_trl.eval import seal_join_words as words

END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
# As in Qwen3.5: control tokens are special, tags that a parser must still see are not.
CONTROL = (PAD, "<|im_start|>", END_OF_TURN)
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
)
CHAT_TEMPLATE = "qwen3_5_think_training.jinja"

# A capital or a digit alone; lower-case words with one space; punctuation with its line end.
_SPLIT = r"\p{Lu}|\p{N}| ?[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}]+| ?[^\s\p{L}\p{N}]+\n?|\n+|\s"
_SPACE, _NEWLINE = "Ġ", "Ċ"
_PUNCTUATION = (("Ċ", "Ċ"), (">", "Ċ"), ("Ġ", "|"), ("Ġ", "["))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; the same bytes every time.

    Returns a fast tokenizer with Qwen3.5's training-safe chat template as TRL ships it,
    `<|im_end|>` as end of turn and `<|endoftext|>` as padding.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [*_word_merges(_inventory()), *_PUNCTUATION]
    vocab = {token: index for index, token in enumerate(alphabet)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 17,
    )
    tokenizer.chat_template = _chat_template()
    return tokenizer


def _inventory() -> list[str]:
    every = (
        *words.ADJECTIVES,
        *words.NOUNS,
        *words.KINDS,
        *words.CLASSES,
        *words.THINGS,
        *words.STATES,
        *words.TIMES,
        *words.PROTOCOL,
    )
    return sorted(set(every))


def _word_merges(inventory: Iterable[str]) -> list[tuple[str, str]]:
    """Merge the most frequent pair, ties in lexical order, until each word is one piece; then
    join each word with a space before it.
    """
    pieces = {word: list(word) for word in inventory}
    merges: list[tuple[str, str]] = []
    while any(len(parts) > 1 for parts in pieces.values()):
        pairs: Counter[tuple[str, str]] = Counter()
        for parts in pieces.values():
            pairs.update(itertools.pairwise(parts))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts in pieces.values():
            _join(parts, best)
    return merges + [(_SPACE, word) for word in pieces]


def _join(parts: list[str], pair: tuple[str, str]) -> None:
    index = 0
    while index < len(parts) - 1:
        if (parts[index], parts[index + 1]) == pair:
            parts[index : index + 2] = [pair[0] + pair[1]]
        index += 1


def _chat_template() -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "trl is a dependency of this package"
    assert spec.submodule_search_locations, "trl is a package"
    folder = Path(spec.submodule_search_locations[0])
    return (folder / "chat_templates" / CHAT_TEMPLATE).read_text(encoding="utf-8")
