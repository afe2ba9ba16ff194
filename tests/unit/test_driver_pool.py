"""`DriverPool` beyond what every pool promises: properties, attributes, order, retry, sharing, on a model."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from stepping import benches

import vram
from vram import ConfigError, Device, DeviceError, DriverPool, OutOfMemory, Stream
from vram.trace import Action

KIB, MIB = 1 << 10, 1 << 20
GRANULE = 32 * MIB  # what a model's driver pool reserves at a time
ATTRIBUTES = [
    "reuse_follow_event_dependencies",
    "reuse_allow_opportunistic",
    "reuse_allow_internal_dependencies",
    "release_threshold",
    "reserved_mem_current",
    "reserved_mem_high",
    "used_mem_current",
    "used_mem_high",
]


@pytest.fixture
def make_bench() -> Iterator[Any]:
    with benches(DriverPool) as make:
        yield make


@pytest.fixture
def pool() -> Iterator[DriverPool]:
    with DriverPool(Device.model("1GiB")) as made:
        yield made
        assert made.check() is None


# ---- attributes ---------------------------------------------------------------------------------------


def test_all_attributes_can_be_read(pool: DriverPool) -> None:
    assert list(pool.attributes) == ATTRIBUTES
    held = pool.allocate(3 * MIB)
    assert dict(pool.attributes) == {
        "reuse_follow_event_dependencies": True,
        "reuse_allow_opportunistic": True,
        "reuse_allow_internal_dependencies": True,
        "release_threshold": 0,
        "reserved_mem_current": GRANULE,
        "reserved_mem_high": GRANULE,
        "used_mem_current": held.size,
        "used_mem_high": held.size,
    }


@pytest.mark.parametrize("name", ATTRIBUTES[:3])
def test_the_reuse_flags_can_be_set(pool: DriverPool, name: str) -> None:
    for value in (False, True, 0, 1):
        pool.attributes[name] = value
        assert pool.attributes[name] is bool(value)
    for wrong in (2, -1, "yes", None, 0.5):
        with pytest.raises(ConfigError, match="True or False"):
            pool.attributes[name] = wrong
    with DriverPool(Device.model("1GiB"), **{name: False}) as other:
        assert [other.attributes[each] for each in ATTRIBUTES[:3]] == [
            each != name for each in ATTRIBUTES[:3]
        ]


def test_the_release_threshold_is_a_size_or_unlimited(pool: DriverPool) -> None:
    for given, read in (("1GiB", 1 << 30), (4096, 4096), (None, None), ("unlimited", None), (0, 0)):
        pool.attributes["release_threshold"] = given
        assert pool.attributes["release_threshold"] == read
        with DriverPool(pool.device, release_threshold=given) as other:
            assert other.attributes["release_threshold"] == read
    with pytest.raises(ConfigError, match="not a size"):
        pool.attributes["release_threshold"] = "much"
    with pytest.raises(ConfigError, match="not a size"):
        DriverPool(pool.device, release_threshold=-1)


def test_a_high_water_mark_can_only_be_reset(pool: DriverPool) -> None:
    pool.allocate(100 * MIB).free()
    kept = pool.allocate(MIB)
    for name, now in (("used_mem_high", kept.size), ("reserved_mem_high", 4 * GRANULE)):
        assert pool.attributes[name] >= 100 * MIB
        with pytest.raises(ConfigError, match="only be reset, to 0"):
            pool.attributes[name] = 5
        pool.attributes[name] = 0
        assert pool.attributes[name] == now


@pytest.mark.parametrize("name", ["reserved_mem_current", "used_mem_current"])
def test_what_the_driver_counts_cannot_be_set(pool: DriverPool, name: str) -> None:
    with pytest.raises(ConfigError, match="counted by the driver"):
        pool.attributes[name] = 0


def test_an_unknown_attribute_is_refused_with_the_known_ones(pool: DriverPool) -> None:
    with pytest.raises(ConfigError, match="release_threshold"):
        pool.attributes["release_treshold"] = 0
    with pytest.raises(KeyError):
        pool.attributes["release_treshold"]


def test_attributes_of_a_closed_pool_are_refused() -> None:
    pool = DriverPool(Device.model("1GiB"))
    pool.close()
    for use in (
        lambda: pool.attributes["release_threshold"],
        lambda: pool.attributes.__setitem__("release_threshold", 0),
    ):
        with pytest.raises(DeviceError) as caught:
            use()
        assert caught.value.code == "closed"


def test_an_attribute_that_the_driver_refuses_leaves_no_pool_behind() -> None:
    device = Device.model("1GiB")
    device.backend.fail("pool_set")  # type: ignore[attr-defined]
    with pytest.raises(DeviceError):
        DriverPool(device, release_threshold=None)
    assert device.backend.counts()["pools"] == 0  # type: ignore[attr-defined]


# ---- thresholds and trimming --------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["stream", "event", "device"])
def test_memory_beyond_the_threshold_goes_back_when_the_host_waits(make_bench: Any, wait: str) -> None:
    bench = make_bench(release_threshold=GRANULE)
    for buffer in [bench.pool.allocate(GRANULE, stream=bench.one) for _ in range(3)]:
        buffer.free()
    assert bench.pool.attributes["reserved_mem_current"] == 3 * GRANULE
    waits = {"stream": bench.one, "event": bench.one.record_event(), "device": bench.device}
    waits[wait].synchronize()
    assert bench.pool.attributes["reserved_mem_current"] == GRANULE


def test_an_unlimited_threshold_keeps_everything(make_bench: Any) -> None:
    bench = make_bench(release_threshold="unlimited")
    bench.pool.allocate(3 * GRANULE, stream=bench.one).free()
    bench.one.synchronize()
    assert bench.pool.attributes["reserved_mem_current"] == 3 * GRANULE


def test_trim_keeps_what_is_asked_and_says_what_went(make_bench: Any) -> None:
    bench = make_bench(release_threshold=None)
    held = [bench.pool.allocate(GRANULE) for _ in range(4)]
    del held[1:]
    assert bench.pool.trim(to=2 * GRANULE) == 2 * GRANULE
    assert bench.pool.trim() == GRANULE and bench.pool.stats().reserved == GRANULE
    assert bench.backend.host_waits() == 0


def test_trim_leaves_what_queued_work_uses_unless_it_waits(make_bench: Any) -> None:
    bench = make_bench(release_threshold=None)
    buffer = bench.pool.allocate(GRANULE, stream=bench.one)
    bench.work(1, buffer, bench.one)
    buffer.free()
    assert bench.pool.trim() == 0
    assert bench.pool.trim(wait=True) == GRANULE and bench.backend.executed() == [1]


# ---- order --------------------------------------------------------------------------------------------


def test_the_own_stream_reuses_at_once(make_bench: Any) -> None:
    bench = make_bench()
    first = bench.pool.allocate(GRANULE, stream=bench.one)
    for number in range(3):
        bench.work(number, first, bench.one)
        address = first.ptr
        first.free()
        first = bench.pool.allocate(GRANULE, stream=bench.one)
        assert first.ptr == address
    assert bench.backend.host_waits() == 0 and bench.backend.executed() == []


def test_a_recorded_use_keeps_memory_until_it_has_finished(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(GRANULE, stream=bench.one)
    bench.work(1, buffer, bench.two)
    bench.pool.record_stream(buffer.ptr + 17, bench.two)  # an address inside it will do
    address = buffer.ptr
    buffer.free()
    for stream in (bench.one, bench.two, bench.three):
        held = bench.pool.allocate(GRANULE, stream=stream)
        assert held.ptr != address, "memory was allocated while another stream uses it"
    assert bench.backend.run_all()
    again = bench.pool.allocate(GRANULE, stream=bench.three)
    assert again.ptr == address
    assert bench.backend.host_waits() == 0


def test_a_free_behind_another_stream_stalls_neither(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(GRANULE, stream=bench.one)
    bench.work(1, buffer, bench.two)
    bench.work(2, buffer, bench.three)
    buffer.record_stream(bench.two)
    buffer.record_stream(bench.three)
    buffer.free()
    bench.backend.work(bench.one.handle, 3)
    bench.run_first(bench.one)
    bench.run_first(bench.three)
    assert bench.backend.executed() == [3, 2], "a stream waited for another"
    assert bench.backend.host_waits() == 0


def test_recording_the_own_stream_changes_nothing(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(MIB, stream=bench.one)
    buffer.record_stream(bench.one)
    buffer.free()
    assert bench.backend.calls("event_record") == 0


def test_a_stream_may_end_before_its_memory_is_freed(make_bench: Any) -> None:
    bench = make_bench()
    stream = Stream(bench.device)
    kept = bench.pool.allocate(GRANULE, stream=stream)
    used = bench.pool.allocate(GRANULE, stream=bench.one)
    bench.work(1, kept, stream)
    bench.work(2, used, stream)
    used.record_stream(stream)
    addresses = {kept.ptr, used.ptr}
    stream.close()
    kept.free()
    used.free()
    held = [bench.pool.allocate(GRANULE, stream=bench.one) for _ in range(2)]
    assert not addresses & {each.ptr for each in held}
    assert bench.backend.run_all()
    again = [bench.pool.allocate(GRANULE, stream=bench.two) for _ in range(2)]
    assert addresses == {each.ptr for each in again}
    assert bench.backend.host_waits() == 0


def test_many_streams_come_and_go(make_bench: Any) -> None:
    bench = make_bench(journal=8)
    for number in range(50):
        with Stream(bench.device) as stream:
            bench.work(number, bench.pool.allocate(MIB, stream=stream), stream)
        bench.backend.run_all()
    assert len(bench.pool.stats().streams) < 5
    journal = bench.pool.journal()
    allocations, frees = (list(journal.action).count(code) for code in (Action.ALLOC, Action.FREE_REQUESTED))
    assert allocations + frees + journal.dropped == 100, "the journal lost events of streams that are gone"


# ---- the retry that the driver lacks ------------------------------------------------------------------


def test_what_waits_for_a_stream_is_synchronised_and_retried(make_bench: Any) -> None:
    bench = make_bench(max_size=2 * GRANULE)
    busy = bench.pool.allocate(2 * GRANULE, stream=bench.one)
    bench.work(1, busy, bench.one)
    busy.free()
    asked = bench.backend.calls("pool_allocate")
    taken = bench.pool.allocate(2 * GRANULE, stream=bench.two)
    assert taken.size == 2 * GRANULE and bench.backend.executed() == [1]
    assert bench.backend.calls("pool_allocate") == asked + 2, "the driver had to refuse once"
    stats = bench.pool.stats()
    assert (stats.rungs["driver"], stats.rungs["host_wait"]) == (1, 1)
    assert stats["num_alloc_retries"] == 1 and stats["num_sync_all_streams"] == 1


def test_only_as_many_streams_are_synchronised_as_needed(make_bench: Any) -> None:
    bench = make_bench(max_size=3 * GRANULE)
    large = bench.pool.allocate(2 * GRANULE, stream=bench.one)
    small = bench.pool.allocate(GRANULE, stream=bench.two)
    bench.work(1, large, bench.one)
    bench.work(2, small, bench.two)
    small.free()
    large.free()
    held = bench.pool.allocate(2 * GRANULE, stream=bench.three)
    bench.run_first(bench.three)
    assert held.size == 2 * GRANULE and bench.backend.calls("stream_synchronize") == 1


def test_memory_pending_behind_a_recorded_use_is_waited_for(make_bench: Any) -> None:
    bench = make_bench(max_size=GRANULE)
    buffer = bench.pool.allocate(GRANULE, stream=bench.one)
    bench.work(1, buffer, bench.two)
    buffer.record_stream(bench.two)
    buffer.free()
    again = bench.pool.allocate(GRANULE, stream=bench.one)
    assert again.size == GRANULE and bench.backend.executed() == [1]


def test_memory_in_pieces_is_given_back_and_asked_for_again(make_bench: Any) -> None:
    bench = make_bench(max_size=2 * GRANULE, release_threshold=None)
    for buffer in [bench.pool.allocate(GRANULE) for _ in range(2)]:
        buffer.free()
    whole = bench.pool.allocate(2 * GRANULE)
    assert whole.size == 2 * GRANULE and bench.pool.stats().rungs["give_back"] == 1


def test_a_callback_may_free_what_the_driver_then_serves(make_bench: Any) -> None:
    bench = make_bench(max_size=GRANULE)
    hoard = [bench.pool.allocate(GRANULE, stream=bench.one)]
    bench.work(1, hoard[0], bench.one)
    bench.pool.on_oom(lambda: hoard.clear() or True)
    assert bench.pool.allocate(GRANULE, stream=bench.two).size == GRANULE
    assert bench.pool.stats().rungs["callbacks"] == 1 and bench.backend.executed() == [1]


def test_the_maximum_size_is_reported_when_it_is_in_the_way(make_bench: Any) -> None:
    bench = make_bench(max_size="64MiB")
    held = bench.pool.allocate("40MiB", tag="weights")
    with pytest.raises(OutOfMemory, match="weights") as caught:
        bench.pool.allocate("30MiB")
    error = caught.value
    assert (error.limit, error.allocated, error.requested) == (64 * MIB, held.size, 30 * MIB)
    assert bench.pool.max_size == 64 * MIB and bench.pool.stats().out_of_memory == 1


def test_the_limit_is_ours_and_asks_the_driver_nothing(make_bench: Any) -> None:
    bench = make_bench(limit="10MiB")
    held = bench.pool.allocate("9MiB")
    asked = bench.backend.calls("pool_allocate")
    with pytest.raises(OutOfMemory):
        bench.pool.allocate("2MiB")
    assert bench.backend.calls("pool_allocate") == asked and not held.freed
    bench.pool.limit = "12MiB"
    assert bench.pool.allocate("2MiB").size == 2 * MIB


# ---- the default pool ---------------------------------------------------------------------------------


def test_the_default_pool_is_shared_and_accounts_are_not() -> None:
    device = Device.model("1GiB")
    with DriverPool.default(device) as ours:
        theirs = DriverPool.default(device)
        mine, foreign = ours.allocate(3 * MIB), theirs.allocate(5 * MIB)
        assert ours.is_default and ours.attributes["used_mem_current"] == 8 * MIB
        assert (ours.stats().allocated, theirs.stats().allocated) == (mine.size, foreign.size)
        assert ours.stats().free == GRANULE - 8 * MIB
        theirs.close()
        assert ours.attributes["used_mem_current"] == 3 * MIB and ours.check() is None
        ours.attributes["release_threshold"] = None
    with DriverPool.default(device) as again:
        assert again.attributes["release_threshold"] is None, "the default pool was made anew"
        assert again.attributes["used_mem_current"] == 0


def test_resetting_peaks_leaves_the_marks_of_a_shared_pool_alone() -> None:
    device = Device.model("1GiB")
    with DriverPool.default(device) as pool:
        pool.allocate(2 * GRANULE).free()
        Stream.default(device).synchronize()
        pool.reset_peak()
        assert pool.stats().peak_reserved == pool.stats().reserved == 0
        assert pool.attributes["reserved_mem_high"] == 2 * GRANULE
    with DriverPool(device) as own:
        own.allocate(2 * GRANULE).free()
        Stream.default(device).synchronize()
        own.reset_peak()
        assert own.attributes["reserved_mem_high"] == own.stats().peak_reserved == 0


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("cudaMemPoolReuseFollowEventDependencies", "reuse_follow_event_dependencies"),
        ("cudaMemPoolReuseAllowOpportunistic", "reuse_allow_opportunistic"),
        ("cudaMemPoolReuseAllowInternalDependencies", "reuse_allow_internal_dependencies"),
        ("cudaMemPoolAttrReleaseThreshold", "release_threshold"),
        ("cudaMemPoolAttrReservedMemCurrent", "reserved_mem_current"),
        ("cudaMemPoolAttrReservedMemHigh", "reserved_mem_high"),
        ("cudaMemPoolAttrUsedMemCurrent", "used_mem_current"),
        ("cudaMemPoolAttrUsedMemHigh", "used_mem_high"),
        ("CU_MEMPOOL_ATTR_RELEASE_THRESHOLD", "release_threshold"),
        ("CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC", "reuse_allow_opportunistic"),
        ("CU_MEMPOOL_ATTR_USED_MEM_HIGH", "used_mem_high"),
    ],
)
def test_attributes_have_the_names_of_cuda_too(spelled: str, name: str) -> None:
    with DriverPool(Device.model("1GiB")) as pool:
        buffer = pool.allocate(MIB)
        assert pool.attributes[spelled] == pool.attributes[name]
        if "current" not in name:
            pool.attributes[spelled] = 0
        assert pool.attributes[spelled] == pool.attributes[name] and buffer.size
        assert set(pool.attributes) == set(ATTRIBUTES)


# ---- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    ["pages", "best_fit", "segment_size", "max_page", "stream_cache", "cross_stream"],
)
def test_an_option_of_our_own_pool_is_refused_with_those_that_mean_something(option: str) -> None:
    for make in (DriverPool, DriverPool.default):
        with pytest.raises(ConfigError, match=rf"{option} has no meaning.*max_size.*limit"):
            make(Device.model("1GiB"), **{option: 1})


def test_what_the_environment_says_of_our_own_pool_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAM_CONF", "pages:false,stream_cache:7,limit:64MiB")
    with DriverPool(Device.model("1GiB")) as pool:
        assert pool.limit == 64 * MIB


def test_properties_that_do_not_exist_are_refused() -> None:
    device = Device.model("1GiB")
    with pytest.raises(ConfigError, match="device, pinned, managed"):
        DriverPool(device, kind="shared")
    with pytest.raises(ConfigError, match='"fd"'):
        DriverPool(device, shareable="win32")
    with pytest.raises(ConfigError, match="not a size"):
        DriverPool(device, max_size="some")


@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
def test_a_pool_knows_what_it_is(kind: str) -> None:
    with DriverPool(Device.model("1GiB"), kind=kind, shareable="fd", max_size="64MiB") as pool:
        assert (pool.kind, pool.shareable, pool.max_size, pool.is_default) == (kind, "fd", 64 * MIB, False)
        assert kind in repr(pool) and isinstance(pool, vram.Pool)


@pytest.mark.parametrize("code", ["invalid", "unsupported"])
@pytest.mark.parametrize(("kind", "needed"), [("pinned", "12.6"), ("managed", "13.0"), ("device", "11.2")])
def test_a_kind_that_the_driver_refuses_names_the_driver_that_has_it(
    kind: str, needed: str, code: str
) -> None:
    device = Device.model("1GiB")
    device.backend.fail("pool_create", code=code)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"pool of {kind} memory.*CUDA {needed}"):
        DriverPool(device, kind=kind)


def test_a_device_without_driver_pools_says_so() -> None:
    with pytest.raises(DeviceError, match=r"host has no driver pools.*vram\.Pool"):
        DriverPool("host")


def test_stacks_are_recorded_where_they_are_asked_for() -> None:
    with DriverPool(Device.model("1GiB"), stacks="python") as pool:
        kept = pool.allocate(MIB)
        (leak,) = pool.leaks()
        assert leak.bytes == kept.size and leak.stacks[0][0].filename == __file__


# ---- sharing ------------------------------------------------------------------------------------------


def test_an_imported_buffer_is_the_exporters_memory_and_frees_only_itself() -> None:
    device = Device.model("1GiB")
    with DriverPool(device, shareable="fd") as ours:
        buffer = ours.allocate(5000, align=4 * KIB)
        fd = ours.export()
        with DriverPool.from_fd(fd, device) as theirs:
            os.close(fd)
            assert theirs.kind == "imported"
            twin = theirs.import_buffer(ours.export_buffer(buffer))
            assert (twin.ptr, twin.size, theirs.stats().live) == (buffer.ptr, buffer.size, 1)
            assert theirs.check() is None
            twin.free()
            assert theirs.stats().live == 0 and ours.attributes["used_mem_current"] > 0
        assert not buffer.freed and ours.check() is None
        buffer.free()
        assert ours.attributes["used_mem_current"] == 0


def test_an_imported_pool_allocates_nothing() -> None:
    device = Device.model("1GiB")
    with DriverPool(device, shareable="fd") as ours:
        fd = ours.export()
        with DriverPool.from_fd(fd, device) as theirs:
            os.close(fd)
            with pytest.raises(DeviceError, match="imported from another process"):
                theirs.allocate(KIB)
            with pytest.raises(ConfigError, match="imported pool cannot be exported"):
                theirs.export()


def test_what_cannot_be_exported_says_so() -> None:
    device = Device.model("1GiB")
    with DriverPool(device) as private, DriverPool.default(device) as default:
        for pool, what in ((private, "this pool"), (default, "the default pool")):
            with pytest.raises(ConfigError, match=rf'{what} cannot be exported.*shareable="fd"'):
                pool.export()
            with pytest.raises(ConfigError, match='shareable="fd"'):
                pool.export_buffer(pool.allocate(KIB))


def test_what_cannot_be_imported_says_so() -> None:
    device = Device.model("1GiB")
    with pytest.raises(ConfigError, match="is not a pool"):
        DriverPool.from_fd(0, device)
    with DriverPool(device, shareable="fd") as pool, DriverPool(device, shareable="fd") as other:
        exported = pool.export_buffer(pool.allocate(KIB))
        with pytest.raises(ConfigError, match="from_fd"):
            pool.import_buffer(exported)
        with pytest.raises(ConfigError, match="not one of this pool"):
            pool.export_buffer(other.allocate(KIB))
        fd = pool.export()
        with DriverPool.from_fd(fd, device) as imported:
            os.close(fd)
            for wrong in (b"", exported[:-1], b"x" + exported[1:]):
                with pytest.raises(ConfigError, match="not what export_buffer"):
                    imported.import_buffer(wrong)


# ---- failures, threads, fork --------------------------------------------------------------------------


def test_what_the_driver_does_not_take_back_stays_live(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(MIB, stream=bench.one)
    buffer.record_stream(bench.two)
    for call in ("stream_create", "event_create", "event_record", "stream_wait", "pool_free"):
        bench.backend.fail(call)
        with pytest.raises(DeviceError) as caught:
            buffer.free()
        assert caught.value.call == call and bench.pool.check() is None
        assert not buffer.freed and bench.pool.stats().live == 1
    buffer.free()
    assert bench.pool.stats().live == 0 and bench.pool.stats().allocations == 1


def test_a_failure_that_is_not_out_of_memory_is_not_retried(make_bench: Any) -> None:
    bench = make_bench()
    bench.backend.fail("pool_allocate")
    with pytest.raises(DeviceError, match="pool_allocate"):
        bench.pool.allocate(MIB)
    assert bench.backend.calls("pool_allocate") == 1 and bench.pool.stats().live == 0


def test_the_journal_has_what_happened(make_bench: Any) -> None:
    bench = make_bench(journal=16, limit="4MiB")
    buffer = bench.pool.allocate(MIB, stream=bench.one, tag="step")
    address = buffer.ptr
    buffer.free()
    with pytest.raises(OutOfMemory):
        bench.pool.allocate("5MiB")
    journal = bench.pool.journal()
    names = ["ALLOC", "FREE_REQUESTED", "FREE_COMPLETED", "OOM"]
    assert journal.dropped == 0 and [Action(code).name for code in journal.action] == names
    assert list(journal.address) == [*[address] * 3, bench.device.free_memory]
    assert list(journal.size) == [*[MIB] * 3, 5 * MIB]
    assert [journal.streams[stream] for stream in journal.stream] == [*[bench.one.handle] * 3, 0]
    assert [journal.tags[tag] for tag in journal.tag] == [*["step"] * 3, ""]


def test_threads_share_a_pool() -> None:
    device = Device.model("1GiB", lag_us=50.0)
    with DriverPool(device, limit="256MiB") as pool:
        streams = [Stream(device) for _ in range(4)]
        failures: list[BaseException] = []

        def churn(number: int) -> None:
            try:
                held = []
                for step in range(200):
                    buffer = pool.allocate((step * 7919 % 64 + 1) * 4 * KIB, stream=streams[number])
                    if step % 3 == 0:
                        buffer.record_stream(streams[(number + 1) % 4])
                    held.append(buffer)
                    if len(held) > 10:
                        held.pop(step % 7).free()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == [] and pool.check() is None
        stats = pool.stats()
        assert (stats.live, stats.allocations, stats.frees) == (0, 800, 800)
        for stream in streams:
            stream.close()


@pytest.mark.fork
def test_the_child_of_a_fork_is_refused(pool: DriverPool) -> None:
    buffer = pool.allocate(MIB)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            refused = 0
            uses = (
                lambda: pool.allocate(KIB),
                buffer.free,
                pool.trim,
                pool.export_fd,
                lambda: pool.attributes["release_threshold"],
                lambda: pool.record_stream(buffer.ptr, None),
            )
            for use in uses:
                try:
                    use()
                except DeviceError as error:
                    refused += error.code == "closed"
            pool.close()
            status = 0 if pool.closed and refused == len(uses) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not buffer.freed and pool.attributes["used_mem_current"] == MIB


# ---- graphs -------------------------------------------------------------------------------------------


def test_memory_freed_in_a_capture_is_kept_while_the_graph_lives(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(GRANULE, stream=bench.one)
    address = buffer.ptr
    with bench.one.capture() as graph:
        bench.work(1, buffer, bench.one)
        buffer.free()
        assert bench.pool.stats().pending == GRANULE and bench.pool.stats().live == 0
        assert [block.address for block in bench.pool.snapshot().blocks("pending")] == [address]
    held = [bench.pool.allocate(GRANULE, stream=stream) for stream in (bench.one, bench.two, None)]
    assert address not in {each.ptr for each in held}, "memory of a graph was allocated"
    graph.launch()
    graph.close()
    assert bench.backend.run_all() and bench.backend.executed()[0] == 1
    bench.pool.coalesce()
    assert bench.pool.stats().pending == 0
    assert bench.pool.allocate(GRANULE, stream=bench.one).ptr == address
    assert bench.backend.refused_in_capture() == 0, "a call was made that a capture forbids"


def test_a_captured_stream_that_uses_memory_keeps_it_too(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(GRANULE, stream=bench.one)
    address = buffer.ptr
    with bench.two.capture() as graph:
        bench.work(1, buffer, bench.two)
        buffer.record_stream(bench.two)
        buffer.free()
        held = bench.pool.allocate(GRANULE, stream=bench.one)
    assert held.ptr != address and bench.pool.stats().pending == GRANULE
    graph.close()
    bench.pool.coalesce()
    bench.backend.run_all()
    assert bench.pool.stats().pending == 0
    assert bench.pool.allocate(GRANULE, stream=bench.three).ptr == address
    assert bench.backend.refused_in_capture() == 0


def test_a_stream_may_end_before_the_graph_that_keeps_memory(make_bench: Any) -> None:
    bench = make_bench()
    stream = Stream(bench.device)
    kept, used = (bench.pool.allocate(GRANULE, stream=each) for each in (stream, bench.one))
    with stream.capture() as graph:
        used.record_stream(stream)
        kept.free()
        used.free()
    stream.close()
    assert bench.pool.stats().pending == 2 * GRANULE
    graph.close()
    bench.pool.coalesce()
    assert bench.pool.stats().pending == 0 and bench.pool.attributes["used_mem_current"] == 0


def test_an_allocation_in_a_capture_is_the_graphs(make_bench: Any) -> None:
    bench = make_bench()
    with bench.one.capture() as graph:
        inside = bench.pool.allocate(MIB, stream=bench.one)
        bench.work(1, inside, bench.one)
        inside.free()
        after = bench.pool.allocate(MIB, stream=bench.one)
        assert bench.pool.check() is None and bench.pool.stats().live == 1
    graph.launch()
    after.free()
    assert bench.backend.run_all() and bench.pool.stats().pending == 0
    graph.close()
    assert bench.backend.refused_in_capture() == 0


def test_out_of_memory_makes_no_call_that_a_capture_forbids(make_bench: Any) -> None:
    bench = make_bench(max_size=GRANULE)
    buffer = bench.pool.allocate(GRANULE, stream=bench.one)
    with bench.one.capture() as graph:
        buffer.free()
        with pytest.raises(OutOfMemory):
            bench.pool.allocate(GRANULE, stream=bench.two)
        bench.pool.trim(wait=True)
    graph.close()
    assert bench.pool.allocate(GRANULE, stream=bench.two).size == GRANULE
    assert bench.backend.refused_in_capture() == 0


def test_a_pool_closes_while_a_graph_lives(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(GRANULE, stream=bench.one)
    with bench.one.capture() as graph:
        buffer.free()
    bench.pool.close()
    graph.close()


def test_out_of_memory_names_the_bound_that_held() -> None:
    device = Device.model("1GiB")
    pool = vram.DriverPool(device, max_size="64MiB", limit="512MiB")
    with pytest.raises(vram.OutOfMemory, match=r"the pool's max_size of 64 MiB(.|\n)*a max_size of at least"):
        pool.allocate("100MiB")
    with pytest.raises(vram.OutOfMemory, match="the pool's limit of 32 MiB"):
        vram.DriverPool(device, max_size="64MiB", limit="32MiB").allocate("48MiB")
