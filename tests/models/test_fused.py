"""The fused pass against the model's own forward, on every pass that random episodes make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octopus_trl.engine import runner
from octopus_trl.maths.decode_attention import AttentionWork
from octopus_trl.models import prepare_model
from octopus_trl.models.fused import FusedModel, TokenRows
from octopus_trl.models.paged import PagedContext, PagedMemory, run_paged
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import small_engine, tokens
from tests.engine.replay import play
from tests.tiny import SHORT_LENGTHS, random_trace, tiny_dense, tiny_hybrid, with_lora

ATOL = 2e-5  # hidden states are of order 1


def work_of(seen: Sequence[Tensor]) -> AttentionWork:
    """One item a row."""
    lengths = [len(slots) for slots in seen]
    rows = [row for row, length in enumerate(lengths) if length]
    items = torch.zeros(len(seen) + 1, 8, dtype=torch.int32)
    bounds = torch.zeros(len(seen) + 1, dtype=torch.int32)
    for item, row in enumerate(rows):
        lo = sum(lengths[:row])
        items[item, :5] = torch.tensor([lo, lengths[row], item, 1, lengths[row]])
    for row, length in enumerate(lengths):
        bounds[row + 1] = bounds[row] + (length > 0)
    return AttentionWork(
        torch.tensor([len(rows)], dtype=torch.int32),
        items,
        torch.tensor([[row, item] for item, row in enumerate(rows)], dtype=torch.int32),
        bounds,
        torch.cat(list(seen)).int(),
        torch.zeros(1, dtype=torch.int32),
    )


def rows_of(context: PagedContext) -> TokenRows:
    """Say what a paged context says, for the fused pass."""
    num = len(context.tokens)
    assert context.write_slots is not None
    slots = torch.full((num,), -1)
    slots[: len(context.write_slots)] = context.write_slots
    works = []
    for seen in (context.seen, context.tree_seen):
        if context.decode:
            lists = [*seen.rows, *[slots[:0]] * (num - len(seen.rows))]
        else:
            lists = [torch.cat([seen.rows[0], slots[: row + 1]]) for row in range(num)]
        works.append(work_of(lists))
    runs = num if context.decode else 1
    writes = torch.zeros(runs, dtype=torch.int64)
    writes[: len(context.write_states)] = context.write_states
    return TokenRows(
        context.tokens,
        context.positions,
        slots,
        works[0],
        works[1],
        context.read_states,
        writes,
        None if context.decode else torch.tensor([0, num]),
    )


def cloned(memory: PagedMemory, into: PagedMemory) -> None:
    for name in ("keys", "values", "tails", "states"):
        for layer, tensor in getattr(memory, name).items():
            getattr(into, name).setdefault(layer, torch.empty_like(tensor)).copy_(tensor)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run every paged pass of an engine in a fused model too, on a copy of the pools, and compare
    hidden states, keys, values and recurrent states.
    """

    def install(engine: Any, fused_source: nn.Module, **options: Any) -> list[int]:
        memory = engine._memory
        copy = PagedMemory(
            memory.spec, page_size=1, num_pages=1, num_states=1, dtype=memory.dtype,
            device=memory.device,
        )  # fmt: skip
        fused = FusedModel(fused_source, copy, **options)
        fused.cover(5000)
        passes: list[int] = []

        def run_both(model: nn.Module, context: PagedContext) -> Tensor:
            if context.write_slots is None:
                return run_paged(model, context)
            cloned(memory, copy)
            ours = fused(rows_of(context))
            want = run_paged(model, context)
            real = len(context.write_slots)
            torch.testing.assert_close(ours[:real], want[:real], atol=ATOL, rtol=0)
            logits = fused.logits(ours[:real])
            torch.testing.assert_close(
                logits, engine._runner.logits(want[:real]), atol=1e-4, rtol=0
            )
            for name in ("keys", "values", "tails", "states"):
                for layer, tensor in getattr(memory, name).items():
                    mine = getattr(copy, name)[layer]
                    torch.testing.assert_close(mine, tensor, atol=ATOL, rtol=0, equal_nan=True)
            passes.append(len(context.tokens))
            return want

        monkeypatch.setattr(runner, "run_paged", run_both)
        return passes

    return install


def sample_everywhere(engine: Any, cursors: Sequence[Any]) -> None:
    engine.generate(list(cursors), SamplingParams(seed=1, max_tokens=3), until=())


@pytest.mark.parametrize("kind", ["hybrid", "dense", "tied"])
@pytest.mark.parametrize("seed", range(3))
def test_every_pass_of_a_random_episode_is_that_of_the_model(
    both: Any, seed: int, kind: str
) -> None:
    if kind == "dense":
        model = prepare_model(tiny_dense(seed), mount_layers=[1, 3])
    else:
        model = prepare_model(tiny_hybrid(seed, tie=kind == "tied"))
    engine = small_engine(model, page_size=3, num_pages=1000)
    passes = both(engine, model)
    cursors, *_ = play(engine, random_trace(seed + 20, steps=10, lengths=SHORT_LENGTHS))
    engine.extend(cursors[0], tokens(65))
    sample_everywhere(engine, [engine.fork(cursor) for cursor in cursors.values()])
    assert min(passes) == 1
    assert max(passes) == 65


@pytest.mark.parametrize(
    "options", [{}, {"merge": True}, {"share": False}, {"share": False, "merge": True}], ids=str
)
def test_adapters_count_merged_or_not_and_weights_shared_or_not(
    both: Any, options: dict[str, bool]
) -> None:
    model = prepare_model(with_lora(tiny_hybrid()))
    engine = small_engine(model)
    passes = both(engine, model, **options)
    cursor = engine.open(tokens(20))
    sample_everywhere(engine, [cursor, engine.fork(cursor)])
    assert passes
