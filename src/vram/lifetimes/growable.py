"""`GrowableBuffer`: memory whose length changes while its address stays.

Addresses for the most it may hold are taken once; pages of the pool are mapped there as it grows and go back
as it shrinks, in stream order. Which pages, and when others may have them, is the native pool's business;
added here are lengths in bytes, views of the memory, and what keeps them from outliving it.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from vram import _native
from vram.core.buffer import Buffer
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
"""Memory comes and goes in multiples of this."""
LARGEST: Final = 1 << 40
"""The most bytes one buffer may have addresses for."""
MOST_AHEAD: Final = 32 << 20
"""With `ahead="auto"`, no more than this is made ready."""


class GrowableBuffer:
    """Memory of one device that grows and shrinks in place: same `ptr`, no copy.

    `max_size` is the most it may ever hold; only addresses are taken for it. `device` is a name, a Device
    (their pool is the memory manager's) or a Pool, which must have pages. `size` is the length to begin with.
    What is new may be used by work queued on `stream` from then on; memory given up by a shrink serves
    others when the work queued until then has finished. Nobody waits for it.

    After each growth the next pages are made ready by a background thread: `ahead="auto"` as many bytes as
    the growth took, at least 2 MiB and at most 32 MiB; or a size; 0 for none. They stay free pages of the
    pool until the buffer takes them, so they cost nobody else an allocation.

    Any thread may use it; resizes take turns. `close()`, the end of a `with` block or garbage collection
    gives everything back.
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
        """Take the addresses, and memory for `size` bytes."""
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
                self._native_resize(0, self._ahead or STEP)  # the first pages, too, come ahead of need
        except BaseException:
            self.close()
            raise

    # ---- length -----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes in use: the length."""
        return self._size

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        """Bytes that have memory now, at least `size`; up to here growing calls nobody."""
        return min(self._capacity, self.max_size)

    @property
    def ready(self) -> int:
        """Bytes beyond `capacity` whose pages are mapped already, so that taking them is quick."""
        with self._lock:
            self._require_open()
            return self.pool.growable_info(self.ptr)["ready"]

    @property
    def device(self) -> Device:
        """The device the memory is on."""
        return self.pool.device

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its pool was."""
        return not self._open or self.pool.closed

    def resize(self, size: int | str) -> int:
        """Change the length to `size` bytes and return it. What both lengths have in common stays as it is.

        Growing: the new bytes are undefined (zero where the pool zeroes). ConfigError beyond `max_size`,
        OutOfMemory where the pool has no room; the old length is then in force.
        Shrinking: views of bytes beyond the new length are freed. Where another library holds such bytes (a
        memoryview, an array, a tensor), that is a BufferError and nothing changes.
        """
        wanted = parse_size(size)
        with self._lock:
            self._require_open()
            if self._busy:
                raise DeviceError(
                    "the buffer is being resized, and this call comes from inside that: from a callback of "
                    "Pool.on_oom. Resize other buffers there.",
                    code="invalid",
                )
            if wanted > self.max_size:
                raise ConfigError(
                    f"{format_size(wanted)} is more than this buffer may ever hold, which is "
                    f"{format_size(self.max_size)}. Open it with a larger max_size: it takes no memory.",
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
        """Make it longer and return where the new bytes begin: the old length."""
        with self._lock:
            before = self._size
            self.resize(before + parse_size(by))
            return before

    def shrink(self, by: int | str) -> int:
        """Make it shorter, at most to nothing, and return the new length."""
        with self._lock:
            return self.resize(max(0, self._size - parse_size(by)))

    def prepare(self, size: int | str) -> int:
        """Have pages ready for `size` more bytes, now and on this thread; returns `ready`.

        What the background thread does after each growth. There may be less to be had; that is no error.
        """
        with self._lock:
            self._require_open()
            stream_handle(self._stream, self.pool.device)
            self.pool.growable_prepare(self.ptr, parse_size(size))
            return self.ready

    def _native_resize(self, capacity: int, ahead: int) -> None:
        stream_handle(self._stream, self.pool.device)  # raises where the stream was closed
        ahead = min(ahead, -(-self.max_size // STEP) * STEP - capacity)
        self._busy = True
        try:
            self.pool.growable_resize(self.ptr, capacity, ahead, self.stream, self.tag)
            self._capacity = capacity
        finally:
            self._busy = False

    # ---- views ------------------------------------------------------------------------------------------

    def view(self, offset: int | str = 0, size: int | str | None = None) -> Buffer:
        """A Buffer over `size` bytes from `offset` on (by default to the end): the memory itself, not a copy.

        It keeps this buffer alive and stays valid when it grows. Dropping or freeing it frees no memory.
        """
        start = parse_size(offset)
        with self._lock:
            self._require_open()
            length = self._size - start if size is None else parse_size(size)
            if length < 0 or start + length > self._size:
                raise ConfigError(
                    f"{format_size(max(0, length))} at offset {start} are not within the buffer's "
                    f"{format_size(self._size)}; grow it first",
                    offset=start,
                    requested=length,
                    size=self._size,
                )
            part = self.pool.part_of(self.ptr, start, length, self._stream, self)
            self._views.add(part)
            return part

    def array(self, shape: int | tuple[int, ...], dtype: Any = "uint8", offset: int | str = 0) -> Any:
        """The memory from `offset` on as an array: NumPy's on host memory, else a `DeviceArray`.

        `dtype` is whatever NumPy takes for one, but Python objects. As long as the array lives, or what other
        libraries made of it, the buffer cannot be shrunk below its end.
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
        self._views.add(made)
        return made

    def _host_accessible(self) -> bool:
        return self.device.kind == "host"

    def __dlpack__(self, **request: Any) -> Any:
        """The current length as a DLPack capsule of bytes, as `Buffer.__dlpack__`."""
        return self.view().__dlpack__(**request)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device of the memory."""
        return self.view(0, 0).__dlpack_device__()

    def record_stream(self, stream: Any) -> None:
        """Work on another stream uses the memory: what a shrink or close gives up waits for it, too."""
        with self._lock:
            self._require_open()
            if self._capacity:
                self.pool.record_stream(self.ptr, stream)

    def _exported(self, beyond: int) -> Iterator[Buffer | DeviceArray]:
        """What is in other libraries' hands, or may be, and ends beyond that length."""
        for view in tuple(self._views):
            if view.ptr - self.ptr + view.size <= beyond:
                continue
            if isinstance(view, DeviceArray) or view.views:
                yield view

    def _retire_views(self, length: int) -> None:
        """Free the views that end beyond a length; BufferError where one is in other hands."""
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
        """Bytes: `size`, `capacity`, `pending` (given up, not yet for others), `ready`, `max_size`."""
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
        """Give the memory and the addresses back, in stream order. Again: nothing.

        BufferError as long as another library holds a view. In the child of a fork it does nothing.
        """
        with self._lock:
            if self.closed:
                self._open = False
                return
            if self._busy:
                raise DeviceError("the buffer is being resized; close it after that", code="invalid")
            self._retire_views(0)
            self._open = False
            self.pool.growable_close(self.ptr)
            self._size = self._capacity = 0

    def _require_open(self) -> None:
        if self._open and not self.pool.closed:
            return
        if not self._open:
            raise InvalidFree("the growable buffer was closed; open another one", ptr=self.ptr)
        raise DeviceError(
            "the pool of the growable buffer was closed, or belongs to the parent of a fork", code="closed"
        )

    def __enter__(self) -> GrowableBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_open", False):
            return
        # Nobody has a view: each of them would hold this object.
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
    """A part of a GrowableBuffer with shape and type, for libraries that take `__cuda_array_interface__`.

    Made by `GrowableBuffer.array`. `torch.as_tensor(a, device="cuda")` and `cupy.asarray(a)` are the memory
    itself and keep this object; `buffer` is the same as bytes.
    """

    def __init__(self, buffer: Buffer, shape: tuple[int, ...], typestr: str) -> None:
        """Made by `GrowableBuffer.array`."""
        self.buffer: Final = buffer
        self.shape: Final = shape
        self.typestr: Final = typestr

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        return self.buffer.ptr

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return self.buffer.size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.buffer.__cuda_array_interface__
        return {**interface, "shape": self.shape, "typestr": self.typestr}

    def __repr__(self) -> str:
        where = f"at {self.ptr:#x} on {self.buffer.device.name}"
        return f"<vram.DeviceArray {self.typestr}{list(self.shape)} {where}>"


def pool_of(device: str | Device | Pool | None) -> Pool:
    """The pool itself, or the memory manager's of a device."""
    if isinstance(device, _native.PoolCore):
        return device
    from vram.core.manager import get_memory_manager

    return get_memory_manager().pool(device)


def _checked_max(max_size: int | str) -> int:
    most = parse_size(max_size)
    if not 0 < most <= LARGEST:
        raise ConfigError(
            f"max_size is {format_size(most)}; a growable buffer has addresses for 1 byte to "
            f"{format_size(LARGEST)}",
            max_size=most,
        )
    return most


def _not_opened(pool: Pool, most: int, error: DeviceError | OutOfMemory) -> VramError:
    """The error in words that fit."""
    if isinstance(error, OutOfMemory):
        return OutOfMemory(
            f"no addresses are left for {format_size(most)} in one piece: a pool has a space of sixteen "
            "times its device's memory, 2 TiB at the most. Close other growable buffers, open this one with "
            "a smaller max_size, or in a pool of its own.",
            **{**error.facts, "requested": most},
        )
    if error.code != "unsupported":
        return error
    return DeviceError(
        f"a growable buffer needs a pool with pages, and {pool!r} has none: "
        f"{pool._why_no_pages() or 'its memory is managed by the driver'}. Use a vram.Pool with pages.",
        **error.facts,
    )
