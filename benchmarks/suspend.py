"""Measure the speed of suspend and resume, compared with a plain copy of the same bytes.

The reference is one copy between the device and pinned memory, in the same run. Then a pool of that size is
suspended and resumed: with its contents (the first time, which pins host memory, and afterwards), and
discarded. Each row also shows by how much the free memory of the device rose. On the host, the figures only
show that it works.

    python benchmarks/suspend.py --device cuda:0 --size 8GiB
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import rich_click as click

import vram
from vram.bench.measure import elapsed_ns
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.cli.console import read_size
from vram.sizes import format_size

ROUNDS = 5
BUFFERS = {"one buffer": 1, "128 buffers": 128}


def copy_speed(device: vram.Device, size: int) -> dict[str, float]:
    """Return bytes per second of a plain copy in each direction, the best of ROUNDS."""
    with vram.Pool(device) as pool, vram.PinnedPool(device) as pinned, vram.Stream(device) as stream:
        there, here = pool.allocate(size, stream=stream), pinned.allocate(size, stream=stream)
        there.fill(1)
        stream.synchronize()

        def copy(method: Callable[..., None]) -> float:
            def work() -> None:
                method(here, stream=stream)
                stream.synchronize()

            return 1e9 * size / min(elapsed_ns(work) for _ in range(ROUNDS))

        return {"to host": copy(there.copy_to), "to device": copy(there.copy_from)}


def turns(pool: vram.Pool, keep: str, rounds: int) -> list[dict[str, float]]:
    """Suspend and resume repeatedly; return nanoseconds and bytes of each round."""
    result = []
    for _ in range(rounds):
        free = pool.device.free_memory
        suspending = elapsed_ns(lambda: pool.suspend(keep=keep))
        risen = pool.device.free_memory - free
        resuming = elapsed_ns(pool.resume)
        result.append({"suspend": suspending, "resume": resuming, "risen": risen})
    return result


def measure(device: vram.Device, size: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the speed of plain copies, and all rows."""
    bandwidth = copy_speed(device, size)
    rows: list[dict[str, Any]] = []
    for name, count in BUFFERS.items():
        with vram.Pool(device) as pool:
            buffers = [pool.allocate(size // count) for _ in range(count)]
            for buffer in buffers:
                buffer.fill(7)
            device.synchronize()
            first, *steady = turns(pool, "host", ROUNDS + 1)
            discarded, *later = turns(pool, "discard", ROUNDS + 1)
            for case, keep, those in (
                ("first", "host", [first]),
                ("steady", "host", steady),
                ("first", "discard", [discarded]),
                ("steady", "discard", later),
            ):
                row: dict[str, Any] = {"memory": name, "keep": keep, "case": case}
                for what in ("suspend", "resume"):
                    taken = statistics.median(turn[what] for turn in those)
                    row[f"{what}_ms"] = taken / 1e6
                    if keep == "host":
                        way = "to host" if what == "suspend" else "to device"
                        row[f"{what}_share"] = 1e9 * size / taken / bandwidth[way]
                row["risen"] = min(turn["risen"] for turn in those)
                rows.append(row)
            buffers.clear()
            pool.store.trim(wait=True)
    return bandwidth, rows


def run(device: str | None, *, quick: bool, size: int | None) -> Report:
    place = vram.Device(device)
    total = size or (64 << 20 if quick else 8 << 30)
    rates, rows = measure(place, total)
    columns = [
        Column("memory", "memory"),
        Column("keep", "keep"),
        Column("case", "case"),
        Column("suspend_ms", "suspend, ms", "ms"),
        Column("suspend_share", "of a copy", "share"),
        Column("resume_ms", "resume, ms", "ms"),
        Column("resume_share", "of a copy", "share"),
        Column("risen", "free memory rose by", "bytes"),
    ]
    title = (
        f"{format_size(total)}: a plain copy takes {rates['to host'] / 1e9:.1f} GB/s to the host, "
        f"{rates['to device'] / 1e9:.1f} GB/s back"
    )
    return Report.of("suspend", place, [Table(title, columns, rows)], quick=quick)


if __name__ == "__main__":
    help_text = "Bytes in the pool; 8GiB, and 64MiB with --quick."
    measuring_command("suspend", __doc__, run, click.option("--size", callback=read_size, help=help_text))()
