"""Branch credit: what the episode's answer owes to each branch (DESIGN §5).

`leave_one_branch_out` adds λ (Δ_b − mean Δ) to the advantage of the tokens of branch b. Δ_b is what
the episode has more with b than without it:

- `score`: the log-probability of the first gold answer at the root's commit, once after the episode
  as it was and once with the mounts of b, and of the threads below it, dropped; in nats, clipped to
  [−1, 1]. The root's own text stays, so what it has copied from b counts for nobody: a lower bound.
  All versions of an episode share one packed row.
- `resample`: R(τ) − R(τ without b). The episode is run again with reads of b refused; the root's
  turns after its first mount of b, or of what a thread wrote that had mounted b, are drawn again.
  All other turns are those of the record, also where their thread is now told that b is not there.

A branch without which the root would have seen the same has Δ = 0 and costs nothing. An episode
whose root committed nothing, or whose question has no gold answer, has no branch credit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octopus_trl.agent.plain import PlainText
from octopus_trl.agent.replay import ReplayEngine
from octopus_trl.agent.rollout import EpisodeRunner
from octopus_trl.maths import objective
from octopus_trl.trace import Trace
from octopus_trl.train.branches import (
    Counterfactual,
    answer_place,
    branches_of,
    commit_of,
    counterfactual,
    read_branches,
    turns_after_reading,
)
from octopus_trl.train.meter import Meter
from octopus_trl.train.rows import Tree

MOST_NATS = 1.0  # a change of log-probability counts up to this, either way
RESAMPLE_SEED = 7919  # keeps the draws of counterfactual episodes apart from those that train
MEANS = (
    "credit/change",
    "credit/clipped_share",
    "credit/added_abs",
    "credit/read_share",
    "credit/scored_share",
)

Changes = dict[int, float]


class BranchCredit:
    """The part of the trainer that looks inside a tree."""

    accelerator: Any
    args: Any
    state: Any
    _corpus: Any
    _judge: Any
    _metrics: Any
    _pending_extra_logs: Any
    _pending_metrics: Any
    _policy: Any
    _score_trees: Any
    _temperature: Any
    _tokenizer: Any

    def _credit_branches(
        self, inputs: Sequence[Mapping[str, Any]], traces: Sequence[Trace], size: int
    ) -> list[list[Changes]]:
        """Give, group by group, what is added to the advantage of each thread's tokens.

        Every rank must call it: scoring and rewarding are collective.
        """
        began = time.perf_counter()
        if self.args.credit_estimator == "score":
            found, limit = self._changes_by_score(inputs, traces), MOST_NATS
        else:
            found, limit = self._changes_by_resampling(inputs, traces), None
        meter = Meter(MEANS)
        added_to = []
        for trace, changes in zip(traces, found, strict=True):
            branches = branches_of(trace) if changes is not None else []
            values = torch.tensor([(changes or {}).get(branch, 0.0) for branch in branches])
            added = objective.branch_credits(
                values.double(), weight=self.args.credit_weight, limit=limit
            )
            added_to.append(dict(zip(branches, added.tolist(), strict=True)))
            meter.add("credit/scored_share", changes is not None, 1)
            meter.add("credit/change", values.sum().item(), len(branches))
            if limit is not None:
                clipped = int((values.abs() > limit).sum())
                meter.add("credit/clipped_share", clipped, len(branches))
            meter.add("credit/added_abs", added.abs().sum().item(), len(branches))
            meter.add("credit/read_share", len(changes or {}), len(branches))
        for name, value in meter.reduce(self.accelerator).items():
            self._metrics["train"][name].append(value)
        self._metrics["train"]["time/credit_s"].append(time.perf_counter() - began)
        return [added_to[at : at + size] for at in range(0, len(added_to), size)]

    def _changes_by_score(
        self, inputs: Sequence[Mapping[str, Any]], traces: Sequence[Trace]
    ) -> list[Changes | None]:
        plain = PlainText(self._tokenizer)
        made = [self._without_branches(row, t, plain) for row, t in zip(inputs, traces)]
        trees = [Tree(each.trace, 0.0) for each in made if each is not None]
        scored: Mapping[int, Tensor] = self._score_trees(trees, self._temperature["train"])
        return [
            None if each is None or id(each.trace) not in scored else _changes(each, scored)
            for each in made
        ]

    def _without_branches(
        self, example: Mapping[str, Any], trace: Trace, plain: PlainText
    ) -> Counterfactual | None:
        commit, gold = commit_of(trace), first_gold(example)
        if commit is None or gold is None:
            return None
        place = answer_place(commit.tokens, gold, decode=self._decode, encode=plain.encode)
        return None if place is None else counterfactual(trace, *place)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _changes_by_resampling(
        self, inputs: Sequence[Mapping[str, Any]], traces: Sequence[Trace]
    ) -> list[Changes | None]:
        jobs = [
            (index, branch)
            for index, trace in enumerate(traces)
            if trace.reward is not None
            for branch in read_branches(trace)
        ]
        examples = [inputs[index] for index, _ in jobs]
        again = self._run_without(examples, [traces[index] for index, _ in jobs], jobs)
        rewards = self._reward_counterfactuals(examples, again, inputs[0], traces[0])
        found: list[Changes | None] = [
            {} if trace.reward is not None and commit_of(trace) is not None else None
            for trace in traces
        ]
        for (index, branch), reward in zip(jobs, rewards, strict=True):
            changes, with_it = found[index], traces[index].reward
            if changes is not None and with_it is not None:
                # Both through R = 2y − 1; a counterfactual that nobody judged counts as no change.
                changes[branch] = 0.0 if math.isnan(reward) else 2 * (with_it - reward)
        return found

    def _run_without(
        self,
        examples: Sequence[Mapping[str, Any]],
        records: Sequence[Trace],
        jobs: Sequence[tuple[int, int]],
    ) -> list[Trace]:
        """Run each episode again with one branch that nobody may read."""

        drawn = [turns_after_reading(t, b) for t, (_, b) in zip(records, jobs, strict=True)]

        def run(engine: Any) -> list[Trace]:
            replay = ReplayEngine(engine, records, drawn)
            config = self.args.rollout_config()
            runner = EpisodeRunner(replay, self._tokenizer, self._corpus, config)
            return runner.run(
                examples,
                seed=self.args.seed + RESAMPLE_SEED,
                step=self.state.global_step,
                unreadable=[{branch} for _, branch in jobs],
            )

        again: list[Trace] = self._policy.run(self.state.global_step, run)
        return again

    def _reward_counterfactuals(
        self,
        examples: Sequence[Mapping[str, Any]],
        again: Sequence[Trace],
        spare_example: Mapping[str, Any],
        spare: Trace,
    ) -> list[float]:
        """Reward counterfactual episodes, NaN where no function judged one.

        Rewards are gathered over ranks, so that a rank with fewer adds an episode that it has.
        """
        count = len(again)
        if self.accelerator.num_processes > 1:
            counts = torch.tensor([count], device=self.accelerator.device)
            count = int(self.accelerator.gather(counts).max())
        if count == 0:
            return []
        more = count - len(again)
        rewards = self._judge([*examples, *[spare_example] * more], [*again, *[spare] * more])[0]
        # What reward functions note down belongs to the episodes that train.
        self._pending_extra_logs.clear()
        self._pending_metrics.clear()
        first = self.accelerator.process_index * count
        own: list[float] = rewards[first : first + len(again)].tolist()
        return own


def first_gold(example: Mapping[str, Any]) -> str | None:
    """Give the first gold answer of a question, None where it has none."""
    gold = example.get("answers")
    if gold is None:
        gold = example.get("answer")
    if isinstance(gold, str):
        return gold.strip() or None
    golds = [one for one in gold or () if isinstance(one, str) and one.strip()]
    return golds[0].strip() if golds else None


def _changes(made: Counterfactual, scored: Mapping[int, Tensor]) -> Changes:
    """Subtract the answer's log-probability without each branch from that with all of them."""
    logps = scored[id(made.trace)]
    order = sorted(made.answers.values())
    lengths = [len(made.trace.segments[segment].tokens) for segment in order]
    sums = dict(zip(order, (part.sum().item() for part in logps.split(lengths)), strict=True))
    whole = sums[made.answers[None]]
    return {
        branch: whole - sums[segment]
        for branch, segment in made.answers.items()
        if branch is not None
    }
