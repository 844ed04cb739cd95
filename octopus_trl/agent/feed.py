"""What a round does on the engine, after every decision of it has been taken.

Order: mounts first, of sources as they stood at the round's start; then rewinds; then tool text
and the next turn of each thread. Forks were taken at decision time, before any of it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from octopus_trl.agent.thread import Agenda, Fed, Thread, draw_seed
from octopus_trl.agent.tools import Result, ToolCall
from octopus_trl.errors import BudgetExceeded, ConfigError

if TYPE_CHECKING:
    from octopus_trl.agent.episode import Episode

SUMMARY = (
    "your context is full: write down all that you need to go on; you go on with that alone. or "
    "commit now"
)
LAST_TURN = {
    "turns": "last turn: your turns are used up; commit now",
    "tokens": "last turn: your token budget is used up; commit now",
}
WARNINGS = {**LAST_TURN, "summary": SUMMARY}
CURSORS = ("fork_cursor", "boundary", "origin", "cursor")


def start(episode: Episode, thread: Thread) -> None:
    """Let a thread write its first turn after its prompt.

    Raises:
        ConfigError: a prompt that nobody could write a word after.
    """
    config = episode.config
    if thread.num_turns == 0 and thread.num_own >= config.window:
        raise ConfigError(
            f"window={config.window}: the prompt alone has {thread.num_own} tokens; raise window, "
            "or shorten the question, the system prompt or the tools' texts (compact_tools)"
        )
    if config.reads_others and not config.deterministic:
        thread.origin = episode.engine.fork(thread.cursor)
    thread.last_turn = None
    if thread.num_turns + 1 >= config.max_turns:
        thread.last_turn = "turns"
    elif config.window - thread.num_own <= config.reserve:
        thread.last_turn = "tokens"
    _submit(episode, thread, [])


def fork(episode: Episode, parent: Thread) -> tuple[Any, Any]:
    """Give a child's cursor at the end of its parent's last turn, and its origin.

    What the parent's turn has mounted by now is not on them.
    """
    clean = parent.cursor if parent.fork_cursor is None else parent.fork_cursor
    cursor = episode.engine.fork(clean)
    if episode.config.deterministic or not episode.config.reads_others:
        return cursor, None
    try:
        return cursor, episode.engine.fork(cursor)
    except BaseException:
        episode.engine.close(cursor)
        raise


def feed_round(episode: Episode, spoken: list[Thread]) -> None:
    """Mount what was read, rewind, and feed each thread that has spoken its results."""
    for thread in episode.threads.values():
        if not thread.ended and thread.agenda is not None and thread.agenda.sources:
            episode.attempt(thread, _mount, episode, thread, thread.agenda)
    # Every mount is done before any source goes back or goes on.
    for step in (_rewind, _reply):
        for thread in spoken:
            if episode.threads[0].ended:
                return
            if not thread.ended and thread.agenda is not None:
                episode.attempt(thread, step, episode, thread, thread.agenda)


def keep_boundary(episode: Episode, thread: Thread) -> None:
    """Keep the place of the last closed turn where others read while this thread writes."""
    if episode.config.reads_others and not episode.config.deterministic:
        release(episode, thread, "boundary")
        thread.boundary = episode.engine.fork(thread.cursor)


def release(episode: Episode, thread: Thread, *names: str) -> None:
    """Close the named cursors of a thread that are open."""
    for name in names:
        cursor = getattr(thread, name)
        if cursor is not None:
            setattr(thread, name, None)
            episode.engine.close(cursor)


def _mount(episode: Episode, thread: Thread, agenda: Agenda) -> None:
    later = agenda.calls[agenda.at + 1 :]
    if thread.status == "waiting" and thread.fork_cursor is None:
        if any(isinstance(call, ToolCall) and call.name == "fork" for call in later):
            # What this turn forks after its wait must not see what it has mounted by now.
            thread.fork_cursor = episode.engine.fork(thread.cursor)
    config = episode.config
    rule = {} if config.position == "jump" else {"position": config.position}
    if config.exchange != "mount":
        rule["exchange"] = config.exchange
    for source in agenda.sources.values():
        if config.deterministic:
            episode.engine.mount(thread.cursor, source.cursor, **rule)
        else:
            # The source may be writing: what it had closed stands at its boundary.
            episode.engine.mount(thread.cursor, source.boundary, source.origin, **rule)
    agenda.sources.clear()


def _rewind(episode: Episode, thread: Thread, agenda: Agenda) -> None:
    if agenda.rewind_to is None:
        return
    thread.go_back(agenda.rewind_to)
    episode.engine.rewind(thread.cursor, thread.num_tokens)
    keep_boundary(episode, thread)


def _reply(episode: Episode, thread: Thread, agenda: Agenda) -> None:
    """Feed the results of a turn, with a warning where the next turn is the last."""
    if thread.last_turn == "summary":
        _restart(episode, thread)
        return
    if not agenda.results:  # a child in a fresh context: it has its prompt and called nothing yet
        thread.agenda = None
        start(episode, thread)
        return
    config = episode.config
    closed, thinking = True, False
    if thread.snapshots:
        closed, thinking = thread.snapshots[-1].closed, thread.snapshots[-1].thinking
    make = partial(episode.chat.tool_ids, closed=closed, thinking=thinking)
    room = config.window - thread.num_own
    tokens = make(agenda.results)
    thread.last_turn = None
    if thread.num_turns + 1 >= config.max_turns:
        thread.last_turn = "turns"
    elif room - len(tokens) <= config.reserve:
        thread.last_turn = "summary" if config.agent == "compact" else "tokens"
    if thread.last_turn is not None:
        warning = Result(WARNINGS[thread.last_turn])
        room -= config.reserve // 2
        tokens = make([*agenda.results, warning], room=room)
        if len(tokens) > room:  # so many results that their frames alone fill it
            tokens = make([warning])
    _submit(episode, thread, tokens)
    # Spans that are stepped through follow one another in the order in which they were read.
    in_turn = config.position == "reencode" or config.exchange == "splice"
    mounts = agenda.mounts if in_turn else sorted(agenda.mounts)
    thread.fed = Fed(tokens, mounts, sorted(agenda.pasted), episode.time())
    thread.agenda = None
    release(episode, thread, "fork_cursor")


def _restart(episode: Episode, thread: Thread) -> None:
    """Let a thread go on after a prompt of its question and the summary that it has just written.

    The new prompt is a root of its own in the trace; the thread's turns go on counting. Where even
    that prompt leaves no more of the window than the reserve, the next turn is the last one.
    """
    assert thread.head is not None, "a summary was written"
    summary = episode.chat.words(episode.recorder.tokens([thread.head]))
    prompt = episode.chat.prompt(episode.example, more=f"summary of your work so far:\n{summary}")
    cursor = episode.engine.open(prompt)
    release(episode, thread, *CURSORS)
    thread.cursor, thread.agenda = cursor, None
    thread.leave_context()
    episode.write_prompt(thread, prompt)
    episode.note("restart", thread, segment=thread.head)
    start(episode, thread)


def _submit(episode: Episode, thread: Thread, tokens: list[int]) -> None:
    """Feed tokens and let the thread write its next turn, inside its budget."""
    config = episode.config
    if thread.num_turns >= config.max_turns:
        raise BudgetExceeded("turns")
    room = config.window - thread.num_own - len(tokens)
    if thread.last_turn is None:
        room -= config.reserve
    if room < 1:
        raise BudgetExceeded("tokens")
    sampling = config.sampling(
        seed=draw_seed(episode.identity, thread), max_tokens=min(config.max_new_tokens, room)
    )
    thread.ticket = episode.engine.submit(
        thread.cursor, tokens, sampling, until=episode.chat.stop_ids
    )
    episode.tickets[thread.ticket] = (episode, thread)
