"""What does it cost to let others look, at a million allocations a second?

A thread allocates and frees as fast as it can while the process is monitored and a client in another process
asks for the status at several paces. `monitor` is the processor time of the threads that sample and answer,
as a share of one core, after the first answer; beside it is how many allocations a second the loop made
meanwhile. Then, how long it takes to find out who holds what. `--json FILE` for machines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import vram

SECONDS = 4.0
LIVE = 20_000
"""Blocks that are live meanwhile, under a few tags."""
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


def main() -> None:
    """Print a table, and JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--device", default="model:8GiB")
    arguments = parser.parse_args()
    rows = [
        measured(arguments.device, *way) for way in ((False, None), (True, None), (True, 1.0), (True, 0.25))
    ]
    print(f"{'':<42}{'allocations/s':>15}{'monitor, % of a core':>22}")
    for row in rows:
        print(f"{row['what']:<42}{row['allocations_per_s']:>15,.0f}{row['monitor_percent']:>22.3f}")
    looks = [asked(arguments.device, blocks) for blocks in BLOCKS]
    print(f"\n{'live blocks':<42}{'who holds what, ms':>22}")
    for look in looks:
        print(f"{look['blocks']:<42,}{look['ms']:>22.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"monitor": rows, "holders": looks}, indent=1))


def asked(device: str, blocks: int) -> dict[str, float]:
    """How long the dearest question takes: who holds what."""
    with vram.Pool(device) as pool:
        addresses = pool.malloc_batch([512] * blocks)
        best = float("inf")
        for _ in range(3):
            begin = time.thread_time()
            pool.raw_holders()
            best = min(best, time.thread_time() - begin)
        for address in addresses:
            pool.free(address)
    return {"blocks": blocks, "ms": best * 1e3}


def measured(device: str, monitored: bool, pause: float | None) -> dict[str, Any]:
    """One way of looking, or none."""
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
        pairs, seconds = spin(pool)
        spent = thread_seconds() - before
        if client is not None:
            client.kill()
            client.wait()
        if monitor is not None:
            monitor.close()
        del kept
    what = "not monitored" if not monitored else "monitored" if pause is None else f"asked every {pause} s"
    return {"what": what, "allocations_per_s": pairs / seconds, "monitor_percent": 100 * spent / seconds}


def spin(pool: vram.Pool) -> tuple[int, float]:
    """Allocate and free until the time is over."""
    malloc, free = pool.malloc, pool.free
    pairs, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < SECONDS:
        for _ in range(1000):
            free(malloc(65536))
        pairs += 1000
    return pairs, now - begin


def thread_seconds() -> float:
    """Processor time of the monitor's threads so far, as the kernel counts it."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name in ("vram-monitor", "vram-client") and thread.native_id:
            with open(f"/proc/self/task/{thread.native_id}/schedstat", encoding="ascii") as counted:
                total += int(counted.read().split()[0]) / 1e9
    return total


if __name__ == "__main__":
    main()
