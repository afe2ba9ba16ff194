"""Page-locked host memory: `PinnedPool`, a pool of it, and `pin`, which locks memory that exists already.

A GPU copies to and from such memory directly: several times faster, and without blocking the program.
Without a GPU the same code runs on plain memory.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Final

from vram import _native
from vram.core.closing import Closing
from vram.core.device import Device
from vram.core.locks import new_lock
from vram.core.observer import host_knows
from vram.core.pool import PinnedPool
from vram.errors import DeviceError, VramError
from vram.sizes import format_size

__all__ = ["Pin", "drop_shared_pinned_pool", "pin", "shared_pinned_pool"]

ALREADY_LOCKED: Final = 712
"""The driver's code for memory that is locked already."""


class Pin(Closing, _native.PinCore):
    """Existing memory, page-locked until `close()` or the end of a `with` block. Created by `vram.pin`."""

    def __init__(self, array: Any, device: str | Device | None = None) -> None:
        """Lock the memory of `array`, and keep it exported, so that it cannot be resized away."""
        self.device = device if isinstance(device, Device) else Device(device)
        super().__init__(self.device.backend, array)
        self.array = array
        _refuse_overlap(self)
        try:
            self.lock()
        except DeviceError as error:
            if getattr(error, "native", 0) != ALREADY_LOCKED:
                raise
            raise _locked_already(self, "the driver knows it, or a page it shares with more") from error
        _live[id(self)] = (self.ptr, self.size)

    def close(self) -> None:
        """Wait for everything queued on the device, then unlock the memory. Closing again does nothing.

        Copies queued by other libraries have completed then, too. If it is not possible to wait for the
        device, as during a capture, this raises and the memory stays pinned.
        """
        if self.closed:
            return
        with host_knows(self.device):
            self.unlock()
        _live.pop(id(self), None)

    def __del__(self) -> None:
        if "array" not in self.__dict__:  # nothing was exported
            return
        with contextlib.suppress(VramError, AttributeError, TypeError):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "pinned" if self.pinned else "not locked: no GPU"
        return f"<vram.Pin of {format_size(self.size)} at {self.ptr:#x} for {self.device.name}, {state}>"


def pin(array: Any, device: str | Device | None = None) -> Pin:
    """Page-lock memory for a scope: `with vram.pin(array) as p: buffer.copy_from(p, stream=s)`.

    Takes any object with the buffer protocol whose memory is contiguous, writable or not. `p.ptr`, `p.size`
    and `p.array` describe the memory; `p.pinned` says whether it is locked for a GPU. `Buffer.copy_from(p)`
    and `copy_to(p)` are then queued on the stream instead of waiting, and copies of `array` by other
    libraries run at full speed. Leaving the scope waits for everything queued on the device.
    """
    return Pin(array, device)


# ---- shared by a process ----------------------------------------------------------------------------------

_shared: dict[Device, PinnedPool] = {}
_shared_lock = new_lock()  # a finalizer may ask while one is created


def shared_pinned_pool(device: Device) -> PinnedPool:
    """The pool of page-locked memory that this process shares for a device; for a model a new one."""
    if device.kind == "model":
        return PinnedPool(device, segment_size="2MiB")
    with _shared_lock:
        found = _shared.get(device)
        if found is None or found.closed:
            found = _shared[device] = PinnedPool(device)
        return found


def drop_shared_pinned_pool(device: Device) -> PinnedPool | None:
    """Forget a device's shared pool and return it; the next use creates another."""
    with _shared_lock:
        return _shared.pop(device, None)


# What is pinned now, by the identity of its Pin: (address, bytes).
_live: dict[int, tuple[int, int]] = {}


def _after_fork_in_child() -> None:
    _live.clear()  # pins belong to the parent
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _refuse_overlap(new: Pin) -> None:
    """On a GPU the driver refuses this; elsewhere vram does, so that programs behave the same."""
    for ptr, size in _live.copy().values():
        if new.ptr < ptr + size and ptr < new.ptr + new.size:
            raise _locked_already(new, f"{format_size(size)} at {ptr:#x} are under another vram.pin")


def _locked_already(new: Pin, why: str) -> DeviceError:
    return DeviceError(
        f"the {format_size(new.size)} at {new.ptr:#x} are pinned already, wholly or in part: {why}. "
        "Close the other pin first, or use it.",
        device=new.device.name,
        ptr=new.ptr,
        size=new.size,
        code="invalid",
    )
