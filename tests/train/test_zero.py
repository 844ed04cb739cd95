"""What is asked of DeepSpeed is what runs, and split parameters are counted as whole ones."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from octopus_trl.errors import ConfigError
from octopus_trl.train.lora import describe_adapter
from octopus_trl.train.zero import (
    check_engine_runs,
    full_shape,
    full_size,
    gathered,
    prepare_plugin,
    zero_stage,
)
from tests.tiny import tiny_hybrid, with_lora
from tests.train.forks import DEEPSPEED


def launched(stage: int | None) -> Any:
    plugin = None
    if stage is not None:
        plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage}})
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_that_accelerate_started_without_deepspeed_is_refused_with_the_launch_line(
    stage: int,
) -> None:
    assert zero_stage(launched(stage)) == stage
    with pytest.raises(ConfigError, match=rf"ZeRO-{stage} was asked .*Linear.*zero{stage}\.yaml"):
        check_engine_runs(launched(stage), nn.Linear(2, 2))


def test_without_deepspeed_any_wrapper_will_do() -> None:
    assert zero_stage(launched(None)) == 0
    check_engine_runs(launched(None), nn.Linear(2, 2))


@pytest.mark.parametrize(("stage", "gathers"), [(2, False), (3, True)])
def test_weights_of_zero3_are_saved_as_a_whole_whatever_the_launch_file_says(
    stage: int, gathers: bool
) -> None:
    plugin = launched(stage).state.deepspeed_plugin
    prepare_plugin(plugin, use_cpu=False)
    zero = plugin.deepspeed_config["zero_optimization"]
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) is gathers


@pytest.mark.skipif(
    not DEEPSPEED, reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
)
def test_on_a_cpu_deepspeed_starts_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed  # noqa: F401 - registers the module below

    module = sys.modules["deepspeed.comm.torch"]
    monkeypatch.setattr(module, "build_shm_op", module.build_shm_op)  # put back afterwards
    prepare_plugin(launched(1).state.deepspeed_plugin, use_cpu=True)
    assert module.build_shm_op() is None


def test_a_split_parameter_counts_as_the_whole() -> None:
    split = nn.Parameter(torch.empty(0))
    split.ds_shape, split.ds_numel = torch.Size([4, 6]), 24  # type: ignore[attr-defined]
    assert (full_shape(split), full_size(split)) == ((4, 6), 24)
    whole = nn.Parameter(torch.empty(3, 5))
    assert (full_shape(whole), full_size(whole)) == ((3, 5), 15)
    with gathered([whole]):  # nothing to gather, and nobody to meet
        pass
    model = with_lora(tiny_hybrid())
    said = describe_adapter(model)
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0)
    assert describe_adapter(model) == said
