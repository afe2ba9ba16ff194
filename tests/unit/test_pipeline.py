"""Pipelines on the host: every element once and in order, real overlap, errors in place, nothing left."""

from __future__ import annotations

import array
import contextlib
import gc
import itertools
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE

import vram
from vram import ConfigError, Device, DeviceError, OutOfMemory, PinnedPool, Pipeline, Pool
from vram.pipeline.report import PipelineReport, Span

KIB, MIB = 1 << 10, 1 << 20
TIMEOUT = PATIENCE


@pytest.fixture
def pools() -> Iterator[tuple[Pool, PinnedPool]]:
    """Pools that must be intact and empty after the test."""
    with Pool("host") as pool, PinnedPool("host", segment_size="2MiB") as pinned:
        yield pool, pinned
        gc.collect()
        for each in (pool, pinned):
            assert each.check() is None
            assert each.stats().live == 0


@pytest.fixture(params=[None, True], ids=["direct", "staged"])
def make(request: pytest.FixtureRequest, pools: tuple[Pool, PinnedPool]) -> Iterator[Callable[..., Pipeline]]:
    """Makes pipelines on the host, with and without staging."""
    with contextlib.ExitStack() as stack:

        def made(compute: Callable[[Any], Any], **options: Any) -> Pipeline:
            pool, pinned = pools
            options = {"pool": pool, "pinned": pinned, "staging": request.param, **options}
            return stack.enter_context(Pipeline(compute, **options))

        yield made


def live(pipe: Pipeline) -> int:
    return pipe.pool.stats().live + pipe.pinned.stats().live


# ---- what comes out ---------------------------------------------------------------------------------------


def test_an_array_goes_through_in_chunks_and_comes_back_whole(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x * 2, chunk="64KiB")
    data = np.arange(100_001, dtype=np.float32)
    assert np.array_equal(pipe.run(data), data * 2)
    report = pipe.report()
    assert (report.chunks, report.bytes_in, report.bytes_out) == (7, data.nbytes, data.nbytes)
    assert (report.largest_chunk, report.smallest_chunk) == (64 * KIB, data.nbytes - 6 * 64 * KIB)


def test_it_writes_to_out_and_returns_it(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x.sum(axis=1), chunk="8KiB")
    data = np.arange(4000, dtype=np.int64).reshape(1000, 4)
    out = np.zeros(1000, np.int64)
    assert pipe.run(data, out=out) is out
    assert np.array_equal(out, data.sum(axis=1))


def test_it_may_write_over_its_input(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x + 1, chunk="4KiB")
    data = np.arange(10_000)
    assert pipe.run(data, out=data) is data
    assert np.array_equal(data, np.arange(10_000) + 1)


def test_compute_may_work_in_place_and_return_its_argument(make: Callable[..., Pipeline]) -> None:
    def double(x: Any) -> Any:
        x *= 2
        return x

    data = np.arange(10_000)
    assert np.array_equal(make(double, chunk="4KiB", depth=1).run(data), np.arange(10_000) * 2)
    assert np.array_equal(data, np.arange(10_000)), "the input itself is not touched"


def test_several_arrays_are_cut_alike(make: Callable[..., Pipeline]) -> None:
    one, two = np.arange(5000.0), np.arange(10_000, dtype=np.int16).reshape(5000, 2)
    total, far = make(lambda b: (b["x"] + b["y"].sum(axis=1), b["y"] > 3), chunk="10KiB").run(
        {"x": one, "y": two}
    )
    assert np.array_equal(total, one + two.sum(axis=1))
    assert np.array_equal(far, two > 3) and far.dtype == bool


def test_batches_of_any_length_and_kind(make: Callable[..., Pipeline]) -> None:
    sizes = [3, 70_000, 0, 1, 12_345]
    batches = [np.arange(size, dtype=np.uint16) for size in sizes]
    out = list(make(lambda x: x.astype(np.float64) / 2).map(batches))
    assert [each.dtype for each in out] == [np.float64] * 5
    assert all(np.array_equal(each, batch / 2) for each, batch in zip(out, batches, strict=True))


def test_anything_that_is_no_array_goes_through_as_it_is(make: Callable[..., Pipeline]) -> None:
    Pair = namedtuple("Pair", "data label")
    batches = [Pair(np.full(4, number), {"n": number, "s": "x", "none": None}) for number in range(6)]
    pipe = make(lambda pair: [pair.label, pair.data.sum(), Pair(pair.data, "y")])
    out = list(pipe.map(batches))
    for number, (label, total, pair) in enumerate(out):
        assert label == {"n": number, "s": "x", "none": None}
        assert total.shape == () and int(total) == 4 * number
        assert isinstance(pair, Pair) and pair.label == "y" and np.array_equal(pair.data, [number] * 4)


def test_host_memory_of_many_kinds(make: Callable[..., Pipeline], pools: tuple[Pool, PinnedPool]) -> None:
    buffer = pools[1].allocate(64)
    np.asarray(buffer)[:] = 1
    ordinary = np.arange(64, dtype=np.uint8)
    with vram.pin(ordinary, "host") as pinned:
        batch = [
            ordinary,
            pinned,
            buffer,
            bytearray(range(64)),
            array.array("B", range(64)),
            memoryview(bytes(range(64))),
            np.arange(128, dtype=np.uint8)[::2],  # copied: it does not lie side by side
            np.asfortranarray(np.arange(64, dtype=np.uint8).reshape(8, 8)),
        ]
        (sums,) = make(lambda arrays: [int(each.sum()) for each in arrays]).map([batch])
    assert sums == [2016, 2016, 64, 2016, 2016, 2016, 4032, 2016]


def test_one_array_twice_is_one_array(make: Callable[..., Pipeline]) -> None:
    data = np.arange(1000)
    pipe = make(lambda pair: pair[0] is pair[1] or np.shares_memory(*pair))
    assert list(pipe.map([(data, data)])) == [True]
    assert pipe.report().bytes_in == data.nbytes


def test_nothing_in_nothing_out(make: Callable[..., Pipeline]) -> None:
    calls: list[int] = []
    pipe = make(lambda x: calls.append(1))
    assert list(pipe.map([])) == []
    out = np.empty((0, 3))
    assert pipe.run(np.empty((0, 3)), out=out) is out
    assert calls == [] and pipe.report().chunks == 0
    assert pipe.report().fraction_of_ideal == 1.0 and "processed no data" in str(pipe.report())


def test_a_reduction_returns_none_and_keeps_its_own_account(make: Callable[..., Pipeline]) -> None:
    sums: list[float] = []
    pipe = make(lambda x: sums.append(x.sum()), chunk="8KiB")
    data = np.arange(50_000.0)
    assert pipe.run(data) is None
    assert sum(sums) == data.sum()
    assert pipe.report().bytes_out == 0
    assert list(pipe.map([data, data])) == [None, None]


def test_rows_larger_than_a_chunk_go_one_by_one(make: Callable[..., Pipeline]) -> None:
    data = np.arange(40_000).reshape(8, 5000)
    pipe = make(lambda x: x, chunk=100)
    assert np.array_equal(pipe.run(data), data)
    assert pipe.report().chunks == 8


def test_results_stay_what_they_are_however_many_are_kept(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x + 1, depth=2)
    kept = list(pipe.map(np.full(1000, number) for number in range(20)))
    assert [int(each[0]) for each in kept] == list(range(1, 21))
    assert all(each.flags.writeable for each in kept)
    pinned = pipe.pinned.stats().allocated
    assert pinned <= 3 * (8 * KIB + 512), "the others were copied to ordinary memory"


# ---- order and overlap ------------------------------------------------------------------------------------


def test_upload_compute_and_download_overlap(make: Callable[..., Pipeline]) -> None:
    """By order of events: each compute lasts until the next batch is there and the last result is out."""
    taken = 0
    results: list[int] = []
    changed = threading.Condition()
    count = 12

    def batches() -> Iterator[Any]:
        nonlocal taken
        for number in range(count):
            with changed:
                taken = number  # the batches before it are queued for upload
                changed.notify_all()
            yield np.full(1000, number)
        with changed:
            taken = count + 1
            changed.notify_all()

    def compute(x: Any) -> Any:
        number = int(x[0])
        with changed:
            assert changed.wait_for(lambda: taken > min(number + 1, count), TIMEOUT), "the next was not taken"
            assert changed.wait_for(lambda: len(results) >= number, TIMEOUT), "the last is not out"
        upload = pipe._streams["upload"]
        while number + 1 < count and not upload.query():
            pass
        return x * 10

    pipe = make(compute, depth=3)
    for out in pipe.map(batches()):
        with changed:
            results.append(int(out[0]))
            changed.notify_all()
    assert results == [number * 10 for number in range(count)]
    spans = {(span.lane, span.chunk): span for span in pipe.report().spans}
    for number in range(count - 1):
        assert spans["upload", number + 1].end_ms <= spans["compute", number].end_ms
    for number in range(1, count):
        assert spans["download", number - 1].end_ms <= spans["compute", number].end_ms
    for lane, number in spans:  # and each chunk goes its way in order
        before = {"compute": "upload", "download": "compute"}.get(lane)
        if before is not None:
            assert spans[before, number].end_ms <= spans[lane, number].begin_ms


def test_compute_runs_in_the_order_of_its_stream_and_nowhere_else(make: Callable[..., Pipeline]) -> None:
    seen: list[tuple[int, int]] = []
    pipe = make(lambda x: seen.append((int(x[0]), threading.get_ident())), depth=2)
    list(pipe.map(np.full(3, number) for number in range(9)))
    assert [number for number, _ in seen] == list(range(9))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_no_more_than_depth_chunks_take_memory(make: Callable[..., Pipeline]) -> None:
    for depth in (1, 2, 5):
        pipe = make(lambda x: x[:1].copy(), depth=depth)
        pipe.pool.reset_peak()
        for _ in pipe.map(np.zeros(MIB, np.uint8) for _ in range(20)):
            assert pipe.pool.stats().allocated <= depth * MIB
        assert pipe.pool.stats().peak_allocated <= depth * MIB


def test_two_loops_over_one_pipeline_do_not_disturb_each_other(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x * 2)
    one = pipe.map(np.full(100, number) for number in range(20))
    two = pipe.map(np.full(100, number) for number in range(100, 120))
    for number, (first, second) in enumerate(zip(one, two, strict=True)):
        assert (int(first[0]), int(second[0])) == (2 * number, 2 * (number + 100))


def test_threads_may_share_a_pipeline(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x + 1, chunk="4KiB")
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            data = np.arange(seed, seed + 20_000)
            for _ in range(3):
                assert np.array_equal(pipe.run(data), data + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert errors == [] and not any(thread.is_alive() for thread in threads)


# ---- errors -----------------------------------------------------------------------------------------------


class Broken(Exception):
    """The user's own error."""


@pytest.mark.parametrize("wrong", [0, 1, 4, 9])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_comes_in_place_of_its_chunk(make: Callable[..., Pipeline], wrong: int, depth: int) -> None:
    def compute(x: Any) -> Any:
        if int(x[0]) == wrong:
            raise Broken("no")
        return x * 2

    pipe = make(compute, depth=depth)
    got: list[int] = []
    with pytest.raises(Broken) as caught:
        for out in pipe.map(np.full(1000, number) for number in range(10)):
            got.append(int(out[0]))
    assert got == [2 * number for number in range(wrong)]
    assert f"in chunk {wrong} of" in caught.value.__notes__[0]
    out = None
    assert live(pipe) == 0, "even while the error is held"
    assert len(list(pipe.map([np.full(4, 77)]))) == 1


@pytest.mark.parametrize("wrong", [0, 3])
def test_an_error_of_the_batches_comes_in_its_place(make: Callable[..., Pipeline], wrong: int) -> None:
    def batches() -> Iterator[Any]:
        for number in itertools.count():
            if number == wrong:
                raise Broken
            yield np.full(10, number)

    pipe = make(lambda x: x)
    got: list[int] = []
    with pytest.raises(Broken):
        got.extend(int(out[0]) for out in pipe.map(batches()))
    assert got == list(range(wrong))
    assert live(pipe) == 0


def test_a_run_ends_at_its_first_error(make: Callable[..., Pipeline]) -> None:
    calls: list[int] = []

    def compute(x: Any) -> Any:
        calls.append(int(x[0]))
        raise Broken

    pipe = make(compute, chunk="1KiB", depth=2)
    with pytest.raises(Broken):
        pipe.run(np.arange(100_000))
    assert 1 <= len(calls) <= 4
    assert live(pipe) == 0


def test_even_an_exit_in_compute_comes_out_of_the_loop(make: Callable[..., Pipeline]) -> None:
    def compute(x: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        list(make(compute).map([np.zeros(3)]))


def test_leaving_the_loop_early_releases_everything(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x * 2)
    batch = np.zeros(1000)
    held = weakref.ref(batch)
    for _out in pipe.map(itertools.chain([batch], (np.zeros(1000) for _ in range(100)))):
        del batch
        break
    del _out
    gc.collect()
    assert held() is None
    assert live(pipe) == 0
    stopped = pipe.map(np.zeros(10) for _ in range(100))
    next(stopped)
    stopped.close()
    never = pipe.map([np.zeros(10)])
    del never
    assert live(pipe) == 0


def test_a_closed_pipeline_is_a_typed_error(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x)
    running = pipe.map(np.zeros(10) for _ in range(100))
    next(running)
    pipe.close()
    pipe.close()
    with pytest.raises(DeviceError, match="closed"):
        list(running)
    with pytest.raises(DeviceError, match="closed"):
        list(pipe.map([np.zeros(3)]))
    assert live(pipe) == 0


def test_arguments_that_make_no_sense() -> None:
    for options in ({"depth": 0}, {"depth": True}, {"chunk": 0}, {"chunk": "much"}, {"like": "jax"}):
        with pytest.raises(ConfigError):
            Pipeline(lambda x: x, device="host", **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function"):
        Pipeline(3, device="host")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pool must be a vram\.Pool"):
        Pipeline(lambda x: x, pool="host")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot use memory of host"):
        Pipeline(lambda x: x, device="host", like="cupy")
    model = Device.model("64MiB")
    with pytest.raises(ConfigError, match="pinned pool"):
        Pipeline(lambda x: x, device=model, pinned=PinnedPool("host"))
    with Pool("host") as pool, pytest.raises(ConfigError, match="the pool is on host"):
        Pipeline(lambda x: x, device=model, pool=pool)


def test_run_says_what_does_not_fit(make: Callable[..., Pipeline]) -> None:
    same = make(lambda x: x, chunk="1KiB")
    data = np.arange(10_000)
    for wrong, words in [
        (np.float64(3), "arrays"),
        (np.array(3), "first axis"),
        ((np.zeros(3), np.zeros(4)), "different lengths"),
        (np.array([object()]), "Python objects"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            same.run(wrong)
    for out, words in [
        (np.zeros(9_999, data.dtype), "9999 rows"),
        (np.zeros((10_000, 2), data.dtype)[:, 0], "C-contiguous"),
        (np.zeros(10_000, np.float32), "float32"),
        (np.zeros((10_000, 2), data.dtype), "shape"),
        ((np.zeros_like(data), np.zeros_like(data)), "1 arrays, but out has 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            same.run(data, out=out)
    with pytest.raises(ValueError, match="overlaps"):
        same.run(data[:5000], out=data[1:5001])
    with pytest.raises(ValueError, match="as many rows"):
        make(lambda x: x[:1], chunk="1KiB").run(data)
    with pytest.raises(ValueError, match="as many rows"):
        make(lambda x: 3, chunk="1KiB").run(data)
    with pytest.raises(ValueError, match="0 arrays, but out has 1"):
        make(lambda x: None, chunk="1KiB").run(data, out=np.zeros_like(data))
    with pytest.raises(ValueError, match="None for earlier ones"):
        make(lambda x: x if x[0] else None, chunk="1KiB").run(data)
    assert live(same) == 0


# ---- memory -----------------------------------------------------------------------------------------------


def test_an_array_larger_than_the_memory_goes_through() -> None:
    with Pool("host", limit="4MiB", pages=False) as pool:
        data = np.arange(8 * MIB, dtype=np.float32)  # 32 MiB
        with Pipeline(lambda x: x + 1, chunk="1MiB", depth=3, pool=pool) as pipe:
            assert np.array_equal(pipe.run(data), data + 1)
        assert pool.stats().peak_reserved <= 4 * MIB


def test_where_memory_is_short_fewer_chunks_are_under_way() -> None:
    with Pool("host", limit="4MiB") as pool:
        data = np.arange(4 * MIB, dtype=np.float32)
        with Pipeline(lambda x: x + 1, chunk="1.5MiB", depth=8, pool=pool) as pipe:
            assert np.array_equal(pipe.run(data), data + 1)


@pytest.mark.parametrize("staged", [False, True])
def test_out_of_memory_in_the_middle_is_told_after_what_came_before(staged: bool) -> None:
    """Which pool it is does not matter: the batches before come out, the error in its place."""
    limits: list[dict[str, Any]] = [{"limit": "4MiB"}, {}]
    with Pool("host", **limits[staged]) as pool, PinnedPool("host", segment_size="2MiB") as pinned:
        if staged:
            pinned.limit = "4MiB"
        batches = [np.full(1000, 1), np.full(1000, 2), np.zeros(8 * MIB, np.uint8), np.full(1000, 4)]
        got: list[int] = []
        with Pipeline(lambda x: x[:1], pool=pool, pinned=pinned, staging=staged) as pipe:
            with pytest.raises(OutOfMemory) as caught:
                for out in pipe.map(batches):
                    got.append(int(out[0]))
            out = None
            assert got == [1, 2]
            assert caught.value.requested == 8 * MIB
            assert live(pipe) == 0
            assert int(next(pipe.map(batches[:1]))[0]) == 1


def test_results_that_find_no_pinned_memory_are_told() -> None:
    with (
        Pool("host") as pool,
        PinnedPool("host", segment_size="2MiB", limit="4MiB") as pinned,
        Pipeline(lambda x: np.zeros(int(x[0])), pool=pool, pinned=pinned) as pipe,
    ):
        with pytest.raises(OutOfMemory):
            for out in pipe.map([np.array([10]), np.array([10 * MIB])]):
                assert out.shape == (10,)
        out = None
        assert live(pipe) == 0


def test_an_array_that_compute_keeps_stays_valid(pools: tuple[Pool, PinnedPool]) -> None:
    """It should not, but then the memory stays allocated until it drops it."""
    kept: list[Any] = []
    pool, pinned = pools
    with Pipeline(kept.append, pool=pool, pinned=pinned, depth=2) as pipe:
        list(pipe.map(np.full(1000, number) for number in range(10)))
        assert [int(each[-1]) for each in kept] == list(range(10))
        kept.clear()


def test_nothing_is_left_without_a_close(pools: tuple[Pool, PinnedPool]) -> None:
    pool, pinned = pools
    pipe = Pipeline(lambda x: x, pool=pool, pinned=pinned)
    assert len(list(pipe.map([np.zeros(3)]))) == 1
    found = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert found() is None


def test_the_pools_of_the_process_serve_where_none_is_given() -> None:
    with Pipeline(lambda x: x, device="host") as one, Pipeline(lambda x: x, device="host") as two:
        assert one.pool is vram.get_memory_manager().pool("host") is two.pool
        assert one.pinned is two.pinned


def test_results_in_the_same_memory_give_way() -> None:
    """Before an upload is refused, chunks on their way are computed and results of others are fetched."""
    device = Device.model("64MiB")
    with Pool(device, limit="12MiB") as pool, PinnedPool(device, segment_size="2MiB") as pinned:

        def compute(buffer: vram.Buffer) -> vram.Buffer:
            return pool.allocate(6 * MIB if buffer.size == 2 * MIB else 1000, stream=pipe.stream)

        with Pipeline(compute, device=device, pool=pool, pinned=pinned, depth=3) as pipe:
            sizes = (2 * MIB, 1000, 7 * MIB)
            got = [len(out) for out in pipe.map(np.zeros(size, np.uint8) for size in sizes)]
            assert got == [6 * MIB, 1000, 1000]


def test_a_race_checker_has_nothing_to_say(make: Callable[..., Pipeline]) -> None:
    with vram.race_check():
        pipe = make(lambda x: x + 1, chunk="8KiB", depth=2)
        data = np.arange(20_000)
        assert np.array_equal(pipe.run(data), data + 1)
        assert [int(out[0]) for out in pipe.map(np.full(9, number) for number in range(9))] == list(
            range(1, 10)
        )


# ---- the model, and memory as it is -----------------------------------------------------------------------


def test_on_a_model_buffers_go_through_and_nobody_waits_but_for_results() -> None:
    device = Device.model("1GiB", lag_us=100.0)
    backend: Any = device.backend
    with Pool(device) as pool, PinnedPool(device, segment_size="2MiB") as pinned:

        def compute(buffer: vram.Buffer) -> vram.Buffer:
            return pool.allocate(buffer.size // 2, stream=pipe.stream)

        with Pipeline(compute, device=device, pool=pool, pinned=pinned, staging=True, depth=2) as pipe:
            assert pipe.library.name == "buffer"
            before = backend.host_waits()
            shapes = [out.shape for out in pipe.map(np.zeros(4096 * (n + 1), np.uint8) for n in range(10))]
            assert shapes == [(2048 * (n + 1),) for n in range(10)]
            assert backend.host_waits() - before <= 10, "at most one wait for each result"
            assert pipe.report().bytes_out == sum(2048 * (n + 1) for n in range(10))
            assert pipe.report().total_ms > 0
        assert pool.stats().live == pinned.stats().live == 0
        assert backend.counts()["streams"] == 1


def test_device_input_is_used_again_behind_the_download_where_it_is_the_result() -> None:
    """The memory of the last upload is that of the next, ordered by streams, never by the host."""
    device = Device.model("1GiB", manual=True)
    with Pool(device) as pool, PinnedPool(device, segment_size="2MiB") as pinned:
        seen: list[int] = []

        def compute(buffer: vram.Buffer) -> vram.Buffer:
            seen.append(buffer.ptr)
            return buffer

        with Pipeline(compute, device=device, pool=pool, pinned=pinned, depth=2) as pipe:
            assert len(list(pipe.map(np.zeros(64 * KIB, np.uint8) for _ in range(10)))) == 10
        assert len(set(seen)) == 2 and seen[:2] * 5 == seen


# ---- what it says -----------------------------------------------------------------------------------------


def test_the_report_adds_up(make: Callable[..., Pipeline]) -> None:
    pipe = make(lambda x: x[::2], chunk="64KiB")
    with pytest.raises(ValueError, match="has not run"):
        pipe.report()
    list(pipe.map(np.zeros(size) for size in (1000, 2000, 3000)))
    report = pipe.report()
    assert report.bytes_in == 48_000 and report.bytes_out == 24_000
    assert (report.smallest_chunk, report.largest_chunk) == (8000, 24_000)
    for lane, total in report.sums_ms.items():
        spans = [span for span in report.spans if span.lane == lane]
        assert sum(span.end_ms - span.begin_ms for span in spans) == pytest.approx(total)
        assert all(0 <= span.begin_ms <= span.end_ms <= report.total_ms for span in spans)
    assert report.ideal_ms == max(report.sums_ms[lane] for lane in ("upload", "compute", "download"))
    assert 0 < report.fraction_of_ideal <= 1 and 0 <= report.overlap <= 1
    said = report.to_dict()
    assert said["chunks"] == 3 and len(said["spans"]) == len(report.spans)
    assert {lane["lane"] for lane in said["lanes"]} >= {"upload", "compute", "download"}
    text = str(report)
    assert "3 chunks of 7.81 KiB to 23.44 KiB on host (numpy, depth 3)" in text
    assert "compute" in text and "timeline" in text
    assert "<svg" in report._repr_html_() and report._repr_html_().count("<rect") == len(report.spans)


def test_a_step_too_short_for_the_clock_is_drawn() -> None:
    report = PipelineReport("host", "numpy", 3)
    report.add_chunk(8, [Span(0, "stage in", 1.0, 1.0, 8), Span(0, "upload", 1.0, 2.0, 8)])
    assert report._repr_html_().count("<rect") == 2
    assert "stage in" in {lane["lane"] for lane in report.to_dict()["lanes"]}


def test_staging_is_a_lane_of_its_own(pools: tuple[Pool, PinnedPool]) -> None:
    pool, pinned = pools
    data = np.zeros(100_000)
    for staging, lanes in [(True, {"stage in", "stage out"}), (False, set())]:
        with Pipeline(lambda x: x, chunk="100KB", pool=pool, pinned=pinned, staging=staging) as pipe:
            pipe.run(data)
            spans = pipe.report().spans
            assert {span.lane for span in spans} == lanes | {"upload", "compute", "download"}
            for lane in lanes:
                assert pipe.report().sums_bytes[lane] == data.nbytes


def test_repr_names_the_function() -> None:
    def halve(x: Any) -> Any:
        return x / 2

    with Pipeline(halve, device="host", depth=4) as pipe:
        assert repr(pipe) == "<vram.Pipeline of halve on host, like numpy, depth 4>"


def test_a_chunk_size_is_found_by_measuring_and_kept(pools: tuple[Pool, PinnedPool]) -> None:
    from vram.pipeline.chunk_size import FEW, LARGE, MOST, SMALL

    pool, pinned = pools
    data = np.zeros(FEW + 40 * MIB, np.uint8)
    calls: list[int] = []
    with Pipeline(lambda x: calls.append(x.nbytes), pool=pool, pinned=pinned, depth=2) as pipe:
        pipe.run(data)
        assert sum(calls) == data.nbytes
        assert calls[:4] == [SMALL] * 4 and LARGE in calls
        chosen = pipe.report().measured["chunk"]
        assert SMALL <= chosen <= MOST
        calls.clear()
        pipe.run(data)
        assert set(calls[:-1]) <= {chosen}, "what was measured is known"
        calls.clear()
        pipe.run(data[: 4 * MIB])
        assert set(calls) == {chosen} or len(calls) == 1


# ---- several compute streams ------------------------------------------------------------------------------


def test_chunks_are_computed_at_once_on_several_streams(make: Callable[..., Pipeline]) -> None:
    """Each call waits for the other one, so it ends only if both run at the same time."""
    meeting = threading.Barrier(2)

    def compute(x: Any) -> Any:
        meeting.wait(TIMEOUT)
        return x * 2

    pipe = make(compute, chunk="64KiB", compute_streams=2)
    data = np.arange(8 * 16 * KIB, dtype=np.float32)  # an even number of chunks
    assert np.array_equal(pipe.run(data), data * 2)
    assert pipe.report().chunks % 2 == 0
    assert 0 < pipe.report().fraction_of_ideal <= 1
    assert live(pipe) == 0


def test_the_stream_of_the_pipeline_is_that_of_the_chunk() -> None:
    device = Device.models(1, "1GiB")[0]
    seen: list[Any] = []
    with (
        Pool(device) as pool,
        Pipeline(lambda x: seen.append(pipe.stream), pool=pool, compute_streams=3) as pipe,
    ):
        list(pipe.map([np.zeros(1000)] * 7))
        assert [stream.handle for stream in seen] == [pipe._computes[i % 3].handle for i in range(7)]
        assert len({stream.handle for stream in seen}) == 3
        assert pipe.stream == pipe._computes[0]


def test_kernels_of_a_model_overlap_on_several_streams() -> None:
    def took_ms(streams: int) -> float:
        device = Device.models(1, "1GiB", lag_us=1000.0)[0]
        with (
            Pool(device) as pool,
            Pipeline(
                lambda x: x.fill(1, stream=pipe.stream), pool=pool, compute_streams=streams, depth=4
            ) as pipe,
        ):
            list(pipe.map([np.zeros(1000)] * 12))
            return pipe.report().total_ms

    assert took_ms(1) > 1.8 * took_ms(2) > 3.0 * took_ms(4)


def test_an_error_on_one_of_several_streams_is_raised_in_its_place(make: Callable[..., Pipeline]) -> None:
    def compute(x: Any) -> Any:
        if x[0] == 5:
            raise ValueError("five")
        return x

    pipe = make(compute, compute_streams=3)
    seen: list[int] = []
    with pytest.raises(ValueError, match="five"):
        seen.extend(int(out[0]) for out in pipe.map(np.full(100, number) for number in range(9)))
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [0, -1, 129, 1.5, "2", None])
def test_the_number_of_compute_streams_is_checked(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="compute_streams"):
        Pipeline(abs, device="host", compute_streams=wrong)
