"""Fork, mount, rewind and close: pointer moves over the tree (host only, no tensor)."""

from __future__ import annotations

from collections.abc import Sequence

from octopus_trl.engine.cursor import Cursor, Mount, Node, common, position_after, unread
from octopus_trl.engine.tree import Tree


class Primitives:
    """Moves cursors over a tree and keeps the counts right.

    Attributes:
        cursors: those not closed, in the order they were made.
        max_snapshots: boundaries a cursor keeps the state of: its fork point and the last others.
    """

    def __init__(self, tree: Tree, max_snapshots: int) -> None:
        self.tree, self.max_snapshots = tree, max_snapshots
        self.cursors: dict[int, Cursor] = {}

    def make(
        self, engine: object, tail: Node, origin: Node | None, root: object | None = None
    ) -> Cursor:
        """Make a cursor on a boundary.

        Args:
            origin: where it was forked, None if it was opened.
            root: the opened prompt that it grows from, None for one of its own.
        """
        cursor = Cursor(engine, tail, origin, root or object(), tail.end)
        self.tree.stand(tail)
        self._snapshot(cursor, tail)
        self.cursors[id(cursor)] = cursor
        return cursor

    def fork(self, cursor: Cursor) -> Cursor:
        """Make a cursor at the same place, mounts not yet stepped past included."""
        child = self.make(cursor._engine, cursor._tail, cursor._tail, cursor._root)
        for mount in cursor._pending:
            self.tree.hold_mount(mount)
        child._pending, child._position = cursor._pending, cursor._position
        return child

    def span(
        self, cursor: Cursor, source: Cursor, since: Cursor | None, *, shifts: bool = True
    ) -> Mount:
        """Name what `source` holds after `since`, as `cursor` would read it."""
        if since is None:
            base = common(source._tail, source._origin)
        else:
            base = common(source._tail, since._tail) if since._root is source._root else None
        root = None if source._root is cursor._root else source._root
        return Mount(source._tail, base, root, shifts)

    def mount(
        self,
        cursor: Cursor,
        source: Cursor,
        since: Cursor | None,
        *,
        shifts: bool = True,
        spliced: bool = False,
    ) -> int:
        """Make a span readable at the cursor's next token; returns how many tokens are new.

        Args:
            shifts: whether the next token's position goes past the span.
            spliced: whether recurrent layers step through it before that token.
        """
        span = self.span(cursor, source, since, shifts=shifts)
        span.spliced = spliced
        new = sum(len(node.tokens) for node in unread(cursor._tail, cursor._pending, span))
        if new:
            self.tree.hold_mount(span)
            cursor._pending = (*cursor._pending, span)
            cursor._position = position_after(cursor._tail, cursor._pending)
        return new

    def advance(self, cursor: Cursor, node: Node) -> None:
        """Move a cursor to the node that grew from its end; it takes over the growth's hold."""
        self._move(cursor, node)
        self.tree.drop(node)
        self._snapshot(cursor, node)

    def rewind(self, cursor: Cursor, node: Node) -> None:
        """Move a cursor back to a boundary of its chain; what it mounted later is dropped."""
        kept = [snapshot for snapshot in cursor._snapshots if snapshot.num_tokens < node.num_tokens]
        left = cursor._snapshots[len(kept) :]
        self._move(cursor, node)
        cursor._snapshots = kept
        self._snapshot(cursor, node)
        for snapshot in left:
            self.tree.unpin(snapshot)

    def close(self, cursor: Cursor) -> None:
        """Let go of all that a cursor holds."""
        del self.cursors[id(cursor)]
        cursor._closed = True
        for snapshot in cursor._snapshots:
            self.tree.unpin(snapshot)
        cursor._snapshots = []
        self._drop_pending(cursor)
        self.tree.leave(cursor._tail)

    def check(self, *, entries: Sequence[Node], growing: Sequence[Node]) -> None:
        """Recount the tree from the cursors, the cached prompts and the running turns.

        Raises:
            IntegrityError: a count differs.
        """
        cursors = list(self.cursors.values())
        self.tree.check(
            tails=[cursor._tail for cursor in cursors],
            snapshots=[node for cursor in cursors for node in cursor._snapshots],
            entries=entries,
            growing=growing,
            pending=[mount for cursor in cursors for mount in cursor._pending],
        )

    def _move(self, cursor: Cursor, node: Node) -> None:
        left = cursor._tail
        self.tree.stand(node)
        cursor._tail, cursor._position = node, node.end
        self._drop_pending(cursor)
        self.tree.leave(left)

    def _drop_pending(self, cursor: Cursor) -> None:
        pending, cursor._pending = cursor._pending, ()
        for mount in pending:
            if mount.repeats:  # its end's state was kept for what might be read behind it
                self.tree.let_state_go(mount.tail)
            self.tree.drop_mount(mount)

    def _snapshot(self, cursor: Cursor, node: Node) -> None:
        self.tree.pin(node)
        cursor._snapshots.append(node)
        while len(cursor._snapshots) > self.max_snapshots:
            self.tree.unpin(cursor._snapshots.pop(min(1, len(cursor._snapshots) - 1)))
