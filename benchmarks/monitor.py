"""Measure the cost of monitoring a process that makes a million allocations per second.

A thread allocates and frees in a loop while the process is monitored and a client in another process requests
the status at several intervals. "monitor" is the processor time of the threads that sample and answer, as a
share of one core, after the first answer. The second table shows the cost of finding all holders.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import vram
from vram import Device
from vram.bench.measure import elapsed_ns
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command

SECONDS = 4.0
LIVE = 20_000
"""Blocks that are live during the measurement, with a few tags."""
BLOCKS = (10_000, 100_000, 1_000_000)
CLIENT = """
import sys, time
from vram.observe.monitor import attach
pid, pause = int(sys.argv[1]), float(sys.argv[2])
with attach(pid, timeout=60) as client:
    client.status()
    print("ready", flush=True)
    while True:
        client.status()
        time.sleep(pause)
"""


def asked(device: Device, blocks: int) -> dict[str, float]:
    """Measure the most expensive query: who holds what."""
    with vram.Pool(device) as pool:
        addresses = pool.malloc_batch([512] * blocks)
        best = min(elapsed_ns(pool.raw_holders, time.thread_time_ns) for _ in range(3))
        for address in addresses:
            pool.free(address)
    return {"blocks": blocks, "ms": best / 1e6}


def measured(device: Device, monitored: bool, pause: float | None, duration: float) -> dict[str, Any]:
    """Measure one interval of requests, or none."""
    with vram.Pool(device) as pool:
        kept = [pool.allocate(4096, tag=f"tag {number % 20}") for number in range(LIVE)]
        monitor = vram.monitor() if monitored else None
        client = None
        if pause is not None:
            client = subprocess.Popen(
                [sys.executable, "-c", CLIENT, str(os.getpid()), str(pause)],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert client.stdout is not None
            client.stdout.readline()
        before = thread_seconds()
        pairs, seconds = spin(pool, duration)
        spent = thread_seconds() - before
        if client is not None:
            client.kill()
            client.wait()
        if monitor is not None:
            monitor.close()
        del kept
    what = "not monitored" if not monitored else "monitored" if pause is None else f"asked every {pause} s"
    return {"what": what, "allocations_per_s": pairs / seconds, "monitor": spent / seconds}


def spin(pool: vram.Pool, duration: float) -> tuple[int, float]:
    """Allocate and free for a duration."""
    malloc, free = pool.malloc, pool.free
    pairs, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < duration:
        for _ in range(1000):
            free(malloc(65536))
        pairs += 1000
    return pairs, now - begin


def thread_seconds() -> float:
    """Return the processor time of the monitor's threads so far, as counted by the kernel."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name in ("vram-monitor", "vram-client") and thread.native_id:
            with open(f"/proc/self/task/{thread.native_id}/schedstat", encoding="ascii") as counted:
                total += int(counted.read().split()[0]) / 1e9
    return total


def run(device: str | None, *, quick: bool) -> Report:
    place = Device(device or "model:8GiB")
    ways = ((False, None), (True, None), (True, 1.0), (True, 0.25))
    seconds = SECONDS / 20 if quick else SECONDS
    monitored = Table(
        "What it costs to be monitored",
        [
            Column("what", "the process is"),
            Column("allocations_per_s", "allocations per second", "count"),
            Column("monitor", "monitor, share of a core", "exact share"),
        ],
        [measured(place, *way, seconds) for way in ways],
    )
    holders = Table(
        "Who holds what",
        [Column("blocks", "live blocks", "count"), Column("ms", "ms", "ms")],
        [asked(place, blocks) for blocks in (BLOCKS[:1] if quick else BLOCKS)],
    )
    return Report.of("monitor", place, [monitored, holders], quick=quick)


if __name__ == "__main__":
    measuring_command("monitor", __doc__, run)()
