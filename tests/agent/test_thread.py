"""The books of one thread, and the segments of one episode as they are written."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octopus_trl.agent.recorder import Recorder
from octopus_trl.agent.thread import Thread, draw_seed, waits_on
from octopus_trl.maths import dag
from octopus_trl.trace import ThreadRecord, Trace


def thread_of(index: int, parent: Thread | None = None) -> Thread:
    return Thread(index, parent, f"task {index}", 0 if parent is None else parent.depth + 1)


def test_going_back_restores_head_tokens_and_live_chain() -> None:
    thread = thread_of(1)
    thread.base_tokens = thread.num_tokens = 10
    segment = 5
    for turn in range(4):
        for length in (3, 4):
            thread.append(segment, length)
            segment += 1
        thread.take_snapshot(closed=turn != 2, thinking=False)
    assert (thread.turn, thread.num_own) == (3, 28)
    thread.go_back(1)
    assert (thread.head, thread.num_tokens, thread.num_own) == (8, 24, 14)
    assert thread.live == [5, 6, 7, 8]
    assert thread.turn == 1
    thread.append(20, 2)
    thread.take_snapshot(closed=True, thinking=False)
    assert thread.live == [5, 6, 7, 8, 20]
    assert thread.turn == 2, "turns count along the live chain, as the thread sees it"


def test_waits_are_followed_through_waiting_threads_only() -> None:
    threads = {index: thread_of(index) for index in range(5)}
    for index, awaited in ((1, {2}), (2, {3, 4})):
        threads[index].status = "waiting"
        threads[index].waiting_for = frozenset(awaited)
    assert waits_on(threads, threads[1], threads[4])
    assert waits_on(threads, threads[1], threads[1])
    assert not waits_on(threads, threads[1], threads[0])
    assert not waits_on(threads, threads[4], threads[1])


def test_no_two_turns_of_a_run_share_a_seed() -> None:
    seeds = set()
    count = 0
    for seed in range(2):
        for step in range(2):
            for prompt_id in ("a", "1", "b"):
                for rollout in range(3):
                    identity = {
                        "seed": seed,
                        "step": step,
                        "prompt_id": prompt_id,
                        "rollout": rollout,
                    }
                    for index in range(3):
                        thread = thread_of(index)
                        for turn in range(3):
                            thread.num_turns = turn
                            value = draw_seed(identity, thread)
                            assert 0 <= value < 2**63
                            seeds.add(value)
                            count += 1
    assert len(seeds) == count


@pytest.mark.parametrize("seed", range(12))
def test_a_recorder_follows_the_traces_own_rules(seed: int) -> None:
    rng = random.Random(seed)
    recorder = Recorder()
    recorder.add(0, None, "prompt", [1] * rng.randint(1, 9))
    for index in range(1, 30):
        parent = rng.randrange(index)
        seen = recorder.visible(parent)
        free = [other for other in range(index) if other not in seen]
        mounts = sorted(rng.sample(free, min(len(free), rng.choice((0, 0, 1, 3)))))
        recorder.add(0, parent, "tool", [index] * rng.randint(1, 7), mounts=mounts)
    trace = Trace("e", "p", segments=recorder.segments, threads=[ThreadRecord(0, None)])
    trace.check()
    see = dag.visible_matrix(trace.parents, trace.mounts)
    for segment in range(30):
        want = set(np.flatnonzero(see[segment])) | {segment}
        assert recorder.visible(segment) == want


def test_a_reader_goes_on_past_the_highest_mounted_position() -> None:
    recorder = Recorder()
    root = recorder.add(0, None, "prompt", [0] * 1500)
    sibling = recorder.add(1, root, "tool", [0] * 2501)
    reader = recorder.add(2, root, "action", [0] * 500)
    answer = recorder.add(2, reader, "tool", [0], mounts=[sibling])
    assert recorder.segments[sibling].end == 4001, "1,500 to 4,000 with inclusive ends"
    assert recorder.segments[answer].start == 4001, "the paper's example of Eq. 2"
