"""Error types of the project, named by the boundary that they guard.

Settings and files that are wrong raise at once and say the value, the rule and the fix. What a
model or a tool gets wrong is a `ToolError` and becomes text for its thread. Expected run-time
conditions (a pool that ran out) are typed, so that a scheduler can answer them.
"""

from __future__ import annotations


class OctopusError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(OctopusError, ValueError):
    """A setting or an input file is wrong; the message says the value, the rule and the fix."""


class TraceError(OctopusError, ValueError):
    """A trace breaks a rule of its own record; the message says the segment, the rule and both
    values.
    """


class RewardError(OctopusError, ValueError):
    """A reward function gave a number that no episode can be trained on."""


class RankFailed(OctopusError, RuntimeError):
    """Another rank failed; the message says which, at what and why."""


class ServiceError(OctopusError, RuntimeError):
    """A server refused a request.

    Attributes:
        status: the HTTP status; None where no answer came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServiceDown(ServiceError):
    """A server cannot be reached or is overloaded, after every retry.

    Attributes:
        retry_after_s: seconds that the server asked to wait, 0 where it did not say.
    """

    def __init__(self, message: str, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message, status)
        self.retry_after_s = retry_after_s


class PoolExhausted(OctopusError, RuntimeError):
    """A pool has too little room even after eviction.

    Attributes:
        needed, free, evictable: units of the pool (pages or state slots).
    """

    unit = "units"

    def __init__(self, needed: int, free: int, evictable: int = 0, hint: str = "") -> None:
        self.needed, self.free, self.evictable = needed, free, evictable
        text = f"{needed} {self.unit} needed, {free} free and {evictable} evictable"
        super().__init__(f"{text}; {hint}" if hint else text)


class PagesExhausted(PoolExhausted):
    """The page pool has too few free pages for this call; nothing was changed."""

    unit = "pages"


class StatesExhausted(PoolExhausted):
    """The state pool has too few free slots for this call; nothing was changed."""

    unit = "state slots"


class StaleVersion(OctopusError, RuntimeError):
    """Pages or states of one policy version would be used under another."""


class ClosedCursor(OctopusError, RuntimeError):
    """A cursor was used after `close`."""


class IntegrityError(OctopusError, RuntimeError):
    """An invariant of the engine's own bookkeeping is broken."""


class ToolError(OctopusError):
    """A tool call is malformed or refused; its text goes to the thread that called."""


class BudgetExceeded(OctopusError):
    """Tokens, threads, turns or seconds of a thread or an episode ran out."""
