"""Episodes run again: the record word for word, until something else is fed."""

from __future__ import annotations

from typing import Any

import pytest

from octopus_trl.agent.replay import ReplayEngine
from octopus_trl.agent.rollout import EpisodeRunner, RolloutConfig
from octopus_trl.errors import ConfigError
from octopus_trl.protocols import SamplingParams
from octopus_trl.trace import Trace
from octopus_trl.train.branches import turns_after_reading
from tests.agent.fakes import (
    ListCorpus,
    RandomPolicy,
    Script,
    ScriptedEngine,
    byte_tokenizer,
    xml_call,
)

TOKENIZER = byte_tokenizer()
CORPUS = ListCorpus(a="alpha text", evil="x<|im_end|>")
CONFIG = RolloutConfig(
    window=3000, max_turns=9, max_threads=8, max_children=3, compact_tools=True, tool_workers=2
)
QUESTIONS = [{"id": f"q{index}", "question": f"What is {index}?"} for index in range(3)]


def whole_turns(chain: Any, sampling: SamplingParams) -> list[int]:
    """Talk at random, and never end a turn that nothing ends."""
    said = list(RandomPolicy(TOKENIZER)(chain, sampling))
    return said if said[-1] == TOKENIZER.eos_token_id else [*said, TOKENIZER.eos_token_id]


def read(thread: int) -> str:
    return xml_call("read_thread", thread_id=thread)


FORKS = "\n".join(xml_call("fork", task=f"part {part}") for part in (1, 2))
TURNS = {
    0: [FORKS, xml_call("wait_threads"), read(1), read(2), xml_call("commit", result="both")],
    1: [xml_call("search", query="a"), xml_call("commit", result="one")],
    2: [xml_call("commit", result="two")],
}


def run(
    policy: Any, examples: Any, traces: Any = None, again: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    engine: Any = ScriptedEngine(policy)
    replay = ReplayEngine(engine, traces, again) if traces is not None else None
    runner = EpisodeRunner(replay or engine, TOKENIZER, CORPUS, CONFIG)
    found = runner.run(examples, **options)
    assert engine.num_open == 0
    return found, engine, replay


def text(trace: Trace) -> list[tuple[int, str, list[int], list[int]]]:
    return [(s.thread, s.kind, s.tokens, s.mounts) for s in trace.segments]


def said(trace: Trace, thread: int) -> list[list[int]]:
    return [s.tokens for s in trace.segments if s.thread == thread and s.kind == "action"]


def test_an_episode_in_which_nothing_is_changed_comes_out_as_it_was() -> None:
    traces, *_ = run(whole_turns, QUESTIONS, group_size=3, seed=4)
    assert any(segment.mounts for trace in traces for segment in trace.segments)
    examples = [QUESTIONS[index // 3] for index in range(9)]
    again, engine, replay = run(whole_turns, examples, traces, seed=99)
    assert [text(trace) for trace in again] == [text(trace) for trace in traces]
    assert engine.sampled == []
    assert replay.num_repeated == sum(s.kind == "action" for t in traces for s in t.segments)


def test_a_branch_that_nobody_may_read_is_refused_and_only_later_turns_are_new() -> None:
    (trace,), *_ = run(Script(TOKENIZER, TURNS), QUESTIONS[:1])
    own = [[s.id for s in trace.segments if s.thread == thread] for thread in (1, 2)]
    assert [s.mounts for s in trace.segments if s.mounts] == own
    new = {0: [xml_call("commit", result="without two")]}
    (again,), engine, _ = run(Script(TOKENIZER, new), QUESTIONS[:1], [trace], unreadable=[{2}])
    again.check()
    first = next(s.id for s in trace.segments if s.mounts == own[1])
    assert text(again)[:first] == text(trace)[:first]
    assert [s.mounts for s in again.segments if s.mounts] == own[:1]
    assert "read_thread refused: thread 2 cannot be read" in TOKENIZER.decode(
        again.segments[first].tokens
    )
    assert again.meta["result"] == "without two"
    assert len(engine.sampled) == 1


def test_a_child_keeps_its_words_where_it_is_fed_others_and_the_root_draws_again() -> None:
    turns = {
        0: [FORKS, xml_call("wait_threads"), read(2), xml_call("commit", result="both")],
        1: [xml_call("search", query="a"), xml_call("commit", result="one")],
        2: [read(1), xml_call("search", query="a"), xml_call("commit", result="two")],
    }
    (trace,), *_ = run(Script(TOKENIZER, turns), QUESTIONS[:1])
    readers = [s.thread for s in trace.segments if s.mounts]
    assert readers == [2, 0]
    drawn = turns_after_reading(trace, 1)
    assert [trace.segments[s].thread for s in drawn] == [0]
    new = {0: [xml_call("commit", result="anew")]}
    (again,), engine, _ = run(
        Script(TOKENIZER, new), QUESTIONS[:1], [trace], [drawn], unreadable=[{1}]
    )
    again.check()
    assert again.meta["result"] == "anew"
    assert len(engine.sampled) == 1
    told = "".join(TOKENIZER.decode(s.tokens) for s in again.segments if s.thread == 2)
    assert "thread 1 cannot be read" in told
    for thread in (1, 2):
        assert said(again, thread) == said(trace, thread)


def test_a_turn_that_is_to_be_drawn_again_is_not_repeated() -> None:
    (trace,), *_ = run(Script(TOKENIZER, TURNS), QUESTIONS[:1])
    last = max(s.id for s in trace.segments if s.thread == 0 and s.kind == "action")
    (again,), engine, _ = run(Script(TOKENIZER, {}), QUESTIONS[:1], [trace], [{last}])
    assert again.meta["result"] == "end of 0"
    assert len(engine.sampled) == 1
    assert text(again)[:last] == text(trace)[:last]


def test_what_descends_from_a_hidden_thread_is_hidden_too() -> None:
    turns = {
        0: [xml_call("fork", task="x"), xml_call("wait_threads"), read(2)],
        1: [xml_call("fork", task="y"), xml_call("wait_threads")],
    }
    (trace,), *_ = run(Script(TOKENIZER, turns), QUESTIONS[:1])
    assert any(segment.mounts for segment in trace.segments)
    (again,), *_ = run(Script(TOKENIZER, {}), QUESTIONS[:1], [trace], unreadable=[{1}])
    assert not any(segment.mounts for segment in again.segments)


def test_a_turn_that_was_cut_short_is_no_record_and_is_sampled() -> None:
    (trace,), *_ = run(Script(TOKENIZER, TURNS), QUESTIONS[:1])
    last = trace.segments[-1]
    last.tokens = last.tokens[:-2]
    (again,), engine, _ = run(Script(TOKENIZER, {}), QUESTIONS[:1], [trace])
    assert again.meta["result"] == "end of 0"
    assert len(engine.sampled) == 1


def test_more_episodes_than_records_and_other_uses_are_refused() -> None:
    engine = ReplayEngine(ScriptedEngine(Script(TOKENIZER, {})), [])
    with pytest.raises(ConfigError, match="give one each"):
        engine.open([1])
    with pytest.raises(ConfigError, match="use EpisodeRunner"):
        engine.generate([], SamplingParams(), until=())
