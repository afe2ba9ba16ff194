"""Measure the time and memory needed to open a recording.

Opens the largest recorded job (400 000 events) as PyTorch wrote it and in our own formats, several times
and each time in a new process, as `vram.open` does for untrusted files. Processor time includes the child
process; every figure is the minimum of the repeats. Memory is the larger peak of the two processes.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from vram.bench.measure import in_turns, least_of_each
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.core.device import Device
from vram.trace import Trace, TraceWriter, open_trace
from vram.trace.convert import convert
from vram.trace.model import COLUMNS

RECORDING = Path(__file__).resolve().parent.parent / "traces" / "llm_serve.pickle.xz"
REPEATS = 5
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


def opened(path: Path) -> dict[str, float]:
    """Open a file once in a new process."""
    command = [sys.executable, "-c", OPEN, str(path)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def record(trace: Trace, path: Path) -> None:
    """Write `trace` as a recorder would have written it."""
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
        files = {"snapshot, xz": RECORDING, "Parquet": sealed, "recording": stream}
        runs = {name: partial(opened, path) for name, path in files.items()}
        rows: list[dict[str, Any]] = [
            {"file": name, "bytes": files[name].stat().st_size, **least_of_each(results)}
            for name, results in in_turns(runs, repeats, warm=0).items()
        ]
    rows[0]["of_unpacked"] = rows[0]["peak_bytes"] / unpacked
    return rows


def run(device: str | None, *, quick: bool) -> Report:
    rows = measure(1 if quick else REPEATS)
    columns = [
        Column("file", "file"),
        Column("events", "events", "count"),
        Column("bytes", "size", "bytes"),
        Column("processor_s", "processor, s", "s"),
        Column("clock_s", "clock, s", "s"),
        Column("peak_bytes", "peak memory", "bytes"),
        Column("of_unpacked", "of the unpacked file", "ratio"),
    ]
    return Report.of("open", Device(device), [Table("Opening llm_serve", columns, rows)], quick=quick)


if __name__ == "__main__":
    measuring_command("open", __doc__, run)()
