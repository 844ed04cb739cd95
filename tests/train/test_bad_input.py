"""What comes in broken has one outcome each, the one that docs/training.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octopus_trl import score_traces
from octopus_trl.errors import ConfigError, RewardError, StaleVersion
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.trace_files import read_traces
from octopus_trl.train.checks import MARK, check_traces, tokenizer_mark
from octopus_trl.train.rows import Tree, build_row, plan_rows
from tests.tiny import random_trace, tiny_hybrid
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


def rewarded(out: Path, *values: Any, **settings: Any) -> tuple[Any, Gradients]:
    """Train one step on one question whose rollouts get these rewards."""
    keep = Gradients()

    def reward(completions: Any, traces: Any, **kwargs: Any) -> list[Any]:
        return [values[trace.meta["rollout"]] for trace in traces]

    trainer = make_trainer(
        out,
        None,
        asked_rows(1),
        reward=reward,
        callbacks=[keep],
        num_generations=len(values),
        per_device_train_batch_size=len(values),
        **settings,
    )
    before = trained(trainer)
    with replayed():
        trainer.train()
    if not any(gradient.any() for gradient in keep.steps[0].values()):
        assert difference(trained(trainer), before) == 0.0
    return trainer, keep


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_reward_of_none_or_nan_is_no_reward_and_moves_nothing_of_its_episode(
    tmp_path: Path, missing: Any
) -> None:
    trainer, keep = rewarded(tmp_path / "a", 1.0, 0.0, missing)
    _, without = rewarded(tmp_path / "b", 1.0, 0.0)
    assert logged(trainer, "rewards/missing") == [pytest.approx(1 / 3)]
    assert logged(trainer, "reward") == [0.5]
    # The same gradient, of which each tree is a third instead of a half.
    share = {name: gradient * 1.5 for name, gradient in keep.steps[0].items()}
    assert difference(share, without.steps[0]) < 2e-5


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinite_reward_is_a_named_error_and_the_episodes_are_kept(
    tmp_path: Path, value: float
) -> None:
    with pytest.raises(RewardError, match=rf"reward function reward gave {value} to episode 1"):
        rewarded(tmp_path, 1.0, value)
    assert len(list(read_traces(tmp_path / "traces" / "unrewarded_train.jsonl"))) == 2


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_a_group_of_equal_rewards_has_a_gradient_of_exactly_zero(
    tmp_path: Path, value: float
) -> None:
    _, keep = rewarded(tmp_path, value, value, value)
    assert all(not gradient.any() for gradient in keep.steps[0].values())


def test_an_episode_that_sampled_nothing_has_no_gradient_and_leaves_the_others_theirs(
    tmp_path: Path,
) -> None:
    keep = Gradients()
    trainer = make_trainer(tmp_path, None, asked_rows(2), callbacks=[keep])
    with replayed(sizes=(0, 14)):
        trainer.train()
    other = Gradients()
    with replayed(sizes=(14, 14)):
        make_trainer(tmp_path, None, asked_rows(2), callbacks=[other]).train()
    assert any(gradient.any() for gradient in keep.steps[0].values())
    assert difference(keep.steps[0], other.steps[0]) > 1e-3
    assert logged(trainer, "loss")[0] == logged(trainer, "loss")[0]  # no NaN


def test_a_branch_that_was_cut_keeps_its_tokens_and_an_episode_that_was_may_be_masked(
    tmp_path: Path,
) -> None:
    segments = [
        Segment(0, 0, None, "prompt", [1]),
        Segment(1, 0, 0, "action", [2, 3]),
        Segment(2, 1, 1, "tool", [4]),
        Segment(3, 1, 2, "action", [5, 6, 7]),
    ]
    threads = [
        ThreadRecord(0, None, status="committed", head=1),
        ThreadRecord(1, 0, status="cut", head=3),
    ]
    trace = Trace("e", "p", threads=threads, segments=segments).place().check()
    row = build_row([Tree(trace, 1.0)], mounts="live")
    assert (row.num_owned.tolist(), row.normalisers.tolist()) == ([5], [5.0])

    def cut(self: Any) -> None:
        for rollout in self:
            rollout.truncated = True

    for masked, moves in ((False, True), (True, False)):
        keep = Gradients()

        def reward(completions: Any, traces: Any, **kwargs: Any) -> list[float]:
            cut(traces)
            return [float(trace.meta["rollout"]) for trace in traces]

        trainer = make_trainer(
            tmp_path / str(masked),
            None,
            asked_rows(2),
            reward=reward,
            callbacks=[keep],
            mask_truncated_completions=masked,
        )
        with replayed():
            trainer.train()
        assert any(g.any() for g in keep.steps[0].values()) is moves


def batch_of(out: Path) -> tuple[Any, dict[str, Any], Trace]:
    trainer = make_trainer(out, None, asked_rows(2))
    trainer.model.train()
    with replayed():
        batch = trainer._generate_and_score_completions(
            [row for row in asked_rows(2) for _ in range(2)]
        )
    return trainer, batch, batch["groups"][0][0]


@pytest.mark.parametrize("version", [-2, 1])
def test_a_trace_of_another_policy_version_is_a_named_error(tmp_path: Path, version: int) -> None:
    trainer, batch, trace = batch_of(tmp_path)
    trace.policy_version = version
    with pytest.raises(StaleVersion, match=rf"policy_version {version}, this update takes -1..0"):
        trainer._trees(batch)


def test_a_trace_of_another_tokenizer_is_a_named_error(tmp_path: Path) -> None:
    trainer, batch, trace = batch_of(tmp_path)
    assert trace.meta[MARK] == tokenizer_mark(tokenizer())
    trainer._trees(batch)
    trace.meta[MARK] = "another"
    with pytest.raises(ConfigError, match="written with the tokenizer another"):
        trainer._trees(batch)
    del trace.meta[MARK]
    trace.segments[-1].tokens[0] = 1024
    with pytest.raises(ConfigError, match="exceed the vocabulary of 1024"):
        trainer._trees(batch)


def test_marks_differ_where_one_id_means_another_word() -> None:
    class Words:
        def __init__(self, *words: str) -> None:
            self.words = {word: index for index, word in enumerate(words)}

        def get_vocab(self) -> dict[str, int]:
            return self.words

    assert tokenizer_mark(Words("a", "b")) == tokenizer_mark(Words("a", "b"))
    assert tokenizer_mark(Words("a", "b")) != tokenizer_mark(Words("b", "a"))


def test_a_trace_without_a_mark_is_held_to_the_vocabulary_alone() -> None:
    from octopus_trl import prepare_model
    from octopus_trl.models import spec_of

    spec = spec_of(prepare_model(tiny_hybrid(0)))
    check_traces([random_trace(0)], oldest=0, newest=0, mark="ours", spec=spec)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan"), True])
def test_a_temperature_that_divides_nothing_is_refused(temperature: float) -> None:
    from octopus_trl import prepare_model

    model = prepare_model(tiny_hybrid(0))
    with pytest.raises(ConfigError, match="must be above 0 and finite"):
        score_traces(model, [random_trace(0)], temperature=temperature)


def test_an_episode_that_fits_no_row_is_left_out_whole() -> None:
    trace = random_trace(0, roots=1)
    planned, said = plan_rows([Tree(trace, 1.0)], max_row_tokens=10, max_path_tokens=None)
    assert planned == []
    assert "max_row_tokens is 10" in said[0]
