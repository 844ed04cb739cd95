"""Hijacking in episodes that were drawn: whose task does the turn after a read pursue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from octopus_trl.agent.calls import RawCall, read_xml
from octopus_trl.eval.extra_kv import KvSize, extra_kv
from octopus_trl.eval.hijacking import NextTurn, hijack_share, judge_with, next_turns
from octopus_trl.trace import Segment, ThreadRecord, Trace

Call = tuple[str, dict[str, str]]


def calls_of(tokens: Sequence[int]) -> list[RawCall]:
    return read_xml("".join(map(chr, tokens)))


def written(*calls: Call) -> list[int]:
    text = ""
    for name, arguments in calls:
        inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        text += f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>\n"
    return list(map(ord, text))


class Story:
    """Writes an episode turn by turn."""

    def __init__(self, question: str, tasks: Mapping[int, tuple[int, str]], **fields: Any) -> None:
        threads = [ThreadRecord(0, None, head=0)]
        threads += [ThreadRecord(t, parent, task) for t, (parent, task) in tasks.items()]
        self.trace = Trace("e", "p", threads=threads, meta={"question": question}, **fields)
        self.trace.segments.append(Segment(0, 0, None, "prompt", [1]))
        self.heads = dict.fromkeys([0, *tasks], 0)

    def turn(self, thread: int, *calls: Call, outcomes: Sequence[str] = (), told: int = 3) -> Story:
        segments = self.trace.segments
        action = Segment(len(segments), thread, self.heads[thread], "action", written(*calls))
        tool = Segment(action.id + 1, thread, action.id, "tool", [2] * told)
        segments += [action, tool]
        self.heads[thread] = tool.id
        given = [[name, end] for (name, _), end in zip(calls, outcomes or ["ok"] * len(calls))]
        for name, arguments in calls:
            if name == "read_thread":
                sibling = int(arguments["thread_id"])
                event = {"type": "read", "thread": thread, "target": sibling, "tokens": 40}
                self.trace.events.append(event)
        self.trace.events.append(
            {"type": "turn", "thread": thread, "segment": action.id, "calls": given}
        )
        return self

    def share(self, **settings: Any) -> float | None:
        return hijack_share([self.trace], calls_of, **settings).value


def two_children(**fields: Any) -> Story:
    tasks = {1: (0, "height of the alder tower"), 2: (0, "mayor of selby")}
    return Story("who lives where", tasks, **fields)


READ = ("read_thread", {"thread_id": "2"})


def test_a_reader_that_searches_for_its_siblings_task_is_hijacked() -> None:
    story = two_children().turn(1, ("search", {"query": "alder tower"})).turn(1, READ)
    assert story.turn(1, ("search", {"query": "selby mayor"})).share() == 1.0


def test_a_reader_that_goes_on_with_its_own_task_is_not() -> None:
    story = two_children().turn(1, READ).turn(1, ("search", {"query": "height alder tower"}))
    assert story.share() == 0.0


def test_a_page_of_the_sibling_counts_and_one_that_both_opened_does_not() -> None:
    page = ("open", {"docid": "X7"})
    assert two_children().turn(2, page).turn(1, READ).turn(1, page).share() == 1.0
    shared = two_children().turn(2, page).turn(1, page).turn(1, READ)
    assert shared.turn(1, page).share() == 0.0


def test_a_root_that_does_its_childs_work_itself_is_hijacked_by_what_it_gave_away() -> None:
    tasks = {1: (0, "seals of otter station")}
    story = Story("find the seals of otter station, heron station", tasks)
    story.turn(0, ("fork", {"task": "seals of otter station"}))
    story.turn(0, ("read_thread", {"thread_id": "1"}))
    assert story.turn(0, ("search", {"query": "otter station"})).share() == 1.0
    own = Story("find the seals of otter station, heron station", tasks)
    own.turn(0, ("read_thread", {"thread_id": "1"}))
    assert own.turn(0, ("search", {"query": "heron"})).share() == 0.0


def test_a_root_that_hands_on_what_is_left_of_its_question_is_not() -> None:
    tasks = {1: (0, "find the mayor of selby"), 2: (0, "find the height of the tower in alder")}
    story = Story("find the mayor of selby and the height of the tower in alder", tasks)
    story.turn(0, ("fork", {"task": tasks[1][1]})).turn(0, ("read_thread", {"thread_id": "1"}))
    assert story.turn(0, ("fork", {"task": tasks[2][1]})).share() == 0.0


def test_a_root_that_is_read_has_its_question_less_what_it_gave_away() -> None:
    tasks = {1: (0, "mayor of selby")}
    story = Story("mayor of selby, height of the alder tower", tasks)
    story.turn(0, ("fork", {"task": tasks[1][1]})).turn(1, ("read_thread", {"thread_id": "0"}))
    story.turn(1, ("search", {"query": "alder tower"}))
    (turn,) = next_turns(story.trace, calls_of)
    assert turn.pursues
    assert turn.sibling_task == story.trace.meta["question"]


def test_a_read_that_found_nothing_new_is_no_read() -> None:
    story = two_children().turn(1, READ)
    story.trace.events = [event for event in story.trace.events if event["type"] != "read"]
    assert story.turn(1, ("search", {"query": "selby mayor"})).share() is None
    story.trace.exchange = "summary"  # its reads have no event
    assert story.share() == 1.0


@pytest.mark.parametrize("call", [("commit", {"result": "selby"}), ("wait_threads", {}), READ])
def test_what_does_no_work_pursues_nothing(call: Call) -> None:
    assert two_children().turn(1, READ).turn(1, call).share() == 0.0


def test_only_the_first_turn_after_a_read_that_gave_something_counts() -> None:
    theirs = ("search", {"query": "selby mayor"})
    mine = ("search", {"query": "alder tower"})
    assert two_children().turn(1, READ).turn(1, mine).turn(1, theirs).share() == 0.0
    refused = two_children().turn(1, READ, outcomes=["refused"]).turn(1, theirs)
    assert refused.share() is None
    back = two_children().turn(1, READ, ("rewind", {"turn": "0", "note": "n"})).turn(1, theirs)
    assert back.share() is None


def test_turns_of_other_threads_between_do_not_end_a_reading() -> None:
    story = two_children().turn(1, READ).turn(2, ("search", {"query": "selby"}))
    assert story.turn(1, ("search", {"query": "mayor of selby"})).share() == 1.0


def test_a_judge_decides_and_leaves_out_what_it_cannot() -> None:
    class Replies:
        identity: Mapping[str, Any] = {}

        def __init__(self, *replies: str | None) -> None:
            self.replies, self.prompts = list(replies), list[str]()

        def ask(self, prompts: Sequence[str]) -> list[str | None]:
            self.prompts += prompts
            return self.replies[: len(prompts)]

    story = two_children().turn(1, READ).turn(1, ("search", {"query": "alder"}))
    story.turn(1, READ).turn(1, ("search", {"query": "tower"}))

    def words(tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    model = Replies("**pursues: sibling**", None)
    assert story.share(judge=judge_with(model, words)) == 1.0
    assert "mayor of selby" in model.prompts[0]
    assert "<function=search>" in model.prompts[0]
    assert story.share(judge=judge_with(Replies("pursues: own", "I cannot say"), words)) == 0.0
    assert story.share(judge=judge_with(Replies(None, None), words)) is None


def test_the_share_is_over_turns_and_its_interval_over_episodes() -> None:
    hit = two_children().turn(1, READ).turn(1, ("search", {"query": "selby"})).trace
    miss = two_children().turn(1, READ).turn(1, ("search", {"query": "alder"})).trace
    figure = hijack_share([hit, miss, miss, two_children().trace], calls_of)
    assert figure.value == pytest.approx(1 / 3)
    assert figure.n == 4
    turns = list(next_turns(hit, calls_of))
    assert [type(turn) for turn in turns] == [NextTurn]
    assert turns[0].siblings == (2,)


@pytest.mark.parametrize(
    ("exchange", "position", "tokens"),
    [
        ("mount", "jump", 0),
        ("mount", "unshifted", 0),
        ("splice", "jump", 0),
        ("mount", "rerotate", 40),
        ("mount", "reencode", 40),
        ("transcript", "jump", 55),
    ],
)
def test_extra_kv_of_a_read_follows_the_exchange(exchange: str, position: str, tokens: int) -> None:
    story = two_children(exchange=exchange, position=position).turn(1, READ, told=55)
    figures = extra_kv([story.trace], KvSize(16, token_bytes=8, mounted_bytes=2))
    assert figures["extra_kv_tokens"]["value"] == tokens
    assert figures["extra_kv_pages"]["value"] == -(-tokens // 16)
    weight = 2 if position == "rerotate" else 8
    assert figures["extra_kv_share"]["value"] == tokens * weight / (40 * 8)
    assert figures["extra_kv_bytes"]["value"] == tokens * weight
    json.dumps(figures)


def test_the_note_of_a_rewind_is_not_what_a_read_was_told() -> None:
    story = two_children(exchange="transcript").turn(1, READ, told=55)
    turn = story.trace.segments[-1].parent
    story.trace.segments.append(Segment(len(story.trace.segments), 1, turn, "tool", [2] * 5))
    assert extra_kv([story.trace])["extra_kv_tokens"]["value"] == 55


def test_an_episode_without_reads_costs_nothing_and_no_episode_has_no_figure() -> None:
    figures = extra_kv([two_children().turn(1, ("search", {"query": "a"})).trace])
    assert figures["extra_kv_tokens"]["value"] == 0
    assert figures["extra_kv_share"]["value"] is None
    assert "extra_kv_bytes" not in figures
    assert extra_kv([])["extra_kv_pages"]["n"] == 0
