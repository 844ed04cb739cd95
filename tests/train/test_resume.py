"""A resumed run continues as if it had not stopped."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from octopus_trl.train.checkpoint import last_checkpoint
from octopus_trl.train.data import EpochSampler
from octopus_trl.train.interrupt import StopGracefully
from tests.train.runs import asked_rows, logged, make_trainer, replayed, trained

# Two of four questions a generation, trained on in two steps: an epoch is four steps, and steps 1,
# 3 and 5 fall inside a buffer.
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "steps_per_generation": 2,
    "num_iterations": 1,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
    "lr_scheduler_type": "linear",
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str]]:
    trainer = make_trainer(tmp_path_factory.mktemp("straight"), None, asked_rows(4), **RUN)
    with replayed() as asked:
        trainer.train()
    return trainer, list(asked)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_weights_order_and_log_are_those_of_the_run_that_did_not_stop(
    straight: Any, tmp_path: Path, stop: int
) -> None:
    whole, asked_at_once = straight
    run = {**RUN, "max_steps": 6}
    first = make_trainer(tmp_path, None, asked_rows(4), callbacks=[StopAfter(stop)], **run)
    with replayed() as before:
        first.train()
    assert last_checkpoint(tmp_path) == tmp_path / f"checkpoint-{stop}"
    second = make_trainer(tmp_path, None, asked_rows(4), **run)
    with replayed() as after:
        second.train(resume_from_checkpoint=True)
    assert before + after == asked_at_once
    expected = trained(whole)
    for name, value in trained(second).items():
        assert torch.equal(value, expected[name]), name
    for key in ("loss", "reward", "learning_rate", "grad_norm", "rollout_kl/mean"):
        assert logged(second, key) == logged(whole, key), key
    assert second._step == whole._step == 6


def test_a_checkpoint_inside_a_buffer_holds_the_traces_with_their_sampling_log_probs(
    straight: Any,
) -> None:
    trainer, _ = straight
    folder = Path(trainer.args.output_dir)
    inside = torch.load(folder / "checkpoint-3" / "octopus_state_0.pt", weights_only=True)
    between = torch.load(folder / "checkpoint-4" / "octopus_state_0.pt", weights_only=True)
    assert between["buffer"] is None
    actions = [
        segment
        for batch in inside["buffer"]
        for group in batch["groups"]
        for trace in group
        for segment in trace["segments"]
        if segment["kind"] == "action"
    ]
    assert actions
    assert all(len(s["logps"]) == len(s["tokens"]) for s in actions)


class StopAfter(TrainerCallback):
    """Ends a run as an interruption between two steps would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


def test_every_epoch_has_its_own_order_and_a_new_sampler_repeats_it() -> None:
    now = [0]

    def sampler() -> EpochSampler:
        return EpochSampler(range(8), mini_repeat_count=2, batch_size=4, epoch=lambda: now[0])

    old = sampler()
    orders = []
    for now[0] in range(3):
        orders.append(list(old))
        assert list(sampler()) == orders[-1]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(2 * [*range(8)]) for order in orders)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("train", ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"]),
        ("_get_output_dir", ["trial"]),
        ("_save_checkpoint", ["model", "trial"]),
        ("_push_from_checkpoint", ["checkpoint_folder"]),
        ("_load_optimizer_and_scheduler", ["checkpoint"]),
        ("_send_telemetry", []),
    ],
)
def test_what_checkpoints_stand_on_keeps_its_parameters(name: str, parameters: list[str]) -> None:
    found = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    assert found == ["self", *parameters]


def test_the_first_signal_saves_and_stops_and_the_second_is_not_held_back(tmp_path: Path) -> None:
    class Press(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                signal.raise_signal(signal.SIGINT)
                assert signal.getsignal(signal.SIGINT) is standing

    standing = signal.getsignal(signal.SIGINT)
    settings = {**RUN, "save_strategy": "no"}
    trainer = make_trainer(tmp_path, None, asked_rows(4), **settings)
    stop = StopGracefully(trainer.accelerator)
    trainer.add_callback(stop)
    trainer.add_callback(Press())
    with replayed():
        trainer.train()
    assert (stop.stopped, trainer.state.global_step) == (True, 2)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert signal.getsignal(signal.SIGINT) is standing


def test_a_failed_push_ends_no_run_and_leaves_the_checkpoint_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = {**RUN, "max_steps": 1, "push_attempts": 2, "push_wait_s": 0.0}
    trainer = make_trainer(tmp_path, None, asked_rows(4), **run)
    trainer.args.push_to_hub = True  # the tests are offline, so every attempt fails
    with replayed():
        trainer.train()
    trainer._finish_current_push()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert "step 1), the run goes on" in capfd.readouterr().err
