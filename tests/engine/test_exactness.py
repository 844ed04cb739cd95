"""The engine against the brute force, the packed pass and the plain forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octopus_trl.models import prepare_model
from octopus_trl.protocols import SamplingParams
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.train.packing import score_traces
from tests.engine.conftest import DENSE_MOUNTS, small_engine, tokens
from tests.engine.replay import play
from tests.oracles import brute_next_logits
from tests.tiny import random_trace, tiny_dense, tiny_hybrid, with_lora
from tests.tolerances import LOGP

pytestmark = pytest.mark.usefixtures("_no_grad")


@pytest.fixture
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def next_logps(model: Any, trace: Trace, mounts: list[int] | None) -> list[torch.Tensor]:
    return [
        logits.log_softmax(-1) for logits in brute_next_logits(model, trace, mount_layers=mounts)
    ]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_episodes_of_a_hybrid_equal_the_brute_force(
    hybrid: Any, seed: int, page_size: int
) -> None:
    trace = random_trace(seed)
    engine = small_engine(hybrid, page_size=page_size, num_pages=1000)
    _, logits, _ = play(engine, trace)
    for ours, want in zip(logits, next_logps(tiny_hybrid(), trace, None), strict=True):
        torch.testing.assert_close(ours.log_softmax(-1), want, atol=LOGP, rtol=0)
    engine.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_random_episodes_of_a_dense_model_equal_the_brute_force(dense: Any, seed: int) -> None:
    trace = random_trace(seed + 10, roots=3)
    engine = small_engine(dense, page_size=5)
    _, logits, _ = play(engine, trace)
    for ours, want in zip(logits, next_logps(tiny_dense(), trace, DENSE_MOUNTS), strict=True):
        torch.testing.assert_close(ours.log_softmax(-1), want, atol=LOGP, rtol=0)


@pytest.mark.parametrize("chunk", [5, 64])
def test_chunks_of_prefill_do_not_change_the_result(model: Any, chunk: int) -> None:
    trace = random_trace(3)
    whole = small_engine(model, prefill_chunk=512)
    parts = small_engine(model, prefill_chunk=chunk)
    for one, other in zip(play(whole, trace)[1], play(parts, trace)[1], strict=True):
        torch.testing.assert_close(one.log_softmax(-1), other.log_softmax(-1), atol=LOGP, rtol=0)


def test_adapters_are_part_of_the_model() -> None:
    trace = random_trace(5)
    engine = small_engine(prepare_model(with_lora(tiny_hybrid())))
    _, logits, _ = play(engine, trace)
    want = next_logps(with_lora(tiny_hybrid()), trace, None)
    for ours, theirs in zip(logits, want, strict=True):
        torch.testing.assert_close(ours.log_softmax(-1), theirs, atol=LOGP, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 17, 63, 64, 65])
def test_pc02_text_of_any_length_goes_on_from_the_state(hybrid: Any, count: int) -> None:
    ids = tokens(50 + count)
    engine = small_engine(hybrid)
    cursor = engine.extend(engine.fork(engine.open(ids[:50])), ids[50:])
    plain = hybrid(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(
        engine.logits(cursor).log_softmax(-1), plain.log_softmax(-1), atol=LOGP, rtol=0
    )


@pytest.mark.parametrize("back", [1, 7, 39, 40, 41])
def test_pc01_going_back_restores_every_layer(model: Any, back: int) -> None:
    prompt = tokens(20)
    engine = small_engine(model)
    cursor = engine.open(prompt)
    [(drawn, _)] = engine.generate([cursor], SamplingParams(seed=1, max_tokens=40), until=())
    kept = (prompt + drawn)[:-back]
    engine.rewind(cursor, len(kept))
    assert (cursor.num_tokens, cursor.position) == (len(kept), len(kept))
    more = tokens(5, seed=9)
    for new in ([], more):
        engine.extend(cursor, new)
        kept = kept + new
        plain = model(input_ids=torch.tensor([kept]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(
            engine.logits(cursor).log_softmax(-1), plain.log_softmax(-1), atol=LOGP, rtol=0
        )
    engine.check_integrity()


def test_sampled_turns_with_mounts_equal_the_packed_pass(model: Any) -> None:
    """Root, two children, each reads the other after its own turn, then one goes back."""
    engine = small_engine(model)
    prompt = tokens(19)
    root = engine.open(prompt)
    segments = [Segment(0, 0, None, "prompt", prompt)]
    threads = [ThreadRecord(0, None, head=0)]
    heads = {0: 0}
    cursors = {0: root}

    def turn(thread: int, text: list[int], mounts: list[int], seed: int) -> None:
        cursor = cursors[thread]
        for kind, ids in (("tool", text), ("action", None)):
            start = cursor.position
            logps = None
            if ids is None:
                params = SamplingParams(temperature=0.8, seed=seed, max_tokens=9)
                [(ids, logps)] = engine.generate([cursor], params, until={3})
            else:
                engine.extend(cursor, ids)
            segment = Segment(
                len(segments), thread, heads[thread], kind, ids, mounts, start, logps=logps
            )
            segments.append(segment)
            heads[thread], mounts = segment.id, []

    for child in (1, 2):
        cursors[child] = engine.fork(root)
        heads[child] = 0
        threads.append(ThreadRecord(child, 0, head=0))
        turn(child, tokens(6, child), [], child)
    first, second = heads[1], heads[2]
    for reader, source, spans in ((1, 2, [3, 4]), (2, 1, [1, 2, 5, 6])):
        engine.mount(cursors[reader], cursors[source])
        turn(reader, tokens(4, 10 + reader), spans, 20 + reader)
    # The second read finds only what is new, and nothing of what the source itself read.
    engine.mount(cursors[1], cursors[2])
    turn(1, tokens(3, 33), [7, 8], 34)
    ends = {s.id: s for s in segments}
    chain_length = len(prompt) + len(ends[3].tokens) + len(ends[4].tokens)
    engine.rewind(cursors[2], chain_length)
    heads[2] = 4
    turn(2, tokens(5, 44), [], 45)
    assert (first, second) == (2, 4)
    for thread in threads:
        thread.head = heads[thread.id]
    trace = Trace("e", "p", threads=threads, segments=segments).check()
    [scores] = score_traces(model, [trace], temperature=0.8)
    worst = 0.0
    for segment, score in zip(segments, scores, strict=True):
        if segment.logps is not None:
            worst = max(worst, (score - torch.tensor(segment.logps)).abs().max().item())
    assert worst <= LOGP
    engine.check_integrity()


def test_logits_do_not_change_before_the_next_token(model: Any) -> None:
    engine = small_engine(model)
    root = engine.open(tokens(9))
    child = engine.extend(engine.fork(root), tokens(7, 1))
    before = engine.logits(root)
    engine.mount(root, child)
    assert torch.equal(engine.logits(root), before)
    assert root.position == child.position


def test_layers_outside_the_mount_set_do_not_see_a_mount() -> None:
    """With one mounted layer out of four, the result follows that set."""
    trace = random_trace(7)
    logits = {}
    for layers in ([2], [0, 1, 2, 3]):
        engine = small_engine(prepare_model(tiny_dense(), mount_layers=layers))
        _, found, _ = play(engine, trace)
        logits[len(layers)] = torch.stack(found)
        want = torch.stack(next_logps(tiny_dense(), trace, layers))
        torch.testing.assert_close(logits[len(layers)].log_softmax(-1), want, atol=LOGP, rtol=0)
    assert (logits[1] - logits[4]).abs().max() > 1e-3
