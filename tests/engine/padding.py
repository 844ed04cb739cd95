"""Random games of prefill passes, and operations that leave NaN where padding may hold anything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octopus_trl.engine import Cursor, Engine
from octopus_trl.engine.prefill import PrefillPass
from octopus_trl.protocols import SamplingParams


def prefill_of(engine: Engine) -> PrefillPass:
    """Give the prefill passes of a fused engine."""
    assert engine._paths.passes is not None
    return engine._paths.passes.prefill


def play_game(
    engine: Engine, seed: int, *, vocab: int, lengths: Sequence[int], steps: int
) -> list[Tensor]:
    """Extend, fork, mount, rewind and run turns at random, with given text alone.

    What turns draw is taken back, which also steps through text again.

    Returns:
        The logits [vocab] after every change.
    """
    draws = random.Random(seed)

    def text() -> list[int]:
        return [draws.randrange(vocab) for _ in range(draws.choice(lengths))]

    cursors: list[Cursor] = [engine.open(text())]
    found: list[Tensor] = []
    for _ in range(steps):
        kind = draws.choice(["extend", "fork", "mount", "rewind", "turns", "turns"])
        cursor = draws.choice(cursors)
        if kind == "turns":
            chosen = draws.sample(cursors, draws.randint(1, len(cursors)))
            params = SamplingParams(max_tokens=1, seed=1)
            for each in chosen:
                engine.submit(each, text(), params, until=())
            while engine.has_work:
                engine.step()
            for each in chosen:
                engine.rewind(each, each.num_tokens - 1)
                found.append(engine.logits(each))
            continue
        if kind == "fork":
            cursor = engine.fork(cursor)
            cursors.append(cursor)
        elif kind == "mount":
            engine.mount(cursor, draws.choice(cursors))
        elif kind == "rewind":
            engine.rewind(cursor, draws.randint(1, cursor.num_tokens))
        found.append(engine.logits(engine.extend(cursor, text())))
        if len(cursors) > 6:
            engine.close(cursors.pop(0))
    engine.check_integrity()
    return found


def poison_padding(engine: Engine) -> Engine:
    """Put NaN where an operation of the fused pass says nothing: rows of no run, rows that see
    nothing.
    """
    assert engine._paths.passes is not None
    ops: dict[str, Any] = engine._paths.passes.model._ops

    def poisoned(name: str) -> Any:
        operation = ops[name]

        def run(x: Tensor, **named: Any) -> Any:
            out = operation(x, **named)
            values = out if isinstance(out, Tensor) else out[0]
            if name == "dag_decode_attention":
                bounds = named["work"].bounds[: len(values) + 1]
                nothing = bounds[1:] == bounds[:-1]
            else:
                rows = torch.arange(len(values), device=values.device)
                nothing = rows >= named["cu_seqlens"][-1]
            nothing = nothing.view(-1, *[1] * (values.dim() - 1))
            values = values.masked_fill(nothing, float("nan"))
            return values if isinstance(out, Tensor) else (values, *out[1:])

        return run

    for name in ("causal_conv", "gated_delta_rule", "dag_decode_attention"):
        ops[name] = poisoned(name)
    return engine


def pools_of(engine: Engine) -> list[Tensor]:
    """List keys, values, convolution tails and recurrent states of every layer."""
    memory = engine._memory
    kinds = (memory.keys, memory.values, memory.tails, memory.states)
    return [tensor for kind in kinds for tensor in kind.values()]
