"""Opens mutated files, each in a process of its own under the limits that `vram.open` sets, and judges it.

Every file must be read as a trace that hangs together, or be a TraceError with a place; in bounded time and
memory, and without running anything. `python tests/fuzz/fuzz_traces.py --count 10000` prints a table and
JSON, keeps the files that broke a promise, and exits with 1 if there are any.

Processes are forked from one that has everything loaded; some files also go through `vram.open` (`--whole`).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.modules["numpy"] = None  # type: ignore[assignment]  # as in the real child: less memory, no threads
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"

import pyarrow.parquet  # noqa: E402, F401
from mutations import FAMILIES  # noqa: E402

from vram.errors import TraceError  # noqa: E402
from vram.trace import Trace, lifetimes, open_trace  # noqa: E402
from vram.trace.files import DEFAULT_MAX_BYTES, BoundedReader  # noqa: E402
from vram.trace.formats import read_parts  # noqa: E402
from vram.trace.limits import enter_limits, while_reading  # noqa: E402
from vram.trace.notes import unpack  # noqa: E402

MOST_SECONDS = 20.0  # of processor time; all files of a run together take less on an idle machine
MOST_MIB = 1024
WALL_SECONDS = 600  # a hang; far above the limit of the processor, since the machine may be busy
FORBIDDEN = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "ctypes.dlopen",
)
READ, REFUSED, BROKEN = 0, 1, 2


@dataclass
class Tally:
    """What became of the files of one family."""

    files: int = 0
    read: int = 0
    refused: int = 0
    seconds: float = 0.0
    mib: float = 0.0
    broken: list[str] = field(default_factory=list)


def hangs_together(trace: Trace) -> None:
    """Raise unless the program of `trace` can be told and no longer than its events allow."""
    blocks = sum(len(segment.blocks) for segment in trace.segments)
    assert len(lifetimes(trace)) <= 2 * trace.events + 2 * blocks
    assert all(trace.frames_of(stack) is not None for stack in set(trace.stack))
    assert max(trace.tag, default=0) < len(trace.tags) and max(trace.stream, default=-1) < len(trace.streams)


def read_here(path: Path) -> int:
    """Read `path` as the child of `vram.open` does."""
    try:
        with io.FileIO(path) as file:
            reader = BoundedReader(file, DEFAULT_MAX_BYTES, while_reading())
            hangs_together(unpack(*read_parts(reader), ""))
    except TraceError as error:
        assert error.place
        return REFUSED
    except MemoryError:
        return REFUSED
    return READ


def forbid(name: str, arguments: Any) -> None:
    if name in FORBIDDEN:
        os.write(2, f"tried to run something: {name}\n".encode())
        os._exit(BROKEN)


def fork_and_read(path: Path) -> tuple[int, Any]:
    """The wait status and the resources of a process that reads `path`."""
    process = os.fork()
    if process == 0:
        status = BROKEN
        try:
            enter_limits(lambda count: None)
            sys.addaudithook(forbid)
            signal.alarm(WALL_SECONDS)
            status = read_here(path)
        except BaseException as error:
            os.write(2, f"{path.name}: {type(error).__name__}: {str(error)[:300]}\n".encode())
        finally:
            os._exit(status)
    _, status, usage = os.wait4(process, 0)
    return status, usage


def judge(path: Path, marker: Path, tally: Tally) -> str:
    """Open `path`, count the outcome, and return what is wrong with it, or nothing."""
    status, usage = fork_and_read(path)
    seconds, mib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    tally.files += 1
    tally.seconds, tally.mib = max(tally.seconds, seconds), max(tally.mib, mib)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:  # vram.open says so as a TraceError
        tally.refused += 1
        return ""
    if os.WIFSIGNALED(status):
        return f"died of signal {os.WTERMSIG(status)}"
    outcome = os.WEXITSTATUS(status)
    tally.read += outcome == READ
    tally.refused += outcome == REFUSED
    if outcome not in (READ, REFUSED):
        return "neither read nor a TraceError"
    if seconds > MOST_SECONDS or mib > MOST_MIB:
        return f"took {seconds:.1f} s and {mib:.0f} MiB"
    return "ran a command" if marker.exists() else ""


def open_whole(path: Path) -> str:
    """The same through the public function; a difference is for the reader to see."""
    try:
        hangs_together(open_trace(path))
    except TraceError as error:
        return "" if error.place else "a TraceError without a place"
    except BaseException as error:
        return f"vram.open raised {type(error).__name__}: {error}"
    return ""


def fuzz(count: int, seed: int, whole: int, keep: Path, progress: bool) -> dict[str, Tally]:
    tallies = {name: Tally() for name in FAMILIES}
    names = list(FAMILIES)
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "executed"
        path = Path(folder) / "file"
        for index in range(count):
            name = names[index % len(names)]
            chance = random.Random(f"{seed}/{index}")
            path.write_bytes(FAMILIES[name](chance, f"touch {marker}".encode()))
            wrong = judge(path, marker, tallies[name])
            if not wrong and index % whole == 0:
                wrong = open_whole(path)
            if wrong:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{seed}-{index}").write_bytes(path.read_bytes())
                tallies[name].broken.append(f"{seed}-{index}: {wrong}")
            if progress and index % 500 == 499:
                print(f"{index + 1} files", file=sys.stderr, flush=True)
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many files (default 1000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--whole", type=int, default=25, help="every so many also through vram.open (default 25)"
    )
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="where files that broke go")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    tallies = fuzz(arguments.count, arguments.seed, arguments.whole, arguments.keep, not arguments.json)
    result = {
        "count": arguments.count,
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - begin, 1),
        "peak_mib_here": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "families": {name: vars(tally) for name, tally in tallies.items()},
    }
    if not arguments.json:
        print(
            f"{'family':<18}{'files':>7}{'read':>7}{'refused':>9}{'most s':>8}{'most MiB':>10}{'broken':>8}"
        )
        for name, tally in tallies.items():
            print(
                f"{name:<18}{tally.files:>7}{tally.read:>7}{tally.refused:>9}"
                f"{tally.seconds:>8.2f}{tally.mib:>10.0f}{len(tally.broken):>8}"
            )
    print(json.dumps(result))
    return int(any(tally.broken for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
