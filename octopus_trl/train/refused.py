"""Fields of TRL that this trainer does not run, each with what to use instead."""

from __future__ import annotations

from typing import Any

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
    "router_aux_loss_coef": (
        (None, 0.0),
        "a packed pass computes no balance loss of experts; set router_aux_loss_coef: 0",
    ),
    "use_liger_kernel": (
        (False,),
        "TRL drops it in 2.0, and it has no gated norm and no adapter; use fused_layers",
    ),
    "pad_to_multiple_of": ((None, "auto"), "packed rows are not padded; drop it"),
    "remove_unused_columns": ((False, None), "answers are columns that rewards read; drop it"),
    "auto_find_batch_size": (
        (False,),
        "a smaller batch would break groups; lower max_row_tokens, which changes no gradient",
    ),
    "fsdp": ((None, "", [], False), "use DeepSpeed ZeRO-2 or ZeRO-3 (accelerate_configs/)"),
}


def refuse_balance_loss(config: Any, asked: float | None) -> None:
    """Refuse to leave out in silence the loss that balances the experts of a model.

    Args:
        config: of the model, which declares a coefficient of its own where it has experts.
        asked: `router_aux_loss_coef`; None is the model's own.
    Raises:
        ConfigError: that is not 0.
    """
    own = getattr(config.get_text_config(), "router_aux_loss_coef", None)
    routed = hasattr(config.get_text_config(), "output_router_logits")
    if asked is None and own and routed:
        raise ConfigError(
            f"router_aux_loss_coef={own} (the model's own): {REFUSED['router_aux_loss_coef'][1]}"
        )
