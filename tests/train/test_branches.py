"""An episode without a branch: the packed versions against a brute-force re-scoring of each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from octopus_trl import prepare_model, score_traces
from octopus_trl.agent.plain import PlainText
from octopus_trl.trace import Segment, Trace
from octopus_trl.train.branches import (
    answer_place,
    below,
    branches_of,
    changed_segments,
    commit_of,
    counterfactual,
    read_branches,
)
from tests.agent.fakes import byte_tokenizer, xml_call
from tests.oracles import brute_logps
from tests.tiny import SHORT_LENGTHS, random_trace, tiny_dense, tiny_hybrid
from tests.tolerances import LOGP

LEAD, ANSWER = [5, 6, 7], [11, 12, 13, 14]


def answered(seed: int, reads: int = 1) -> Trace:
    """Draw an episode whose root reads some branches and then commits."""
    trace = random_trace(seed, steps=45, roots=1, lengths=SHORT_LENGTHS)
    root, end = trace.threads[0], trace.threads[0].head
    assert end is not None
    seen = set()
    node: int | None = end
    while node is not None:
        seen |= {node, *trace.segments[node].mounts}
        node = trace.segments[node].parent
    spans = [
        [s.id for s in trace.segments if s.thread == branch and s.id not in seen]
        for branch in branches_of(trace)
    ]
    mounts = sorted(m for span in spans[:reads] for m in span)
    at = len(trace.segments)
    trace.segments.append(Segment(at, 0, end, "tool", [3, 4], mounts))
    trace.segments.append(Segment(at + 1, 0, at, "action", [*LEAD, 9, 9]))
    root.status, root.head = "committed", at + 1
    return trace.place().check()


def without(trace: Trace, branch: int | None) -> Trace:
    """Copy an episode with a branch's mounts dropped and another answer, by definition."""
    made = copy.deepcopy(trace)
    threads = set() if branch is None else {branch}
    for thread in made.threads:  # parents come first
        if thread.parent in threads:
            threads.add(thread.id)
    for segment in made.segments:
        segment.mounts = [m for m in segment.mounts if trace.segments[m].thread not in threads]
    made.segments[-1].tokens = [*LEAD, *ANSWER]
    return made


def brute(model: Any, trace: Trace, branch: int | None) -> float:
    with torch.no_grad():
        scores = brute_logps(model, without(trace, branch))
    return float(scores[-1][len(LEAD) :].double().sum())


def packed(model: Any, trace: Trace) -> dict[int | None, float]:
    made = counterfactual(trace, LEAD, ANSWER)
    with torch.no_grad():
        (scores,) = score_traces(model, [made.trace])
    return {key: scores[segment].double().sum().item() for key, segment in made.answers.items()}


@pytest.mark.parametrize("seed", range(6))
def test_every_version_equals_the_brute_force_over_the_dag_without_that_branch(seed: int) -> None:
    trace = answered(seed)
    stock = tiny_hybrid(seed)
    found = packed(prepare_model(tiny_hybrid(seed)), trace)
    branches: Sequence[int | None] = [None, *branches_of(trace)]
    assert set(found) == {None, *read_branches(trace)}
    for branch in branches:
        expected = brute(stock, trace, branch)
        assert found.get(branch, found[None]) == pytest.approx(expected, abs=LOGP * len(ANSWER))


@pytest.mark.parametrize(
    ("exchange", "position"), [("mount", "rerotate"), ("splice", "jump"), ("splice", "rerotate")]
)
def test_versions_follow_the_episodes_own_way_of_reading(exchange: str, position: str) -> None:
    trace = replace(answered(3), exchange=exchange, position=position).place().check()
    assert counterfactual(trace, LEAD, ANSWER).trace.exchange == exchange
    stock = tiny_hybrid(3)
    found = packed(prepare_model(tiny_hybrid(3)), trace)
    assert len(found) > 1
    for branch, value in found.items():
        assert value == pytest.approx(brute(stock, trace, branch), abs=LOGP * len(ANSWER))
    plain = packed(prepare_model(tiny_hybrid(3)), replace(trace, exchange="mount", position="jump"))
    assert abs(plain[None] - found[None]) > 1e-3


def test_on_a_dense_model_whose_mounts_reach_all_layers_but_one() -> None:
    trace = answered(1)
    model = prepare_model(tiny_dense(0), mount_layers=[1, 2, 3])
    stock = tiny_dense(0)
    found = packed(model, trace)
    with torch.no_grad():
        for branch, value in found.items():
            scores = brute_logps(stock, without(trace, branch), mount_layers=[1, 2, 3])
            expected = scores[-1][len(LEAD) :].double().sum().item()
            assert value == pytest.approx(expected, abs=LOGP * len(ANSWER))


def test_the_cases_hold_read_and_unread_branches_and_reads_through_others() -> None:
    read = unread = through = nested = 0
    for seed in range(6):
        trace = answered(seed)
        ids = set(read_branches(trace))
        read += len(ids)
        unread += len(branches_of(trace)) - len(ids)
        own = set(trace.segments[-2].mounts)
        direct = {trace.segments[m].thread for m in own}
        through += len(ids - direct)
        nested += sum(len(below(trace, branch)) > 1 for branch in ids)
    assert min(read, unread, through, nested) > 0


def test_a_version_copies_only_what_its_branch_changes() -> None:
    trace = answered(0)
    made = counterfactual(trace, LEAD, ANSWER).trace
    most = len(trace.segments) + 2
    for branch in read_branches(trace):
        most += len(changed_segments(trace, branch)) + 2
    assert len(made.segments) <= most
    assert sum(s.kind == "action" for s in made.segments) == 1 + len(read_branches(trace))
    for segment in made.segments:
        assert all(edge < segment.id for edge in [*segment.mounts, segment.parent or 0] if edge)


def test_a_branch_that_only_another_lost_branch_read_changes_nothing_more() -> None:
    segments = [
        Segment(0, 0, None, "prompt", [1, 2]),
        Segment(1, 0, 0, "action", [3]),
        Segment(2, 1, 1, "tool", [4]),
        Segment(3, 1, 2, "action", [5]),
        Segment(4, 2, 1, "tool", [6], mounts=[2, 3]),
        Segment(5, 2, 4, "action", [7]),
        Segment(6, 0, 1, "tool", [8], mounts=[4, 5]),
        Segment(7, 0, 6, "action", [9, 9]),
    ]
    trace = Trace("e", "p", segments=segments)
    trace = Trace.from_dict(
        {
            **trace.to_dict(),
            "threads": [
                {"id": 0, "parent": None, "task": "", "status": "committed", "head": 7},
                {"id": 1, "parent": 0, "task": "", "status": "cut", "head": 3},
                {"id": 2, "parent": 0, "task": "", "status": "cut", "head": 5},
            ],
        }
    ).place()
    trace.check()
    assert read_branches(trace) == [1, 2]
    assert changed_segments(trace, 1) == {4, 5, 6, 7}
    assert changed_segments(trace, 2) == {6, 7}


@pytest.mark.parametrize("status", ["cut", "running", "failed"])
def test_an_episode_that_committed_nothing_has_no_place_for_an_answer(status: str) -> None:
    trace = answered(0)
    trace.threads[0].status = status
    assert commit_of(trace) is None
    assert read_branches(trace) == []


JSON = '<tool_call>\n{"name": "commit", "arguments": {"result": "wrong"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("said", "gold", "spelled"),
    [
        (xml_call("commit", result="wrong"), "the gate", "the gate"),
        (xml_call("done", result="parameter=result"), "the gate", "the gate"),
        (xml_call("commit", result=""), "the gate", "the gate"),
        (JSON, 'a "b" c', 'a \\"b\\" c'),
    ],
)
def test_the_answer_takes_the_place_of_what_was_committed(
    said: str, gold: str, spelled: str
) -> None:
    tokenizer = byte_tokenizer(merges=[(">", "Ċ"), ("t", "h"), (":", "Ġ")])
    plain = PlainText(tokenizer)
    tokens = tokenizer.encode(f"so {said}<|im_end|>")
    place = answer_place(tokens, gold, decode=tokenizer.decode, encode=plain.encode)
    assert place is not None
    lead, answer = place
    assert tokens[: len(lead)] == lead
    text = tokenizer.decode([*lead, *answer])
    assert text.endswith(("<parameter=result>\n", '"result": "')[said is JSON] + spelled)


def test_a_token_that_spans_the_border_is_spelled_again() -> None:
    tokenizer = byte_tokenizer(merges=[('"', "(")])
    tokens = tokenizer.encode(JSON.replace("wrong", "(wrong)"))
    place = answer_place(
        tokens, "gate", decode=tokenizer.decode, encode=PlainText(tokenizer).encode
    )
    assert place is not None
    assert tokenizer.decode(place[0]).endswith('"result": ')
    assert tokenizer.decode(place[1]) == '"gate'


@pytest.mark.parametrize(("said", "gold"), [("no call", "gate"), (JSON, "")])
def test_without_a_result_or_a_gold_answer_there_is_no_place(said: str, gold: str) -> None:
    tokenizer = byte_tokenizer()
    found = answer_place(
        tokenizer.encode(said), gold, decode=tokenizer.decode, encode=tokenizer.encode
    )
    assert found is None
