"""Decode steps over static buffers: captured once a width on a GPU, replayed for every token.

A step feeds each row the token that its lane holds, or one that the host gives, draws the next one
from the new hidden state and leaves it in the lane: a token goes from step to step without the
host. Before a step one packed copy says where its rows lie and what they see; after it one copy
brings tokens and log-probabilities back, to be read whenever the host gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octopus_trl.engine.captures import CapturedPasses
from octopus_trl.engine.counters import Counters
from octopus_trl.engine.row_work import StepWork
from octopus_trl.engine.sampler import uniforms
from octopus_trl.engine.staging import Array, Device, Event, Layout, Staging
from octopus_trl.kernels import select
from octopus_trl.models.fused import FusedModel, TokenRows
from octopus_trl.protocols import SamplingParams

Views = dict[str, Tensor]


class StepRow:
    """A running turn's place in the steps.

    Attributes:
        lane: where its token and hidden state stay between steps.
        growth: the node that grows.
        filtered: whether top-p, top-k or min-p is in use.
    """

    __slots__ = ("filtered", "growth", "lane", "params", "seed")

    def __init__(self, lane: int, growth: Any, params: SamplingParams, seed: int) -> None:
        self.lane, self.growth, self.params = lane, growth, params
        self.seed = seed & ((1 << 64) - 1)
        self.filtered = params.top_p < 1 or params.top_k > 0 or params.min_p > 0


@dataclass(slots=True)
class Drawn:
    """Tokens on their way to the host.

    Attributes:
        rows: whom they belong to, in order.
    """

    rows: list[Any]
    _host: Tensor
    _event: Event

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the step and give tokens and log-probabilities, one a row."""
        self._event.wait()
        out, num = self._host, len(self.rows)
        return out[0, :num].tolist(), out[1].view(torch.float32)[:num].tolist()


class DecodeSteps(CapturedPasses):
    """Runs steps of at most `widths[-1]` rows.

    Args:
        widths: numbers of rows that a step may have, ascending; fewer rows are padded.
        num_lanes: rows that may be under way at once.
        capture: replay CUDA graphs; otherwise every step is launched operation by operation.
    """

    def __init__(
        self,
        fused: FusedModel,
        device: Device,
        work: StepWork,
        counters: Counters,
        *,
        widths: tuple[int, ...],
        num_lanes: int,
        capture: bool,
    ) -> None:
        super().__init__(fused, counters)
        self._device, self._work = device, work
        self.widths, self.num_lanes, self.capture = widths, num_lanes, capture
        spec, memory = fused.spec, fused.memory
        self._sample = select("sample", memory.device)
        # The last lane is the padding rows'.
        self.tokens = torch.zeros(num_lanes + 1, dtype=torch.int64, device=memory.device)
        self.hidden = torch.zeros(
            num_lanes + 1, spec.hidden_size, dtype=memory.dtype, device=memory.device
        )
        self._out = torch.zeros(2, widths[-1], dtype=torch.int32, device=memory.device)
        self._layouts = {width: Layout(_fields(width) + work.fields(width)) for width in widths}
        size = max(layout.nbytes for layout in self._layouts.values())
        self._staging = Staging(device, size)
        self._views = {width: self._device_views(width) for width in widths}
        self._works = {width: work.bind(width, self._views[width]) for width in widths}
        self._arrays: dict[tuple[int, int], dict[str, Array]] = {}
        self._hosts: list[Tensor] = []

    def width(self, rows: int) -> int:
        """Give the least width that holds some rows."""
        return next(width for width in self.widths if width >= rows)

    def enter(self, rows: Sequence[StepRow]) -> None:
        """Move the hidden states [d] of growing nodes into their lanes, where steps renew them."""
        hidden = [row.growth.hidden for row in rows]
        host = self._device.host_buffer(8 * len(rows)).view(torch.int64)
        host.numpy()[:] = [row.lane for row in rows]
        lanes = host.to(self.hidden.device, non_blocking=True)
        self._device.launch(lambda: self.hidden.index_copy_(0, lanes, torch.stack(hidden)))

    def draw(self, rows: Sequence[StepRow], indices: Sequence[int]) -> Drawn:
        """Draw a token for each row from its lane's hidden state.

        Args:
            indices: number of the draw within its turn, one a row.
        """
        width = self.width(len(rows))
        self._begin(rows, indices, width)
        return self._finish("draw", rows, width)

    def feed(
        self,
        rows: Sequence[StepRow],
        indices: Sequence[int],
        given: Sequence[int],
        *,
        group: int = 0,
    ) -> Drawn:
        """Feed each row one token, to the last slot of its node, and draw the next one.

        Args:
            indices: number of the draw within its turn, one a row.
            given: token that the host knows, -1 for the one that the row's lane holds.
            group: number of the launch among those of one iteration.
        """
        num, width = len(rows), self.width(len(rows))
        arrays = self._begin(rows, indices, width)
        growths = [row.growth for row in rows]
        positions = [growth.position for growth in growths]
        self._cover(max(positions))
        for name, values, padding in (
            ("given", given, 0),
            ("positions", positions, 0),
            ("write_slots", [growth.seen.last for growth in growths], -1),
            ("read_states", [growth.read_slot for growth in growths], 0),
            ("write_states", [growth.node.slot or 0 for growth in growths], 0),
        ):
            arrays[name][:num] = values
            arrays[name][num:] = padding
        self._work.fill(growths, width, group, arrays)
        return self._finish("feed", rows, width)

    def _begin(
        self, rows: Sequence[StepRow], indices: Sequence[int], width: int
    ) -> dict[str, Array]:
        """Write lanes and sampling of a step."""
        turn, host = self._staging.write()
        key = (turn, width)
        if key not in self._arrays:
            fields = self._layouts[width].fields.values()
            self._arrays[key] = {field.name: field.of_host(host) for field in fields}
        arrays, num = self._arrays[key], len(rows)
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        params = [row.params for row in rows]
        for name, values, padding in (
            ("uniform", uniforms(seeds, np.array(indices, dtype=np.uint64)), 0.5),
            ("temperature", [p.temperature for p in params], 1.0),
            ("top_p", [p.top_p for p in params], 1.0),
            ("top_k", [p.top_k for p in params], 0),
            ("min_p", [p.min_p for p in params], 0.0),
            ("lanes", [row.lane for row in rows], self.num_lanes),
        ):
            arrays[name][:num] = values
            arrays[name][num:] = padding
        return arrays

    def _finish(self, kind: str, rows: Sequence[StepRow], width: int) -> Drawn:
        """Send what was written, run the step and bring its draws back."""
        filtered = any(row.filtered for row in rows)
        run = self._prepared(kind, width, filtered)
        self._staging.send(self._layouts[width].nbytes)
        self._device.launch(run)
        host = self._hosts.pop() if self._hosts else self._host_out()
        self._device.launch(lambda: host.copy_(self._out, non_blocking=True))
        return Drawn(list(rows), host, self._device.mark())

    def done(self, drawn: Drawn) -> None:
        """Take back what a read result was held in."""
        self._hosts.append(drawn._host)

    def _host_out(self) -> Tensor:
        return self._device.host_buffer(self._out.nbytes).view(torch.int32).view_as(self._out)

    def _device_views(self, width: int) -> Views:
        fields = self._layouts[width].fields.values()
        return {field.name: field.of_device(self._staging.buffer) for field in fields}

    def _prepared(self, kind: str, width: int, filtered: bool) -> Callable[[], object]:
        """Give the call that runs a step: a graph's replay, or the operations themselves."""
        body = self._feed_rows if kind == "feed" else self._draw_rows

        def run() -> None:
            body(width, filtered)

        if not self.capture:
            return run
        key = (kind, width, filtered)
        if key not in self._graphs:
            with self._counters.timed("capture"):
                self._graphs[key] = self._captured(run, width)
        return self._graphs[key].replay

    def _captured(self, run: Callable[[], None], width: int) -> Any:
        """Capture a step; it runs once before, on padding rows alone, so that kernels compile."""
        self._pad(width)
        self._captures.rehearse(run)
        return self._captures.capture(run)

    def _pad(self, width: int) -> None:
        """Make every row of a width padding, on the device alone."""
        padding = {"lanes": self.num_lanes, "write_slots": -1, "temperature": 1, "top_p": 1}
        for name, view in self._views[width].items():
            view.fill_(padding.get(name, 0))
        self._work.pad(width, self._views[width])

    def _feed_rows(self, width: int, filtered: bool) -> None:
        views = self._views[width]
        work, tree_work = self._works[width]()
        given = views["given"]
        rows = TokenRows(
            torch.where(given < 0, self.tokens.index_select(0, views["lanes"]), given),
            views["positions"],
            views["write_slots"],
            work,
            tree_work,
            views["read_states"],
            views["write_states"],
        )
        hidden = self._fused(rows)
        self.hidden.index_copy_(0, views["lanes"], hidden)
        self._draw(hidden, views, filtered)

    def _draw_rows(self, width: int, filtered: bool) -> None:
        views = self._views[width]
        self._draw(self.hidden.index_select(0, views["lanes"]), views, filtered)

    def _draw(self, hidden: Tensor, views: Views, filtered: bool) -> None:
        logits = self._fused.logits(hidden)
        tokens, logps = self._sample(
            logits,
            temperature=views["temperature"],
            top_p=views["top_p"],
            top_k=views["top_k"],
            min_p=views["min_p"],
            uniform=views["uniform"],
            filtered=filtered,
        )
        # A row of NaN may draw anything; the host sees its log-probability and ends it, but the
        # step that is under way by then must not read past the embedding.
        tokens = tokens.clamp(0, logits.shape[-1] - 1)
        self.tokens.index_copy_(0, views["lanes"], tokens)
        num = len(tokens)
        self._out[0, :num].copy_(tokens)
        self._out[1, :num].copy_(logps.view(torch.int32))


def _fields(width: int) -> list[tuple[str, str, int]]:
    return [
        ("uniform", "float64", width),
        ("top_p", "float64", width),
        ("min_p", "float64", width),
        ("lanes", "int64", width),
        ("given", "int64", width),
        ("temperature", "float32", width),
        ("top_k", "int32", width),
        ("positions", "int32", width),
        ("write_slots", "int32", width),
        ("read_states", "int32", width),
        ("write_states", "int32", width),
    ]
