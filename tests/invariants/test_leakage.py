"""What a thread cannot see moves it by exactly 0.0: no state, key, padding or NaN crosses over."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor

from octopus_trl import Trace, prepare_model, score_traces
from octopus_trl.trace import Segment, ThreadRecord
from tests import tolerances
from tests.tiny import VOCAB, random_trace, tiny_dense, tiny_hybrid, tiny_hybrid_moe

MODELS = {
    "hybrid": prepare_model(tiny_hybrid(0)).requires_grad_(False),
    "dense": prepare_model(tiny_dense(0), mount_layers=[1, 3]).requires_grad_(False),
    "hybrid-moe": prepare_model(tiny_hybrid_moe(0)).requires_grad_(False),
}
# Grouped products of experts depend on which rows share them, to the last bit; these do not.
MODELS["hybrid-moe"].set_experts_implementation("batched_mm")
EACH = pytest.mark.parametrize("name", MODELS)


def score(name: str, *traces: Trace, mounts: str = "live") -> list[list[Tensor]]:
    return score_traces(MODELS[name], traces, mounts=mounts)  # type: ignore[arg-type]


def influenced(trace: Trace, source: int, mounts: bool = True) -> set[int]:
    """Segments that a change inside `source` may move: whoever can see it, directly or over
    others.
    """
    moved = {source}
    for segment in trace.segments[source + 1 :]:
        node: int | None = segment.id
        while node is not None:
            link = trace.segments[node]
            if link.parent in moved or (mounts and moved & set(link.mounts)):
                moved.add(segment.id)
                break
            node = link.parent
    return moved


def with_other_tokens(trace: Trace, source: int, seed: int) -> Trace:
    """The same DAG with other token values, all different, in one segment."""
    draw = random.Random(seed)
    changed = copy.deepcopy(trace)
    changed.segments[source].tokens = [
        (token + draw.randrange(1, VOCAB)) % VOCAB for token in trace.segments[source].tokens
    ]
    return changed


def assert_unmoved(got: list[Tensor], want: list[Tensor], segments: set[int]) -> None:
    for index in segments:
        difference = (got[index] - want[index]).nan_to_num().abs().max().item()
        assert difference == tolerances.EXACT, f"segment {index} moved by {difference}"
        assert torch.equal(got[index].isnan(), want[index].isnan())


@EACH
@pytest.mark.parametrize("seed", range(300, 304))
def test_a_non_reader_moves_by_exactly_zero_when_a_segment_changes(name: str, seed: int) -> None:
    trace = random_trace(seed, steps=14, roots=2, max_tokens=260)
    [before] = score(name, trace)
    everyone = set(range(len(trace.segments)))
    for source in random.Random(seed).sample(sorted(everyone), 5):
        moved = influenced(trace, source)
        [after] = score(name, with_other_tokens(trace, source, seed))
        assert_unmoved(after, before, everyone - moved)
        changed = [i for i in moved if not torch.equal(after[i][-1:], before[i][-1:])]
        assert changed or moved == {source}


@EACH
def test_a_reader_does_move_when_what_it_reads_changes(name: str) -> None:
    trace = random_trace(310, steps=16, roots=2)
    reader = next(segment for segment in reversed(trace.segments) if segment.mounts)
    [before] = score(name, trace)
    [after] = score(name, with_other_tokens(trace, reader.mounts[0], 1))
    assert not torch.equal(after[reader.id][1:], before[reader.id][1:])


@EACH
def test_with_dropped_mounts_no_reader_moves_either(name: str) -> None:
    trace = random_trace(311, steps=16, roots=2)
    source = next(segment for segment in reversed(trace.segments) if segment.mounts).mounts[0]
    moved = influenced(trace, source, mounts=False)
    assert moved < influenced(trace, source)
    [before] = score(name, trace, mounts="dropped")
    [after] = score(name, with_other_tokens(trace, source, 1), mounts="dropped")
    assert_unmoved(after, before, set(range(len(trace.segments))) - moved)


def test_a_mount_moves_no_recurrent_layer() -> None:
    """With one attention layer below and recurrent layers above it that alone may carry a mount.

    Layer 3 of 4 is the only attention layer, so the inputs of every recurrent layer of a reader
    are bitwise what they are without the mount.
    """
    model = prepare_model(tiny_hybrid(0)).requires_grad_(False)
    trace = random_trace(312, steps=16, roots=2)
    assert any(segment.mounts for segment in trace.segments)
    seen: list[list[Tensor]] = []
    for mounts in ("live", "dropped"):
        outs: list[Tensor] = []
        hooks = [
            layer.linear_attn.register_forward_hook(lambda _m, _i, out, outs=outs: outs.append(out))
            for layer in model.model.layers[:3]
        ]
        score_traces(model, [trace], mounts=mounts)
        for hook in hooks:
            hook.remove()
        seen.append(outs)
    # Rows keep their order: mounts do not enter the layout.
    for live, dropped in zip(*seen, strict=True):
        assert torch.equal(live, dropped)


@EACH
def test_packed_siblings_of_37_51_and_40_tokens_do_not_leak_into_each_other(name: str) -> None:
    """Case PC-12: change the tail of branch 2; branch 3 and its first three tokens stay."""
    draw = random.Random(1)
    segments = [Segment(0, 0, None, "prompt", [draw.randrange(VOCAB) for _ in range(10)])]
    for index, length in enumerate((37, 51, 40), start=1):
        tokens = [draw.randrange(VOCAB) for _ in range(length)]
        segments.append(Segment(index, index, 0, "action", tokens, start=10))
    threads = [ThreadRecord(0, None, head=0), *(ThreadRecord(i, 0, head=i) for i in (1, 2, 3))]
    trace = Trace("pc12", "p", threads=threads, segments=segments).check()
    [before] = score(name, trace)
    changed = copy.deepcopy(trace)
    for place in range(-5, 0):
        changed.segments[2].tokens[place] = (changed.segments[2].tokens[place] + 1) % VOCAB
    [after] = score(name, changed)
    assert_unmoved(after, before, {0, 1, 3})
    assert torch.equal(after[2][:-5], before[2][:-5])
    assert not torch.equal(after[2], before[2])


@EACH
def test_a_later_token_never_moves_an_earlier_one_of_its_own_segment(name: str) -> None:
    trace = random_trace(313, steps=6, roots=1, lengths=(65, 130))
    segment = trace.segments[2]
    [before] = score(name, trace)
    for place in (1, 30, len(segment.tokens) - 1):
        changed = copy.deepcopy(trace)
        tokens = changed.segments[2].tokens
        tokens[place] = (tokens[place] + 1) % VOCAB
        [after] = score(name, changed)
        assert torch.equal(after[2][:place].nan_to_num(), before[2][:place].nan_to_num())
        assert not torch.equal(after[2][place:], before[2][place:])


@EACH
def test_a_sibling_of_nan_leaves_every_other_thread_as_it_was(name: str) -> None:
    """One token whose embedding is NaN poisons those who see it and no other branch.

    It begins a run: within one run the chunk form multiplies later rows by zero, as stock does.
    """
    broken = copy.deepcopy(MODELS[name])
    broken.model.embed_tokens.weight[VOCAB - 1] = float("nan")
    for seed in range(320, 328):
        trace = random_trace(seed, steps=14, roots=2, vocab_size=VOCAB - 1, max_tokens=260)
        [before] = score_traces(broken, [trace])
        assert all(part[1:].isfinite().all() for part in before)
        parents = [segment.parent for segment in trace.segments]
        heads = [s for s, above in enumerate(parents) if above is None or parents.count(above) > 1]
        source = random.Random(seed).choice(heads)
        changed = copy.deepcopy(trace)
        changed.segments[source].tokens[0] = VOCAB - 1
        [after] = score_traces(broken, [changed])
        moved = influenced(trace, source)
        assert_unmoved(after, before, set(range(len(trace.segments))) - moved)
        for index in moved - {source}:
            segment = trace.segments[index]
            if segment.parent in moved:
                assert after[index].isnan().all(), f"segment {index} sees the NaN"


@EACH
def test_traces_of_one_row_do_not_move_each_other(name: str) -> None:
    traces = [random_trace(seed, steps=6, max_tokens=90) for seed in (330, 331, 332)]
    before = score(name, *traces)
    other = copy.deepcopy(traces)
    other[1].segments = with_other_tokens(traces[1], 0, 3).segments
    for segment in other[1].segments:
        segment.tokens = [(token + 5) % VOCAB for token in segment.tokens]
    after = score(name, *other)
    for index in (0, 2):
        assert_unmoved(after[index], before[index], set(range(len(before[index]))))


@EACH
def test_a_trace_that_shares_the_prompt_does_not_move_its_neighbours(name: str) -> None:
    prompt = [(7 * i) % VOCAB for i in range(66)]
    traces = [random_trace(s, steps=6, max_tokens=120, prompt=prompt) for s in (340, 341, 342)]
    before = score(name, *traces)
    other = copy.deepcopy(traces)
    for segment in other[1].segments[1:]:
        segment.tokens = [(token + 5) % VOCAB for token in segment.tokens]
    after = score(name, *other)
    for index in (0, 2):
        assert_unmoved(after[index], before[index], set(range(len(before[index]))))


@EACH
def test_scoring_twice_gives_the_same_bits(name: str) -> None:
    trace = random_trace(350)
    first, second = (torch.cat(score(name, trace)[0]) for _ in range(2))
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
