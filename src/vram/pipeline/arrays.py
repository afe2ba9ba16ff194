"""How array libraries use device memory: a Buffer as their array, a stream as their current stream, and their
results. One small class per library; the caller is responsible for ownership and order.

Also the structures of batches and results: tuples, lists and dicts of arrays and other values.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from vram.core.buffer import Buffer
from vram.core.device import Device
from vram.core.pinned import Pin
from vram.core.stream import Stream
from vram.errors import ConfigError
from vram.integrations.adaptors import require_library

__all__ = ["LIKE", "HostArray", "Library", "Result", "host_array", "leaves", "library_for", "walk"]

np: Any = require_library("numpy", "NumPy")

LIKE = ("torch", "cupy", "numba", "numpy", "buffer")
"""The libraries, by the names that `like=` accepts."""
_ON_CUDA = ("torch", "cupy", "numba")

HostArray = Any
"""A NumPy array."""


@dataclass(frozen=True)
class Result:
    """A contiguous array in device memory. `keep` holds the memory."""

    ptr: int
    shape: tuple[int, ...]
    dtype: Any
    keep: Any

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


class Library(Protocol):
    """What the pipeline needs from an array library on one device."""

    name: str

    def make_stream(self) -> Stream:
        """Return a stream for the library's work."""

    def current(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Make the library queue its work on `stream` inside the block."""

    def wrap(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Any:
        """View a buffer as an array, without a copy and without ordering."""

    def result(self, value: Any) -> Result | None:
        """Convert the return value of a function; None if it is not an array on this device."""


def library_for(like: str | None, device: Device) -> Library:
    """Return the library with that name on a device.

    Default: NumPy on the host, plain Buffers on a model. On a GPU, the first of PyTorch, CuPy and Numba that
    the program has imported, else the first that is installed.
    """
    name = like if like is not None else _inferred(device)
    if name not in LIKE:
        raise ConfigError(
            f"like={name!r} is not one of {', '.join(map(repr, LIKE))}", option="like", value=name
        )
    where = {"cupy": ("cuda",), "numba": ("cuda",), "numpy": ("host",), "torch": ("cuda", "host")}
    if device.kind not in where.get(name, (device.kind,)):
        raise ConfigError(
            f"like={name!r} cannot use memory of {device.name}; "
            f"{' or '.join(map(repr, _fitting(device)))} can",
            option="like",
            value=name,
            device=device.name,
        )
    return _KINDS[name](device)


def _fitting(device: Device) -> tuple[str, ...]:
    return {"cuda": (*_ON_CUDA, "buffer"), "host": ("numpy", "torch", "buffer")}.get(device.kind, ("buffer",))


def _inferred(device: Device) -> str:
    if device.kind != "cuda":
        return "numpy" if device.kind == "host" else "buffer"
    for name in _ON_CUDA:
        if name in sys.modules:
            return name
    for name in _ON_CUDA:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ConfigError(
        f"no array library for {device.name} is installed (tried PyTorch, CuPy and Numba). "
        "Install one, or pass like='buffer' and queue your own work on the buffers.",
        option="like",
        device=device.name,
    )


class _Unordered:
    """A buffer's DLPack export that makes no stream wait: the caller ensures the order."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __dlpack__(self, *, stream: Any = None, **request: Any) -> Any:
        on_host = self._buffer.device.kind == "host"  # host memory has no stream in DLPack
        return self._buffer.__dlpack__(stream=None if on_host else -1, **request)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._buffer.__dlpack_device__()


class _OwnStream:
    """Libraries that accept any stream."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def make_stream(self) -> Stream:
        return Stream(self._device)


class _Exported:
    """A buffer with the CUDA array interface; the capsule counts as a view while this object exists."""

    def __init__(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any, stream: int) -> None:
        self._capsule = buffer.__dlpack__(stream=-1)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (buffer.ptr, False),
            "strides": None,
            "stream": stream,
            "version": 3,
        }


# ---- PyTorch ----------------------------------------------------------------------------------------------


class _Torch:
    name = "torch"

    def __init__(self, device: Device) -> None:
        self._torch = require_library("torch", "PyTorch")
        self._device = device
        self._on_gpu = device.kind == "cuda"
        self._place = self._torch.device("cuda", device.index) if self._on_gpu else self._torch.device("cpu")

    def make_stream(self) -> Stream:
        """On a GPU, use a stream of PyTorch: its allocator may use it long after memory was freed there."""
        if not self._on_gpu:
            return Stream(self._device)
        return Stream._view(self._device._core, self._torch.cuda.Stream(self._place).cuda_stream)

    def current(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        if not self._on_gpu:
            return contextlib.nullcontext()
        cuda = self._torch.cuda
        made: contextlib.AbstractContextManager[Any] = cuda.stream(
            cuda.ExternalStream(stream.handle, device=self._place)
        )
        return made

    def wrap(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Any:
        kind = getattr(self._torch, str(dtype.name), None)
        if kind is None or not dtype.isnative:
            raise TypeError(f"PyTorch has no dtype for {dtype!r}; convert the array, or view it as bytes")
        if buffer.size == 0:
            return self._torch.empty(shape, dtype=kind, device=self._place)
        return self._torch.from_dlpack(_Unordered(buffer)).view(kind).view(shape)

    def result(self, value: Any) -> Result | None:
        if not isinstance(value, self._torch.Tensor) or value.device != self._place:
            return None
        flat = value.detach().contiguous()
        name = str(flat.dtype).rpartition(".")[2]
        try:
            dtype = np.dtype(name)
        except TypeError as error:
            raise TypeError(
                f"NumPy has no dtype for {flat.dtype}; return float(), or view() it as integers"
            ) from error
        return Result(flat.data_ptr(), tuple(flat.shape), dtype, flat)


# ---- CuPy -------------------------------------------------------------------------------------------------


class _Cupy(_OwnStream):
    name = "cupy"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._cupy = require_library("cupy", "CuPy")
        self._index = device.index

    @contextlib.contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        cuda = self._cupy.cuda
        with cuda.Device(self._index), cuda.ExternalStream(stream.handle, self._index):
            yield

    def wrap(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Any:
        if buffer.size == 0:
            return self._cupy.empty(shape, dtype)
        return self._cupy.from_dlpack(_Unordered(buffer)).view(dtype).reshape(shape)

    def result(self, value: Any) -> Result | None:
        if not isinstance(value, self._cupy.ndarray):
            return None
        flat = value if value.flags.c_contiguous else self._cupy.array(value, order="C", copy=True)
        return Result(flat.data.ptr, flat.shape, flat.dtype, flat)


# ---- Numba ------------------------------------------------------------------------------------------------


class _Numba(_OwnStream):
    """Numba has no current stream: arrays carry theirs, so use `kernel[blocks, threads, x.stream](x)`."""

    name = "numba"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._cuda = require_library("numba.cuda", "Numba")
        self._index = device.index
        self._stream = 0

    @contextlib.contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        self._stream = stream.handle
        with self._cuda.gpus[self._index]:
            yield

    def wrap(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Any:
        if buffer.size == 0:
            return self._cuda.device_array(shape, dtype)
        return self._cuda.as_cuda_array(_Exported(buffer, shape, dtype, self._stream), sync=False)

    def result(self, value: Any) -> Result | None:
        if not self._cuda.is_cuda_array(value):
            return None
        seen = value.__cuda_array_interface__
        dtype = np.dtype(seen["typestr"])
        shape = tuple(seen["shape"])
        if seen.get("strides") not in (None, _packed(shape, dtype.itemsize)):
            raise ValueError("the array returned by compute is not contiguous; return a copy of it")
        return Result(seen["data"][0] or 0, shape, dtype, value)


def _packed(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    return tuple(item * math.prod(shape[place + 1 :]) for place in range(len(shape)))


# ---- NumPy and plain buffers ------------------------------------------------------------------------------


class _Numpy(_OwnStream):
    name = "numpy"

    def current(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def wrap(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Any:
        if buffer.size == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(buffer, dtype).reshape(shape)

    def result(self, value: Any) -> Result | None:
        if not isinstance(value, (np.ndarray, np.generic)):
            return None
        flat = np.asarray(value, order="C")
        if flat.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be copied; return numbers")
        return Result(flat.ctypes.data, flat.shape, flat.dtype, flat)


class _Buffers(_OwnStream):
    """Plain memory: compute gets Buffers of bytes and queues its own work on them."""

    name = "buffer"

    def current(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def wrap(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Any:
        return buffer

    def result(self, value: Any) -> Result | None:
        if not isinstance(value, Buffer) or value.device != self._device:
            return None
        return Result(value.ptr, (value.size,), np.dtype(np.uint8), value)


_KINDS: dict[str, Callable[[Device], Library]] = {
    "torch": _Torch,
    "cupy": _Cupy,
    "numba": _Numba,
    "numpy": _Numpy,
    "buffer": _Buffers,
}


# ---- batches and results ----------------------------------------------------------------------------------


def walk(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the same structure of tuples, lists and dicts with every leaf converted."""
    if isinstance(value, dict):
        return {key: walk(each, convert) for key, each in value.items()}
    if isinstance(value, tuple):
        parts = [walk(each, convert) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [walk(each, convert) for each in value]
    return convert(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a structure in order."""
    found: list[Any] = []
    walk(value, found.append)
    return iter(found)


def host_array(leaf: Any) -> HostArray | None:
    """Return host memory as a NumPy array without a copy; None if it is not an array."""
    if isinstance(leaf, Pin):
        leaf = leaf.array
    if isinstance(leaf, (np.generic, bytes, str)):
        return None
    if not isinstance(leaf, np.ndarray):
        known = ("__array_interface__", "__array__", "__dlpack__", "__buffer__")
        if not any(hasattr(leaf, name) for name in known) and not _has_buffer(leaf):
            return None
        leaf = np.asarray(leaf)
    if leaf.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be copied to a device; convert it to numbers")
    return leaf


def _has_buffer(leaf: Any) -> bool:
    try:
        memoryview(leaf).release()
    except TypeError:
        return False
    return True
