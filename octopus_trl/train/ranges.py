"""What values settings may take, each rule one error that says the fix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from octopus_trl.agent.systems import MOUNTS
from octopus_trl.errors import ConfigError
from octopus_trl.train.rows import TOKEN_COUNTS

if TYPE_CHECKING:
    from octopus_trl.train.config import OctopusGRPOConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "credit": ("outcome", "leave_one_branch_out"),
    "credit_estimator": ("score", "resample"),
    "token_count": TOKEN_COUNTS,
    "old_logps": ("recompute", "rollout"),
    "importance_weight_level": ("token", "sequence"),
}
_AT_LEAST_ONE = (
    "page_size",
    "num_pages",
    "num_states",
    "max_row_tokens",
    "max_path_tokens",
    "mlp_tile_tokens",
    "num_generations_eval",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "steps_per_generation",
    "push_attempts",
)
_NOT_NEGATIVE = (
    "adam_epsilon",
    "beta",
    "credit_weight",
    "dataloader_num_workers",
    "epsilon_high",
    "learning_rate",
    "max_grad_norm",
    "push_wait_s",
    "trace_every",
    "weight_decay",
)
_BELOW_ONE = ("adam_beta1", "adam_beta2")


def check_ranges(config: OctopusGRPOConfig) -> None:
    """Check every value that a rule of ours holds.

    Raises:
        ConfigError: one is outside its range, or two do not go together.
    """
    _check_numbers(config)
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(
                f"{name}={getattr(config, name)!r}: must be one of {', '.join(choices)}"
            )
    _check_pairs(config)


def check_seeds(seed: int, data_seed: int | None) -> None:
    """Refuse seeds that numpy's generator does not take.

    Raises:
        ConfigError: one is outside 0 to 2^32 - 1.
    """
    for name, value in (("seed", seed), ("data_seed", data_seed)):
        if value is not None and not 0 <= value < 2**32:
            raise ConfigError(f"{name}={value}: must lie in 0..{2**32 - 1}")


def _check_numbers(config: OctopusGRPOConfig) -> None:
    if config.num_generations is None or config.num_generations < 2:
        raise ConfigError(
            f"num_generations={config.num_generations}: must be at least 2, the baseline of a "
            "rollout is the mean of the others"
        )
    if not 0 < config.temperature < math.inf:
        raise ConfigError(
            f"temperature={config.temperature}: must be above 0 to explore, and finite; set "
            "eval_temperature for greedy evaluation"
        )
    for name in _AT_LEAST_ONE:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            hint = "; 0 writes none" if name == "trace_every" else ""
            raise ConfigError(f"{name}={value}: must be at least 0 and finite{hint}")
    for name in _BELOW_ONE:
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)}: must lie in [0, 1)")
    if not 0 <= config.epsilon < 1:
        raise ConfigError(
            f"epsilon={config.epsilon}: must lie in [0, 1), the ratio is clipped to at least "
            "1 - epsilon"
        )
    check_seeds(config.seed, config.data_seed)
    if config.max_steps == 0 or (config.max_steps < 0 and not config.num_train_epochs > 0):
        raise ConfigError(
            f"max_steps={config.max_steps}, num_train_epochs={config.num_train_epochs}: give at "
            "least one step, or max_steps -1 and epochs above 0"
        )
    _check_positive(config, "importance_weight_cap", "none to switch weights off")
    _check_positive(config, "peak_tflops", "none to look the device up")
    for weight in config.reward_weights or ():
        if not math.isfinite(weight):
            raise ConfigError(f"reward_weights={config.reward_weights}: must be finite numbers")


def _check_positive(config: OctopusGRPOConfig, name: str, otherwise: str) -> None:
    value: Any = getattr(config, name)
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name}={value}: must be above 0 and finite, or {otherwise}")


def _check_pairs(config: OctopusGRPOConfig) -> None:
    if config.detach_mounts and config.drop_mounts:
        raise ConfigError(
            "detach_mounts and drop_mounts are both true: a dropped edge has no gradient to "
            "detach; set one"
        )
    if config.num_pages is not None and config.num_pages * config.page_size < config.window:
        raise ConfigError(
            f"num_pages={config.num_pages} of page_size={config.page_size} hold "
            f"{config.num_pages * config.page_size} tokens, one thread may need window="
            f"{config.window}: raise num_pages or lower window"
        )
    if config.activation_offloading and not config.gradient_checkpointing:
        raise ConfigError(
            "activation_offloading=true with gradient_checkpointing=false would move every tensor "
            "of every layer to the host: set gradient_checkpointing: true"
        )
    path, row = config.max_path_tokens, config.max_row_tokens
    if path is not None and path > row:
        raise ConfigError(
            f"max_path_tokens={path} exceeds max_row_tokens={row}: a path of that length could "
            "never be packed; raise the row"
        )
    if config.credit == "outcome":
        return
    if config.agent != "tree":
        raise ConfigError(
            f"credit={config.credit!r} with agent={config.agent!r}: one thread has no branches; "
            "set agent: tree or credit: outcome"
        )
    if config.exchange not in MOUNTS:
        raise ConfigError(
            f"credit={config.credit!r} with exchange={config.exchange!r}: a branch is left out by "
            "dropping its mounts; set exchange: mount or credit: outcome"
        )
    if config.credit_estimator == "score" and config.drop_mounts:
        raise ConfigError(
            "credit_estimator='score' with drop_mounts=true: without mounts no branch changes the "
            "answer's score; set credit_estimator: resample or leave drop_mounts out"
        )
    if config.credit_estimator == "resample" and not config.deterministic:
        raise ConfigError(
            "credit_estimator='resample' with deterministic=false: an episode is run again up to "
            "the first read, which needs the logical clock; set deterministic: true"
        )
