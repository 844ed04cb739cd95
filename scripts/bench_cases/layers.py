"""One layer of the packed pass by itself: attention over a sparse DAG, and the gated delta rule.

The DAG of DESIGN §8: a trunk and ten branches of half its length, each mounting its left neighbour,
three blocks of four empty. The baseline is what else would run: FlexAttention over the same block
lists, and one run instead of many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from octopus_trl.kernels import _flex, select
from octopus_trl.kernels._attention_choice import choose
from octopus_trl.maths import dag

from .clock import sample_s
from .limits import Shapes
from .setting import Line, Setting
from .train_work import seen_pairs

BRANCHES = 10
RUNS = 96
REPEATS = 5
# DESIGN §8, one H200: forward, forward and backward; elsewhere the roofline alone.
DESIGN_ROWS = 49_152
GOALS_MS = {"attention": (15.0, 95.0), "delta": (4.0, 16.0)}


def run(setting: Setting) -> Iterator[Line]:
    """Yield forward, and forward and backward, of either layer."""
    yield from attention(setting, setting.shapes)
    yield from delta(setting)


def attention(setting: Setting, shapes: Shapes) -> Iterator[Line]:
    """Time packed attention; the share is against the goal where the DAG is DESIGN's."""
    trunk = setting.sizes.layer_tokens // 6
    parents = [None, *[0] * BRANCHES]
    mounts = [[], [], *[[branch - 1] for branch in range(2, BRANCHES + 1)]]
    plan = dag.layout(parents, mounts, [trunk, *[trunk // 2] * BRANCHES]).plan
    rows, dim, dtype = plan.num_rows, shapes.head_dim, setting.load().dtype
    q, k, v = (
        torch.randn(rows, heads, dim, device=setting.device).to(dtype).requires_grad_()
        for heads in (shapes.num_heads, shapes.num_kv_heads, shapes.num_kv_heads)
    )
    ours = select("dag_attention", setting.device)
    print(f"packed attention: {choose(setting.device, dtype, dim).text}", file=sys.stderr)
    flops = 4 * shapes.num_heads * dim * seen_pairs(plan)

    def pair(attend: Callable[..., Tensor]) -> tuple[float, float]:
        def call() -> Tensor:
            return attend(q, k=k, v=v, plan=plan, scale=dim**-0.5)

        return forward_and_both(call, (q, k, v))

    forward, both = pair(ours)
    other: tuple[float | None, float | None] = (None, None)
    name = "FlexAttention: its backward runs on a GPU alone"
    if setting.device.type == "cuda":
        other, name = pair(_flex.dag_attention), "FlexAttention, same block lists, ms"
    what = f"packed attention, {rows:,} rows, head_dim {dim}, {shapes.num_heads} heads"
    found = zip(("forward", "forward+backward"), (forward, both), (1.0, 3.5), other, strict=True)
    for index, (way, seconds, times, theirs) in enumerate(found):
        limit = 1e3 * times * flops / setting.rates.attention_flops
        if setting.sizes.layer_tokens == DESIGN_ROWS:
            limit = GOALS_MS["attention"][index]
        value = None if theirs is None else 1e3 * theirs
        yield Line.cost(f"{what}: {way}", 1e3 * seconds, "ms", limit, baseline=(name, value))


def delta(setting: Setting) -> Iterator[Line]:
    """Time the gated delta rule over many runs of a row, beside one run of as many tokens."""
    config, dtype = setting.load().config, setting.load().dtype
    rows, device = setting.sizes.layer_tokens, setting.device
    heads, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    rule = select("gated_delta_rule", device)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(kind).requires_grad_()

    given: dict[str, Any] = {
        "q": normal(rows, heads, key_dim),
        "k": normal(rows, heads, key_dim),
        "v": normal(rows, values, value_dim),
        "g": (-0.05 * torch.rand(rows, values, device=device)).requires_grad_(),
        "beta": torch.rand(rows, values, device=device).requires_grad_(),
    }

    def pair(runs: int) -> tuple[float, float]:
        state = normal(runs, values, key_dim, value_dim, kind=torch.float32)
        bounds = torch.linspace(0, rows, runs + 1, device=device).long()

        def call() -> Tensor:
            return rule(**given, initial_state=state, cu_seqlens=bounds)[0]

        return forward_and_both(call, (*given.values(), state))

    many, one = pair(RUNS), pair(1)
    # Forward reads q, k and v and writes the output; the backward moves twice that.
    moved = rows * (2 * heads * key_dim + 2 * values * value_dim) * given["v"].itemsize
    what = f"gated delta rule, {rows:,} rows in {RUNS} runs"
    for index, (way, times) in enumerate((("forward", 1), ("forward+backward", 3))):
        limit = 1e3 * times * moved / setting.rates.bytes_s
        if rows == DESIGN_ROWS:
            limit = GOALS_MS["delta"][index]
        yield Line.cost(
            f"{what}: {way}",
            1e3 * many[index],
            "ms",
            limit,
            baseline=("one run, ms", 1e3 * one[index]),
        )


def forward_and_both(call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> tuple[float, float]:
    """Give the least seconds of a forward pass, and of a forward and backward pass."""

    def both() -> None:
        out = call()
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    @torch.no_grad()
    def forward() -> None:
        call()

    times = []
    for each in (forward, both):
        each()
        times.append(min(sample_s(each, repeats=REPEATS)))
    return times[0], times[1]
