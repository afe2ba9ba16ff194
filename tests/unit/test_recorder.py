"""Recording: what a program did is in the file, in order and to the last event, whatever ends the program."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vram
from vram.analysis import explain, memory_at
from vram.core import observer
from vram.observe.recorder import record_pools
from vram.observe.recording import path_of_rank
from vram.replay import replay
from vram.trace import (
    ALLOCATE,
    Action,
    BlockState,
    Trace,
    TraceWriter,
    find_steps,
    lifetimes,
    peak_allocated,
)
from vram.trace.convert import convert
from vram.trace.model import COLUMNS
from vram.trace.series import reserved_series

KIB = 1024
MIB = 1024 * KIB
FREED = ["FREE_REQUESTED", "FREE_COMPLETED"]


@pytest.fixture
def pool() -> Any:
    with vram.Pool(vram.Device.model("1GiB")) as made:
        yield made


def reopened(path: Path) -> Trace:
    return vram.open(path, trusted=True)


def story(trace: Trace) -> list[tuple[str, int, int]]:
    """(action, address, size) of everything but growth."""
    rows = zip(trace.action, trace.address, trace.size, strict=True)
    return [
        (Action(action).name, address, size)
        for action, address, size in rows
        if not Action.SEGMENT_ALLOC <= action <= Action.SEGMENT_UNMAP
    ]


# ---- what is in the file ----------------------------------------------------------------------------------


def test_everything_is_there_in_order(pool: vram.Pool, tmp_path: Path) -> None:
    with vram.record(pool, tmp_path / "run.vtrace") as recorder:
        one, two = pool.malloc(1000), pool.malloc("3MiB")
        pool.free(one)
        with pytest.raises(vram.OutOfMemory):
            pool.malloc("2GiB")
        pool.free(two)
        free = pool.device.free_memory
    trace = reopened(tmp_path / "run.vtrace")
    assert story(trace) == [
        ("ALLOC", one, 1000),
        ("ALLOC", two, 3 * MIB),
        *((action, one, 1000) for action in FREED),
        ("OOM", free, 2 * KIB * MIB),
        *((action, two, 3 * MIB) for action in FREED),
    ]
    assert (trace.truncated, trace.dropped, trace.complete) == (False, 0, True)
    assert (recorder.events, recorder.dropped, recorder.closed) == (trace.events, 0, True)
    assert list(trace.time_us) == sorted(trace.time_us)
    assert trace.settings["allocator"] == "vram" and trace.settings["device_total"] == 1024 * MIB


def test_growth_and_shrinking_add_up_to_what_is_reserved(pool: vram.Pool, tmp_path: Path) -> None:
    before = pool.malloc("5MiB")
    with vram.record(pool, tmp_path / "run.vtrace"):
        pool.free(before)
        pool.free(pool.malloc("100MiB"))
        pool.trim("40MiB", wait=True)
        reserved = pool.stats().reserved
    trace = reopened(tmp_path / "run.vtrace")
    sign = {Action.SEGMENT_MAP: 1, Action.SEGMENT_UNMAP: -1}
    changes = [
        sign.get(Action(action), 0) * size for action, size in zip(trace.action, trace.size, strict=True)
    ]
    assert sum(changes) == reserved and min(changes) < 0


def test_allocations_have_their_stacks_and_tags(pool: vram.Pool, tmp_path: Path) -> None:
    def forward() -> vram.Buffer:
        return pool.allocate(1000)

    with vram.record(pool, tmp_path / "run.vtrace"), vram.tag("activations"):
        kept = [forward(), pool.allocate(1000, tag="weights")]
    trace = reopened(tmp_path / "run.vtrace")
    rows = [row for row, action in enumerate(trace.action) if action == Action.ALLOC]
    assert [trace.tags[trace.tag[row]] for row in rows] == ["activations", "weights"]
    assert trace.frames_of(trace.stack[rows[0]])[0].name.endswith("forward") and len(kept) == 2
    assert not pool.keeps_stacks


def test_without_stacks_there_are_none(pool: vram.Pool, tmp_path: Path) -> None:
    with vram.record(pool, tmp_path / "run.vtrace", stacks=None):
        pool.free(pool.malloc(1000))
    assert reopened(tmp_path / "run.vtrace").stacks == ((),)


def test_what_was_live_before_comes_first(tmp_path: Path) -> None:
    device = vram.Device.model("1GiB", lag_us=1e9)
    with vram.Pool(device) as pool:
        other = vram.Stream(device)
        held, freed = pool.malloc(1000), pool.malloc("4MiB")
        pool.record_stream(freed, other)
        pool.free(freed)
        with vram.record(pool, tmp_path / "run.vtrace"):
            pool.free(held)
            other.synchronize()
            pool.coalesce()
    trace = reopened(tmp_path / "run.vtrace")
    assert story(trace) == [
        ("ALLOC", held, 1000),
        ("ALLOC", freed, 4 * MIB),
        ("FREE_REQUESTED", freed, 4 * MIB),
        *((action, held, 1000) for action in FREED),
        ("FREE_COMPLETED", freed, 4 * MIB),
    ]


def test_the_blocks_at_the_end_are_those_of_the_pool(pool: vram.Pool, tmp_path: Path) -> None:
    recorder = vram.record(pool, tmp_path / "run.vtrace")
    kept = [pool.malloc(size) for size in (1000, 3 * MIB, 50 * MIB)]
    pool.free(pool.malloc("7MiB"))
    recorder.close()
    blocks = [block for segment in reopened(recorder.path).segments for block in segment.blocks]
    live = {block.address: block.requested_size for block in blocks if block.state == BlockState.LIVE}
    assert live == dict(zip(kept, (1000, 3 * MIB, 50 * MIB), strict=True))


def test_a_driver_pool_is_recorded_as_any_other(tmp_path: Path) -> None:
    made = vram.DriverPool(vram.Device.model("1GiB"), release_threshold=None)
    with made as pool, vram.record(pool, tmp_path / "run.vtrace"):
        address = pool.malloc("8MiB")
        pool.free(address)
    trace = reopened(tmp_path / "run.vtrace")
    assert story(trace) == [("ALLOC", address, 8 * MIB), *((action, address, 8 * MIB) for action in FREED)]
    assert Action.SEGMENT_MAP in trace.action


@settings(max_examples=25, deadline=None)
@given(
    operations=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8 * MIB), st.integers(0, 9)), max_size=60)
)
def test_lifetimes_and_peak_are_those_of_the_program(
    operations: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each operation allocates on one of three streams, or frees the oldest or newest that is live."""
    path = tmp_path_factory.mktemp("recorded") / "run.vtrace"
    device = vram.Device.model("1GiB")
    with vram.Pool(device) as pool:
        streams = [None, vram.Stream(device), vram.Stream(device)]
        live: list[tuple[int, int]] = []
        expected: list[tuple[str, int, int]] = []
        with vram.record(pool, path):
            for stream, size, choice in operations:
                if choice < 6 or not live:
                    identity = sum(what == "allocate" for what, _, _ in expected)
                    live.append((pool.malloc(size, streams[stream]), identity))
                    expected.append(("allocate", identity, size))
                else:
                    address, identity = live.pop(0 if choice < 8 else -1)
                    pool.free(address)
                    sizes = {which: asked for what, which, asked in expected if what == "allocate"}
                    expected.append(("free", identity, sizes[identity]))
        peak = pool.stats().peak_allocated
    program = lifetimes(reopened(path))
    found = [
        ("allocate" if op == ALLOCATE else "free", identity, size)
        for op, identity, size in zip(program.op, program.id, program.size, strict=True)
    ]
    assert found == expected
    assert peak_allocated(program) == peak == replay(program).peak_allocated


# ---- threads ----------------------------------------------------------------------------------------------


def test_threads_and_streams_are_in_one_order(tmp_path: Path) -> None:
    """An address has one owner at a time, and each thread's events are in its own order."""
    device = vram.Device("host")
    rounds, threads = 3000, 4
    with vram.Pool(device) as pool, vram.record(pool, tmp_path / "run.vtrace") as recorder:
        streams = [vram.Stream(device) for _ in range(threads)]
        orders: list[list[int]] = [[] for _ in range(threads)]

        def churn(number: int) -> None:
            for turn in range(rounds):
                address = pool.malloc(512 * (1 + turn % 50), streams[number])
                orders[number].append(address)
                pool.free(address)

        workers = [threading.Thread(target=churn, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    trace = reopened(recorder.path)
    assert recorder.dropped == trace.dropped == 0 and trace.complete
    live: set[int] = set()
    for action, address in zip(trace.action, trace.address, strict=True):
        if action == Action.ALLOC:
            assert address not in live
            live.add(address)
        elif action == Action.FREE_REQUESTED:
            live.remove(address)
    handles = [trace.streams.index(stream.handle) for stream in streams]
    for handle, order in zip(handles, orders, strict=True):
        rows = zip(trace.action, trace.stream, trace.address, strict=True)
        assert [
            where for action, stream, where in rows if (action, stream) == (Action.ALLOC, handle)
        ] == order


def test_what_there_is_no_room_for_is_counted(
    pool: vram.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vram.observe.recorder.MOST_WAITING", 1)
    monkeypatch.setattr("vram.observe.recorder.LOOK_SECONDS", 1e6)
    with vram.record(pool, tmp_path / "run.vtrace", stacks=None) as recorder:
        for _ in range(5000):
            pool.free(pool.malloc(512))
    trace = reopened(recorder.path)
    allocations = sum(action == Action.ALLOC for action in trace.action)
    frees = sum(action == Action.FREE_REQUESTED for action in trace.action)
    assert recorder.dropped == trace.dropped > 0
    assert allocations + frees + trace.dropped == 10_000


# ---- steps and phases -------------------------------------------------------------------------------------


def test_steps_and_phases_lie_between_the_events(pool: vram.Pool, tmp_path: Path) -> None:
    with vram.record(pool, tmp_path / "run.vtrace"):
        pool.free(pool.malloc(1))
        for number in (7, 8):
            with vram.step(number), vram.annotate("forward"):
                pool.free(pool.malloc(number))
    trace = reopened(tmp_path / "run.vtrace")
    steps = find_steps(trace)
    assert steps.numbers == (7, 8)
    for row, (action, size) in enumerate(zip(trace.action, trace.size, strict=True)):
        if action <= Action.FREE_COMPLETED:
            assert steps.of(row) == (size if size in (7, 8) else None)
    names = [(mark.stage, mark.name) for mark in trace.annotations]
    assert names[:4] == [("START", "step#7"), ("START", "forward"), ("END", "forward"), ("END", "step#7")]


def test_marks_decorate_functions_and_tasks(pool: vram.Pool, tmp_path: Path) -> None:
    @vram.annotate("plain")
    def plain() -> int:
        return 1

    @vram.step(3)
    async def task() -> int:
        await asyncio.sleep(0)
        return 2

    with vram.record(pool, tmp_path / "run.vtrace"):
        assert plain() + asyncio.run(task()) == 3
    names = [mark.name for mark in reopened(tmp_path / "run.vtrace").annotations]
    assert names == ["plain", "plain", "step#3", "step#3"]


def test_marks_without_a_recording_do_nothing() -> None:
    assert len(observer.marks) == 0
    with vram.step(1), vram.annotate("phase"):
        pass


@pytest.mark.parametrize("make", [lambda: vram.step(-1), lambda: vram.annotate("")])
def test_marks_need_a_number_or_a_name(make: Any) -> None:
    with pytest.raises(ValueError):
        make()


# ---- files and ends ---------------------------------------------------------------------------------------


def test_long_recordings_rotate(pool: vram.Pool, tmp_path: Path) -> None:
    with vram.record(pool, tmp_path / "run.vtrace", stacks=None, rotate="64KiB", keep=3) as recorder:
        for _ in range(20):
            for _ in range(300):
                pool.free(pool.malloc(512))
            recorder.flush()
    files = list(tmp_path.iterdir())
    assert len(files) == 3 and all(file.stat().st_size < 128 * KIB for file in files)
    trace = reopened(recorder.path)
    assert trace.dropped > 0 and trace.events + trace.dropped == recorder.events


def test_a_pool_has_one_recorder_at_a_time(pool: vram.Pool, tmp_path: Path) -> None:
    with vram.record(pool, tmp_path / "one.vtrace"), pytest.raises(vram.VramError, match=r"one\.vtrace"):
        vram.record(pool, tmp_path / "two.vtrace")
    vram.record(pool, tmp_path / "two.vtrace").close()


def test_closing_the_pool_closes_its_recorder_first(tmp_path: Path) -> None:
    pool = vram.Pool(vram.Device.model("1GiB"))
    recorder = vram.record(pool, tmp_path / "run.vtrace")
    kept = pool.malloc(1000)
    pool.close()
    assert recorder.closed and reopened(recorder.path).segments[0].blocks[0].address == kept
    with pytest.raises(vram.DeviceError, match="closed"):
        vram.record(pool, tmp_path / "again.vtrace")
    recorder.close()


def test_a_file_that_cannot_be_written_ends_the_recording_and_not_the_program(
    pool: vram.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = vram.record(pool, tmp_path / "run.vtrace")

    def full(*_arguments: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder._writer, "append", full)
    pool.free(pool.malloc(1000))
    with pytest.raises(vram.TraceError, match="No space left"):
        recorder.close()
    pool.free(pool.malloc(1000))
    recorder.close()


def test_a_recording_that_failed_keeps_nothing_of_the_program_alive(
    pool: vram.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    def step() -> weakref.ref[Any]:
        batch = {"a batch"}
        recorder._look()
        return weakref.ref(batch)

    recorder = vram.record(pool, tmp_path / "run.vtrace")
    gc.disable()
    try:
        with recorder._lock:  # the recording's own thread looks later
            pool.free(pool.malloc(1000))
            monkeypatch.setattr(recorder, "_write", full)
            monkeypatch.setattr(recorder, "_written_at", -math.inf)
            held = step()
            assert recorder.closed and held() is None
    finally:
        gc.enable()
    with pytest.raises(vram.TraceError, match="No space left"):
        recorder.close()


def test_a_file_that_cannot_be_written_does_not_hide_the_error_of_the_program(
    pool: vram.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_arguments: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = vram.record(pool, tmp_path / "run.vtrace")
    monkeypatch.setattr(recorder._writer, "append", full)
    with pytest.raises(ValueError, match="its own"), recorder:
        pool.free(pool.malloc(1000))
        raise ValueError("its own")
    assert "No space left" in caplog.text


def test_a_new_pool_whose_file_cannot_be_written_is_usable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(vram.TraceError, match="there is no directory"):
        record_pools(vram.MemoryManager(), folder / "run.vtrace")
    folder.mkdir()
    manager = vram.MemoryManager()
    with record_pools(manager, folder / "run.vtrace"):
        folder.rmdir()
        pool = manager.pool("host")
        pool.free(pool.malloc(1000))
    assert "host is not recorded" in caplog.text


@pytest.mark.parametrize("wrong", [{"stacks": "native"}, {"keep": 0}, {"rotate": "often"}])
def test_wrong_options_are_refused(pool: vram.Pool, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(vram.ConfigError):
        vram.record(pool, tmp_path / "run.vtrace", **wrong)
    assert list(tmp_path.iterdir()) == [] and not pool.keeps_stacks


def test_a_missing_folder_is_said_at_once(pool: vram.Pool, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        vram.record(pool, tmp_path / "nowhere" / "run.vtrace")
    assert not pool.keeps_stacks


def test_pools_of_a_manager_are_recorded_from_their_first_use(tmp_path: Path) -> None:
    manager = vram.MemoryManager()
    with record_pools(manager, tmp_path / "run.vtrace") as recording:
        one = manager.allocate_memory(1000, device=vram.Device.model("1GiB"))
        two = manager.allocate_memory(2000, device="host")
    assert [recorder.path.name for recorder in recording.recorders] == ["run.vtrace", "run.host.vtrace"]
    assert story(reopened(tmp_path / "run.vtrace")) == [("ALLOC", one, 1000)]
    assert story(reopened(tmp_path / "run.host.vtrace")) == [("ALLOC", two, 2000)]
    manager.close()


# ---- one file, one recording ------------------------------------------------------------------------------


def test_two_recordings_to_one_file_are_refused(pool: vram.Pool, tmp_path: Path) -> None:
    other = vram.Pool("host")
    (tmp_path / "other name.vtrace").symlink_to(tmp_path / "run.vtrace")
    with vram.record(pool, tmp_path / "run.vtrace"):
        kept = pool.malloc(777)
        for name in ("run.vtrace", "other name.vtrace"):
            with pytest.raises(vram.TraceError, match="another recording"):
                vram.record(other, tmp_path / name)
        assert not other.keeps_stacks
    assert story(reopened(tmp_path / "run.vtrace")) == [("ALLOC", kept, 777)]
    vram.record(other, tmp_path / "run.vtrace").close()


def test_a_rotating_recording_keeps_its_name_and_its_pieces(pool: vram.Pool, tmp_path: Path) -> None:
    other = vram.Pool("host")
    with vram.record(pool, tmp_path / "run.vtrace", rotate=1) as recorder:
        for _ in range(3):
            pool.free(pool.malloc(777))
            recorder.flush()
            with pytest.raises(vram.TraceError, match="another recording"):
                vram.record(other, tmp_path / "run.vtrace")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.vtrace",
        *(f"run.vtrace.{number:06}" for number in range(1, 4)),
    ]
    assert [what for what, _, _ in story(reopened(recorder.path))] == ["ALLOC", *FREED] * 3


def test_pools_of_two_managers_do_not_share_a_file(tmp_path: Path) -> None:
    one, two = vram.MemoryManager(), vram.MemoryManager()
    with record_pools(one, tmp_path / "run.vtrace"), record_pools(two, tmp_path / "run.vtrace"):
        first, second = one.allocate_memory(1000, device="host"), two.allocate_memory(2000, device="host")
    assert story(reopened(tmp_path / "run.vtrace")) == [("ALLOC", first, 1000)]
    own = tmp_path / f"run.pid-{os.getpid()}.vtrace"
    assert story(reopened(own)) == [("ALLOC", second, 2000)]
    one.close(), two.close()


LAUNCHERS = [
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
]


@pytest.mark.parametrize(("number", "count"), LAUNCHERS)
def test_ranks_of_a_job_have_names_of_their_own(
    number: str, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (each for pair in LAUNCHERS for each in pair):
        monkeypatch.delenv(name, raising=False)
    path = Path("runs/one.vtrace")
    assert path_of_rank(path) == path
    monkeypatch.setenv(number, "3")
    monkeypatch.setenv(count, "8")
    assert path_of_rank(path) == Path("runs/one.rank-3.vtrace")
    monkeypatch.setenv(count, "1")
    assert path_of_rank(path) == path


@pytest.mark.fork
def test_every_rank_yields_a_readable_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, vram\n"
        "kept = vram.get_memory_manager().allocate_memory(1000 + int(os.environ['RANK']))\n"
        "print(flush=True), sys.stdin.read()\n"
    )
    command = [sys.executable, "-m", "vram", "run", "--record", "run.vtrace", str(script)]
    ranks = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "VRAM_DEVICE": "host", "RANK": str(rank), "WORLD_SIZE": "3"},
        )
        for rank in range(3)
    ]
    for each in ranks:
        assert each.stdout is not None and each.stdout.readline()  # all of them record at once
    assert [each.communicate(timeout=120) and each.returncode for each in ranks] == [0, 0, 0]
    for rank in range(3):
        trace = reopened(tmp_path / f"run.rank-{rank}.vtrace")
        assert [size for what, _, size in story(trace)] == [1000 + rank] and not trace.truncated


@pytest.mark.fork
def test_the_child_of_a_fork_does_not_keep_the_file_from_others(tmp_path: Path) -> None:
    ended = run(
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing), os.read(reading, 1), os._exit(0)
        recorder.close()
        vram.record(pool, sys.argv[1]).close()
        os.close(writing), os.waitpid(child, 0)
        """,
        tmp_path / "run.vtrace",
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# ---- whatever is recorded can be read ---------------------------------------------------------------------

EXTREME = st.sampled_from([0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(
    0, 2**64 - 1
)
TEXTS = st.text(st.characters(), min_size=1) | st.sampled_from(
    ["x" * 65_536, "x" * 65_537, "ä" * 200_000, "\ud800", "\0", "a\nb"]
)


@settings(max_examples=40, deadline=None)
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), EXTREME, TEXTS),
            st.tuples(st.just("batch"), st.lists(EXTREME, max_size=3), TEXTS),
            st.tuples(st.just("annotate"), st.just(0), TEXTS),
            st.tuples(st.just("step"), st.integers(-(2**70), 2**70), st.just("")),
            st.tuples(st.just("suspend"), st.just(0), TEXTS),
        ),
        max_size=12,
    )
)
def test_whatever_is_recorded_can_be_read(
    operations: list[tuple[str, Any, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("extreme") / "run.vtrace"
    kept, failed = [], 0
    with vram.Pool(vram.Device.model("64TiB")) as pool, vram.record(pool, path):
        for what, number, name in operations:
            try:
                if what == "allocate":
                    kept.append(pool.allocate(number, tag=name))
                elif what == "batch":
                    kept += pool.allocate_batch(number, tag=name)
                elif what == "suspend":
                    pool.suspend(name, keep="discard")
                else:
                    with vram.step(number) if what == "step" else vram.annotate(name):
                        pass
            except vram.OutOfMemory:
                failed += 1
            except (ValueError, OverflowError):
                pass
        live = sorted(block.requested for block in pool.snapshot().allocations())
    trace = reopened(path)
    assert not trace.truncated and trace.dropped == 0
    assert sum(action == Action.OOM for action in trace.action) == failed
    blocks = [block for segment in trace.segments for block in segment.blocks]
    assert sorted(block.requested_size for block in blocks if block.state == BlockState.LIVE) == live
    convert(trace, "parquet", path.with_suffix(".parquet"))
    assert reopened(path.with_suffix(".parquet")).tags == trace.tags


def test_names_of_any_length_are_kept_as_far_as_readers_take_them(pool: vram.Pool, tmp_path: Path) -> None:
    with vram.record(pool, tmp_path / "run.vtrace"), vram.annotate("y" * 70_000):
        kept = [pool.allocate(1000, tag="x" * length) for length in (65_536, 70_000)]
    trace = reopened(tmp_path / "run.vtrace")
    assert trace.tags == ("", "x" * 65_536, "x" * 65_535 + "…") and len(kept) == 2
    assert {mark.name for mark in trace.annotations} == {"y" * 65_535 + "…"}


@pytest.mark.parametrize(
    ("column", "value"), [("size", 2**63), ("action", 10), ("stream", 1), ("stack", 1), ("tag", 1)]
)
def test_a_writer_refuses_what_a_reader_would(column: str, value: int, tmp_path: Path) -> None:
    columns = {
        "action": [0],
        "stream": [0],
        "address": [1],
        "size": [8],
        "time_us": [0],
        "stack": [0],
        "tag": [0],
    }
    with TraceWriter(tmp_path / "run.vtrace") as writer:
        writer.stream(0)
        with pytest.raises(ValueError, match=column):
            writer.append(
                {name: array(COLUMNS[name], value) for name, value in (columns | {column: [value]}).items()}
            )
        writer.append({name: array(COLUMNS[name], value) for name, value in columns.items()})
    assert reopened(tmp_path / "run.vtrace").events == 1


# ---- while memory is suspended ----------------------------------------------------------------------------


@pytest.mark.parametrize("suspended_before", [False, True])
def test_suspended_blocks_are_live_and_not_reserved(
    pool: vram.Pool, tmp_path: Path, suspended_before: bool
) -> None:
    sizes = {1000: pool.allocate(1000), 40 * MIB: pool.allocate("40MiB")}
    if suspended_before:
        pool.suspend(keep="discard")
    with vram.record(pool, tmp_path / "run.vtrace"):
        if not suspended_before:
            pool.suspend(keep="discard")
        snapshot = pool.snapshot()
    trace = reopened(tmp_path / "run.vtrace")
    blocks = [block for segment in trace.segments for block in segment.blocks]
    live = {block.address: block.requested_size for block in blocks if block.state == BlockState.LIVE}
    assert live == {buffer.ptr: size for size, buffer in sizes.items()}
    assert snapshot.reserved == 0 and trace.settings["reserved"] == 0
    assert trace.settings["suspended"] == snapshot.suspended
    assert sum(segment.total_size for segment in trace.segments) == snapshot.suspended
    assert reserved_series(trace)[-1] == 0
    memory = memory_at(trace, trace.events - 1)
    assert (memory.reserved, memory.cached, memory.allocated) == (0, 0, snapshot.allocated)
    assert explain(trace, at=trace.events - 1).account.reserved == 0


# ---- the end of the process -------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, time, vram
    pool = vram.Pool(vram.Device.model("1GiB"))
    recorder = vram.record(pool, sys.argv[1])
    for _ in range(1000):
        pool.free(pool.malloc(512))
"""


def run(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(path)], capture_output=True, text=True, timeout=600
    )


@pytest.mark.fork
def test_killed_it_keeps_what_was_written_unasked(tmp_path: Path) -> None:
    ended = run(
        f"""
        while recorder.events < 3000:  # three of each pair; the thread that writes comes by itself
            time.sleep(0.01)
        os.kill(os.getpid(), {signal.SIGKILL.value})
        """,
        tmp_path / "run.vtrace",
    )
    assert ended.returncode == -signal.SIGKILL
    trace = reopened(tmp_path / "run.vtrace")
    assert trace.truncated and sum(action == Action.ALLOC for action in trace.action) == 1000


@pytest.mark.fork
def test_at_exit_the_recording_is_closed(tmp_path: Path) -> None:
    ended = run("kept = pool.malloc(777)", tmp_path / "run.vtrace")
    assert (ended.returncode, ended.stderr) == (0, "")
    trace = reopened(tmp_path / "run.vtrace")
    assert not trace.truncated and ("ALLOC", 777) in [(what, size) for what, _, size in story(trace)]


@pytest.mark.fork
def test_the_child_of_a_fork_leaves_the_recording_alone(tmp_path: Path) -> None:
    ended = run(
        """
        child = os.fork()
        if child == 0:
            with vram.step(1):
                recorder.flush()
            recorder.close()
            del recorder, pool
            sys.exit()
        os.waitpid(child, 0)
        pool.free(pool.malloc(777))
        """,
        tmp_path / "run.vtrace",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    trace = reopened(tmp_path / "run.vtrace")
    assert not trace.truncated and not trace.annotations
    assert sum(action == Action.ALLOC for action in trace.action) == 1001


@pytest.mark.fork
def test_the_command_line_records_a_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import vram\nmanager = vram.get_memory_manager()\nkept = manager.allocate_memory(777)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "vram", "run", "--record", "run.vtrace", str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "VRAM_DEVICE": "host"},
    )
    assert ended.returncode == 0, ended.stderr
    trace = reopened(tmp_path / "run.vtrace")
    (row,) = [row for row, action in enumerate(trace.action) if action == Action.ALLOC]
    assert trace.size[row] == 777 and trace.frames_of(trace.stack[row])[0].filename == str(script)
