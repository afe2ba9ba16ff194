"""How fast does memory go to the host and come back, against what a plain copy of this machine takes?

The yardstick is one copy of the same bytes between the device and page-locked memory, in the same run. Then a
pool of that many bytes is suspended and resumed: with its contents (the first time, which locks host memory,
and the steady case), and discarded. Each row also says by how much the device's free memory rose.
On the host the figures only show that it runs.

    python benchmarks/suspend.py --device cuda:0 --size 8GiB --json suspend.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vram
from vram.sizes import format_size, parse_size

ROUNDS = 5
BUFFERS = {"one buffer": 1, "128 buffers": 128}


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def yardstick(device: vram.Device, size: int) -> dict[str, float]:
    """Bytes a second of one plain copy each way, the best of ROUNDS."""
    with vram.Pool(device) as pool, vram.PinnedPool(device) as pinned, vram.Stream(device) as stream:
        there, here = pool.allocate(size, stream=stream), pinned.allocate(size, stream=stream)
        there.fill(1)
        stream.synchronize()

        def copy(method: Callable[..., None]) -> float:
            def work() -> None:
                method(here, stream=stream)
                stream.synchronize()

            return size / min(seconds(work) for _ in range(ROUNDS))

        return {"to host": copy(there.copy_to), "to device": copy(there.copy_from)}


def turns(pool: vram.Pool, keep: str, rounds: int) -> list[dict[str, float]]:
    """Suspend and resume again and again; a dict of seconds and bytes for each."""
    result = []
    for _ in range(rounds):
        free = pool.device.free_memory
        suspending = seconds(lambda: pool.suspend(keep=keep))
        risen = pool.device.free_memory - free
        resuming = seconds(pool.resume)
        result.append({"suspend": suspending, "resume": resuming, "risen": risen})
    return result


def measure(device: vram.Device, size: int) -> list[dict[str, Any]]:
    """All rows."""
    bandwidth = yardstick(device, size)
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
                    row[f"{what}_ms"] = taken * 1e3
                    if keep == "host":
                        way = "to host" if what == "suspend" else "to device"
                        row[f"{what}_share"] = size / taken / bandwidth[way]
                row["risen"] = min(turn["risen"] for turn in those)
                rows.append(row)
            buffers.clear()
            pool.store.trim(wait=True)
    return [{"memory": "yardstick", **{f"{way} GB/s": rate / 1e9 for way, rate in bandwidth.items()}}, *rows]


def show(rows: list[dict[str, Any]], size: int) -> None:
    """Print them as a table."""
    rates = rows[0]
    print(
        f"{format_size(size)}: a plain copy takes {rates['to host GB/s']:.1f} GB/s to the host, "
        f"{rates['to device GB/s']:.1f} GB/s back"
    )
    print(
        f"{'memory':12} {'keep':8} {'case':7} {'suspend':>10} {'of copy':>8} {'resume':>10} "
        f"{'of copy':>8}  risen"
    )
    for row in rows[1:]:
        shares = [f"{row[key]:7.0%}" if key in row else " " * 7 for key in ("suspend_share", "resume_share")]
        print(
            f"{row['memory']:12} {row['keep']:8} {row['case']:7} {row['suspend_ms']:7.1f} ms {shares[0]:>8} "
            f"{row['resume_ms']:7.1f} ms {shares[1]:>8}  {format_size(row['risen'])}"
        )


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default=None, help="by default the default device")
    parser.add_argument("--size", default="8GiB")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    size = parse_size(arguments.size)
    device = vram.Device(arguments.device)
    rows = measure(device, size)
    show(rows, size)
    if arguments.json is not None:
        report = {"device": device.name, "size": size, "rounds": ROUNDS, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
