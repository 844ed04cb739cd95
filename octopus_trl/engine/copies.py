"""Bytes that tensor operations write while a primitive runs; none should."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class CopyMeter(TorchDispatchMode):
    """Counts what the dispatcher is asked to write while the mode is on, on whatever device.

    A new tensor made from others counts whole; an operation in place counts the largest tensor that
    it reads, at most the tensor that it changes. Views and empty memory count nothing.

    Attributes:
        num_bytes: bytes written since the meter was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what it wrote."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        changed: list[Tensor] = []
        read: list[int] = []
        for at, argument in enumerate(schema.arguments):
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed.extend(_tensors(value))
            else:
                read.extend(tensor.nbytes for tensor in _tensors(value))
        for tensor in changed:
            self.num_bytes += min(tensor.nbytes, max(read, default=tensor.nbytes))
        outs = out if isinstance(out, (tuple, list)) else [out]
        if read:
            for returned, value in zip(schema.returns, outs):
                if returned.alias_info is None:
                    self.num_bytes += sum(tensor.nbytes for tensor in _tensors(value))
        return out


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
