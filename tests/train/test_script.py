"""`scripts/train.py`, its recipes and the settings' table."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from octopus_trl.errors import ConfigError, OctopusError, StaleVersion
from octopus_trl.eval.seal_join_studio import WORLD_ROLLOUT
from octopus_trl.trace_files import read_traces
from octopus_trl.train.checkpoint import STAGING, publish
from octopus_trl.train.checks import MARK
from octopus_trl.train.config_table import DOCUMENT, render
from octopus_trl.train.interrupt import StopGracefully
from octopus_trl.train.progress import clock, shown
from tests.train.runs import save_untrained

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes/tiny-hybrid/grpo").glob("*.yaml"))
SCRIPT = runpy.run_path(str(ROOT / "scripts/train.py"))
FAST = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "max_steps": 1,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "max_turns": 2,
    "max_new_tokens": 4,
    "num_pages": 400,
    "num_states": 16,
    "window": 4096,
    "save_strategy": "no",
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    page = {"docid": "1", "text": "the gate is shut in winter."}
    question = {"id": "1", "question": "when is the gate shut?", "answers": ["winter"]}
    (folder / "corpus.jsonl").write_text(json.dumps(page) + "\n")
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    return folder


def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings: Any) -> int:
    """Run the script's main on a recipe of these settings."""
    recipe = tmp_path / "recipe.yaml"
    out = str(tmp_path / "out")
    recipe.write_text(yaml.safe_dump({**FAST, "output_dir": out, **settings}))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(recipe)])
    code: int = SCRIPT["main"]()
    return code


def test_a_run_on_a_corpus_of_ones_own_saves_model_state_and_traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: Path, corpus: Path
) -> None:
    code = launch(monkeypatch, tmp_path, model_name_or_path=str(policy), data=str(corpus))
    assert code == 0
    out = tmp_path / "out"
    for name in ("model.safetensors", "tokenizer.json", "trainer_state.json", "README.md"):
        assert (out / name).is_file(), name
    (file,) = (out / "traces").iterdir()
    traces = list(read_traces(file))
    assert len(traces) == 2
    assert all(trace.num_owned for trace in traces)


def test_prompts_that_fill_the_window_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: Path, corpus: Path, capsys: Any
) -> None:
    settings: dict[str, Any] = {"model_name_or_path": str(policy), "data": str(corpus)}
    assert launch(monkeypatch, tmp_path, **settings, window=1024) == 0
    said = capsys.readouterr().err
    assert "2 threads failed in 2 episodes: ConfigError: window=1024: the prompt alone has" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"learning_rte": 1.0}, r"learning_rte \(did you mean learning_rate\?\)"),
        ({"use_vllm": True}, "use_vllm=True is not run"),
        ({"model_name_or_path": None}, "model_name_or_path is not set"),
        ({"data": "nowhere"}, "no such file"),
        ({"train_file": "nothing.jsonl"}, "nothing.jsonl"),
        ({"use_peft": True, "lora_target_modules": ["q_prj"]}, "'q_prj' matches no module"),
        ({"page_size": 0}, "page_size=0"),
        ({"window": 64}, "window"),
        ({"resume_from_checkpoint": "true"}, "no whole checkpoint under"),
        ({"model_name_or_path": "no/where/at/all"}, "model_name_or_path=no/where/at/all: no such"),
        ({"output_dir": "/proc/none"}, "output_dir=/proc/none: cannot be written"),
        ({"output_dir": ""}, "output_dir is empty: name a folder"),
        ({"dtype": "float99"}, "dtype='float99': must be one of auto, bfloat16"),
        ({"window": [3]}, r"window=\[3\]: must be one number"),
        ({"window": "many"}, "invalid int value: 'many'"),
        ({"report_to": "nowhere"}, "report_to=.*nowhere is not supported"),
        ({"num_train_questions": -1}, "num_train_questions=-1: leave it out"),
        ({"use_peft": True, "lora_r": 0}, "lora_r=0: must be at least 1"),
        ({"use_peft": True, "lora_dropout": 3.0}, "lora_dropout=3.0: must lie in"),
        ({"steps_per_generation": 2, "generation_batch_size": 2}, "can not be both"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_setting_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: Path,
    corpus: Path,
    settings: dict[str, Any],
    says: str,
) -> None:
    settings = {"model_name_or_path": str(policy), "data": str(corpus), **settings}
    settings = {key: value for key, value in settings.items() if value is not None}
    with pytest.raises(ConfigError, match=says) as error:
        launch(monkeypatch, tmp_path, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num_generatons", "4"], r"num_generatons \(did you mean num_generations\?\)"),
        (["--windo=9"], r"windo \(did you mean window\?\)"),
        (["--window", "many"], "argument --window: invalid int value: 'many'"),
        (["astray"], "words that belong to no setting: astray"),
        (["--config"], "names no file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_one_clear_error_without_the_usage(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--use_cpu", "true", "--bf16", "false", *words])
    with pytest.raises(ConfigError, match=says):
        SCRIPT["main"]()
    assert "usage:" not in capsys.readouterr().err


def test_a_recipe_that_is_no_yaml_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: [1,\nb: }")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(recipe)])
    with pytest.raises(ConfigError, match=r"not YAML, .* line 2") as error:
        SCRIPT["main"]()
    assert "\n" not in str(error.value)


def test_weights_that_are_cut_short_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: Path, corpus: Path
) -> None:
    cut = shutil.copytree(policy, tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 100)
    with pytest.raises(ConfigError, match=f"model_name_or_path={cut}"):
        launch(monkeypatch, tmp_path, model_name_or_path=str(cut), data=str(corpus))


def test_from_a_shell_an_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/train.py"), "--config", str(tmp_path / "no.yaml")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --config")
    assert "Traceback" not in done.stderr


def test_a_stopped_run_says_so_and_exits_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Asked(StopGracefully):
        """Signalled before the first step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._ask(15, None)

    monkeypatch.setitem(SCRIPT["main"].__globals__, "StopGracefully", Asked)
    settings: dict[str, Any] = {"model_name_or_path": str(policy), "data": str(corpus)}
    code = launch(monkeypatch, tmp_path, **settings, max_steps=3, save_strategy="steps")
    assert code == SCRIPT["STOPPED"] == 75
    said = capsys.readouterr().err
    assert "stopped before its end, at step 1 of 3 (exit code 75); kept" in said
    assert (tmp_path / "out" / "checkpoint-1").is_dir()
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("given", [["--output_dir", "{}"], ["--output_dir={}"], []])
def test_an_interrupted_run_names_the_checkpoint_of_its_own_folder(
    tmp_path: Path, given: list[str]
) -> None:
    recipe, named, own = tmp_path / "recipe.yaml", tmp_path / "named", tmp_path / "own"
    recipe.write_text(f"output_dir: {named}\n")
    argv = ["train.py", "--config", str(recipe), *(word.format(own) for word in given)]
    assert "no checkpoint yet" in SCRIPT["kept"](argv)
    folder = own if given else named
    staged = folder / STAGING / "checkpoint-3"
    staged.mkdir(parents=True)
    publish(staged, folder / "checkpoint-3", facts={})
    assert f"kept {folder / 'checkpoint-3'} and the traces" in SCRIPT["kept"](argv)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"policy_version": 7}, StaleVersion, "policy_version 7, this update takes"),
        ({"meta": {MARK: "another"}}, ConfigError, "written with the tokenizer another"),
    ],
    ids=["version", "tokenizer"],
)
def test_kept_episodes_of_another_run_are_one_clear_error_where_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: Path,
    corpus: Path,
    change: dict[str, Any],
    error: type[OctopusError],
    says: str,
) -> None:
    settings: dict[str, Any] = {"model_name_or_path": str(policy), "data": str(corpus)}
    settings |= {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    assert launch(monkeypatch, tmp_path, **settings) == 0
    last = tmp_path / "out" / "checkpoint-1"
    file, manifest = last / "octopus_state_0.pt", last / "octopus.json"
    state = torch.load(file, weights_only=True)
    state["buffer"][0]["groups"][0][1].update(change)
    torch.save(state, file)
    facts = json.loads(manifest.read_text())
    facts["files"][file.name] = file.stat().st_size
    manifest.write_text(json.dumps(facts))
    again = {**settings, "max_steps": 2, "resume_from_checkpoint": "true"}
    with pytest.raises(error, match=says):
        launch(monkeypatch, tmp_path, **again)


@pytest.mark.parametrize("count", [0, 77])
def test_questions_that_no_episode_could_fork_for_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: Path, count: int
) -> None:
    world = ROOT / "data/seal_join"
    with pytest.raises(ConfigError, match=rf"branches={count}: must lie in 1..max_children=5"):
        launch(
            monkeypatch,
            tmp_path,
            model_name_or_path=str(policy),
            data=str(world),
            branches=[count],
            max_children=5,
        )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_small_world_run_under_what_its_policy_was_trained_on(recipe: Path) -> None:
    settings = yaml.safe_load(recipe.read_text())
    same = set(WORLD_ROLLOUT)
    if settings.get("agent") == "compact":  # a window that fills is what it is about
        same.remove("window")
    assert {key: settings[key] for key in same} == {key: WORLD_ROLLOUT[key] for key in same}


def test_the_table_of_settings_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), (
        "docs/config.md is old: run python -m octopus_trl.train.config_table"
    )


def test_a_line_of_progress_has_the_figures_that_are_there() -> None:
    assert shown({"reward": 0.5, "rollout_kl/mean": 1e-13, "loss": None}) == [
        "reward 0.500",
        "KL 1.0e-13",
    ]
    assert clock(3725.4) == "1:02:05"
