"""Questions in, in an order that a resumed run repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from datasets import Dataset
from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from octopus_trl.errors import ConfigError


class EpochSampler(RepeatSampler):
    """TRL's sampler with an order of its own for each epoch.

    TRL draws all orders from one generator, so a run resumed in epoch 1 would see the order of
    epoch 0 again. Here the order is a function of (seed, epoch), and the epoch is asked of the
    trainer, because wrappers of the loader do not all pass `set_epoch` on.
    """

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) + self._epoch())
        yield from super().__iter__()


def check_questions(dataset: Any, name: str, *, at_least: int = 1, optional: bool = False) -> Any:
    """Check a data set of questions.

    Args:
        at_least: questions of one generation; a smaller set would train on nothing.
        optional: whether there may be none.
    Raises:
        ConfigError: no `prompt` or `question` column, too few rows, a stream, or none.
    """
    if dataset is None:
        if optional:
            return None
        raise ConfigError(
            f"{name} is None: give rows with prompt or question (scripts/train.py: train_file, "
            "eval_file or num_eval_questions); without an eval_dataset set eval_strategy: no"
        )
    if isinstance(dataset, Mapping):
        return {key: check_questions(part, f"{name}[{key}]") for key, part in dataset.items()}
    if isinstance(dataset, list):
        dataset = Dataset.from_list(dataset)
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__}: must be a datasets.Dataset or a list of rows; "
            "a stream cannot be resumed exactly"
        )
    if not {"prompt", "question"} & set(dataset.column_names):
        raise ConfigError(
            f"{name} has columns {dataset.column_names}: one must be prompt or question"
        )
    if len(dataset) < at_least:
        raise ConfigError(
            f"{name} has {len(dataset)} questions, one generation takes {at_least}: give more, or "
            "lower generation_batch_size or per_device_train_batch_size"
        )
    return dataset


def questions_per_generation(args: GRPOConfig) -> int:
    """Count the questions that all ranks together work on at once."""
    return int(args.generation_batch_size // args.num_generations)


def question_of(example: Mapping[str, Any]) -> Any:
    """Give the prompt of a row: text, or a list of messages."""
    prompt = example.get("prompt")
    return example["question"] if prompt is None else prompt


def as_completion(prompt: Any, text: str) -> Any:
    """Shape a commit as TRL shapes completions: text, or one message where the prompt is a list."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
