"""GRPO over tree episodes: generated in process over shared pages, trained in packed rows.

Where TRL pads prompts and completions, a micro-batch here is a list of groups, each the traces of
one question. TRL shuffles, splits and buffers what `_generate_and_score_completions` returns along
its first axis, so groups stay whole. `training_step` packs a micro-batch into rows and runs one
forward and backward pass for each; a rank with fewer rows adds rows of weight 0, so collectives
match and gradients equal those of one process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

from octopus_trl.agent.recorder import failures
from octopus_trl.agent.rollout import EpisodeRunner
from octopus_trl.errors import ConfigError
from octopus_trl.models import prepare_model, spec_of
from octopus_trl.models.mlp_tiles import tile_mlps
from octopus_trl.trace import Trace
from octopus_trl.train import flops, histograms, loss, records
from octopus_trl.train.card import Card
from octopus_trl.train.checks import mark_traces, tokenizer_mark
from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.credit import BranchCredit
from octopus_trl.train.data import EpochSampler, check_questions, questions_per_generation
from octopus_trl.train.evaluation import ApartEvaluation
from octopus_trl.train.hub import HubPush
from octopus_trl.train.kernel_check import check_kernels, compute_dtype
from octopus_trl.train.lora import describe_adapter, settle_targets
from octopus_trl.train.meter import Meter
from octopus_trl.train.ranks import FailTogether, Ranks
from octopus_trl.train.refused import refuse_balance_loss
from octopus_trl.train.resume import WholeCheckpoints
from octopus_trl.train.rewards import RewardBook
from octopus_trl.train.rows import LossRow, empty_row
from octopus_trl.train.scoring import PackedRows
from octopus_trl.train.weights import PolicyEngine, say
from octopus_trl.train.zero import NO_TILES, check_engine_runs, zero_stage

REFUSED_ARGUMENTS = {
    "rollout_func": "episodes come from EpisodeRunner; give `tools` and set its limits in the "
    "config",
    "environment_factory": "threads and their tools are the environment; give `tools`, a search "
    "backend, and a reward function that reads the `traces` column",
    "quantization_config": "load the model yourself and pass the instance",
}


class OctopusGRPOTrainer(
    HubPush,
    WholeCheckpoints,
    RewardBook,
    BranchCredit,
    PackedRows,
    ApartEvaluation,
    Card,
    FailTogether,
    GRPOTrainer,
):
    """`GRPOTrainer` whose samples are episodes of many threads (DESIGN §5).

    Args:
        model: of a class that `prepare_model` takes, PEFT-wrapped or not, or where to load one
            from. Its mixers are installed in place.
        reward_funcs: TRL reward functions; completions are the roots' commit texts and the
            column `traces` holds the episodes.
        args: settings.
        train_dataset, eval_dataset: rows with `prompt` or `question`; other columns go to the
            rewards and to `tools`.
        processing_class: the tokenizer.
        tools: the corpus behind `search` and `open`, bound to each row where it can be.
        peft_config: adapter to train; without targets it gets the ten projections of the paper.
        **kwargs: TRL's other arguments.

    Raises:
        ConfigError: something is set that this trainer does not run, a data set has no questions,
            or an adapter's name matches nothing.
    """

    _tag_names = ["trl", "grpo", "octopus"]  # noqa: RUF012 - TRL's own attribute
    _name = "Octopus GRPO"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: OctopusGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        tools: Any = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        for name, instead in REFUSED_ARGUMENTS.items():
            if kwargs.get(name) is not None:
                raise ConfigError(f"{name} is not run by OctopusGRPOTrainer: {instead}")
        if not isinstance(args, OctopusGRPOConfig):
            raise ConfigError(f"args is a {type(args).__name__}: must be an OctopusGRPOConfig")
        if isinstance(model, str):
            processing_class = processing_class or AutoTokenizer.from_pretrained(model)
            options = {"dtype": "auto", **(args.model_init_kwargs or {})}
            model = AutoModelForCausalLM.from_pretrained(model, **options)
            args.model_init_kwargs = None
        # TRL wraps the model's forward as it finds it, so ours must be in place before.
        prepare_model(model, mount_layers=args.mount_layers)
        tile_mlps(model, args.mlp_tile_tokens)
        refuse_balance_loss(model.config, args.router_aux_loss_coef)
        if peft_config is not None:
            peft_config = settle_targets(model, peft_config)
        if args.beta != 0.0 and peft_config is None and not is_peft_model(model):
            raise ConfigError(
                f"beta={args.beta} with full fine-tuning would hold a second model: train an "
                "adapter (use_peft: true), whose reference is the model without it, or set beta: 0"
            )
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False  # a packed pass touches every parameter
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=check_questions(
                train_dataset, "train_dataset", at_least=questions_per_generation(args)
            ),
            eval_dataset=check_questions(
                eval_dataset, "eval_dataset", optional=args.eval_strategy == "no"
            ),
            processing_class=processing_class,
            peft_config=peft_config,
            **kwargs,
        )
        if args.mlp_tile_tokens is not None and zero_stage(self.accelerator) == 3:
            raise ConfigError(f"mlp_tile_tokens={args.mlp_tile_tokens}: {NO_TILES}")
        if self.is_fsdp_enabled:
            raise ConfigError("FSDP is not run by OctopusGRPOTrainer: use accelerate_configs/zero3")
        self._corpus = tools
        self._spec = spec_of(self.model)
        self._ranks = Ranks(self.accelerator)
        self._policy = PolicyEngine(
            args, self.accelerator, lambda: self.model_wrapped, self._ranks.together
        )
        self._runners: dict[str, EpisodeRunner] = {}
        # Greedy draws are recorded with the log-probs of temperature 1.
        self._temperature = {
            mode: args.rollout_config(training=mode == "train").temperature or 1.0
            for mode in ("train", "eval")
        }
        self._meters = {
            mode: Meter((*loss.MEANS, *flops.MEANS), (*loss.PEAKS, *flops.PEAKS))
            for mode in ("train", "eval")
        }
        peak = flops.peak_tflops(self.accelerator.device, args.peak_tflops)
        self._speed = flops.Speed(self.model, self._spec, peak)
        self._engine_stats: dict[str, Any] = {}
        self._mark = tokenizer_mark(self._tokenizer)
        self._loss_settings = loss.LossSettings(
            beta=args.beta,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            weight_cap=args.importance_weight_cap,
            correct_kl=args.use_bias_correction_kl,
            weigh_trees=args.importance_weight_level == "sequence",
            old_is_rollout=args.old_logps == "rollout" and self._updates_outlive_generation,
        )
        self._train_seconds = 0.0
        dtype = compute_dtype(args, self.model)
        kernels = check_kernels(self.model, self.accelerator.device, dtype)
        if self.accelerator.is_main_process:
            for line in (describe_adapter(self.model), *kernels):
                say(line)

    # ---- generation: TRL's seam between questions and what the loss reads

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Run the episodes of a generation batch, reward them and centre the rewards.

        Returns:
            `advantages` [groups, rollouts] first, because TRL splits by it, `groups` of traces,
            and `old_logps`, `ref_logps`, `credits` for each trace where the loss needs them.
        """
        mode = "train" if self.model.training else "eval"
        size = self.num_generations if mode == "train" else self.num_generations_eval
        if len(inputs) % size:
            raise ConfigError(
                f"a batch of {len(inputs)} rows holds no whole groups of {size} rollouts: set "
                f"per_device_{mode}_batch_size to a multiple of {size}"
            )
        began = time.perf_counter()
        traces = self._run_episodes(inputs, size, mode)
        mark_traces(traces, self._mark)
        generated = time.perf_counter()
        advantages = self._reward_episodes(inputs, traces, size, mode)
        if mode == "train":
            found = histograms.distributions(traces, advantages.tolist())
            histograms.send(self.accelerator, self.args.report_to, found)
        rewarded = time.perf_counter()
        groups = [traces[at : at + size] for at in range(0, len(traces), size)]
        batch: dict[str, Any] = {
            "advantages": advantages.view(-1, size),
            "groups": groups,
            "temperature": torch.tensor(self._temperature[mode]),
        }
        if mode == "train" and self._updates_outlive_generation:
            batch["old_logps"] = self._old_logps(batch)
        if self.beta != 0.0:
            with self._reference():
                batch["ref_logps"] = self._score(batch)
        seconds = {
            "time/generate_s": generated - began,
            "time/reward_s": rewarded - generated,
            "time/score_s": time.perf_counter() - rewarded,
        }
        if mode == "train" and self.args.credit != "outcome":
            batch["credits"] = self._credit_branches(inputs, traces, size)
        for name, value in seconds.items():
            self._metrics[mode][name].append(value)
        return batch

    def _run_episodes(self, inputs: list[dict[str, Any]], size: int, mode: str) -> list[Trace]:
        """Run `size` episodes of each question; those that ended survive an interruption."""
        ended: list[Trace] = []
        stats: dict[str, Any] = {}
        seconds = 0.0

        def on_trace(trace: Trace) -> None:
            ended.append(trace)
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "on_episode"):
                    callback.on_episode(len(ended), len(inputs), trace)

        def run(engine: Any) -> list[Trace]:
            nonlocal seconds
            if mode not in self._runners:
                config = self.args.rollout_config(training=mode == "train")
                self._runners[mode] = EpisodeRunner(engine, self._tokenizer, self._corpus, config)
            began = time.perf_counter()
            traces = self._runners[mode].run(
                inputs[::size],
                group_size=size,
                seed=self.args.seed + (mode == "eval"),
                step=self.state.global_step,
                on_trace=on_trace,
            )
            seconds = time.perf_counter() - began
            stats.update(engine.stats())
            return traces

        try:
            traces = self._policy.run(self.state.global_step, run)
        except BaseException:
            if ended:
                self._write_traces(ended, f"interrupted_{mode}")
            raise
        self._measure_generation(traces, stats, seconds, mode)
        return traces

    def _measure_generation(
        self, traces: Sequence[Trace], stats: dict[str, Any], seconds: float, mode: str
    ) -> None:
        for message in failures(traces):
            say(message)
        meter = Meter(records.GENERATION_MEANS, records.GENERATION_PEAKS)
        records.measure_episodes(meter, traces)
        records.measure_engine(meter, self._engine_stats, stats)
        self._engine_stats = stats
        meter.add("speed/sampled_tokens_per_s", sum(t.num_owned for t in traces), seconds)
        for name, value in meter.reduce(self.accelerator).items():
            self._metrics[mode][name].append(value)

    @property
    def _updates_outlive_generation(self) -> bool:
        """Whether a trace is trained on after the weights that drew it have moved."""
        every = self.args.steps_per_generation * self.num_iterations
        return bool(self.args.gradient_accumulation_steps % every)

    def _reference(self) -> Any:
        """Switch to the reference: a frozen copy of a loaded adapter, or no adapter."""
        model = self.accelerator.unwrap_model(self.model)
        return use_adapter(model, "ref" if "ref" in model.peft_config else None)

    # ---- the update

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one micro-step: a forward and backward pass a row, gradients synchronised once."""
        check_engine_runs(self.accelerator, model)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        began = time.perf_counter()
        with self._lean():
            total = self._update(model, inputs)
        self._step += 1
        self._train_seconds += time.perf_counter() - began
        if self.accelerator.sync_gradients:
            self._flush("train")
        return total

    def _update(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Pack a micro-batch and run its rows; give their loss."""
        trees = self._trees(inputs)
        temperature = float(inputs["temperature"])
        # Trees that nothing is learnt from are only measured, which is a third of the work.
        learns = [self.beta != 0.0 or tree.teaches for tree in trees]
        still = [tree for tree, moves in zip(trees, learns, strict=True) if not moves]
        moving = [tree for tree, moves in zip(trees, learns, strict=True) if moves]
        with torch.no_grad(), self.compute_loss_context_manager():
            for row in self._rows(still, self._meters["train"]):
                self._row_loss(self.model, row, len(trees), temperature)
        rows = self._rows(moving, self._meters["train"]) or [empty_row()]
        state, sync = self.accelerator.gradient_state, self.accelerator.sync_gradients
        options = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        total = torch.zeros((), device=self.args.device)
        for index, row in enumerate(rows):
            last = index == len(rows) - 1
            state._set_sync_gradients(sync and last)
            alone = last or self.is_deepspeed_enabled
            with nullcontext() if alone else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    part = self._row_loss(model, row, len(trees), temperature)
                    part = part / self.current_gradient_accumulation_steps
                self.accelerator.backward(part, **options)
            total += part.detach()
        return total

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Give the loss of a micro-batch; evaluation calls it, training goes row by row."""
        trees = self._trees(inputs)
        temperature = float(inputs["temperature"])
        rows = self._rows(trees) or [empty_row()]
        parts = [self._row_loss(model, row, len(trees), temperature) for row in rows]
        if not self.model.training:
            self._flush("eval")
        return torch.stack(parts).sum()

    def _row_loss(
        self, model: nn.Module, row: LossRow, num_trees: int, temperature: float
    ) -> Tensor:
        mode = "train" if self.model.training else "eval"
        logps = self._row_logps(model, row, temperature)
        if mode == "train":
            self._speed.row(row.packed, len(row.targets), trains=logps.requires_grad)
        return loss.row_loss(
            logps, row, self._loss_settings, num_trees=num_trees, meter=self._meters[mode]
        )

    def _flush(self, mode: str) -> None:
        """Hand the figures of an optimizer step over to TRL's log."""
        meter = self._meters[mode]
        if mode == "train":
            self._speed.seconds(self._train_seconds)
            self._speed.flush(meter, self.accelerator.device)
            self._metrics[mode]["time/train_s"].append(self._train_seconds)
            self._train_seconds = 0.0
        for name, value in meter.reduce(self.accelerator).items():
            self._metrics[mode][name].append(value)
        meter.clear()

    # ---- data order

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        """Repeat questions as TRL does, in an order that depends on (seed, epoch) alone."""
        return EpochSampler(
            dataset if dataset is not None else self.train_dataset,
            mini_repeat_count=self.num_generations,
            batch_size=questions_per_generation(self.args),
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            epoch=lambda: int(self.state.epoch or 0),
        )

    def _send_telemetry(self) -> None:
        """Send nothing: a run tells only the trackers that its recipe names."""

    def _write_traces(self, traces: list[Trace], name: str) -> Path:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return records.write_generation(Path(self.args.output_dir), name, rank, world, traces)
