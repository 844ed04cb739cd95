"""The launch lines of README really start what they say, on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from octopus_trl.train.checkpoint import last_checkpoint
from tests.tiny import tiny_hybrid
from tests.train.forks import DEEPSPEED
from tests.train.runs import tokenizer

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ZERO = pytest.mark.skipif(
    not DEEPSPEED, reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
)
LAUNCH = [str(BIN / "accelerate"), "launch", "--config_file"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend", "c10d"]
RECIPE = {
    "use_cpu": True,
    "bf16": False,
    "dtype": "float32",
    "report_to": "none",
    "max_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "eval_file": "questions.jsonl",
    "per_device_eval_batch_size": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 1e-2,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "max_turns": 2,
    "max_new_tokens": 4,
    "num_pages": 200,
    "num_states": 16,
    "window": 1024,
    "use_peft": True,
    "lora_r": 2,
    "lora_dropout": 0.0,
}


def zero(name: str) -> list[str]:
    config = f"accelerate_configs/{name}.yaml"
    port = str(29700 + os.getpid() % 1000)
    words = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", port]
    return [*LAUNCH, config, *words]


LINES = {
    "cpu": [*LAUNCH, "accelerate_configs/cpu.yaml"],
    "ddp": [*TORCHRUN, "--rdzv_endpoint", "localhost:0", "--nproc_per_node", "2"],
    "zero1": zero("zero1"),
    "zero2": zero("zero2"),
    "zero3": zero("zero3"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("zero1", marks=[ZERO, pytest.mark.slow]),
        pytest.param("zero2", marks=[ZERO, pytest.mark.slow]),
        pytest.param("zero3", marks=ZERO),
    ],
)
def test_a_launch_line_trains_saves_a_whole_adapter_and_runs_what_it_names(
    tmp_path: Path, name: str
) -> None:
    policy, corpus, out = tmp_path / "policy", tmp_path / "corpus", tmp_path / "out"
    tiny_hybrid(0, vocab_size=1024, eos_token_id=1).save_pretrained(policy)
    tokenizer().save_pretrained(policy)
    corpus.mkdir()
    page = {"docid": "1", "text": "the gate is shut in winter."}
    (corpus / "corpus.jsonl").write_text(json.dumps(page) + "\n")
    questions = [
        {"id": str(index), "question": f"{index}: when is it shut?", "answers": ["winter"]}
        for index in range(4)
    ]
    lines = [json.dumps(question) for question in questions]
    (corpus / "questions.jsonl").write_text("\n".join(lines) + "\n")
    recipe = tmp_path / "recipe.yaml"
    places = {"model_name_or_path": policy, "data": corpus, "output_dir": out}
    recipe.write_text(yaml.safe_dump({**RECIPE, **{key: str(at) for key, at in places.items()}}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("ACCELERATE_USE_CPU", None)
    if name == "ddp":
        environment["ACCELERATE_USE_CPU"] = "true"
    done = subprocess.run(
        [*LINES[name], "scripts/train.py", "--config", str(recipe)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    last = last_checkpoint(out)
    assert last == out / "checkpoint-2"
    world = 1 if name == "cpu" else 2
    assert json.loads((last / "octopus.json").read_text())["world_size"] == world
    state = json.loads((last / "trainer_state.json").read_text())
    assert sum("eval_reward" in entry for entry in state["log_history"]) == 2
    # Only DeepSpeed's engine writes an optimizer state of its own for each rank.
    parts = sorted(last.glob("global_step*/*optim_states.pt"))
    assert len(parts) == (world if name.startswith("zero") else 0)
    assert ("resident copy for generation" in done.stderr) == (name == "zero3")
    for folder in (last, out):
        adapter = load_file(folder / "adapter_model.safetensors")
        assert len(adapter) == 2 * 25  # both factors of the ten projections over four layers
        assert all(2 in factor.shape and factor.numel() for factor in adapter.values())
        assert all(factor.norm() > 0 for name, factor in adapter.items() if "lora_A" in name)
