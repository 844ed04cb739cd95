"""What the engine refuses before it changes anything."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral
from operator import index
from typing import Any

import torch

from octopus_trl.engine.cursor import Cursor
from octopus_trl.errors import ClosedCursor, ConfigError, StaleVersion
from octopus_trl.kernels._decode_tuning import Tuning
from octopus_trl.models.spec import ModelSpec
from octopus_trl.protocols import SamplingParams

POSITIONS = ("jump", "unshifted", "rerotate", "reencode")  # where a reader goes on after a mount


def check_at_least(least: int, **values: int | None) -> None:
    """Refuse a setting that is not an integer of at least `least`; None stands for unset.

    Raises:
        ConfigError: names the setting.
    """
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r}: must be an integer of at least {least}")


def check_place(asked: torch.device | str | None, held: torch.device) -> torch.device:
    """Give the device of the pools: where the model is.

    Args:
        held: device of the model's weights.
    Raises:
        ConfigError: another device was asked for, or none of that name exists.
    """
    if asked is None:
        return held
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={asked!r}: must be a torch device such as {str(held)!r} ({error})"
        ) from None
    if device.type != held.type or device.index not in (None, held.index):
        raise ConfigError(
            f"device={str(device)!r}: the model is on {held}; move it there first, or leave device "
            "out"
        )
    return held


def check_kernels(spec: ModelSpec, device: torch.device) -> None:
    """Refuse on CUDA what the decode attention kernel does not serve; any page size is served.

    Raises:
        ConfigError: head dim or heads a KV head are too large.
    """
    if device.type == "cuda" and os.environ.get("OCTOPUS_KERNELS", "auto") == "auto":
        Tuning.of(spec.head_dim, rows=1).readers_per_tile(spec.num_heads // spec.num_kv_heads)


def check_length(num_tokens: int, longest: int) -> None:
    """Refuse a number of tokens to keep that a chain does not have.

    Raises:
        ConfigError: no integer in 1..longest.
    """
    if type(num_tokens) is not int or not 0 < num_tokens <= longest:
        raise ConfigError(f"num_tokens={num_tokens!r}: must be an integer in 1..{longest}")


def check_turn(sampling: Any, until: Any) -> None:
    """Refuse settings of a turn that are none.

    Raises:
        ConfigError: `sampling` is no SamplingParams, or `until` no collection of integers.
    """
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"sampling={sampling!r}: must be a SamplingParams")
    if not isinstance(until, Collection) or not all(isinstance(stop, Integral) for stop in until):
        raise ConfigError(f"until={until!r}: must be a collection of integer token ids")


def check_position(position: str) -> None:
    """Refuse a rule that the engine does not place readers by.

    Raises:
        ConfigError: it is none of `POSITIONS`.
    """
    if position not in POSITIONS:
        raise ConfigError(f"position={position!r}: must be one of {', '.join(POSITIONS)}")


def check_batch(
    cursors: Sequence[Cursor],
    sampling: SamplingParams | Sequence[SamplingParams],
    until: Any,
) -> list[tuple[Cursor, SamplingParams]]:
    """Give each cursor of a batch its settings.

    Raises:
        ConfigError: numbers differ, a cursor is listed twice, or settings are none.
    """
    if not isinstance(cursors, Sequence):
        raise ConfigError(f"cursors={cursors!r}: must be a list of cursors, [cursor] of one")
    if not isinstance(sampling, SamplingParams | Iterable):
        raise ConfigError(f"sampling={sampling!r}: must be a SamplingParams, or a list of them")
    each = [sampling] * len(cursors) if isinstance(sampling, SamplingParams) else list(sampling)
    if len(each) != len(cursors):
        raise ConfigError(f"{len(each)} sampling settings for {len(cursors)} cursors")
    if len(set(map(id, cursors))) != len(cursors):
        raise ConfigError("a cursor is listed twice: fork it to sample two turns there")
    for params in each:
        check_turn(params, until)
    return list(zip(cursors, each, strict=True))


def check_tokens(tokens: Sequence[int], vocab_size: int, *, at_least: int = 0) -> list[int]:
    """Give token ids as plain integers.

    Raises:
        ConfigError: too few, one outside the vocabulary, or no integers.
    """
    try:
        ids = [index(token) for token in tokens]
    except TypeError as error:
        raise ConfigError(
            f"tokens={reprlib.repr(tokens)}: must be a sequence of integer token ids ({error}); "
            "encode with the model's own tokenizer"
        ) from None
    if len(ids) < at_least:
        raise ConfigError(f"{len(ids)} tokens: give at least {at_least}")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ConfigError(
            f"token ids {min(ids)}..{max(ids)}: must lie in 0..{vocab_size - 1}; encode with the "
            "model's own tokenizer"
        )
    return ids


def check_usable(cursor: Any, engine: Any, epoch: int, *, idle: bool = False) -> None:
    """Refuse a cursor that `engine` cannot work with now.

    Args:
        epoch: the engine's present one.
        idle: refuse one whose turn is running too.
    Raises:
        ConfigError: not a cursor of this engine, or busy.
        ClosedCursor: it was closed.
        StaleVersion: it was made with other weights, or the pools were given back since.
    """
    if not isinstance(cursor, Cursor):
        raise ConfigError(f"{cursor!r} is no cursor: take one from engine.open or engine.fork")
    if cursor._engine is not engine:
        raise ConfigError(f"{cursor!r} belongs to another engine: use it with the one that made it")
    if cursor._closed:
        raise ClosedCursor(f"{cursor!r} was closed: fork it before closing to keep its place")
    if cursor._tail.epoch != epoch:
        raise StaleVersion(
            f"{cursor!r} was made before the weights changed or the pools were given back: close "
            "it and open its tokens again"
        )
    if idle and cursor._turn is not None:
        raise ConfigError(f"{cursor!r} is in turn {cursor._turn}: step until it ends, or cancel it")
