"""Copies between host and device: which calls block, how fast they are, and what they overlap with."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from ctypes import addressof, c_char

from vram.core.pool import PinnedPool
from vram.core.stream import Event, Stream
from vram.sizes import format_size

from .experiment import KIB, MIB, Bench, Judgement, Observation, Quantity, Table, experiment

ASYNC_ENGINES = 40
"""The driver's number of the attribute "copy engines"."""


@contextlib.contextmanager
def _pageable(size: int) -> Iterator[int]:
    """Allocate pageable memory with every page touched."""
    memory = mmap.mmap(-1, size)
    for place in range(0, size, mmap.PAGESIZE):
        memory[place] = 1
    yield addressof(c_char.from_buffer(memory))


# ---- pageable and pinned ----------------------------------------------------------------------------------


def _judge_pinned(seen: Observation) -> Judgement:
    half = seen["kernel_ms"] / 2
    pageable = min(seen["pageable_upload_call_ms"], seen["pageable_download_call_ms"]) > half
    pinned = max(seen["pinned_upload_call_ms"], seen["pinned_download_call_ms"]) > half
    speeds = (
        f"pageable {seen['pageable_upload_gb_s']:.1f} GB/s up and {seen['pageable_download_gb_s']:.1f} down, "
        f"pinned {seen['pinned_upload_gb_s']:.1f} and {seen['pinned_download_gb_s']:.1f}"
    )
    calls = (
        f"Behind a {seen['kernel_ms']:.0f} ms kernel, the call blocks the host for "
        f"{seen['pageable_upload_call_ms']:.2f} ms (pageable) and {seen['pinned_upload_call_ms']:.2f} ms "
        "(pinned)"
    )
    if pageable and not pinned:
        return "holds", f"{calls}; {speeds}."
    if pinned:
        return "does not hold", f"{calls}: pinned copies block as well; {speeds}."
    return "depends", f"{calls}: pageable copies do not always block; {speeds}."


@experiment(
    "pinned-copies",
    "Copies of pageable memory block the host; copies of pinned memory do not.",
    judge=_judge_pinned,
    needs_gpu=True,
)
def pinned_copies(bench: Bench) -> Observation:
    """An "asynchronous" copy of pageable memory is not asynchronous: it is slower and blocks the host."""
    sizes = [64 * KIB, 1 * MIB, 16 * MIB, (64 if bench.quick else 256) * MIB]
    largest = sizes[-1]
    rows: list[tuple[str | float, ...]] = []
    numbers = {"kernel_ms": Quantity(bench.busy_ms, "ms")}
    with (
        bench.streams(1) as (stream,),
        bench.reserved(largest) as (device,),
        PinnedPool(bench.device) as locked,
        _pageable(largest) as pageable,
    ):
        for kind, host in (("pageable", pageable), ("pinned", locked.malloc(largest))):
            for way, to, source in (("upload", device, host), ("download", host, device)):
                for size in sizes:
                    speed, kept = _copy_speed(bench, stream, to, source, size)
                    rows.append((kind, way, format_size(size), speed, kept))
                numbers[f"{kind}_{way}_gb_s"] = Quantity(speed, "GB/s")
                numbers[f"{kind}_{way}_call_ms"] = Quantity(_behind(bench, stream, to, source), "ms")
    return Observation(numbers, Table(("memory", "way", "size", "GB/s", "call's share of the time"), rows))


def _copy_speed(bench: Bench, stream: Stream, to: int, source: int, size: int) -> tuple[float, float]:
    """Return GB/s, and the share of the time for which the call blocks the host."""

    def copy() -> None:
        bench.backend.copy(to, source, size, stream.handle)

    whole = bench.timed_until_done(copy, stream)
    call = bench.timed(copy)
    stream.synchronize()
    return size / whole / 1e6, min(1.0, call / whole)


def _behind(bench: Bench, stream: Stream, to: int, source: int) -> float:
    """Return how long the call takes when a kernel runs before it in its stream."""
    size = 16 * MIB
    bench.busy(stream)
    spent = bench.timed(lambda: bench.backend.copy(to, source, size, stream.handle))
    stream.synchronize()
    return spent


# ---- overlap ----------------------------------------------------------------------------------------------

OVERLAPPED, SERIAL = 0.7, 0.2
"""Shares of the time that could overlap: above the first the work overlaps, below the second it does not."""


def _judge_overlap(seen: Observation) -> Judgement:
    alone = [seen["upload_ms"], seen["download_ms"], seen["compute_ms"]]
    together = seen["together_ms"]
    share = (sum(alone) - together) / (sum(alone) - max(alone))
    text = (
        f"{together:.2f} ms together, {sum(alone):.2f} ms in sequence, {max(alone):.2f} ms for the longest: "
        f"{100 * share:.0f} % of the time that can overlap does"
    )
    if "copy_engines" in seen.numbers:
        text += f", with {seen['copy_engines']:.0f} copy engines"
    if share >= OVERLAPPED:
        return "holds", f"{text}."
    return ("does not hold" if share < SERIAL else "depends"), f"{text}."


@experiment("overlap", "Upload, download and compute run at the same time.", judge=_judge_overlap)
def overlap(bench: Bench) -> Observation:
    """A prefetching loader needs copies that really overlap with kernels and with each other."""
    size = (64 if bench.quick or not bench.on_gpu else 256) * MIB
    with contextlib.ExitStack() as stack:
        up, down, compute = stack.enter_context(bench.streams(3))
        first, second = stack.enter_context(bench.reserved(size, size))
        locked = stack.enter_context(PinnedPool(bench.device))
        source, target = locked.malloc(size), locked.malloc(size)

        def upload() -> None:
            bench.backend.copy(first, source, size, up.handle)

        def download() -> None:
            bench.backend.copy(target, second, size, down.handle)

        upload_ms = bench.timed_until_done(upload, up)
        download_ms = bench.timed_until_done(download, down)
        busy_ms = max(upload_ms, download_ms)

        def spin() -> None:
            bench.kernels.spin(compute, busy_ms)

        def together() -> None:
            upload()
            download()
            spin()

        compute_ms = bench.timed_until_done(spin, compute)
        together_ms = bench.timed_until_done(together, up, down, compute)
    numbers = {
        "upload_ms": Quantity(upload_ms, "ms"),
        "download_ms": Quantity(download_ms, "ms"),
        "compute_ms": Quantity(compute_ms, "ms"),
        "together_ms": Quantity(together_ms, "ms"),
    }
    if bench.on_gpu:
        numbers["copy_engines"] = Quantity(bench.backend.attribute(ASYNC_ENGINES), "copy engines")
    return Observation(numbers)


# ---- chunks -----------------------------------------------------------------------------------------------

CLOSE = 1.03
"""Times within this factor count as equal."""


def _judge_chunks(seen: Observation) -> Judgement:
    times = {str(row["chunk"]): float(row["ms"]) for row in seen.rows()}
    smallest, whole = next(iter(times)), list(times)[-1]
    best = min(times, key=times.__getitem__)
    text = (
        f"{best} takes {times[best]:.2f} ms, {smallest} takes {times[smallest]:.2f} ms, "
        f"one piece takes {times[whole]:.2f} ms; ideal is {seen['ideal_ms']:.2f} ms."
    )
    if times[smallest] <= CLOSE * times[best] < times[whole]:
        return "holds", f"The smallest chunk is as fast as any: {text}"
    if times[whole] <= CLOSE * times[best]:
        return "does not hold", f"Splitting does not help: {text}"
    return "depends", f"A medium size is fastest: {text}"


@experiment(
    "chunk-size",
    "The smaller the chunks, the better copies overlap with compute.",
    judge=_judge_chunks,
    needs_gpu=True,
)
def chunk_size(bench: Bench) -> Observation:
    """Large chunks do not overlap; with small chunks, each one pays for a copy, an event and a launch."""
    size = (32 if bench.quick else 128) * MIB
    chunks = [each for each in (128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB) if each < size]
    with (
        bench.streams(2) as (copies, compute),
        bench.reserved(size) as (device,),
        PinnedPool(bench.device) as locked,
    ):
        host = locked.malloc(size)
        copy_ms = bench.timed_until_done(
            lambda: bench.backend.copy(device, host, size, copies.handle), copies
        )
        rounds = _rounds_for(bench, device, size, compute, copy_ms)
        compute_ms = bench.timed_until_done(
            lambda: bench.kernels.churn(device, size, rounds=rounds, stream=compute), compute
        )
        event = Event(bench.device)

        def pipeline(chunk: int) -> None:
            for start in range(0, size, chunk):
                length = min(chunk, size - start)
                bench.backend.copy(device + start, host + start, length, copies.handle)
                event.record(copies)
                event.wait(compute)
                bench.kernels.churn(device + start, length, rounds=rounds, stream=compute)

        rows: list[tuple[str | float, ...]] = []
        for chunk in [*chunks, size]:
            spent = bench.timed_until_done(lambda chunk=chunk: pipeline(chunk), compute)  # type: ignore[misc]
            rows.append((format_size(chunk), spent, max(copy_ms, compute_ms) / spent))
    return Observation(
        {
            "copy_ms": Quantity(copy_ms, "ms"),
            "compute_ms": Quantity(compute_ms, "ms"),
            "ideal_ms": Quantity(max(copy_ms, compute_ms), "ms"),
        },
        Table(("chunk", "ms", "of ideal"), rows),
    )


def _rounds_for(bench: Bench, device: int, size: int, stream: Stream, wanted_ms: float) -> int:
    """Return the work per word that takes about as long as copying it."""
    trial = 512
    spent = bench.timed_until_done(
        lambda: bench.kernels.churn(device, size, rounds=trial, stream=stream), stream
    )
    return max(1, int(trial * wanted_ms / spent))
