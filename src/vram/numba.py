"""vram under Numba: set NUMBA_CUDA_MEMORY_MANAGER=vram.numba, or call `vram.numba.install()`.

Device memory comes from the manager's pools; host memory, pinning and managed memory stay Numba's own calls
of the driver. Numba names no stream when it allocates or frees, so what it frees waits for all its streams.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from vram.adaptors import DevicePools, prepare, require_library
from vram.buffer import Buffer
from vram.device import Device, Event, Stream
from vram.errors import DeviceError, OutOfMemory, VramError

__all__ = ["VramMemoryManager", "install", "uninstall"]

_cuda: Any = require_library("numba.cuda", "Numba")
_driver: Any = require_library("numba.cuda.cudadrv.driver", "Numba")
_pools = DevicePools("numba")
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class VramMemoryManager(_cuda.GetIpcHandleMixin, _cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Numba's external memory manager over the pool of a context's device; Numba makes one a context."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Made by Numba, once with no context, to ask for the version."""
        super().__init__(*arguments, **keywords)
        self._fence: _Fence | None = None
        self._waiting: list[Buffer] | None = None  # freed inside defer_cleanup()

    @property
    def interface_version(self) -> int:
        """The version of Numba's interface that this is written for."""
        return 1

    def initialize(self) -> None:
        """Called with the context current, before the first allocation and again later."""
        deallocations = self.deallocations
        if deallocations.memory_capacity == _driver._SizeNotSet:
            deallocations.memory_capacity = self.get_memory_info().total

    def memalloc(self, size: int) -> Any:
        """Allocate device memory; out of memory is Numba's CudaAPIError with the driver's code."""
        buffer = self._attempt_allocation(lambda: self._allocate(size))
        pointer = _driver.binding.CUdeviceptr(buffer.ptr)
        # weakref.finalize calls it once, whatever reset() did meanwhile, and at the latest when Python ends.
        return _cuda.MemoryPointer(
            weakref.proxy(self.context), pointer, size, finalizer=_finalizer(self, buffer)
        )

    def _allocate(self, size: int) -> Buffer:
        try:
            return _pools.allocate(size, self.context.device.id, 0)
        except OutOfMemory as error:
            raise _driver.CudaAPIError(_OUT_OF_MEMORY, str(error)) from error

    def _give_back(self, buffer: Buffer) -> None:
        if self._waiting is not None:
            self._waiting.append(buffer)
            return
        if self._fence is None:
            self._fence = _Fence(buffer.device)
        self._fence.free(buffer)

    def get_ipc_handle(self, memory: Any) -> Any:
        """A handle for other processes, which the driver makes only of memory that is not mapped by pages."""
        try:
            return super().get_ipc_handle(memory)
        except _driver.CudaAPIError as error:
            if not _pools.pool(self.context.device.id).raw_stats()["paged"]:
                raise
            raise DeviceError(
                f"the driver makes no IPC handle of page-backed memory ({error}). Have vram take plain "
                "segments: vram.numba.install(pages=False), or VRAM_CONF=pages:false, before the first "
                "allocation.",
                code="unsupported",
            ) from error

    def get_memory_info(self) -> Any:
        """What the whole device has and has free, by the driver's account."""
        free, total = Device(f"cuda:{self.context.device.id}").backend.memory_info()
        return _cuda.MemoryInfo(free=free, total=total)

    def reset(self) -> None:
        """Forget host memory that waits to be freed. Device memory goes back with the arrays that hold it."""
        super().reset()
        self._fence = None

    @contextlib.contextmanager
    def defer_cleanup(self) -> Any:
        """Free nothing inside the `with` block: host memory as Numba does it, device memory likewise."""
        outer = self._waiting
        with super().defer_cleanup():
            self._waiting = waiting = [] if outer is None else outer
            try:
                yield
            finally:
                self._waiting = outer
        if outer is None:
            while waiting:
                self._give_back(waiting.pop())


class _Fence:
    """Orders frees after everything that Numba has queued.

    The legacy default stream waits for all blocking streams, which Numba's are. A mark there is handed to a
    stream of our own, as whose use the block is freed: it is reused by nobody before the mark has passed, and
    the host never waits, as it does in Numba's own manager.
    """

    def __init__(self, device: Device) -> None:
        self._stream = Stream(device)
        self._event = Event(device)

    def free(self, buffer: Buffer) -> None:
        # Where the device cannot be marked, as while another library captures, the pool's own order holds.
        with contextlib.suppress(DeviceError):
            self._event.record(0)
            self._event.wait(self._stream)
            buffer.record_stream(self._stream)
        buffer.free()


def _finalizer(manager: VramMemoryManager, buffer: Buffer) -> Callable[[], None]:
    """What Numba calls once nobody uses the memory; also while Python ends, after a reset, or in a fork."""

    def free() -> None:
        with contextlib.suppress(VramError):
            manager._give_back(buffer)

    return free


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
