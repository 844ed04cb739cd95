"""Settings of a run: TRL's own fields, ours beside them, and what is refused by name.

Every own field carries its text, unit and paper symbol in `metadata["help"]`; `docs/config.md` is
written from there (`python -m octopus_trl.train.config_table`).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from octopus_trl.agent.config import RolloutConfig
from octopus_trl.errors import ConfigError

# What the trainer does not run: field -> (the value that stands for off, what to use instead).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_vllm": ((False,), "episodes fork, mount and rewind in our own engine in process; drop it"),
    "use_transformers_continuous_batching": (
        (False,),
        "it runs no recurrent layers and cannot fork; our engine batches all threads already",
    ),
    "use_transformers_paged": ((False,), "our engine pages already; set page_size and num_pages"),
    "generation_kwargs": ((None,), "set temperature, max_new_tokens and the eval_* fields"),
    "max_completion_length": (
        (512, None),
        "an episode has many turns; set max_new_tokens (a turn) and window (a thread)",
    ),
    "ds3_gather_for_generation": (
        (True,),
        "ranks with uneven episodes may not wait for each other's layers; drop it",
    ),
    "cache_implementation": ((None,), "the engine owns its pages; set page_size and num_pages"),
    "max_tool_calling_iterations": ((None,), "set max_turns"),
    "loss_type": (
        ("grpo",),
        (
            "a tree's loss is the mean over its own tokens and the batch's is the mean over trees, "
            "which is loss_type: grpo with one tree as one sequence"
        ),
    ),
    "scale_rewards": (
        ("none", False),
        (
            "advantages are R minus the mean of the other rollouts, not divided by a deviation; "
            "set scale_rewards: none"
        ),
    ),
    "importance_sampling_level": (
        ("token",),
        "the ratio is clipped per token (paper Eq. 9); set importance_sampling_level: token",
    ),
    "multi_objective_aggregation": (
        ("sum_then_normalize",),
        "rewards are summed by reward_weights before the baseline; drop it",
    ),
    "delta": ((None,), "only the ratio of Eq. 9 is clipped; set epsilon and epsilon_high"),
    "top_p": (
        (1.0,),
        (
            "training samples by temperature alone, the log-probs know no cut; "
            "set eval_top_p for evaluation"
        ),
    ),
    "top_k": ((0,), "training samples by temperature alone; set eval_top_k for evaluation"),
    "min_p": ((None, 0.0), "training samples by temperature alone; set eval_min_p for evaluation"),
    "repetition_penalty": ((1.0,), "training samples by temperature alone; drop it"),
    "top_entropy_quantile": ((1.0,), "every owned token carries loss; drop it"),
    "entropy_coef": ((0.0,), "the objective has no entropy term; drop it"),
    "use_adaptive_entropy": ((False,), "the objective has no entropy term; drop it"),
    "off_policy_mask_threshold": (
        (None,),
        "off-policy tokens are weighted; set importance_weight_cap",
    ),
    "sync_ref_model": ((False,), "the reference is the model with its adapter off; drop it"),
    "router_aux_loss_coef": ((None,), "no supported model has experts; drop it"),
    "use_liger_kernel": ((False,), "fast kernels are picked by octopus_trl.kernels; drop it"),
    "pad_to_multiple_of": ((None, "auto"), "packed rows are not padded; drop it"),
    "remove_unused_columns": ((False, None), "answers are columns that rewards read; drop it"),
    "auto_find_batch_size": (
        (False,),
        "a smaller batch would break groups; lower max_row_tokens, which changes no gradient",
    ),
    "fsdp": ((None, "", [], False), "use DeepSpeed ZeRO-2 or ZeRO-3 (accelerate_configs/)"),
}


def described(text: str, unit: str = "-", symbol: str = "-") -> dict[str, str]:
    """Give the metadata of a field of ours: text, unit and paper symbol in one help text.

    The argument parser takes no other keys than its own, so they share one.
    """
    return {"help": f"{text} [unit: {unit}; paper: {symbol}]"}


def own(default: Any, text: str, unit: str = "-", symbol: str = "-") -> Any:
    """Declare a field of ours with its help text."""
    return field(default=default, metadata=described(text, unit, symbol))


@dataclass
class OctopusGRPOConfig(GRPOConfig):
    """`GRPOConfig` for tree episodes (DESIGN §5).

    `per_device_train_batch_size` counts episodes and holds whole groups of `num_generations`.

    Raises:
        ConfigError: a value is outside its range, or a field of TRL asks for what is not run
            here; says what to use instead.
    """

    # TRL's names, our values.
    loss_type: str = field(
        default="grpo",
        metadata={"help": "Mean over the owned tokens of a tree, then over trees; others refused."},
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Advantages are not divided by a standard deviation; others refused."},
    )
    logging_steps: float = field(
        default=1, metadata={"help": "Log every so many update steps; ours are long."}
    )

    # Agent: the names of `RolloutConfig`, which checks them.
    agent: str = own("tree", "Shape of an episode: `tree` is threads that fork.")
    exchange: str = own("mount", "How findings travel between threads.")
    position: str = own("jump", "Where a reader goes on after a mount.", "-", "Eq. 2")
    mount_layers: str = own(
        "attention",
        "Attention layers that see mounts: `attention` (all, hybrids only) or indices like `3,7`.",
        "layer index",
    )
    tools_exposed: bool = own(True, "Whether the prompt offers fork, read_thread, wait and rewind.")
    disabled_tools: list[str] | None = field(
        default=None,
        metadata=described("Tools that the prompt names and every call is refused."),
    )
    deterministic: bool = own(
        True, "Order events by the logical clock alone, so that a seed gives one trace."
    )
    window: int = own(32_768, "Own tokens of a thread since its fork.", "tokens", "W")
    reserve_tokens: int | None = own(
        None,
        "Part of the window kept for the warning and the last turn; none takes the smaller of 512 "
        "and window / 8.",
        "tokens",
    )
    max_new_tokens: int = own(2048, "Sampled tokens of one turn.", "tokens")
    max_turns: int = own(64, "Turns of one thread, left branches counted.", "turns")
    max_children: int = own(10, "Live children of one thread.", "threads", "worker budget")
    max_threads: int = own(64, "Threads of an episode over its whole life.", "threads")
    max_depth: int = own(2, "Forks above a thread; 1 lets only the root fork.", "forks", "depth")
    max_live_episodes: int = own(64, "Episodes that run at once on the engine.", "episodes")
    page_tokens: int = own(8192, "Longest search or open result.", "tokens")
    search_k: int = own(5, "Hits of one search.", "documents", "k")
    tool_timeout_s: float = own(60.0, "Longest run of one search or open.", "s")
    tool_workers: int = own(16, "Searches and opens at once; 0 runs them in place.", "OS threads")
    wait_timeout_s: float = own(
        600.0, "Longest wait_threads; ignored where only the logical clock counts.", "s"
    )
    system_prompt: str | None = own(None, "System text; none takes the built-in one.")
    compact_tools: bool = own(
        False, "Name the tools in the system text instead of the template's JSON schemas."
    )

    # Engine
    page_size: int = own(16, "Token slots of one KV page.", "tokens")
    num_pages: int | None = own(None, "Pages of the pool; none takes what memory allows.", "pages")
    num_states: int | None = own(
        None, "Slots of recurrent state; none takes what memory allows.", "slots"
    )

    # Packing
    max_row_tokens: int = own(
        131_072, "Unique tokens of one packed row; a tree is never split.", "tokens"
    )
    max_path_tokens: int | None = own(
        None,
        "Tokens of one chain from root to leaf, mounts apart; a tree with a longer one is left "
        "out of the update and counted.",
        "tokens",
    )
    detach_mounts: bool = own(
        False, "Ablation: no gradient from a reader into what it mounted.", "-", "-"
    )
    drop_mounts: bool = own(
        False, "Ablation: train with mount edges removed, recorded positions kept.", "-", "-"
    )

    # Objective
    importance_weight_cap: float | None = own(
        2.0,
        "Cap of the per-token weight p_train/p_sampled; none switches the weights off.",
        "ratio",
        "C",
    )

    # Evaluation
    eval_temperature: float | None = own(
        None, "Temperature while evaluating; none takes `temperature`, 0 the best token.", "-", "T"
    )
    eval_top_p: float = own(1.0, "Kept probability mass while evaluating.", "probability")
    eval_top_k: int = own(0, "Kept tokens while evaluating, 0 keeps all.", "tokens")
    eval_min_p: float = own(
        0.0,
        "Tokens below this times the largest probability are dropped while evaluating.",
        "probability",
    )

    # Records
    trace_every: int = own(
        1, "Write the traces of every n-th generation under traces/; 0 writes none.", "generations"
    )

    def __post_init__(self) -> None:
        self._refuse()
        self.mount_layers = parse_mount_layers(self.mount_layers)
        self._check_ranges()
        self.rollout_config()
        self.rollout_config(training=False)
        self._check_group_size("per_device_train_batch_size", self.num_generations)
        if self.eval_strategy not in ("no", False, None):  # a bare `no` is false in YAML
            group = self.num_generations_eval or self.num_generations
            self._check_group_size("per_device_eval_batch_size", group)
        super().__post_init__()

    @property
    def mounts(self) -> str:
        """What the packed pass does with mount edges: "live", "detached" or "dropped"."""
        if self.drop_mounts:
            return "dropped"
        return "detached" if self.detach_mounts else "live"

    def rollout_config(self, *, step: int = 0, training: bool = True) -> RolloutConfig:
        """Give what the agent needs of these settings.

        Args:
            step: part of every seed.
            training: sample by `temperature` alone, else by the eval_* fields.
        Raises:
            ConfigError: a limit is outside its range, or a system is not there yet.
        """
        values = {name: getattr(self, name) for name in AGENT_FIELDS}
        values["disabled_tools"] = tuple(self.disabled_tools or ())
        values["template_kwargs"] = dict(self.chat_template_kwargs or {})
        if training:
            values["temperature"] = self.temperature
        else:
            given = self.eval_temperature
            values["temperature"] = self.temperature if given is None else given
            values |= {"top_p": self.eval_top_p, "top_k": self.eval_top_k, "min_p": self.eval_min_p}
        return RolloutConfig(step=step, **values)

    def _refuse(self) -> None:
        for name, (allowed, instead) in REFUSED.items():
            value = getattr(self, name)
            if not any(value is each or value == each for each in allowed):
                raise ConfigError(f"{name}={value!r} is not run by OctopusGRPOTrainer: {instead}")

    def _check_ranges(self) -> None:
        if self.num_generations is None or self.num_generations < 2:
            raise ConfigError(
                f"num_generations={self.num_generations}: must be at least 2, the baseline of a "
                "rollout is the mean of the others"
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature}: must be above 0 to explore; set eval_temperature "
                "for greedy evaluation"
            )
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if self.trace_every < 0:
            raise ConfigError(f"trace_every={self.trace_every}: must be at least 0; 0 writes none")
        if self.detach_mounts and self.drop_mounts:
            raise ConfigError(
                "detach_mounts and drop_mounts are both true: a dropped edge has no gradient to "
                "detach; set one"
            )
        if self.num_pages is not None and self.num_pages * self.page_size < self.window:
            raise ConfigError(
                f"num_pages={self.num_pages} of page_size={self.page_size} hold "
                f"{self.num_pages * self.page_size} tokens, one thread may need window="
                f"{self.window}: raise num_pages or lower window"
            )
        cap = self.importance_weight_cap
        if cap is not None and not cap > 0:
            raise ConfigError(
                f"importance_weight_cap={cap}: must be above 0, or none to switch weights off"
            )
        if self.max_path_tokens is not None and self.max_path_tokens > self.max_row_tokens:
            raise ConfigError(
                f"max_path_tokens={self.max_path_tokens} exceeds max_row_tokens="
                f"{self.max_row_tokens}: a path of that length could never be packed; raise the row"
            )

    def _check_group_size(self, name: str, group: int | None) -> None:
        """Refuse a batch size that would tear a group over micro-steps or ranks."""
        size, group = getattr(self, name), group or 1
        if size % group:
            raise ConfigError(
                f"{name}={size}: must be a multiple of the {group} rollouts of a question, a rank "
                f"holds whole groups; set {max(1, size // group) * group} (memory is bounded by "
                "max_row_tokens, not by this)"
            )


# Fields that go to `RolloutConfig` as they are.
AGENT_FIELDS = (
    "agent",
    "exchange",
    "position",
    "tools_exposed",
    "deterministic",
    "window",
    "reserve_tokens",
    "max_new_tokens",
    "max_turns",
    "max_children",
    "max_threads",
    "max_depth",
    "max_live_episodes",
    "page_tokens",
    "search_k",
    "tool_timeout_s",
    "tool_workers",
    "wait_timeout_s",
    "system_prompt",
    "compact_tools",
)
_AT_LEAST_ONE = (
    "page_size",
    "num_pages",
    "num_states",
    "max_row_tokens",
    "max_path_tokens",
    "num_generations_eval",
)


def parse_mount_layers(value: Any) -> Any:
    """Read "attention", "3,7" or a list of indices.

    Raises:
        ConfigError: anything else.
    """
    if value == "attention":
        return value
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return [int(part) for part in parts]
    except (TypeError, ValueError):
        raise ConfigError(
            f"mount_layers={value!r}: must be attention or layer indices such as 3,7"
        ) from None


def own_fields() -> list[tuple[str, Any, str, str, str]]:
    """List our fields as (name, default, text, unit, paper symbol), in order of declaration."""
    rows = []
    for each in fields(OctopusGRPOConfig):
        text, bracket, rest = each.metadata.get("help", "").rpartition(" [unit: ")
        if not bracket or each.default is MISSING:
            continue
        unit, _, symbol = rest.removesuffix("]").partition("; paper: ")
        rows.append((each.name, each.default, text, unit, symbol))
    return rows
