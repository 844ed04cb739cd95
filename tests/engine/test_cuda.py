"""The engine on a GPU: fused passes and captured steps against the model's own forward."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from octopus_trl.engine import Cursor, Engine
from octopus_trl.engine.graphs import DecodeSteps
from octopus_trl.errors import ConfigError, PagesExhausted
from octopus_trl.maths.objective import rollout_training_kl
from octopus_trl.models import prepare_model
from octopus_trl.protocols import Finished, SamplingParams
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.train.packing import score_traces
from tests.engine.conftest import poison, tokens
from tests.engine.replay import play
from tests.engine.shipped_policy import shipped_policy, step_zero_kl
from tests.tiny import random_trace, tiny_dense, tiny_hybrid, with_lora

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

VOCAB = 1000
KL = 1.5e-4  # DESIGN §8, bfloat16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}
HYBRID: dict[str, Any] = {
    **SIZES,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
    },
}


def hybrid_model(
    dtype: torch.dtype = torch.bfloat16, lora: bool = False, device: str = "cuda"
) -> Any:
    model = tiny_hybrid(**HYBRID)
    model = with_lora(model, rank=8) if lora else model
    return prepare_model(model.to(device, dtype))


def dense_model(dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    return prepare_model(tiny_dense(**SIZES).to(device, dtype), mount_layers=[1, 3])


def exact(model: Any) -> Any:
    """The same weights in float32, on the references."""
    if type(model).__name__ == "Qwen3ForCausalLM":
        other = dense_model(torch.float32, device="cpu")
    else:
        other = hybrid_model(torch.float32, hasattr(model, "peft_config"), device="cpu")
    other.load_state_dict(model.state_dict())
    return other


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return hybrid_model()


@pytest.fixture(params=["hybrid", "dense", "adapted"], scope="module")
def model(request: pytest.FixtureRequest, hybrid: Any) -> Any:
    if request.param == "hybrid":
        return hybrid
    return dense_model() if request.param == "dense" else hybrid_model(lora=True)


def engine_of(model: Any, **options: Any) -> Engine:
    settings: dict[str, Any] = {"page_size": 16, "num_pages": 600, "num_states": 64, **options}
    return poison(Engine(model, **settings))


def run_turns(
    engine: Engine, threads: Sequence[int], strangers: int = 0
) -> dict[int, tuple[list[int], list[float]]]:
    """Turns that join and leave at different times, one after a mount, beside strangers."""
    root = engine.open(tokens(100, vocab=VOCAB))
    others = [engine.extend(engine.fork(root), tokens(5 + i, i, VOCAB)) for i in range(strangers)]
    for index, cursor in enumerate(others):
        params = SamplingParams(seed=900 + index, max_tokens=5 + 7 * index)
        engine.submit(cursor, [], params, until=())
    source = engine.extend(engine.fork(root), tokens(40, 77, VOCAB))
    cursors: dict[int, Cursor] = {}
    tickets: dict[int, int] = {}
    ended: dict[int, Finished] = {}
    for thread in threads:
        cursors[thread] = engine.fork(root)
        if thread % 2:
            engine.mount(cursors[thread], source)
        params = SamplingParams(
            temperature=0.8, seed=thread, max_tokens=10 + 5 * thread, top_k=20 if thread == 4 else 0
        )
        given = tokens(13 * thread, thread, VOCAB)
        tickets[thread] = engine.submit(cursors[thread], given, params, until={0})
        ended.update({one.ticket: one for one in engine.step()})
    while engine.has_work:
        ended.update({one.ticket: one for one in engine.step()})
    engine.check_integrity()
    assert all(ended[ticket].reason in ("stop", "length") for ticket in tickets.values())
    return {t: (ended[ticket].tokens, ended[ticket].logps) for t, ticket in tickets.items()}


def test_fused_passes_run_by_default_and_steps_are_captured(model: Any) -> None:
    engine = engine_of(model)
    run_turns(engine, range(5))
    assert engine._paths.passes is not None
    assert engine._paths.passes.steps._graphs
    assert engine.stats()["seconds"]["capture"] > 0


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_a_fused_engine_is_no_further_from_float32_than_the_models_own_forward(kind: str) -> None:
    make = hybrid_model if kind == "hybrid" else dense_model
    trace = random_trace(3, vocab_size=VOCAB)
    errors = {}
    with torch.no_grad():
        exact = play(engine_of(make(torch.float32), fused=False), trace)[1]
        for name, fused in (("fused", True), ("own", False)):
            found = play(engine_of(make(), fused=fused), trace)[1]
            differences = [
                (ours.log_softmax(-1) - want.log_softmax(-1)).abs().mean().item()
                for ours, want in zip(found, exact, strict=True)
            ]
            errors[name] = sum(differences) / len(differences)
    sys.stdout.write(f"mean |difference| of log-probabilities from float32, {kind}: {errors}\n")
    assert errors["fused"] <= 1.2 * errors["own"] + 1e-4


def test_replayed_graphs_draw_what_their_operations_draw(model: Any) -> None:
    captured, launched = engine_of(model), engine_of(model)
    assert launched._paths.passes is not None
    launched._paths.passes.steps.capture = False
    want = run_turns(launched, range(6), strangers=3)
    found = run_turns(captured, range(6), strangers=3)
    assert found == want


def test_at_a_fixed_width_a_thread_does_not_depend_on_its_batch_bit_by_bit(model: Any) -> None:
    want = run_turns(engine_of(model, decode_width=16), range(6))
    for threads, strangers in (([4, 2, 5], 0), ([5, 4, 3, 2, 1, 0], 9), ([3], 21)):
        engine = engine_of(model, decode_width=16, page_size=8, num_pages=1200)
        found = run_turns(engine, threads, strangers)
        assert found == {thread: want[thread] for thread in threads}


@pytest.mark.parametrize(
    "rule",
    [{}, {"position": "rerotate"}, {"exchange": "splice"}],
    ids=lambda rule: str(*rule.values()),
)
def test_step_zero_kl_of_unmounted_mounted_and_rewound_tokens(
    model: Any, rule: dict[str, Any]
) -> None:
    """Sampled log-probabilities against the packed pass that trains.

    Random weights draw tokens that they find unlikely, and bfloat16 is then further from float32
    than DESIGN §8 allows a trained policy: what the training pass itself is off by is allowed too.
    """
    engine = engine_of(model)
    if "exchange" in rule and not engine.spec.is_hybrid:
        pytest.skip("a dense model has no recurrent layers to splice")
    prompt = tokens(200, vocab=VOCAB)
    segments = [Segment(0, 0, None, "prompt", prompt)]
    threads = [ThreadRecord(0, None, head=0)]
    root = engine.open(prompt)
    heads: dict[int, int] = {}
    cursors: dict[int, Cursor] = {}
    kinds: dict[int, str] = {}

    def turn(thread: int, given: list[int], mounts: list[int], kind: str) -> None:
        cursor = cursors[thread]
        for text, name in ((given, "tool"), (None, "action")):
            start, logps = cursor.position, None
            if text is None:
                params = SamplingParams(seed=31 * thread + len(segments), max_tokens=120)
                [(text, logps)] = engine.generate([cursor], params, until=())
                kinds[len(segments)] = kind
            else:
                engine.extend(cursor, text)
            segments.append(
                Segment(len(segments), thread, heads[thread], name, text, mounts, start, logps)
            )
            heads[thread], mounts = segments[-1].id, []

    for thread in (1, 2):
        cursors[thread], heads[thread] = engine.fork(root), 0
        threads.append(ThreadRecord(thread, 0))
        turn(thread, tokens(20 * thread, thread, VOCAB), [], "unmounted")
    kept = cursors[2].num_tokens
    engine.mount(cursors[1], cursors[2], **rule)
    turn(1, tokens(25, 5, VOCAB), [3, 4], "mounted")
    turn(2, tokens(9, 6, VOCAB), [], "rewound")
    engine.rewind(cursors[2], kept)
    heads[2] = 4
    turn(2, tokens(11, 7, VOCAB), [], "unmounted")
    for record in threads:
        record.head = heads.get(record.id, 0)
    trace = Trace("e", "p", threads=threads, segments=segments, **rule).check()
    with torch.no_grad():
        [scores] = score_traces(model, [trace])
        [wanted] = score_traces(exact(model), [trace])
    for kind in ("unmounted", "mounted", "rewound"):
        chosen = [index for index, name in kinds.items() if name == kind]
        train = torch.cat([scores[index].cpu() for index in chosen])
        rollout = torch.tensor([logp for index in chosen for logp in segments[index].logps or []])
        kl, largest = rollout_training_kl(train, rollout_logps=rollout)
        noise, _ = rollout_training_kl(train, rollout_logps=torch.cat([wanted[i] for i in chosen]))
        sys.stdout.write(
            f"step-0 KL, {kind}: {kl:.2e} over {len(train)} tokens, max |d| {largest:.2e}; "
            f"of the training pass from float32: {noise:.2e}\n"
        )
        assert kl <= KL + 3 * noise, kind
    engine.check_integrity()


def test_step_zero_kl_of_the_shipped_policy_by_kind_of_token() -> None:
    """A trained policy's own episodes; random weights say little (DESIGN §8)."""
    policy = shipped_policy("cuda", torch.bfloat16)
    figures = step_zero_kl(policy, 24, num_pages=6000, num_states=512)
    for name, (kl, largest, count) in figures.items():
        sys.stdout.write(
            f"step-0 KL, shipped policy, {name}: {kl:.2e} over {count} tokens, "
            f"max |d| {largest:.2e}\n"
        )
    assert figures["mounted"][2] > 0
    for name, (kl, _, count) in figures.items():
        assert count == 0 or kl <= KL, name


def test_decode_equals_prefill(model: Any) -> None:
    """Logits after a turn, and after the same tokens given at once."""
    engine = engine_of(model)
    cursor = engine.open(tokens(150, vocab=VOCAB))
    other = engine.fork(cursor)
    [(ids, _)] = engine.generate([cursor], SamplingParams(seed=1, max_tokens=70), until=())
    engine.extend(other, ids)
    one, two = (engine.logits(each).log_softmax(-1) for each in (cursor, other))
    assert (one.exp() * (one - two)).sum() <= 3e-3


def test_sleep_and_wake_keep_the_draws_and_report_the_capture(hybrid: Any) -> None:
    engine = engine_of(hybrid)
    want = run_turns(engine, range(4))
    free = []
    for _ in range(2):
        engine.sleep()
        free.append(torch.cuda.mem_get_info()[0])
        engine.wake()
        assert run_turns(engine, range(4)) == want
    assert engine.stats()["seconds"]["capture"] > 0


@pytest.mark.parametrize("merge", [False, True])
def test_trained_adapters_are_seen_without_a_new_capture(merge: bool) -> None:
    model = hybrid_model(lora=True)
    engine = engine_of(model, merge_adapters=merge)
    with torch.no_grad():
        engine.generate([engine.open(tokens(9))], SamplingParams(max_tokens=3), until=())
        steps = engine._paths.passes.steps  # type: ignore[union-attr]
        graphs = dict(steps._graphs)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-2)
        # Merging rounds the weights: the other engine's are merged, and rounded, by PEFT.
        merged = prepare_model(copy.deepcopy(model).merge_and_unload()) if merge else model
        plain = engine_of(merged, fused=False)
        for each in (engine, plain):
            each.set_policy_version(1)
        found = [each.open(tokens(60, vocab=VOCAB)) for each in (engine, plain)]
        text = tokens(20, 3, VOCAB)
        for cursor, each in zip(found, (engine, plain), strict=True):
            each.extend(cursor, text)
        one, two = (each.logits(c).log_softmax(-1) for each, c in zip((engine, plain), found))
    assert (one.exp() * (one - two)).sum() <= 1e-3
    engine.generate([found[0]], SamplingParams(max_tokens=3), until=())
    assert {key: steps._graphs[key] for key in graphs} == graphs


def test_turns_pause_when_pages_run_out_and_all_end(hybrid: Any) -> None:
    engine = engine_of(hybrid, page_size=4, num_pages=60)
    root = engine.open(tokens(8, vocab=VOCAB))
    params = SamplingParams(seed=1, max_tokens=50)
    cursors = [engine.fork(root) for _ in range(8)]
    turns = {engine.submit(cursor, [], params, until=()): cursor for cursor in cursors}
    while engine.has_work:
        for ended in engine.step():
            assert (ended.reason, len(ended.tokens)) == ("length", 50)
            engine.close(turns.pop(ended.ticket))
    assert not turns
    assert engine.stats()["preempted"] > 0
    engine.check_integrity()


def test_errors_leave_the_pools_intact(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(hybrid, num_pages=12)
    cursor = engine.open(tokens(40, vocab=VOCAB))
    with pytest.raises(PagesExhausted):
        engine.extend(cursor, tokens(300, vocab=VOCAB))
    engine.check_integrity()
    params = SamplingParams(seed=1, max_tokens=8)
    [(want, _)] = engine.generate([engine.fork(cursor)], params, until=())
    feed, calls = DecodeSteps.feed, 0

    def fail(steps: DecodeSteps, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("a launch failed")
        return feed(steps, *args, **options)

    monkeypatch.setattr(DecodeSteps, "feed", fail)
    with pytest.raises(RuntimeError, match="a launch failed"):
        engine.generate([engine.fork(cursor)], params, until=())
    monkeypatch.undo()
    engine.check_integrity()
    assert engine.generate([engine.fork(cursor)], params, until=())[0][0] == want
    with pytest.raises(ConfigError, match="the model is on cuda"):
        Engine(hybrid, page_size=4, num_pages=4, num_states=4, device="cpu")
    with pytest.raises(ConfigError, match="half precision"):
        Engine(hybrid_model(torch.float32), page_size=4, num_pages=9, num_states=9, fused=True)


def test_a_cancelled_turn_goes_on_from_where_it_was_cut(hybrid: Any) -> None:
    engine = engine_of(hybrid)
    root = engine.open(tokens(30, vocab=VOCAB))
    params = SamplingParams(seed=3, max_tokens=40)
    [(want, _)] = engine.generate([engine.fork(root)], params, until=())
    cursor = engine.fork(root)
    ticket = engine.submit(cursor, [], params, until=())
    for _ in range(12):
        engine.step()
    ids, _ = engine.cancel(ticket)
    assert ids == want[: len(ids)]
    assert cursor.num_tokens == 30 + len(ids)
    other = engine.extend(engine.fork(root), ids)
    one, two = (engine.logits(each).log_softmax(-1) for each in (cursor, other))
    assert (one.exp() * (one - two)).sum() <= 1e-3
    engine.check_integrity()
