"""What does recording a pool cost, with and without stacks?

Loops over allocate+free pairs on a model device, in turns not recorded, recorded, and recorded with
Python stacks, at several depths of calls. An event is an allocation or a free. `thread` is the
processor time of the loop itself, `all` includes the thread that writes the file. `--json` for machines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import vram

Result = TypeVar("Result")

PAIRS = 500_000
FRESH_PAIRS = 20_000
REPEATS = 3
DEPTHS = (1, 20)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, vram.Pool(vram.Device.model("8GiB")) as pool:
        rows = measured(pool, Path(folder) / "run.vtrace")
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'ns an event':<44}{'thread':>8}{'all':>8}{'added':>8}{'in all':>8}")
    for row in rows:
        print(
            f"{row['what']:<44}"
            + "".join(f"{row[key]:>8.0f}" for key in ("thread", "all", "added", "added_all"))
        )


def measured(pool: vram.Pool, path: Path) -> list[dict[str, object]]:
    """Each way of recording beside none, in the same loop."""
    loops: dict[str, Callable[[], tuple[float, float]]] = {}
    for depth in DEPTHS:
        loops[f"{depth} calls deep"] = lambda depth=depth: deep(depth - 1, lambda: settled(pool))
    loops["20 calls deep, all entered anew"] = lambda: fresh(pool, 19)
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "not recorded": nullcontext,
        "recorded": lambda: vram.record(pool, path, stacks=None),
        "with stacks": lambda: vram.record(pool, path),
    }
    rows = []
    for where, loop in loops.items():
        best = {way: (float("inf"), float("inf")) for way in ways}
        for _ in range(REPEATS):
            for way, make in ways.items():
                with make() as recorder:
                    best[way] = tuple(map(min, best[way], loop()))  # type: ignore[assignment]
                if isinstance(recorder, vram.Recorder) and recorder.dropped:
                    raise SystemExit(f"{recorder.dropped} events were dropped; this says nothing")
        plain = best["not recorded"]
        for way, (thread, every) in best.items():
            rows.append(
                {
                    "what": f"{way}, {where}",
                    "thread": thread,
                    "all": every,
                    "added": thread - plain[0],
                    "added_all": every - plain[1],
                }
            )
    return rows


def settled(pool: vram.Pool) -> tuple[float, float]:
    """A loop in one function."""
    malloc, free = pool.malloc, pool.free
    thread, every = time.thread_time(), time.process_time()
    for _ in range(PAIRS):
        free(malloc(4096))
    return ns(time.thread_time() - thread, PAIRS), ns(time.process_time() - every, PAIRS)


def fresh(pool: vram.Pool, depth: int) -> tuple[float, float]:
    """Every allocation at the end of calls that were made for it."""
    malloc, free = pool.malloc, pool.free
    thread, every = time.thread_time(), time.process_time()
    for _ in range(FRESH_PAIRS):
        deep(depth, lambda: free(malloc(4096)))
    return ns(time.thread_time() - thread, FRESH_PAIRS), ns(time.process_time() - every, FRESH_PAIRS)


def deep(depth: int, function: Callable[[], Result]) -> Result:
    return function() if depth <= 0 else deep(depth - 1, function)


def ns(seconds: float, pairs: int) -> float:
    return seconds / (2 * pairs) * 1e9


if __name__ == "__main__":
    main()
