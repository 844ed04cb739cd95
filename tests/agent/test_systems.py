"""Every way of sharing findings, and episodes of one thread, told by scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from octopus_trl.agent.rollout import EpisodeRunner, RolloutConfig
from octopus_trl.errors import ConfigError
from octopus_trl.report.lanes import lay_out
from octopus_trl.trace import Trace
from octopus_trl.train.rows import rewound_segments
from tests.agent.fakes import ListCorpus, ScriptedEngine, Seeded, byte_tokenizer, xml_call
from tests.agent.test_episode import (
    commit,
    fork,
    of_thread,
    read,
    rewind,
    statuses,
    wait,
)

TOKENIZER = byte_tokenizer()
CORPUS = ListCorpus(a="alpha is 17", b="beta is 4")
TURNS = {
    0: [fork("find a") + fork("find b"), wait(1, 2), read(2) + read(1), read(1), commit("21")],
    1: [xml_call("open", docid="a"), commit("a is 17")],
    2: [xml_call("open", docid="b"), commit("b is 4")],
}


def play(
    turns: Mapping[int, Sequence[str]], **settings: Any
) -> tuple[Trace, Seeded, ScriptedEngine]:
    """Run one episode in which thread N says `turns[N]`, then commits."""
    script = Seeded(TOKENIZER, turns)
    engine = ScriptedEngine(script)
    config = RolloutConfig(**{"max_turns": 20, "tool_workers": 0, **settings})
    (trace,) = EpisodeRunner(engine, TOKENIZER, CORPUS, config).run(
        [{"id": "q", "question": "Which?"}]
    )
    trace.check()
    assert engine.num_open == 0, "an episode gives every cursor back"
    return trace, script, engine


def text_of(trace: Trace, segment: int) -> str:
    return TOKENIZER.decode(trace.segments[segment].tokens)


@cache
def prompt_length() -> int:
    return len(play({0: [commit("x")]}, agent="flat")[0].segments[0].tokens)


def roots(trace: Trace) -> list[Any]:
    return [segment for segment in trace.segments if segment.parent is None]


# Transcript


def test_a_transcript_is_the_siblings_text_pasted_as_plain_text() -> None:
    trace, script, engine = play(TURNS, exchange="transcript")
    assert trace.exchange == "transcript"
    assert engine.num_mounts == 0
    assert not any(segment.mounts for segment in trace.segments)
    tool = of_thread(trace, 0, "tool")[2]
    pasted = script.contexts[0, 3]
    for thread in (1, 2):
        own = [s for s in trace.segments if s.thread == thread]
        written = "".join(text_of(trace, s.id) for s in own)
        assert written.strip() in pasted
        assert f"transcript of thread {thread}, {sum(len(s.tokens) for s in own)} tokens" in pasted
    ends = tool.tokens.count(TOKENIZER.convert_tokens_to_ids("<|im_end|>"))
    plain = of_thread(trace, 0, "tool")[1]
    assert ends == plain.tokens.count(TOKENIZER.convert_tokens_to_ids("<|im_end|>")), (
        "a control token in a transcript is spelled out"
    )
    assert "nothing new in thread 1" in script.reply(0, 4)


def test_a_rewind_past_a_transcript_lets_it_be_read_again() -> None:
    turns = {0: [fork(), wait(1), read(1), rewind(2), read(1), commit("x")], 1: [commit("y")]}
    _, script, _ = play(turns, exchange="transcript")
    for turn in (3, 5):
        assert script.contexts[0, turn].count("transcript of thread 1") == 1


def test_a_fork_inherits_the_transcripts_of_its_parent() -> None:
    turns = {
        0: [fork("one"), wait(1), read(1), fork("two"), wait(2), commit("x")],
        1: [commit("y")],
        2: [read(1), commit("z")],
    }
    _, script, _ = play(turns, exchange="transcript")
    assert "nothing new in thread 1" in script.reply(2, 1)


def test_a_transcript_counts_against_the_window_and_is_cut_to_it() -> None:
    long = "long " * 360
    turns = {0: [fork(), wait(1), read(1), "more"], 1: [long, commit("y")]}
    window = 2000 + len(play({})[0].segments[0].tokens)
    trace, script, _ = play(turns, exchange="transcript", window=window, reserve_tokens=600)
    assert "transcript of thread 1" in script.contexts[0, 3]
    assert "[cut]" in script.contexts[0, 3]
    assert "your token budget is used up" in script.reply(0, 3)
    assert statuses(trace)[0] == "cut"
    tokens, _ = trace.linearize(trace.threads[0].head or 0)
    assert len(tokens) <= window


# Summary


def test_a_summary_child_starts_in_a_context_of_its_own_and_gives_its_commit_text() -> None:
    trace, script, engine = play(TURNS, exchange="summary")
    assert engine.num_forks == engine.num_mounts == 0
    assert engine.num_opened == 3
    assert [(s.thread, s.kind, s.start) for s in roots(trace)] == [
        (0, "prompt", 0),
        (1, "prompt", 0),
        (2, "prompt", 0),
    ]
    first = script.contexts[1, 0]
    assert "you are thread 1; task: find a; budget" in first
    assert "Which?" not in first
    assert "<tool_response>" not in first
    assert first.count("<|im_start|>system") == 1
    assert "thread 1 committed: a is 17\nthread 2 committed: b is 4" in script.reply(0, 2)
    assert "thread 1 committed: a is 17" in script.reply(0, 3)
    assert "alpha" not in script.contexts[0, 4], "nothing but the commit text comes back"
    assert [thread.parent for thread in trace.threads] == [None, 0, 0]
    assert rewound_segments(trace) == set()


def test_reading_a_summary_child_that_still_runs_gives_its_status_alone() -> None:
    _, script, _ = play({0: [fork(), read(1), commit("x")], 1: ["hm", "hm"]}, exchange="summary")
    assert "thread 1 running" in script.reply(0, 2)


def test_a_summary_child_keeps_the_system_text_of_the_question() -> None:
    script = Seeded(TOKENIZER, {0: [fork(), wait(1), commit("x")], 1: [commit("y")]})
    config = RolloutConfig(exchange="summary")
    runner = EpisodeRunner(ScriptedEngine(script), TOKENIZER, CORPUS, config)
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Which?"}]
    (trace,) = runner.run([{"id": "q", "prompt": asked}])
    trace.check()
    assert "be brief" in script.contexts[1, 0]


def test_a_summary_child_goes_back_to_its_own_prompt_and_is_named_after_a_rewind() -> None:
    turns = {
        0: ["think", fork("dig") + fork("delve"), rewind(1, "no"), wait(1), commit("x")],
        1: ["hm", rewind(0, "again"), commit("y")],
    }
    trace, script, _ = play(turns, exchange="summary")
    assert "threads forked since then: 1, 2" in script.reply(0, 3)
    left = of_thread(trace, 1, "action")[0].id
    assert left in rewound_segments(trace)
    assert statuses(trace)[:2] == ["committed"] * 2


# One thread


@pytest.mark.parametrize("window", [8192, 147_456])
def test_a_flat_agent_is_one_thread_without_primitives(window: int) -> None:
    turns = {0: [fork(), read(1), xml_call("open", docid="a"), commit("17")]}
    trace, script, engine = play(turns, agent="flat", window=window)
    assert trace.meta["agent"] == "flat"
    assert len(trace.threads) == 1
    assert engine.num_forks == engine.num_mounts == 0
    assert 'unknown tool "fork"; the tools are commit, search, open' in script.reply(0, 1)
    assert "read_thread" not in script.contexts[0, 0]
    assert trace.meta["result"] == "17"


def test_hidden_and_disabled_primitives_run_the_same_weights_on_one_thread() -> None:
    """`tools_exposed: false` takes them out of the prompt, `disabled_tools` leaves it as it was."""
    hidden, shown, _ = play({0: [fork(), commit("x")]}, tools_exposed=False)
    offered, script, _ = play({0: [fork(), commit("x")]}, disabled_tools=("fork",))
    usual, _, _ = play({0: [fork(), commit("x")]})
    assert [len(trace.threads) for trace in (hidden, offered, usual)] == [1, 1, 2]
    assert "fork" not in shown.contexts[0, 0]
    assert "fork is disabled" in script.reply(0, 1)
    assert offered.segments[0].tokens == usual.segments[0].tokens


def test_a_compact_agent_goes_on_after_its_question_and_its_summary() -> None:
    talk = "word " * 80
    turns = {0: [*[talk] * 3, "alpha is 17 so far", *[talk] * 2, commit("17")]}
    window = 2000 + prompt_length()
    trace, script, engine = play(turns, agent="compact", window=window, reserve_tokens=640)
    first, second = roots(trace)
    assert first.thread == second.thread == 0
    assert "your context is full" in script.reply(0, 3)
    opened = text_of(trace, second.id)
    assert "Which?\n\nsummary of your work so far:\nalpha is 17 so far<|im_end|>" in opened
    assert second.start == 0
    assert engine.num_opened == 2
    assert script.contexts[0, 4] == opened, "nothing else of the old context is seen"
    assert trace.meta["result"] == "17"
    assert trace.segments[trace.threads[0].head or 0].id > second.id
    assert rewound_segments(trace) == lay_out(trace).rewound == set()
    assert [e["segment"] for e in trace.events if e["type"] == "restart"] == [second.id]
    for segment in trace.segments:
        tokens, _ = trace.linearize(segment.id)
        assert len(tokens) <= window


def test_a_compact_agent_may_commit_instead_of_summing_up_and_runs_out_of_turns() -> None:
    talk = "word " * 80
    window = 2000 + prompt_length()
    settings: dict[str, Any] = {"agent": "compact", "window": window, "reserve_tokens": 640}
    trace, _, _ = play({0: [*[talk] * 3, commit("17")]}, **settings)
    assert (len(roots(trace)), trace.meta["result"]) == (1, "17")
    trace, script, _ = play({0: [talk] * 30}, **settings, max_turns=9)
    assert statuses(trace) == ["cut"]
    assert len(of_thread(trace, 0, "action")) == 9
    assert len(roots(trace)) == 3
    assert "your turns are used up" in script.reply(0, 8)


def test_a_prompt_that_leaves_no_window_lets_a_compact_agent_answer_once() -> None:
    window = 400 + prompt_length()
    settings: dict[str, Any] = {"agent": "compact", "window": window, "reserve_tokens": 600}
    trace, _, _ = play({0: ["hm", commit("x")]}, **settings)
    assert statuses(trace) == ["cut"]
    assert len(of_thread(trace, 0, "action")) == 1


def test_a_reserve_too_small_for_the_request_to_sum_up_is_refused() -> None:
    RolloutConfig(window=2048, reserve_tokens=250)
    config = RolloutConfig(window=2048, reserve_tokens=250, agent="compact")
    with pytest.raises(ConfigError, match="must hold the last warning"):
        EpisodeRunner(ScriptedEngine(Seeded(TOKENIZER, {})), TOKENIZER, CORPUS, config)
