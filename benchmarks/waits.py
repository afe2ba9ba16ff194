"""What a wait costs: synchronize() of a stream, an event and the device beside the driver's own wait.

Each waits for a fill of so many bytes. The main thread's waits ask the driver until the work has finished,
so that Ctrl-C ends them; those of other threads leave the waiting to the driver. Prints medians in µs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable

import vram

MIB = 1 << 20


def measure(wait: Callable[[], None], buffer: vram.Buffer, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        buffer.fill(1)
        began = time.perf_counter()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    device = vram.Device(options.device)
    rows = []
    with vram.Pool(device) as pool, vram.Stream(device) as stream:
        event = vram.Event(device)

        def by_event() -> None:
            event.record(stream)
            event.synchronize()

        waits = {"stream": stream.synchronize, "event": by_event, "device": device.synchronize}
        for size in (4 << 10, 16 * MIB, 256 * MIB, 4096 * MIB):
            buffer = pool.allocate(size, stream=stream)
            for name, wait in waits.items():
                found: list[float] = [measure(wait, buffer, options.rounds)]
                other = threading.Thread(
                    target=lambda wait=wait, buffer=buffer, found=found: found.append(
                        measure(wait, buffer, options.rounds)
                    )
                )
                other.start()
                other.join()
                rows.append({"bytes": size, "wait": name, "main_us": found[0], "other_thread_us": found[1]})
            buffer.free()
    json.dump(rows, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
