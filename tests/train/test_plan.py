"""A plan's bytes are those of the real thing on a tiny model, and what cannot fit is refused."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from octopus_trl import prepare_model
from octopus_trl.engine import Engine
from octopus_trl.errors import ConfigError
from octopus_trl.models import spec_of, unwrap
from octopus_trl.models.mlp_tiles import tile_mlps
from octopus_trl.models.packed import run_packed
from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.figures import decode_figure, prefill_figure, update_figure
from octopus_trl.train.footprint import Footprint, build, mlp_bytes
from octopus_trl.train.lora import PROJECTIONS
from octopus_trl.train.plan import BUCKET, GIB, Episode, Layout, Plan, Speeds, parse_layout
from octopus_trl.train.plan_report import (
    PlanArguments,
    config_of,
    make_report,
    read_config,
    recipe_of,
)
from octopus_trl.train.plan_table import DOCUMENT, FOLDER, read_recipe, render
from octopus_trl.train.resident import ResidentCopy
from octopus_trl.train.rows import Tree, build_row
from scripts.bench_cases.mix import EPISODE_V1, read
from scripts.bench_cases.models import QWEN35_4B
from tests.tiny import random_trace, tiny_dense, tiny_hybrid
from tests.train.bytes_worker import MODES, RANK_OF_ADAPTER, RANKS
from tests.train.equal_worker import TARGETS
from tests.train.forks import DEEPSPEED
from tests.train.runs import SETTINGS, asked_rows, make_trainer, replayed

ROOT = Path(__file__).parents[2]
RECIPE = FOLDER / "grpo" / "config_octopus.yaml"
WIDE: dict[str, Any] = {"layers": 8, "hidden_size": 64, "intermediate_size": 192}


def adapter(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_dropout": 0.0, **options})


def plan_of(model: Any, layout: str = "1", zero: int = 0, **changes: Any) -> Plan:
    """Plan for a model that exists; the card is large."""
    args = OctopusGRPOConfig(output_dir="unused", **SETTINGS)
    for name, value in changes.items():
        setattr(args, name, value)
    counted = Footprint.of(
        model, autocast=bool(args.bf16), checkpointing=bool(args.gradient_checkpointing)
    )
    return Plan(args, counted, parse_layout(layout, zero), 1 << 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [False, True])
def test_parameters_are_those_of_the_loaded_model_and_of_peft(
    tie: bool, dtype: torch.dtype
) -> None:
    real = tiny_hybrid(tie=tie).to(dtype)
    counted = build(real.config, dtype, peft_config=adapter(r=5))
    adapted = get_peft_model(prepare_model(real), adapter(r=5, target_modules=list(PROJECTIONS)))
    found = Footprint.of(counted, autocast=False, checkpointing=True)
    assert found == Footprint.of(adapted, autocast=False, checkpointing=True)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    # r (in + out) numbers for each of the projections, in float32 whatever the weights are.
    products = [
        m
        for n, m in real.named_modules()
        if isinstance(m, nn.Linear) and n.removesuffix(".base_layer").endswith(PROJECTIONS)
    ]
    assert found.trained == sum(5 * (m.in_features + m.out_features) for m in products)
    assert found.trained_bytes == sum(p.nbytes for p in trained) == 4 * found.trained
    assert found.frozen_bytes == sum(
        p.nbytes for p in adapted.parameters() if p not in set(trained)
    )


@pytest.mark.parametrize("build_tiny", [tiny_hybrid, tiny_dense])
@pytest.mark.parametrize(("pages", "page_size"), [(1, 1), (63, 16), (65, 7)])
def test_planned_pools_are_the_bytes_that_an_engine_allocates(
    build_tiny: Any, pages: int, page_size: int
) -> None:
    model = prepare_model(build_tiny(), mount_layers=[3])
    engine = Engine(model, page_size=page_size, num_pages=pages, num_states=5)
    plan = plan_of(model, page_size=page_size, num_pages=pages, num_states=5)
    memory = engine._pools.memory
    held = [t for kept in vars(memory).values() for t in tree_leaves(kept)]
    tensors = [t for t in held if isinstance(t, torch.Tensor)]
    assert plan.pool_bytes == sum(t.untyped_storage().nbytes() for t in tensors)
    pages_alone = [*tree_leaves(memory.keys), *tree_leaves(memory.values)]
    assert plan.page_bytes == sum(t.nbytes for t in pages_alone if isinstance(t, torch.Tensor))


def test_the_planned_copy_of_zero_3_is_the_copy_that_a_rank_makes() -> None:
    model = prepare_model(tiny_hybrid().to(torch.bfloat16))
    adapted = get_peft_model(
        model, adapter(target_modules=list(TARGETS)), autocast_adapter_dtype=False
    )
    plan = plan_of(adapted, "2x4", 3)
    assert plan.parts["resident copy"] == ResidentCopy(adapted, torch.device("cpu")).num_bytes


def test_planned_optimizer_and_gradients_of_one_process_are_what_a_step_leaves(
    tmp_path: Path,
) -> None:
    with replayed(sizes=(4,)):
        trainer = make_trainer(tmp_path, None, asked_rows(2), num_generations=2)
        kept: dict[str, int] = {}

        def note(*_: Any, **named: Any) -> None:
            grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            kept["gradients"] = sum(g.nbytes for g in grads)

        trainer.optimizer = None
        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(note)
        trainer.train()
    inner: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    moments = [
        value
        for state in inner.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    plan = plan_of(trainer.model)
    assert plan.parts["optimizer"] == sum(t.nbytes for t in moments) > 0
    assert plan.parts["gradients"] == kept["gradients"]


@pytest.mark.skipif(
    not DEEPSPEED, reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
)
@pytest.mark.timeout(600)
def test_planned_optimizer_of_each_zero_stage_is_what_a_rank_holds(
    run_scene: Callable[..., None], tmp_path: Path
) -> None:
    run_scene("bytes", tmp_path)
    model = prepare_model(tiny_hybrid(0, vocab_size=1024))
    adapted = get_peft_model(model, adapter(r=RANK_OF_ADAPTER, target_modules=list(TARGETS)))
    for mode in MODES:
        stage = int(mode[-1])
        plan = plan_of(adapted, str(RANKS), stage)
        for rank in range(RANKS):
            found = json.loads((tmp_path / mode / f"found_{rank}.json").read_text())
            assert found["stage"] == stage
            assert found["bucket"] == BUCKET
            # Parts are padded so that ranks have equal ones.
            assert found["optimizer"] == pytest.approx(plan.parts["optimizer"], rel=0.02), mode


class Live(TorchDispatchMode):
    """Bytes of tensors that are alive, after every operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.known = {p.untyped_storage()._cdata for p in model.parameters()}
        self.refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.refs:
                    self.refs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self.refs = {key: held for key, held in self.refs.items() if not held[0].expired()}
        return sum(size for _, size in self.refs.values())


def update_bytes(model: Any, *, autocast: bool, with_backward: bool) -> tuple[int, int, int]:
    """Give a row's tokens, and the bytes alive after its forward pass and at most."""
    trace = random_trace(0, steps=9, prompt=list(range(3, 60)), vocab_size=97)
    row = build_row([Tree(trace, 1.0)], mounts="live")
    with Live(model) as live, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logps = run_packed(model, spec_of(model), row.packed, row.rows, row.targets)
        after = live.now()
        if with_backward:
            logps.mean().backward()
    return row.packed.num_rows, after, live.peak


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("build_tiny", [tiny_hybrid, tiny_dense])
def test_a_planned_row_is_what_an_update_really_takes(build_tiny: Any, autocast: bool) -> None:
    model = build_tiny(0, **WIDE).to(torch.bfloat16 if autocast else torch.float32)
    prepare_model(model, mount_layers=[3])
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    adapted = get_peft_model(model, adapter(target_modules=sorted(names & set(PROJECTIONS))))
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted.enable_input_require_grads()
    dense = build_tiny is tiny_dense  # references of recurrent layers keep more than kernels do
    tokens, after, peak = update_bytes(adapted.train(), autocast=autocast, with_backward=dense)
    found = Footprint.of(adapted, autocast=autocast, checkpointing=True)
    assert after <= found.kept * tokens <= 1.25 * after
    if dense:
        assert peak <= found.row_bytes(tokens) <= (1.35 if autocast else 1.6) * peak


@pytest.mark.parametrize("autocast", [False, True])
def test_tiled_mlps_take_less_and_the_plan_knows_it(autocast: bool) -> None:
    model = tiny_dense(0, **WIDE).to(torch.bfloat16 if autocast else torch.float32)
    prepare_model(model, mount_layers=[3])
    adapted = get_peft_model(model, adapter(target_modules=["q_proj", "down_proj"])).train()
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted.enable_input_require_grads()
    _, _, whole = update_bytes(adapted, autocast=autocast, with_backward=True)
    tile_mlps(adapted, 16)
    tokens, _, peak = update_bytes(adapted, autocast=autocast, with_backward=True)
    modes: dict[str, Any] = {"autocast": autocast, "checkpointing": True}
    planned = Footprint.of(adapted, **modes, tile_tokens=16).row_bytes(tokens)
    assert peak < 0.8 * whole
    assert peak <= planned <= 1.6 * peak
    assert planned < Footprint.of(adapted, **modes).row_bytes(tokens)


def test_offloaded_inputs_of_layers_count_on_the_host() -> None:
    model = prepare_model(tiny_hybrid())
    modes: dict[str, Any] = {"autocast": False, "checkpointing": True}
    here = Footprint.of(model, **modes)
    there = Footprint.of(model, **modes, offloading=True)
    layers, stream = model.config.num_hidden_layers, 4 * model.config.hidden_size
    assert (here.offloaded, there.offloaded) == (0, layers * stream)
    assert here.kept - there.kept == (layers - 2) * stream
    assert there.widest == here.widest


@pytest.mark.parametrize("autocast", [False, True])
def test_the_planned_mlp_is_what_autograd_keeps_of_it(autocast: bool) -> None:
    model = prepare_model(tiny_hybrid(0, **WIDE).to(torch.bfloat16 if autocast else torch.float32))
    adapted = get_peft_model(model, adapter(target_modules=list(PROJECTIONS)))
    layer = unwrap(adapted).model.layers[0]
    weights = {p.untyped_storage().data_ptr() for p in adapted.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    dtype = model.model.embed_tokens.weight.dtype
    x = torch.randn(1, 65, 64, dtype=dtype, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        layer.mlp(layer.post_attention_layernorm(x))
    real = sum(storage.nbytes() for storage in kept.values())
    planned = 65 * mlp_bytes(layer, spec_of(model), 2 if autocast else 4)[0]
    assert real <= planned <= 1.25 * real


PEAKS = {8_192: 15.3, 16_384: 16.7}  # GiB, stock layers, 2026-11-30
PACKED = {13_511: 13.8, 15_988: 14.9, 25_089: 18.75, 75_734: 40.3, 128_016: 62.6, 131_072: 64.0}


def test_planned_rows_lie_near_the_peaks_that_an_h200_measured() -> None:
    """Qwen3.5-4B's shapes, bf16, LoRA r = 16, checkpointing; packed rows are those of
    data/bench/train.jsonl of 2026-12-01, theirs and ours.
    """
    config = AutoConfig.for_model("qwen3_5_text", **QWEN35_4B)
    model = build(config, torch.bfloat16, peft_config=adapter(r=16))
    found = Footprint.of(model, autocast=True, checkpointing=True)
    held = found.frozen_bytes + 2 * found.trained_bytes
    for tokens, peak in {**PEAKS, **PACKED}.items():
        assert (held + found.row_bytes(tokens)) / GIB == pytest.approx(peak, rel=0.16)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 4_096, 131_072])
def test_the_longest_row_of_a_memory_is_the_last_that_it_holds(tokens: int) -> None:
    found = Footprint.of(prepare_model(tiny_hybrid()), autocast=True, checkpointing=True)
    room = found.row_bytes(tokens)
    longest = found.longest_row(room)
    assert longest >= tokens
    assert found.row_bytes(longest) <= room < found.row_bytes(longest + 1)
    assert found.longest_row(found.logit_bytes - 1) == 0


def test_qwen_4b_ships_the_shapes_that_are_measured() -> None:
    fields = json.loads((FOLDER / "model.json").read_text())
    assert (
        config_of(fields).to_dict() == AutoConfig.for_model("qwen3_5_text", **QWEN35_4B).to_dict()
    )


def test_the_episode_of_the_times_is_the_frozen_mix() -> None:
    turns = read(EPISODE_V1).turns
    asked = PlanArguments()
    assert asked.episode_given == sum(turn.given for turn in turns)
    assert asked.episode_sampled == sum(turn.sampled for turn in turns)


def test_one_recipe_is_planned_for_1_8_and_2x8_gpus_without_weights_or_network() -> None:
    args, model_args = read_recipe(RECIPE)
    report = make_report(args, model_args, PlanArguments(), RECIPE)
    one, machine, _ = report.plans
    assert [p.layout for p in report.plans] == [Layout(1, 1, 0), Layout(1, 8, 2), Layout(2, 8, 2)]
    assert [p.questions_a_step for p in report.plans] == [16, 128, 256]
    assert one.parts["weights"] == 4_205_751_296 * 2
    assert one.footprint.trained == 121_896_960
    assert machine.parts["optimizer"] == 12 * 121_896_960 // 8
    report.refuse()
    text = report.text()
    for word in ("393,216", "2x8", "multinode_zero2", "data/bench/decode.jsonl line"):
        assert word in text
    # A tree of the frozen mix has 369,390 tokens.
    assert "left out" not in text
    args.max_row_tokens = 131_072
    text = make_report(args, model_args, PlanArguments(), RECIPE).text()
    assert "would be left out of the update whole" in text
    split = PlanArguments(gpus=["2x8"], zero=3)
    with pytest.raises(ConfigError, match="mlp_tile_tokens=16384: ZeRO-3 gathers .* launch with"):
        make_report(args, model_args, split, RECIPE).refuse()
    args.mlp_tile_tokens = None
    report = make_report(args, model_args, split, RECIPE)
    report.refuse()
    (plan,) = report.plans
    assert plan.parts["resident copy"] == (4_205_751_296 + 121_896_960) * 2
    assert "multinode_zero3" in report.text()


def test_a_figure_counts_on_its_card_and_for_its_shapes_alone(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"case": "64 threads", "value": 9.0, "unit": "tok/s", "hardware": "A100"},
        {"case": "8 threads", "value": 80.0, "unit": "tok/s", "hardware": "NVIDIA H200"},
        {"case": "64 threads", "value": 500.0, "unit": "tok/s", "hardware": "NVIDIA H200"},
        {"case": "64 threads", "value": 640.0, "unit": "tokens/s", "hardware": "NVIDIA H200"},
        {"case": "256 threads", "value": 700.0, "unit": "tok/s", "hardware": "NVIDIA H200"},
        {"case": "64 threads", "value": None, "unit": "none", "hardware": "NVIDIA H200"},
    ]
    dated = [json.dumps({**line, "date": "2026-11-30"}) for line in lines]
    (tmp_path / "decode.jsonl").write_text("\n".join(dated) + "\n")
    assert decode_figure("H200", 704, tmp_path).value == 700.0
    between = decode_figure("H200", 200, tmp_path)
    assert (between.value, "line 4" in between.source) == (640.0, True)
    assert decode_figure("H200", 1, tmp_path).value == 80.0
    for missing in (
        decode_figure("B200", 64, tmp_path),
        prefill_figure("H200", tmp_path),
        update_figure("H200", tmp_path),
    ):
        assert missing.value is None
        assert missing.source.startswith("no figure: data/bench/")
    plan = plan_of(prepare_model(tiny_hybrid()))
    speeds = Speeds(between, prefill_figure("H200", tmp_path), update_figure("H200", tmp_path))
    found = plan.seconds(speeds, Episode(100, 64))
    assert found == {"decode": 4 * 64 / 640.0, "prefill": None, "update": None}
    tiny, model_args = read_recipe(ROOT / "recipes/tiny-hybrid/grpo/config_cpu.yaml")
    model_args.model_name_or_path = str(ROOT / model_args.model_name_or_path)
    report = make_report(tiny, model_args, PlanArguments(gpus=["1"]), None)
    assert report.speeds[0].decode.value is None


@pytest.mark.parametrize(
    ("changes", "asked", "says"),
    [
        ({}, {"gpu_memory": 8.0}, "the pools: .*free memory"),
        ({}, {"gpu_memory": 60.0}, r"max_row_tokens=393216: .*set max_row_tokens to \d+ or less"),
        (
            {"max_row_tokens": 600_000},
            {},
            r"max_row_tokens=600000: .*set max_row_tokens to 48\d{4} or less$",
        ),
        (
            {"mlp_tile_tokens": None, "activation_offloading": False},
            {},
            r"set max_row_tokens to 25\d{4} or less, or mlp_tile_tokens: 16384$",
        ),
        ({"activation_offloading": False}, {}, "or activation_offloading: true$"),
        (
            {"gradient_checkpointing": False, "activation_offloading": False},
            {},
            "or gradient_checkpointing: true$",
        ),
        ({"num_pages": 10**6}, {}, "num_pages=1000000, .*the pools would take"),
        ({"num_pages": 100}, {}, r"hold 1,600 tokens, one chain may reach 65,536"),
        (
            {"num_pages": 190_000, "num_states": 500},
            {"gpu_memory": 128.0},
            "a generation takes .*the card has",
        ),
        ({}, {"gpus": ["0"]}, "gpus='0': must be GPUs"),
        (
            {
                "mlp_tile_tokens": None,
                "activation_offloading": False,
                "max_row_tokens": 16_384,
                "num_pages": 4_200,
                "num_states": 10,
            },
            {"gpu_memory": 16.0},  # a tile of the whole row would save nothing
            r"set max_row_tokens to \d+ or less, or activation_offloading: true$",
        ),
        ({}, {"gpus": ["2x8x2"]}, "must be GPUs, or machines x GPUs"),
        ({}, {"gpus": ["²"]}, "must be GPUs, or machines x GPUs"),
        ({}, {"zero": 4}, "zero=4: must be 0"),
        ({}, {"gpu_memory": 0.0}, "gpu_memory=0.0: must be above 0"),
    ],
    ids=lambda value: "-".join(map(str, value)) or "recipe" if isinstance(value, dict) else None,
)
def test_what_cannot_run_is_refused_with_value_rule_and_fix(
    changes: dict[str, Any], asked: dict[str, Any], says: str
) -> None:
    args, model_args = read_recipe(RECIPE)
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError, match=says):
        make_report(args, model_args, PlanArguments(**{"gpus": ["1"], **asked}), RECIPE).refuse()


def test_a_model_that_is_nowhere_says_what_a_plan_needs(tmp_path: Path) -> None:
    _, model_args = read_recipe(RECIPE)
    model_args.model_name_or_path = "no/such-model"  # not the one whose shapes ship
    with pytest.raises(ConfigError, match="no/such-model: .*give --model_config FILE"):
        read_config(model_args, None, RECIPE)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "no_such_kind"}))
    with pytest.raises(ConfigError, match="model_config: no configuration"):
        read_config(model_args, str(file), RECIPE)
    file.write_text(json.dumps(tiny_hybrid().config.to_dict()))
    assert read_config(model_args, str(file), RECIPE)[0].hidden_size == 48
    assert recipe_of(["train.py", "--config", "a.yaml"]) == Path("a.yaml")
    assert recipe_of(["train.py", "--config"]) is None


def test_the_table_of_the_recipes_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), (
        "recipes/qwen3.5-4b/README.md is old: run python -m octopus_trl.train.plan_table"
    )


def test_a_plan_loads_no_weights_and_makes_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_hybrid().config.save_pretrained(tmp_path / "model")
    words = f"--model_name_or_path {tmp_path / 'model'} --output_dir {tmp_path / 'out'} --data no"
    argv = ["train.py", "--plan", *words.split(), "--max_row_tokens", "512", "--gpus", "1"]
    monkeypatch.setattr(sys, "argv", [*argv, "--num_generations", "8"])
    assert runpy.run_path(str(ROOT / "scripts/train.py"))["main"]() == 0
    said = capsys.readouterr().out
    assert "its own config.json" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_from_a_shell_a_plan_that_fits_ends_with_0_and_another_with_2() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    base = [sys.executable, str(ROOT / "scripts/train.py"), "--config", str(RECIPE), "--plan"]
    codes = {}
    for memory in ("139", "40"):
        call = [*base, "--gpu-memory", memory, "--gpus", "8", "2x8"]
        done = subprocess.run(call, capture_output=True, text=True, env=env, check=False)
        codes[memory] = done.returncode
        last = done.stderr.strip().rpartition("\n")[2]
    assert codes == {"139": 0, "40": 2}
    assert last.startswith("error: this plan cannot run: gpus=8: ")
