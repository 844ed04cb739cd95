"""Kernels of a decode step at Qwen3.5-4B's sizes: bytes a second against a copy in the same run.

Every result is checked against its reference before it is timed. Work is captured and replayed over
data that exceeds the cache; the limit is what a plain copy reaches here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octopus_trl.kernels import select

from .clock import replay_s
from .setting import Line, Setting, WrongResult

KEY_HEADS, HEADS, DIM, WIDTH = 16, 32, 128, 4  # of a gated delta layer
CHANNELS = 2 * KEY_HEADS * DIM + HEADS * DIM
HIDDEN, INNER, VOCAB = 2560, 9216, 248_320
QUERY_HEADS, KV_HEADS, HEAD_DIM, ROTATED = 16, 4, 256, 64
STATE_ROWS = (8, 16, 64, 128, 512)
ROWS = (16, 64)
CACHE_BYTES = 6e8  # data of one replay, several times the second-level cache
BF16 = torch.bfloat16


def run(setting: Setting) -> Iterator[Line]:
    """Measure every kernel; the copy's rate comes first and is the limit of the others."""
    if setting.device.type != "cuda":
        yield Line.not_run("kernels", "needs a CUDA device")
        return
    copy = copy_rate()
    yield Line.rate("copy of 1 GiB, read and written", copy / 1e12, "TB/s", 4.8)
    for measure in (delta_steps, products, streams, rotations, draws):
        if not setting.fits(20):
            yield Line.not_run(measure.__name__, setting.out_of_budget(20))
            continue
        yield from measure(copy)
        torch.cuda.empty_cache()


def copy_rate() -> float:
    """Bytes/s that a kernel which only copies reads and writes (a copy engine is slower)."""
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / replay_s(lambda: torch.neg(source, out=target))


def rate(
    case: str, nbytes: float, seconds: float, copy: float, name: str, other_s: float | None
) -> Line:
    """Make a line of bytes/s; its case says the time of one call too."""
    text = f"{case}: {seconds * 1e6:.1f} us, {nbytes / 1e6:.2f} MB"
    other = None if other_s is None else nbytes / other_s / 1e12
    return Line.rate(
        text, nbytes / seconds / 1e12, "TB/s", copy / 1e12, baseline=(f"{name}, TB/s", other)
    )


def check(case: str, got: Tensor, want: Tensor, limit: float = 1e-2) -> None:
    """Refuse a result that is further from its reference than rounding explains."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < limit:
        raise WrongResult(f"{case}: relative error {error:.2e} against the reference")


def drawn(*shape: int) -> Tensor:
    """Draw bfloat16 numbers."""
    return torch.randn(*shape, device="cuda", dtype=BF16)


def copies_of(nbytes: float) -> int:
    """Calls of one replay for their data to exceed the cache."""
    return max(2, min(64, int(CACHE_BYTES / nbytes)))


def twenty(op: Callable[..., Any], first: Tensor, named: dict[str, Any]) -> Callable[[], Any]:
    """Make a call that runs an operation twenty times."""
    return lambda: [op(first, **named) for _ in range(20)]


def both(op: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Give an operation's kernel and its reference."""
    return select(op, "cuda"), select(op, "cpu")


def delta_steps(copy: float) -> Iterator[Line]:
    """Measure the gated delta step in place; its baseline is fla's step, delta rule alone."""
    step, reference = both("gated_delta_pool_step")
    slots = 2 * max(STATE_ROWS) + 1
    states = torch.randn(slots, HEADS, DIM, DIM, device="cuda") / DIM
    tails = drawn(slots, CHANNELS, WIDTH - 1)
    wide = HEADS * DIM
    layer: dict[str, Any] = {
        "conv_weight": drawn(CHANNELS, WIDTH),
        "conv_bias": None,
        "A_log": drawn(HEADS),
        "dt_bias": drawn(HEADS) - 4,
        "norm_weight": drawn(DIM),
        "num_key_heads": KEY_HEADS,
    }
    for rows in STATE_ROWS:
        product = drawn(rows, CHANNELS + wide + 2 * HEADS)
        mixed, z, b, a = product.split([CHANNELS, wide, HEADS, HEADS], dim=-1)
        named = {**layer, "a": a, "b": b, "z": z}
        chosen = torch.randperm(slots - 1, device="cuda").int() + 1
        sets = chosen[: len(chosen) // rows * rows].split(rows)[: copies_of(rows * 2**22)]
        if rows == STATE_ROWS[0]:
            results = []
            for use in (step, reference):
                own = {"tails": tails.clone(), "states": states.clone()}
                out = use(mixed, **named, **own, read=sets[0], write=sets[0])
                results.append((out, own["states"]))
            check("delta step, outputs", results[0][0], results[1][0])
            check("delta step, states", results[0][1], results[1][1], 1e-5)
            del own, results

        def steps(
            mixed: Tensor = mixed, named: dict[str, Any] = named, sets: Any = sets
        ) -> list[Tensor]:
            return [
                step(mixed, **named, tails=tails, states=states, read=at, write=at) for at in sets
            ]

        seconds = replay_s(steps) / len(sets)
        nbytes = rows * (2 * HEADS * DIM * DIM * 4 + 2 * CHANNELS * (WIDTH - 1) * 2)
        nbytes += product.nbytes + rows * wide * 2
        yield rate(
            f"gated delta step, {rows} rows, conv and gated norm in it, in place",
            nbytes,
            seconds,
            copy,
            "fla fused_recurrent, delta rule alone",
            fla_step_s(rows),
        )


def fla_step_s(rows: int) -> float | None:
    """Seconds of fla's decode step, which writes its states to a new tensor."""
    if util.find_spec("fla") is None:
        return None
    fla = select("gated_delta_step", "cuda")
    num = copies_of(rows * 2**22)
    given = {
        "k": drawn(rows, KEY_HEADS, DIM),
        "v": drawn(rows, HEADS, DIM),
        "g": -torch.rand(rows, HEADS, device="cuda"),
        "beta": torch.rand(rows, HEADS, device="cuda"),
    }
    q = drawn(rows, KEY_HEADS, DIM)
    states = [torch.zeros(rows, HEADS, DIM, DIM, device="cuda") for _ in range(num)]
    return replay_s(lambda: [fla(q, **given, state=state) for state in states]) / num


def products(copy: float) -> Iterator[Line]:
    """Measure the products of a layer and of its adapters against the BLAS library."""
    linear, reference = both("skinny_linear")
    shapes = {
        "delta in": (12352, HIDDEN),
        "out": (HIDDEN, 4096),
        "attention in": (10240, HIDDEN),
        "gate up": (2 * INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    for name, (num_outputs, dim) in shapes.items():
        num = copies_of(2 * num_outputs * dim)
        weights = [drawn(num_outputs, dim) / dim**0.5 for _ in range(num)]
        for rows in ROWS:
            x = drawn(rows, dim)
            check(name, linear(x, weight=weights[0]), reference(x, weight=weights[0]))

            def ours(x: Tensor = x, weights: list[Tensor] = weights) -> list[Tensor]:
                return [linear(x, weight=weight) for weight in weights]

            def blas(x: Tensor = x, weights: list[Tensor] = weights) -> list[Tensor]:
                return [F.linear(x, weight) for weight in weights]

            case = f"product {name} [{num_outputs}, {dim}], {rows} rows"
            nbytes = weights[0].nbytes + x.nbytes + 2 * rows * num_outputs
            yield rate(case, nbytes, replay_s(ours) / num, copy, "BLAS", replay_s(blas) / num)
    yield from adapters(copy)


def adapters(copy: float) -> Iterator[Line]:
    """Measure shrink and expand of rank 64 over q, k, v side by side."""
    shrink, expand = select("lora_shrink", "cuda"), both("lora_expand")
    widths, rank = (8192, 1024, 1024), 64
    a, b = drawn(3 * rank, HIDDEN) / 50, drawn(sum(widths), rank) / 8
    starts = torch.repeat_interleave(
        torch.arange(3, device="cuda", dtype=torch.int32) * rank,
        torch.tensor(widths, device="cuda"),
    )
    for rows in ROWS:
        x, y = drawn(rows, HIDDEN), drawn(rows, sum(widths))
        h = shrink(x, a=a)
        check("shrink", h, x @ a.T)
        results = [use(y.clone(), h=h, b=b, starts=starts) for use in expand]
        check("expand", *results)

        def adapt(x: Tensor = x, y: Tensor = y) -> None:
            for _ in range(20):
                expand[0](y, h=shrink(x, a=a), b=b, starts=starts)

        def apart(x: Tensor = x, y: Tensor = y) -> None:
            for _ in range(20):
                for part, columns in zip(b.split(widths), y.split(widths, dim=-1), strict=True):
                    columns += F.linear(F.linear(x, a[:rank]), part)

        nbytes = a.nbytes + b.nbytes + 2 * y.nbytes + x.nbytes
        case = f"adapters of rank {rank} over q, k, v, {rows} rows"
        name = "three pairs of products, TB/s of the same bytes"
        yield rate(case, nbytes, replay_s(adapt) / 20, copy, name, replay_s(apart) / 20)


def streams(copy: float) -> Iterator[Line]:
    """Measure what is done element by element: bound by its launch at few rows."""
    norm, norm_reference = both("rms_norm")
    swiglu, swiglu_reference = both("swiglu")
    weight = drawn(HIDDEN)
    named: dict[str, Any] = {"weight": weight, "eps": 1e-6, "zero_centered": True}
    for rows in (*ROWS, 4096):
        x, residual, gate_up = drawn(rows, HIDDEN), drawn(rows, HIDDEN), drawn(rows, 2 * INNER)
        check(
            "norm",
            norm(x, **named, residual=residual)[0],
            norm_reference(x, **named, residual=residual)[0],
        )
        check("SwiGLU", swiglu(gate_up), swiglu_reference(gate_up))

        added = {**named, "residual": residual}
        for case, nbytes, calls in (
            ("norm with residual", 4 * x.nbytes, [(norm, x, added), (norm_reference, x, added)]),
            (
                "SwiGLU",
                1.5 * gate_up.nbytes,
                [(swiglu, gate_up, {}), (swiglu_reference, gate_up, {})],
            ),
        ):
            ours, theirs = (replay_s(twenty(*call)) / 20 for call in calls)
            yield rate(f"{case}, {rows} rows", nbytes, ours, copy, "reference", theirs)


def rotations(copy: float) -> Iterator[Line]:
    """Measure head norms, rotation and the write to the pool."""
    rotate, reference = both("rotate_and_write")
    pools = [torch.zeros(512, 16, KV_HEADS, HEAD_DIM, device="cuda", dtype=BF16) for _ in range(2)]
    cos, sin = (drawn(4096, ROTATED // 2) for _ in range(2))
    for rows in ROWS:
        qkv = drawn(rows, 2 * (QUERY_HEADS + KV_HEADS) * HEAD_DIM)
        named: dict[str, Any] = {
            "q_weight": drawn(HEAD_DIM),
            "k_weight": drawn(HEAD_DIM),
            "eps": 1e-6,
            "zero_centered": True,
            "gated": True,
            "cos": cos,
            "sin": sin,
            "positions": torch.randint(0, 4096, (rows,), device="cuda", dtype=torch.int32),
            "keys": pools[0],
            "values": pools[1],
            "slots": torch.randperm(8192, device="cuda")[:rows].int(),
        }
        check("rotation", rotate(qkv, **named)[0], reference(qkv, **named)[0])
        nbytes = qkv.nbytes + rows * (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM * 2
        case = f"head norms, rotation and write, {rows} rows"
        yield rate(case, nbytes, replay_s(twenty(rotate, qkv, named)) / 20, copy, "none", None)


def draws(copy: float) -> Iterator[Line]:
    """Measure drawing a token a row, by temperature alone and with filters."""
    sample, reference = both("sample")
    for rows in ROWS:
        logits = [4 * drawn(rows, VOCAB) for _ in range(copies_of(2 * rows * VOCAB))]
        uniform = torch.rand(rows, device="cuda", dtype=torch.float64)
        for filtered in (False, True):
            named: dict[str, Any] = {
                "temperature": torch.full((rows,), 0.7, device="cuda"),
                "top_p": torch.full((rows,), 0.95 if filtered else 1.0, device="cuda").double(),
                "top_k": torch.full((rows,), 20 if filtered else 0, device="cuda"),
                "min_p": torch.zeros(rows, device="cuda", dtype=torch.float64),
                "uniform": uniform,
                "filtered": filtered,
            }
            got, want = sample(logits[0], **named), reference(logits[0], **named)
            if int((got[0] != want[0]).sum()) > 1:
                raise WrongResult(f"draws, {rows} rows: {got[0].tolist()}, not {want[0].tolist()}")
            what = "temperature, top-p and top-k" if filtered else "temperature alone"

            def ours(named: dict[str, Any] = named, logits: list[Tensor] = logits) -> Any:
                return [sample(each, **named) for each in logits]

            def theirs(named: dict[str, Any] = named, logits: list[Tensor] = logits) -> Any:
                return [reference(each, **named) for each in logits[:2]]

            yield rate(
                f"draw from {VOCAB} logits by {what}, {rows} rows",
                logits[0].nbytes,
                replay_s(ours) / len(logits),
                copy,
                "reference",
                replay_s(theirs) / 2,
            )
