"""The packed pass scores what a plain forward or a brute force over the DAG scores."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl import Trace, prepare_model, score_traces
from octopus_trl.errors import ConfigError, TraceError
from octopus_trl.models.packed import pack
from octopus_trl.trace import Segment, ThreadRecord
from tests import tolerances
from tests.oracles import brute_logps, plain_logps
from tests.parity.conftest import Pair
from tests.tiny import SHORT_LENGTHS, VOCAB, random_trace, tiny_dense, tiny_hybrid


def assert_scores(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Same shapes, NaN in the same places, the rest within 1e-5 nats."""
    assert [part.shape for part in got] == [part.shape for part in want]
    left, right = torch.cat(list(got)), torch.cat(list(want))
    assert left.dtype == torch.float32
    torch.testing.assert_close(left, right, rtol=0.0, atol=tolerances.LOGP, equal_nan=True)


def brute(pair: Pair, trace: Trace, mounts: str = "live", temperature: float = 1.0) -> list[Tensor]:
    return brute_logps(
        pair.stock, trace, mount_layers=pair.mount_layers, mounts=mounts, temperature=temperature
    )


def one_chain(*lengths: int) -> Trace:
    """A single thread: a prompt, then actions and tool text in turn."""
    draws = torch.Generator().manual_seed(len(lengths))
    segments, start = [], 0
    for index, length in enumerate(lengths):
        tokens = torch.randint(0, VOCAB, (length,), generator=draws).tolist()
        kind = ["tool", "action"][index % 2] if index else "prompt"
        segments.append(Segment(index, 0, index - 1 if index else None, kind, tokens, start=start))
        start += length
    threads = [ThreadRecord(0, None, head=len(lengths) - 1)]
    return Trace("chain", "p", threads=threads, segments=segments).check()


@pytest.mark.parametrize("seed", [0, 1])
def test_without_mounts_every_chain_scores_as_a_plain_forward(backbone: Pair, seed: int) -> None:
    trace = random_trace(seed, mounts=False, steps=10)
    [scores] = score_traces(backbone.ours, [trace])
    for segment in trace.segments:
        want = plain_logps(backbone.stock, trace, segment.id)
        assert_scores([scores[segment.id]], [want])


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_with_mounts_every_token_scores_as_the_brute_force(backbone: Pair, seed: int) -> None:
    trace = random_trace(seed, roots=1 + seed % 3)
    assert any(segment.mounts for segment in trace.segments)
    [scores] = score_traces(backbone.ours, [trace])
    want = brute(backbone, trace)
    assert_scores(scores, want)
    without = torch.cat(brute(backbone, trace, "dropped"))
    moved = (torch.cat(want) - without).nan_to_num().abs().max()
    assert moved > 100 * tolerances.LOGP, "the mounts of this trace matter"


@pytest.mark.parametrize("seed", range(20, 28))
def test_many_small_meshes_score_as_the_brute_force(hybrid: Pair, seed: int) -> None:
    trace = random_trace(seed, steps=30, roots=3, lengths=SHORT_LENGTHS, max_tokens=150)
    [scores] = score_traces(hybrid.ours, [trace])
    assert_scores(scores, brute(hybrid, trace))


def test_segments_of_one_token_score_as_the_brute_force(backbone: Pair) -> None:
    trace = random_trace(3, steps=40, roots=2, lengths=(1,))
    assert set(trace.lengths) == {1}
    [scores] = score_traces(backbone.ours, [trace])
    assert_scores(scores, brute(backbone, trace))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129])
def test_a_child_of_any_parent_length_goes_on_where_the_parent_ended(
    hybrid: Pair, length: int
) -> None:
    """Runs around the chunk of 64 and shorter than the convolution's tail, forked in the middle."""
    segments = [Segment(0, 0, None, "prompt", [(7 * i) % VOCAB for i in range(length)])]
    for index, own in enumerate((1, 2, 3, 65), start=1):
        tokens = [(11 * i + index) % VOCAB for i in range(own)]
        segments.append(Segment(index, index, 0, "tool", tokens, start=length))
    segments.append(Segment(5, 5, 1, "tool", [3, 4, 5], start=length + 1))
    segments.append(Segment(6, 6, 1, "tool", [6, 4], start=length + 1))
    threads = [ThreadRecord(0, None, head=0), *(ThreadRecord(i, 0, head=i) for i in range(1, 5))]
    threads += [ThreadRecord(5, 1, head=5), ThreadRecord(6, 1, head=6)]
    trace = Trace("t", "p", threads=threads, segments=segments).check()
    [scores] = score_traces(hybrid.ours, [trace])
    for segment in trace.segments:
        assert_scores([scores[segment.id]], [plain_logps(hybrid.stock, trace, segment.id)])


def test_a_single_chain_scores_as_a_plain_forward(backbone: Pair) -> None:
    trace = one_chain(63, 1, 64, 65, 1, 3)
    [scores] = score_traces(backbone.ours, [trace])
    assert_scores(scores, [plain_logps(backbone.stock, trace, s.id) for s in trace.segments])


def test_a_trace_of_one_token_has_one_score_and_it_is_nan(backbone: Pair) -> None:
    [[score]] = score_traces(backbone.ours, [one_chain(1)])
    assert score.shape == (1,)
    assert score.dtype == torch.float32
    assert score.isnan().all()


def test_only_the_first_token_of_a_root_is_nan(hybrid: Pair) -> None:
    trace = random_trace(4, roots=3)
    [scores] = score_traces(hybrid.ours, [trace])
    for segment, score in zip(trace.segments, scores, strict=True):
        assert score.shape == (len(segment.tokens),)
        assert score.dtype == torch.float32
        assert score[1:].isfinite().all()
        assert bool(score[0].isnan()) == (segment.parent is None)


def test_dropped_mounts_score_without_edges_at_the_recorded_positions(backbone: Pair) -> None:
    trace = random_trace(14)
    [dropped] = score_traces(backbone.ours, [trace], mounts="dropped")
    assert_scores(dropped, brute(backbone, trace, "dropped"))
    bare = copy.deepcopy(trace)
    for segment in bare.segments:
        segment.mounts = []
    [again] = score_traces(backbone.ours, [bare])
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(dropped, again, strict=True))


def test_detached_mounts_score_as_live_ones(backbone: Pair) -> None:
    trace = random_trace(15)
    [live] = score_traces(backbone.ours, [trace])
    [detached] = score_traces(backbone.ours, [trace], mounts="detached")
    assert torch.equal(torch.cat(live).nan_to_num(), torch.cat(detached).nan_to_num())


@pytest.mark.parametrize("temperature", [0.25, 0.7, 2.0])
def test_temperature_divides_the_logits(hybrid: Pair, temperature: float) -> None:
    trace = random_trace(16, steps=8, max_tokens=120)
    [scores] = score_traces(hybrid.ours, [trace], temperature=temperature)
    torch.testing.assert_close(
        torch.cat(scores),
        torch.cat(brute(hybrid, trace, temperature=temperature)),
        rtol=0.0,
        atol=tolerances.LOGP / min(1.0, temperature),
        equal_nan=True,
    )


def test_recorded_positions_decide_and_not_the_jump_rule(backbone: Pair) -> None:
    """A trace of the unshifted regime is read at its own positions."""
    trace = random_trace(17, steps=10)
    trace.position = "unshifted"
    for segment in trace.segments:
        above = None if segment.parent is None else trace.segments[segment.parent]
        segment.start = 0 if above is None else above.end
    trace.check()
    [scores] = score_traces(backbone.ours, [trace])
    assert_scores(scores, brute(backbone, trace))


def test_traces_of_one_call_score_as_each_does_alone(backbone: Pair) -> None:
    traces = [random_trace(seed, steps=6, max_tokens=90) for seed in (40, 41, 42)]
    together = score_traces(backbone.ours, traces)
    for trace, scores in zip(traces, together, strict=True):
        assert_scores(scores, score_traces(backbone.ours, [trace])[0])
        assert_scores(scores, brute(backbone, trace))


def test_a_group_that_shares_its_prompt_scores_as_each_alone_and_stores_it_once(
    hybrid: Pair,
) -> None:
    prompt = [(5 * i) % VOCAB for i in range(64)]
    traces = [random_trace(s, steps=6, max_tokens=130, prompt=prompt) for s in (50, 51, 52, 53)]
    for trace, scores in zip(traces, score_traces(hybrid.ours, traces), strict=True):
        assert_scores(scores, brute(hybrid, trace))
    unique = sum(sum(trace.lengths) for trace in traces) - 3 * len(prompt)
    assert pack(traces).num_rows == unique


def test_the_same_trace_twice_scores_the_same_twice(hybrid: Pair) -> None:
    trace = random_trace(54, steps=8, max_tokens=120)
    first, second = score_traces(hybrid.ours, [trace, copy.deepcopy(trace)])
    assert_scores(first, brute(hybrid, trace))
    assert_scores(second, first)


def test_a_root_that_reads_another_with_the_same_prompt_reads_it_as_its_own_segment(
    backbone: Pair,
) -> None:
    """Equal text does not make one segment of two: the reader sees both copies."""
    segments = [
        Segment(0, 0, None, "prompt", [1, 2, 3]),
        Segment(1, 1, None, "prompt", [1, 2, 3]),
        Segment(2, 1, 1, "tool", [4, 5], mounts=[0], start=3),
        Segment(3, 2, 2, "prompt", [6, 7], start=5),
        Segment(4, 3, 2, "prompt", [6, 7], start=5),
        Segment(5, 3, 4, "tool", [8, 9], mounts=[3], start=7),
    ]
    threads = [
        ThreadRecord(0, None, head=0),
        ThreadRecord(1, None, head=2),
        ThreadRecord(2, 1, head=3),
        ThreadRecord(3, 1, head=5),
    ]
    trace = Trace("twins", "p", threads=threads, segments=segments).check()
    [scores] = score_traces(backbone.ours, [trace])
    assert_scores(scores, brute(backbone, trace))
    first, second = score_traces(backbone.ours, [trace, copy.deepcopy(trace)])
    assert_scores(first, scores)
    assert_scores(second, scores)


@pytest.mark.parametrize("seed", [60, 61])
def test_cutting_segments_in_two_changes_no_score(hybrid: Pair, seed: int) -> None:
    trace = random_trace(seed, steps=8, max_tokens=140)
    segments: list[Segment] = []
    tail_of: list[int] = []  # last piece of each old segment
    pieces_of: list[list[int]] = []
    for old in trace.segments:
        cut = (len(old.tokens) + 1) // 2
        parent = None if old.parent is None else tail_of[old.parent]
        mounts = [piece for mount in old.mounts for piece in pieces_of[mount]]
        pieces = []
        for tokens, start in ((old.tokens[:cut], old.start), (old.tokens[cut:], old.start + cut)):
            if tokens:
                index = len(segments)
                new = Segment(index, old.thread, parent, old.kind, tokens, mounts, start)
                segments.append(new)
                pieces.append(index)
                parent, mounts = index, []
        pieces_of.append(pieces)
        tail_of.append(pieces[-1])
    threads = [copy.copy(thread) for thread in trace.threads]
    for thread in threads:
        thread.head = None if thread.head is None else tail_of[thread.head]
    fine = Trace("fine", "p", threads=threads, segments=segments).check()
    [coarse] = score_traces(hybrid.ours, [trace])
    [scores] = score_traces(hybrid.ours, [fine])
    joined = [torch.cat([scores[piece] for piece in pieces]) for pieces in pieces_of]
    assert_scores(joined, coarse)


def test_pc_18_two_levels_of_forks_and_a_mount_between_leaves(backbone: Pair) -> None:
    """P -> {A -> {R0, R1}, B -> {R2, R3}}, and R2 goes on after it read R0."""
    lengths = [9, 5, 8, 6, 7, 4, 3, 5]
    parents = [None, 0, 0, 1, 1, 2, 2, 5]
    starts = [0, 9, 9, 14, 14, 17, 17, 21]
    segments = [
        Segment(
            i,
            min(i, 5) if i == 7 else i,
            parents[i],
            "tool" if i else "prompt",
            [(13 * i + 5 * j) % VOCAB for j in range(length)],
            mounts=[3] if i == 7 else [],
            start=starts[i],
        )
        for i, length in enumerate(lengths)
    ]
    owners = [None, 0, 0, 1, 1, 2, 2]
    threads = [ThreadRecord(i, parent, head=i) for i, parent in enumerate(owners)]
    trace = Trace("pc18", "p", threads=threads, segments=segments).check()
    [scores] = score_traces(backbone.ours, [trace])
    assert_scores(scores, brute(backbone, trace))


def test_rows_of_one_level_may_all_hold_one_token(hybrid: Pair) -> None:
    """A level of single tokens takes the step form of the delta rule."""
    segments = [Segment(0, 0, None, "prompt", [5])]
    segments += [Segment(i, i, 0, "tool", [i], start=1) for i in range(1, 6)]
    segments += [Segment(i, i, 1 + i % 2, "tool", [i], start=2) for i in range(6, 10)]
    owners = [None, *([0] * 5), *(1 + i % 2 for i in range(6, 10))]
    threads = [ThreadRecord(i, parent, head=i) for i, parent in enumerate(owners)]
    trace = Trace("ones", "p", threads=threads, segments=segments).check()
    [scores] = score_traces(hybrid.ours, [trace])
    assert_scores(scores, brute(hybrid, trace))


def test_a_long_row_of_many_traces_scores_as_each_alone(hybrid: Pair) -> None:
    traces = [random_trace(seed, steps=3, max_tokens=30) for seed in range(100, 130)]
    for trace, scores in zip(traces, score_traces(hybrid.ours, traces), strict=True):
        assert_scores(scores, brute(hybrid, trace))


def test_no_traces_give_no_scores(hybrid: Pair) -> None:
    assert score_traces(hybrid.ours, []) == []


def test_bfloat16_weights_give_float32_scores_near_the_float32_ones() -> None:
    trace = random_trace(70, steps=8, max_tokens=140)
    model = prepare_model(tiny_hybrid(0))
    exact = torch.cat(score_traces(model, [trace])[0])
    rough = torch.cat(score_traces(model.to(torch.bfloat16), [trace])[0])
    assert rough.dtype == torch.float32
    assert torch.equal(rough.isnan(), exact.isnan())
    assert (rough - exact).nan_to_num().abs().mean() < 0.05


def test_scoring_leaves_model_and_traces_as_they_were(hybrid: Pair) -> None:
    trace = random_trace(71, steps=6, logps=True)
    record, before = trace.to_dict(), copy.deepcopy(hybrid.ours.state_dict())
    score_traces(hybrid.ours, [trace])
    assert trace.to_dict() == record
    after = hybrid.ours.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_scores_do_not_depend_on_train_or_eval_mode_without_dropout(hybrid: Pair) -> None:
    trace = random_trace(72, steps=6, max_tokens=80)
    [quiet] = score_traces(hybrid.ours, [trace])
    hybrid.ours.train()
    try:
        [loud] = score_traces(hybrid.ours, [trace])
    finally:
        hybrid.ours.eval()
    assert torch.equal(torch.cat(quiet).nan_to_num(), torch.cat(loud).nan_to_num())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), True, "1", None])
def test_a_temperature_that_divides_nothing_is_refused(hybrid: Pair, temperature: Any) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        score_traces(hybrid.ours, [one_chain(3)], temperature=temperature)


def test_an_unknown_mount_mode_is_refused(hybrid: Pair) -> None:
    with pytest.raises(ConfigError, match="mounts"):
        score_traces(hybrid.ours, [one_chain(3)], mounts="frozen")  # type: ignore[arg-type]


def test_a_model_that_was_not_prepared_is_refused(hybrid: Pair) -> None:
    with pytest.raises(ConfigError, match="prepare_model"):
        score_traces(hybrid.stock, [one_chain(3)])


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12, 2**63])
def test_a_token_id_outside_the_vocabulary_is_refused(hybrid: Pair, token: int) -> None:
    trace = one_chain(3, 2)
    trace.segments[1].tokens[0] = token
    with pytest.raises(ValueError, match=f"{token}"):
        score_traces(hybrid.ours, [trace])


@pytest.mark.parametrize("fault", ["forward parent", "forward mount", "no tokens", "no segments"])
def test_a_trace_that_cannot_be_packed_is_a_trace_error(hybrid: Pair, fault: str) -> None:
    trace = one_chain(3, 2, 2)
    if fault == "forward parent":
        trace.segments[1].parent = 2
    elif fault == "forward mount":
        trace.segments[1].mounts = [2]
    elif fault == "no tokens":
        trace.segments[1].tokens = []
    else:
        trace.segments.clear()
    with pytest.raises(TraceError):
        score_traces(hybrid.ours, [trace])


FAULTS: list[tuple[str, Any]] = [
    *(("id", value) for value in (7, None, "1", True)),
    *(("parent", value) for value in ("a", 0.0, False)),
    *(("start", value) for value in (-1, "a", None, 1.5)),
    *(("tokens", value) for value in ([1.5], ["a"], [None], "ab", None, [True])),
    *(("mounts", value) for value in (None, ["a"], [0.0], 0)),
]


@pytest.mark.parametrize(("name", "value"), FAULTS)
def test_a_field_that_a_pass_would_misread_is_a_trace_error_that_names_it(
    hybrid: Pair, name: str, value: object
) -> None:
    trace = one_chain(3, 2, 2)
    setattr(trace.segments[1], name, value)
    with pytest.raises(TraceError, match=f"segment 1: .*{name}"):
        score_traces(hybrid.ours, [trace])


@pytest.mark.parametrize("given", [None, 3, one_chain(3), [one_chain(3).to_dict()], ["a"], [None]])
def test_what_is_no_list_of_traces_is_a_trace_error(hybrid: Pair, given: Any) -> None:
    with pytest.raises(TraceError):
        score_traces(hybrid.ours, given)


def test_a_trace_of_another_mount_set_is_refused(dense: Pair) -> None:
    trace = one_chain(3, 2)
    trace.mount_layers = [0]
    with pytest.raises(ConfigError, match="mount"):
        score_traces(dense.ours, [trace])
    trace.mount_layers = [2, 1]
    score_traces(dense.ours, [trace])


def test_a_dense_model_needs_layer_indices() -> None:
    with pytest.raises(ValueError, match="layer indices"):
        prepare_model(tiny_dense())


@pytest.mark.parametrize("layers", [[], [9], [-1], [1, 1], ["1"], [True], "all", [0]])
def test_mount_layers_that_do_not_fit_are_refused(layers: object) -> None:
    with pytest.raises(ValueError, match="mount_layers"):
        prepare_model(tiny_hybrid(), mount_layers=layers)  # type: ignore[arg-type]


def test_an_unsupported_class_is_refused_with_the_supported_ones() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11))
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM.*Qwen3ForCausalLM"):
        prepare_model(model)
