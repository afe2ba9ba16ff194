"""Arena.on_reset: the end of a lifetime releases what refers to its memory. Arrays filled with a value."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE

import vram
from vram import Arena, Device, DeviceError, Pool


@pytest.fixture
def arena() -> Arena:
    return Arena(Pool("host"), name="test")


def test_each_is_called_once_at_the_next_reset_the_last_first(arena: Arena) -> None:
    called: list[int] = []
    for number in range(3):
        arena.on_reset(called.append, number)
    assert called == [] and arena.callbacks == 3
    arena.reset()
    assert called == [2, 1, 0] and arena.callbacks == 0
    arena.reset()
    arena.close()
    assert called == [2, 1, 0]


def test_the_memory_is_not_reused_before(arena: Arena) -> None:
    array = arena.full(1000, 7)
    seen: list[Any] = []
    arena.on_reset(lambda: seen.append((array.sum(), arena.used, arena.check())))
    arena.reset(zero=True)
    assert seen == [(7000, 8000, None)]
    assert arena.empty(1000).sum() == 0


def test_a_checked_array_lives_until_after_its_callbacks() -> None:
    with Arena(Pool("host"), checked=True) as arena:
        array, seen = arena.ones(3), []
        arena.on_reset(lambda: seen.append(float(array.sum())))
        with vram.race_check():
            arena.reset()
        assert seen == [3]
        with pytest.raises(vram.InvalidFree):
            array.sum()


def test_a_scope_ends_with_its_own_callbacks(arena: Arena) -> None:
    called: list[str] = []
    arena.on_reset(called.append, "outer")
    with arena.scope():
        arena.on_reset(called.append, "first")
        with arena.scope():
            arena.on_reset(called.append, "second")
        assert called == ["second"]
        with pytest.raises(DeviceError, match="a scope is open"):
            arena.reset()
        assert called == ["second"]
    assert called == ["second", "first"]
    arena.reset()
    assert called == ["second", "first", "outer"]


@pytest.mark.parametrize("end", [Arena.close, lambda arena: arena.pool.close() or arena.close()])
def test_close_calls_them_also_in_open_scopes(arena: Arena, end: Callable[[Arena], None]) -> None:
    called: list[int] = []
    arena.on_reset(called.append, 1)
    arena.mark()
    arena.on_reset(called.append, 2)
    end(arena)
    assert called == [2, 1] and arena.closed
    with pytest.raises(DeviceError):
        arena.on_reset(called.append, 3)


def test_a_dropped_arena_calls_them_on_whichever_thread_drops_it() -> None:
    called: list[int] = []
    held = [Arena(Pool("host"))]
    held[0].on_reset(called.append, 1)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(PATIENCE)
    assert called == [1]


def test_a_callback_that_refers_to_its_arena_is_collected_and_called() -> None:
    called: list[int] = []

    def dropped() -> weakref.ref[Arena]:
        arena = Arena(Pool("host"))
        arena.on_reset(lambda: called.append(arena.used))
        arena.on_reset(arena.stats)
        return weakref.ref(arena)

    gone = dropped()
    gc.collect()
    assert gone() is None and called == [0]


def test_one_that_raises_keeps_none_of_the_others_and_the_reset_is_done(arena: Arena) -> None:
    called: list[str] = []
    arena.empty(1000)
    arena.on_reset(called.append, "first")
    arena.on_reset(int, "x")
    arena.on_reset(called.append, "last")
    with pytest.raises(ValueError, match="invalid literal"):
        arena.reset()
    assert called == ["last", "first"] and arena.used == 0 and arena.stats().resets == 1
    arena.reset()


def test_several_that_raise_are_a_group(arena: Arena) -> None:
    arena.on_reset(int, "x")
    arena.on_reset({}.__getitem__, "missing")
    with pytest.raises(ExceptionGroup, match="2 errors when a lifetime of 'test' ended") as caught:
        arena.reset()
    assert [type(error) for error in caught.value.exceptions] == [KeyError, ValueError]
    assert arena.stats().resets == 1
    arena.on_reset(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        arena.close()
    assert arena.closed and arena.capacity == 0


def test_a_scope_that_cannot_end_and_a_callback_that_raises() -> None:
    device = Device.model("1GiB", manual=True)
    with Pool(device) as pool, Arena(pool) as arena, vram.Stream(device) as other:
        with pytest.raises(ExceptionGroup) as caught, arena.scope():
            arena.empty(1000, "uint8")
            arena.record_stream(other)
            arena.on_reset(int, "x")
            device._core.backend.fail("event_record")
        assert [type(error) for error in caught.value.exceptions] == [ValueError, DeviceError]
        assert arena.stats().depth == 1 and arena.callbacks == 0
        arena.reset()  # ends the scope as well
        assert arena.used == 0 and arena.check() is None


CHANGES: dict[str, Callable[[Arena], Any]] = {
    "allocate": lambda arena: arena.allocate(1),
    "empty": lambda arena: arena.empty(1),
    "reset": Arena.reset,
    "close": Arena.close,
    "trim": Arena.trim,
    "on_reset": lambda arena: arena.on_reset(int),
    "scope": lambda arena: arena.scope().__enter__(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", ["host", "model:1GiB"])
def test_a_callback_cannot_change_its_arena(change: str, device: str) -> None:
    with Arena(Pool(Device.model("1GiB") if device.startswith("model") else device)) as arena:
        arena.empty(10)
        arena.on_reset(CHANGES[change], arena)
        with pytest.raises(DeviceError, match=r"callback of on_reset\(\) called it"):
            arena.reset()
        assert arena.used == 0 and arena.stats().resets == 1
        arena.empty(10)
        assert arena.check() is None and arena.stats().depth == 0


def test_a_callback_may_use_other_arenas_and_record_streams(arena: Arena) -> None:
    with Arena(arena.pool) as other, vram.Stream("host") as stream:
        other.on_reset(other.stats)
        arena.on_reset(other.reset)
        arena.on_reset(arena.record_stream, stream)
        arena.reset()
        assert other.stats().resets == 1


def test_the_host_calls_them_at_the_reset_although_work_is_queued() -> None:
    device = Device.model("1GiB", manual=True)
    called: list[int] = []
    with Pool(device) as pool, vram.Stream(device) as stream, Arena(pool, stream=stream) as arena:
        arena.empty(1000, "uint8").fill(1)
        arena.on_reset(called.append, 1)
        arena.reset()
        assert called == [1] and not stream.query()


def test_another_thread_is_refused(arena: Arena) -> None:
    called: list[Any] = []

    def elsewhere() -> None:
        for use in (lambda: arena.on_reset(called.append, 1), arena.reset):
            try:
                use()
            except DeviceError as error:
                called.append(error)

    arena.on_reset(called.append, 2)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(PATIENCE)
    assert [type(each) for each in called] == [DeviceError, DeviceError]
    arena.adopt()
    arena.reset()
    assert called[2:] == [2]


def test_a_drop_while_an_error_is_raised_calls_nothing() -> None:
    called: list[int] = []
    opened = threading.Event()
    device = Device("host")
    pool = Pool(device)
    arena = Arena(pool)
    arena.on_reset(called.append, 1)
    arena.allocate(64)
    with vram.Stream(device) as stream:
        used = pool.allocate(64)
        used.record_stream(stream)
        stream.launch(opened.wait)
        used.free()
        closing = threading.Thread(target=pool.close)
        closing.start()
        with pytest.raises(DeviceError, match="closed"):
            while True:  # until the close has begun; it waits for the stream
                pool.allocate(64).free()
        pieces = [arena.allocate(64)]
        opened.set()
        closing.join(PATIENCE)
    with pytest.raises(DeviceError, match="failed to use the buffer"):
        np.ndarray(64, np.uint8, pieces.pop())
    assert called == []
    arena.close()
    assert called == [1]


@pytest.mark.parametrize("callback", [None, 3, "reset"])
def test_what_cannot_be_called(arena: Arena, callback: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        arena.on_reset(callback)
    with pytest.raises(TypeError, match="callable"):
        arena.on_reset(callback, 1)
    arena.reset()


# ---- filled arrays ----------------------------------------------------------------------------------------


def test_filled_arrays_on_the_host(arena: Arena) -> None:
    arena.full(1000, 255, "uint8")
    arena.reset()
    for made, expected in (
        (arena.zeros(3), np.zeros(3)),
        (arena.zeros((2, 3), "int16"), np.zeros((2, 3), "int16")),
        (arena.ones((2, 3), np.float32), np.ones((2, 3), np.float32)),
        (arena.full(4, 7), np.full(4, 7)),
        (arena.full((), True), np.full((), True)),
        (arena.full((2, 2), 1.5, "complex64"), np.full((2, 2), 1.5, "complex64")),
        (arena.full((2, 3), [1, 2, 3], "uint8"), np.full((2, 3), [1, 2, 3], "uint8")),
        (arena.full(3, np.float16(2)), np.full(3, np.float16(2))),
    ):
        assert made.dtype == expected.dtype and made.shape == expected.shape
        np.testing.assert_array_equal(made, expected)
    assert arena.used > 0


@pytest.mark.parametrize(
    ("value", "dtype"), [(300, "uint8"), (1j, float), ("x", "float32"), (float("nan"), int), (object(), None)]
)
@pytest.mark.parametrize("device", ["host", "model"])
def test_a_value_that_the_type_cannot_hold(device: str, value: Any, dtype: Any) -> None:
    with Arena(Pool("host") if device == "host" else Pool(Device.model("1GiB"))) as arena:
        with pytest.raises(vram.ConfigError):
            arena.full(3, value, dtype)
        assert arena.used == 0


def test_a_value_of_another_shape(arena: Arena) -> None:
    with pytest.raises(vram.ConfigError, match="cannot fill an array"):
        arena.full((2, 3), [1, 2])
    assert arena.used == 0


def test_filled_arrays_on_a_device_are_filled_in_stream_order() -> None:
    device = Device.model("1GiB", manual=True)
    with Pool(device) as pool, vram.Stream(device) as stream, Arena(pool, stream=stream) as arena:
        made = [
            arena.zeros((2, 3), "float32"),
            arena.ones(5, "bfloat16"),
            arena.full(4, 7),
            arena.full(4, np.int8(7)),
            arena.full(4, 2**64 - 1),
        ]
        assert not stream.query()
        assert [(each.shape, each.typestr) for each in made] == [
            ((2, 3), "<f4"), ((5,), "|V2"), ((4,), "<i8"), ((4,), "|i1"), ((4,), "<u8"),
        ]  # fmt: skip


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ],
)
@pytest.mark.parametrize("value", [0, 1, 1.5, True, np.float32(3)])
def test_elements_on_a_device_have_the_bytes_that_numpy_writes(dtype: str, value: Any) -> None:
    from vram.lifetimes.elements import element_of, pattern_of

    expected = np.full(37, value, dtype)
    pattern = pattern_of(element_of(dtype), value)
    buffer = Pool("host").allocate(expected.nbytes)
    buffer.fill(pattern)
    buffer.device.synchronize()
    assert bytes(buffer) == expected.tobytes()


def test_bfloat16_rounds_to_the_nearest() -> None:
    from vram.lifetimes.elements import element_of, pattern_of

    patterns = {
        value: pattern_of(element_of("bfloat16"), value).hex() for value in (1, -2.5, 1.00390625, 3.14159)
    }
    assert patterns == {1: "803f", -2.5: "20c0", 1.00390625: "803f", 3.14159: "4940"}
    assert pattern_of(element_of("bfloat16"), float("nan")).hex() == "c07f"


@pytest.mark.parametrize("pattern", [b"", b"abc", b"x" * 17, 256, -1, "a"])
def test_patterns_that_do_not_fill_a_buffer(pattern: Any) -> None:
    buffer = Pool("host").allocate(16)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        buffer.fill(pattern)
