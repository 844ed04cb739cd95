"""Slots of a paged pool: what was written is read, and nothing else."""

from __future__ import annotations

import torch

from octopus_trl.maths.paging import gather_slots, write_slots


def test_written_rows_come_back_from_their_slots() -> None:
    pool = torch.full((3, 5, 2, 7), float("nan"))
    slots = torch.tensor([14, 0, 6, 7])
    values = torch.randn(4, 2, 7)
    write_slots(pool, values=values, slots=slots)
    assert torch.equal(gather_slots(pool, slots=slots), values)
    assert torch.equal(gather_slots(pool, slots=slots[[2, 2, 0]]), values[[2, 2, 0]])
    assert torch.equal(pool[1, 1:3], values[2:])


def test_other_slots_stay_as_they_were() -> None:
    pool = torch.randn(3, 5, 2, 7)
    before = pool.clone()
    slots = torch.tensor([3, 9])
    write_slots(pool, values=torch.zeros(2, 2, 7), slots=slots)
    others = torch.tensor([slot for slot in range(15) if slot not in (3, 9)])
    assert torch.equal(gather_slots(pool, slots=others), gather_slots(before, slots=others))


def test_values_take_the_dtype_of_the_pool() -> None:
    pool = torch.zeros(1, 5, 1, 3, dtype=torch.bfloat16)
    values = torch.randn(2, 1, 3)
    write_slots(pool, values=values, slots=torch.tensor([4, 1]))
    assert torch.equal(gather_slots(pool, slots=torch.tensor([4, 1])), values.bfloat16())


def test_no_rows_change_nothing() -> None:
    pool = torch.randn(2, 3, 1, 5)
    before = pool.clone()
    none = torch.empty(0, dtype=torch.int64)
    write_slots(pool, values=torch.empty(0, 1, 5), slots=none)
    assert torch.equal(pool, before)
    assert gather_slots(pool, slots=none).shape == (0, 1, 5)
