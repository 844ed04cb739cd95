"""`scripts/ask.py`: an episode that ends in bounded time, is shown as it grows and never lost."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.agent.episode import Episode
from octopus_trl.errors import ConfigError
from octopus_trl.eval.seal_join_backend import asked_row
from octopus_trl.report.growing import GrowingTree
from octopus_trl.trace import Trace
from octopus_trl.trace_files import read_traces
from tests.eval.test_evaluate_script import Script, last
from tests.train.runs import save_untrained

QUESTION = "When is the gate shut?"
PROMPT = "system_prompt: answer.\ncompact_tools: true\n"  # few tokens, so that a test is short
SHORT = ("--window", "2048", "--max-turns", "3", "--max-new-tokens", "4")
ENDLESS = ("--max-turns", "100000", "--max-new-tokens", "4", "--window", "1000000")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model: it calls no tool and commits nothing."""
    return save_untrained(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    pages = [{"docid": str(at), "text": f"gate {at} is shut in winter {at}"} for at in range(2)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "new" / "trace.jsonl"


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: Path,
    data: Path,
    trace: Path,
    tmp_path: Path,
) -> Script:
    recipe = tmp_path / "prompt.yaml"
    recipe.write_text(PROMPT)
    paths = {"--model": policy, "--data": data, "--recipe": recipe, "--trace": trace}
    always = (str(word) for pair in paths.items() for word in pair)
    return Script("ask.py", monkeypatch, capsys, *always, QUESTION)


def kept(path: Path) -> Trace:
    (found,) = read_traces(path)
    return found.check()


def root_end(trace: Trace) -> dict[str, Any]:
    (end,) = (e for e in trace.events if e["type"] == "end" and e["thread"] == 0)
    return end


def on_turn(monkeypatch: pytest.MonkeyPatch, number: int, act: Any) -> None:
    """Do something as the n-th turn is shown."""
    feed, turns = GrowingTree.feed, [0]

    def feed_and_act(self: GrowingTree, event: dict[str, Any]) -> None:
        feed(self, event)
        turns[0] += event["type"] == "turn"
        if event["type"] == "turn" and turns[0] == number:
            act()

    monkeypatch.setattr(GrowingTree, "feed", feed_and_act)


# --- bounds


def test_limits_given_by_hand_win_over_the_recipe_which_wins_over_the_bounds(
    ask: Script, trace: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{PROMPT}max_turns: 5\nmax_new_tokens: 3\n")
    for words, turns, longest in (
        (("--max-new-tokens", "1"), 24, 1),
        (("--recipe", recipe), 5, 3),
        (("--recipe", recipe, "--max-turns", "2"), 2, 3),
    ):
        assert ask(*words).code == 0
        drawn = [len(s.tokens) for s in kept(trace).segments if s.kind == "action"]
        assert (len(drawn), max(drawn)) == (turns, longest)


@pytest.mark.parametrize(
    ("words", "system"),
    [
        (("--exchange", "transcript"), ("transcript", "jump", "tree")),
        (("--position", "unshifted"), ("mount", "unshifted", "tree")),
        (("--agent", "flat"), ("mount", "jump", "flat")),
    ],
)
def test_the_system_that_was_named_is_the_one_that_runs(
    ask: Script, trace: Path, words: tuple[str, ...], system: tuple[str, ...]
) -> None:
    assert ask(*SHORT, *words).code == 0
    found = kept(trace)
    assert (found.exchange, found.position, found.meta["agent"]) == system


def test_an_episode_whose_time_is_up_is_cut_and_kept(ask: Script, trace: Path) -> None:
    ended = ask(*ENDLESS, "--episode-timeout-s", "0.3")
    assert (ended.code, "no answer" in ended.out, "0.3 s are up" in ended.out) == (0, True, True)
    found = kept(trace)
    assert (found.threads[0].status, found.truncated) == ("cut", True)
    assert root_end(found)["reason"] == "its 0.3 s are up"


# --- what is shown


def test_each_turn_is_a_line_before_the_next_is_drawn_and_the_answer_comes_last(
    ask: Script, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    early: list[str] = []
    on_turn(monkeypatch, 2, lambda: early.append(capsys.readouterr().out))
    ended = ask(*SHORT)
    lines = (early[0] + ended.out).splitlines()
    wanted: list[str] = []
    grown = GrowingTree(QUESTION, wanted.append)
    for event in kept(trace).events:
        grown.feed(event)
    assert len(early[0].splitlines()) == 3
    assert lines[:-1] == [QUESTION, *wanted]
    assert lines[-1].startswith("no answer: the root ended without a commit (")


def test_quiet_leaves_the_answer_alone(ask: Script) -> None:
    ended = ask(*SHORT, "--quiet")
    assert ended.out.startswith("no answer")
    assert (len(ended.out.splitlines()), ended.err) == (1, "")


def test_a_terminal_gets_the_whole_tree_however_small_it_is(
    ask: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("LINES", "4"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TERM", "xterm")
    ended = ask(*SHORT, "--max-turns", "6")
    drawn = ended.out[ended.out.rindex(QUESTION) :]
    assert drawn.count("no call") == 6


@pytest.mark.parametrize("force", ["", "1"])
def test_an_answer_gives_a_terminal_no_orders(
    ask: Script, monkeypatch: pytest.MonkeyPatch, force: str
) -> None:
    record = Episode.trace

    def commit(self: Episode) -> Trace:
        found = record(self)
        found.meta["result"] = "[b]it\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\nis\tso"
        return found

    monkeypatch.setenv("FORCE_COLOR", force)
    monkeypatch.setattr(Episode, "trace", commit)
    ended = ask(*SHORT)
    answer = ended.out[ended.out.index("[b]it") :]
    assert not set("\x1b\x07\x9b\u202e") & set(answer)
    assert answer.endswith("\nis\tso\n")


# --- stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cuts_the_episode_and_keeps_it(
    ask: Script, trace: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    if before == signal.SIG_IGN:
        pytest.skip("these tests run under nohup, which is left as it is")
    on_turn(monkeypatch, 2, lambda: os.kill(os.getpid(), number))
    ended = ask(*ENDLESS)
    assert ended.code == 128 + number
    assert last(ended) == f"stopped; the episode so far is in {trace}"
    assert signal.getsignal(number) == before
    found = kept(trace)
    assert (found.threads[0].status, found.reward) == ("cut", None)
    assert root_end(found)["reason"] == f"stopped by {number.name}"
    assert sum(segment.kind == "action" for segment in found.segments) >= 2
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_a_second_ctrl_c_ends_at_once_and_leaves_an_older_trace_whole(
    ask: Script, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(*SHORT).code == 0
    older = trace.read_bytes()

    def twice() -> None:
        for _ in range(2):  # each to this thread, or the kernel might make one of the two
            signal.raise_signal(signal.SIGINT)

    on_turn(monkeypatch, 2, twice)
    ended = ask(*ENDLESS)
    assert (ended.code, last(ended)) == (130, "stopped; nothing is kept")
    assert trace.read_bytes() == older


def test_a_reader_that_has_gone_stops_the_episode_and_it_is_kept(
    ask: Script, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        on_turn(monkeypatch, 1, lambda: os.close(reader))
        ended = ask(*ENDLESS)
        monkeypatch.undo()
    assert (ended.code, root_end(kept(trace))["reason"]) == (141, "stopped by SIGPIPE")


# --- what is wrong, and the small world


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--trace", "tests"), "--trace tests: is a folder"),
        (("--trace", "pyproject.toml/trace.jsonl"), "--trace=pyproject.toml: cannot be written"),
        (("--episode-timeout-s", "0"), "--episode-timeout-s 0.0: must be above 0"),
        (("--episode-timeout-s", "nan"), "must be above 0"),
        (("--exchange", "telepathy"), "exchange='telepathy': must be one of mount"),
        (("--agent", "flat", "--position", "unshifted"), "one thread has no sibling"),
        (("--data", "data/seal_join"), "ask one of theirs, like 'find the"),
        (("--data", "data/seal_join", "--index", "one"), "drop --backend"),
    ],
)
def test_a_wrong_word_is_one_clear_error(ask: Script, words: tuple[str, ...], says: str) -> None:
    ended = ask(*words)
    assert (ended.code, says in last(ended)) == (2, True), last(ended)


def test_a_question_of_the_small_world_brings_the_row_that_fills_its_pages() -> None:
    question = "find the chair seal of  curly fir station. "
    row = asked_row("data/seal_join", question)
    assert row["question"] == " ".join(question.split())
    assert {"id", "salt_seed", "entities"} <= set(row)
    with pytest.raises(ConfigError, match="none of its questions"):
        asked_row("data/seal_join", "find it")
