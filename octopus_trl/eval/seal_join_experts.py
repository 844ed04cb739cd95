"""Experts of the seal join world: scripts that act as a careful policy would.

Root: one turn that forks a thread for each place, one that waits, one that reads every thread, one
that thinks the chair, its class and each place's seal, and commits. Branch: search the place, open
it, search its steward guild, open the current edition, commit `done` without repeating a seal. An
expert knows the truth of its question but says only what its thread can read by then: without a
mount it commits `done`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.scripted import Block
from octopus_trl.eval.seal_join import World

UNKNOWN = "done"  # what a root commits that cannot know the answer; one token
EMPTY_QUERY = "task"  # a word that no page has
_BRANCH = re.compile(r"you are thread (\d+); task: (.*?); budget")
_FORKED = re.compile(r"forked thread (\d+)")
_MOUNTED = re.compile(r"mounted \d+ tokens of thread (\d+)")
_HIT = re.compile(r"(?m)^(\S+) \| ([^|]+?) \|")
_OPENED = re.compile(r"<parameter=docid>\n(\S+)\n")
_TASK = "find the seals of {}"


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """How experts differ from the shortest way, as shares of threads or episodes.

    Args:
        empty_search: branches whose first query finds nothing and is tried again.
        rewind: branches that leave a withdrawn edition by `rewind`; the others open on top.
        shuffled: episodes that fork in another order than the question's.
        skip_guild: branches that stop after their place's page.
        keep_withdrawn: branches that take a withdrawn edition for the current one.
        skip_read: threads that the root leaves unread, the first one never.
        skip_wait: roots that read before their threads have ended.
    The last four are careless: they lose the answer, and the root then commits `done`. A policy
    that imitates them has something left for reinforcement to teach.
    Raises:
        ConfigError: a share is outside [0, 1].
    """

    empty_search: float = 0.05
    rewind: float = 0.75
    shuffled: float = 0.2
    skip_guild: float = 0.0
    keep_withdrawn: float = 0.0
    skip_read: float = 0.0
    skip_wait: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: a share lies in [0, 1]")


class ExpertPolicy:
    """The `Script` of one question's episode.

    Args:
        row: a row of `World.question`.
        seed: start of this expert's choices, which depend on the thread and nothing else.
    """

    def __init__(
        self,
        world: World,
        row: Mapping[str, Any],
        *,
        options: ExpertOptions | None = None,
        seed: int = 0,
    ) -> None:
        self._world, self._row, self._seed = world, row, seed
        self._options = options or ExpertOptions()
        self._truth = world.truth(row)
        self._order = list(range(len(row["entities"])))
        if self._chance("shuffled", self._options.shuffled):
            random.Random(f"{seed} {row['id']} order").shuffle(self._order)

    def turn(self, blocks: Sequence[Block]) -> str:
        """Give the next turn of the thread that has these blocks."""
        own = list(blocks)
        for index in range(len(blocks) - 1, 0, -1):
            if not blocks[index].is_turn and (match := _BRANCH.search(blocks[index].text)):
                return self._branch(int(match[1]), match[2], list(blocks[index:]))
        return self._root(own)

    def _root(self, blocks: list[Block]) -> str:
        fed = "\n".join(block.text for block in blocks[1:] if not block.is_turn)
        turns = sum(block.is_turn for block in blocks)
        threads = [int(number) for number in _FORKED.findall(fed)]
        entities = [self._row["entities"][index] for index in self._order]
        waits = not self._chance("skip_wait", self._options.skip_wait)
        if turns == 0:
            tasks = [_TASK.format(self._world.title(entity)) for entity in entities]
            return write_turn("", *(("fork", {"task": task}) for task in tasks))
        if turns == 1 and waits:
            return write_turn("", ("wait_threads", {"thread_ids": f"[{_commas(threads)}]"}))
        if turns == 1 + waits:
            chosen = [t for t in threads if t == threads[0] or not self._skips_read(t)]
            return write_turn("", *(("read_thread", {"thread_id": str(t)}) for t in chosen))
        readable = {int(number) for number in _MOUNTED.findall(fed)}
        places = dict(zip(threads, self._order, strict=False))
        known = {places[t] for t in readable if t in places and waits and self._found(t, places[t])}
        thought, answer = self._conclusion(known)
        return write_turn(thought, ("commit", {"result": answer}))

    def _skips_read(self, thread: int) -> bool:
        return self._chance(f"skip_read {thread}", self._options.skip_read)

    def _skips_guild(self, thread: int) -> bool:
        return self._chance(f"skip_guild {thread}", self._options.skip_guild)

    def _keeps_withdrawn(self, thread: int) -> bool:
        return self._chance(f"keep_withdrawn {thread}", self._options.keep_withdrawn)

    def _found(self, thread: int, place: int) -> bool:
        """Whether a branch ends with its guild's current page on its chain."""
        stale = self._world.first_edition[self._truth.guilds[place]] == 1
        return not self._skips_guild(thread) and not (stale and self._keeps_withdrawn(thread))

    def _conclusion(self, known: set[int]) -> tuple[str, str]:
        """Think what can be read of the places `known` (indices), and the answer that follows."""
        truth, row = self._truth, self._row
        if row["class"] is None:
            if truth.chair not in known:
                return "", UNKNOWN
            chair = f"the chair is {truth.guilds[truth.chair]} and names {truth.named}."
        else:
            chair = f"the class is {truth.wanted}."
        if len(known) < len(truth.guilds):
            return chair, UNKNOWN
        lines = [
            f"{entity} is {guild} {truth.wanted} seal {seal}."
            for entity, guild, seal in zip(row["entities"], truth.guilds, truth.seals, strict=True)
        ]
        return " ".join([chair, *lines]), " ".join(truth.seals)

    def _branch(self, thread: int, task: str, blocks: list[Block]) -> str:
        world = self._world
        turns = [block.text for block in blocks if block.is_turn]
        last = blocks[-1].text
        place = self._place_of(task)
        if not turns:
            empty = self._chance(f"empty {thread}", self._options.empty_search)
            return _search(EMPTY_QUERY if empty else world.title(place))
        if "no hits" in last and "<function=search>" in turns[-1]:
            return _search(world.title(place))
        if "<function=search>" in turns[-1]:
            searched = turns[-1].partition("<parameter=query>\n")[2].partition("\n")[0]
            return _open(_hits(last, searched)[0])
        guild = world.steward[place]
        if "the steward of" in last and not self._skips_guild(thread):
            return _search(world.title(guild))
        withdrawn = "is withdrawn" in last and "<function=open>" in turns[-1]
        if withdrawn and not self._keeps_withdrawn(thread):
            if self._chance(f"rewind {thread}", self._options.rewind):
                number = str(len(turns))
                return write_turn("", ("rewind", {"turn": number, "note": "withdrawn edition"}))
            return _open(self._other_edition(blocks, turns[-1], guild))
        if "rewound to turn" in last:
            return _open(self._other_edition(blocks, turns[-1], guild))
        return write_turn("", ("commit", {"result": "done"}))

    def _place_of(self, task: str) -> str:
        for entity in self._row["entities"]:
            if self._world.title(entity) in task:
                return str(entity)
        return str(self._row["entities"][0])

    def _other_edition(self, blocks: list[Block], opened: str, guild: str) -> str:
        title = self._world.title(guild)
        results = next(
            block.text
            for block in reversed(blocks)
            if not block.is_turn and len(_hits(block.text, title)) > 1
        )
        match = _OPENED.search(opened)
        return next(docid for docid in _hits(results, title) if not match or docid != match[1])

    def _chance(self, purpose: str, share: float) -> bool:
        return random.Random(f"{self._seed} {self._row['id']} {purpose}").random() < share


def write_turn(thought: str, *calls: tuple[str, Mapping[str, str]]) -> str:
    """Write a turn as Qwen3.5's template would render it, after an opened thinking block."""
    rendered = []
    for name, arguments in calls:
        parameters = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
        )
        rendered.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return f"{thought}\n</think>\n\n" + "\n".join(rendered)


def _search(query: str) -> str:
    return write_turn("", ("search", {"query": query}))


def _open(docid: str) -> str:
    return write_turn("", ("open", {"docid": docid}))


def _hits(text: str, title: str) -> list[str]:
    """Docids of the results with this title, best first; of all results where none has it."""
    hits = _HIT.findall(text)
    return [docid for docid, name in hits if name == title] or [docid for docid, _ in hits]


def _commas(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
