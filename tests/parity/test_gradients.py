"""Gradients of the packed pass equal autograd through the brute force, tensor by tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl import Trace, prepare_model, score_traces
from octopus_trl.trace import Segment, ThreadRecord
from tests import tolerances
from tests.oracles import brute_logps, gradients, weighted
from tests.parity.conftest import FAMILIES, Built, prepared
from tests.tiny import VOCAB, random_trace, tiny_hybrid, with_lora

BACKBONES: dict[str, Built] = {
    **FAMILIES,
    "hybrid-tied": (lambda: tiny_hybrid(1, tie=True), None),
    "hybrid8": (lambda: tiny_hybrid(2, layers=8), (3,)),
}
MODES = ("live", "detached", "dropped")


def ours_of(model: Any, trace: Trace, mounts: str = "live", **options: Any) -> list[Tensor]:
    [scores] = score_traces(model, [trace], mounts=mounts, **options)  # type: ignore[arg-type]
    return scores


def assert_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Relative norm of the difference of each tensor: 2e-5 for adapters, 1e-4 for others."""
    assert list(got) == list(want)
    far = {}
    for name, grad in want.items():
        assert grad.norm() > 0, f"{name} is not reached by the oracle"
        error = float((got[name] - grad).norm() / grad.norm())
        limit = tolerances.GRAD_LORA if "lora_" in name else tolerances.GRAD_OTHER
        if not error <= limit:
            far[name] = error
    assert not far


@pytest.mark.parametrize("mounts", MODES)
@pytest.mark.parametrize("name", BACKBONES)
def test_every_weight_gets_the_gradient_of_the_brute_force(name: str, mounts: str) -> None:
    build, layers = BACKBONES[name]
    stock = build()
    ours = prepared(copy.deepcopy(stock), layers)
    trace = random_trace(200, steps=12, max_tokens=260)
    want = gradients(stock, brute_logps(stock, trace, mount_layers=layers, mounts=mounts))
    assert_gradients(gradients(ours, ours_of(ours, trace, mounts)), want)


@pytest.mark.parametrize("seed", range(210, 216))
def test_adapters_on_every_projection_get_the_gradient_of_the_brute_force(seed: int) -> None:
    build, layers = BACKBONES[["hybrid", "hybrid-tied", "dense"][seed % 3]]
    stock = with_lora(build())
    ours = prepared(copy.deepcopy(stock), layers)
    trace = random_trace(seed, steps=14, roots=1 + seed % 2, max_tokens=260)
    want = gradients(stock, brute_logps(stock, trace, mount_layers=layers))
    assert all("lora_" in name for name in want)
    assert_gradients(gradients(ours, ours_of(ours, trace)), want)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mounts", ["live", "detached"])
@pytest.mark.parametrize("name", BACKBONES)
def test_in_float64_scores_and_gradients_equal_the_brute_force_to_1e_10(
    name: str, mounts: str
) -> None:
    build, layers = BACKBONES[name]
    bare = build()
    if name.endswith("moe"):  # the grouped product has no float64
        bare.set_experts_implementation("batched_mm")
    stock = with_lora(bare).double().requires_grad_()
    ours = prepared(copy.deepcopy(stock), layers)
    trace = random_trace(len(name) + len(mounts), steps=14, max_tokens=260)
    scores = ours_of(ours, trace, mounts)
    want = brute_logps(stock, trace, mount_layers=layers, mounts=mounts)
    torch.testing.assert_close(
        torch.cat(scores), torch.cat(want), rtol=0.0, atol=tolerances.FLOAT64, equal_nan=True
    )
    got, exact = gradients(ours, scores), gradients(stock, want)
    for key, grad in exact.items():
        assert (got[key] - grad).norm() <= tolerances.FLOAT64 * grad.norm(), key


def test_adapters_added_before_and_after_preparing_score_and_learn_alike() -> None:
    trace = random_trace(220, steps=10, max_tokens=200)
    before = prepare_model(with_lora(tiny_hybrid(0)))
    after = with_lora(prepare_model(tiny_hybrid(0)))
    assert list(before.state_dict()) == list(after.state_dict())
    scores, again = ours_of(before, trace), ours_of(after, trace)
    assert torch.equal(torch.cat(scores).nan_to_num(), torch.cat(again).nan_to_num())
    first, second = gradients(before, scores), gradients(after, again)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    stock = with_lora(tiny_hybrid(0))
    assert_gradients(first, gradients(stock, brute_logps(stock, trace)))


def test_a_disabled_adapter_scores_as_the_bare_model() -> None:
    trace = random_trace(221, steps=6, max_tokens=100)
    model = prepare_model(with_lora(tiny_hybrid(0)))
    with torch.no_grad(), model.disable_adapter():
        bare = torch.cat(ours_of(model, trace))
    want = torch.cat(brute_logps(tiny_hybrid(0), trace))
    torch.testing.assert_close(bare, want, rtol=0, atol=tolerances.LOGP, equal_nan=True)
    assert (torch.cat(ours_of(model, trace)) - bare).nan_to_num().abs().max() > 1e-2


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
@pytest.mark.parametrize("mounts", ["live", "detached"])
@pytest.mark.parametrize("name", ["hybrid", "dense"])
def test_gradient_checkpointing_changes_no_gradient(
    name: str, mounts: str, reentrant: bool, lora: bool
) -> None:
    build, layers = BACKBONES[name]
    model = prepared(with_lora(build()) if lora else build(), layers).train()
    trace = random_trace(230, steps=8, max_tokens=120)
    want = gradients(model, ours_of(model, trace, mounts))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if lora:
        model.enable_input_require_grads()
    layer = model.get_base_model().model.layers[0] if lora else model.model.layers[0]
    runs = []
    hook = layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    got = gradients(model, ours_of(model, trace, mounts))
    hook.remove()
    assert len(runs) == 2, "the layer ran again in the backward pass"
    assert list(got) == list(want)
    assert all(torch.equal(got[key], want[key]) for key in want)


def readers() -> tuple[Trace, list[int], list[int]]:
    """Root 0 writes with ids below 40, root 1 with ids from 50 on and reads root 0.

    Returns:
        The trace, segments of the reader after the mount, and segments of the producer.
    """
    segments = [
        Segment(0, 0, None, "prompt", [i % 40 for i in range(20)]),
        Segment(1, 0, 0, "action", [(3 * i) % 40 for i in range(7)], start=20),
        Segment(2, 1, None, "prompt", [50 + i % 40 for i in range(9)]),
        Segment(3, 1, 2, "tool", [50, 51, 52], mounts=[0, 1], start=27),
        Segment(4, 1, 3, "action", [60, 61, 62, 63], start=30),
    ]
    threads = [ThreadRecord(0, None, head=1), ThreadRecord(1, None, head=4)]
    trace = Trace("readers", "p", threads=threads, segments=segments).check(vocab_size=VOCAB)
    return trace, [3, 4], [0, 1]


@pytest.mark.parametrize("name", ["hybrid", "hybrid8", "dense"])
def test_only_a_live_mount_carries_a_readers_loss_to_the_producers_tokens(name: str) -> None:
    build, layers = BACKBONES[name]
    model = prepared(build(), layers)
    trace, reading, writing = readers()
    reached = {}
    for mounts in MODES:
        scores = ours_of(model, trace, mounts)
        grads = gradients(model, [scores[segment] for segment in reading])
        embedding = grads["model.embed_tokens.weight"]
        reached[mounts] = embedding[:40].abs().max().item()
        assert embedding[50:90].abs().max() > 0
    assert reached["live"] > 1e-4
    assert reached["detached"] == tolerances.EXACT
    assert reached["dropped"] == tolerances.EXACT
    scores = ours_of(model, trace, "detached")
    grads = gradients(model, [scores[segment] for segment in writing])
    assert grads["model.embed_tokens.weight"][:40].abs().max() > 0


def test_a_detached_mount_still_trains_the_reader_to_attend() -> None:
    """Cut is the way into the producer, not the way into the reader's own query."""
    model = prepare_model(tiny_hybrid(0))
    trace, reading, _ = readers()
    differ = {}
    for mounts in ("detached", "dropped"):
        scores = ours_of(model, trace, mounts)
        differ[mounts] = gradients(model, [scores[segment] for segment in reading])
    name = "model.layers.3.self_attn.q_proj.weight"
    assert (differ["detached"][name] - differ["dropped"][name]).norm() > 1e-3


def test_a_childs_first_tokens_reach_the_parent_through_state_and_convolution_tail() -> None:
    """Loss on a child's first three tokens alone, so that only the hand-over carries it back."""
    draws = torch.Generator().manual_seed(5)
    parent = torch.randperm(40, generator=draws)[:10].tolist()
    segments = [Segment(0, 0, None, "prompt", parent)]
    for index in (1, 2, 3):
        tokens = [50 + 10 * index + i for i in range(3)]
        segments.append(Segment(index, index, 0, "tool", tokens, start=10))
    threads = [ThreadRecord(0, None, head=0), *(ThreadRecord(i, 0, head=i) for i in (1, 2, 3))]
    trace = Trace("t", "p", threads=threads, segments=segments).check(vocab_size=VOCAB)
    stock = tiny_hybrid(3)
    ours = prepare_model(copy.deepcopy(stock))
    got = gradients(ours, ours_of(ours, trace)[1:])
    want = gradients(stock, brute_logps(stock, trace)[1:])
    assert_gradients(got, want)
    name = "model.embed_tokens.weight"
    for row in parent:
        error = (got[name][row] - want[name][row]).norm() / want[name][row].norm()
        assert error <= tolerances.GRAD_OTHER


def test_no_gradient_reaches_tokens_that_the_scored_thread_cannot_see() -> None:
    trace = random_trace(240, steps=14, roots=2, max_tokens=200)
    model = prepare_model(tiny_hybrid(0))
    last = len(trace.segments) - 1
    chain = [last]
    while (parent := trace.segments[chain[-1]].parent) is not None:
        chain.append(parent)
    seen = {mount for link in chain for mount in trace.segments[link].mounts} | set(chain)
    # Keep a vocabulary half for what is out of sight, mounts of mounts included.
    frontier = list(seen)
    while frontier:
        segment = trace.segments[frontier.pop()]
        more = {*segment.mounts, *([] if segment.parent is None else [segment.parent])} - seen
        seen |= more
        frontier += more
    hidden = [s for s in range(len(trace.segments)) if s not in seen]
    assert hidden
    for segment in trace.segments:
        shift = 48 if segment.id in hidden else 0
        segment.tokens = [token % 48 + shift for token in segment.tokens]
    scores = ours_of(model, trace)
    grads = gradients(model, [scores[last]])
    assert grads["model.embed_tokens.weight"][48:].abs().max() == tolerances.EXACT
    assert grads["model.embed_tokens.weight"][:48].abs().max() > 0


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_scales_the_gradient_as_in_the_brute_force(temperature: float) -> None:
    stock = tiny_hybrid(4)
    ours = prepare_model(copy.deepcopy(stock))
    trace = random_trace(241, steps=6, max_tokens=80)
    want = gradients(stock, brute_logps(stock, trace, temperature=temperature))
    assert_gradients(gradients(ours, ours_of(ours, trace, temperature=temperature)), want)


def test_a_shared_prompt_gets_the_sum_of_its_traces_gradients() -> None:
    prompt = [(5 * i) % VOCAB for i in range(30)]
    traces = [random_trace(s, steps=5, max_tokens=80, prompt=prompt) for s in (250, 251, 252)]
    stock = tiny_hybrid(5)
    ours = prepare_model(copy.deepcopy(stock))
    loss = sum(
        (weighted(scores, seed) for seed, scores in enumerate(score_traces(ours, traces))),
        torch.zeros(()),
    )
    loss.backward()
    got = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    want: dict[str, Tensor] = {}
    for seed, trace in enumerate(traces):
        part = gradients(stock, brute_logps(stock, trace), seed)
        want = {name: grad + want.get(name, 0) for name, grad in part.items()}
    assert_gradients(got, want)


def pc_18(reader: bool) -> Trace:
    """P -> {A -> {R0, R1}, B -> {R2, R3}}; with `reader`, R2 goes on after it read R0."""
    lengths = [9, 5, 8, 6, 7, 4, 3, 5]
    parents = [None, 0, 0, 1, 1, 2, 2, 5]
    starts = [0, 9, 9, 14, 14, 17, 17, 21]
    segments = [
        Segment(
            i,
            5 if i == 7 else i,
            parents[i],
            "tool" if i else "prompt",
            [(13 * i + 5 * j) % VOCAB for j in range(length)],
            mounts=[3] if i == 7 and reader else [],
            start=starts[i],
        )
        for i, length in enumerate(lengths)
    ]
    owners = [None, 0, 0, 1, 1, 2, 2]
    threads = [ThreadRecord(i, parent, head=i) for i, parent in enumerate(owners)]
    return Trace("pc18", "p", threads=threads, segments=segments).check()


def per_branch(model: Any, trace: Trace) -> list[Tensor]:
    """Score each leaf chain as a row of its own by a plain forward; shared parts once."""
    parts: dict[int, Tensor] = {}
    parents = {segment.parent for segment in trace.segments}
    for leaf in trace.segments:
        if leaf.id in parents:
            continue
        chain = [leaf]
        while (above := chain[0].parent) is not None:
            chain.insert(0, trace.segments[above])
        tokens = torch.tensor([token for link in chain for token in link.tokens])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        logps = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        logps = torch.cat([logps.new_full((1,), float("nan")), logps])
        for link, part in zip(chain, logps.split([len(s.tokens) for s in chain]), strict=True):
            parts.setdefault(link.id, part)
    return [parts[segment.id] for segment in trace.segments]


@pytest.mark.parametrize("reader", [False, True], ids=["tree", "mounted"])
def test_three_optimizer_steps_end_at_the_parameters_of_per_branch_training(reader: bool) -> None:
    trace = pc_18(reader)
    stock = tiny_hybrid(6)
    ours = prepare_model(copy.deepcopy(stock))

    def train(model: Any, score: Callable[[], list[Tensor]]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            scores = torch.cat(score())
            (-scores[~scores.isnan()].mean()).backward()
            optimizer.step()

    before = copy.deepcopy(stock.state_dict())
    train(ours, lambda: ours_of(ours, trace))
    if reader:
        train(stock, lambda: brute_logps(stock, trace))
    else:
        train(stock, lambda: per_branch(stock, trace))
    moved = 0.0
    for name, want in stock.state_dict().items():
        moved = max(moved, (want - before[name]).abs().max().item())
        torch.testing.assert_close(
            ours.state_dict()[name], want, rtol=0.0, atol=tolerances.AFTER_STEPS
        )
    assert moved > 1e-3


def test_scores_can_be_differentiated_twice_in_a_row() -> None:
    """Two calls before one backward: contexts of one pass do not disturb another's."""
    model = prepare_model(tiny_hybrid(0))
    first, second = (random_trace(seed, steps=5, max_tokens=60) for seed in (260, 261))
    apart = gradients(model, ours_of(model, first))
    more = gradients(model, ours_of(model, second))
    (weighted(ours_of(model, first)) + weighted(ours_of(model, second))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        want = apart[name] + more[name]
        assert (parameter.grad - want).norm() <= 1e-5 * want.norm()


def test_without_grad_no_graph_is_kept() -> None:
    model = prepare_model(tiny_hybrid(0))
    trace = random_trace(262, steps=4, max_tokens=40)
    with torch.no_grad():
        assert not any(score.requires_grad for score in ours_of(model, trace))
    assert all(score.requires_grad for score in ours_of(model, trace)[1:])
