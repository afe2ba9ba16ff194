"""What does it cost to grow in place, and does it settle?

- growth by 2 MiB to 512 MiB: with pages that must be created, with pages that the pool has free, with pages
  made ready ahead, and taken back after a shrink; the least, the median and the 99th percentile of a step;
- 1 000 requests of random length on one stream: pages created, memory calls' share of the time;
- a cache that grows row by row, against concatenation and the maximum: examples/kv_cache.py prints that.

    python benchmarks/growable.py [--device cuda:0] [--json FILE]

Prints tables; `--json` for machines.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vram
from vram import GrowableBuffer, Pool, Stream
from vram.sizes import format_size

MIB = 1 << 20
STEPS = (2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB)
REPEATS = 60
REQUESTS, AT_ONCE, LONGEST = 1000, 4, 64 * MIB


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began) / 1000


def until_ready(buffer: GrowableBuffer, size: int) -> None:
    """Let the background thread finish."""
    deadline = time.monotonic() + 10
    while buffer.ready < size and time.monotonic() < deadline:
        time.sleep(0.0002)


def growth(device: str, step: int) -> list[dict[str, Any]]:
    """Microseconds of `grow(step)`, four ways."""
    count = max(4, min(REPEATS, (4 << 30) // step))
    rows = []
    with Pool(device) as pool, Stream(device) as stream:
        most = (count + 1) * step

        def opened(ahead: int = 0) -> GrowableBuffer:
            return GrowableBuffer(most, pool, stream=stream, ahead=ahead)

        def row(name: str, samples: list[float]) -> None:
            ordered = sorted(samples)
            rows.append(
                {
                    "step": step,
                    "pages": name,
                    "steps": len(ordered),
                    "least_us": ordered[0],
                    "median_us": statistics.median(ordered),
                    "p99_us": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
                }
            )

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


def requests(device: str, ahead: Any) -> dict[str, Any]:
    """Many buffers that come, grow by 2 MiB at a time to a random length, are written, and go."""
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
        for _ in range(REQUESTS):
            buffer = GrowableBuffer(LONGEST, pool, stream=stream, ahead=ahead)
            length = chance.randrange(1, LONGEST // (2 * MIB) + 1) * 2 * MIB
            while buffer.size < length:
                samples.append(timed(lambda buffer=buffer: buffer.grow(2 * MIB)))
                buffer.view(buffer.size - 2 * MIB).fill(1)
            live.append(buffer)
            if len(live) == AT_ONCE:
                live.pop(chance.randrange(AT_ONCE)).close()
        stream.synchronize()
        seconds = time.perf_counter() - began
        ordered = sorted(samples)
        found = {
            "ahead": ahead,
            "requests": REQUESTS,
            "growths": len(samples),
            "pages_created": pool.raw_stats()["segments"]["total"] - created,
            "seconds": seconds,
            "median_us": statistics.median(ordered),
            "p99_us": ordered[len(ordered) * 99 // 100],
        }
        for buffer in live:
            buffer.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    gpu = next((each.name for each in vram.devices() if each.kind == "cuda"), "host")
    parser.add_argument("--device", default=gpu, help=f"by default {gpu}")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    steps = [row for step in STEPS for row in growth(options.device, step)]
    print(f"growth on {options.device}, µs a step")
    print(f"{'step':>8}  {'pages':18} {'steps':>6} {'least':>9} {'median':>9} {'p99':>9}")
    for row in steps:
        times = "".join(f"{row[key]:>10.1f}" for key in ("least_us", "median_us", "p99_us"))
        print(f"{format_size(row['step']):>8}  {row['pages']:18} {row['steps']:>6}{times}")
    many = [requests(options.device, ahead) for ahead in (0, "auto")]
    print(f"\n{REQUESTS} requests of random length up to {format_size(LONGEST)}, {AT_ONCE} at once, by 2 MiB")
    print(f"{'ahead':>8} {'growths':>8} {'pages created':>14} {'median µs':>10} {'p99 µs':>8} {'seconds':>8}")
    for each in many:
        print(
            f"{each['ahead']!s:>8} {each['growths']:>8} {each['pages_created']:>14} "
            f"{each['median_us']:>10.1f} {each['p99_us']:>8.1f} {each['seconds']:>8.2f}"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"device": options.device, "growth": steps, "requests": many}, indent=1)
        )


if __name__ == "__main__":
    main()
