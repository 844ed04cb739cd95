"""DeepSpeed ZeRO as the trainer meets it: its stage, split parameters, whether it runs at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from octopus_trl.errors import ConfigError

NO_TILES = (
    "ZeRO-3 gathers split weights for each tile, and ranks with rows of different lengths would "
    "wait for one another for ever; launch with ZeRO-2, or leave it out"
)


def zero_stage(accelerator: Any) -> int:
    """Give the ZeRO stage that this run was launched with, 0 without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        return 0
    return int(plugin.deepspeed_config.get("zero_optimization", {}).get("stage", 0))


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Give the shape of a parameter as a whole; ZeRO-3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def full_size(parameter: Tensor) -> int:
    """Count the elements of a parameter as a whole."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def gathered(parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Make parameters whole on every rank within a context; every rank must enter it."""
    split = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not split:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(split)
    return context


def in_parts(
    named: Iterable[tuple[str, nn.Parameter]], most_bytes: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Split parameters, in order, into parts of at most `most_bytes`, or of one parameter."""
    part: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, parameter in named:
        size = full_size(parameter) * parameter.element_size()
        if part and held + size > most_bytes:
            yield part
            part, held = [], 0
        part.append((name, parameter))
        held += size
    if part:
        yield part


def check_engine_runs(accelerator: Any, wrapped: nn.Module) -> None:
    """Refuse a run that was launched for ZeRO and that accelerate wrapped without it.

    It does so silently where the launch file and the recipe disagree about the CPU, or where
    `deepspeed` is set in a recipe that another launcher started.

    Raises:
        ConfigError: says what wraps the model, and how to launch.
    """
    stage = zero_stage(accelerator)
    kind = type(wrapped).__name__
    if stage and kind != "DeepSpeedEngine":
        raise ConfigError(
            f"ZeRO-{stage} was asked for and the model runs as {kind}, every rank with all of the "
            "optimizer: start it with accelerate launch --config_file accelerate_configs/"
            f"zero{stage}.yaml; on a CPU leave --cpu and ACCELERATE_USE_CPU out and set "
            "use_cpu: true in the recipe"
        )


def prepare_plugin(plugin: Any, *, use_cpu: bool) -> None:
    """Settle what every run under DeepSpeed needs, before anything starts it.

    Checkpoints of ZeRO-3 hold the weights as a whole, whatever the launch file says: without that
    transformers leaves the weights of a full fine-tuning out with a mere warning.

    Args:
        plugin: accelerate's `DeepSpeedPlugin`.
    """
    zero = plugin.deepspeed_config.get("zero_optimization", {})
    if zero.get("stage") == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if use_cpu:
        leave_compiled_ops_out()


def leave_compiled_ops_out() -> None:
    """Keep DeepSpeed on a CPU from compiling its shared-memory all-reduce when it starts.

    That takes a minute and a compiler, and a process killed meanwhile leaves a lock that every
    later one waits for. The collectives of torch do the same.
    """
    import deepspeed  # noqa: F401 - registers the module below

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
