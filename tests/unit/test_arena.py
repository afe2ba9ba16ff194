"""Arenas: one cursor, one lifetime, arrays without a copy, and clear words for what outlives its scope."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE

import vram
from vram import Arena, ConfigError, Device, DeviceError, InvalidFree, OutOfMemory, Pool, Stream

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("host")  # not closed: frames of a test that has ended may hold arrays
    yield pool
    assert pool.check() is None


@pytest.fixture
def arena(pool: Pool) -> Iterator[Arena]:
    with Arena(pool, name="test") as arena:
        yield arena
        assert arena.check() is None


@pytest.fixture
def model() -> Device:
    return Device.model("1GiB", manual=True)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


# ---- allocation -------------------------------------------------------------------------------------------


def test_arrays_follow_each_other(arena: Arena) -> None:
    first, second = arena.empty((3, 5), np.float32), arena.empty(7, "int16")
    assert type(first) is np.ndarray and first.shape == (3, 5) and first.dtype == np.float32
    assert first.flags.c_contiguous and first.flags.writeable and not first.flags.owndata
    assert (address(first) % 4096, address(second)) == (0, address(first) + 64)
    first[:] = 1
    second[:] = 2
    assert first.sum() == 15 and (second == 2).all()
    assert arena.stats().used == 64 + 14 and arena.stats().allocated == 60 + 14


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (0, float),
        ((), int),
        ((2, 0, 3), "f2"),
        ((4,), bool),
        (3, [("a", "i4"), ("b", "f8")]),
        ((2, 3), complex),
    ],
)
def test_any_plain_type_and_shape(arena: Arena, shape: Any, dtype: Any) -> None:
    expected = np.empty(shape, dtype)
    for array in (arena.empty(shape, dtype), arena.empty(shape, expected.dtype)):
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)


def test_bytes_on_any_device_are_a_buffer(arena: Arena, model: Device) -> None:
    for each in (arena, Arena(model)):
        buffer = each.allocate("1KiB", align=1024)
        assert (buffer.size, buffer.shape, buffer.typestr) == (1024, (1024,), "|u1")
        assert buffer.ptr % 1024 == 0 and buffer.pool is each.pool and not buffer.freed
        buffer.fill(3)
        with pytest.raises(InvalidFree, match="part of an arena"):
            buffer.free()
        with buffer:
            pass
        assert not buffer.freed
    assert set(memoryview(arena.allocate(10)).tolist()) <= set(range(256))


@pytest.mark.parametrize("dtype", [object, "O", [("a", object)]])
def test_objects_do_not_lie_in_raw_memory(arena: Arena, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="references to Python objects"):
        arena.empty(3, dtype)


@pytest.mark.parametrize("shape", [[2, 3], (np.int64(2), 3), range(2, 4), np.array([2, 3])])
def test_whatever_says_a_shape(arena: Arena, model: Device, shape: Any) -> None:
    assert arena.empty(shape).shape == Arena(model).empty(shape).shape == (2, 3)
    assert arena.empty(np.int32(7)).shape == Arena(model).empty(np.int32(7)).shape == (7,)


@pytest.mark.parametrize("shape", ["ab", 1.5, (2, None), (2**40, 2**40), 2**70])
def test_what_says_none(arena: Arena, model: Device, shape: Any) -> None:
    for each in (arena, Arena(model)):
        with pytest.raises((ConfigError, OutOfMemory, TypeError, ValueError)):
            each.empty(shape)
        assert each.check() is None


@pytest.mark.parametrize("shape", [-1, (-1, -1, -1), (2, -3)])
def test_a_negative_shape(arena: Arena, model: Device, shape: Any) -> None:
    for each in (arena, Arena(model)):
        with pytest.raises((ConfigError, ValueError)):
            each.empty(shape)
        assert each.check() is None


@pytest.mark.parametrize("align", [0, 3, -8, 1.0, True, 4 * MIB, 2**70, "8"])
def test_a_bad_alignment(arena: Arena, align: Any) -> None:
    for take in (lambda: arena.allocate(1, align=align), lambda: Arena("host", align=align)):
        with pytest.raises(ConfigError, match="power of two"):
            take()


def test_what_allocate_takes(arena: Arena) -> None:
    for bad in ((), (1, 2)):
        with pytest.raises(TypeError):
            arena.allocate(*bad)
    with pytest.raises(TypeError):
        arena.allocate(1, alignment=8)  # type: ignore[call-arg]
    for size in (-1, "many", 1.5, None):
        with pytest.raises((ConfigError, TypeError)):
            arena.allocate(size)  # type: ignore[arg-type]
    assert arena.used == 0


def test_an_alignment_for_all(pool: Pool) -> None:
    with Arena(pool, align=1024) as arena:
        assert [address(arena.empty(1)) % 1024 for _ in range(3)] == [0, 0, 0]


def test_where_memory_comes_from(pool: Pool) -> None:
    assert Arena(pool).pool is pool
    assert Arena("host").pool is vram.get_memory_manager().pool("host")
    with Arena("host", pinned=True, size="1MiB") as pinned:
        assert isinstance(pinned.pool, vram.PinnedPool) and pinned.empty(3).shape == (3,)
    with vram.PinnedPool("host") as page_locked:
        assert Arena(page_locked, pinned=True).pool is page_locked
    with pytest.raises(ConfigError, match="PinnedPool"):
        Arena(pool, pinned=True)
    with pytest.raises(DeviceError):
        Arena("no such device")
    with pytest.raises(ConfigError, match="needs a size"):
        Arena(pool, growable=False)
    with pytest.raises(TypeError):
        Arena(3)  # type: ignore[arg-type]


def test_any_pool_serves(model: Device) -> None:
    for pool in (vram.DriverPool(model), vram.PinnedPool("host"), Pool(Device.model("1GiB", pages=False))):
        with pool, Arena(pool) as arena:
            for _ in range(3):
                places = [arena.empty(size, "uint8") for size in (100, 3 * MIB, 700)]
                assert len(places) == 3 and arena.check() is None
                arena.reset()
            assert arena.stats().requests == arena.stats().chunks
            del places


def test_it_is_under_its_name_in_the_pools_account(arena: Arena, pool: Pool) -> None:
    arena.empty(10)
    assert {leak.tag for leak in pool.leaks()} == {"test"}


# ---- growth and reset -------------------------------------------------------------------------------------


def test_an_iteration_like_the_last_asks_for_nothing(arena: Arena, pool: Pool) -> None:
    places = []
    for iteration in range(4):
        arrays = [arena.empty(n, np.uint8) for n in (100, 3 * MIB, 5, MIB, 7 * MIB)]
        for number, array in enumerate(arrays):
            array[:] = number
        assert all((array == number).all() for number, array in enumerate(arrays))
        places.append([address(array) for array in arrays])
        requests = arena.stats().requests
        arena.reset()
        assert arena.used == 0 and (iteration == 0 or requests == arena.stats().requests)
    assert places[0] == places[1] == places[2] == places[3]
    assert arena.stats().requests == arena.stats().chunks <= 4
    assert pool.live_bytes() == arena.capacity


def test_a_fixed_arena_is_full_with_numbers(pool: Pool) -> None:
    with Arena(pool, "1MiB", growable=False, name="small") as arena:
        arena.empty(MIB - 64, np.uint8)
        with pytest.raises(OutOfMemory, match="'small', which is 1 MiB and cannot grow") as caught:
            arena.empty(65, np.uint8)
        assert (caught.value.requested, caught.value.allocated, caught.value.arena) == (65, MIB - 64, "small")
        assert pickle.loads(pickle.dumps(caught.value)).report["limit"] == MIB
        assert arena.empty(64, np.uint8).size == 64 and not arena.growable


def test_out_of_memory_in_the_middle_of_a_growth_and_a_scope(model: Device) -> None:
    with Pool(model, limit="16MiB") as pool, Arena(pool, checked=True) as arena:
        kept = arena.empty(MIB, np.uint8)
        with pytest.raises(OutOfMemory, match="limit"), arena.scope():
            for _ in range(100):
                last = arena.empty(MIB, np.uint8)
        assert last.freed and not kept.freed and arena.check() is None
        assert arena.stats().depth == 0 and arena.used == MIB
        with arena.scope():
            arena.empty(8 * MIB, np.uint8)
        assert pool.live_bytes() == arena.capacity <= 16 * MIB


def test_a_size_that_cannot_be_allocated(model: Device) -> None:
    with Pool(model, limit="8MiB") as pool:
        for growable in (True, False):
            with pytest.raises(OutOfMemory, match="limit") as caught:
                Arena(pool, "9MiB", growable)
            assert caught.value.requested == 9 * MIB
        assert pool.live_bytes() == 0


def test_high_water_is_the_size_of_a_fixed_arena_for_the_same(pool: Pool) -> None:
    def take(arena: Arena) -> None:
        for size in (1, 5 * MIB, 33, 2 * MIB, 64, 3 * MIB):
            arena.empty(size, np.uint8)

    with Arena(pool) as first:
        take(first)
        need = first.high_water
        first.reset()
        assert first.high_water == need
        first.reset_peak()
        assert first.high_water == 0
    with Arena(pool, need, growable=False) as second:
        take(second)
        assert second.capacity == need
    with Arena(pool, need - 1, growable=False) as third, pytest.raises(OutOfMemory):
        take(third)


def test_trim_makes_many_chunks_one(arena: Arena, pool: Pool) -> None:
    def iterate() -> None:
        for _ in range(20):
            arena.empty(MIB, np.uint8)

    iterate()
    assert arena.stats().chunks > 1
    arena.reset()
    arena.trim()
    assert arena.capacity == pool.live_bytes() == 0
    iterate()
    assert arena.stats().chunks == 1 and arena.capacity == arena.high_water


def test_a_zeroing_reset_on_the_host(arena: Arena) -> None:
    for _ in range(3):
        for size in (10, 3 * MIB, 100):
            array = arena.empty(size, np.uint8)
            if arena.stats().resets:
                assert not array.any()
            array[:] = 255
        with arena.scope():
            arena.empty(100)[:] = 1
        arena.reset(zero=True)


def test_the_arena_may_be_trimmed_when_memory_is_short(model: Device) -> None:
    with Pool(model, limit="16MiB") as pool, Arena(pool) as arena:
        with arena.scope():
            arena.empty(12 * MIB, np.uint8)
        pool.on_oom(lambda: arena.trim() or True)
        assert pool.allocate(12 * MIB).size == 12 * MIB and arena.capacity < 12 * MIB


# ---- scopes -----------------------------------------------------------------------------------------------


def test_scopes_nest_and_rewind(arena: Arena) -> None:
    outside = arena.empty(10)
    with arena.scope():
        first = arena.empty(10)
        with arena.scope():
            second = arena.empty(4 * MIB, np.uint8)
            assert arena.stats().depth == 2
        assert address(arena.empty(4 * MIB, np.uint8)) == address(second)
    assert address(arena.empty(10)) == address(first) > address(outside)
    assert arena.stats().depth == 0


def test_a_scope_decorates_and_may_be_entered_within_itself(arena: Arena) -> None:
    @arena.scope()
    def factorial(n: int) -> float:
        value = arena.empty(1)
        value[0] = n
        return float(value[0]) * (factorial(n - 1) if n > 1 else 1.0)

    assert factorial(6) == 720 and arena.used == 0
    assert arena.high_water == 5 * 64 + 8


def test_a_scope_ends_with_an_exception(arena: Arena) -> None:
    with pytest.raises(KeyError), arena.scope():
        arena.empty(10)
        raise KeyError
    assert arena.used == 0


def test_scopes_that_end_out_of_order(arena: Arena) -> None:
    outer, inner = arena.scope(), arena.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(DeviceError, match="a scope is open"):
        arena.reset()
    outer.__exit__()
    with pytest.raises(DeviceError, match="already ended") as caught:
        inner.__exit__()
    assert caught.value.arena == "test"
    arena.reset()


def test_an_arena_closed_within_its_scope(pool: Pool) -> None:
    arena = Arena(pool)
    with arena.scope():
        arena.empty(1)
        arena.close()
    assert arena.closed and pool.live_bytes() == 0


# ---- what outlives its scope ------------------------------------------------------------------------------

USES: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda a: a + 1,
    "right": lambda a: 1 - a,
    "in place": lambda a: a.__iadd__(1),
    "item": lambda a: a[0],
    "assignment": lambda a: a.__setitem__(0, 1),
    "method": lambda a: a.sum(),
    "function": lambda a: np.sum(a),
    "out": lambda a: np.add(np.ones(4), 1, out=a),
    "list argument": lambda a: np.concatenate([np.ones(2), a]),
    "keyword": lambda a: np.sum(np.ones((1, 4)), axis=0, out=a),
    "matmul": lambda a: a @ np.ones(4),
    "iteration": lambda a: list(a),
    "attribute": lambda a: a.T,
    "shape": lambda a: a.shape,
    "comparison": lambda a: a == 0,
    "truth": lambda a: bool(a[:1]),
    "repr": lambda a: repr(a),
    "pickle": lambda a: pickle.dumps(a),
    "copy": lambda a: a.copy(),
    "reduction": lambda a: np.add.reduce(a),
}


@pytest.fixture
def checked(pool: Pool) -> Iterator[Arena]:
    with Arena(pool, checked=True, name="checked") as arena:
        yield arena


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_use_after_the_scope_raises_with_the_place(checked: Arena, use: Callable[[Any], Any]) -> None:
    with checked.scope():
        array = checked.empty(4)
        array[:] = 1
        views = [array[1:][:-1].reshape(2, 1).T, array.view()]
        use(array)
    for late in (array, views[1]):
        with pytest.raises(InvalidFree, match="after its lifetime") as caught:
            use(late)
        assert caught.value.stack[0].name == "test_a_use_after_the_scope_raises_with_the_place"
        assert __file__ in str(caught.value) and caught.value.size == 32
    with pytest.raises(InvalidFree):
        views[0].sum()


def test_reset_and_close_end_lifetimes_too(pool: Pool) -> None:
    arena = Arena(pool, checked=True)
    first = arena.empty(4)
    arena.reset()
    second = arena.empty(4)
    second[:] = 5
    with pytest.raises(InvalidFree):
        _ = first + 1
    assert second.sum() == 20
    arena.close()
    with pytest.raises(InvalidFree):
        _ = second + 1


def test_results_and_copies_last(checked: Arena) -> None:
    with checked.scope():
        array = checked.empty(4)
        array[:] = 2
        total, copy, both = array + 1, array.copy(), np.concatenate([array, array])
        added = np.add(array, 1, out=array)
        assert added is array
    assert total.sum() == 12 and copy.sum() == 8 and both.sum() == 16 and type(total) is np.ndarray


def test_what_python_cannot_see_reads_nan(checked: Arena) -> None:
    with checked.scope():
        array = checked.empty(4)
        array[:] = 1
        hidden = np.asarray(array)
    assert np.isnan(hidden).all()


@pytest.mark.parametrize("how", [True, False])
def test_a_buffer_of_a_device_knows_its_end_checked_or_not(model: Device, how: bool) -> None:
    with Arena(model, checked=how) as arena:
        with arena.scope():
            buffer = arena.empty((2, 3), "float16")
            assert (buffer.shape, buffer.typestr, buffer.size) == ((2, 3), "<f2", 12)
            buffer.__dlpack__()
        assert buffer.freed and "ended" in repr(buffer)
        uses: list[Callable[[], Any]] = [
            lambda: buffer.fill(1),
            lambda: buffer.copy_to(bytearray(12)),
            lambda: buffer.record_stream(None),
            lambda: buffer.__dlpack__(),
            lambda: arena.empty(12, "uint8").copy_from(buffer),
        ]
        for use in uses:
            with pytest.raises(InvalidFree, match="test_arena.py" if how else "checked=True"):
                use()


# ---- devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "typestr"),
    [
        (float, "<f8"),
        ("float32", "<f4"),
        (np.float16, "<f2"),
        (np.dtype("int8"), "|i1"),
        ("bfloat16", "|V2"),
        (bool, "|b1"),
        ("uint64", "<u8"),
        (complex, "<c16"),
        ("i4", "<i4"),
    ],
)
def test_types_on_a_device(model: Device, dtype: Any, typestr: str) -> None:
    buffer = Arena(model).empty((3, 2), dtype)
    assert (buffer.typestr, buffer.shape) == (typestr, (3, 2))


def test_types_that_no_device_has(model: Device) -> None:
    for dtype in ("nonsense", object, [("a", int)], np.dtype("M8[s]")):
        with pytest.raises(ConfigError, match="not a valid dtype"):
            Arena(model).empty(3, dtype)


def test_dlpack_has_shape_and_type(model: Device, arena: Arena) -> None:
    view = vram.from_dlpack(Arena(model).empty((4, 1, 3), "int32"))
    assert (view.shape, view.typestr, view.size, view.contiguous) == ((4, 1, 3), "<i4", 48, True)
    assert vram.from_dlpack(Arena(model).empty((), "bool")).shape == ()
    plain = np.from_dlpack(arena.allocate(16))
    assert plain.shape == (16,)


def test_pinned_memory_and_copies_in_order(pool: Pool) -> None:
    with Stream("host") as stream, Arena("host", pinned=True, size="1MiB") as arena:
        source, target = arena.allocate(1000), pool.allocate(1000)
        source.fill(7, stream=stream)
        target.copy_from(source, stream=stream)
        stream.synchronize()
        assert set(memoryview(target)) == {7}


# ---- order ------------------------------------------------------------------------------------------------


def test_a_reset_waits_by_stream_order_and_not_on_the_host(model: Device) -> None:
    backend: Any = model.backend
    compute, other = Stream(model), Stream(model)
    with Pool(model) as pool, Arena(pool, stream=compute) as arena:
        buffer = arena.empty(MIB, np.uint8)
        other.wait_stream(compute)
        buffer.fill(1, stream=other)
        arena.reset(zero=True)
        again = arena.empty(MIB, np.uint8)
        assert again.ptr == buffer.ptr
        again.fill(2)
        assert len(backend.executed()) == 0  # the host has not waited
        while backend.step(compute.handle):
            pass
        assert len(backend.executed()) == 0  # and the arena's stream does
        compute.synchronize()
        # Told by the use: other's fill, then zeroing and our own.
        assert len(backend.executed()) == 3
        arena.record_stream(other)
        other.close()
        arena.reset()
        compute.close()
        arena.empty(10, np.uint8).fill(1, stream=None)
        assert arena.stream == 0


def test_host_memory_that_queued_work_uses_rests(pool: Pool) -> None:
    gate = threading.Event()
    with Stream("host") as stream, Arena(pool, "2MiB") as arena:
        first = arena.empty(100, np.uint8)
        stream.launch(gate.wait, PATIENCE)
        stream.launch(first.fill, 7)
        arena.record_stream(stream)
        arena.reset()  # does not wait
        second = arena.empty(100, np.uint8)
        second[:] = 1
        assert address(second) != address(first) and arena.stats().resting == 2 * MIB
        gate.set()
        stream.synchronize()
        assert (first == 7).all() and (second == 1).all()
        arena.reset()
        arena.empty(2 * MIB, np.uint8)
        arena.empty(2 * MIB, np.uint8)
        assert arena.stats().resting == 0 and arena.capacity == 4 * MIB and arena.stats().host_waits == 0


def test_a_race_is_found_where_a_stream_was_not_told() -> None:
    device = Device.model("1GiB", manual=True)
    with vram.race_check("collect") as found, Pool(device) as pool:
        stream, arena = Stream(device), Arena(pool)
        buffer = arena.empty(MIB, np.uint8)
        buffer.fill(0)
        stream.wait_stream(Stream.default(device))
        stream.launch(lambda memory: None, buffer)
        arena.reset()
        assert [race.kind for race in found.races] == ["free"]
        buffer = arena.empty(MIB, np.uint8)
        stream.wait_stream(Stream.default(device))
        stream.launch(lambda memory: None, buffer)
        arena.record_stream(stream)
        arena.reset()
        arena.empty(MIB, np.uint8).fill(1)
        assert len(found.races) == 1
        found.races.clear()


# ---- threads ----------------------------------------------------------------------------------------------


def elsewhere(work: Callable[[], Any]) -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    return caught[0] if caught else None


def test_another_thread_is_refused_until_it_adopts(arena: Arena) -> None:
    array = arena.empty(10)
    for work in (lambda: arena.empty(1), arena.reset, arena.scope().__enter__, arena.trim, arena.close):
        error = elsewhere(work)
        assert isinstance(error, DeviceError) and "adopt()" in str(error) and error.arena == "test"
    assert elsewhere(lambda: array.fill(3)) is None  # arrays are anybody's
    assert elsewhere(lambda: (arena.stats(), repr(arena), arena.record_stream(None))) is None
    assert elsewhere(lambda: (arena.adopt(), arena.empty(10))) is None
    with pytest.raises(DeviceError, match="another thread"):
        arena.empty(1)
    arena.adopt()
    arena.reset()


def test_each_thread_has_its_own(pool: Pool) -> None:
    def work(number: int) -> None:
        with Arena(pool) as arena:
            for _ in range(50):
                arrays = [arena.empty(1000, np.int64) for _ in range(20)]
                for array in arrays:
                    array[:] = number
                assert all((array == number).all() for array in arrays)
                arena.reset()

    errors: list[BaseException | None] = []
    threads = [
        threading.Thread(target=lambda n=n: errors.append(elsewhere(lambda: work(n)))) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == [None] * 4 and pool.live_bytes() == 0


# ---- end --------------------------------------------------------------------------------------------------


def test_arrays_keep_the_memory_they_look_at(pool: Pool) -> None:
    arena = Arena(pool)
    array = arena.empty(1000)
    array[:] = 3
    arena.close()
    assert arena.closed and pool.live_bytes() > 0
    assert (array == 3).all()  # over, but not somebody else's
    with pytest.raises(DeviceError):
        arena.empty(1)
    with pytest.raises(BufferError, match="view"):
        pool.close()
    del array
    gc.collect()
    assert pool.live_bytes() == 0
    arena.close()


def test_an_arena_goes_with_its_last_array(pool: Pool) -> None:
    arena = Arena(pool)
    array, gone = arena.empty(1000), weakref.ref(arena)
    gc.disable()  # no cycle is in the way
    del arena
    assert pool.live_bytes() > 0
    array[:] = 1
    del array
    gc.enable()
    assert gone() is None and pool.live_bytes() == 0


def test_a_cycle_through_the_pool_is_collected() -> None:
    pool = Pool("host")
    arena = Arena(pool, "1MiB")
    pool.on_oom(arena.trim)
    gone = weakref.ref(pool)
    del pool, arena
    gc.collect()
    assert gone() is None


def test_a_pool_that_is_closed_under_it(pool: Pool) -> None:
    with Pool("host") as other:
        arena = Arena(other)
        arena.empty(1)
        gc.collect()
    assert arena.closed and "closed" in repr(arena)
    for use in (lambda: arena.empty(1), arena.reset, lambda: arena.scope().__enter__()):
        with pytest.raises(DeviceError):
            use()
    arena.close()


# ---- what it says of itself -------------------------------------------------------------------------------


def test_repr(arena: Arena) -> None:
    arena.empty(1000, np.uint8)
    with arena.scope():
        assert repr(arena) == (
            "<vram.Arena 'test' on host: 1000 B used of 2 MiB in 1 chunk, high water 1000 B, 1 open scope>"
        )
    assert repr(Arena.__new__(Arena)) == "<vram.Arena, not created>"


def test_a_report_of_several(pool: Pool, model: Device) -> None:
    with Arena(pool, name="forward") as forward, Arena(pool, name="backward") as backward:
        forward.empty(3 * MIB, np.uint8)
        backward.empty(5 * MIB, np.uint8)
        backward.reset()
        report = vram.arena_report(forward, backward)
        assert (report.apart, report.shared) == (8 * MIB, 5 * MIB)
        assert [line.high_water for line in report.arenas] == [3 * MIB, 5 * MIB]
        assert str(report).splitlines() == [
            "arena       high water   held",
            "forward          3 MiB  3 MiB",
            "backward         5 MiB  5 MiB",
            "apart            8 MiB",
            "one shared       5 MiB",
        ]
        with pytest.raises(ConfigError, match="different memory"):
            vram.arena_report(forward, Arena(model))
    with pytest.raises(ConfigError, match="needs the arenas"):
        vram.arena_report()
