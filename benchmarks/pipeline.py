"""Measure how close a pipeline comes to the ideal: the longest of all uploads, all computing, all downloads.

The load is balanced: computing on a chunk is tuned to take as long as uploading it. Each case runs warm (its
pinned memory exists already) and is compared with the same pieces in sequence. "of ideal" uses the times of
the lanes in the pipeline, "alone" those of the pieces run on their own.

    python benchmarks/pipeline.py                 # 8 GiB on a GPU, with PyTorch or CuPy
    python benchmarks/pipeline.py --size 64MiB    # also without a GPU
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import rich_click as click

import vram
from vram import _native
from vram.bench.measure import elapsed_ns
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.cli.console import read_size
from vram.sizes import format_size

RUNS = 3
COPY_BYTES = 1 << 30
Row = dict[str, Any]


def churn(rounds: int) -> Callable[[Any], Any]:
    """Return a function of `rounds` passes over int32 words that is exact in every library."""

    def compute(x: Any) -> Any:
        y = x * 3
        for _ in range(rounds):
            y *= 3
            y += 1
        return y

    return compute


def tuned_rounds(pipe: vram.Pipeline, chunk: int) -> int:
    """Return how many passes take as long as uploading a chunk."""
    device, stream, up = pipe.device, pipe.stream, pipe._streams["upload"]
    source, target = pipe.pinned.allocate(chunk), pipe.pool.allocate(chunk, stream=up)
    np.asarray(source)[:] = 1
    upload = least_ms(up, lambda: device.backend.copy(target.ptr, source.ptr, chunk, up.handle))
    array = pipe.library.wrap(target, (chunk // 4,), np.dtype(np.int32))

    def work(rounds: int) -> float:
        def queue() -> None:
            with pipe.library.current(stream):
                churn(rounds)(array)

        return least_ms(stream, queue)

    few, many = work(4), work(24)
    slope = max(1e-6, (many - few) / 20)
    return max(1, round((upload - few) / slope + 4))


def least_ms(stream: vram.Stream, queue: Callable[[], Any]) -> float:
    """Return the minimum time between two events around the queued work."""
    begin, end = vram.Event(stream.device, timing=True), vram.Event(stream.device, timing=True)
    times = []
    for _ in range(6):
        stream.device.synchronize()
        begin.record(stream)
        if stream.device.kind == "host":
            stream.launch(queue)
        else:
            queue()
        end.record(stream)
        stream.synchronize()
        times.append(end.elapsed_ms(begin))
    return min(times[1:])


class Steps:
    """Runs pieces of work one at a time on a stream and sums the milliseconds of each kind."""

    def __init__(self, stream: vram.Stream) -> None:
        """Start with nothing done."""
        self.spent = dict.fromkeys(("stage in", "upload", "compute", "download", "stage out"), 0.0)
        self._stream = stream
        self._events = [vram.Event(stream.device, timing=True) for _ in range(2)]

    def __call__(self, name: str, queue: Callable[..., Any], *arguments: Any) -> Any:
        """Do one piece; return what `queue` returned."""
        begin, end = self._events
        begin.record(self._stream)
        result = queue(*arguments)
        end.record(self._stream)
        self._stream.synchronize()
        self.spent[name] += end.elapsed_ms(begin)
        return result


def sequential(
    pipe: vram.Pipeline, data: Any, out: Any, chunk: int, compute: Any
) -> tuple[float, dict[str, float]]:
    """Run the same pieces in sequence; return the seconds, and the milliseconds of each kind."""
    library, stream, copy = pipe.library, pipe.stream, pipe.device.backend.copy
    rows = chunk // 4
    staged_in, staged_out = not pipe._direct(data), out is not None and not pipe._direct(out)
    pinned_in, pinned_out = pipe.pinned.allocate(chunk), pipe.pinned.allocate(chunk)
    there = pipe.pool.allocate(chunk, stream=stream)
    step = Steps(stream)

    def call(array: Any) -> Any:
        with library.current(stream):
            return library.result(compute(array))

    begun = time.perf_counter()
    for first in range(0, len(data), rows):
        part = data[first : first + rows]
        source = pinned_in.ptr if staged_in else part.ctypes.data
        if staged_in:
            step("stage in", pipe._copies.copy, source, part.ctypes.data, part.nbytes)
        step("upload", copy, there.ptr, source, part.nbytes, stream.handle)
        result = step("compute", call, library.wrap(there, (rows,), part.dtype)[: len(part)])
        if out is not None:
            place = out[first : first + rows]
            target = pinned_out.ptr if staged_out else place.ctypes.data
            step("download", copy, target, result.ptr, place.nbytes, stream.handle)
            if staged_out:
                step("stage out", pipe._copies.copy, place.ctypes.data, target, place.nbytes)
        del result
    return time.perf_counter() - begun, step.spent


def case(name: str, pipe: vram.Pipeline, data: Any, out: Any, compute: Any) -> Row:
    """Return the best of several warm runs, compared with the sequential version."""
    best: Row = {}
    for _ in range(RUNS + 1):  # the first chooses the chunk size and allocates pinned memory
        seconds = elapsed_ns(lambda: pipe.run(data, out)) / 1e9
        report = pipe.report()
        if not best or seconds < best["seconds"]:
            best = {"case": name, "seconds": seconds, "report": report}
    check(data, out, compute)
    report = best.pop("report")
    one_by_one, alone = min(
        (sequential(pipe, data, out, report.largest_chunk, compute) for _ in range(2)),
        key=lambda pair: pair[0],
    )
    ideal_alone = max(alone["upload"], alone["compute"], alone["download"]) / 1e3
    return {
        **best,
        "chunk_bytes": report.largest_chunk,
        "chunks": report.chunks,
        "fraction_of_ideal": report.ideal_ms / 1e3 / best["seconds"],
        "fraction_of_ideal_alone": ideal_alone / best["seconds"],
        "sequential_seconds": one_by_one,
        "speedup": one_by_one / best["seconds"],
        "gb_s": data.nbytes / best["seconds"] / 1e9,
        "limit": report.limit,
        "lanes_ms": {lane: spent for lane, spent in report.sums_ms.items() if spent},
        "bandwidths": report.bandwidths,
        "alone_ms": {lane: spent for lane, spent in alone.items() if spent},
        "picture": str(report),
    }


def check(data: Any, out: Any, compute: Any) -> None:
    """Compare the beginning, the middle and the end with the results of NumPy."""
    if out is None:
        return
    with np.errstate(over="ignore"):
        for first in (0, len(data) // 2, max(0, len(data) - 10_000)):
            part = slice(first, first + 10_000)
            assert np.array_equal(out[part], compute(data[part])), f"wrong from {first} on"


def host_copies(source: Any, target: Any) -> list[Row]:
    """Measure how fast threads copy pageable memory into pinned memory."""
    rows = []
    for threads in (1, 2, 4, 8, 12, 16):
        if threads > 2 * (os.cpu_count() or 1):
            break
        copies = _native.HostCopies(threads)
        copy = partial(copies.copy, target.ctypes.data, source.ctypes.data, target.nbytes)
        rows.append({"threads": threads, "gb_s": target.nbytes / min(elapsed_ns(copy) for _ in range(4))})
    return rows


def measure(
    device: vram.Device, size: int, chunk: str, depth: int, like: str | None
) -> tuple[list[Row], list[Row], str]:
    """Return all cases, the speed of host copies, and a description of the load."""
    words = size // 4
    with vram.Pool(device) as pool, vram.PinnedPool(device) as pinned:
        options: dict[str, Any] = {"pool": pool, "pinned": pinned, "like": like}
        on_gpu = device.kind == "cuda"
        locked_in, locked_out = (np.asarray(pinned.allocate(size)).view(np.int32) for _ in range(2))
        locked_in[:] = np.arange(words, dtype=np.int32)
        ordinary_in, ordinary_out = locked_in.copy(), np.zeros(words, np.int32)
        with vram.Pipeline(lambda x: x, **options) as probe:
            tuning = min(64 << 20, size // 8)
            rounds = tuned_rounds(probe, tuning)
        compute = churn(rounds)

        def reduce(x: Any) -> None:
            compute(x)

        rows = []
        for name, data, out, function in [
            ("pinned to pinned", locked_in, locked_out, compute),
            ("pageable to pinned", ordinary_in, locked_out, compute),
            ("pageable to pageable", ordinary_in, ordinary_out, compute),
            ("pinned, no result", locked_in, None, reduce),
            ("pageable, no result", ordinary_in, None, reduce),
        ]:
            staging = None if on_gpu else "pageable" in name
            with vram.Pipeline(function, chunk, depth, staging=staging, **options) as pipe:
                rows.append(case(name, pipe, data, out, function))
                like = pipe.library.name
        copy_words = min(words, COPY_BYTES // 4)
        threads = host_copies(ordinary_in[:copy_words], locked_out[:copy_words])
        del locked_in, locked_out
    return rows, threads, f"{format_size(size)} of int32 with {like}, depth {depth}, {rounds} rounds a chunk"


def run(
    device: str | None,
    *,
    quick: bool,
    size: int | None,
    chunk: str,
    depth: int,
    like: str | None,
    pictures: bool,
) -> Report:
    place = vram.Device(device)
    total = size or (8 << 30 if place.kind == "cuda" and not quick else 64 << 20)
    rows, threads, title = measure(place, total, chunk, depth, like)
    columns = [
        Column("case", "case"),
        Column("chunk_bytes", "chunk", "bytes"),
        Column("seconds", "s", "s"),
        Column("fraction_of_ideal", "of ideal", "exact share"),
        Column("fraction_of_ideal_alone", "alone", "exact share"),
        Column("speedup", "over one by one", "ratio"),
        Column("gb_s", "GB/s", "GB/s"),
        Column("limit", "limit"),
    ]
    note = "\n\n".join(row["picture"] for row in rows) if pictures else ""
    copies = Table(
        f"Copies of the host, {_native.HostCopies().threads} threads by default",
        [Column("threads", "threads", "count"), Column("gb_s", "GB/s", "GB/s")],
        threads,
    )
    return Report.of("pipeline", place, [Table(title, columns, rows, note), copies], quick=quick)


if __name__ == "__main__":
    measuring_command(
        "pipeline",
        __doc__,
        run,
        click.option("--size", callback=read_size, help="8GiB on a GPU and 64MiB without, unless given."),
        click.option("--chunk", default="auto", show_default=True),
        click.option("--depth", default=3, show_default=True),
        click.option("--like", help="The array library."),
        click.option("--pictures", is_flag=True, help="Print each timeline."),
    )()
