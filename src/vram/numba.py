"""vram under Numba: set NUMBA_CUDA_MEMORY_MANAGER=vram.numba, or call `vram.numba.install()`.

Device memory comes from the manager's pools; host memory, pinning and managed memory stay Numba's own calls
of the driver. Numba names no stream when it allocates or frees, so what it frees waits for all its streams.
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
    """The number of its device, which is the driver's own handle where another library made the context."""
    device = context.device
    return int(getattr(device, "id", device))


class VramMemoryManager(_cuda.GetIpcHandleMixin, _cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Numba's external memory manager over the pool of a context's device; Numba makes one a context."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Made by Numba, once with no context, to ask for the version."""
        super().__init__(*arguments, **keywords)
        self._frees = _Frees()

    @property
    def interface_version(self) -> int:
        """The version of Numba's interface that this is written for."""
        return 1

    def initialize(self) -> None:
        """Called with the context current, before the first allocation and again later.

        `numba.cuda.close()` has reset the device before a second context is made.
        """
        reopen_if_reset(_number_of(self.context))
        deallocations = self.deallocations
        if deallocations.memory_capacity == _driver._SizeNotSet:
            deallocations.memory_capacity = self.get_memory_info().total

    def memalloc(self, size: int) -> Any:
        """Allocate device memory; out of memory is Numba's CudaAPIError with the driver's code."""
        buffer = self._attempt_allocation(lambda: self._allocate(size))
        pointer = _driver.binding.CUdeviceptr(buffer.ptr)
        context = weakref.proxy(self.context)
        # Numba calls the finalizer once, whatever reset() did meanwhile, and at the latest when Python ends.
        return _cuda.MemoryPointer(
            context, pointer, size, finalizer=functools.partial(self._frees.free, buffer)
        )

    def _allocate(self, size: int) -> Buffer:
        try:
            return _pools.allocate(size, _number_of(self.context), 0)
        except OutOfMemory as error:
            raise _driver.CudaAPIError(_OUT_OF_MEMORY, str(error)) from error

    def get_ipc_handle(self, memory: Any) -> Any:
        """A handle for other processes, which the driver makes only of memory that is not mapped by pages."""
        try:
            return super().get_ipc_handle(memory)
        except _driver.CudaAPIError as error:
            if not _pools.pool(_number_of(self.context)).raw_stats()["paged"]:
                raise
            raise DeviceError(
                f"the driver makes no IPC handle of page-backed memory ({error}). Have vram take plain "
                "segments: vram.numba.install(pages=False), or VRAM_CONF=pages:false, before the first "
                "allocation.",
                code="unsupported",
            ) from error

    def get_memory_info(self) -> Any:
        """What the whole device has and has free, by the driver's account."""
        free, total = Device(f"cuda:{_number_of(self.context)}").backend.memory_info()
        return _cuda.MemoryInfo(free=free, total=total)

    @contextlib.contextmanager
    def defer_cleanup(self) -> Iterator[None]:
        """Free nothing inside the `with` block: host memory as Numba does it, device memory likewise."""
        with super().defer_cleanup(), self._frees.later():
            yield


class _Frees:
    """Gives device memory back, in the order of everything that Numba has queued.

    The legacy default stream waits for all blocking streams, which Numba's are. A mark there is handed to a
    stream of our own, as whose use the block is freed: it is reused by nobody before the mark has passed, and
    the host never waits, as it does in Numba's own manager. Any thread may free, also while Python ends.
    """

    def __init__(self) -> None:
        self._order: tuple[Stream, Event] | None = None
        self._deferred = 0
        self._waiting: list[Buffer] = []

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back, or keep it until cleanup is allowed again."""
        if self._deferred:
            self._waiting.append(buffer)
            return
        with contextlib.suppress(
            VramError
        ):  # a pool that is closed, or a parent's after a fork, needs nothing
            self._queue_after_all(buffer)
            buffer.free()

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Keep what is freed in the `with` block until its end, or that of the outermost."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        while self._waiting and not self._deferred:
            self.free(self._waiting.pop())

    def _queue_after_all(self, buffer: Buffer) -> None:
        # Where the device cannot be marked, as while another library captures, the pool's own order holds.
        with contextlib.suppress(DeviceError):
            if self._order is None:
                self._order = (Stream(buffer.device), Event(buffer.device))
            stream, event = self._order
            event.record(0)
            event.wait(stream)
            buffer.record_stream(stream)


_numba_memory_manager = VramMemoryManager


def install(**config: Any) -> None:
    """Have Numba allocate from vram, in contexts made from now on; again: only the settings.

    `config` goes to `vram.configure`. Numba keeps the manager it first uses CUDA with: DeviceError then.
    """
    prepare(config)
    if _driver._memory_manager is VramMemoryManager:
        return
    _require_unused()
    _cuda.set_memory_manager(VramMemoryManager)


def uninstall() -> None:
    """Let Numba allocate for itself in contexts to come; `numba.cuda.close()` ends those that exist."""
    if _driver._memory_manager is VramMemoryManager:
        _cuda.set_memory_manager(_driver.NumbaCUDAMemoryManager)


def _require_unused() -> None:
    used = [number for number, device in _driver.driver.devices.items() if device.primary_context is not None]
    if used:
        raise DeviceError(
            f"Numba has used CUDA already (device {used[0]}), with a memory manager of its own. Call "
            "vram.numba.install() before that, or numba.cuda.close() first, or set "
            "NUMBA_CUDA_MEMORY_MANAGER=vram.numba.",
            code="invalid",
        )
