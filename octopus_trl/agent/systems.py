"""Which system of the paper runs: how findings travel, where readers go on, shape of an episode.

`exchange` says what `read_thread` does, and whether a fork shares its parent's text:

- `mount`: the sibling's span becomes readable where it lies (DESIGN §2).
- `transcript`: the sibling's span is decoded and pasted as tool text; nothing is mounted, and the
  text counts against the reader's window. It is encoded again as plain text, so a control token in
  it is spelled out: its ids could not be inserted as they are without closing the tool result.
- `summary`: a child starts in a fresh context, a root of its own with the system text and its task;
  reading it gives its status and its commit text.

`position` says where a reader goes on after a mount: `jump` past the span's highest position (paper
Eq. 2), `unshifted` where it stood, `reencode` past a copy of the span that is prefilled behind the
reader's own end and read instead; spans read at one boundary follow one another in reading order.

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

EXCHANGES = ("mount", "transcript", "summary")
POSITIONS = ("jump", "unshifted", "reencode")
AGENTS = ("tree", "flat", "compact")

_MISSING = {
    "splice": "recurrent layers are not stepped through a sibling's text; set exchange: mount",
    "rerotate": "mounted keys are not copied and rotated; set position: jump",
}


def check_system(config: RolloutConfig) -> None:
    """Check that the three settings name a system that runs and that means something.

    Raises:
        ConfigError: a value is unknown or not there, or two do not go together.
    """
    for name, known in (("exchange", EXCHANGES), ("position", POSITIONS), ("agent", AGENTS)):
        value = getattr(config, name)
        if value not in known and value in _MISSING:
            raise ConfigError(f"{name}={value!r} is not run by this version: {_MISSING[value]}")
        if value not in known:
            raise ConfigError(f"{name}={value!r}: must be one of {', '.join(known)}")
    if config.position != "jump" and config.exchange != "mount":
        raise ConfigError(
            f"position={config.position!r} with exchange={config.exchange!r}: nothing is mounted, "
            "so no reader has a place to go on from; leave position out or set exchange: mount"
        )
    if config.agent == "tree":
        return
    for name, default in (("exchange", "mount"), ("position", "jump")):
        if getattr(config, name) != default:
            raise ConfigError(
                f"agent={config.agent!r} with {name}={getattr(config, name)!r}: one thread has "
                f"no sibling to read; leave {name} out or set agent: tree"
            )
