"""An update on frozen episode mixes: one packed row against the same branches as varlen rows.

Both run the same kernels, the same LoRA adapter (r = 16) and the same checkpointing; the rows of
the baseline are packed without padding, each leaf chain computed in full, every sampled token
scored once. What each way of running the layers gains or costs, on the first mix. Then 131,072
unique tokens in one forward and backward pass, and three times as many with MLPs by tiles and the
layers' inputs in host memory.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from octopus_trl import Trace
from octopus_trl.kernels._block_lists import block_pairs
from octopus_trl.models import unwrap
from octopus_trl.trace import Segment, ThreadRecord
from octopus_trl.train.kernel_check import check_kernels
from octopus_trl.train.lora import PROJECTIONS

from .clock import sample_s, timed
from .mix import read, synthetic, trace_of
from .profile import write_profile
from .setting import Line, Setting
from .train_mix import SHAPES, dedup_ratio, path_of
from .train_ways import (
    GIB,
    TILES,
    Way,
    check_close,
    check_ways,
    measured,
    row_of,
    score,
    timed_calls,
    update,
    ways,
)
from .train_work import UpdateFlops, chain_rows, without_reads

RANK = 16
LEAST_MEMORY = 3.5  # DESIGN §8: times less memory than the rows of one forward
HOST_LIMIT_S = 1.0  # layout and block lists of the longest row
PROFILED = 2  # updates
TILED_S = 1.25  # times the seconds of a row without, to reckon with: no longer row has been timed


def run(setting: Setting) -> Iterator[Line]:
    """Yield speed, MFU and memory for each mix, what ways of running cost, then the longest row."""
    base = setting.load()
    dtype, shapes = base.dtype, setting.shapes  # before the adapter's own layers are in
    for text in check_kernels(base, setting.device, dtype):
        print(text, file=sys.stderr, flush=True)
    print(f"MFU = FLOPs / seconds / peak; {UpdateFlops.FORMULA}", file=sys.stderr, flush=True)
    with adapted(base) as model:
        flops = UpdateFlops.of(model, shapes)
        way = Way(fused=setting.fused_layers)
        speed = 0.0  # FLOP/s of the last mix
        for name in setting.mixes or SHAPES:
            mix = read(path_of(name)).shortened(setting.sizes.train_scale)
            trace = trace_of(mix, base.config.vocab_size)
            work = flops.count(row_of([trace]))
            once = work / speed if speed else 0.0
            needed = sum((1 + timed_calls(s)) * s for s in (once, once * dedup_ratio(trace)))
            if not setting.fits(needed):
                yield Line.not_run(name, setting.out_of_budget(needed))
                continue
            first = not speed
            with setting.busy(name):
                check_rows(model, trace, dtype, way)
                if first:
                    with natural_logits(model):
                        check_ways(model, trace, dtype)
                ours = alone(setting, model, trace, way)
            speed = work / ours[0]
            if first:
                yield from ways(setting, model, trace, way, ours, work / setting.rates.flops)
            with setting.busy(name):
                lines = compare(setting, model, trace, flops, way, ours)
            yield from lines
        yield from longest_row(setting, model, flops, speed, way)
        yield from longest_row(setting, model, flops, speed, way, times=3)


@contextmanager
def adapted(model: Any) -> Iterator[Any]:
    """Wrap a model in a LoRA adapter, in training mode with checkpointing; undone afterwards."""
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    targets = sorted(names & set(PROJECTIONS))
    wrapped: Any = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)
    )
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # zeros would leave A without a gradient
            torch.nn.init.normal_(parameter, std=1e-3)
    wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped.train()
    try:
        yield wrapped
    finally:
        wrapped.gradient_checkpointing_disable()
        wrapped.unload()
        model.requires_grad_(False).eval()


def update_all(model: Any, parts: Sequence[Sequence[Trace]], way: Way) -> None:
    """Run an update in several passes."""
    for traces in parts:
        update(model, traces, way)


@contextmanager
def natural_logits(model: Any) -> Iterator[None]:
    """Take back the factor that `scale_entropy` put into the last norm.

    It multiplies rounding too: random targets then have log-probabilities near -38, and in bfloat16
    either way of packing is 0.1 nats (mean of e^d − 1 − d) from float32, which would hide a fault.
    """
    weight = unwrap(model).model.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@torch.no_grad()
def check_rows(model: Any, trace: Trace, dtype: torch.dtype, way: Way) -> None:
    """Compare the packed log-probabilities with those of separate rows, of the tree without reads.

    Raises:
        WrongResult: they differ by more than rounding explains.
    """
    tree = without_reads(trace)
    chains = chain_rows(tree)
    with natural_logits(model), way.open(model):
        packed = score(model, row_of([tree]))
        apart = score(model, row_of([chain.trace for chain in chains]))
    sources = [source for chain in chains for source in chain.sources]
    lengths = [len(tree.segments[source].tokens) for source in sources]
    by_segment = dict(zip(sources, apart.split(lengths), strict=True))
    joined = torch.cat([by_segment[source] for source in sorted(by_segment)])
    what = f"{trace.episode_id}: {len(joined)} owned tokens packed against rows"
    check_close(what, packed, joined, dtype)


def alone(setting: Setting, model: Any, trace: Trace, way: Way) -> tuple[float, float]:
    """Measure, and profile where that is asked for, a packed update; give seconds and peak GiB."""
    call = partial(update, model, [trace], way)
    found = measured(setting, call)
    if setting.profile is not None:
        write_profile(setting.profile / f"{trace.episode_id}.txt", call, steps=PROFILED)
    return found


def compare(
    setting: Setting,
    model: Any,
    trace: Trace,
    flops: UpdateFlops,
    way: Way,
    ours: tuple[float, float],
) -> list[Line]:
    """Measure separate rows of an episode against `ours`, seconds and peak GiB of the one row."""
    rows = [chain.trace for chain in chain_rows(trace)]
    unique, ratio = sum(trace.lengths), dedup_ratio(trace)
    logical = sum(sum(row.lengths) for row in rows)
    what = f"update of {trace.episode_id}, {unique:,} unique tokens, r {ratio:.2f}"
    if way.fused:
        what += ", fused layers"
    ours_s, ours_peak = ours
    share = f"{what}: MFU, FLOPs of {UpdateFlops.__name__}"
    rate, limit = unique / ours_s, unique * setting.rates.flops / flops.count(row_of([trace]))
    needed = (1 + timed_calls(ratio * ours_s)) * ratio * ours_s
    if not setting.fits(needed):
        without = Line.not_run(what, setting.out_of_budget(needed))
        return [without, Line.rate(share, rate, "unique tokens/s", limit)]
    passes, theirs_s, theirs_peak = fewest_passes(setting, model, rows, way)
    theirs_mfu = sum(flops.count(row_of(part)) for part in split(rows, passes)) / theirs_s
    name = f"branches as {len(rows)} varlen rows of {logical:,} tokens in {passes} passes"
    lines = [
        Line.rate(
            what,
            theirs_s / ours_s,
            "times faster than separate rows",
            ratio,
            baseline=(f"{name}, s", theirs_s),
        ),
        Line.rate(
            share,
            rate,
            "unique tokens/s",
            limit,
            baseline=(f"{name}, MFU", theirs_mfu / setting.rates.flops),
        ),
    ]
    memory = f"{what}: peak memory"
    if setting.device.type != "cuda":
        lines.append(Line.not_run(memory, "counted on a GPU alone"))
    elif passes > 1:
        lines.append(Line.not_run(memory, f"the {name} do not fit one; ours {ours_peak:.1f} GiB"))
    else:
        lines.append(
            Line.rate(
                memory,
                theirs_peak / ours_peak,
                "times less than the rows",
                LEAST_MEMORY,
                baseline=(f"{name}, GiB", theirs_peak),
            )
        )
    return lines


def fewest_passes(
    setting: Setting, model: Any, rows: list[Trace], way: Way
) -> tuple[int, float, float]:
    """Run rows in as few passes as fit in memory; give passes, seconds of all, peak GiB."""
    passes = 1
    while True:
        try:
            call = partial(update_all, model, split(rows, passes), way)
            return passes, *measured(setting, call)
        except torch.cuda.OutOfMemoryError:
            if passes >= len(rows):
                raise
        # Out here the error's traceback holds no tensors any more.
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        passes *= 2


def split(rows: list[Trace], passes: int) -> list[list[Trace]]:
    """Deal rows out to passes of about equal size, the longest first."""
    parts: list[list[Trace]] = [[] for _ in range(passes)]
    used = [0] * passes
    for row in sorted(rows, key=lambda row: -sum(row.lengths)):
        least = used.index(min(used))
        parts[least].append(row)
        used[least] += sum(row.lengths)
    return [part for part in parts if part]


def longest_row(
    setting: Setting, model: Any, flops: UpdateFlops, speed: float, way: Way, *, times: int = 1
) -> Iterator[Line]:
    """Yield the host's time and the device's memory for one row of the most unique tokens.

    It is timed after a call that does not count; where the budget has room for one call alone, what
    it compiled is in its time and the line says so.

    Args:
        speed: FLOP/s of a mix.
        times: as many tokens; above 1 with tiled MLPs and the layers' inputs in host memory, and
            timed at its first call.
    """
    trace = wide_episode(times * setting.sizes.train_tokens, model.config.vocab_size)
    unique, long = sum(trace.lengths), times > 1
    what = f"{unique:,} unique tokens in one row"
    if way.fused:
        what += ", fused layers"
    if long:
        tile = -(-unique // (times * TILES))
        what += f", MLPs by {tile:,} and inputs of layers on the host"
        way = replace(way, tile=tile, on_host=True)
    with timed() as host:
        row = row_of([trace])
    plan = row.packed.layout.plan
    with timed() as lists:
        for query_block in (128, 64):
            block_pairs(plan, query_block=query_block, key_block=64, rows=unique)
    text = f"{what}: packing and block lists both ways on the host"
    yield Line.cost(text, host.value + lists.value, "s", HOST_LIMIT_S)
    work = flops.count(row)
    once = work / speed * (TILED_S if long else 1.0) if speed else 0.0
    if not setting.fits(once):
        yield Line.not_run(what, setting.out_of_budget(once))
        return
    weights = sum(p.numel() * p.itemsize for p in model.parameters()) / GIB
    call, cuda = partial(update, model, [trace], way), setting.device.type == "cuda"
    warm = not long and setting.fits(2 * once)
    with setting.busy(what):
        if warm:
            call()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        (seconds,) = sample_s(call, repeats=1)
    case = f"{what}: forward and backward, {len(row.targets):,} scored"
    if not warm:
        case += ", first call"
    yield Line.rate(case, unique / seconds, "unique tokens/s", setting.rates.flops / work * unique)
    if not cuda:
        yield Line.not_run(f"{what}: peak memory", "counted on a GPU alone")
    else:
        whole = torch.cuda.get_device_properties(setting.device).total_memory / GIB
        peak = torch.cuda.max_memory_allocated() / GIB
        with_weights = ("weights alone, GiB", weights)
        yield Line.cost(f"{what}: peak", peak, "GiB", whole, baseline=with_weights)
    if setting.profile is not None and setting.fits(seconds):
        write_profile(setting.profile / f"row_{unique}.txt", call, steps=1)


def wide_episode(tokens: int, vocab_size: int) -> Trace:
    """A trunk of an eighth of the tokens and 28 branches, each mounts the one before and samples a
    quarter of its own.
    """
    branches = 28
    trunk = tokens // 8
    own = (tokens - trunk) // branches
    lengths = [trunk, *[own - own // 4, own // 4] * branches]
    segments = [Segment(0, 0, None, "prompt", synthetic(0, lengths[0], vocab_size))]
    threads = [ThreadRecord(0, None, head=0)]
    for branch in range(branches):
        tool, action = 1 + 2 * branch, 2 + 2 * branch
        thread = branch + 1
        texts = [synthetic(index, lengths[index], vocab_size) for index in (tool, action)]
        edges = [tool - 2, action - 2] if branch else []
        segments.append(Segment(tool, thread, 0, "tool", texts[0], edges))
        segments.append(Segment(action, thread, tool, "action", texts[1]))
        threads.append(ThreadRecord(thread, 0, head=action))
    return Trace("wide", "wide", segments=segments, threads=threads).place()
