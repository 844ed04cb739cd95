"""Questions whose answer only a sibling's text holds: what a read is worth, by likelihood.

A probe is a reader and a sibling on one prompt. The sibling wrote down facts, the reader went on
with facts of its own, then it is asked for one of the sibling's. How much a mount, a pasted
transcript or nothing at all says of the answer is read off the answer's log-probability, without
sampling and with any causal LM.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octopus_trl.errors import ConfigError

Encode = Callable[[str], Sequence[int]]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words(
    """Alder Bramley Carrow Dunmore Eskdale Farley Glenrow Harwick Ingleby Jarrow Kelso Lorton
    Marden Norley Orwell Penrith Quorn Rothbury Selby Thirsk Ulverton Varley Whitby Yarrow"""
)
_KEEPERS = _words(
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Lukas Marta Nils"
)
_SYMBOLS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


@dataclass(frozen=True, slots=True)
class Probe:
    """One question, as token ids; the parts are joined without anything between.

    Attributes:
        prompt: what reader and sibling were both forked from.
        sibling: what the sibling wrote; the answer is in it.
        own: what the reader wrote meanwhile.
        question: what the reader is told after it has read the sibling.
        answer: what it should say then.
        own_next: how the reader would go on with its own work instead; may be empty.
    """

    id: str
    prompt: tuple[int, ...]
    sibling: tuple[int, ...]
    own: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    own_next: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "sibling", "own", "question", "answer"):
            if not getattr(self, name):
                raise ConfigError(f"probe {self.id}: {name} is empty, must be at least 1 token")

    @property
    def sibling_ahead(self) -> bool:
        """Whether the sibling's end is past the reader's next position."""
        return len(self.sibling) > len(self.own)


def station_probes(
    encode: Encode,
    num: int,
    *,
    seed: int = 0,
    sibling_facts: int = 6,
    own_facts: int = 6,
    begin: Sequence[int] = (),
) -> list[Probe]:
    """Draw probes about stations, each with a keeper and a code that no text predicts.

    Args:
        encode: text -> token ids, without special tokens.
        sibling_facts, own_facts: lines that each of the two wrote; more of the sibling's put it
            ahead of the reader, fewer behind.
        begin: token ids before every prompt (a begin-of-text token where the model wants one).
    Raises:
        ConfigError: a count is outside its range.
    """
    if num < 1:
        raise ConfigError(f"{num} probes: must be at least 1")
    if sibling_facts < 1 or own_facts < 1 or sibling_facts + own_facts > len(_NAMES) - 3:
        raise ConfigError(
            f"{sibling_facts} facts of the sibling and {own_facts} of the reader: each must be at "
            f"least 1, together at most {len(_NAMES) - 3}"
        )
    draw = random.Random(f"stations-{seed}")
    probes = []
    for index in range(num):
        names = draw.sample(_NAMES, sibling_facts + own_facts + 3)
        codes = {name: _code(draw) for name in names}
        lines = {
            name: f"Station {name}: keeper {draw.choice(_KEEPERS)}, code {code}.\n"
            for name, code in codes.items()
        }
        there, here, (more, north, south) = (
            names[:sibling_facts],
            names[sibling_facts:-3],
            names[-3:],
        )
        asked = draw.choice(there)
        parts = {
            "prompt": "Survey notes. Every worker lists the stations of one district.\n",
            "sibling": f"\nDistrict {north}:\n" + "".join(lines[name] for name in there),
            "own": f"\nDistrict {south}:\n" + "".join(lines[name] for name in here),
            "question": f"\nQuestion: What is the code of station {asked}?\n"
            f"Answer: The code of station {asked} is",
            "answer": f" {codes[asked]}.",
            "own_next": lines[more],
        }
        ids = {name: tuple(encode(text)) for name, text in parts.items()}
        ids["prompt"] = (*begin, *ids["prompt"])
        probes.append(Probe(id=f"station-{seed}-{index}", **ids))
    return probes


def read_probes(path: Path, encode: Encode, *, begin: Sequence[int] = ()) -> Iterator[Probe]:
    """Read a user's probes, one JSON object a line.

    Fields `text` (what the sibling wrote), `question` and `answer`; `prompt`, `own` and `own_next`
    where there are any. A space goes before an answer that has none, as text goes on.

    Raises:
        ConfigError: the file or a line of it cannot be used; says which and why.
    """
    known = {"text": "sibling", "question": "question", "answer": "answer"}
    optional = {"prompt": "\n", "own": "\n", "own_next": ""}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not any(line.strip() for line in lines):
        raise ConfigError(f"{path}: holds no probe; give one JSON object a line")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: is no JSON object ({error})") from error
        fields = {*known, *optional}
        if not isinstance(record, dict) or not set(known) <= set(record) <= fields:
            raise ConfigError(
                f"{path}:{number}: needs the fields {', '.join(known)}, may have "
                f"{', '.join(optional)} and no other"
            )
        if wrong := [name for name, text in record.items() if not isinstance(text, str)]:
            raise ConfigError(f"{path}:{number}: {', '.join(wrong)} must be text")
        texts = {known.get(name, name): text for name, text in (optional | record).items()}
        if not texts["answer"].startswith((" ", "\n")):
            texts["answer"] = " " + texts["answer"]
        ids = {name: tuple(encode(text)) for name, text in texts.items()}
        ids["prompt"] = (*begin, *ids["prompt"])
        yield Probe(id=f"{path.stem}-{number}", **ids)


def _code(draw: random.Random) -> str:
    """Give six symbols in two halves: no word, no number, nothing to guess."""
    symbols = "".join(draw.choices(_SYMBOLS, k=6))
    return f"{symbols[:3]}-{symbols[3:]}"
