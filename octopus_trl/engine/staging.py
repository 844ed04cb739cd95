"""Between the host and a device that runs behind it: packed copies in, results out, events.

On a GPU a launch returns before the work is done. What the host wrote for a launch must stay until
its copy has run, and a result may be read only after its event. On a CPU all of it has happened
when the call returns, and the same code holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
_TORCH = {
    "float64": torch.float64,
    "int64": torch.int64,
    "float32": torch.float32,
    "int32": torch.int32,
}
_ALIGN = 16  # bytes between the fields of a layout


class Device:
    """Launches work in order and says when it is done.

    Attributes:
        kind: "cuda" or "cpu".
    """

    def __init__(self, place: torch.device) -> None:
        self.place, self.kind = place, place.type

    def launch(self, work: Callable[[], object]) -> None:
        """Start work after all that was started before."""
        work()

    def mark(self) -> Event:
        """Give an event that has happened when all work started so far is done."""
        return Event(self.kind)

    def settle(self) -> None:
        """Let what follows on tensors see all that was launched; a stream does so by itself."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """Take host memory that copies to and from the device may run on, uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.kind == "cuda")

    def buffer(self, nbytes: int) -> Tensor:
        """Take device memory, zero, uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.place)


class Event:
    """A point in the device's work."""

    def __init__(self, kind: str) -> None:
        self._event: Any = None
        if kind == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Block the host until the work before it is done."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True, slots=True)
class Field:
    """An array at a fixed place of a packed buffer."""

    name: str
    dtype: str
    length: int
    offset: int  # bytes

    def of_host(self, buffer: Tensor) -> Array:
        """View the field in host memory."""
        return self.of_device(buffer).numpy()

    def of_device(self, buffer: Tensor) -> Tensor:
        """View the field in a uint8 buffer."""
        dtype = _TORCH[self.dtype]
        return buffer[self.offset : self.offset + self.length * dtype.itemsize].view(dtype)


class Layout:
    """Fields side by side.

    Args:
        fields: name, dtype and length of each; those that are long and not always full come last,
            so that a copy may end early.
    """

    def __init__(self, fields: Sequence[tuple[str, str, int]]) -> None:
        self.fields: dict[str, Field] = {}
        end = 0
        for name, dtype, length in fields:
            self.fields[name] = Field(name, dtype, length, end)
            end += -(-length * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        self.nbytes = end


class Staging:
    """One packed copy to the device a launch, from host buffers that take turns.

    Args:
        turns: launches that may be under way before the host must wait for one.
    """

    def __init__(self, device: Device, nbytes: int, *, turns: int = 3) -> None:
        self._device = device
        self._hosts = [device.host_buffer(nbytes) for _ in range(turns)]
        self._sent: list[Event | None] = [None] * turns
        self._turn = 0
        self.buffer = device.buffer(nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return len(self.buffer)

    def write(self) -> tuple[int, Tensor]:
        """Give a host buffer, and its turn, that no copy reads any more."""
        event = self._sent[self._turn]
        if event is not None:
            event.wait()
        return self._turn, self._hosts[self._turn]

    def send(self, nbytes: int) -> None:
        """Start the copy of what was written, and take the next host buffer."""
        turn, host = self._turn, self._hosts[self._turn]
        target = self.buffer[:nbytes]
        self._device.launch(lambda: target.copy_(host[:nbytes], non_blocking=True))
        self._sent[turn] = self._device.mark()
        self._turn = (turn + 1) % len(self._hosts)
