"""A judge as a recipe's reward: named in YAML, its shares logged, its outage teaches nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.agent.reward import exact_match
from octopus_trl.errors import ConfigError
from octopus_trl.eval.grader import STAGES, AnswerReward
from octopus_trl.eval.judge import Judge
from octopus_trl.eval.judge_choice import REWARDS, JudgeSettings, reward_functions
from octopus_trl.train.metrics import is_known
from tests.agent.search_server import serving
from tests.eval.judge_server import NO, YES, JudgeServer, said
from tests.tiny import tiny_dense
from tests.train.runs import (
    Gradients,
    asked_rows,
    difference,
    logged,
    make_trainer,
    replayed,
    tokenizer,
    trained,
)
from tests.train.test_script import corpus, launch, policy

__all__ = ["corpus", "policy"]  # fixtures


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serving(JudgeServer()) as server:
        yield server


def train(out: Path, server: JudgeServer, questions: int) -> tuple[Any, Gradients, bool]:
    """Train one step, three rollouts a question; gives whether any parameter moved too."""
    keep = Gradients()
    reward = AnswerReward(Judge(server.model(retries=0), cache=out / "verdicts.json"))
    rows = [{**row, "answers": ["gold"]} for row in asked_rows(questions)]
    trainer = make_trainer(
        out,
        None,
        rows,
        reward=reward,
        callbacks=[keep],
        num_generations=3,
        per_device_train_batch_size=3 * questions,
        shuffle_dataset=False,
        trace_every=0,
    )
    before = trained(trainer)
    with replayed(sizes=(9,)):
        trainer.train()
    return trainer, keep, difference(trained(trainer), before) > 0


def first_is_right(body: dict[str, Any]) -> tuple[int, Any]:
    """Judge rollout 0 right and others wrong; question 1 and later meet an outage."""
    response = body["messages"][0]["content"].split("<answer>\n")[1].split("\n")[0]
    question, rollout = response.split()
    return (503, {}) if question != "q0" else (200, said(YES if rollout == "0" else NO))


def test_an_outage_takes_its_group_out_of_the_gradient_and_leaves_the_others(
    tmp_path: Path,
    server: JudgeServer,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.reply = first_is_right
    trainer, keep, moved = train(tmp_path / "two", server, 2)
    assert moved
    _, alone, _ = train(tmp_path / "one", server, 1)
    # The same gradient, of which each tree is a sixth instead of a third.
    share = {name: 2.0 * gradient for name, gradient in keep.steps[0].items()}
    assert difference(share, alone.steps[0]) < 2e-5
    assert logged(trainer, "rewards/missing") == [0.5]
    found = {stage: logged(trainer, f"grader/{stage}") for stage in STAGES}
    assert found["judge"] == found["judge_down"] == [0.5]
    assert {tuple(found[s]) for s in STAGES if not s.startswith("judge")} == {(0.0,)}
    assert all(is_known(f"grader/{stage}") for stage in STAGES)
    said_to_user = capsys.readouterr().err
    assert "no reward for 3 of 6 episodes" in said_to_user
    # TRL would quote the question and its gold answer.
    for text in (said_to_user, caplog.text):
        assert "All reward functions returned None" not in text
        assert "question 1" not in text


def test_with_no_judge_at_all_nothing_moves_and_the_next_run_asks_again(
    tmp_path: Path, server: JudgeServer
) -> None:
    server.reply = lambda body: (503, {})
    trainer, keep, moved = train(tmp_path, server, 1)
    assert not moved
    assert not any(gradient.any() for gradient in keep.steps[0].values())
    assert logged(trainer, "rewards/missing") == [1.0]
    assert not (tmp_path / "verdicts.json").exists()
    server.reply = first_is_right
    _, _, moved = train(tmp_path, server, 1)
    assert moved
    asked = len(server.bodies)
    train(tmp_path, server, 1)  # every verdict is known now
    assert len(server.bodies) == asked


@pytest.mark.parametrize("name", REWARDS)
def test_every_grader_is_a_name_in_a_recipe_and_logs_what_decided(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: Path,
    corpus: Path,
    server: JudgeServer,
    name: str,
) -> None:
    judge = {} if name == "exact_match" else {"judge_model": "pinned", "judge_url": server.url}
    settings: dict[str, Any] = {"model_name_or_path": str(policy), "data": str(corpus)}
    code = launch(monkeypatch, tmp_path, **settings, **judge, reward_funcs=[name], logging_steps=1)
    assert code == 0
    log = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"][0]
    assert log[f"rewards/{name}/mean"] == 0.0
    if name != "exact_match":
        # The untrained policy commits nothing, which is wrong without a judge.
        assert {stage: log[f"grader/{stage}"] for stage in STAGES} == {
            **dict.fromkeys(STAGES, 0.0),
            "no_answer": 1.0,
        }
    assert server.bodies == []


def test_a_recipe_may_name_a_local_judge(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: Path,
    corpus: Path,
) -> None:
    model = tmp_path / "judge"
    tiny_dense(vocab_size=len(tokenizer())).save_pretrained(model)
    tokenizer().save_pretrained(model)
    made = reward_functions(["answer"], JudgeSettings(model=str(model), max_tokens=3))
    assert made[0](["It is Rome"], question=["Q"], answers=[["Paris"]]) == [0.0]
    settings: dict[str, Any] = {"model_name_or_path": str(policy), "data": str(corpus)}
    judge = {"reward_funcs": ["judge"], "judge_model": str(model), "judge_max_tokens": 3}
    assert launch(monkeypatch, tmp_path, **settings, **judge) == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reward_funcs": ["exact"]}, "'exact' is unknown; there are exact_match"),
        ({"reward_funcs": ["answer"]}, "answer without a judge; set judge_model"),
        ({"reward_funcs": ["judge"], "judge_url": "http://h/v1"}, "without judge_model"),
        ({"judge_model": "m", "judge_url": "http://h/v1"}, "nothing asks it"),
        (
            {"reward_funcs": ["answer", "judge"], "judge_model": "m", "judge_url": "http://h/v1"},
            "one of answer and judge",
        ),
        ({"reward_funcs": ["exact_match", "exact_match"]}, "each once"),
        ({"reward_funcs": ["judge"], "judge_model": "m"}, "is no folder and has no revision"),
        (
            {"reward_funcs": ["judge"], "judge_model": "m", "judge_url": "h"},
            "must be http://HOST:PORT",
        ),
        ({"reward_weights": [1.0, 2.0]}, "2 weights for 1 reward_funcs"),
        ({"backend": "lucene"}, "backend='lucene': must be one of"),
        ({"backend": "opensearch", "index": "i"}, "without search_url"),
        ({"search_url": "http://127.0.0.1:9"}, "backend=opensearch without index"),
        ({"backend": "pyserini", "index": "nowhere"}, "nowhere: no Lucene index"),
        ({"index": "i"}, "index=i with backend=bm25"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_grader_or_backend_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: Path,
    corpus: Path,
    settings: dict[str, Any],
    says: str,
) -> None:
    given = {"model_name_or_path": str(policy), "data": str(corpus), **settings}
    with pytest.raises(ConfigError, match=says):
        launch(monkeypatch, tmp_path, **given)


def test_several_rewards_keep_their_order() -> None:
    settings = JudgeSettings("http://h/v1", "m")
    made = reward_functions(["answer", "exact_match"], settings)
    assert [made[0].__name__, made[1]] == ["answer", exact_match]
