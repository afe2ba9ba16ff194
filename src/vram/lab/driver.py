"""Driver calls that the experiments need and the backend contract does not offer: pinned memory, and plain
allocation during a capture. A thin binding of libcuda.so.1 that raises errors.
"""

from __future__ import annotations

import ctypes
from typing import Any

from vram.core.device import Device
from vram.errors import DeviceError

__all__ = ["Driver"]

LIBRARY = "libcuda.so.1"

CAPTURE_GLOBAL = 0


class Driver:
    """The driver in one device's primary context, which is current only during a call."""

    def __init__(self, device: Device) -> None:
        """Load the driver and retain the primary context of a CUDA device."""
        self._library: Any = ctypes.CDLL(LIBRARY)
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        self._check("cuDeviceGet", self._library.cuDeviceGet(ctypes.byref(number), device.index))
        # The device's backend holds a reference until the process ends; this is one more.
        status = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number)
        self._check("cuDevicePrimaryCtxRetain", status)

    # ---- calls ------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver in the device's context; raise DeviceError if the status is not 0."""
        self._check(name, self.status(name, *arguments))

    def status(self, name: str, *arguments: Any) -> int:
        """Call a function of the driver in the device's context and return its status."""
        before = ctypes.c_void_p()
        self._check("cuCtxPushCurrent", self._library.cuCtxPushCurrent_v2(self._context))
        try:
            return int(getattr(self._library, name)(*arguments))
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(before))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = self.error_name(status)
            raise DeviceError(f"{name} failed: {text} ({status})", call=name, code="failed", native=status)

    def error_name(self, status: int) -> str:
        """Return `CUDA_ERROR_INVALID_VALUE` for 1."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        return (text.value or b"an unknown error").decode()

    # ---- plain and pinned memory ------------------------------------------------------------------------

    def malloc(self, size: int) -> int:
        """cudaMalloc."""
        return self._made("cuMemAlloc_v2", ctypes.c_size_t(size))

    def free(self, address: int) -> None:
        """cudaFree."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def pinned_alloc(self, size: int) -> int:
        """cudaHostAlloc."""
        return self._made("cuMemHostAlloc", ctypes.c_size_t(size), ctypes.c_uint(0))

    def pinned_free(self, address: int) -> None:
        """cudaFreeHost."""
        self.call("cuMemFreeHost", ctypes.c_void_p(address))

    def register(self, address: int, size: int) -> None:
        """cudaHostRegister."""
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(0))

    def unregister(self, address: int) -> None:
        """cudaHostUnregister."""
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def _made(self, name: str, *arguments: Any) -> int:
        """Return the address that a call returns through its first parameter."""
        made = ctypes.c_uint64()
        self.call(name, ctypes.byref(made), *arguments)
        return made.value

    # ---- allocation in stream order ---------------------------------------------------------------------

    def malloc_async(self, size: int, stream: int) -> int:
        """cudaMallocAsync, from the device's current pool."""
        return self._made("cuMemAllocAsync", ctypes.c_size_t(size), ctypes.c_void_p(stream))

    def free_async(self, address: int, stream: int) -> None:
        """cudaFreeAsync."""
        self.call("cuMemFreeAsync", ctypes.c_uint64(address), ctypes.c_void_p(stream))

    # ---- capture ----------------------------------------------------------------------------------------

    def capture_begin(self, stream: int) -> None:
        """Begin a capture that refuses unsafe calls on any thread (CUDA's default)."""
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), CAPTURE_GLOBAL)

    def capture_end(self, stream: int) -> int:
        """End a capture and drop its graph; returns the driver's status."""
        graph = ctypes.c_void_p()
        status = self.status("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        if graph.value:
            self.call("cuGraphDestroy", graph)
        return status
