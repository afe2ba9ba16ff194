"""Measure the jobs of catalog.py on a real GPU and write what predictions are compared with.

    python benchmarks/predict/measure.py --out truth.json [JOB…] [--parts peaks,recorded,…] [--minutes 8]

Every run is a process of its own; several run side by side, as far as memory and `--parallel` allow.
A run that fails is noted and stops no other. After `--minutes` no further run begins, and the file says which
are missing; it is also written while runs end, so that an interruption loses nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import catalog
from catalog import ALLOCATORS, CAPS, JOBS, Job, Search

GIB = 1 << 30
RUN_SECONDS = 200
PACKAGES = (
    "torch",
    "triton",
    "timm",
    "transformers",
    "peft",
    "vram",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "numpy",
)


class Room:
    """Memory of the GPU and processes that runs may still take."""

    def __init__(self, gib: float, processes: int) -> None:
        self._gib, self._processes = gib, processes
        self._changed = threading.Condition()

    def take(self, gib: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._gib >= gib and self._processes >= 1)
            self._gib -= gib
            self._processes -= 1

    def give(self, gib: float) -> None:
        with self._changed:
            self._gib += gib
            self._processes += 1
            self._changed.notify_all()


class Measurement:
    """All runs, their results, and the file they go to."""

    def __init__(
        self, out: Path, known: dict[str, Any], room: Room, minutes: float, variables: dict[str, str]
    ) -> None:
        self.out, self.known, self.room, self.variables = out, known, room, variables
        self.ends = time.monotonic() + 60 * minutes
        self._lock = threading.Lock()

    def run(
        self, job: Job, allocator: str, *watch: str, gib: float, script: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """One run of a job; never raises."""
        self.room.take(gib)
        began = time.monotonic()
        try:
            if began > self.ends:
                return {"outcome": "not run", "error": "no time left"}
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "result.json"
                command = catalog.command(job, result, *watch, script=script)
                variables = catalog.environment(self.variables, allocator, Path(folder))
                done = subprocess.run(
                    command, env=variables, capture_output=True, text=True, timeout=RUN_SECONDS
                )
                if result.exists():
                    found: dict[str, Any] = json.loads(result.read_text())
                else:
                    found = {
                        "outcome": "failed",
                        "error": f"exit status {done.returncode}: {done.stderr[-800:]}",
                    }
        except Exception as error:
            found = {"outcome": "failed", "error": repr(error)[:300]}
        finally:
            self.room.give(gib)
        found["seconds"] = round(time.monotonic() - began, 1)
        said = [
            job.name,
            allocator,
            *watch,
            *script,
            found["outcome"],
            f"{found['seconds']} s",
            found.get("error", ""),
        ]
        print(*(str(part).replace("\n", " ")[-200:] for part in said), flush=True)
        return found

    def note(self, *path: str, value: Any) -> None:
        """Put a result at its place, and write the file."""
        with self._lock:
            place = self.known
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = value
            partial = self.out.with_suffix(".partial")
            partial.write_text(json.dumps(self.known))
            partial.rename(self.out)

    def alone(self, job: Job) -> None:
        """Nobody else is on the device: what it uses beyond reserved is the context and loaded modules."""
        before = device_used()
        found = self.run(job, "default", gib=job.gib)
        if "device_used" in found:
            beyond = found["device_used"] - found["reserved_now"]
            self.note("jobs", job.name, "alone", value={"used_before": before, "beyond_reserved": beyond})

    def peaks_and_caps(self, job: Job, allocator: str) -> None:
        """Peaks without a limit, then the outcome under limits."""
        found = self.run(job, allocator, gib=job.gib)
        self.note("jobs", job.name, allocator, value=found)
        if found["outcome"] != "completed":
            return
        with ThreadPoolExecutor(len(CAPS)) as pool:
            for part in CAPS:
                pool.submit(self.capped, job, allocator, int(found["reserved"] * part), f"{part}")

    def capped(self, job: Job, allocator: str, cap: int, part: str) -> None:
        """The outcome under a limit on what the allocator reserves."""
        found = self.run(job, allocator, "--cap", str(cap), gib=cap / GIB + 1)
        kept = {
            key: found[key] for key in ("outcome", "out_of_memory", "reserved", "allocated") if key in found
        }
        if found["outcome"] not in ("completed", "out of memory"):
            kept["error"] = found["error"]
        self.note("jobs", job.name, "caps", f"{allocator} {part}", value={"cap": cap, **kept})

    def recorded(self, job: Job, allocator: str) -> None:
        """Every allocation of a few steps."""
        script = ("--steps", str(catalog.RECORDED_STEPS))
        found = self.run(job, allocator, "--record", gib=job.gib, script=script)
        self.note("jobs", job.name, f"recorded {allocator}", value=found)

    def under_vram(self, job: Job) -> None:
        """Peaks with vram as PyTorch's allocator."""
        self.note("jobs", job.name, "vram", value=self.run(job, "default", "--vram", gib=job.gib))

    def search(self, search: Search) -> None:
        """The largest batch size that completes, by bisection between one that does and one that does not."""
        runs: dict[int, dict[str, Any]] = {}

        def completes(size: int) -> bool:
            script = ("--batch-size", str(size), "--steps", str(search.steps))
            found = self.run(
                JOBS[search.job], "default", "--cap", str(search.cap), gib=search.cap / GIB + 1, script=script
            )
            runs[size] = {key: found.get(key) for key in ("outcome", "reserved", "allocated", "error")}
            return found["outcome"] == "completed"

        best = bisect(completes, search.most)
        value = {"cap": search.cap, "most": search.most, "steps": search.steps, "best": best, "runs": runs}
        self.note("searches", search.job, value=value)


def bisect(completes: Callable[[int], bool], most: int) -> int:
    """The largest of 0 … most for which it completes, given that smaller ones do as well."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        if completes(middle):
            least = middle
        else:
            most = middle - 1
    return least


def device_used() -> int | None:
    """Bytes in use on the device before anybody has a context on it, as its own tool says."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]) << 20
    except (OSError, ValueError, IndexError):
        return None


def where() -> dict[str, Any]:
    """The device, its driver, and the versions of what runs."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    properties = torch.cuda.get_device_properties(0)
    names = [name for name in dir(properties) if not name.startswith("_")]
    told = {name: getattr(properties, name) for name in names}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        driver = ""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": properties.name,
        "properties": {
            name: value for name, value in told.items() if isinstance(value, (int, float, str, list))
        },
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "versions": versions,
    }


def missing(job: Job, versions: dict[str, str | None]) -> list[str]:
    return [package for package in job.needs if not versions[package]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--parts", default="alone,searches,peaks,recorded,vram")
    parser.add_argument("--parallel", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--gib", type=float, default=125)
    options = parser.parse_args()
    chosen = [JOBS[name] for name in options.jobs] or list(JOBS.values())
    known = {**where(), "jobs": {}, "searches": {}}
    versions = known["versions"]
    room = Room(options.gib, options.parallel)
    measurement = Measurement(options.out, known, room, options.minutes, dict(os.environ))
    for job in [job for job in chosen if missing(job, versions)]:
        measurement.note("jobs", job.name, value={"skipped": f"needs {' and '.join(missing(job, versions))}"})
        chosen.remove(job)
    parts = options.parts.split(",")
    if "alone" in parts:
        for job in (job for job in chosen if job.name in catalog.ALONE):
            measurement.alone(job)
    with ThreadPoolExecutor(10 * len(chosen) + 10) as pool:  # threads wait for room; processes do the work
        waiting = [pool.submit(run) for run in side_by_side(measurement, chosen, parts)]
    for future in waiting:
        if error := future.exception():
            print(f"not measured: {error!r}", flush=True)
    measurement.note("minutes", value=round((time.monotonic() - measurement.ends) / 60 + options.minutes, 1))


def side_by_side(measurement: Measurement, jobs: list[Job], parts: list[str]) -> Iterator[Callable[[], None]]:
    """The runs in the order in which they begin: chains of runs and slow ones first."""
    for search in catalog.SEARCHES:
        if "searches" in parts and JOBS[search.job] in jobs:
            yield partial(measurement.search, search)
    for job in sorted(jobs, key=lambda job: not job.compiled):
        for allocator in ALLOCATORS:
            if "peaks" in parts:
                yield partial(measurement.peaks_and_caps, job, allocator)
            if "recorded" in parts and job.name in catalog.RECORDED:
                yield partial(measurement.recorded, job, allocator)
        if "vram" in parts and job.name in catalog.UNDER_VRAM and measurement.known["versions"]["vram"]:
            yield partial(measurement.under_vram, job)


if __name__ == "__main__":
    main()
