"""Branch credit in the trainer: measured as brute force measures it, added where it belongs."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from octopus_trl import score_traces
from octopus_trl.agent.replay import ReplayEngine
from octopus_trl.agent.reward import exact_match
from octopus_trl.agent.rollout import EpisodeRunner, RolloutConfig
from octopus_trl.maths import objective
from octopus_trl.trace import Segment, Trace
from octopus_trl.train import credit
from octopus_trl.train.branches import branches_of, turns_after_reading
from octopus_trl.train.credit import BranchCredit, first_gold
from octopus_trl.train.trainer import OctopusGRPOTrainer
from tests.agent.fakes import Script, ScriptedEngine, byte_tokenizer, xml_call
from tests.oracles import brute_logps
from tests.tiny import SHORT_LENGTHS, random_trace, tiny_hybrid
from tests.train.runs import Gradients, difference, logged, make_trainer, tokenizer

ROWS = [{"id": f"q{index}", "question": "which?", "answers": ["QUARRY"]} for index in range(2)]
CREDIT: dict[str, Any] = {"credit": "leave_one_branch_out", "credit_weight": 0.5}


def episode(seed: int, *, commits: bool = True) -> Trace:
    """Draw an episode whose root reads a branch and commits "GATE" in the small world's tongue."""
    trace = random_trace(
        seed, steps=45, roots=1, lengths=SHORT_LENGTHS, logps=True, vocab_size=1024, prompt=[3, 4]
    )
    root, end = trace.threads[0], trace.threads[0].head
    assert end is not None
    seen: set[int] = set()
    node: int | None = end
    while node is not None:
        seen |= {node, *trace.segments[node].mounts}
        node = trace.segments[node].parent
    first = branches_of(trace)[0]
    mounts = [s.id for s in trace.segments if s.thread == first and s.id not in seen]
    at = len(trace.segments)
    words = tokenizer().encode(xml_call("commit", result="GATE"), add_special_tokens=False)
    trace.segments.append(Segment(at, 0, end, "tool", [3, 4], mounts))
    trace.segments.append(
        Segment(at + 1, 0, at, "action", [*words, 1], logps=[-1.0] * (len(words) + 1))
    )
    root.status, root.head = "committed" if commits else "cut", at + 1
    trace.truncated = not commits
    trace.meta = {"rollout": seed % 2, "result": "GATE"}
    return trace.place().check()


@contextmanager
def episodes(**options: Any) -> Iterator[None]:
    def run(self: Any, inputs: list[Any], size: int, mode: str) -> list[Trace]:
        return [episode(index, **options) for index in range(len(inputs))]

    with mock.patch.object(OctopusGRPOTrainer, "_run_episodes", run):
        yield


def generate(out: Path, commits: bool = True, **settings: Any) -> tuple[Any, dict[str, Any]]:
    trainer = make_trainer(out, None, ROWS, **{**CREDIT, **settings})
    trainer.model.train()
    with episodes(commits=commits):
        batch = trainer._generate_and_score_completions([r for r in ROWS for _ in range(2)])
    return trainer, batch


def brute_change(model: Any, trace: Trace, branch: int) -> float:
    """Score the gold answer with and without a branch's mounts on the stock model."""
    spelled = tokenizer().encode("QUARRY", add_special_tokens=False)
    lead = tokenizer().encode(
        xml_call("commit", result="").removesuffix("\n</parameter>\n</function>\n</tool_call>"),
        add_special_tokens=False,
    )
    sums = []
    for lost in ({-1}, {branch}):
        made = copy.deepcopy(trace)
        for thread in made.threads:
            if thread.parent in lost:
                lost.add(thread.id)
        for segment in made.segments:
            segment.mounts = [m for m in segment.mounts if trace.segments[m].thread not in lost]
        made.segments[-1].tokens = [*lead, *spelled]
        with torch.no_grad():
            sums.append(brute_logps(model, made)[-1][len(lead) :].double().sum().item())
    return sums[0] - sums[1]


def test_credit_by_score_is_that_of_the_brute_force_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = tiny_hybrid(0, vocab_size=1024, eos_token_id=tokenizer().eos_token_id)
    changes = [
        {branch: brute_change(stock, trace, branch) for branch in branches_of(trace)}
        for trace in map(episode, range(4))
    ]
    sizes = sorted(abs(value) for each in changes for value in each.values() if abs(value) > 1e-3)
    assert len(sizes) > 3
    limit = sum(sizes[len(sizes) // 2 - 1 :][:2]) / 2  # between two of them: some are clipped
    assert credit.MOST_NATS == 1.0
    monkeypatch.setattr(credit, "MOST_NATS", limit)
    trainer, batch = generate(tmp_path, peft_config=None)
    found = [added for group in batch["credits"] for added in group]
    for added, by_branch in zip(found, changes, strict=True):
        expected = torch.tensor(list(by_branch.values())).double().clamp(-limit, limit)
        expected = 0.5 * (expected - expected.mean())
        assert list(added) == list(by_branch)
        assert list(added.values()) == pytest.approx(expected.tolist(), abs=1e-4)
        assert sum(added.values()) == pytest.approx(0.0, abs=1e-12)
    figures = trainer._metrics["train"]
    every = [value for each in changes for value in each.values()]
    clipped = sum(abs(value) > limit for value in every)
    assert 0 < clipped < len(every)
    assert figures["credit/clipped_share"] == [pytest.approx(clipped / len(every))]
    assert figures["credit/change"] == [pytest.approx(sum(every) / len(every), abs=1e-4)]
    assert figures["credit/scored_share"] == [1.0]
    assert 0 < figures["credit/read_share"][0] <= 1


def test_credit_is_added_to_the_advantage_of_its_branch_alone(tmp_path: Path) -> None:
    keep = Gradients()
    trainer, batch = generate(tmp_path / "a", importance_weight_cap=None)
    total = torch.zeros(())
    for index, group in enumerate(batch["groups"]):
        for rollout, trace in enumerate(group):
            (scores,) = score_traces(trainer.model, [trace])
            own = [s for s in trace.segments if s.kind == "action"]
            weights = torch.cat(
                [
                    torch.full(
                        (len(s.tokens),),
                        batch["advantages"][index, rollout].item()
                        + batch["credits"][index][rollout].get(s.thread, 0.0),
                    )
                    for s in own
                ]
            )
            logps = torch.cat([scores[s.id] for s in own])
            total = total - (weights * logps).sum() / trace.num_owned / 4
    total.backward()
    expected = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    again = make_trainer(
        tmp_path / "b", None, ROWS, callbacks=[keep], importance_weight_cap=None, **CREDIT
    )
    with episodes():
        again.train()
    assert difference(keep.steps[0], expected) < 2e-5


def test_a_weight_of_zero_changes_no_bit_of_the_gradient(tmp_path: Path) -> None:
    steps = []
    cases: dict[str, dict[str, Any]] = {"plain": {}, "zero": {**CREDIT, "credit_weight": 0.0}}
    for name, settings in cases.items():
        keep = Gradients()
        trainer = make_trainer(tmp_path / name, None, ROWS, callbacks=[keep], **settings)
        with episodes():
            trainer.train()
        steps.append(keep.steps[0])
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])


def test_a_group_of_equal_rewards_still_learns_from_its_branches(tmp_path: Path) -> None:
    def equal(completions: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    keep = Gradients()
    trainer = make_trainer(tmp_path, None, ROWS, reward=equal, callbacks=[keep], **CREDIT)
    with episodes():
        trainer.train()
    assert any(gradient.any() for gradient in keep.steps[0].values())
    assert logged(trainer, "credit/added_abs")[0] > 0


def test_an_episode_that_committed_nothing_has_no_branch_credit(tmp_path: Path) -> None:
    trainer, batch = generate(tmp_path, commits=False)
    assert batch["credits"] == [[{}, {}], [{}, {}]]
    assert trainer._metrics["train"]["credit/scored_share"] == [0.0]


@pytest.mark.parametrize(
    ("example", "gold"),
    [
        ({"answers": ["a", "b"]}, "a"),
        ({"answers": ["", " b "]}, "b"),
        ({"answer": "a"}, "a"),
        ({"answer": "", "answers": None}, None),
        ({}, None),
    ],
)
def test_the_first_gold_answer_is_taken(example: dict[str, Any], gold: str | None) -> None:
    assert first_gold(example) == gold


# ---- resampling, on a scripted engine: thread 1 knows, thread 2 misleads

WORDS = byte_tokenizer()
CONFIG = RolloutConfig(window=3000, compact_tools=True, tool_workers=0)
FORKS = "\n".join(xml_call("fork", task=f"part {part}") for part in (1, 2, 3))
READS = "\n".join(xml_call("read_thread", thread_id=thread) for thread in (1, 2))


class Answers(Script):
    """The root's answer depends on which reads were refused; nobody reads thread 3."""

    def __call__(self, chain: Any, sampling: Any) -> list[int]:
        text = WORDS.decode(chain())
        if "you are thread" not in text and "mounted" in text.rsplit("<|im_start|>user", 1)[1]:
            right = "thread 1 cannot be read" not in text
            said = xml_call("commit", result="gate" if right else "wall")
            return [*WORDS.encode(said), WORDS.eos_token_id]
        return super().__call__(chain, sampling)


class Alone(BranchCredit):
    """The credit part of a trainer, of one process, over a scripted engine."""

    def __init__(self) -> None:
        self.script = Answers(WORDS, {0: [FORKS, xml_call("wait_threads"), READS]})
        self.engine = ScriptedEngine(self.script)
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0)
        self.args = SimpleNamespace(
            credit_estimator="resample", credit_weight=0.1, seed=0, rollout_config=lambda: CONFIG
        )
        self.state = SimpleNamespace(global_step=0)
        self._corpus, self._tokenizer = None, WORDS
        self._metrics: Any = defaultdict(lambda: defaultdict(list))
        self._pending_extra_logs: Any = {"noted": 1}
        self._pending_metrics: Any = {"noted": 1}
        self._policy = SimpleNamespace(run=lambda version, call: call(self.engine))
        self.judged = 0

    def _judge(self, inputs: Any, traces: Any) -> tuple[torch.Tensor]:
        self.judged += len(traces)
        texts = [trace.meta["result"] for trace in traces]
        rewards = exact_match(texts, answers=[row["answers"] for row in inputs])
        return (torch.tensor(rewards, dtype=torch.float64),)


def test_credit_by_resampling_is_the_reward_that_is_lost_without_a_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[set[int]] = []

    class Noted(ReplayEngine):
        def __init__(self, engine: Any, traces: Any, again: Any) -> None:
            drawn.extend(again)
            super().__init__(engine, traces, again)

    monkeypatch.setattr(credit, "ReplayEngine", Noted)
    alone = Alone()
    example = {"id": "q", "question": "which?", "answers": ["gate"]}
    runner = EpisodeRunner(alone.engine, WORDS, None, CONFIG)
    traces = runner.run([example])
    assert traces[0].meta["result"] == "gate"
    traces[0].reward = 1.0
    sampled = len(alone.engine.sampled)
    (found,) = alone._credit_branches([example], traces, 1)
    # R = 2y − 1: without thread 1 it falls from 1 to -1; without 2 and 3 nothing changes.
    expected = objective.branch_credits(torch.tensor([2.0, 0.0, 0.0]), weight=0.1)
    assert found == [dict(zip((1, 2, 3), expected.tolist(), strict=True))]
    last = max(s.id for s in traces[0].segments if s.kind == "action")
    assert drawn == [turns_after_reading(traces[0], branch) for branch in (1, 2)] == [{last}] * 2
    # Two branches were read: two runs, of which the root's last turn alone was drawn.
    assert alone.judged == 2
    assert len(alone.engine.sampled) - sampled == 2
    assert alone.engine.num_open == 0
    assert not alone._pending_extra_logs
    assert not alone._pending_metrics


def test_an_episode_without_a_reward_is_not_run_again() -> None:
    alone = Alone()
    example = {"id": "q", "question": "which?", "answers": ["gate"]}
    traces = EpisodeRunner(alone.engine, WORDS, None, CONFIG).run([example])
    assert alone._credit_branches([example], traces, 1) == [[{}]]
    assert alone.judged == 0


def test_a_counterfactual_that_nobody_judged_changes_nothing_and_no_metric() -> None:
    class Unjudged(Alone):
        def _judge(self, inputs: Any, traces: Any) -> tuple[torch.Tensor]:
            return (torch.full((len(traces),), float("nan"), dtype=torch.float64),)

    alone = Unjudged()
    example = {"id": "q", "question": "which?", "answers": ["gate"]}
    traces = EpisodeRunner(alone.engine, WORDS, None, CONFIG).run([example])
    traces[0].reward = 1.0
    assert alone._credit_branches([example], traces, 1) == [[{1: 0.0, 2: 0.0, 3: 0.0}]]
    assert alone._metrics["train"]["credit/change"] == [0.0]
