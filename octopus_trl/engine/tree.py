"""Who holds what: nodes, their pages and state slots, by ancestry and by mount (host only).

A node's chain lives while a cursor, a running turn, a prompt entry or a child needs it. A node that
only a mount reads keeps its pages and nothing else. Everything is counted, so the last holder that
goes away releases it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from octopus_trl.engine.cursor import Mount, Node
from octopus_trl.engine.pages import PagePool
from octopus_trl.engine.parking import Mover
from octopus_trl.engine.states import StatePool
from octopus_trl.errors import IntegrityError


class Tree:
    """Reference counts of nodes over the two pools.

    Args:
        num_slots: state slots; 0 for a model without recurrent layers.
        num_places: parked states at most, copied by `mover`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        *,
        num_places: int = 0,
        mover: Mover | None = None,
    ) -> None:
        self.pages = PagePool(num_pages, page_size)
        self.states = StatePool(num_slots, _rank, num_places=num_places, mover=mover)

    def new(
        self, parent: Node | None, mounts: tuple[Mount, ...], position: int, epoch: int
    ) -> Node:
        """Begin a node after a boundary; it is held once, for whoever grows it."""
        offset = 0 if parent is None else parent.num_tokens
        node = Node(parent, [], [], position, offset, epoch, mounts, refs=1, growing=True)
        node.mounting = node if mounts else None if parent is None else parent.mounting
        if parent is not None:
            self.hold(parent)
        for mount in mounts:
            self.hold_mount(mount)
        return node

    def freeze(self, node: Node) -> None:
        """End a node's growth."""
        node.growing = False
        node.cached_slots = self.pages.slots(node.ranges)

    def hold(self, node: Node) -> None:
        """Count one more that needs the node's chain."""
        node.refs += 1

    def drop(self, node: Node | None) -> None:
        """Count one less; the last releases what nobody else needs, up the chain."""
        while node is not None:
            node.refs -= 1
            if node.refs:
                return
            self.states.release(node)
            node.hidden, node.growing, node.mounting = None, False, None
            mounts, node.mounts = node.mounts, ()
            for mount in mounts:
                self.drop_mount(mount)
            self._release_pages(node)
            node = node.parent

    def hold_mount(self, mount: Mount) -> None:
        """Count one more reader of a mount; the first makes it keep its pages, and its chain where
        it was spliced. A copy comes with the hold of whoever grew it.
        """
        if not mount.refs:
            for node in mount.nodes():
                node.mount_refs += 1
            if mount.spliced:
                self.hold(mount.tail)
        mount.refs += 1

    def drop_mount(self, mount: Mount) -> None:
        """Count one reader less; the last lets its pages go."""
        mount.refs -= 1
        if not mount.refs:
            for node in mount.nodes():
                node.mount_refs -= 1
                self._release_pages(node)
            if mount.holds_chain:
                self.drop(mount.tail)

    def stand(self, node: Node) -> None:
        """Put a cursor's end on a boundary."""
        self.hold(node)
        node.tails += 1

    def leave(self, node: Node) -> None:
        """Take a cursor's end off a boundary."""
        node.tails -= 1
        self.let_state_go(node)
        self.drop(node)

    def pin(self, node: Node) -> None:
        """Want a boundary's state kept."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Want it no more."""
        node.pins -= 1
        self.let_state_go(node)

    def split(self, node: Node, count: int) -> Node:
        """Cut a node after its first `count` tokens and return the new node that ends there."""
        head_ranges, tail_ranges = self.pages.split(node.ranges, count)
        head = Node(
            node.parent,
            node.tokens[:count],
            head_ranges,
            node.start,
            node.offset,
            node.epoch,
            node.mounts,
            refs=1,
            mount_refs=node.mount_refs,
            cached_slots=self.pages.slots(head_ranges),
        )
        head.mounting = node.mounting
        if node.mounts:
            # Nodes below still name `node`, whose way up leads to the head.
            head.mounting = node.mounting = head
        node.parent, node.mounts = head, ()
        node.tokens, node.ranges = node.tokens[count:], tail_ranges
        node.start, node.offset = node.start + count, node.offset + count
        node.cached_slots = self.pages.slots(tail_ranges)
        return head

    def locate(self, tail: Node, num_tokens: int) -> Node:
        """Give the boundary after the first `num_tokens` tokens of a chain, cutting a node there if
        there is none.
        """
        node = tail
        while node.offset >= num_tokens:
            if node.parent is None:
                raise IntegrityError(f"a chain has no token {num_tokens}")
            node = node.parent
        if node.num_tokens == num_tokens:
            return node
        return self.split(node, num_tokens - node.offset)

    def only_held_by(self, entries: Iterable[Node]) -> int:
        """Count the pages that dropping these nodes (one reference each) would free."""
        lost: dict[int, int] = {}
        freed: dict[int, list[Node]] = {}
        queue = list(entries)
        while queue:
            node = queue.pop()
            lost[id(node)] = lost.get(id(node), 0) + 1
            if lost[id(node)] == node.refs:
                freed[id(node)] = [node]
                if node.parent is not None:
                    queue.append(node.parent)
        held: dict[int, int] = {}
        for (node,) in freed.values():
            if not node.mount_refs:
                for span in node.ranges:
                    held[span.page] = held.get(span.page, 0) + 1
        return sum(count == int(self.pages.refs[page]) for page, count in held.items())

    def check(
        self,
        *,
        tails: Sequence[Node],
        snapshots: Sequence[Node],
        entries: Sequence[Node],
        growing: Sequence[Node],
        pending: Sequence[Mount],
    ) -> None:
        """Recount every node that is reachable.

        Args:
            tails: ends of cursors, one item a cursor.
            snapshots: boundaries that cursors want kept, one item a wish.
            entries: nodes of cached prompts.
            growing: nodes of running turns.
            pending: mounts that cursors hold, one item a holder.
        Raises:
            IntegrityError: a count differs from what reaches the node.
        """
        alive: dict[int, Node] = {}
        mounts: dict[int, tuple[Mount, int]] = {}
        refs: dict[int, int] = {}
        queue = [*tails, *growing, *entries]
        tail_count, pin_count = Counter(map(id, tails)), Counter(map(id, [*snapshots, *entries]))
        spans = list(pending)
        while queue or spans:
            if spans:
                mount = spans.pop()
                if mount.holds_chain and id(mount) not in mounts:
                    queue.append(mount.tail)
                mounts[id(mount)] = (mount, mounts.get(id(mount), (mount, 0))[1] + 1)
                continue
            node = queue.pop()
            refs[id(node)] = refs.get(id(node), 0) + 1
            if id(node) in alive:
                continue
            alive[id(node)] = node
            spans.extend(node.mounts)
            if node.parent is not None:
                queue.append(node.parent)
        read: dict[int, tuple[Node, int]] = {}
        for mount, count in mounts.values():
            _same("readers of a mount", mount.refs, count)
            for node in mount.nodes():
                read[id(node)] = (node, read.get(id(node), (node, 0))[1] + 1)
        for key, node in alive.items():
            _same("holders of a node", node.refs, refs[key])
            _same("mounts of a node", node.mount_refs, read.get(key, (node, 0))[1])
            _same("cursors on a node", node.tails, tail_count[key])
            _same("pins of a node", node.pins, pin_count[key])
            before = 0 if node.parent is None else node.parent.num_tokens
            _same("offset of a node", node.offset, before)
            if node.parent is not None and node.start < node.parent.end:
                raise IntegrityError(f"node at {node.start} starts before {node.parent.end}")
        holders = [*alive.values(), *(node for key, (node, _) in read.items() if key not in alive)]
        for node in holders:
            _same("tokens in pages", sum(hi - lo for _, lo, hi in node.ranges), len(node.tokens))
        self.pages.check([node.ranges for node in holders])
        self.states.check(list(alive.values()))

    def _release_pages(self, node: Node) -> None:
        if not node.refs and not node.mount_refs:
            self.pages.release(node.ranges)
            node.ranges, node.cached_slots = [], None

    def let_state_go(self, node: Node) -> None:
        """Release a boundary's state if nobody wants it."""
        if not (node.tails or node.pins or node.readers or node.growing):
            self.states.release(node)


def _rank(node: Node) -> int | None:
    """Order in which boundaries lose their state: snapshots and prompts, then idle threads."""
    if node.growing or node.readers:
        return None
    return 1 if node.tails else 0


def _same(what: str, counted: int, found: int) -> None:
    if counted != found:
        raise IntegrityError(f"{what}: {counted} counted, {found} found")
