"""Pushes to the hub that are tried again and never end a run.

What is pushed is what others load: weights or adapter, configs, tokenizer and model card, as one
commit. Traces, completions, optimizer states and `training_args.bin` (which holds the token) stay.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi
from transformers.trainer_utils import HubStrategy

from octopus_trl.train.weights import say

CARD = "README.md"
PUSHED = (
    "adapter_config.json",
    "adapter_model*.safetensors",
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    CARD,
)

T = TypeVar("T")


class HubPush:
    """The part of the trainer that talks to the hub; stands before TRL's class."""

    accelerator: Any
    args: Any
    callback_handler: Any
    control: Any
    state: Any
    create_model_card: Any
    hub_model_id: str | None
    is_world_process_zero: Any
    save_model: Any
    push_in_progress: Any = None
    _pusher: ThreadPoolExecutor | None = None
    _pushing: Future[Any] | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Settle the repository's name; it is made with the first push, so a start needs no hub."""
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        self.hub_model_id = name

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and push it; a failed push is said and gives None."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        assert self.hub_model_id is not None, "settled above"
        self.create_model_card(model_name=self.hub_model_id.rsplit("/", 1)[-1], **kwargs)
        self._finish_current_push()
        return self._push(
            collect(Path(self.args.output_dir)),
            str(commit_message),
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            private=self.args.hub_private_repo if private is None else private,
        )

    def _push_safely(self, folder: Path) -> None:
        """Push a checkpoint beside the training; while one is under way the next is passed over."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        busy = self._pushing is not None and not self._pushing.done()
        if busy and not self.args.hub_always_push:
            say(f"push of {folder.name} passed over: the one before is still under way")
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        staged = Path(tempfile.mkdtemp(prefix="octopus-push-"))
        for file in collect(folder):  # rotation may remove the checkpoint while it is pushed
            _link(file, staged / file.name)
        card = Path(self.args.output_dir) / CARD
        if card.is_file():  # copied, as the next checkpoint writes it again in place
            # Never through the link: that would change the checkpoint's own card.
            (staged / CARD).unlink(missing_ok=True)
            shutil.copyfile(card, staged / CARD)
        self._pusher = self._pusher or ThreadPoolExecutor(1, thread_name_prefix="push")
        self._pushing = self._pusher.submit(
            self._push_staged, staged, f"Training in progress, step {self.state.global_step}"
        )

    def _push_staged(self, staged: Path, message: str) -> Any:
        try:
            return self._push(
                collect(staged),
                message,
                token=self.args.hub_token,
                revision=self.args.hub_revision,
                private=self.args.hub_private_repo,
            )
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _push(
        self,
        files: list[Path],
        message: str,
        *,
        token: str | None,
        revision: str | None,
        private: bool | None,
    ) -> Any:
        """Make the repository if need be and put files into it as one commit."""

        def attempt() -> Any:
            api = HfApi(token=token)
            made = api.create_repo(str(self.hub_model_id), private=private, exist_ok=True)
            self.hub_model_id = made.repo_id
            operations = [CommitOperationAdd(file.name, str(file)) for file in files]
            return api.create_commit(
                made.repo_id, operations, commit_message=message, revision=revision
            )

        return tried(
            attempt, attempts=self.args.push_attempts, wait_s=self.args.push_wait_s, what=message
        )

    def _finish_current_push(self) -> None:
        """Wait for a push that is under way."""
        if self._pushing is not None:
            self._pushing.result()
            self._pushing = None


def collect(folder: Path) -> list[Path]:
    """List the files of a folder that are pushed."""
    return sorted({file for pattern in PUSHED for file in folder.glob(pattern) if file.is_file()})


def tried(
    attempt: Callable[[], T],
    *,
    attempts: int,
    wait_s: float,
    what: str,
    sleep: Callable[[float], None] = time.sleep,
) -> T | None:
    """Call until it succeeds, at most `attempts` times; say each failure and give None at last.

    Args:
        wait_s: seconds before the second attempt, doubled for each later one.
    """
    for number in range(1, attempts + 1):
        try:
            return attempt()
        except Exception as error:  # noqa: BLE001 - whatever the hub client raises
            reason = (str(error).strip().splitlines() or [""])[0]
            last = number == attempts
            then = "the run goes on" if last else "trying again"
            say(f"push failed ({what}), {then}: {type(error).__name__}: {reason}")
            if not last:
                sleep(wait_s * 2 ** (number - 1))
    return None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
