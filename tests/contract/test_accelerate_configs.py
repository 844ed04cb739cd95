"""The launch configurations parse and hold none of the values that accelerate misreads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ZERO_STAGE = {"zero1": 1, "zero2": 2, "zero3": 3, "multinode_zero2": 2, "multinode_zero3": 3}


def test_every_way_to_launch_has_its_file() -> None:
    assert {path.stem for path in CONFIGS} == {"cpu", "single_gpu", "ddp", *ZERO_STAGE}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_accepts_the_file(path: Path) -> None:
    assert isinstance(load_config_from_file(str(path)), ClusterConfig)


def test_cpu_runs_one_process_without_mixed_precision() -> None:
    config = load_config_from_file(str(ROOT / "accelerate_configs" / "cpu.yaml"))
    assert config.use_cpu is True
    assert (config.num_processes, config.mixed_precision) == (1, "no")
    assert config.distributed_type == "NO"


@pytest.mark.parametrize(("name", "stage"), sorted(ZERO_STAGE.items()))
def test_zero_stage_is_that_of_the_name_and_accumulation_comes_from_the_recipe(
    name: str, stage: int
) -> None:
    raw = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
    deepspeed = raw["deepspeed_config"]
    assert raw["distributed_type"] == "DEEPSPEED"
    assert deepspeed["zero_stage"] == stage
    assert deepspeed["gradient_accumulation_steps"] == "auto"
    assert deepspeed["zero3_init_flag"] is (stage == 3)


def test_ddp_is_one_process_a_gpu_without_deepspeed() -> None:
    config = load_config_from_file(str(ROOT / "accelerate_configs" / "ddp.yaml"))
    assert config.distributed_type == "MULTI_GPU"
    assert config.use_cpu is False
    assert not config.deepspeed_config
