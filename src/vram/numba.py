"""vram for Numba: set NUMBA_CUDA_MEMORY_MANAGER=vram.numba, or call `vram.numba.install()`.

Device memory comes from the manager's pools. Numba itself still allocates host memory, pins memory and
allocates managed memory. Numba passes no stream when it allocates or frees, so freed memory waits for all of
Numba's streams.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from vram.core.buffer import Buffer
from vram.core.device import Device
from vram.core.stream import Event, Stream
from vram.errors import DeviceError, OutOfMemory, VramError
from vram.integrations.adaptors import DevicePools, prepare, reopen_if_reset, require_library

__all__ = ["VramMemoryManager", "install", "uninstall"]

_cuda: Any = require_library("numba.cuda", "Numba")
_driver: Any = require_library("numba.cuda.cudadrv.driver", "Numba")
_pools = DevicePools("numba")
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def _number_of(context: Any) -> int:
    """Return the device number, which is the driver's own handle if another library created the context."""
    device = context.device
    return int(getattr(device, "id", device))


class VramMemoryManager(_cuda.GetIpcHandleMixin, _cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Numba's external memory manager over the pool of a device. Numba creates one per context."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Called by Numba, once without a context to query the version."""
        super().__init__(*arguments, **keywords)
        self._frees = _Frees()

    @property
    def interface_version(self) -> int:
        """Version of Numba's interface that this class implements."""
        return 1

    def initialize(self) -> None:
        """Called with the context current, before the first allocation and again later.

        If a second context is created, `numba.cuda.close()` has reset the device before.
        """
        reopen_if_reset(_number_of(self.context))
        deallocations = self.deallocations
        if deallocations.memory_capacity == _driver._SizeNotSet:
            deallocations.memory_capacity = self.get_memory_info().total

    def memalloc(self, size: int) -> Any:
        """Allocate device memory. Out of memory raises Numba's CudaAPIError with the driver's code."""
        buffer = self._attempt_allocation(lambda: self._allocate(size))
        pointer = _driver.binding.CUdeviceptr(buffer.ptr)
        context = weakref.proxy(self.context)
        # Numba calls the finalizer once, even after reset(), and at the latest when Python exits.
        return _cuda.MemoryPointer(
            context, pointer, size, finalizer=functools.partial(self._frees.free, buffer)
        )

    def _allocate(self, size: int) -> Buffer:
        try:
            return _pools.allocate(size, _number_of(self.context), 0)
        except OutOfMemory as error:
            raise _driver.CudaAPIError(_OUT_OF_MEMORY, str(error)) from error

    def get_ipc_handle(self, memory: Any) -> Any:
        """Return a handle for other processes. The driver supports this only for plain segments."""
        try:
            return super().get_ipc_handle(memory)
        except _driver.CudaAPIError as error:
            if not _pools.pool(_number_of(self.context)).raw_stats()["paged"]:
                raise
            raise DeviceError(
                f"the driver creates no IPC handle for page-backed memory ({error}). Make vram use plain "
                "segments: vram.numba.install(pages=False), or VRAM_CONF=pages:false, before the first "
                "allocation.",
                code="unsupported",
            ) from error

    def get_memory_info(self) -> Any:
        """Return the total and free memory of the whole device, as reported by the driver."""
        free, total = Device(f"cuda:{_number_of(self.context)}").backend.memory_info()
        return _cuda.MemoryInfo(free=free, total=total)

    @contextlib.contextmanager
    def defer_cleanup(self) -> Iterator[None]:
        """Free nothing inside the `with` block, neither host memory nor device memory."""
        with super().defer_cleanup(), self._frees.later():
            yield


class _Frees:
    """Frees device memory in the order of everything that Numba has queued.

    The legacy default stream waits for all blocking streams, and Numba's streams are blocking. An event
    recorded there is waited for by a private stream, and the block is freed as used by that stream. Nobody
    reuses it before the event completes, and the host never waits, unlike in Numba's own manager. Any thread
    may free, also while Python exits.
    """

    def __init__(self) -> None:
        self._order: tuple[Stream, Event] | None = None
        self._deferred = 0
        self._waiting: list[Buffer] = []

    def free(self, buffer: Buffer) -> None:
        """Free a buffer, or keep it until cleanup is allowed again."""
        if self._deferred:
            self._waiting.append(buffer)
            return
        with contextlib.suppress(VramError):  # nothing to do for a closed pool or a parent's pool
            self._queue_after_all(buffer)
            buffer.free()

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Keep what is freed inside the `with` block until the outermost block ends."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        while self._waiting and not self._deferred:
            self.free(self._waiting.pop())

    def _queue_after_all(self, buffer: Buffer) -> None:
        # If no event can be recorded, for example while another library captures, the pool's own order
        # applies.
        with contextlib.suppress(DeviceError):
            if self._order is None:
                self._order = (Stream(buffer.device), Event(buffer.device))
            stream, event = self._order
            event.record(0)
            event.wait(stream)
            buffer.record_stream(stream)


_numba_memory_manager = VramMemoryManager


def install(**config: Any) -> None:
    """Make Numba allocate from vram in contexts created from now on. Calling it again only applies `config`.

    `config` is passed to `vram.configure`. Raises DeviceError if Numba has already used CUDA, because it
    keeps its first memory manager.
    """
    prepare(config)
    if _driver._memory_manager is VramMemoryManager:
        return
    _require_unused()
    _cuda.set_memory_manager(VramMemoryManager)


def uninstall() -> None:
    """Make Numba allocate for itself in new contexts; `numba.cuda.close()` ends existing ones."""
    if _driver._memory_manager is VramMemoryManager:
        _cuda.set_memory_manager(_driver.NumbaCUDAMemoryManager)


def _require_unused() -> None:
    used = [number for number, device in _driver.driver.devices.items() if device.primary_context is not None]
    if used:
        raise DeviceError(
            f"Numba has already used CUDA (device {used[0]}) with its own memory manager. Call "
            "vram.numba.install() before that, or numba.cuda.close() first, or set "
            "NUMBA_CUDA_MEMORY_MANAGER=vram.numba.",
            code="invalid",
        )
