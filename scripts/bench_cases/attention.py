"""Decode attention by itself: rows that share a long text and each have their own.

The limit is the larger of the bytes, shared text once, and the FLOPs (DESIGN §8). The baseline is
the same rows each reading its whole chain from a contiguous copy through PyTorch's own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octopus_trl.engine.slot_table import SlotTable
from octopus_trl.engine.work_layout import WorkLayout
from octopus_trl.engine.worklist import Run, WorkList, WorkLists
from octopus_trl.kernels import select
from octopus_trl.kernels._decode_tuning import Tuning
from octopus_trl.maths.decode_attention import AttentionWork

from .clock import median_s
from .limits import Rates
from .setting import Line, Setting, WrongResult

CALLS = 40  # of one captured graph, so that launching it does not count
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest
PROCESSORS = 132  # of an H200, where there is no device to ask


@dataclass(frozen=True, slots=True)
class Shape:
    """What is timed: lengths in tokens, `page_size` slots a page."""

    threads: int
    shared: int
    own: int
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 256
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes(self) -> int:
        """Keys and values, shared text once."""
        token = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return (self.shared + self.threads * self.own) * token

    @property
    def flops(self) -> int:
        """Products q·k and p·v of every row with all that it sees."""
        return 4 * self.num_heads * self.head_dim * self.threads * (self.shared + self.own)

    def limit_s(self, rates: Rates) -> float:
        """Least seconds of a call."""
        return max(self.bytes / rates.bytes_s, self.flops / rates.attention_flops)


def run(setting: Setting) -> Iterator[Line]:
    """Yield milliseconds of one layer's attention at each number of threads."""
    sizes, shapes, dtype = setting.sizes, setting.shapes, setting.load().dtype
    for threads in sizes.threads:
        shape = Shape(
            threads,
            sizes.shared,
            sizes.own,
            shapes.num_heads,
            shapes.num_kv_heads,
            shapes.head_dim,
            sizes.page_size,
            dtype,
        )
        case = Case(shape, setting.device)
        case.check(case.ours)
        yield case.line(median_s(case.timer(case.ours)) / CALLS, setting.rates)


class Case:
    """Inputs on a device, own pages of the threads lying between each other as in an engine.

    Args:
        chunk: slots of an item; None leaves it to the work list.
        tuning: how the kernel cuts; None for its own choice.
        inputs: queries, keys and values of another case of this shape.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        *,
        chunk: int | None = None,
        tuning: Tuning | None = None,
        inputs: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        self.shape, self.device = shape, device
        page, group = shape.page_size, shape.num_heads // shape.num_kv_heads
        shared_pages, own_pages = -(-shape.shared // page), -(-shape.own // page)
        first = np.arange(own_pages) * shape.threads + shared_pages
        text = np.arange(shape.shared, dtype=np.int64)
        runs = [
            Run(
                thread,
                [text],
                ((first + thread)[:, None] * page + np.arange(page)).reshape(-1)[: shape.own],
            )
            for thread in range(shape.threads)
        ]
        self.seen = [np.concatenate([text, run.own]) for run in runs]
        num_pages = shared_pages + own_pages * shape.threads
        pool = (num_pages, page, shape.num_kv_heads, shape.head_dim)
        if inputs is None:
            q = self._normal(shape.threads, shape.num_heads, shape.head_dim)
            inputs = q, self._normal(*pool), self._normal(*pool)
        self.q, self.keys, self.values = inputs
        tuning = tuning or Tuning.of(shape.head_dim, shape.threads)
        layout = WorkLayout(shape.threads)
        table = SlotTable(2 * (shape.shared + shape.threads * (2 * shape.own + 512)))
        self.lists = WorkLists(
            [
                WorkList(
                    layout,
                    table,
                    readers_per_tile=tuning.readers_per_tile(group),
                    num_kv_heads=shape.num_kv_heads,
                    num_programs=_processors(device) * tuning.programs,
                    share=tuning.share,
                    chunk=chunk,
                )
            ]
        )
        self.lists.plan(runs)
        views = layout.views(torch.tensor(self.lists.lists[0].packed, device=device))
        views.pop("appends")
        self.work = AttentionWork(
            **views,
            slots=torch.tensor(table.mirror, device=device),
            queue=torch.zeros(1, dtype=torch.int32, device=device),
        )

    @property
    def scale(self) -> float:
        """The usual one."""
        return float(self.shape.head_dim**-0.5)

    def ours(self) -> Tensor:
        """Run what `select` gives for this device."""
        attend = select("dag_decode_attention", self.device)
        return attend(self.q, keys=self.keys, values=self.values, work=self.work, scale=self.scale)

    def check(self, call: Callable[[], Tensor]) -> None:
        """Compare some rows with float64.

        Raises:
            WrongResult: they differ by more than rounding explains, or a second call does.
        """
        call()
        out = call()  # the second call finds the queue as the first left it
        for row in {0, self.shape.threads // 2, self.shape.threads - 1}:
            index = torch.from_numpy(self.seen[row]).to(self.device)
            k, v = (pool.flatten(0, 1)[index].double() for pool in (self.keys, self.values))
            q = self.q[row].double().unflatten(0, (self.shape.num_kv_heads, -1))
            weights = (torch.einsum("hgd,lhd->hgl", q, k) * self.scale).softmax(-1)
            wanted = torch.einsum("hgl,lhd->hgd", weights, v).flatten(0, 1)
            error = float((out[row].double() - wanted).abs().max() / wanted.abs().max())
            if not error <= TOLERANCES[self.shape.dtype]:
                raise WrongResult(f"row {row} differs from float64 by {error:.1e} of the largest")

    def timer(self, call: Callable[[], Tensor], *, exact: bool = True) -> Callable[[], Any]:
        """Give a call that runs `call` CALLS times, from a captured graph on a GPU.

        Args:
            exact: both must give the same bits.
        Raises:
            WrongResult: the graph gives something else than the call by itself.
        """
        if self.device.type != "cuda":
            return lambda: [call() for _ in range(CALLS)]
        alone = call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call() for _ in range(CALLS)]
        graph.replay()
        graph.replay()
        if exact and not all(torch.equal(out, alone) for out in outs):
            raise WrongResult("the captured graph gives other results than the call by itself")
        return graph.replay

    def baseline_s(self) -> float | None:
        """Seconds of every row reading its whole chain; None where the copies do not fit."""
        shape = self.shape
        length = shape.shared + shape.own
        size = (shape.threads, shape.num_kv_heads, length, shape.head_dim)
        copies = 2 * int(np.prod(size)) * shape.dtype.itemsize
        if self.device.type == "cuda" and copies > 0.8 * torch.cuda.mem_get_info()[0]:
            return None
        k, v = (self._normal(*size) for _ in range(2))
        # The query heads of a KV head are rows of one product, as a grouped decode would do it.
        q = self.q.unflatten(1, (shape.num_kv_heads, -1))

        def call() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale)

        return median_s(self.timer(call, exact=False)) / CALLS

    def line(self, seconds: float, rates: Rates) -> Line:
        """Make the result line, the baseline measured now."""
        shape, other = self.shape, self.baseline_s()
        name = f"{shape.threads} threads, {shape.shared} shared + {shape.own} own"
        theirs = "SDPA, each row its whole chain, contiguous, ms"
        return Line.cost(
            f"decode attention, {name}, one layer",
            1e3 * seconds,
            "ms",
            1e3 * shape.limit_s(rates),
            baseline=(theirs, None if other is None else 1e3 * other),
        )

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self.shape.dtype, device=self.device)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
