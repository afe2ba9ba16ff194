"""Buffers: views and their lifetimes, fills and copies in stream order, and what a buffer tells."""

from __future__ import annotations

import ctypes
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE

import vram
from vram import DeviceError, InvalidFree, Pool, Stream

KIB, MIB = 1 << 10, 1 << 20
TIMEOUT = PATIENCE


@pytest.fixture
def pool() -> Iterator[Pool]:
    with vram.Pool("host") as made:
        yield made
        assert made.check() is None


@pytest.fixture
def model() -> Iterator[Pool]:
    with vram.Pool(vram.Device.model("1GiB")) as made:
        yield made


def capsule_name(capsule: Any) -> bytes:
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return get_name(capsule)


# ---- what a buffer tells ------------------------------------------------------------------------------


def test_a_buffer_tells_what_it_is(pool: Pool) -> None:
    with Stream("host") as stream:
        buffer = pool.allocate("1MiB", stream=stream, tag="weights")
        assert (buffer.size, len(buffer), buffer.tag) == (MIB, MIB, "weights")
        assert buffer.stream == stream.handle
        assert buffer.device == pool.device and buffer.pool is pool and not buffer.freed
        assert f"{MIB} bytes" in repr(buffer) and hex(buffer.ptr) in repr(buffer) and "host" in repr(buffer)
        buffer.free()
        assert buffer.freed and "freed" in repr(buffer)
    assert pool.allocate(10).tag is None and pool.allocate(10).stream == 0


def test_facts_of_a_buffer_cannot_be_set(pool: Pool) -> None:
    buffer = pool.allocate(10)
    for name in ("ptr", "size", "device", "stream", "tag", "freed", "other"):
        with pytest.raises(AttributeError):
            setattr(buffer, name, 1)


def test_a_buffer_is_made_by_a_pool_only(pool: Pool) -> None:
    with pytest.raises(TypeError):
        vram.Buffer()
    with pytest.raises(TypeError):
        type("Mine", (vram.Buffer,), {})
    with pytest.raises(TypeError):
        pickle.dumps(pool.allocate(10))


def test_the_tag_in_force_is_the_buffers(pool: Pool) -> None:
    with vram.tag("outer"):
        outer = pool.allocate(10)
        with vram.tag("inner"):
            inner, given = pool.allocate(10), pool.allocate(10, tag="given")
        batch = pool.allocate_batch([10, 10])
    assert [buffer.tag for buffer in (outer, inner, given, *batch)] == [
        "outer",
        "inner",
        "given",
        *["outer"] * 2,
    ]
    assert pool.allocate(10).tag is None
    with pytest.raises(TypeError):
        pool.allocate(10, tag=7)  # type: ignore[arg-type]


def test_a_buffer_frees_itself_at_the_end_of_its_block(pool: Pool) -> None:
    with pool.allocate(MIB) as buffer:
        assert not buffer.freed and pool.stats().live == 1
    assert buffer.freed and pool.stats().live == 0
    with pool.allocate(MIB) as early:
        early.free()
    with pytest.raises(ZeroDivisionError), pool.allocate(MIB):
        raise ZeroDivisionError
    assert pool.stats().live == 0


def test_weak_references_end_with_the_buffer(pool: Pool) -> None:
    ended: list[str] = []
    buffer = pool.allocate(MIB)
    weak = weakref.ref(buffer, lambda _: ended.append("gone"))
    assert weak() is buffer
    del buffer
    assert weak() is None and ended == ["gone"]


def test_buffers_are_told_apart_by_identity(pool: Pool) -> None:
    one, two = pool.allocate(10), pool.allocate(10)
    assert one != two and one == one and len({one, two, one}) == 2


def test_arguments_are_named_or_refused(pool: Pool) -> None:
    assert pool.allocate(size=10).size == 10
    for arguments, named in [((), {}), ((1, 2), {}), ((1,), {"size": 2}), ((1,), {"aline": 512})]:
        with pytest.raises(TypeError):
            pool.allocate(*arguments, **named)
    for arguments, named in [((), {}), ((1, 0, 0), {}), ((1,), {"steam": 0})]:
        with pytest.raises(TypeError):
            pool.malloc(*arguments, **named)
    assert pool.stats().live == 0


# ---- views --------------------------------------------------------------------------------------------


def test_a_memoryview_is_the_memory_itself(pool: Pool) -> None:
    buffer = pool.allocate(1000)
    with memoryview(buffer) as view:
        assert (view.nbytes, view.format, view.itemsize, view.readonly) == (1000, "B", 1, False)
        view[:] = bytes(range(250)) * 4
        assert ctypes.string_at(buffer.ptr, 1000) == bytes(view) == bytes(buffer) == bytes(range(250)) * 4
    array = np.frombuffer(buffer, dtype=np.uint8)
    assert array.ctypes.data == buffer.ptr and array.size == 1000
    array[3] = 99
    assert bytes(buffer)[3] == 99


def test_views_keep_the_memory_and_stop_free(pool: Pool) -> None:
    buffer = pool.allocate(4 * KIB)
    view, array = memoryview(buffer), np.frombuffer(buffer, dtype=np.uint8)
    for _ in range(2):
        with pytest.raises(BufferError, match="view"):
            buffer.free()
    with pytest.raises(BufferError, match="view"), buffer:
        pass
    del view
    with pytest.raises(BufferError):
        buffer.free()
    del array
    buffer.free()
    assert pool.stats().live == 0


def test_a_view_outlives_its_buffers_name(pool: Pool) -> None:
    view = memoryview(pool.allocate(4 * KIB))
    array = np.from_dlpack(pool.allocate(4 * KIB))
    gc.collect()
    assert pool.stats().live == 2
    view[:] = b"\1" * len(view)
    array[:] = 2
    assert set(bytes(view)) == {1} and set(bytes(array)) == {2}
    del view, array
    assert pool.stats().live == 0


def test_views_stop_the_pool_from_closing() -> None:
    pool = vram.Pool("host")
    buffer = pool.allocate(4 * KIB)
    view, array = memoryview(buffer), np.from_dlpack(buffer)
    with pytest.raises(BufferError, match="2 view"):
        pool.close()
    assert not pool.closed
    view[0] = array[0] = 1
    view.release()
    with pytest.raises(BufferError, match="1 view"):
        pool.close()
    del array
    pool.close()


def test_a_view_keeps_a_forgotten_pool_alive() -> None:
    pool = vram.Pool("host")
    gone = weakref.ref(pool)
    view = memoryview(pool.allocate(MIB))
    del pool
    gc.collect()
    view[:] = b"\5" * MIB
    assert gone() is not None and view[-1] == 5
    del view
    gc.collect()
    assert gone() is None


def test_size_0_has_views_too(pool: Pool) -> None:
    buffer = pool.allocate(0)
    assert bytes(buffer) == b"" and memoryview(buffer).nbytes == 0
    assert np.from_dlpack(buffer).size == 0 and np.frombuffer(bytearray(buffer), np.uint8).size == 0
    buffer.fill(1)
    buffer.copy_from(b"")
    buffer.copy_to(bytearray())
    buffer.copy_from(pool.allocate(0))


def test_memory_that_the_host_cannot_read_has_no_views(model: Pool) -> None:
    buffer = model.allocate(MIB)
    with pytest.raises(BufferError):
        memoryview(buffer)
    with pytest.raises((BufferError, RuntimeError)):  # its DLPack device is one that numpy does not know
        np.from_dlpack(buffer)
    buffer.free()


# ---- DLPack -------------------------------------------------------------------------------------------


def test_numpy_takes_the_memory_without_a_copy(pool: Pool) -> None:
    buffer = pool.allocate(1000)
    array = np.from_dlpack(buffer)
    assert (array.ctypes.data, array.dtype, array.shape) == (buffer.ptr, np.uint8, (1000,))
    array[:] = 7
    assert bytes(buffer) == b"\7" * 1000
    assert buffer.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize(
    ("max_version", "name"),
    [
        (None, b"dltensor"),
        ((0, 8), b"dltensor"),
        ((1, 0), b"dltensor_versioned"),
        ((1, 3), b"dltensor_versioned"),
    ],
)
def test_capsules_of_both_generations_are_consumed(
    pool: Pool, max_version: tuple[int, int] | None, name: bytes
) -> None:
    class Exporter:
        """What an importer of one generation asks for, whatever numpy asks itself."""

        def __init__(self, buffer: vram.Buffer) -> None:
            self.buffer = buffer

        def __dlpack__(self, **_: object) -> object:
            return self.buffer.__dlpack__(max_version=max_version)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.buffer.__dlpack_device__()

    assert capsule_name(pool.allocate(64).__dlpack__(max_version=max_version)) == name
    buffer = pool.allocate(64)
    buffer.copy_from(b"\3" * 64)
    array = np.from_dlpack(Exporter(buffer))  # numpy reads the old kind only
    del buffer
    assert array.sum() == 3 * 64 and pool.stats().live == 1
    del array
    gc.collect()
    assert pool.stats().live == 0


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_capsule_that_nobody_consumed_lets_go(pool: Pool, max_version: Any) -> None:
    buffer = pool.allocate(64)
    capsule = buffer.__dlpack__(max_version=max_version)
    with pytest.raises(BufferError):
        buffer.free()
    del capsule
    buffer.free()
    capsule = pool.allocate(64).__dlpack__(max_version=max_version)
    assert pool.stats().live == 1
    del capsule
    assert pool.stats().live == 0


def test_an_export_that_cannot_be_is_a_buffer_error(pool: Pool) -> None:
    buffer = pool.allocate(64)
    for request in ({"copy": True}, {"stream": 1}, {"dl_device": (2, 0)}, {"dl_device": (1, 5)}):
        with pytest.raises(BufferError):
            buffer.__dlpack__(**request)
    for request in ({"max_version": "1.0"}, {"max_version": [1, 0]}, {"dl_device": [1, 0]}, {"dl_device": 1}):
        with pytest.raises(TypeError):
            buffer.__dlpack__(**request)
    buffer.free()


def test_arrays_may_be_dropped_on_other_threads(pool: Pool) -> None:
    arrays = [np.from_dlpack(pool.allocate(4 * KIB)) for _ in range(100)]
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    assert pool.stats().live == 0


# ---- fills and copies ---------------------------------------------------------------------------------


def test_fill_sets_every_byte(pool: Pool) -> None:
    buffer = pool.allocate(5000)
    buffer.fill(0xAB)
    pool.device.synchronize()
    assert bytes(buffer) == b"\xab" * 5000
    for value in (-1, 256, 2**40):
        with pytest.raises((ValueError, OverflowError)):
            buffer.fill(value)
    with pytest.raises(TypeError):
        buffer.fill("a")  # type: ignore[arg-type]


def test_fill_repeats_a_pattern(pool: Pool) -> None:
    buffer = pool.allocate(5000)
    for pattern in (b"a", b"ab", b"abcde", b"abcdefgh", bytes(10)):
        buffer.fill(pattern)
        pool.device.synchronize()
        assert bytes(buffer) == pattern * (5000 // len(pattern))
    for pattern in (b"", b"abc", b"x" * 20):
        with pytest.raises(ValueError, match="divide the size"):
            buffer.fill(pattern)


@pytest.mark.parametrize(
    "make", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, dtype=np.float64).copy()]
)
def test_copies_from_host_memory_are_done_when_they_return(pool: Pool, make: Any) -> None:
    data = np.random.default_rng(1).bytes(8000)
    buffer = pool.allocate(8000)
    buffer.copy_from(make(data))
    assert bytes(buffer) == data


@pytest.mark.parametrize("make", [bytearray, lambda size: np.zeros(size // 8, dtype=np.int64)])
def test_copies_to_host_memory_are_done_when_they_return(pool: Pool, make: Any) -> None:
    data = np.random.default_rng(2).bytes(8000)
    buffer, target = pool.allocate(8000), make(8000)
    buffer.copy_from(data)
    buffer.copy_to(target)
    assert bytes(target) == data


def test_copies_between_buffers(pool: Pool) -> None:
    one, two, three = (pool.allocate(MIB) for _ in range(3))
    one.fill(1)
    two.copy_from(one)
    two.copy_to(three)
    pool.device.synchronize()
    assert bytes(three) == b"\1" * MIB
    three.copy_from(three)


def test_copies_between_pools_of_one_device(pool: Pool) -> None:
    with vram.Pool("host", pages=False) as other, Stream("host") as stream:
        theirs, ours = other.allocate(MIB), pool.allocate(MIB)
        theirs.fill(4)
        pool.device.synchronize()
        ours.copy_from(theirs, stream=stream)
        theirs.free()
        ours.free()
        assert pool.stats().pending == other.stats().pending == MIB
        stream.synchronize()
        assert other.check() is None


def test_copies_between_host_and_device_are_made_by_the_device(pool: Pool, model: Pool) -> None:
    """Addresses of a model mean nothing to the host; following them would end the process."""
    ours, theirs = pool.allocate(MIB), model.allocate(MIB)
    ours.copy_from(theirs)
    ours.copy_to(theirs)
    theirs.copy_from(ours)  # a device takes host memory
    theirs.copy_to(ours)
    pool.device.synchronize()
    assert pool.check() is None and model.check() is None


def test_copies_of_different_sizes_are_refused(pool: Pool) -> None:
    buffer = pool.allocate(100)
    for other in (bytes(99), bytearray(101), pool.allocate(512), np.zeros(100)):
        for copy in (buffer.copy_from, buffer.copy_to):
            with pytest.raises((ValueError, BufferError)):
                copy(other)


def test_copies_with_memory_that_will_not_do_are_refused(pool: Pool) -> None:
    buffer = pool.allocate(100)
    with pytest.raises(BufferError):
        buffer.copy_to(bytes(100))  # read-only
    with pytest.raises((BufferError, ValueError)):
        buffer.copy_from(np.zeros(200, np.uint8)[::2])
    for nothing in (None, 1, "text"):
        with pytest.raises(TypeError):
            buffer.copy_from(nothing)  # type: ignore[arg-type]


def test_fills_and_copies_keep_stream_order(pool: Pool) -> None:
    gate = threading.Event()
    with Stream("host") as stream:
        buffer, copy = (pool.allocate(MIB, stream=stream) for _ in range(2))
        stream.launch(gate.wait, TIMEOUT)
        buffer.fill(1)
        copy.copy_from(buffer)
        buffer.fill(2)
        assert not stream.query()
        gate.set()
        stream.synchronize()
        assert (bytes(copy), bytes(buffer)) == (b"\1" * MIB, b"\2" * MIB)


def test_a_fill_on_another_stream_is_a_recorded_use(pool: Pool) -> None:
    gate = threading.Event()
    with Stream("host") as stream:
        buffer = pool.allocate(MIB)
        stream.launch(gate.wait, TIMEOUT)
        buffer.fill(1, stream=stream)
        buffer.free()
        pending = pool.stats().pending
        gate.set()
        stream.synchronize()
        assert pending == MIB
        pool.coalesce()
        assert pool.stats().pending == 0


def test_other_threads_run_while_a_copy_waits(pool: Pool) -> None:
    """copy_to waits for the stream without the GIL: the function it waits for needs it."""
    with Stream("host") as stream:
        buffer, ran = pool.allocate(1000, stream=stream), []
        buffer.fill(9)
        stream.launch(lambda: ran.append(sum(range(1000))))
        target = bytearray(1000)
        buffer.copy_to(target)
        assert ran and bytes(target) == b"\11" * 1000


# ---- misuse that must not end the process -------------------------------------------------------------


def test_a_pool_that_was_never_made_is_refused() -> None:
    empty = vram.Pool.__new__(vram.Pool)
    for use in (lambda: empty.allocate(1), lambda: empty.malloc(1), lambda: empty.free(512), empty.coalesce):
        with pytest.raises((DeviceError, RuntimeError)):
            use()
    assert repr(empty)


def test_a_pool_is_made_once(pool: Pool) -> None:
    buffer = pool.allocate(MIB)
    with pytest.raises(RuntimeError):
        pool.__init__("host")  # type: ignore[misc]
    buffer.free()
    with pytest.raises(InvalidFree):
        buffer.free()


def test_sizes_that_change_the_list_they_are_in(pool: Pool) -> None:
    sizes: list[Any] = []

    class Clears:
        def __index__(self) -> int:
            sizes.clear()
            return 512

    sizes.extend([Clears(), *[2048 + index for index in range(100)]])
    assert len(pool.allocate_batch(sizes)) in (1, 101)
    assert pool.check() is None


# ---- the stream it was allocated on ---------------------------------------------------------------------


def test_a_buffer_keeps_its_stream_open() -> None:
    device = vram.Device.model("1GiB", manual=True)
    pool = vram.Pool(device)
    buffer = pool.allocate(4096, stream=vram.Stream(device))  # nobody else holds it
    gc.collect()
    buffer.fill(1)
    assert device.backend.counts()["streams"] == 2
    buffer.free()
    del buffer
    assert device.backend.counts()["streams"] == 1


def test_what_is_done_on_a_closed_stream_is_refused() -> None:
    device = vram.Device.model("1GiB")
    pool, stream = vram.Pool(device), vram.Stream(device)
    buffer, [other] = pool.allocate(4096, stream=stream), pool.allocate_batch([4096], stream=stream)
    stream.close()
    for work in (
        lambda: buffer.fill(1),
        lambda: buffer.copy_from(other),
        lambda: buffer.__dlpack__(stream=1),
    ):
        with pytest.raises(vram.DeviceError, match="was closed"):
            work()
    buffer.fill(1, stream=vram.Stream(device))
    buffer.free()
    other.free()
    assert pool.check() is None
