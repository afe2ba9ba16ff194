"""Measure the cost of growing a buffer in place, and check that a loop of requests stops creating pages.

- Growth by 2 MiB to 512 MiB: with pages that must be created, with free pages of the pool, with pages
  prepared in advance, and with pages reused after a shrink; minimum, median and 99th percentile of a step.
- 1 000 requests of random length on one stream: pages created, and the time of each growth.

examples/kv_cache.py compares a cache that grows row by row with concatenation and with the maximum size.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from vram import Device, GrowableBuffer, Pool, Stream
from vram.bench.measure import elapsed_ns
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.sizes import format_size

MIB = 1 << 20
STEPS = (2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB)
REPEATS = 60
REQUESTS, AT_ONCE, LONGEST = 1000, 4, 64 * MIB


def timed(work: Callable[[], object]) -> float:
    return elapsed_ns(work) / 1e3


def percentiles(samples: list[float]) -> dict[str, float]:
    """Return the minimum, the median and the 99th percentile."""
    ordered = sorted(samples)
    return {
        "least_us": ordered[0],
        "median_us": statistics.median(ordered),
        "p99_us": ordered[len(ordered) * 99 // 100],
    }


def until_ready(buffer: GrowableBuffer, size: int) -> None:
    """Wait for the background thread."""
    deadline = time.monotonic() + 10
    while buffer.ready < size and time.monotonic() < deadline:
        time.sleep(0.0002)


def growth(device: Device, step: int) -> list[dict[str, Any]]:
    """Measure `grow(step)` with pages from four sources, in microseconds."""
    count = max(4, min(REPEATS, (4 << 30) // step))
    rows = []
    with Pool(device) as pool, Stream(device) as stream:
        most = (count + 1) * step

        def opened(ahead: int = 0) -> GrowableBuffer:
            return GrowableBuffer(most, pool, stream=stream, ahead=ahead)

        def row(name: str, samples: list[float]) -> None:
            rows.append({"step": step, "pages": name, "steps": len(samples), **percentiles(samples)})

        opened().close()  # the space itself
        created = pool.raw_stats()["segments"]["total"]
        buffer = opened()
        row("created", [timed(lambda: buffer.grow(step)) for _ in range(count)])
        assert pool.raw_stats()["segments"]["total"] > created
        shrunk = [timed(lambda: buffer.shrink(step)) for _ in range(count)]
        row("taken back", [timed(lambda: buffer.grow(step)) for _ in range(count)])
        row("(shrinking)", shrunk)
        buffer.close()
        stream.synchronize()
        # Other addresses, so that the free pages must be mapped there.
        created = pool.raw_stats()["segments"]["total"]
        other = GrowableBuffer(2 * most, pool, stream=stream, ahead=0)
        row("free ones, mapped", [timed(lambda: other.grow(step)) for _ in range(count)])
        assert pool.raw_stats()["segments"]["total"] == created
        other.close()
        stream.synchronize()
        if step <= 32 * MIB:  # what "auto" makes ready at most
            pool.trim(wait=True)
            buffer = GrowableBuffer(most, pool, stream=stream, ahead="auto")
            samples = []
            for _ in range(count):
                until_ready(buffer, min(step, most - buffer.capacity))
                samples.append(timed(lambda: buffer.grow(step)))
            row("ready ahead", samples[1:])
            buffer.close()
    return rows


def requests(device: Device, ahead: str, count: int) -> dict[str, Any]:
    """Open many buffers, grow each by 2 MiB at a time to a random length, write to it, and close it."""
    chance = random.Random(1)
    with Pool(device) as pool, Stream(device) as stream:
        warm = [
            GrowableBuffer(LONGEST, pool, stream=stream, size=LONGEST, ahead=0) for _ in range(AT_ONCE + 1)
        ]
        for buffer in warm:
            buffer.close()
        stream.synchronize()
        created = pool.raw_stats()["segments"]["total"]
        live: list[GrowableBuffer] = []
        samples = []
        began = time.perf_counter()
        for _ in range(count):
            buffer = GrowableBuffer(
                LONGEST, pool, stream=stream, ahead=int(ahead) if ahead == "0" else "auto"
            )
            length = chance.randrange(1, LONGEST // (2 * MIB) + 1) * 2 * MIB
            while buffer.size < length:
                samples.append(timed(lambda buffer=buffer: buffer.grow(2 * MIB)))
                buffer.view(buffer.size - 2 * MIB).fill(1)
            live.append(buffer)
            if len(live) == AT_ONCE:
                live.pop(chance.randrange(AT_ONCE)).close()
        stream.synchronize()
        seconds = time.perf_counter() - began
        found = {
            "ahead": ahead,
            "growths": len(samples),
            "pages_created": pool.raw_stats()["segments"]["total"] - created,
            "seconds": seconds,
            **percentiles(samples),
        }
        for buffer in live:
            buffer.close()
        return found


def run(device: str | None, *, quick: bool) -> Report:
    place = Device(device)
    steps = STEPS[:2] if quick else STEPS
    growths = Table(
        "Growth, µs per step",
        [
            Column("step", "step", "bytes"),
            Column("pages", "pages"),
            Column("steps", "steps", "count"),
            *(Column(key, key.removesuffix("_us"), "us") for key in ("least_us", "median_us", "p99_us")),
        ],
        [row for step in steps for row in growth(place, step)],
    )
    longest = f"of random length up to {format_size(LONGEST)}, {AT_ONCE} at once, by 2 MiB"
    many = Table(
        f"{REQUESTS // 20 if quick else REQUESTS} requests {longest}",
        [
            Column("ahead", "ahead"),
            Column("growths", "growths", "count"),
            Column("pages_created", "pages created", "count"),
            Column("median_us", "median µs", "us"),
            Column("p99_us", "p99 µs", "us"),
            Column("seconds", "seconds", "s"),
        ],
        [requests(place, ahead, REQUESTS // 20 if quick else REQUESTS) for ahead in ("0", "auto")],
    )
    return Report.of("growable", place, [growths, many], quick=quick)


if __name__ == "__main__":
    measuring_command("growable", __doc__, run)()
