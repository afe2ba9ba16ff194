"""vram for cuda.core: `MemoryResource` allocates buffers from the manager's pool of a device.

`install()` makes it the default resource of the device. cuda.core passes the streams.
"""

from __future__ import annotations

from typing import Any

from vram.core.buffer import Buffer
from vram.errors import OutOfMemory
from vram.integrations.adaptors import DevicePools, prepare, require_library

__all__ = ["CoreOutOfMemory", "MemoryResource", "install", "uninstall"]

_core: Any = require_library("cuda.core", "cuda.core (version 1 or later)")
_CudaError: Any = require_library("cuda.core._utils.cuda_utils", "cuda.core").CUDAError
_pools = DevicePools("cuda.core")
_before: dict[int, Any] = {}  # the devices' previous resources, while ours are installed


class CoreOutOfMemory(OutOfMemory, _CudaError):  # type: ignore[misc]
    """Out of memory for code that uses cuda.core: both its CUDAError and vram's OutOfMemory."""


class MemoryResource(_core.MemoryResource):  # type: ignore[misc]
    """Device memory for cuda.core from the manager's pool of `device`.

    If a buffer is closed on a stream other than its own, the memory is reused only after the work queued
    there.
    """

    def __init__(self, device: int = 0) -> None:
        """Serve one CUDA device, given by its number."""
        super().__init__()
        prepare({})
        self._device = device
        self._live: dict[int, Buffer] = {}

    def allocate(self, size: int, *, stream: Any = None) -> Any:
        """Return a cuda.core Buffer of `size` bytes, ordered by `stream` (None: the default stream)."""
        try:
            buffer = _pools.allocate(size, self._device, _handle(stream))
        except OutOfMemory as error:
            raise CoreOutOfMemory(f"CUDA_ERROR_OUT_OF_MEMORY: {error}", **error.facts) from error
        self._live[buffer.ptr] = buffer
        try:
            return _core.Buffer.from_handle(buffer.ptr, size, mr=self, stream=stream)
        except BaseException:
            self._live.pop(buffer.ptr, None)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any = None) -> None:
        """Free a buffer. cuda.core calls this when a Buffer is closed or garbage collected."""
        buffer = self._live.pop(int(ptr), None)
        handle = _handle(stream)
        if buffer is None or buffer.pool.closed:
            return
        if handle != buffer.stream:
            buffer.record_stream(handle)

    @property
    def device_id(self) -> int:
        """Number of the device."""
        return self._device

    @property
    def is_device_accessible(self) -> bool:
        """Whether kernels can use the memory."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """Whether the host can access the memory."""
        return False

    @property
    def is_managed(self) -> bool:
        """Whether the driver migrates the memory between host and device."""
        return False


def install(device: int = 0, **config: Any) -> MemoryResource:
    """Make a MemoryResource the default of a device and return it. cuda.core keeps the default per thread.

    `config` is passed to `vram.configure`. Calling it again only applies `config`.
    """
    prepare(config)
    place = _core.Device(device)
    place.set_current()
    found = place.memory_resource
    if isinstance(found, MemoryResource):
        return found
    _before.setdefault(device, found)
    made = MemoryResource(device)
    place.memory_resource = made
    return made


def uninstall(device: int = 0) -> None:
    """Restore the device's previous resource; existing buffers stay valid."""
    if device in _before:
        _core.Device(device).memory_resource = _before.pop(device)


def _handle(stream: Any) -> int:
    """Return the handle of a cuda.core stream or graph builder."""
    if stream is None:
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    return int(protocol()[1] if protocol is not None else stream.stream.__cuda_stream__()[1])
