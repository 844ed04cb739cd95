"""Model card and pushes, against a local stand-in of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import PeftModel
from safetensors.torch import load

from octopus_trl import prepare_model
from octopus_trl.train import card
from octopus_trl.train.hub import collect, tried
from octopus_trl.train.sft import OctopusSFTConfig, OctopusSFTTrainer, RowDataset
from tests.tiny import SHORT_LENGTHS, random_trace, tiny_hybrid
from tests.train.hub_stand_in import Hub, hub_stand_in
from tests.train.runs import asked_rows, make_trainer, replayed, tokenizer

SECRET = "hf_stand_in_only"
PUSHED: dict[str, Any] = {
    "push_to_hub": True,
    "hub_model_id": "someone/run",
    "hub_token": SECRET,
    "push_wait_s": 0.0,
    "max_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_stand_in() as server:
        yield server


def train(out: Path, **settings: Any) -> Any:
    trainer = make_trainer(out, None, asked_rows(2), **{**PUSHED, **settings})
    with replayed():
        trainer.train()
    return trainer


def test_a_run_pushes_checkpoints_and_its_end_and_nothing_else_leaves(
    hub: Hub, tmp_path: Path
) -> None:
    trainer = train(tmp_path / "run", hub_always_push=True)
    trainer.push_to_hub()
    messages = [message for message, _ in hub.commits]
    assert messages == [
        "Training in progress, step 1",
        "Training in progress, step 2",
        "End of training",
    ]
    for _, files in hub.commits:
        assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(files)
        assert "tokenizer.json" in files
        leaked = [n for n in files if "traces" in n or n.endswith((".pt", ".bin", ".jsonl"))]
        assert leaked == []
        assert not any(SECRET.encode() in content for content in files.values())
    assert hub.tokens == {f"Bearer {SECRET}"}


def test_a_pushed_adapter_gives_the_model_that_was_trained(hub: Hub, tmp_path: Path) -> None:
    trainer = train(tmp_path / "run")
    trainer.push_to_hub()
    weights = load(hub.commits[-1][1]["adapter_model.safetensors"])
    assert weights
    assert all(tensor.numel() for tensor in weights.values())
    folder = tmp_path / "pulled"
    folder.mkdir()
    for name, content in hub.commits[-1][1].items():
        (folder / name).write_bytes(content)
    fresh = tiny_hybrid(0, vocab_size=1024, eos_token_id=tokenizer().eos_token_id)
    loaded = PeftModel.from_pretrained(fresh, str(folder)).state_dict()
    for name, value in trainer.model.state_dict().items():
        assert (loaded[name] - value).abs().max() == 0, name


def test_a_push_that_fails_is_tried_again(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = train(tmp_path / "run", hub_strategy="end")
    assert hub.requests == []  # neither the start nor a checkpoint needs the hub
    hub.fail = 2
    assert trainer.push_to_hub() is not None
    assert len(hub.commits) == 1
    assert capsys.readouterr().err.count("trying again: HfHubHTTPError") == 2


def test_a_hub_that_stays_down_ends_no_run(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail = 10**6
    trainer = train(tmp_path / "run", push_attempts=2)
    assert trainer.state.global_step == 2
    assert trainer.push_to_hub() is None
    assert hub.commits == []
    assert "push failed (End of training), the run goes on" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


def test_a_warm_start_pushes_checkpoints_and_its_end_and_a_hub_that_fails_ends_it_not(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(rng: Any, progress: float) -> Any:
        return random_trace(int(rng.integers(1 << 20)), steps=6, lengths=SHORT_LENGTHS)

    names = ("push_to_hub", "hub_model_id", "hub_token", "push_wait_s", "max_steps", "save_steps")
    args = OctopusSFTConfig(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=1, pack_tokens=200,
        use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, push_attempts=2,
        hub_always_push=True, **{name: PUSHED[name] for name in names},
    )  # fmt: skip
    rows = RowDataset(draw, num_rows=2, pack_tokens=200, seed=0)
    model = prepare_model(tiny_hybrid(0))
    trainer = OctopusSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer())
    hub.fail = 1
    trainer.train()
    trainer.push_to_hub()
    assert [message for message, _ in hub.commits] == [
        "Training in progress, step 1",
        "Training in progress, step 2",
        "End of training",
    ]
    for _, files in hub.commits:
        assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(files)
        assert [n for n in files if n.endswith((".pt", ".bin"))] == []
        assert not any(SECRET.encode() in content for content in files.values())
    card = hub.commits[-1][1]["README.md"].decode()
    assert "maximum likelihood of the sampled tokens" in card
    assert "2 packed rows" in card
    hub.fail = 10**6
    assert trainer.push_to_hub() is None
    assert "the run goes on" in capsys.readouterr().err


def test_waits_between_attempts_double() -> None:
    waited: list[float] = []

    def fail() -> None:
        raise OSError("down")

    assert tried(fail, attempts=4, wait_s=1.5, what="x", sleep=waited.append) is None
    assert waited == [1.5, 3.0, 6.0]
    assert tried(lambda: 7, attempts=1, wait_s=1.0, what="x") == 7


def test_what_is_pushed_is_what_others_load(tmp_path: Path) -> None:
    kept = ("adapter_model.safetensors", "tokenizer.json", "config.json", "README.md")
    for name in (*kept, "optimizer.pt", "training_args.bin", "octopus_state_0.pt", "x.jsonl"):
        (tmp_path / name).write_text("x")
    (tmp_path / "traces").mkdir()
    assert {file.name for file in collect(tmp_path)} == set(kept)


def test_the_card_says_recipe_data_metrics_and_versions_and_no_secret(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    trainer = make_trainer(
        out, None, asked_rows(3), eval_rows=asked_rows(2), hub_token=SECRET, epsilon=0.25,
        credit="leave_one_branch_out",
    )  # fmt: skip
    with replayed():
        trainer.train()
    trainer.create_model_card(model_name="mine", dataset_name="someone/questions", tags="search")
    text = (out / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    facts = yaml.safe_load(head)
    assert facts["library_name"] == "peft"
    assert facts["datasets"] == ["someone/questions"] or facts["datasets"] == "someone/questions"
    assert {"grpo", "octopus", "search"} <= set(facts["tags"])
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert recipe["epsilon"] == 0.25
    assert recipe["credit"] == "leave_one_branch_out"
    assert (recipe["lora_r"], recipe["num_generations"]) == (2, 2)
    assert "3 questions, columns `id`, `question`" in body
    assert "| `reward` | 0.5 | 0.5 |" in body
    assert all(f"- {name} " in body for name in ("torch", "transformers", "trl", "peft"))
    assert SECRET not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("place", "name"),
    [("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-4B"), ("/srv/models/mine", "mine"), ("", None)],
)
def test_a_folder_is_named_by_its_last_part(place: str, name: str | None) -> None:
    assert card.public_name(place) == name
