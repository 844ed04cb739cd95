"""How a reader may come to see what a sibling wrote, and one probe's episode under each way.

| reading | the reader sees the sibling's text |
|---|---|
| `none` | not at all: no exchange |
| `transcript` | pasted behind its own text and prefilled: the full text |
| `mount` | by a mount; goes on past it (`position: jump`, paper Eq. 2) |
| `unshifted` | by a mount; goes on where it stood |
| `rerotate` | by a mount of keys that were copied and turned to end just before it |
| `reencode` | by a mount of a copy prefilled behind its own end |
| `splice` | by a mount, and its recurrent layers step through the text (hybrids only) |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octopus_trl.errors import ConfigError
from octopus_trl.eval.probes import Probe
from octopus_trl.trace import Segment, ThreadRecord, Trace


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read, as an episode's settings name it."""

    mounts: bool = False
    pastes: bool = False
    exchange: str = "mount"
    position: str = "jump"


READINGS: dict[str, Reading] = {
    "none": Reading(),
    "transcript": Reading(pastes=True, exchange="transcript"),
    "mount": Reading(mounts=True),
    "unshifted": Reading(mounts=True, position="unshifted"),
    "rerotate": Reading(mounts=True, position="rerotate"),
    "reencode": Reading(mounts=True, position="reencode"),
    "splice": Reading(mounts=True, exchange="splice"),
}
NONE, FULL_TEXT = "none", "transcript"  # what the others are measured between


@dataclass(frozen=True, slots=True)
class Crossing(Probe):
    """A probe of two threads at work: what each would write next if it knew nothing of the other.

    Question and answer may be empty: then only what comes next is asked.

    Attributes:
        cue: what the reader is told between its own text and its next words; the read takes effect
            here. Empty: the last token of its own text.
        sibling_next: what the sibling would write where the reader writes `own_next`.
    """

    cue: tuple[int, ...] = field(default=())
    sibling_next: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("prompt", "sibling", "own", "own_next"):
            if not getattr(self, name):
                raise ConfigError(f"probe {self.id}: {name} is empty, must be at least 1 token")
        if bool(self.question) != bool(self.answer):
            raise ConfigError(f"probe {self.id}: give question and answer, or neither")


def check_readings(names: Sequence[str]) -> None:
    """Refuse readings that nobody knows, and a comparison without its two ends.

    Raises:
        ConfigError: says which readings there are.
    """
    if unknown := [name for name in names if name not in READINGS]:
        raise ConfigError(f"readings {unknown}: must be among {', '.join(READINGS)}")
    if missing := [name for name in (NONE, FULL_TEXT) if name not in names]:
        raise ConfigError(f"readings {list(names)}: {' and '.join(missing)} must be among them")


def question_episode(probe: Probe, reading: str) -> Trace:
    """Write the probe's question out as an episode that ends with its answer."""
    return _episode(probe, reading, probe.own, probe.question, probe.answer)


def crossing_episode(probe: Probe, reading: str, said: Sequence[int]) -> Trace:
    """Write out that the reader reads the sibling and then says `said`."""
    cue = probe.cue if isinstance(probe, Crossing) else ()
    if cue:
        return _episode(probe, reading, probe.own, cue, said)
    if len(probe.own) < 2:
        raise ConfigError(f"probe {probe.id}: own is 1 token, a read inside it needs at least 2")
    return _episode(probe, reading, probe.own[:-1], probe.own[-1:], said)


def _episode(
    probe: Probe, name: str, own: Sequence[int], told: Sequence[int], said: Sequence[int]
) -> Trace:
    """Write what was given before as prompts, so that one packed pass holds it once."""
    reading = READINGS[name]
    pasted = probe.sibling if reading.pastes else ()
    segments = [
        Segment(0, 0, None, "prompt", list(probe.prompt)),
        Segment(1, 1, 0, "prompt", list(probe.sibling)),
        Segment(2, 0, 0, "prompt", list(own)),
        Segment(3, 0, 2, "tool", [*pasted, *told], [1] if reading.mounts else []),
        Segment(4, 0, 3, "action", list(said)),
    ]
    return Trace(
        episode_id=f"{probe.id}-{name}",
        prompt_id=probe.id,
        threads=[ThreadRecord(0, None, head=4), ThreadRecord(1, 0, "sibling", head=1)],
        segments=segments,
        exchange=reading.exchange,
        position=reading.position,
    ).place()
