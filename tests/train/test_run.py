"""A whole run on the real engine: what is sampled is what is trained, and it is all on record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from octopus_trl.agent.reward import exact_match
from octopus_trl.errors import ConfigError
from octopus_trl.trace_files import read_traces
from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.metrics import is_known
from octopus_trl.train.records import read_generations, text_of
from octopus_trl.train.trainer import OctopusGRPOTrainer
from tests.tiny import tiny_hybrid
from tests.train.runs import (
    SETTINGS,
    asked_rows,
    forced,
    logged,
    make_trainer,
    questions,
    replayed,
    small_world,
    tokenizer,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two updates on episodes of experts: forks, mounts, rewinds."""
    folder = tmp_path_factory.mktemp("run")
    backend = small_world(folder / "world")
    rows = questions(backend.world, 1)
    with forced(backend.world, rows):
        trainer = make_trainer(
            folder / "out",
            backend,
            rows,
            per_device_train_batch_size=2,
            max_steps=2,
            save_strategy="steps",
            save_steps=2,
            learning_rate=0.01,
        )
        trainer.train()
    return trainer


def test_rollout_and_training_agree_before_every_update(run: Any) -> None:
    for place in ("mean", "unmounted", "mounted", "rewound", "after_rewind"):
        found = logged(run, f"rollout_kl/{place}")
        assert len(found) == 2
        assert all(0 <= value <= 1e-8 for value in found), place
    assert all(value < 1e-4 for value in logged(run, "rollout_kl/max_abs"))


def test_figures_say_what_the_traces_hold(run: Any) -> None:
    traces = read_generations(run.args.output_dir)[:2]
    threads = [len(trace.threads) for trace in traces]
    assert logged(run, "episode/threads")[0] == sum(threads) / 2
    assert logged(run, "episode/forks")[0] == sum(threads) / 2 - 1 == 2
    reads = [event for trace in traces for event in trace.events if event["type"] == "read"]
    assert logged(run, "episode/mounts")[0] == len(reads) / 2 == 2
    backs = [event for trace in traces for event in trace.events if event["type"] == "rewind"]
    assert logged(run, "episode/rewinds")[0] == len(backs) / 2 > 0
    owned = [trace.num_owned for trace in traces]
    assert logged(run, "engine/decoded")[0] == sum(owned)
    assert logged(run, "episode/owned_tokens")[0] == sum(owned) / 2
    prompt = len(traces[0].segments[0].tokens)
    given = sum(sum(trace.lengths) for trace in traces) - sum(owned)
    assert logged(run, "engine/prefilled")[0] == given - prompt
    assert logged(run, "engine/reused")[0] == prompt
    for name in ("re_prefilled", "replayed", "bytes_copied"):
        assert logged(run, f"engine/{name}") == [0, 0]
    assert logged(run, "packing/dedup_ratio")[0] > 1.5


def test_every_figure_of_a_real_run_is_in_the_table_and_says_what_was_done(run: Any) -> None:
    names = {name for entry in run.state.log_history for name in entry}
    assert {name for name in names if not is_known(name)} == set()
    traces = read_generations(run.args.output_dir)[:2]
    assert logged(run, "episode/explored_tokens")[0] == sum(sum(t.lengths) for t in traces) / 2
    assert logged(run, "episode/active_tokens")[0] < logged(run, "episode/explored_tokens")[0]
    assert logged(run, "episode/depth") == [1, 1]
    reads = [event for trace in traces for event in trace.events if event["type"] == "read"]
    assert logged(run, "engine/mounts")[0] == len(reads)
    for name in ("engine/step_s", "engine/open_s", "speed/sampled_tokens_per_s"):
        assert all(value > 0 for value in logged(run, name)), name


def test_every_trace_is_written_with_its_reward_and_passes_its_own_check(run: Any) -> None:
    folder = Path(run.args.output_dir) / "traces"
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["step_000000.jsonl", "step_000001.jsonl"]
    for version, file in enumerate(files):
        traces = list(read_traces(file))
        assert [trace.reward for trace in traces] == [1.0, 0.0]
        assert [trace.policy_version for trace in traces] == [version] * 2
        assert len({trace.episode_id for trace in traces}) == 2


def test_a_trace_reads_as_text(run: Any) -> None:
    trace = read_generations(run.args.output_dir)[0]
    text = text_of(trace, tokenizer().decode)
    assert "<function=read_thread>" in text
    assert "reads [" in text
    assert trace.meta["result"] in text


def test_the_engine_holds_nothing_between_generations(run: Any) -> None:
    engine = run._policy.engine
    engine.check_integrity()
    assert engine.stats()["pages"] == 0
    assert engine.stats()["cursors"] == 0
    assert engine.policy_version == 1


def test_a_saved_adapter_gives_the_model_that_was_trained(run: Any, tmp_path: Path) -> None:
    run.save_model(str(tmp_path))
    fresh = tiny_hybrid(0, vocab_size=1024, eos_token_id=tokenizer().eos_token_id)
    loaded = PeftModel.from_pretrained(fresh, str(tmp_path)).eval()
    ids = torch.arange(40)[None] * 7 % 1000
    with torch.no_grad():
        expected = run.model.eval()(input_ids=ids).logits
        assert torch.equal(loaded(input_ids=ids).logits, expected)
    run.model.train()


def test_an_interrupted_generation_keeps_the_episodes_that_ended(tmp_path: Path) -> None:
    backend = small_world(tmp_path / "world")
    rows = questions(backend.world, 1)
    calls = []

    class Press:
        def on_episode(self, done: int, total: int, trace: Any) -> None:
            calls.append((done, total))
            raise KeyboardInterrupt

    limits: dict[str, Any] = {"max_turns": 2, "max_new_tokens": 4, "per_device_train_batch_size": 2}
    trainer = make_trainer(tmp_path / "out", backend, rows, **limits)
    trainer.callback_handler.callbacks.append(Press())
    trainer.model.train()
    with pytest.raises(KeyboardInterrupt):
        trainer._generate_and_score_completions(rows * 2)
    assert calls == [(1, 2)]
    kept = list(read_traces(tmp_path / "out" / "traces" / "interrupted_train.jsonl"))
    assert len(kept) == 1
    assert trainer.model.training


def test_threads_that_run_out_of_pages_are_said_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = small_world(tmp_path / "world")
    rows = questions(backend.world, 2)
    limits: dict[str, Any] = {"window": 512, "reserve_tokens": 100, "max_turns": 2}
    trainer = make_trainer(
        tmp_path / "out", backend, rows, max_new_tokens=150, num_pages=32, **limits
    )
    trainer.train()
    assert "threads failed in 4 episodes: PagesExhausted" in capfd.readouterr().err
    assert logged(trainer, "episode/failed_threads")[0] > 0


def test_a_batch_without_whole_groups_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, None, asked_rows(2))
    with pytest.raises(ConfigError, match="3 rows holds no whole groups of 2"):
        trainer._generate_and_score_completions(asked_rows(3))


@pytest.mark.parametrize("missing", ["train_dataset", "eval_dataset"])
def test_questions_that_a_run_needs_and_does_not_have_are_one_clear_error(
    tmp_path: Path, missing: str
) -> None:
    asked = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    args = OctopusGRPOConfig(**{**SETTINGS, "output_dir": str(tmp_path), **asked})
    rows = {"train_dataset": asked_rows(2), "eval_dataset": asked_rows(2)}
    del rows[missing]
    model = tiny_hybrid(0, vocab_size=1024)
    with pytest.raises(ConfigError, match=f"{missing} is None: give rows"):
        OctopusGRPOTrainer(model, exact_match, args, processing_class=tokenizer(), **rows)


def test_a_model_given_by_its_folder_is_loaded_as_a_text_model(tmp_path: Path) -> None:
    tiny_hybrid(0, vocab_size=1024, eos_token_id=1).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    args = OctopusGRPOConfig(**{**SETTINGS, "output_dir": str(tmp_path)})
    trainer = OctopusGRPOTrainer(
        str(tmp_path / "model"), exact_match, args, train_dataset=asked_rows(2)
    )
    assert type(trainer.model).__name__ == "Qwen3_5ForCausalLM"
    assert trainer.processing_class.eos_token == "<|im_end|>"


def test_evaluation_has_figures_and_traces_of_its_own_and_leaves_training_alone(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(
        tmp_path,
        None,
        asked_rows(2),
        eval_rows=asked_rows(3),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        per_device_eval_batch_size=2,
        eval_temperature=0.0,
    )
    with replayed() as asked:
        trainer.train()
    assert len(asked) == 2 * (4 + 3)
    assert logged(trainer, "eval_reward") == [1.0, 1.0]
    assert len(logged(trainer, "eval_rollout_kl/mean")) == 2
    assert {file.name for file in (tmp_path / "traces").iterdir()} == {
        *("step_000000.jsonl", "step_000001.jsonl"),
        *("eval_000001.jsonl", "eval_000001.1.jsonl"),
        *("eval_000002.jsonl", "eval_000002.1.jsonl"),
    }


def test_rewards_get_commits_as_completions_and_traces_and_columns(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, traces: Any, level: Any, **kwargs: Any) -> Any:
        seen.update(kwargs, prompts=prompts, completions=completions, traces=traces, level=level)
        kwargs["log_metric"]("length", 3.0)
        return [1.0, 0.0] * (len(completions) // 2)

    rows = [{**row, "level": index} for index, row in enumerate(asked_rows(2))]
    trainer = make_trainer(tmp_path, None, rows, reward=reward, log_completions=True)
    with replayed():
        trainer.train()
    assert sorted(seen["completions"]) == ["q0 0", "q0 1", "q1 0", "q1 1"]
    assert sorted(seen["prompts"]) == ["question 0", "question 0", "question 1", "question 1"]
    assert [trace.meta["result"] for trace in seen["traces"]] == seen["completions"]
    assert sorted(seen["level"]) == [0, 0, 1, 1]
    assert [len(ids) for ids in seen["completion_ids"]] == [t.num_owned for t in seen["traces"]]
    assert logged(trainer, "length") == [3.0]
    assert (tmp_path / "completions").is_dir()


def test_a_conversation_gets_a_message_as_completion(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: Any, **kwargs: Any) -> Any:
        seen.extend(completions)
        return [0.0] * len(completions)

    prompt = [{"role": "user", "content": "why?"}]
    rows = [{"id": f"q{index}", "prompt": prompt} for index in range(2)]
    trainer = make_trainer(tmp_path, None, rows, reward=reward)
    with replayed():
        trainer.train()
    assert [{"role": "assistant", "content": "q0 1"}] in seen
