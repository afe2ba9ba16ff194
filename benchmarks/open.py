"""How long does opening a recording take, and how much memory?

Opens the largest recorded job (400 000 events) as PyTorch wrote it and as our own files, each several times
in a fresh process, as `vram.open` does for a stranger's file. Time is of the processor, the caller's and
the child's together, and by the clock; the least of the repeats. Memory is the larger of both processes'
peaks. `--json` for machines.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vram.trace import Trace, TraceWriter, open_trace
from vram.trace.convert import convert
from vram.trace.model import COLUMNS

RECORDING = Path(__file__).resolve().parent.parent / "traces" / "llm_serve.pickle.xz"
MIB = 1 << 20
BATCH_EVENTS = 10_000

OPEN = """
import json, resource, sys, time
import vram.trace
usage = lambda: [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
processor = lambda: sum(each.ru_utime + each.ru_stime for each in usage())
before, begin = processor(), time.perf_counter()
events = vram.trace.open_trace(sys.argv[1]).events
clock = time.perf_counter() - begin
peak = max(each.ru_maxrss for each in usage()) * 1024
spent = processor() - before
print(json.dumps({"events": events, "processor_s": spent, "clock_s": clock, "peak_bytes": peak}))
"""


def opened(path: Path, repeats: int) -> dict[str, Any]:
    """The least of several openings."""
    command = [sys.executable, "-c", OPEN, str(path)]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(repeats)
    ]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def record(trace: Trace, path: Path) -> None:
    """`trace` as a recorder would have written it."""
    with TraceWriter(path, start_us=trace.start_us) as writer:
        for handle in trace.streams:
            writer.stream(handle)
        for stack in range(len(trace.stacks)):
            writer.stack(trace.frames_of(stack))
        for first in range(0, trace.events, BATCH_EVENTS):
            rows = slice(first, first + BATCH_EVENTS)
            writer.append({name: getattr(trace, name)[rows] for name in COLUMNS if name != "tag"})


def measure(repeats: int) -> list[dict[str, Any]]:
    trace = open_trace(RECORDING)
    unpacked = len(lzma.decompress(RECORDING.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        sealed, stream = Path(folder) / "run.parquet", Path(folder) / "run.vtrace"
        convert(trace, "parquet", sealed)
        record(trace, stream)
        files = {
            "snapshot, xz": (RECORDING, unpacked),
            "Parquet": (sealed, None),
            "recording": (stream, None),
        }
        return [
            {"file": name, "bytes": path.stat().st_size, "unpacked_bytes": size, **opened(path, repeats)}
            for name, (path, size) in files.items()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'file':<14}{'events':>8}{'MiB':>7}{'processor s':>13}{'clock s':>9}", end="")
    print(f"{'peak MiB':>10}{'of unpacked':>13}")
    for row in rows:
        share = f"{row['peak_bytes'] / row['unpacked_bytes']:.1f}×" if row["unpacked_bytes"] else "–"
        print(
            f"{row['file']:<14}{row['events']:>8}{row['bytes'] / MIB:>7.1f}{row['processor_s']:>13.2f}"
            f"{row['clock_s']:>9.2f}{row['peak_bytes'] / MIB:>10.0f}{share:>13}"
        )


if __name__ == "__main__":
    main()
