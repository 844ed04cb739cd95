"""`scripts/bench.py`: every case on a small model, its limits, its frozen episode, its budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from octopus_trl import Trace, prepare_model
from scripts.bench_cases import CASES, command, decode, mix, replay
from scripts.bench_cases.limits import H200, Rates, Shapes
from scripts.bench_cases.models import QWEN35_4B, mean_entropy, scale_entropy
from scripts.bench_cases.profile import write_profile
from scripts.bench_cases.setting import Line, Setting, WrongResult
from scripts.bench_cases.sizes import SIZES
from tests.tiny import tiny_hybrid

SMALL = replace(
    SIZES["tiny"],
    threads=(2, 3),
    shared=33,
    own=8,
    warm_steps=1,
    steps=3,
    contexts=(17, 64),
    span=9,
    tool=2,
    repeats=10,
    prefix=40,
    new=16,
    chunks=(8, 16),
    prompt=5,
    baseline_steps=2,
    mix_scale=2_048,
    flat_rounds=(27,),
    prefill_chunk=16,
)
OURS = ("decode", "fork", "mount", "rewind", "prefill", "episode")
FIELDS = {"case", "value", "unit", "limit", "share", "baseline"}
LINE = {"bench", "hardware", "versions", "date", "commit"} | FIELDS


@pytest.fixture(scope="module")
def model() -> Any:
    return prepare_model(tiny_hybrid()).requires_grad_(False)


@pytest.fixture
def setting(model: Any, monkeypatch: pytest.MonkeyPatch) -> Setting:
    # What a small CPU measures of itself would take longer than the cases.
    monkeypatch.setattr(Rates, "of", lambda *_: H200)
    return Setting(sizes=SMALL, kept={"model": model})


def lines(setting: Setting, name: str) -> list[dict[str, Any]]:
    found = list(command.run_case(name, setting, asked=True))
    assert not any(failed for _, failed in found), found
    return [line.record() for line, _ in found]


@pytest.mark.parametrize("name", OURS)
def test_a_case_runs_on_a_cpu_and_fills_every_field(setting: Setting, name: str) -> None:
    found = lines(setting, name)
    assert found
    for line in found:
        assert set(line) == FIELDS
        assert set(line["baseline"]) == {"name", "value"}
        assert isinstance(line["value"], int | float)
        assert line["limit"] is not None
        assert line["share"] is not None
        json.dumps(line, allow_nan=False)
    assert len({line["case"] for line in found}) == len(found), "two lines of one name"
    assert any(line["baseline"]["value"] for line in found), "nothing to compare with"


def test_the_main_prints_and_keeps_whole_lines(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "Setting", lambda **_: setting)
    assert command.main(["rewind", "--keep", "--folder", str(tmp_path), "--commit", "abc"]) == 0
    printed = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    kept = [json.loads(text) for text in (tmp_path / "rewind.jsonl").read_text().splitlines()]
    assert kept == printed
    for line in printed:
        assert set(line) == LINE
        assert (line["bench"], line["commit"]) == ("rewind", "abc")


@pytest.mark.parametrize("name", OURS)
def test_a_case_over_the_budget_says_so_in_a_line(
    setting: Setting, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.budget_s = 1e-9
    (line,) = lines(setting, name)
    assert line["value"] is None
    assert "not run (budget" in line["case"]
    # The budget may also run out inside a case.
    monkeypatch.setattr(setting, "fits", lambda seconds: seconds == 0)
    assert all(
        line["value"] is not None or "not run (budget" in line["case"]
        for line in lines(setting, name)
    )


def test_a_failed_case_says_so_and_the_next_one_runs(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(setting: Setting) -> Iterator[Line]:
        raise WrongResult("logits differ")
        yield

    monkeypatch.setattr("scripts.bench_cases.rewind.run", broken)
    monkeypatch.setattr(command, "Setting", lambda **_: setting)
    assert command.main(["rewind", "mount"]) == 1
    names = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert names[0]["case"] == "rewind: not run (WrongResult: logits differ)"
    assert {line["bench"] for line in names[1:]} == {"mount"}


def test_a_wrong_case_name_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["decoed"])
    assert ended.value.code == 2
    assert "must be one of decode, fork" in capsys.readouterr().err


def test_a_wrong_engine_is_not_timed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    from octopus_trl import Engine

    honest = Engine.logits
    monkeypatch.setattr(Engine, "logits", lambda *args: honest(*args) * 1.01)
    ((line, failed),) = command.run_case("decode", setting, asked=True)
    assert failed
    assert line.value is None
    assert "logits differ from the plain forward's" in line.case


def test_a_profile_is_written_for_each_number_of_threads(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting.profile = tmp_path / "profiles"
    written: list[Path] = []

    def noted(path: Path, step: Callable[[], Any]) -> None:
        step()
        written.append(path)

    monkeypatch.setattr(decode, "write_profile", noted)
    lines(setting, "decode")
    assert written == [setting.profile / f"decode_{threads}.txt" for threads in SMALL.threads]
    square = torch.ones(3, 3)
    write_profile(written[0], lambda: square @ square)
    text = written[0].read_text()
    assert text.startswith("10 steps under the profiler")
    assert "aten::mm" in text


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    with torch.device("meta"):
        return Shapes.of(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**QWEN35_4B)).to(torch.bfloat16))


@pytest.mark.parametrize(("threads", "goal"), [(8, 2_530), (16, 4_340), (64, 9_340)])
def test_the_roofline_is_that_of_the_design(shapes: Shapes, threads: int, goal: int) -> None:
    step_s = shapes.decode_s(threads, shared=32_768, own=4_096, rates=H200)
    assert 0.75 * threads / step_s == pytest.approx(goal, rel=2e-3)


def test_sizes_of_the_4b_model_are_those_of_the_design(shapes: Shapes) -> None:
    assert shapes.weight_bytes == pytest.approx(8.41e9, rel=1e-3)
    assert shapes.kv_bytes == 32 * 1024
    assert (shapes.num_recurrent, 4 * shapes.num_recurrent * shapes.state_elements) == (
        24,
        48 << 20,
    )


def test_attention_bound_by_flops_counts_flops(shapes: Shapes) -> None:
    slow = Rates(bytes_s=H200.bytes_s, attention_flops=1e12, flops=1e12)
    by_flops = 64 * (32_768 + 4_096) * shapes.seen_flops / 1e12
    without_kv = (shapes.weight_bytes + 2 * 64 * shapes.state_bytes) / H200.bytes_s
    found = shapes.decode_s(64, shared=32_768, own=4_096, rates=slow)
    assert found == pytest.approx(by_flops + without_kv)


def test_logits_are_scaled_to_one_nat() -> None:
    model = tiny_hybrid(seed=3)
    assert scale_entropy(model) == pytest.approx(1.0, abs=0.02)
    flat = mean_entropy(torch.zeros(2, 97))
    assert flat == pytest.approx(torch.tensor(97.0).log().item(), rel=1e-5)


def test_the_frozen_mix_equals_its_generator() -> None:
    assert mix.read(mix.EPISODE_V1) == mix.episode_v1()


def test_the_mix_is_the_episode_of_the_issue() -> None:
    plan = mix.read(mix.EPISODE_V1)
    trace = mix.trace_of(plan, 248_320)
    assert isinstance(trace, Trace)
    implied = replay.implied_by(trace, plan)
    assert (implied.forks, implied.mounts, implied.rewinds) == (10, 24, 6)
    assert sum(turn.given == 8_192 for turn in plan.turns) == 36
    assert implied.given + implied.sampled == sum(trace.lengths)
    chains = {thread.id: trace.linearize(thread.head or 0)[0] for thread in trace.threads}
    assert max(map(len, chains.values())) <= 32_768 + len(trace.segments[0].tokens)
    assert implied.hit_rate >= 0.896  # issue B: what an engine that misses nothing reaches
    assert implied.visible / len(plan.turns) == pytest.approx(26_400, rel=0.2)  # paper, a turn


def small_mix() -> mix.Mix:
    """A child ahead of its sibling and of the root, which go back and read."""
    return mix.Mix(
        "small",
        [
            mix.Turn(0, 0, given=7, sampled=2),
            mix.Turn(1, 1, given=20, sampled=3, fork=0),
            mix.Turn(2, 1, given=1, sampled=2, fork=0),
            mix.Turn(2, 2, given=4, sampled=1),
            mix.Turn(2, 3, given=3, sampled=2, keep=1, reads=[1]),
            mix.Turn(0, 4, given=2, sampled=1, reads=[2, 1]),
        ],
    )


def replayed(setting: Setting, plan: mix.Mix, trace: Trace) -> dict[str, Any]:
    engine = replay.make_engine(setting, sum(trace.lengths), len(trace.threads))
    assert len(replay.replay(engine, plan, trace)) == plan.num_rounds
    engine.check_integrity()
    return engine.stats()


def test_counters_that_the_trace_contradicts_are_named(setting: Setting) -> None:
    plan = small_mix()
    trace = mix.trace_of(plan, 97)
    implied = replay.implied_by(trace, plan)
    assert (implied.given, implied.sampled, implied.mounts, implied.rewinds) == (37, 11, 3, 1)
    # Seen before each given run: 0; 9 and 9; 12; 12 + 23 of thread 1; 9 + 23 + 8 of thread 2.
    assert implied.visible == 0 + 9 + 9 + 12 + (12 + 23) + (9 + 23 + 8)
    assert implied.hit_rate == (9 + 9 + 12 + 12 + 9) / (9 + 9 + 12 + 12 + 9 + 37)
    # At the end: the prompt and its turn, thread 1's 23, thread 2's 3 + 5 that are left, root's 3.
    assert implied.peak == 9 + 23 + 8 + 3
    stats = replayed(setting, plan, trace)
    replay.check_counters(stats, implied)
    with pytest.raises(WrongResult, match=r"^mounts is 2, the trace says 3$"):
        replay.check_counters({**stats, "mounts": 2}, implied)


@pytest.mark.parametrize("broken", ["reads", "keep"])
def test_a_replay_that_leaves_the_trace_is_found(setting: Setting, broken: str) -> None:
    plan = small_mix()
    trace = mix.trace_of(plan, 97)
    turn = plan.turns[4]
    setattr(turn, broken, [] if broken == "reads" else None)
    with pytest.raises(WrongResult, match=r"thread 2 after round 3: .* the trace says 17"):
        replayed(setting, plan, trace)


def test_flat_turns_prefill_all_that_they_see(setting: Setting) -> None:
    plan = small_mix()
    implied = replay.implied_by(mix.trace_of(plan, 97), plan)
    assert replay.flat_tokens(implied, plan, [3]) == 12 + 23 + 3
    assert replay.flat_tokens(implied, plan, range(5)) == implied.visible + implied.given
    assert replay.new_tokens(implied, plan, [3, 4]) == 3 + 2 + 2 + 1
    assert replay.flat_round_s(setting, implied, plan, 1) > 0


def test_an_episode_takes_at_least_the_time_of_its_flops_and_bytes(shapes: Shapes) -> None:
    plan = small_mix()
    implied = replay.implied_by(mix.trace_of(plan, 97), plan)
    # Round 1: two steps of both threads, one of thread 1 alone; keys and values of the root once.
    prefill = shapes.prefill_flops(20, 9) + shapes.prefill_flops(1, 9)
    steps = 3 * shapes.weight_bytes + (2 * 2 + 1) * 2 * shapes.state_bytes
    kv_bytes = (2 * (9 + 20 + 1) + 9 + 20) * shapes.kv_bytes
    found = replay.ideal_s(implied, plan, [1], shapes, H200)
    assert found == pytest.approx(prefill / H200.flops + (steps + kv_bytes) / H200.bytes_s)


def test_every_case_has_a_module_or_an_owner_to_come() -> None:
    folder = Path(mix.__file__).parent
    made = {name for name in CASES if (folder / f"{name}.py").exists()}
    assert made >= {*OURS, "packed"}
