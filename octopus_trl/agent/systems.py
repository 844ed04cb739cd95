"""Which system of the paper runs: how findings travel, where readers go on, shape of an episode.

`exchange` says what `read_thread` does, and whether a fork shares its parent's text:

- `mount`: the sibling's span becomes readable where it lies (DESIGN §2).
- `transcript`: the sibling's span is decoded and pasted as tool text; nothing is mounted, and the
  text counts against the reader's window. It is encoded again as plain text, so a control token in
  it is spelled out: its ids could not be inserted as they are without closing the tool result.
- `summary`: a child starts in a fresh context, a root of its own with the system text and its task;
  reading it gives its status and its commit text.
- `splice`: a mount on every layer. Recurrent layers step through what they were given for the span,
  from the reader's state, before its next token; spans read at one boundary follow one another in
  reading order, and what those steps put out is dropped.

`position` says where a reader goes on after a mount: `jump` past the span's highest position (paper
Eq. 2), `unshifted` where it stood, `reencode` past a copy of the span that is prefilled behind the
reader's own end and read instead; spans read at one boundary follow one another in reading order.
`rerotate` goes on where it stood, too, and reads a copy whose keys were rotated: all that is read
at one boundary moves by one distance, so that its highest position is the one just before the
reader's next.

`agent` says what may be written at all:

- `tree`: threads that fork.
- `flat`: one thread and no primitives but `commit`, in any window.
- `compact`: as `flat`; when the window is full the thread is asked for a summary and goes on after
  a new prompt, a new root of the trace: the question and below it that summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octopus_trl.errors import ConfigError

if TYPE_CHECKING:
    from octopus_trl.agent.config import RolloutConfig

EXCHANGES = ("mount", "transcript", "summary", "splice")
MOUNTS = ("mount", "splice")  # exchanges whose reads are mounts
POSITIONS = ("jump", "unshifted", "rerotate", "reencode")
AGENTS = ("tree", "flat", "compact")


def check_system(config: RolloutConfig) -> None:
    """Check that the three settings name a system that runs and that means something.

    Raises:
        ConfigError: a value is unknown, or two do not go together.
    """
    for name, known in (("exchange", EXCHANGES), ("position", POSITIONS), ("agent", AGENTS)):
        value = getattr(config, name)
        if value not in known:
            raise ConfigError(f"{name}={value!r}: must be one of {', '.join(known)}")
    if config.position != "jump" and config.exchange not in MOUNTS:
        raise ConfigError(
            f"position={config.position!r} with exchange={config.exchange!r}: nothing is mounted, "
            "so no reader has a place to go on from; leave position out or set exchange: mount"
        )
    if config.position == "reencode" and config.exchange == "splice":
        raise ConfigError(
            "position='reencode' with exchange='splice': text that is prefilled again is not the "
            "sibling's, so there is nothing of its to step through; set exchange: mount, or "
            "position: jump, unshifted or rerotate"
        )
    if config.agent == "tree":
        return
    for name, default in (("exchange", "mount"), ("position", "jump")):
        if getattr(config, name) != default:
            raise ConfigError(
                f"agent={config.agent!r} with {name}={getattr(config, name)!r}: one thread has "
                f"no sibling to read; leave {name} out or set agent: tree"
            )
