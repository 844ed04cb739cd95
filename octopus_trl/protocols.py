"""What one layer may assume about another: the engine under the agent, the corpus behind the tools.

Plain Python, no torch: the agent package imports this file and never the engine, so that a
scripted engine can stand in for the real one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, Protocol, runtime_checkable

from octopus_trl.errors import ConfigError

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one turn are drawn.

    Args:
        temperature: at least 0; 0 takes the most likely token.
        top_p: kept probability mass, in (0, 1].
        top_k: number of kept tokens, 0 keeps all.
        min_p: tokens below `min_p` times the largest probability are dropped, in [0, 1).
        max_tokens: most tokens drawn, the stop token counted; at least 1.
        seed: start of this turn's own stream of uniforms; None lets the engine choose.

    Raises:
        ConfigError: a value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 1024
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigError(f"{name}={value!r}: must be a number")
        for name in ("top_k", "max_tokens", "seed"):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole and (name != "seed" or value is not None):
                raise ConfigError(f"{name}={value!r}: must be an integer")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature!r}: must be finite and at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p!r}: must lie in (0, 1]; 1 keeps every token")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k!r}: must be at least 0; 0 keeps every token")
        if not 0.0 <= self.min_p < 1.0:
            raise ConfigError(f"min_p={self.min_p!r}: must lie in [0, 1); 0 keeps every token")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens!r}: must be at least 1")


@dataclass(slots=True)
class Finished:
    """The end of one submitted turn.

    `tokens` are the sampled ids (a sampled stop id included) and `logps` their natural
    log-probabilities under the distribution they were drawn from. `reason` is "stop" when the
    last token is one of `until`, "length" at `max_tokens`, "error" when this cursor alone
    failed; `error` then says how and `tokens` holds what was drawn before.
    """

    ticket: int
    tokens: list[int]
    logps: list[float]
    reason: FinishReason
    error: str | None = None


class EngineLike(Protocol):
    """Cursors over one pool of pages, and turns sampled on many of them at once.

    After a submitted turn finishes, its cursor has grown by the submitted and by all the
    sampled tokens, a stop token included: nothing is left to be fed before the next turn. A turn
    that fails before its first draw leaves the cursor as it was.
    """

    def open(self, tokens: Sequence[int]) -> Any:
        """Return a new cursor after `tokens`."""

    def fork(self, cursor: Any) -> Any:
        """Return a new cursor at the same place; copies nothing."""

    def extend(self, cursor: Any, tokens: Sequence[int]) -> Any:
        """Append `tokens` to the cursor's chain and return it."""

    def mount(self, cursor: Any, source: Any, since: Any = None) -> Any:
        """Make readable what `source`'s chain holds after `since`, less what is visible."""

    def rewind(self, cursor: Any, num_tokens: int) -> Any:
        """Keep the first `num_tokens` tokens of the chain and drop the mounts after them.

        A mount that took effect just past the last kept token goes too.
        """

    def close(self, cursor: Any) -> None:
        """Release the cursor; pages that others reach stay."""

    def generate(
        self,
        cursors: Sequence[Any],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        until: Collection[int],
    ) -> list[tuple[list[int], list[float]]]:
        """Sample one turn on each cursor and return `(tokens, logps)` in their order."""

    def submit(
        self,
        cursor: Any,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        until: Collection[int],
    ) -> int:
        """Queue: feed `tokens` (none is legal), then sample until a stop id; gives a ticket."""

    def step(self) -> list[Finished]:
        """Run one iteration over everything queued and return the turns that ended in it."""

    def cancel(self, ticket: int) -> tuple[list[int], list[float]]:
        """Take a queued or running turn out and return what it had sampled.

        The cursor ends after exactly that; if nothing was sampled it is as before `submit`.

        Raises:
            ConfigError: no such turn is queued or running.
        """

    def stats(self) -> dict[str, Any]:
        """Return the counters."""

    @property
    def has_work(self) -> bool:
        """Whether a submitted turn has not finished."""

    @property
    def policy_version(self) -> int:
        """Optimizer step of the weights that the engine runs."""

    @property
    def num_free_pages(self) -> int:
        """Pages that no cursor holds."""


@runtime_checkable
class ChecksSystem(Protocol):
    """An engine whose model may have no meaning for some ways of reading a sibling."""

    def check_system(self, *, exchange: str, position: str) -> None:
        """Refuse such a way before anything runs.

        Raises:
            ConfigError: says which and why.
        """


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One ranked document: `snippet` is untrusted text."""

    docid: str
    score: float
    title: str
    snippet: str


@dataclass(frozen=True, slots=True)
class Page:
    """Page `page` (from 1) of `num_pages` of a document: `text` is untrusted text."""

    docid: str
    title: str
    text: str
    page: int
    num_pages: int


@runtime_checkable
class SearchBackend(Protocol):
    """A corpus that tools read. Called from several OS threads at once.

    A message for the model (unknown docid, page out of range) is a `ToolError`; anything else
    that is raised becomes a failed call of that one turn.
    """

    def search(self, query: str, k: int) -> Sequence[SearchHit]:
        """Return at most `k` hits, best first; none for an empty or unmatched query."""

    def open(self, docid: str, page: int) -> Page:
        """Return page `page` (from 1) of `docid`."""

    def fingerprint(self) -> str:
        """Hash of all that a result depends on: corpus, analyzer, parameters, lengths of texts."""


@runtime_checkable
class BindsExample(Protocol):
    """A corpus whose pages depend on the question (per-episode salts)."""

    def bind(self, example: Mapping[str, Any]) -> SearchBackend:
        """Return the backend that the episodes of this question read."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the agent uses."""

    eos_token_id: int | None
    chat_template: Any

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id, each with `special` and its text as `str`."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Encode text."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Decode ids."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render messages."""

    def parse_response(self, response: Any, **kwargs: Any) -> Any:
        """Parse a sampled turn into a message."""
