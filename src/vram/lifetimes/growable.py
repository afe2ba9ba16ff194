"""`GrowableBuffer`: memory whose length changes while its address stays the same.

Addresses for the maximum size are reserved once. Pages of the pool are mapped there as the buffer grows and
released as it shrinks, in stream order. The native pool chooses the pages and decides when they can be
reused. This module adds lengths in bytes and views, and prevents views from outliving the memory.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from vram import _native
from vram.core.buffer import Buffer
from vram.core.closing import Closing
from vram.core.device import Device
from vram.core.locks import new_lock
from vram.core.stream import stream_handle
from vram.core.tags import current_tag
from vram.errors import ConfigError, DeviceError, InvalidFree, OutOfMemory, VramError
from vram.sizes import format_size, parse_size

if TYPE_CHECKING:
    from vram.core.pool import Pool

__all__ = ["DeviceArray", "GrowableBuffer"]

STEP: Final = 2 << 20
"""Memory is added and released in multiples of this."""
LARGEST: Final = 1 << 40
"""Maximum number of bytes that one buffer may reserve addresses for."""
MOST_AHEAD: Final = 32 << 20
"""Maximum number of bytes prepared with `ahead="auto"`."""


class GrowableBuffer(Closing):
    """Memory of one device that grows and shrinks in place: same `ptr`, no copy.

    `max_size` is the maximum size; it reserves only addresses. `device` is a name or a Device (the memory
    comes from the memory manager's pool), or a Pool with pages. `size` is the initial length. Work queued on
    `stream` after a growth may use the new bytes. Memory released by a shrink is reused after the work queued
    before it has completed. Neither operation waits.

    After each growth a background thread prepares the next pages: with `ahead="auto"` as many bytes as the
    growth took, at least 2 MiB and at most 32 MiB; or a fixed size; 0 disables it. Prepared pages stay free
    pages of the pool until the buffer takes them, so they remain available to other allocations.

    Any thread may use the buffer; resizes are serialized. `close()`, the end of a `with` block or garbage
    collection releases everything.
    """

    def __init__(
        self,
        max_size: int | str,
        device: str | Device | Pool | None = None,
        *,
        size: int | str = 0,
        stream: Any = None,
        ahead: int | str = "auto",
        tag: str | None = None,
    ) -> None:
        """Reserve the addresses and allocate memory for `size` bytes."""
        self.max_size: Final = _checked_max(max_size)
        self._ahead = None if ahead == "auto" else parse_size(ahead)
        self.pool: Final = pool_of(device)
        self.tag: Final = current_tag() if tag is None else tag
        self._stream = stream
        self._lock = new_lock()
        self._busy = False
        self._size = self._capacity = 0
        self._views: weakref.WeakSet[Buffer | DeviceArray] = weakref.WeakSet()
        try:
            self.ptr, self.stream = self.pool.growable_open(self.max_size, stream)
        except (DeviceError, OutOfMemory) as error:
            raise _not_opened(self.pool, self.max_size, error) from None
        self._open = True
        try:
            if self.resize(size) == 0 and self._ahead != 0:
                self._native_resize(0, self._ahead or STEP)  # prepare the first pages as well
        except BaseException:
            self.close()
            raise

    # ---- length -----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._size

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        """Bytes that are backed by memory, at least `size`; growing up to here needs no call of the pool."""
        return min(self._capacity, self.max_size)

    @property
    def ready(self) -> int:
        """Bytes beyond `capacity` whose pages are already mapped, so that growing into them is fast."""
        with self._lock:
            self._require_open()
            return self.pool.growable_info(self.ptr)["ready"]

    @property
    def device(self) -> Device:
        """The device of the memory."""
        return self.pool.device

    @property
    def closed(self) -> bool:
        """Whether the buffer or its pool was closed."""
        return not self._open or self.pool.closed

    def resize(self, size: int | str) -> int:
        """Change the length to `size` bytes and return it. The bytes common to both lengths are unchanged.

        Growing: the new bytes are undefined (zero if the pool zeroes). Raises ConfigError beyond `max_size`,
        and OutOfMemory if the pool has no memory; the old length then stays. Shrinking: views of bytes beyond
        the new length are freed. Raises BufferError and changes nothing if another library holds such bytes
        (a memoryview, an array, a tensor).
        """
        wanted = parse_size(size)
        with self._lock:
            self._require_open()
            if self._busy:
                raise DeviceError(
                    "the buffer is already being resized, and this call was made during that resize, in a "
                    "callback of Pool.on_oom. Resize other buffers there.",
                    code="invalid",
                )
            if wanted > self.max_size:
                raise ConfigError(
                    f"{format_size(wanted)} exceeds the max_size of this buffer, which is "
                    f"{format_size(self.max_size)}. Create it with a larger max_size, which needs no memory.",
                    requested=wanted,
                    max_size=self.max_size,
                )
            if wanted < self._size:
                self._retire_views(wanted)
            capacity = -(-wanted // STEP) * STEP
            if capacity != self._capacity:
                grown = max(0, capacity - self._capacity)
                ahead = min(max(grown, STEP), MOST_AHEAD) if self._ahead is None else self._ahead
                self._native_resize(capacity, ahead if grown else 0)
            self._size = wanted
            return wanted

    def grow(self, by: int | str) -> int:
        """Grow the buffer and return the offset of the new bytes: the old length."""
        with self._lock:
            before = self._size
            self.resize(before + parse_size(by))
            return before

    def shrink(self, by: int | str) -> int:
        """Shrink the buffer, at most to zero bytes, and return the new length."""
        with self._lock:
            return self.resize(max(0, self._size - parse_size(by)))

    def prepare(self, size: int | str) -> int:
        """Prepare pages for `size` more bytes now, on this thread, and return `ready`.

        The background thread does the same after each growth. Preparing less than `size` is not an error.
        """
        with self._lock:
            self._require_open()
            stream_handle(self._stream, self.pool.device)
            self.pool.growable_prepare(self.ptr, parse_size(size))
            return self.ready

    def _native_resize(self, capacity: int, ahead: int) -> None:
        stream_handle(self._stream, self.pool.device)  # raises if the stream was closed
        ahead = min(ahead, -(-self.max_size // STEP) * STEP - capacity)
        self._busy = True
        try:
            self.pool.growable_resize(self.ptr, capacity, ahead, self.stream, self.tag)
            self._capacity = capacity
        finally:
            self._busy = False

    # ---- views ------------------------------------------------------------------------------------------

    def view(self, offset: int | str = 0, size: int | str | None = None) -> Buffer:
        """Return a Buffer over `size` bytes starting at `offset` (default: to the end). It does not copy.

        The view keeps this buffer alive and stays valid when it grows. Dropping or freeing the view frees no
        memory.
        """
        start = parse_size(offset)
        with self._lock:
            self._require_open()
            length = self._size - start if size is None else parse_size(size)
            if length < 0 or start + length > self._size:
                raise ConfigError(
                    f"{format_size(max(0, length))} at offset {start} exceeds the buffer's length of "
                    f"{format_size(self._size)}; grow it first",
                    offset=start,
                    requested=length,
                    size=self._size,
                )
            part = self.pool.part_of(self.ptr, start, length, self._stream, self)
            self._views.add(part)
            return part

    def array(self, shape: int | tuple[int, ...], dtype: Any = "uint8", offset: int | str = 0) -> Any:
        """Return the memory from `offset` as an array: a NumPy array on host memory, else a `DeviceArray`.

        `dtype` is any NumPy dtype except Python objects. While the array exists, or objects that other
        libraries created from it, the buffer cannot shrink below its end.
        """
        import numpy

        from vram.lifetimes.arrays import raw_type
        from vram.lifetimes.elements import checked_shape

        kind = raw_type(dtype)
        lengths = checked_shape(shape)
        part = self.view(offset, math.prod(lengths) * kind.itemsize)
        if self._host_accessible():
            memory: Any = part
            return numpy.ndarray(lengths, kind, buffer=memory)
        made = DeviceArray(part, lengths, kind.str)
        with self._lock:
            self._views.add(made)
        return made

    def _host_accessible(self) -> bool:
        return self.device.kind == "host"

    def __dlpack__(self, **request: Any) -> Any:
        """Export the current length as a DLPack capsule of bytes, like `Buffer.__dlpack__`."""
        return self.view().__dlpack__(**request)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device of the memory."""
        return self.view(0, 0).__dlpack_device__()

    def record_stream(self, stream: Any) -> None:
        """Record a use on another stream: memory released by a shrink or close waits for it, too."""
        with self._lock:
            self._require_open()
            if self._capacity:
                self.pool.record_stream(self.ptr, stream)

    def _exported(self, beyond: int) -> Iterator[Buffer | DeviceArray]:
        """Yield objects that end beyond that length and that other libraries hold or may hold."""
        for view in tuple(self._views):
            if view.ptr - self.ptr + view.size <= beyond:
                continue
            if isinstance(view, DeviceArray) or view.views:
                yield view

    def _retire_views(self, length: int) -> None:
        """Free the views that end beyond a length; raise BufferError if another library holds one."""
        held = [view for view in self._exported(length) if view.size]
        if held:
            end = max(view.ptr - self.ptr + view.size for view in held)
            raise BufferError(
                f"{len(held)} array(s) or view(s) of the first {format_size(end)} are in use, so the buffer "
                f"cannot become {format_size(length)} long; drop them first"
            )
        for view in tuple(self._views):
            if isinstance(view, Buffer) and not view.freed and view.ptr - self.ptr + view.size > length:
                view.free()

    # ---- end --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Return bytes: `size`, `capacity`, `pending` (released, not yet reusable), `ready`, `max_size`."""
        with self._lock:
            self._require_open()
            info = self.pool.growable_info(self.ptr)
            return {
                "size": self._size,
                "capacity": self.capacity,
                "pending": info["pending"],
                "ready": info["ready"],
                "max_size": self.max_size,
            }

    def close(self) -> None:
        """Release the memory and the addresses, in stream order. Calling it again has no effect.

        Raises BufferError while another library holds a view. In the child of a fork it does nothing.
        """
        with self._lock:
            if self.closed:
                self._open = False
                return
            if self._busy:
                raise DeviceError("the buffer is being resized; close it afterwards", code="invalid")
            self._retire_views(0)
            self._open = False
            self.pool.growable_close(self.ptr)
            self._size = self._capacity = 0

    def _require_open(self) -> None:
        if self._open and not self.pool.closed:
            return
        if not self._open:
            raise InvalidFree("the growable buffer is closed; create a new one", ptr=self.ptr)
        raise DeviceError(
            "the pool of the growable buffer is closed or belongs to the parent of a fork", code="closed"
        )

    def __del__(self) -> None:
        if not getattr(self, "_open", False):
            return
        # No view exists: each would hold a reference to this object.
        with contextlib.suppress(VramError, AttributeError, TypeError):
            self._open = False
            if not self.pool.closed:
                self.pool.growable_close(self.ptr, True)

    def __repr__(self) -> str:
        if self.closed:
            return f"<vram.GrowableBuffer at {self.ptr:#x}, closed>"
        lengths = f"{format_size(self._size)} of {format_size(self.max_size)}"
        return f"<vram.GrowableBuffer {lengths} at {self.ptr:#x} on {self.device.name}>"


class DeviceArray:
    """Part of a GrowableBuffer with a shape and a type, for libraries that use `__cuda_array_interface__`.

    Created by `GrowableBuffer.array`. `torch.as_tensor(a, device="cuda")` and `cupy.asarray(a)` share the
    memory and keep this object alive. `buffer` is the same memory as bytes.
    """

    def __init__(self, buffer: Buffer, shape: tuple[int, ...], typestr: str) -> None:
        """Created by `GrowableBuffer.array`."""
        self.buffer: Final = buffer
        self.shape: Final = shape
        self.typestr: Final = typestr

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        return self.buffer.ptr

    @property
    def size(self) -> int:
        """Size of all elements in bytes."""
        return self.buffer.size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.buffer.__cuda_array_interface__
        return {**interface, "shape": self.shape, "typestr": self.typestr}

    def __repr__(self) -> str:
        where = f"at {self.ptr:#x} on {self.buffer.device.name}"
        return f"<vram.DeviceArray {self.typestr}{list(self.shape)} {where}>"


def pool_of(device: str | Device | Pool | None) -> Pool:
    """Return the pool itself, or the memory manager's pool of a device."""
    if isinstance(device, _native.PoolCore):
        return device
    from vram.core.manager import get_memory_manager

    return get_memory_manager().pool(device)


def _checked_max(max_size: int | str) -> int:
    most = parse_size(max_size)
    if not 0 < most <= LARGEST:
        raise ConfigError(
            f"max_size is {format_size(most)}; it must be from 1 byte to {format_size(LARGEST)}",
            max_size=most,
        )
    return most


def _not_opened(pool: Pool, most: int, error: DeviceError | OutOfMemory) -> VramError:
    """Return the error with a message for growable buffers."""
    if isinstance(error, OutOfMemory):
        return OutOfMemory(
            f"no contiguous address range of {format_size(most)} is left: a pool reserves addresses for "
            "sixteen times its device's memory, at most 2 TiB. Close other growable buffers, create this "
            "one with a smaller max_size, or give it its own pool.",
            **{**error.facts, "requested": most},
        )
    if error.code != "unsupported":
        return error
    return DeviceError(
        f"a growable buffer needs a pool with pages, and {pool!r} has none: "
        f"{pool._why_no_pages() or 'its memory is managed by the driver'}. Use a vram.Pool with pages.",
        **error.facts,
    )
