"""Random attention plans that the kernels' tests share."""

from __future__ import annotations

import random

from octopus_trl.maths import dag


def random_plan(seed: int, longest: int = 300, segments: int = 14) -> dag.AttentionPlan:
    """Draw a DAG with several roots, forks and mounts of non-ancestors, lengths of every kind."""
    draw = random.Random(seed)
    parents: list[int | None] = [None]
    mounts: list[list[int]] = [[]]
    for index in range(1, segments):
        parents.append(draw.choice([None, *range(index)]) if draw.random() < 0.9 else index - 1)
        chain = dag.ancestors([*parents], index)
        seen = {m for s in chain for m in mounts[s]}
        free = sorted({*range(index)} - {*chain} - seen)
        mounts.append(draw.sample(free, k=min(len(free), draw.choice([0, 0, 1, 2]))))
    lengths = [draw.choice([1, 63, 64, 65, draw.randint(1, longest)]) for _ in parents]
    return dag.layout(parents, mounts, lengths).plan
