"""Settings of a rollout: limits, sampling, tools, and which system of the paper runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octopus_trl.agent.systems import MOUNTS, check_system
from octopus_trl.agent.tools import BY_NAME
from octopus_trl.errors import ConfigError
from octopus_trl.protocols import SamplingParams


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How episodes run.

    Raises:
        ConfigError: a value is outside its range, or the systems named do not go together.
    """

    exchange: str = _help(
        "mount", "how findings travel between threads: `mount`, `transcript`, `summary` or `splice`"
    )
    position: str = _help(
        "jump",
        "where a reader goes on after a mount: `jump` past it (paper Eq. 2), `unshifted` where it "
        "stood, `rerotate` there with a copy whose keys end just before it, `reencode` past a copy "
        "that is prefilled at its own end",
    )
    agent: str = _help(
        "tree",
        "shape of an episode: `tree` is threads that fork, `flat` one thread, `compact` one that "
        "sums up and starts anew when its window is full",
    )
    tools_exposed: bool = _help(True, "offer fork, read_thread, wait_threads and rewind")
    disabled_tools: tuple[str, ...] = _help(
        (), "tools that the prompt names and every call is refused (evaluation on one prompt)"
    )
    window: int = _help(32768, "own tokens of a thread since its fork (paper W), tokens")
    reserve_tokens: int | None = _help(
        None,
        "part of the window kept for the warning and the last turn, tokens; by default the "
        "smaller of 512 and window / 8",
    )
    max_children: int = _help(10, "live children of one thread (paper: worker budget)")
    max_threads: int = _help(64, "threads of an episode over its whole life, the root counted")
    max_depth: int = _help(2, "forks above a thread; 1 lets only the root fork")
    max_turns: int = _help(64, "turns of one thread, left branches counted")
    max_new_tokens: int = _help(2048, "sampled tokens of one turn")
    tool_timeout_s: float = _help(60.0, "longest run of one search or open, seconds")
    tool_workers: int = _help(
        16, "searches and opens at once; 0 runs them in place, without the time limit"
    )
    wait_timeout_s: float = _help(
        600.0, "longest wait_threads, seconds; ignored where only the logical clock counts"
    )
    page_tokens: int = _help(8192, "most tokens of one search or open result")
    search_k: int = _help(5, "hits of a search")
    temperature: float = _help(1.0, "sampling temperature; 0 takes the most likely token")
    top_p: float = _help(1.0, "kept probability mass; for evaluation")
    top_k: int = _help(0, "kept tokens, 0 for all; for evaluation")
    min_p: float = _help(0.0, "kept share of the largest probability; for evaluation")
    deterministic: bool = _help(
        True, "let effects happen by the logical clock: the same traces whatever the batch"
    )
    step: int = _help(0, "policy step, part of every seed")
    max_live_episodes: int = _help(64, "episodes that run at once on the engine")
    system_prompt: str | None = _help(None, "system text; None takes the built-in one")
    compact_tools: bool = _help(
        False, "name the tools in the system text instead of the template's JSON schemas"
    )
    template_kwargs: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "passed to the chat template, enable_thinking for example"},
    )

    def __post_init__(self) -> None:
        check_system(self)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}: must be an integer of at least {least}")
        for name in ("tool_timeout_s", "wait_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be finite and above 0")
        if isinstance(self.disabled_tools, str):
            raise ConfigError(f"disabled_tools={self.disabled_tools!r}: must be a list of names")
        if unknown := [name for name in self.disabled_tools if name not in BY_NAME]:
            raise ConfigError(f"disabled_tools={unknown!r}: the tools are {sorted(BY_NAME)}")
        if "commit" in self.disabled_tools:
            raise ConfigError("disabled_tools holds 'commit': no thread could end; leave it out")
        if self.reserve_tokens is not None and not 2 <= self.reserve_tokens <= self.window // 2:
            raise ConfigError(
                f"reserve_tokens={self.reserve_tokens!r}: must lie in 2..window/2 = "
                f"{self.window // 2}; leave it out for the default"
            )
        self.sampling(seed=0, max_tokens=1)

    def sampling(self, *, seed: int, max_tokens: int) -> SamplingParams:
        """Give the settings of one turn."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=max_tokens,
            seed=seed,
        )

    @property
    def primitives(self) -> bool:
        """Whether the prompt offers fork, read_thread, wait_threads and rewind."""
        return self.tools_exposed and self.agent == "tree"

    @property
    def reads_others(self) -> bool:
        """Whether a thread may mount what another holds, even while that one writes."""
        return self.exchange in MOUNTS and self.agent == "tree"

    @property
    def reserve(self) -> int:
        """Tokens of the window that only the last turn and the warning before it may use."""
        if self.reserve_tokens is not None:
            return self.reserve_tokens
        return min(512, self.window // 8)


_LEAST = {
    "window": 16,
    "max_children": 0,
    "max_threads": 1,
    "max_depth": 0,
    "max_turns": 1,
    "max_new_tokens": 1,
    "tool_workers": 0,
    "page_tokens": 1,
    "search_k": 1,
    "step": 0,
    "max_live_episodes": 1,
}
