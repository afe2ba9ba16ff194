"""Measure the cost of waits: synchronize() of a stream, an event and the device, on two kinds of thread.

Each call waits for a fill. On the main thread, waits query the driver until the work has finished, so that
Ctrl-C interrupts them; on other threads, waits block in the driver. The figures are medians in µs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vram import Buffer, Device, Event, Pool, Stream
from vram.bench.measure import elapsed_ns
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command

MIB = 1 << 20
SIZES, QUICK_SIZES = (4 << 10, 16 * MIB, 256 * MIB, 4096 * MIB), (4 << 10, 16 * MIB)
ROUNDS, QUICK_ROUNDS = 300, 3


def median_us(wait: Callable[[], None], buffer: Buffer, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        buffer.fill(1)
        times.append(elapsed_ns(wait) / 1e3)
    return statistics.median(times)


def run(device: str | None, *, quick: bool) -> Report:
    place = Device(device)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rows = []
    with Pool(place) as pool, Stream(place) as stream, ThreadPoolExecutor(1) as other:
        event = Event(place)

        def by_event() -> None:
            event.record(stream)
            event.synchronize()

        waits = {"stream": stream.synchronize, "event": by_event, "device": place.synchronize}
        for size in QUICK_SIZES if quick else SIZES:
            buffer = pool.allocate(size, stream=stream)
            for name, wait in waits.items():
                main_us = median_us(wait, buffer, rounds)
                other_us = other.submit(median_us, wait, buffer, rounds).result()
                rows.append({"bytes": size, "wait": name, "main": main_us, "other": other_us})
            buffer.free()
    columns = [
        Column("bytes", "fill", "bytes"),
        Column("wait", "wait"),
        Column("main", "main thread, µs", "us"),
        Column("other", "another thread, µs", "us"),
    ]
    return Report.of("waits", place, [Table("A wait for a fill", columns, rows)], quick=quick)


if __name__ == "__main__":
    measuring_command("waits", __doc__, run)()
