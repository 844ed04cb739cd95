"""From trees with an advantage to rows of loss: which packed token carries what.

A tree is a trace and its advantage. Only action tokens carry loss, each once; rewound ones keep it
(DESIGN §2). A row holds whole trees, or whole parts of one that is larger than a row, and the
rollouts of one prompt share its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from octopus_trl.maths import dag
from octopus_trl.maths.dag import NO_ROW
from octopus_trl.models.packed import MountMode, PackedRow, pack, packed_tokens
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.train.parts import parts, take

UNMOUNTED, MOUNTED, REWOUND = 0, 1, 2  # each owned token is one of these
WHERE = ("unmounted", "mounted", "rewound")

TOKEN_COUNTS = ("owner", "per_leaf")

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Tree:
    """One episode as the loss sees it.

    Attributes:
        advantage: given to every owned token.
        credit: what is added to it for the tokens of a thread, by thread.
        old_logps: [Z] of the policy that the ratio divides by; None is the current one.
        ref_logps: [Z] of the reference, where `beta` is not 0.
        segments: ids of the part of it that this row holds, ascending; None is all of it.
    """

    trace: Trace
    advantage: float
    old_logps: Floats | None = None
    ref_logps: Floats | None = None
    credit: Mapping[int, float] = field(default_factory=dict)
    segments: Sequence[int] | None = None

    @property
    def teaches(self) -> bool:
        """Whether any token of it has an advantage."""
        return self.advantage != 0.0 or any(self.credit.values())


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How often each sampled token counts in the loss.

    Attributes:
        count: "owner" counts it once, which is the gradient of the episode's log-likelihood;
            "per_leaf" once for each leaf below it, as separate root-to-leaf rows would: a trunk
            above three leaves counts three times (the biased baseline of the paper).
        rewound_loss: whether tokens on a branch that was left by a rewind count at all.
    """

    count: str = "owner"
    rewound_loss: bool = True


OWNER = TokenRule()


@dataclass(slots=True)
class LossRow:
    """A packed row and its M owned tokens, tree by tree in segment order.

    Attributes:
        traces: the N trees' traces, whole.
        places: for each tree, [m] which of its owned tokens are in this row.
        rows, targets: [M] rows that predict and the token ids that they predict.
        tree_of_token: [M] index into the N trees of this row.
        advantages: [N].
        credits: [M] what branch credit adds to the advantage.
        counts: [M] how often the token counts in the loss.
        normalisers: [N] Z of each tree: the sum of its counts, of those in other rows too.
        num_owned: [N] owned tokens in this row, counted or not.
        sampling_logps: [M] as drawn, NaN where the trace has none.
        old_logps, ref_logps: [M], or None.
        where: [M] int8, UNMOUNTED, MOUNTED or REWOUND.
        after_rewind: [M] bool, drawn by a thread that had gone back before.
    """

    traces: list[Trace]
    places: list[npt.NDArray[np.int64]]
    packed: PackedRow
    rows: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    tree_of_token: npt.NDArray[np.int64]
    advantages: Floats
    num_owned: npt.NDArray[np.int64]
    sampling_logps: Floats
    old_logps: Floats | None
    ref_logps: Floats | None
    where: npt.NDArray[np.int8]
    after_rewind: npt.NDArray[np.bool_]
    credits: Floats
    counts: Floats
    normalisers: Floats

    @property
    def num_trees(self) -> int:
        """N: trees in this row, or parts of one."""
        return len(self.num_owned)


def build_row(trees: Sequence[Tree], *, mounts: MountMode, tokens: TokenRule = OWNER) -> LossRow:
    """Pack trees into one row and gather what each owned token carries."""
    packed = pack([_held(tree) for tree in trees], mounts=mounts)
    owned = [_owned_tokens(packed, index, tree, tokens) for index, tree in enumerate(trees)]
    rows, targets, sampled, where, after, added, counts, places = (
        np.concatenate([columns[at] for columns, _ in owned]) for at in range(8)
    )
    num_owned = np.array([len(columns[0]) for columns, _ in owned], dtype=np.int64)
    place_of = np.split(places.astype(np.int64), np.cumsum(num_owned)[:-1])
    return LossRow(
        [tree.trace for tree in trees],
        place_of,
        packed,
        rows.astype(np.int64),
        targets.astype(np.int64),
        np.repeat(np.arange(len(trees)), num_owned),
        np.array([tree.advantage for tree in trees], dtype=np.float64),
        num_owned,
        sampled,
        _joined([tree.old_logps for tree in trees], place_of),
        _joined([tree.ref_logps for tree in trees], place_of),
        where.astype(np.int8),
        after.astype(bool),
        added.astype(np.float64),
        counts.astype(np.float64),
        np.array([normaliser for _, normaliser in owned], dtype=np.float64),
    )


def empty_row() -> LossRow:
    """Give a row of two tokens that weighs nothing.

    A rank that ran out of rows runs it, so that every rank makes the same number of forward and
    backward passes; its gradient is exactly 0 for every parameter that a pass touches.
    """
    trace = Trace(
        "empty",
        "empty",
        threads=[ThreadRecord(0, None)],
        segments=[Segment(0, 0, None, "prompt", [0]), Segment(1, 0, 0, "action", [0], start=1)],
    )
    row = build_row([Tree(trace, 0.0)], mounts="live")
    row.num_owned = np.zeros(1, dtype=np.int64)
    row.counts[:] = row.normalisers[:] = 0.0
    return row


def plan_rows(
    trees: Sequence[Tree], *, max_row_tokens: int, max_path_tokens: int | None
) -> tuple[list[list[Tree]], list[str]]:
    """Split trees into rows, in order, and say which fit in none.

    A tree larger than a row is taken apart where no edge joins its roots, or left out by name; it
    is never cut.

    Args:
        max_row_tokens: unique tokens of a row; the tokens of a shared prompt count once.
        max_path_tokens: tokens of the longest chain from a root, mounts apart.
    Returns:
        The trees of each row, and one message for each tree that was left out.
    """
    rows: list[list[Tree]] = []
    left_out: list[str] = []
    shared: dict[tuple[int, int, tuple[int, ...]], int] = {}
    used = 0
    for tree in trees:
        trace = tree.trace
        if not any(segment.kind == "action" for segment in trace.segments):
            continue
        path = longest_path(trace)
        if max_path_tokens is not None and path > max_path_tokens:
            left_out.append(
                f"episode {trace.episode_id}: a path of {path} tokens, max_path_tokens is "
                f"{max_path_tokens}"
            )
            continue
        pieces = [tree] if packed_tokens(trace) <= max_row_tokens else _apart(tree)
        largest = max(packed_tokens(piece.trace, piece.segments) for piece in pieces)
        if largest > max_row_tokens:
            joined = f" in its largest of {len(pieces)} parts" if len(pieces) > 1 else ""
            left_out.append(
                f"episode {trace.episode_id}: {largest} unique tokens{joined}, max_row_tokens is "
                f"{max_row_tokens}"
            )
            continue
        for piece in pieces:
            size = packed_tokens(piece.trace, piece.segments)
            new = size - _shared_tokens(piece, shared)
            if not rows or used + new > max_row_tokens:
                rows.append([])
                shared, used = {}, 0
                _shared_tokens(piece, shared)
                new = size
            rows[-1].append(piece)
            used += new
    return rows, left_out


def _apart(tree: Tree) -> list[Tree]:
    """Take a tree apart where no edge joins its roots; parts that sampled nothing are dropped."""
    segments = tree.trace.segments
    return [
        replace(tree, segments=part)
        for part in parts(tree.trace)
        if any(segments[segment].kind == "action" for segment in part)
    ]


def _held(tree: Tree) -> Trace:
    """Give the trace of what this row holds of a tree."""
    return tree.trace if tree.segments is None else take(tree.trace, tree.segments)


def num_scored(trace: Trace) -> int:
    """Count the sampled tokens that something predicts: all but a root's first."""
    return sum(
        len(segment.tokens) - (segment.parent is None)
        for segment in trace.segments
        if segment.kind == "action"
    )


def sampled_logps(trace: Trace) -> Floats:
    """[Z] log-probs of the sampled tokens that something predicts, as drawn; NaN without record."""
    parts = [np.empty(0)]
    for segment in trace.segments:
        if segment.kind == "action":
            given = segment.logps
            known = [np.nan] * len(segment.tokens) if given is None else given
            parts.append(np.asarray(known, dtype=np.float64)[segment.parent is None :])
    return np.concatenate(parts)


def longest_path(trace: Trace) -> int:
    """Count the tokens of the longest chain from a root, mounts apart."""
    lengths: list[int] = []
    for segment in trace.segments:
        above = 0 if segment.parent is None else lengths[segment.parent]
        lengths.append(above + len(segment.tokens))
    return max(lengths, default=0)


def logical_tokens(trace: Trace) -> int:
    """Count the tokens that separate rows would hold: leaf chains, each with what it mounted.

    Divided by the unique tokens this is the dedup ratio r of DESIGN §8.
    """
    parents, lengths = trace.parents, np.asarray(trace.lengths)
    tree = dag.ancestor_matrix(parents)
    mounted = dag.mounted_matrix(parents, trace.mounts) & ~tree
    leaves = np.flatnonzero(~tree.any(axis=0))
    seen = (tree | mounted)[leaves].astype(np.int64) @ lengths + lengths[leaves]
    return int(seen.sum())


def rewound_segments(trace: Trace) -> set[int]:
    """List the segments that their own thread has left by a rewind, not for a new root."""
    root_of: list[int] = []
    tips: dict[tuple[int, int], int] = {}  # thread and root -> the end of its chain there
    for segment in trace.segments:
        root_of.append(segment.id if segment.parent is None else root_of[segment.parent])
        tips[segment.thread, root_of[-1]] = segment.id
    heads = {each.id: each.head for each in trace.threads if each.head is not None}
    tips |= {(thread, root_of[head]): head for thread, head in heads.items()}
    live: dict[int, set[int]] = {}
    for (thread, _), tip in tips.items():
        live.setdefault(thread, set()).update([*dag.ancestors(trace.parents, tip), tip])
    return {
        segment.id
        for segment in trace.segments
        if segment.thread in heads and segment.id not in live[segment.thread]
    }


def num_rewinds(trace: Trace) -> int:
    """Count the places where a thread went back and wrote on: later children of one parent."""
    children: dict[tuple[int | None, int], int] = {}
    for segment in trace.segments:
        if segment.parent is not None:
            place = (segment.parent, segment.thread)
            children[place] = children.get(place, 0) + 1
    return sum(count - 1 for count in children.values())


def leaves_below(trace: Trace) -> npt.NDArray[np.int64]:
    """[N] leaf chains through each segment; a leaf counts itself."""
    counts = np.zeros(len(trace.segments), dtype=np.int64)
    for segment in reversed(trace.segments):
        counts[segment.id] = max(counts[segment.id], 1)
        if segment.parent is not None:
            counts[segment.parent] += counts[segment.id]
    return counts


def _owned_tokens(
    packed: PackedRow, index: int, tree: Tree, rule: TokenRule
) -> tuple[list[npt.NDArray[np.generic]], float]:
    """Gather what each owned token of one tree carries, in the order of LossRow's fields.

    Returns:
        One array a field, the last one the token's number among the whole tree's; and Z.
    """
    trace = tree.trace
    node_of = {old: new for new, old in enumerate(tree.segments or range(len(trace.segments)))}
    rewound = rewound_segments(trace)
    after = _after_rewind(trace)
    reads = np.asarray(dag.mounted_matrix(trace.parents, trace.mounts).any(axis=1))
    leaves = leaves_below(trace) if rule.count == "per_leaf" else None
    kinds = (np.int64, np.int64, np.float64, np.int8, np.bool_, np.float64, np.float64, np.int64)
    columns: list[list[npt.NDArray[np.generic]]] = [[] for _ in kinds]
    normaliser, seen = 0.0, 0
    for segment in trace.segments:
        if segment.kind != "action":
            continue
        left = segment.id in rewound
        count = 1 if leaves is None else leaves[segment.id]
        if left and not rule.rewound_loss:
            count = 0
        num = len(segment.tokens) - (segment.parent is None)
        normaliser += float(count * num)
        seen += num
        if segment.id not in node_of:
            continue
        rows = packed.predictors(index, node_of[segment.id])
        known = rows != NO_ROW
        logps = segment.logps if segment.logps is not None else [np.nan] * len(segment.tokens)
        where = MOUNTED if reads[segment.id] else UNMOUNTED
        own = (rows, np.asarray(segment.tokens), np.asarray(logps))
        shared = (
            REWOUND if left else where,
            segment.id in after,
            tree.credit.get(segment.thread, 0.0),
            count,
        )
        values = [
            *(column[known] for column in own),
            *(np.full(num, value) for value in shared),
            np.arange(seen - num, seen),
        ]
        for column, part, kind in zip(columns, values, kinds, strict=True):
            column.append(part.astype(kind))
    return [
        np.concatenate(found) if found else np.empty(0, dtype=kind)
        for found, kind in zip(columns, kinds, strict=True)
    ], normaliser


def _after_rewind(trace: Trace) -> set[int]:
    """List the segments that a thread wrote after one of its own rewinds, on that chain."""
    first_child: dict[tuple[int | None, int], int] = {}
    after: set[int] = set()
    for segment in trace.segments:
        place = (segment.parent, segment.thread)
        first = first_child.setdefault(place, segment.id)
        again = segment.parent is not None and first != segment.id
        if again or segment.parent in after:
            after.add(segment.id)
    return after


def _shared_tokens(tree: Tree, shared: dict[tuple[int, int, tuple[int, ...]], int]) -> int:
    """Count the prompt tokens that a row holds already, and note those that it will hold."""
    node_of: dict[int, int] = {}
    found = 0
    segments = tree.trace.segments
    held = segments if tree.segments is None else [segments[s] for s in tree.segments]
    for segment in held:
        parent = -1 if segment.parent is None else node_of.get(segment.parent, -2)
        if segment.kind != "prompt" or segment.mounts or parent == -2:
            continue
        key = (parent, segment.start, tuple(segment.tokens))
        if key in shared:
            found += len(segment.tokens)
        node_of[segment.id] = shared.setdefault(key, len(shared))
    return found


def _joined(
    wholes: Sequence[Floats | None], places: Sequence[npt.NDArray[np.int64]]
) -> Floats | None:
    """Pick the tokens of a row from arrays over whole trees; None where one tree has none."""
    picked = [whole[at] for whole, at in zip(wholes, places, strict=True) if whole is not None]
    return np.concatenate(picked) if picked and len(picked) == len(wholes) else None
