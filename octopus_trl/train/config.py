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
from octopus_trl.train.ranges import check_ranges
from octopus_trl.train.refused import REFUSED
from octopus_trl.train.rows import TokenRule
from octopus_trl.train.zero import prepare_plugin


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
    agent: str = own(
        "tree",
        "Shape of an episode: `tree` is threads that fork, `flat` one thread, `compact` one that "
        "sums up and starts anew when its window is full.",
    )
    exchange: str = own(
        "mount",
        "How findings travel between threads: `mount`, `transcript`, `summary` or `splice`.",
    )
    position: str = own(
        "jump",
        "Where a reader goes on after a mount: `jump` past it, `unshifted` where it stood, "
        "`rerotate` there with a copy whose keys end just before it, `reencode` past a copy that "
        "is prefilled at its own end.",
        "-",
        "Eq. 2",
    )
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
    mlp_tile_tokens: int | None = own(
        None,
        "Tokens of a packed row that an MLP works on at once, computed again in the backward pass: "
        "longer rows fit, and an update takes a third more time; none takes rows whole.",
        "tokens",
    )
    activation_offloading: bool = own(
        False,
        "Keep the inputs of checkpointed layers in pinned host memory between the passes: longer "
        "rows fit; with `gradient_checkpointing`.",
    )
    fused_layers: bool = own(
        True,
        "On a GPU, run norms, SwiGLU and adapters of an update in one kernel each way; results "
        "are those of the modules up to the rounding of an adapter's sum.",
    )
    detach_mounts: bool = own(
        False, "Ablation: no gradient from a reader into what it mounted.", "-", "-"
    )
    drop_mounts: bool = own(
        False, "Ablation: train with mount edges removed, recorded positions kept.", "-", "-"
    )

    # Objective
    credit: str = own(
        "outcome",
        "Credit inside a tree: `outcome` gives every token the episode's advantage, "
        "`leave_one_branch_out` adds to a branch's tokens what the episode loses without it.",
    )
    credit_estimator: str = own(
        "score",
        "How that loss is estimated: `score` the first gold answer again without the branch's "
        "mounts, or `resample` the root's turns after its first mount and reward the new answer.",
    )
    credit_weight: float = own(0.1, "Weight of branch credit.", "reward", "λ")
    token_count: str = own(
        "owner",
        "How often a sampled token counts: once (`owner`), or, as the biased baseline, once for "
        "each leaf below it (`per_leaf`).",
        "-",
        "m, Eq. 6",
    )
    rewound_loss: bool = own(
        True, "Whether tokens on a branch that a rewind left carry loss; false is an ablation."
    )
    old_logps: str = own(
        "recompute",
        "What the ratio divides by where a generation outlives an update: `recompute` scores it "
        "with the weights that drew it, `rollout` takes the log-probs as they were drawn.",
        "-",
        "π_old",
    )
    importance_weight_cap: float | None = own(
        2.0,
        "Cap of the weight p_train/p_sampled; none switches the weights off.",
        "ratio",
        "C",
    )
    importance_weight_level: str = own(
        "token",
        "One weight a `token`, or one a tree (`sequence`), which collapses on long trees.",
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

    # Hub and records
    push_attempts: int = own(3, "Tries of each push to the hub; none is fatal.", "tries")
    push_wait_s: float = own(5.0, "Wait before the second try, doubled for each later one.", "s")
    peak_tflops: float | None = own(
        None,
        "Peak of one device that MFU divides by; none looks the device up and, where it is not "
        "known, reports no MFU.",
        "TFLOP/s",
    )
    trace_every: int = own(
        1, "Write the traces of every n-th generation under traces/; 0 writes none.", "generations"
    )

    def __post_init__(self) -> None:
        self._refuse()
        self.mount_layers = parse_mount_layers(self.mount_layers)
        check_ranges(self)
        self.rollout_config()
        self.rollout_config(training=False)
        self._check_group_size("per_device_train_batch_size", self.num_generations)
        if self.eval_strategy not in ("no", False, None):  # a bare `no` is false in YAML
            group = self.num_generations_eval or self.num_generations
            self._check_group_size("per_device_eval_batch_size", group)
        super().__post_init__()
        if self.deepspeed_plugin is not None:
            prepare_plugin(self.deepspeed_plugin, use_cpu=self.use_cpu)

    @property
    def mounts(self) -> str:
        """What the packed pass does with mount edges: "live", "detached" or "dropped"."""
        if self.drop_mounts:
            return "dropped"
        return "detached" if self.detach_mounts else "live"

    @property
    def token_rule(self) -> TokenRule:
        """How often each sampled token counts in the loss."""
        return TokenRule(self.token_count, self.rewound_loss)

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


def parse_mount_layers(value: Any) -> Any:
    """Read "attention", "3,7" or a list of indices.

    Raises:
        ConfigError: anything else.
    """
    if value == "attention":
        return value
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if any(isinstance(part, (bool, float)) for part in parts):
            raise TypeError
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
