"""Cursors, mounts and who holds pages, against lists of numbered tokens; no tensor anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from octopus_trl.engine.cursor import Cursor, Node, chain, common, read_edges, slots_of, visible
from octopus_trl.engine.primitives import Primitives
from octopus_trl.engine.tree import Tree

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["open", "extend", "extend", "fork", "mount", "mount", "rewind", "close"]),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=50,
)


@dataclass
class Model:
    """What one cursor must be.

    Attributes:
        own: numbers of the chain's tokens.
        mounted: for each token of the chain, the numbers that it sees by mount; a last item for the
            next token.
        places: position of each token, and of the next one.
        fork_point: tokens of the chain when it was forked.
    """

    own: list[int] = field(default_factory=list)
    mounted: list[frozenset[int]] = field(default_factory=lambda: [frozenset()])
    places: list[int] = field(default_factory=lambda: [0])
    fork_point: list[int] = field(default_factory=list)

    def copy(self) -> Model:
        return Model(list(self.own), list(self.mounted), list(self.places), list(self.own))


class World:
    """Primitives over a tree, with the model's answer beside each cursor."""

    def __init__(self, page_size: int, max_snapshots: int) -> None:
        self.tree = Tree(400, page_size, 0)
        self.primitives = Primitives(self.tree, max_snapshots)
        self.pairs: list[tuple[Cursor, Model]] = []
        self.written: dict[int, int] = {}
        self.place_of: dict[int, int] = {}
        self.clock = 0

    def grow(self, tail: Node | None, mounts: tuple, position: int, count: int) -> Node:
        node = self.tree.new(tail, mounts, position, 0)
        last = tail.ranges[-1] if tail is not None else None
        numbers = list(range(self.clock, self.clock + count))
        self.clock += count
        self.written.update(
            zip(self.tree.pages.grow(node.ranges, last, count).tolist(), numbers, strict=True)
        )
        node.tokens = numbers
        self.tree.freeze(node)
        return node

    def append(self, model: Model, node: Node) -> None:
        see = model.mounted[-1]
        for number in node.tokens:
            model.own.append(number)
            model.mounted.append(see)
            self.place_of[number] = model.places[-1]
            model.places.append(model.places[-1] + 1)

    def open(self, count: int) -> None:
        model = Model()
        node = self.grow(None, (), 0, count)
        self.append(model, node)
        cursor = self.primitives.make(self, node, None)
        self.tree.drop(node)
        self.pairs.append((cursor, model))

    def move(self, name: str, one: int, two: int, three: int) -> None:
        if name == "open" or not self.pairs:
            self.open(one + 1)
            return
        cursor, model = self.pairs[one % len(self.pairs)]
        if name == "extend":
            node = self.grow(cursor._tail, cursor._pending, cursor._position, two + 1)
            self.primitives.advance(cursor, node)
            self.append(model, node)
        elif name == "fork":
            self.pairs.append((self.primitives.fork(cursor), model.copy()))
        elif name == "mount":
            source, other = self.pairs[two % len(self.pairs)]
            since = None if three > 4 else self.pairs[three % len(self.pairs)]
            before = other.fork_point if since is None else since[1].own
            shared = _shared(other.own, before)
            new = set(other.own[shared:]) - set(model.own) - model.mounted[-1]
            found = self.primitives.mount(cursor, source, since[0] if since else None)
            assert found == len(new)
            model.mounted[-1] |= new
            model.places[-1] = max(
                [model.places[-1], *(self.place_of[number] + 1 for number in new)]
            )
        elif name == "rewind":
            count = two * len(model.own) // 10 + 1
            node = self.tree.locate(cursor._tail, count)
            self.primitives.rewind(cursor, node)
            # Mounts made after the kept tokens are gone: the next token sees what the last saw.
            model.mounted = [*model.mounted[:count], model.mounted[count - 1]]
            model.places = [*model.places[:count], model.places[count - 1] + 1]
            del model.own[count:]
        else:
            self.primitives.close(cursor)
            del self.pairs[one % len(self.pairs)]

    def check(self) -> None:
        cursors = [cursor for cursor, _ in self.pairs]
        self.tree.check(
            tails=[cursor._tail for cursor in cursors],
            snapshots=[node for cursor in cursors for node in cursor._snapshots],
            entries=[],
            growing=[],
            pending=[mount for cursor in cursors for mount in cursor._pending],
        )
        for cursor, model in self.pairs:
            own, mounted = visible(cursor._tail, cursor._pending)
            edges = [mount for node in reversed(own) for mount in node.mounts]
            assert list(read_edges(cursor._tail)) == edges
            assert [self.written[slot] for slot in slots_of(own).tolist()] == model.own
            seen = [self.written[slot] for slot in slots_of(mounted).tolist()]
            assert len(seen) == len(set(seen))
            assert set(seen) == model.mounted[-1]
            assert cursor.position == model.places[-1]
            assert cursor.num_tokens == len(model.own)
            places = [place for node in own for place in range(node.start, node.end)]
            assert places == model.places[:-1]


def _shared(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@settings(max_examples=200, deadline=None)
@given(page_size=st.integers(1, 5), max_snapshots=st.integers(1, 4), moves=MOVES)
def test_moves_agree_with_lists_of_tokens_and_release_everything(
    page_size: int, max_snapshots: int, moves: list[tuple[str, int, int, int]]
) -> None:
    world = World(page_size, max_snapshots)
    for move in moves:
        world.move(*move)
        world.check()
    for cursor, _ in world.pairs:
        assert len(cursor._snapshots) <= max_snapshots
        world.primitives.close(cursor)
    world.pairs.clear()
    world.check()
    assert world.tree.pages.num_free == world.tree.pages.num_pages


def test_reader_at_2000_mounts_1500_to_4000_and_goes_on_at_4001() -> None:
    world = World(16, 4)
    world.open(1500)
    source, _ = world.pairs[0]
    child = world.primitives.fork(source)
    node = world.grow(child._tail, (), child.position, 2501)  # positions 1500..4000
    world.primitives.advance(child, node)
    reader = world.primitives.fork(source)
    node = world.grow(reader._tail, (), reader.position, 501)  # positions 1500..2000
    world.primitives.advance(reader, node)
    assert world.primitives.mount(reader, child, None) == 2501
    assert reader.position == 4001
    assert world.primitives.mount(reader, child, None) == 0
    assert reader.position == 4001


def test_common_boundary_of_two_chains() -> None:
    world = World(4, 4)
    world.open(5)
    one, _ = world.pairs[0]
    fork_point = one._tail
    other = world.primitives.fork(one)
    for cursor, count in ((one, 3), (one, 2), (other, 4)):
        node = world.grow(cursor._tail, (), cursor.position, count)
        world.primitives.advance(cursor, node)
    assert common(one._tail, other._tail) is fork_point
    assert common(one._tail, fork_point) is fork_point
    assert common(fork_point, None) is None
    assert [len(node.tokens) for node in chain(one._tail)] == [5, 3, 2]
    world.open(5)
    assert common(one._tail, world.pairs[1][0]._tail) is None


def test_source_keeps_only_what_is_mounted_after_it_closes() -> None:
    world = World(4, 4)
    world.open(8)
    world.open(8)
    root, reader = world.pairs[0][0], world.pairs[1][0]
    child = world.primitives.fork(root)
    node = world.grow(child._tail, (), child.position, 8)
    world.primitives.advance(child, node)
    world.primitives.mount(reader, child, None)
    world.primitives.close(child)
    world.primitives.close(root)
    assert world.tree.pages.num_held == 4  # the reader's two pages and the span's two
    world.primitives.close(reader)
    assert world.tree.pages.num_held == 0
