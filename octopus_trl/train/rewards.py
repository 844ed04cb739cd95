"""Rewards of episodes through TRL's reward functions, and the books that TRL keeps of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from octopus_trl.errors import RewardError
from octopus_trl.maths import objective
from octopus_trl.trace import Trace
from octopus_trl.train.data import as_completion, question_of
from octopus_trl.train.weights import say


class RewardBook:
    """The part of the trainer between traces and advantages."""

    accelerator: Any
    args: Any
    reward_weights: Tensor
    reward_func_names: list[str]
    state: Any
    _calculate_rewards: Any
    _logs: Any
    _metrics: Any
    _pending_extra_logs: Any
    _pending_metrics: Any
    _write_traces: Any

    def _reward_episodes(
        self, inputs: list[dict[str, Any]], traces: Sequence[Trace], size: int, mode: str
    ) -> Tensor:
        """Reward the episodes of this rank and centre each on the rest of its group.

        A_i = R_i − mean of the other G−1, R = 2y − 1 (DESIGN §5). A rollout that no reward
        function judged has no reward, is left out of its group's baseline and gets 0.

        Returns:
            [episodes] float64 on the CPU.
        """
        try:
            rewards, by_function, prompts, completions = self._judge(inputs, traces)
        except BaseException:
            self._write_traces(list(traces), f"unrewarded_{mode}")
            raise
        lo = self.accelerator.process_index * len(traces)
        own = rewards[lo : lo + len(traces)]
        for trace, reward in zip(traces, own.tolist(), strict=True):
            trace.reward = reward if reward == reward else None
        advantages = torch.zeros_like(rewards)
        if size > 1:
            advantages = objective.group_advantages(
                objective.outcome_reward(rewards), group_size=size
            )
        if self.args.mask_truncated_completions:
            cut = torch.tensor([trace.truncated for trace in traces])
            advantages[lo : lo + len(traces)].masked_fill_(cut, 0.0)
        if missing := [t.episode_id for t, r in zip(traces, own.tolist(), strict=True) if r != r]:
            say(
                f"no reward for {len(missing)} of {len(traces)} episodes, {missing[0]} first: they "
                "leave their groups and teach nothing"
            )
        self._book_rewards(by_function, rewards, size, mode)
        self._book_extras(len(traces), mode)
        if self.args.log_completions:
            self._book_completions(prompts, completions, by_function, advantages)
        self._keep_traces(list(traces), mode)
        return advantages[lo : lo + len(traces)]

    def _judge(
        self, inputs: Sequence[Mapping[str, Any]], traces: Sequence[Trace]
    ) -> tuple[Tensor, Tensor, list[Any], list[Any]]:
        """Ask every reward function; each rank gives as many episodes.

        Returns:
            Over the episodes of all ranks: summed rewards [N] float64 on the CPU, NaN where no
            function judged, and rewards by function [N, functions]; this rank's prompts and
            completions.
        Raises:
            RewardError: a function gave an infinite reward; on every rank.
        """
        prompts = [question_of(example) for example in inputs]
        completions = [
            as_completion(prompt, str(trace.meta.get("result") or ""))
            for prompt, trace in zip(prompts, traces, strict=True)
        ]
        sampled = [
            [token for s in trace.segments if s.kind == "action" for token in s.tokens]
            for trace in traces
        ]
        columns = [{**row, "traces": trace} for row, trace in zip(inputs, traces, strict=True)]
        with _unquoted():
            by_function = self._calculate_rewards(columns, prompts, completions, sampled)
        for index, name in enumerate(self.reward_func_names):
            check_finite(name, by_function[:, index])
        return self._weighted(by_function.double().cpu()), by_function, prompts, completions

    def _weighted(self, by_function: Tensor) -> Tensor:
        """Sum rewards [episodes, functions] by weight; NaN where no function gave one."""
        total = (by_function * self.reward_weights.double()).nansum(dim=1)
        return total.masked_fill(by_function.isnan().all(dim=1), float("nan"))

    def _book_rewards(self, by_function: Tensor, rewards: Tensor, size: int, mode: str) -> None:
        metrics = self._metrics[mode]
        for index, name in enumerate(self.reward_func_names):
            mean, std = _mean_std(by_function[:, index])
            metrics[f"rewards/{name}/mean"].append(mean)
            metrics[f"rewards/{name}/std"].append(std)
        mean, std = _mean_std(rewards)
        metrics["reward"].append(mean)
        metrics["rewards/missing"].append(rewards.isnan().double().mean().item())
        metrics["reward_std"].append(std)
        spread = [_mean_std(group)[1] for group in rewards.view(-1, size)]
        flat = [not value > 0 for value in spread]
        metrics["frac_reward_zero_std"].append(sum(flat) / len(flat))

    def _book_extras(self, count: int, mode: str) -> None:
        """Pass on what reward functions logged, in one order on every rank."""
        for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
            values = self._pending_extra_logs.get(column, [None] * count)
            self._logs["extra"][column].extend(gather_object(values))
        self._pending_extra_logs.clear()
        for name in sorted(set(gather_object(list(self._pending_metrics)))):
            values = gather_object(list(self._pending_metrics.get(name, [])))
            self._metrics[mode][name].append(sum(values) / len(values))
        self._pending_metrics.clear()

    def _book_completions(
        self, prompts: list[Any], completions: list[Any], by_function: Tensor, advantages: Tensor
    ) -> None:
        self._logs["prompt"].extend(gather_object(prompts))
        self._logs["completion"].extend(gather_object(completions))
        for index, name in enumerate(self.reward_func_names):
            self._logs["rewards"][name].extend(by_function[:, index].tolist())
        self._logs["advantages"].extend(advantages.tolist())

    def _keep_traces(self, traces: list[Trace], mode: str) -> None:
        """Write a generation's traces; several of one optimizer step are numbered."""
        every = self.args.trace_every
        if not every or (mode == "train" and self.state.global_step % every):
            return
        step = self.state.global_step
        last, count = self._trace_files.get(mode, (None, 0))
        count = count + 1 if last == step else 0
        self._trace_files[mode] = (step, count)
        name = f"{'step' if mode == 'train' else 'eval'}_{step:06d}"
        self._write_traces(traces, f"{name}.{count}" if count else name)

    @property
    def _trace_files(self) -> dict[str, tuple[int, int]]:
        files: dict[str, tuple[int, int]] = self.__dict__.setdefault("_trace_file_counts", {})
        return files


@contextmanager
def _unquoted() -> Iterator[None]:
    """Keep back TRL's warning about missing rewards: it quotes the question and its gold answer."""

    def other(record: logging.LogRecord) -> bool:
        return "All reward functions returned None" not in record.getMessage()

    logger = logging.getLogger("trl.trainer.grpo_trainer")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def check_finite(name: str, rewards: Tensor) -> None:
    """Refuse infinite rewards; NaN is how TRL spells a reward that was not given.

    Raises:
        RewardError: says the function, the episode and the value.
    """
    infinite = rewards.isinf().nonzero().flatten().tolist()
    if infinite:
        raise RewardError(
            f"reward function {name} gave {rewards[infinite[0]].item()} to episode {infinite[0]} "
            f"of {len(rewards)}: a reward is finite, or None where there is no judgement"
        )


def _mean_std(values: Tensor) -> tuple[float, float]:
    """Give mean and standard deviation of the values that are numbers, NaN where none is."""
    known = values[~values.isnan()].double()
    mean = known.mean().item() if len(known) else float("nan")
    return mean, known.std(correction=1).item() if len(known) > 1 else 0.0
