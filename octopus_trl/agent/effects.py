"""What each call does to the threads of its episode, and the text that it returns.

The functions decide on the host alone, against segments that are closed; the episode then carries
out mounts and rewinds on the engine, in an order that no decision depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from octopus_trl.agent.chat import Turn
from octopus_trl.agent.pool import PoolCall
from octopus_trl.agent.thread import Agenda, Thread, waits_on
from octopus_trl.agent.tools import (
    BY_NAME,
    CORPUS_TOOLS,
    Result,
    ToolCall,
    bind,
    canonical,
    wait_text,
)
from octopus_trl.errors import IntegrityError, OctopusError, ToolError

if TYPE_CHECKING:
    from octopus_trl.agent.episode import Episode

ERROR = "error: "
NO_CALL = f"{ERROR}no tool call found; call a tool, or end this thread with commit(result)"
TURN_CUT = f"{ERROR}your turn was cut before its end and no call of it was run; be shorter"


def plan_turn(
    turn: Turn,
    *,
    offered: Collection[str],
    disabled: Collection[str],
    last_turn: str | None,
    launch: Callable[[ToolCall], PoolCall],
) -> Agenda:
    """Check the calls of a turn and launch those that only read the corpus.

    Args:
        offered, disabled: see `tools.bind`.
        last_turn: why this was the thread's last turn, if it was: then only `commit` counts, and
            `rewind` where it can give tokens back.
        launch: starts a call on the tool pool.
    """
    if not turn.calls:
        return Agenda(results=[Result(NO_CALL if turn.closed else TURN_CUT)])
    agenda = Agenda(names=[canonical(raw.name) for raw in turn.calls])
    last: str | None = None
    for raw in turn.calls:
        try:
            call = bind(raw, offered, disabled)
            if last is not None:
                raise ToolError(f"{call.name} refused: {last} is the last call of a turn")
            if last_turn is not None and call.name != "commit":
                if call.name != "rewind" or last_turn != "tokens":
                    raise ToolError(f"{call.name} refused: this was your last turn")
        except ToolError as error:
            agenda.calls.append(str(error))
            continue
        if call.name in CORPUS_TOOLS:
            agenda.launched[len(agenda.calls)] = launch(call)
        if BY_NAME[call.name].last:
            last = call.name
        agenda.calls.append(call)
    return agenda


def run_agenda(episode: Episode, thread: Thread, agenda: Agenda) -> bool:
    """Let the calls of a turn take effect in order.

    Returns:
        True at the end of the agenda; False where the thread now waits, or has ended.
    """
    while agenda.at < len(agenda.calls):
        call = agenda.calls[agenda.at]
        if isinstance(call, str):
            _give(agenda, Result(ERROR + call), "refused")
        elif call.name in CORPUS_TOOLS:
            _give_corpus(episode, thread, agenda)
        else:
            try:
                result = _EFFECTS[call.name](episode, thread, agenda, call)
            except ToolError as error:
                _give(agenda, Result(f"{ERROR}{error}"), "refused")
            else:
                if result is None and not thread.ended:
                    return False
                if result is not None:
                    _give(agenda, result, "ok")
        if thread.ended:
            agenda.outcomes += ["ok", *["refused"] * (len(agenda.calls) - agenda.at - 1)]
            return False
        agenda.at += 1
    return True


def awaited_have_ended(episode: Episode, thread: Thread) -> bool:
    """Whether a waiting thread may go on."""
    return all(episode.threads[awaited].ended for awaited in thread.waiting_for)


def _give(agenda: Agenda, result: Result, outcome: str) -> None:
    agenda.results.append(result)
    agenda.outcomes.append(outcome)


def _give_corpus(episode: Episode, thread: Thread, agenda: Agenda) -> None:
    pending, name = agenda.launched[agenda.at], agenda.names[agenda.at]
    if pending.outcome == "ok":
        _give(agenda, pending.value, "ok")
        return
    if pending.outcome == "refused":
        _give(agenda, Result(f"{ERROR}{pending.value}", limit=256), "refused")
        return
    text = f"{name} failed" if pending.outcome == "failed" else f"{name} took too long"
    _give(agenda, Result(f"{ERROR}{text}; try again or go another way"), pending.outcome)
    episode.note("tool", thread, tool=name, outcome=pending.outcome, error=pending.value)


def _fork(episode: Episode, thread: Thread, agenda: Agenda, call: ToolCall) -> Result:
    config, task = episode.config, call.arguments["task"].strip()
    if not task:
        raise ToolError("fork needs a task with text in it")
    if thread.depth >= config.max_depth:
        raise ToolError(f"fork refused: threads may be {config.max_depth} deep")
    if len(episode.threads) >= config.max_threads:
        raise ToolError(f"fork refused: an episode has at most {config.max_threads} threads")
    live = sum(child.parent is thread and not child.ended for child in episode.threads.values())
    if live >= config.max_children:
        raise ToolError(f"fork refused: {live} children are still live, wait for one to end")
    try:
        child = episode.new_thread(thread, task)
    except IntegrityError:
        raise
    except OctopusError as error:
        episode.note("fork_failed", thread, error=str(error))
        raise ToolError("fork failed: no room for another thread") from error
    return Result(f"forked thread {child.id}")


def _read_thread(episode: Episode, thread: Thread, agenda: Agenda, call: ToolCall) -> Result:
    target = _find(episode, call.arguments["thread_id"])
    if target is thread:
        raise ToolError("read_thread refused: you are this thread")
    if target.status == "failed":
        raise ToolError(f"read_thread refused: thread {target.id} failed")
    if any(line.id in episode.unreadable for line in target.lineage()):
        raise ToolError(f"read_thread refused: thread {target.id} cannot be read")
    if episode.config.exchange == "summary":
        return Result(wait_text([(target.id, target.status, target.result)]))
    seen = episode.recorder.visible(thread.head)
    seen.update(agenda.mounts, agenda.pasted)
    span = [segment for segment in target.live if segment not in seen]
    if not span:
        return Result(f"nothing new in thread {target.id} (status {target.status})")
    count = episode.recorder.num_tokens(span)
    episode.note("read", thread, target=target.id, tokens=count, segments=span)
    if episode.config.exchange == "transcript":
        agenda.pasted += span
        text = episode.chat.decode(episode.recorder.tokens(span))
        head = f"transcript of thread {target.id}, {count} tokens (status {target.status})"
        return Result(f"{head}\n{text}")
    agenda.mounts += span
    agenda.sources[target.id] = target
    return Result(f"mounted {count} tokens of thread {target.id} (status {target.status})")


def _wait_threads(
    episode: Episode, thread: Thread, agenda: Agenda, call: ToolCall
) -> Result | None:
    if thread.waiting_for:  # woken: its threads have ended, or the time is up
        awaited = [episode.threads[index] for index in sorted(thread.waiting_for)]
        thread.waiting_for = frozenset()
    else:
        wanted = call.arguments.get("thread_ids")
        if not wanted:
            wanted = [t.id for t in episode.threads.values() if t.parent is thread]
        if not wanted:
            raise ToolError("wait_threads refused: you have no children")
        awaited = [_find(episode, index) for index in sorted(set(wanted))]
        if thread in awaited:
            raise ToolError("wait_threads refused: you are one of these threads")
        for target in awaited:
            if waits_on(episode.threads, target, thread):
                raise ToolError(f"wait_threads refused: thread {target.id} waits for you")
        if not all(target.ended for target in awaited):
            thread.waiting_for = frozenset(target.id for target in awaited)
            thread.waiting_since = episode.clock()
            thread.status = "waiting"
            episode.note("wait", thread, targets=sorted(thread.waiting_for))
            return None
    return Result(wait_text([(target.id, target.status, target.result) for target in awaited]))


def _rewind(episode: Episode, thread: Thread, agenda: Agenda, call: ToolCall) -> Result:
    turn, note = call.arguments["turn"], call.arguments["note"].strip()
    if turn < 0:
        raise ToolError("rewind refused: turn 0 is as far back as your own part goes")
    if turn >= thread.turn:
        raise ToolError(f"rewind refused: this is turn {thread.turn}, give an earlier one")
    snapshot = thread.snapshots[turn]
    left = set(thread.live[snapshot.num_live :])
    children = [str(child.id) for child in episode.threads.values() if child.base_segment in left]
    text = f"rewound to turn {turn}; note: {note}"
    if children:
        text += f"\nthreads forked since then: {', '.join(children)}"
    agenda.rewind_to = turn
    # The note takes the place of the turn's tool text: what its other calls gave is left behind.
    agenda.results.clear()
    agenda.mounts.clear()
    agenda.pasted.clear()
    agenda.sources.clear()
    episode.note("rewind", thread, turn=thread.turn, to=turn, segment=snapshot.segment)
    return Result(text)


def _commit(episode: Episode, thread: Thread, agenda: Agenda, call: ToolCall) -> None:
    thread.result = call.arguments["result"].strip()
    episode.end(thread, "committed", result=thread.result)


def _find(episode: Episode, index: int) -> Thread:
    thread = episode.threads.get(index)
    if thread is None:
        raise ToolError(f"there is no thread {index}; the last one is {len(episode.threads) - 1}")
    return thread


_EFFECTS: dict[str, Callable[[Episode, Thread, Agenda, ToolCall], Result | None]] = {
    "fork": _fork,
    "read_thread": _read_thread,
    "wait_threads": _wait_threads,
    "rewind": _rewind,
    "commit": _commit,
}
