"""vram under cuda.core: `MemoryResource` serves its buffers from the manager's pool of a device.

`install()` makes it the device's default resource. Streams are those that cuda.core passes.
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
_before: dict[int, Any] = {}  # the devices' own resources, while ours are installed


class CoreOutOfMemory(OutOfMemory, _CudaError):  # type: ignore[misc]
    """Out of memory as code over cuda.core expects it: its CUDAError, which is also vram's OutOfMemory."""


class MemoryResource(_core.MemoryResource):  # type: ignore[misc]
    """Device memory for cuda.core from the manager's pool of `device`.

    A buffer closed on another stream than it was allocated on is reused only after the work queued there.
    """

    def __init__(self, device: int = 0) -> None:
        """Serve one CUDA device, by its number."""
        super().__init__()
        prepare({})
        self._device = device
        self._live: dict[int, Buffer] = {}

    def allocate(self, size: int, *, stream: Any = None) -> Any:
        """A cuda.core Buffer of `size` bytes, ordered by `stream` (None: the default stream)."""
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
        """Called by cuda.core when a Buffer is closed or collected."""
        buffer = self._live.pop(int(ptr), None)
        handle = _handle(stream)
        if buffer is None or buffer.pool.closed:
            return
        if handle != buffer.stream:
            buffer.record_stream(handle)

    @property
    def device_id(self) -> int:
        """The number of the device."""
        return self._device

    @property
    def is_device_accessible(self) -> bool:
        """Whether kernels can use the memory."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """Whether the host can read the memory."""
        return False

    @property
    def is_managed(self) -> bool:
        """Whether the driver moves the memory between host and device."""
        return False


def install(device: int = 0, **config: Any) -> MemoryResource:
    """Make a MemoryResource the default of a device (for this thread, as cuda.core keeps it) and return it.

    `config` goes to `vram.configure`. Again: only the settings.
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
    """Give a device its earlier resource back; buffers that exist stay valid."""
    if device in _before:
        _core.Device(device).memory_resource = _before.pop(device)


def _handle(stream: Any) -> int:
    """The handle of a cuda.core stream, or of a graph builder's."""
    if stream is None:
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    return int(protocol()[1] if protocol is not None else stream.stream.__cuda_stream__()[1])
