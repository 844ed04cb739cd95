"""Integers of an episode DAG: ancestors, mounts, positions, visibility, runs and levels.

Everything here is plain Python and NumPy (no torch), so that the trace, the packer and the
engine's tests share one definition. A DAG is given as parallel lists over segments in creation
order: `parents[i]` is an earlier index or `None`, `mounts[i]` holds earlier indices that become
readable at the boundary just before segment i (DESIGN §2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
Parents = Sequence[int | None]
Mounts = Sequence[Sequence[int]]

NO_ROW = -1  # predictor of a token that nothing predicts: the first token of a root


def ancestors(parents: Parents, segment: int) -> list[int]:
    """List the chain of parents of a segment, root first, without the segment itself."""
    chain: list[int] = []
    node = parents[segment]
    while node is not None:
        chain.append(node)
        node = parents[node]
    chain.reverse()
    return chain


def ancestor_matrix(parents: Parents) -> npt.NDArray[np.bool_]:
    """Mark the ancestors of every segment.

    Returns:
        [segments, segments] bool; `[s, a]` is true where a is a proper ancestor of s.
    """
    num = len(parents)
    matrix = np.zeros((num, num), dtype=bool)
    for child, parent in enumerate(parents):
        if parent is not None:
            matrix[child] = matrix[parent]
            matrix[child, parent] = True
    return matrix


def mounted_matrix(parents: Parents, mounts: Mounts) -> npt.NDArray[np.bool_]:
    """Mark what every segment sees through mounts: mnt(s) = mounts of s and of its ancestors, not
    transitive.

    Returns:
        [segments, segments] bool; `[s, m]` is true where m is in `mounts` of s or of an ancestor
        of s.
    """
    num = len(parents)
    matrix = np.zeros((num, num), dtype=bool)
    for child, parent in enumerate(parents):
        if parent is not None:
            matrix[child] = matrix[parent]
        if mounts[child]:
            matrix[child, list(mounts[child])] = True
    return matrix


def visible_matrix(parents: Parents, mounts: Mounts) -> npt.NDArray[np.bool_]:
    """Mark the segments whose every token a segment's tokens see: anc(s) and mnt(s); its own part
    is causal.

    Returns:
        [segments, segments] bool with a false diagonal.
    """
    return ancestor_matrix(parents) | mounted_matrix(parents, mounts)


def starts(
    parents: Parents, mounts: Mounts, lengths: Sequence[int], *, position: str = "jump"
) -> list[int]:
    """Place every segment: `start = max(end(parent), max over m in mnt(s) of end(m))` (paper Eq.
    2).

    Args:
        position: "jump" is the rule above; under "unshifted" and "rerotate" a reader goes on at
            `end(parent)`, under "reencode" it goes on past the mounted tokens that were prefilled
            again at its own position.
    Returns:
        First position of each segment; `end(s) = start + length`, so a mounted span that ends at
        4,000 inclusive puts the reader's next token at 4,001.
    """
    placed: list[int] = []
    highest: list[int] = []  # max end over mnt(s), inherited along the tree
    for index, parent in enumerate(parents):
        own = 0 if parent is None else placed[parent] + lengths[parent]
        seen = 0 if parent is None else highest[parent]
        new = list(mounts[index])
        if position == "jump":
            seen = max([seen, *(placed[m] + lengths[m] for m in new)])
            own = max(own, seen)
        elif position == "reencode":
            own += sum(lengths[m] for m in new)
        placed.append(own)
        highest.append(seen)
    return placed


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Rows lo:hi of one run that see the same things (ownership: the rows of a group are
    consecutive).

    Every row sees all of `seen` (ancestors outside the group) and all of `mounted`, and lo..itself
    causally. Attention layers outside the mount set ignore `mounted`. Both are kept as spans
    [n, 2] of rows lo:hi, ascending and apart, so that a plan grows with them and not with rows.
    """

    lo: int
    hi: int
    seen_spans: Index
    mounted_spans: Index

    @property
    def seen(self) -> Index:
        """Rows of the ancestors, ascending."""
        return _rows(self.seen_spans)

    @property
    def mounted(self) -> Index:
        """Rows of the mounts that are no ancestors, ascending."""
        return _rows(self.mounted_spans)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What each row of a packed pass may attend to, in memory that grows with segments, not with
    rows squared.

    Attributes:
        num_rows: T.
        groups: the rows 0:T in order, cut where what is visible changes.
        segment_of_row: [T] int32, dense segment index of each row.
        visible: [segments, segments] bool, ancestors.
        mounted: [segments, segments] bool, mounts that are no ancestors.
        num_copies: the last segments that are keys and values alone, copies of other rows; what
            their queries give is nobody's.
    """

    num_rows: int
    groups: list[QueryGroup]
    segment_of_row: npt.NDArray[np.int32]
    visible: npt.NDArray[np.bool_]
    mounted: npt.NDArray[np.bool_]
    num_copies: int = 0

    def without_mounts(self) -> AttentionPlan:
        """Give the plan of the same rows over the tree alone."""
        none = np.empty((0, 2), dtype=np.int64)
        groups = [QueryGroup(group.lo, group.hi, group.seen_spans, none) for group in self.groups]
        empty = np.zeros_like(self.mounted)
        return AttentionPlan(
            self.num_rows, groups, self.segment_of_row, self.visible, empty, self.num_copies
        )

    def tree(self) -> AttentionPlan:
        """Give the plan of a layer outside the mount set: no mounts, and no rows of copies."""
        if not self.num_copies:
            return self.without_mounts()
        num = len(self.visible) - self.num_copies
        rows = int((self.segment_of_row < num).sum())
        none = np.empty((0, 2), dtype=np.int64)
        groups = [
            QueryGroup(group.lo, group.hi, group.seen_spans, none)
            for group in self.groups
            if group.lo < rows
        ]
        seen = self.visible[:num, :num]
        return AttentionPlan(rows, groups, self.segment_of_row[:rows], seen, np.zeros_like(seen))


@dataclass(frozen=True, slots=True)
class Level:
    """Runs at one depth of branching; their rows are consecutive and each starts from a run one
    level up.

    Attributes:
        lo, hi: rows of the level, or its steps where a layout has `steps`.
        lengths: tokens that each run steps through.
        parent_run: index of the parent's run within the level above, or -1 for a root.
    """

    lo: int
    hi: int
    lengths: list[int]
    parent_run: list[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Order of a DAG's tokens in one packed row, by level of branching, then run, then segment.

    A run is a chain of segments without a branch point inside. Rows of a run are consecutive, rows
    of a level too, so a recurrent layer makes one call a level and an attention layer sees long
    contiguous stretches.

    Attributes:
        order: segment indices in row order.
        first_row: [segments] first row of each segment.
        levels: recurrent schedule, roots first.
        plan: attention visibility; its rows are these and then those of copies.
        steps: [S] the row whose inputs each recurrent step takes, None where they are the rows in
            order; a row comes again wherever a reader steps through it.
        own: [T] the step that is each row's own.
    """

    order: list[int]
    first_row: list[int]
    levels: list[Level]
    plan: AttentionPlan
    num_rows: int
    run_of: list[int] = field(default_factory=list)
    steps: Index | None = None
    own: Index | None = None

    def predictor(self, parents: Parents, lengths: Sequence[int], segment: int) -> Index:
        """Give the rows whose hidden states predict a segment's tokens.

        The first token is predicted by the last token of the parent, so a shared last token
        predicts the first token of each child; a root's first token has `NO_ROW`.
        """
        first = self.first_row[segment]
        rows = np.arange(first - 1, first - 1 + lengths[segment], dtype=np.int64)
        parent = parents[segment]
        rows[0] = NO_ROW if parent is None else self.first_row[parent] + lengths[parent] - 1
        return rows


def runs(parents: Parents) -> tuple[list[list[int]], list[int], list[int]]:
    """Cut the tree at its branch points.

    Returns:
        runs: segment indices of each run, in creation order of their first segment.
        run_parent: run that each run continues, or -1.
        level: number of branch points above each run.
    """
    num_children = [0] * len(parents)
    for parent in parents:
        if parent is not None:
            num_children[parent] += 1
    chains: list[list[int]] = []
    run_parent: list[int] = []
    level: list[int] = []
    run_of: list[int] = []
    for index, parent in enumerate(parents):
        if parent is not None and num_children[parent] == 1:
            run_of.append(run_of[parent])
            chains[run_of[parent]].append(index)
            continue
        run_of.append(len(chains))
        chains.append([index])
        run_parent.append(-1 if parent is None else run_of[parent])
        level.append(0 if parent is None else level[run_of[parent]] + 1)
    return chains, run_parent, level


def layout(
    parents: Parents,
    mounts: Mounts,
    lengths: Sequence[int],
    *,
    num_copies: int = 0,
    spliced: Mounts | None = None,
) -> Layout:
    """Lay a DAG (or several disjoint ones) out in one row and plan its attention and recurrence.

    Args:
        lengths: tokens of each segment, at least 1.
        num_copies: the last entries are no segments but copies of keys that mounts name; they have
            no parent, and their rows come after all others in the attention plan alone.
        spliced: for each segment, those whose inputs recurrent layers step through just before it,
            in this order, from its parent's state.
    """
    num = len(parents) - num_copies
    chains, run_parent, level_of = runs(parents[:num])
    first_row = [0] * len(parents)
    run_of = [0] * len(parents)
    order: list[int] = []
    cuts: list[tuple[int, int, list[int]]] = []  # first and last row of a level, its runs
    row = 0
    for depth in range(max(level_of, default=-1) + 1):
        members = [run for run, at in enumerate(level_of) if at == depth]
        lo = row
        for run in members:
            for segment in chains[run]:
                first_row[segment] = row
                run_of[segment] = run
                order.append(segment)
                row += lengths[segment]
        cuts.append((lo, row, members))
    foreign = spliced if spliced is not None and any(map(len, spliced)) else None
    steps, own = (None, None) if foreign is None else _steps(order, first_row, lengths, foreign)
    levels: list[Level] = []
    slot: dict[int, int] = {}  # run -> its index within its level
    done = 0
    for lo, hi, members in cuts:
        slot |= {run: index for index, run in enumerate(members)}
        run_lengths = [sum(lengths[segment] for segment in chains[run]) for run in members]
        if foreign is not None:
            for at, run in enumerate(members):
                passed = [read for segment in chains[run] for read in foreign[segment]]
                run_lengths[at] += sum(lengths[read] for read in passed)
            lo, hi = done, done + sum(run_lengths)
            done = hi
        parent_run = [-1 if run_parent[run] < 0 else slot[run_parent[run]] for run in members]
        levels.append(Level(lo, hi, run_lengths, parent_run))
    end = row
    for copy in range(num, len(parents)):
        first_row[copy], run_of[copy] = end, len(chains) + copy - num
        end += lengths[copy]
    laid = [*order, *range(num, len(parents))]
    plan = _plan(parents, mounts, laid, first_row, run_of, end, num_copies)
    return Layout(order, first_row[:num], levels, plan, row, run_of[:num], steps, own)


def _steps(
    order: Sequence[int], first_row: Sequence[int], lengths: Sequence[int], spliced: Mounts
) -> tuple[Index, Index]:
    """List the row of each recurrent step, and the step that is each row's own."""
    steps: list[Index] = []
    own: list[Index] = []
    done = 0
    for segment in order:
        for read in spliced[segment]:
            steps.append(np.arange(first_row[read], first_row[read] + lengths[read]))
            done += lengths[read]
        own.append(np.arange(done, done + lengths[segment]))
        steps.append(np.arange(first_row[segment], first_row[segment] + lengths[segment]))
        done += lengths[segment]
    return np.concatenate(steps), np.concatenate(own)


def _plan(
    parents: Parents,
    mounts: Mounts,
    order: list[int],
    first_row: list[int],
    run_of: list[int],
    num_rows: int,
    num_copies: int,
) -> AttentionPlan:
    tree = ancestor_matrix(parents)
    mounted = mounted_matrix(parents, mounts) & ~tree
    segments = np.asarray(order, dtype=np.int64)
    bounds = np.asarray([*(first_row[segment] for segment in order), num_rows], dtype=np.int64)
    heads = [
        at
        for at, segment in enumerate(order)
        if at == 0 or mounts[segment] or run_of[segment] != run_of[order[at - 1]]
    ]
    seen, read = (
        _spans(matrix[segments[heads]][:, segments], bounds) for matrix in (tree, mounted)
    )
    edges = [*bounds[heads].tolist(), num_rows]
    groups = list(map(QueryGroup, edges[:-1], edges[1:], seen, read))
    segment_of_row = np.repeat(segments.astype(np.int32), np.diff(bounds))
    return AttentionPlan(num_rows, groups, segment_of_row, tree, mounted, num_copies)


def _spans(sees: npt.NDArray[np.bool_], bounds: Index) -> list[Index]:
    """Give the rows that each line of a matrix [G, N] marks, segments in row order, as spans."""
    edges = np.diff(sees.astype(np.int8), axis=1, prepend=0, append=0)
    line, first = np.nonzero(edges == 1)
    last = np.nonzero(edges == -1)[1]
    spans = np.stack([bounds[first], bounds[last]], axis=1)
    return np.split(spans, np.cumsum(np.bincount(line, minlength=len(sees)))[:-1])


def _rows(spans: Index) -> Index:
    """Concatenate the rows of some spans."""
    if not len(spans):
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(lo, hi, dtype=np.int64) for lo, hi in spans])


def owner_mask(kinds: Sequence[str], lengths: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """Mark the tokens that their thread sampled: all of an action segment, once, and nothing else
    (paper Eq. 6).
    """
    return [
        np.full(length, kind == "action", dtype=bool)
        for kind, length in zip(kinds, lengths, strict=True)
    ]
