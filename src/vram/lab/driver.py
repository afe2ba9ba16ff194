"""Driver calls that the experiments need and the backend contract does not offer: the driver's own pools,
pinned memory, plain allocation during a capture. A thin binding of libcuda.so.1 that raises errors.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from vram.core.device import Device
from vram.errors import DeviceError

__all__ = ["RELEASE_THRESHOLD", "RESERVED_HIGH", "RESERVED_NOW", "UNLIMITED", "Driver", "PoolProperties"]

LIBRARY = "libcuda.so.1"

# The driver's numbers of the attributes of its pools.
RELEASE_THRESHOLD, RESERVED_NOW, RESERVED_HIGH = 4, 5, 6
UNLIMITED = 2**64 - 1

CAPTURE_GLOBAL = 0
_PINNED_ALLOCATION, _DEVICE_LOCATION = 1, 1


class PoolProperties(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = [
        ("allocation_type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("security_attributes", ctypes.c_void_p),
        ("max_size", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class Driver:
    """The driver in one device's primary context, which is current only during a call."""

    def __init__(self, device: Device) -> None:
        """Load the driver and retain the primary context of a CUDA device."""
        self._library: Any = ctypes.CDLL(LIBRARY)
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        self._check("cuDeviceGet", self._library.cuDeviceGet(ctypes.byref(number), device.index))
        self._device = number.value
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

    @contextlib.contextmanager
    def pinned(self, *sizes: int) -> Iterator[list[int]]:
        """Allocate pinned memory for the duration of a `with` block."""
        held: list[int] = []
        try:
            for size in sizes:
                held.append(self.pinned_alloc(size))
            yield list(held)
        finally:
            for address in held:
                self.pinned_free(address)

    # ---- the driver's own pools -------------------------------------------------------------------------

    def malloc_async(self, size: int, stream: int) -> int:
        """cudaMallocAsync, from the device's current pool."""
        return self._made("cuMemAllocAsync", ctypes.c_size_t(size), ctypes.c_void_p(stream))

    def free_async(self, address: int, stream: int) -> None:
        """cudaFreeAsync, for memory of any pool."""
        self.call("cuMemFreeAsync", ctypes.c_uint64(address), ctypes.c_void_p(stream))

    def pool_malloc(self, pool: int, size: int, stream: int) -> int:
        """cudaMallocFromPoolAsync."""
        arguments = (ctypes.c_size_t(size), ctypes.c_void_p(pool), ctypes.c_void_p(stream))
        return self._made("cuMemAllocFromPoolAsync", *arguments)

    @contextlib.contextmanager
    def pool(self, *, threshold: int = 0, max_size: int = 0) -> Iterator[int]:
        """Create a driver pool for the duration of a `with` block; free its memory before the end."""
        properties = PoolProperties(
            allocation_type=_PINNED_ALLOCATION,
            location_type=_DEVICE_LOCATION,
            location_id=self._device,
            max_size=max_size,
        )
        pool = self._made("cuMemPoolCreate", ctypes.byref(properties))
        try:
            self.pool_set(pool, RELEASE_THRESHOLD, threshold)
            yield pool
        finally:
            self.call("cuMemPoolDestroy", ctypes.c_void_p(pool))

    def pool_get(self, pool: int, attribute: int) -> int:
        """Return an attribute of a pool, in bytes."""
        value = ctypes.c_uint64()
        self.call("cuMemPoolGetAttribute", ctypes.c_void_p(pool), attribute, ctypes.byref(value))
        return value.value

    def pool_set(self, pool: int, attribute: int, value: int) -> None:
        """Set an attribute of a pool, in bytes."""
        self.call("cuMemPoolSetAttribute", *self._setting(pool, attribute, value))

    def pool_set_status(self, pool: int, attribute: int, value: int) -> int:
        """Try to set an attribute of a pool, in bytes; return the driver's status."""
        return self.status("cuMemPoolSetAttribute", *self._setting(pool, attribute, value))

    @staticmethod
    def _setting(pool: int, attribute: int, value: int) -> tuple[Any, ...]:
        return ctypes.c_void_p(pool), attribute, ctypes.byref(ctypes.c_uint64(value))

    def pool_trim(self, pool: int, keep: int = 0) -> None:
        """cudaMemPoolTrimTo."""
        self.call("cuMemPoolTrimTo", ctypes.c_void_p(pool), ctypes.c_size_t(keep))

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
