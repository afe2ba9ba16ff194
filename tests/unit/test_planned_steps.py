"""`vram.planned`: steps recorded, planned and served from their offsets; whatever differs is the pool's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import vram
from vram import (
    ConfigError,
    Device,
    DeviceError,
    DriverPool,
    Graph,
    InvalidFree,
    OutOfMemory,
    PinnedPool,
    Stream,
)

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(params=["host", "model", "plain model"])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    device = (
        Device("host") if request.param == "host" else Device.model("1GiB", pages=request.param == "model")
    )
    with vram.Pool(device) as made:
        yield made
        assert made.check() is None


def chain(pool: Any, sizes: list[int], stream: Any = None) -> list[int]:
    """Each buffer lives until the next but one is there, as activations do; returns the addresses."""
    held: list[Any] = []
    seen = []
    for size in sizes:
        held.append(pool.allocate(size, stream=stream))
        seen.append(held[-1].ptr)
        if len(held) > 2:
            held.pop(0).free()
    return seen


SIZES = [MIB, 2 * MIB, 300 * KIB, 5000, 3 * MIB, MIB, 700 * KIB]


def repeat(pool: Any, step: Callable[[], Any], times: int) -> Any:
    """The report after so many steps."""
    for _ in range(times):
        with vram.planned(pool) as planned:
            step()
        assert pool.check() is None
    return planned.report()


def test_the_first_step_is_recorded_and_the_others_are_served(pool: Any) -> None:
    first = repeat(pool, lambda: chain(pool, SIZES), 1)
    assert (first.steps, first.plans, first.hits, first.fallbacks) == (1, 0, 0, 0)
    later = repeat(pool, lambda: chain(pool, SIZES), 4)
    assert (later.steps, later.plans, later.hits) == (5, 1, 4 * len(SIZES))
    assert (later.left, later.fallbacks, later.refused, later.replans) == (0, 0, 0, 0)
    assert later.peak == later.planned_bytes <= later.lower_bound + 512
    assert later.ratio < 1.001


def test_equal_steps_get_equal_addresses(pool: Any) -> None:
    repeat(pool, lambda: chain(pool, SIZES), 1)
    seen = []
    repeat(pool, lambda: seen.append(chain(pool, SIZES)), 3)
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) < len(SIZES), "nothing was reused"


def test_one_with_block_around_a_loop(pool: Any) -> None:
    with vram.planned(pool) as planned:
        for _ in range(4):
            chain(pool, SIZES)
            planned.step()
    report = planned.report()
    assert (report.steps, report.hits) == (5, 3 * len(SIZES))


def test_a_decorated_function_is_a_step(pool: Any) -> None:
    @vram.planned(pool)
    def step() -> None:
        chain(pool, SIZES)

    for _ in range(3):
        step()
    assert vram.planned(pool).report().hits == 2 * len(SIZES)


def test_raw_addresses_are_planned_too(pool: Any) -> None:
    def step() -> None:
        one = pool.malloc(MIB)
        two = pool.malloc(2 * MIB)
        pool.free(one)
        pool.free(two)

    assert repeat(pool, step, 3).hits == 4


def test_the_region_is_one_allocation_of_the_pool(pool: Any) -> None:
    report = repeat(pool, lambda: chain(pool, SIZES), 2)
    (block,) = pool.snapshot().blocks("live")
    assert (block.tag, block.size) == ("vram.planned", report.planned_bytes)
    with pytest.raises(InvalidFree):
        pool.free(block.address)
    vram.planned(pool).close()
    assert pool.stats().live == 0
    assert vram.planned(pool).report().steps == 0


def test_what_lives_beyond_its_step_is_left_to_the_pool(pool: Any) -> None:
    weights: list[Any] = []

    def step() -> None:
        if not weights:
            weights.extend(pool.allocate(4 * MIB) for _ in range(30))
        chain(pool, SIZES)

    report = repeat(pool, step, 3)
    assert report.hits == 2 * len(SIZES), "what only the first step did is skipped"
    assert report.fallbacks == 0
    assert all(buffer.ptr for buffer in weights)


def test_a_first_step_that_makes_things_of_the_sizes_that_others_use(pool: Any) -> None:
    """As an optimizer does, whose state has the sizes of its temporary results."""
    state: list[Any] = []

    def step() -> None:
        if not state:
            state.extend(pool.allocate(size) for size in SIZES for _ in range(2))
        for _ in range(3):
            held = [pool.allocate(size) for size in SIZES]
            del held

    report = repeat(pool, step, 5)
    assert report.plans == 2
    assert report.hits >= 3 * 3 * len(SIZES)
    assert repeat(pool, step, 2).hits == report.hits + 2 * 3 * len(SIZES)


def test_what_the_next_step_frees_is_planned_once_that_is_known(pool: Any) -> None:
    gradients: list[Any] = []

    def step() -> None:
        gradients.clear()
        held = [pool.allocate(MIB) for _ in range(4)]
        for _ in range(4):
            gradients.append(pool.allocate(2 * MIB))
            held.pop().free()

    early = repeat(pool, step, 2)
    assert (early.plans, early.hits, early.left) == (1, 4, 4)
    # After two like it is known that they end when the next step begins.
    late = repeat(pool, step, 4)
    assert late.plans == 2
    assert late.hits - early.hits >= 3 * 8
    assert late.ratio < 1.001, "activations make room for gradients"
    gradients.clear()


def test_a_buffer_that_always_lives_costs_one_plan(pool: Any) -> None:
    kept: list[Any] = []

    def step() -> None:
        new = pool.allocate(MIB)  # while the last one lives
        kept[:] = [new]
        chain(pool, SIZES)

    report = repeat(pool, step, 12)
    assert report.plans <= 3
    assert report.fallbacks == 0
    kept.clear()


DIFFERENT: dict[str, list[int]] = {
    "another size": [MIB, 2 * MIB, 300 * KIB, 6000, 3 * MIB, MIB, 700 * KIB],
    "another order": [2 * MIB, MIB, 300 * KIB, 5000, 3 * MIB, MIB, 700 * KIB],
    "one more": [MIB, 2 * MIB, 300 * KIB, 9 * MIB, 5000, 3 * MIB, MIB, 700 * KIB],
    "all else": [7 * MIB, 20 * KIB, 4 * MIB, 800 * KIB],
}


@pytest.mark.parametrize("how", DIFFERENT)
def test_a_step_that_differs_falls_back_is_counted_and_planned(pool: Any, how: str) -> None:
    before = repeat(pool, lambda: chain(pool, SIZES), 3)
    differing = repeat(pool, lambda: chain(pool, DIFFERENT[how]), 1)
    assert differing.fallbacks > 0
    assert differing.plans == before.plans
    after = repeat(pool, lambda: chain(pool, DIFFERENT[how]), 2)
    assert after.replans == 1
    assert after.fallbacks == differing.fallbacks
    assert after.hits == differing.hits + 2 * len(DIFFERENT[how])


def test_a_step_that_does_less_needs_no_new_plan(pool: Any) -> None:
    def step(sizes: list[int]) -> None:
        with pool.allocate(SIZES[0]):
            for size in sizes:
                pool.allocate(size).free()

    repeat(pool, lambda: step(SIZES), 2)
    report = repeat(pool, lambda: step([*SIZES[:2], *SIZES[4:]]), 1)
    assert (report.fallbacks, report.hits) == (0, 2 * (len(SIZES) + 1) - 2)
    assert repeat(pool, lambda: step(SIZES[:3]), 3).plans == 1


def test_steps_that_always_differ_are_planned_ever_more_seldom(pool: Any) -> None:
    number = iter(range(1, 1000))
    report = repeat(pool, lambda: chain(pool, [next(number) * 4096 for _ in range(5)]), 100)
    assert 3 <= report.plans <= 10


def test_a_slot_that_is_still_live_is_not_given_away(pool: Any) -> None:
    def step(late: list[Any] | None = None) -> list[int]:
        one = pool.allocate(4 * MIB)
        first = one.ptr
        if late is None:
            one.free()
        else:
            late.append(one)
        two = pool.allocate(4 * MIB)
        return [first, two.ptr]

    repeat(pool, step, 2)
    first, second = 0, 0
    late: list[Any] = []
    with vram.planned(pool) as planned:
        first, second = step(late)
    assert planned.report().fallbacks == 1
    assert abs(first - second) >= 4 * MIB
    with planned:  # it lives on through the next step, whose plan knows nothing of it
        again = [pool.allocate(4 * MIB) for _ in range(2)]
        assert all(abs(each.ptr - late[0].ptr) >= 4 * MIB for each in again)
        del again
    late[0].free()
    assert pool.check() is None


def test_frees_in_any_order_and_by_any_thread(pool: Any) -> None:
    def step(reverse: bool) -> None:
        held = [pool.allocate(size) for size in SIZES]
        if reverse:
            held.reverse()
        thread = threading.Thread(target=lambda: [buffer.free() for buffer in held])
        thread.start()
        thread.join()

    repeat(pool, lambda: step(False), 2)
    report = repeat(pool, lambda: step(True), 2)
    assert (report.fallbacks, report.hits) == (0, 3 * len(SIZES))


def test_allocations_of_other_threads_belong_to_the_step(pool: Any) -> None:
    def step() -> None:
        thread = threading.Thread(target=lambda: chain(pool, SIZES))
        thread.start()
        thread.join()

    assert repeat(pool, step, 3).hits == 2 * len(SIZES)


def test_a_double_free_of_a_slot_is_refused(pool: Any) -> None:
    def step() -> None:
        address = pool.malloc(MIB)
        pool.free(address)
        with pytest.raises(InvalidFree):
            pool.free(address)
        with pytest.raises(InvalidFree):
            pool.free(address + 512)

    assert repeat(pool, step, 4).hits == 3


def test_outside_of_steps_the_pool_serves_as_ever(pool: Any) -> None:
    report = repeat(pool, lambda: chain(pool, SIZES), 3)
    chain(pool, SIZES)
    assert vram.planned(pool).report() == report


def test_a_buffer_that_outlives_the_plan_stays_valid(pool: Any) -> None:
    held: list[Any] = []
    repeat(pool, lambda: chain(pool, SIZES), 2)
    with vram.planned(pool) as planned:
        held.append(pool.allocate(SIZES[0]))
    planned.close()
    assert pool.check() is None
    assert pool.info(held[0].ptr)["requested"] == SIZES[0]
    assert pool.stats().live == 1, "the region stays for it"
    others = [pool.allocate(MIB) for _ in range(20)]
    assert all(abs(each.ptr - held[0].ptr) >= MIB for each in others)
    held[0].free()
    others.clear()
    assert pool.stats().live == 0


def test_trim_between_steps_takes_the_region_and_the_next_step_gets_it_back(pool: Any) -> None:
    repeat(pool, lambda: chain(pool, SIZES), 2)
    pool.trim(wait=True)
    assert pool.stats().reserved == 0
    report = repeat(pool, lambda: chain(pool, SIZES), 1)
    assert (report.hits, report.plans, report.refused) == (2 * len(SIZES), 1, 0)


def test_without_memory_for_the_region_the_pool_serves() -> None:
    with vram.Pool(Device.model("1GiB"), limit="16MiB") as pool:
        assert repeat(pool, lambda: chain(pool, SIZES), 2).refused == 0
        pool.trim(wait=True)
        held = pool.allocate(12 * MIB)
        report = repeat(pool, lambda: chain(pool, [MIB, MIB]), 1)
        assert report.refused + report.fallbacks == 2
        assert report.planned_bytes == 0
        held.free()
        assert repeat(pool, lambda: chain(pool, SIZES), 3).hits >= 2 * len(SIZES)


def test_a_request_that_finds_no_memory_takes_an_idle_region() -> None:
    with vram.Pool(Device.model("1GiB"), limit="16MiB") as pool:
        repeat(pool, lambda: pool.allocate(12 * MIB).free(), 2)
        assert vram.planned(pool).report().planned_bytes > 12 * MIB
        assert pool.allocate(12 * MIB + 1).size == 12 * MIB + 1
        with vram.planned(pool), pytest.raises(OutOfMemory):
            pool.allocate(20 * MIB)


def test_alignments_and_batches_are_left_to_the_pool(pool: Any) -> None:
    def step() -> None:
        assert pool.allocate(MIB, align=2 * MIB).ptr % (2 * MIB) == 0
        pool.allocate_batch([5000, 6000, 7000])
        chain(pool, SIZES)

    report = repeat(pool, step, 4)
    assert report.hits >= 3 * len(SIZES)


def test_size_zero_has_an_address_of_its_own(pool: Any) -> None:
    def step() -> None:
        held = [pool.malloc(0) for _ in range(3)]
        assert len(set(held)) == 3
        for each in held:
            pool.free(each)

    assert repeat(pool, step, 3).hits == 6


# ---- streams ----------------------------------------------------------------------------------------------


def test_each_stream_has_a_region_of_its_own(pool: Any) -> None:
    with Stream(pool.device) as one, Stream(pool.device) as two:

        def step() -> None:
            chain(pool, SIZES, one)
            chain(pool, SIZES[::-1], two)

        report = repeat(pool, step, 3)
        assert report.hits == 2 * 2 * len(SIZES)
        plans = vram.planned(pool).plans()
        assert len(plans) == 2
        assert sum(plan.peak + 512 for plan in plans) == report.planned_bytes
        for plan in plans:
            plan.check()
            assert plan.picture().count("<rect") == len(SIZES)
        # Another stream is another allocation.
        assert repeat(pool, lambda: chain(pool, SIZES, two), 1).fallbacks > 0


def test_memory_used_elsewhere_waits_in_stream_order() -> None:
    device = Device.model("1GiB", manual=True)
    backend: Any = device.backend
    with vram.Pool(device) as pool, Stream(device) as one, Stream(device) as two:

        def step(share: bool = False) -> None:
            first = pool.allocate(MIB, stream=one)
            if share:
                backend.work(two.handle, 1, first.ptr, MIB)
                first.record_stream(two)
            first.free()
            second = pool.allocate(MIB, stream=one)
            if share:
                backend.work(one.handle, 2, second.ptr, MIB)

        repeat(pool, step, 2)
        with vram.planned(pool) as planned:
            step(share=True)
        assert planned.report().fallbacks == 0
        backend.step(one.handle)
        assert backend.executed() == [], "the second use waits for the first on the other stream"
        assert backend.run_all()
        assert backend.executed() == [1, 2]


def test_a_stream_that_ends_takes_its_region_along(pool: Any) -> None:
    stream = Stream(pool.device)
    repeat(pool, lambda: chain(pool, SIZES, stream), 2)
    stream.close()
    assert pool.check() is None
    assert vram.planned(pool).report().planned_bytes == 0
    stream = Stream(pool.device)
    assert repeat(pool, lambda: chain(pool, SIZES, stream), 3).hits >= 2 * len(SIZES)
    stream.close()


def test_captured_work_is_left_to_the_graph() -> None:
    device = Device.model("1GiB", manual=True)
    backend: Any = device.backend
    with vram.Pool(device) as pool, Stream(device) as stream:
        repeat(pool, lambda: chain(pool, SIZES, stream), 2)
        before = vram.planned(pool).report()
        with vram.planned(pool) as planned, Graph(stream) as graph:
            inside = chain(pool, SIZES, stream)
        assert planned.report().hits == before.hits
        (region,) = [each for each in pool.snapshot().blocks("live") if each.tag == "vram.planned"]
        assert all(not region.address <= each < region.address + region.size for each in inside)
        assert backend.refused_in_capture() == 0
        # A step that begins while its stream is captured asks for no region then.
        pool.trim()
        with Graph(stream) as other, vram.planned(pool):
            pass
        assert backend.refused_in_capture() == 0
        assert repeat(pool, lambda: chain(pool, SIZES, stream), 1).hits == before.hits + len(SIZES)
        for each in (graph, other):
            each.close()
        assert backend.run_all()


def test_pinned_memory_is_planned_too() -> None:
    with PinnedPool("host") as pool:
        assert repeat(pool, lambda: chain(pool, [60 * KIB, 4 * KIB, 60 * KIB, 8 * KIB]), 3).hits == 8
        assert pool.check() is None


def test_zeroed_memory() -> None:
    with vram.Pool("host", zero_on_allocate=True) as pool:

        def step() -> None:
            for _ in range(3):
                with pool.allocate(MIB) as buffer:
                    found = bytearray(MIB)
                    buffer.copy_to(found)
                    assert found == bytes(MIB)
                    buffer.fill(120)

        assert repeat(pool, step, 3).hits == 0, "host memory is zeroed by the host, once no work uses it"
    with vram.Pool(vram.Device.model("1GiB"), zero_on_allocate=True) as pool:
        assert repeat(pool, lambda: chain(pool, SIZES), 3).hits > 0, "device memory is zeroed in stream order"
    with vram.Pool("host", zero_on_free=True) as pool:
        assert repeat(pool, lambda: chain(pool, SIZES), 3).hits == 0, "slots are not zeroed in between"


# ---- rules ------------------------------------------------------------------------------------------------


def test_a_pool_has_one_step_at_a_time(pool: Any) -> None:
    with vram.planned(pool) as planned:
        with pytest.raises(DeviceError, match="one planned step"):
            planned.__enter__()
        with pytest.raises(DeviceError, match="one planned step"):
            planned.close()
    with pytest.raises(DeviceError, match="one planned step"):
        planned.__exit__()


def test_the_thread_that_began_a_step_ends_it(pool: Any) -> None:
    errors: list[BaseException] = []

    def end() -> None:
        try:
            vram.planned(pool).__exit__()
        except DeviceError as error:
            errors.append(error)

    with vram.planned(pool):
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "another thread" in str(errors[0])
    assert vram.planned(pool).report().steps == 1


def test_many_threads_in_one_step(pool: Any) -> None:
    def step() -> None:
        threads = [threading.Thread(target=lambda: chain(pool, SIZES)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    report = repeat(pool, step, 20)
    assert report.hits + report.fallbacks + report.left + report.refused == 19 * 4 * len(SIZES)


def test_an_error_ends_the_step_and_is_passed_on(pool: Any) -> None:
    with pytest.raises(ZeroDivisionError), vram.planned(pool):
        chain(pool, SIZES[:3])
        raise ZeroDivisionError
    assert repeat(pool, lambda: chain(pool, SIZES), 3).hits >= len(SIZES)


def test_a_pool_closed_inside_a_step() -> None:
    pool = vram.Pool("host")
    repeat(pool, lambda: chain(pool, SIZES), 2)
    with vram.planned(pool):
        pool.close()
    with pytest.raises(DeviceError), vram.planned(pool):
        pass


def test_what_cannot_be_planned() -> None:
    with (
        DriverPool(Device.model("1GiB")) as pool,
        pytest.raises(TypeError, match="driver"),
        vram.planned(pool),
    ):
        pass
    for bad in (-1, float("nan")):
        with vram.Pool("host") as pool, pytest.raises(ConfigError, match="time_limit"):
            vram.planned(pool, time_limit=bad)


def test_the_managers_pool_is_planned_by_its_device() -> None:
    planned = vram.planned("host")
    assert planned.pool is vram.get_memory_manager().pool("host")
    assert "0 steps" in repr(planned)
