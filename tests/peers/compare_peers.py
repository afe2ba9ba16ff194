"""Run the test suites of other libraries with their own allocators and with vram, and compare the results.

`python tests/peers/compare_peers.py FOLDER` fetches nothing: FOLDER has what docs/internals/testing.md says.
Every test file runs in a process of its own, so that a crash ends only that file. The exit status is 1 if a
test passes with the library's own allocator and fails with vram, unless it is one of EXCEPTIONS.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ALLOCATORS = ("own", "vram")
FILE_SECONDS = 600
"""How long one file may take with one allocator; the rest then counts as failed."""

CRASHED = "(the process did not finish)"
"""Stands in the outcomes for a crash, a time limit, or an error outside of tests."""

PASSED, SOME_FAILED, NONE_COLLECTED = 0, 1, 5
"""Exit statuses of pytest with a complete report."""

EXCEPTIONS: Mapping[str, str] = {
    "pytorch TestCuda::test_graph_memory_stats_and_use_result_after_destroy_graph": (
        "expects segments of 2 and 20 MiB"
    ),
    "pytorch TestBlockStateAbsorption::test_allocate_in_thread_to_pool": (
        "expects a segment for each tensor; with expandable segments it expects what vram has"
    ),
    "pytorch TestBlockStateAbsorption::test_allocated_in_middle_of_segment": (
        "the graph of the test above is still alive, because that test failed"
    ),
    "pytorch TestCuda::test_host_memory_stats": "expects sizes that are powers of two",
}
"""Tests that may fail with vram alone, with the reason: they assert details of the other allocator."""

TORCH_SELECTION = (
    "memory or alloc or pool or graph or stream or event or oom or snapshot or record or empty_cache or ipc "
    "or mempool"
)

TORCH_FILES: Mapping[str, tuple[str, ...]] = {
    "test_cuda.py": ("-k", TORCH_SELECTION),
    "test_cuda_sanitizer.py": (),
    "test_cuda_trace.py": (),
    "test_multiprocessing.py": ("-k", "cuda"),
    "inductor/test_cudagraph_trees.py": (),
}
"""PyTorch's files about memory, graphs, streams and sharing, with the options of pytest for each."""

Outcomes = dict[str, str]
"""The outcome of each test by name: passed, failed or skipped."""


@dataclass(frozen=True)
class Part:
    """One file of a suite."""

    peer: str
    path: Path
    options: tuple[str, ...] = ()
    imports: Path | None = None
    """What its tests import from, besides the folder of the file."""

    @property
    def name(self) -> str:
        """Name the part in the table."""
        return f"{self.peer} {self.path.stem}"


# ---- finding the suites -----------------------------------------------------------------------------------


def find_parts(folder: Path, peers: Iterable[str]) -> list[Part]:
    """Return the files of the suites that are there."""
    return [part for peer in peers for part in FINDERS[peer](folder)]


def _pytorch(folder: Path) -> list[Part]:
    tests = folder / "pytorch/test"
    parts = [Part("pytorch", tests / name, options, tests) for name, options in TORCH_FILES.items()]
    return [part for part in parts if part.path.exists()]


def _cupy(folder: Path) -> list[Part]:
    tests = folder / "cupy/tests/cupy_tests/cuda_tests"
    options = ("-W", "ignore", "-m", "not slow and not multi_gpu", "--rootdir", str(folder / "cupy"))
    return [Part("cupy", path, options, folder / "cupy") for path in sorted(tests.rglob("test_*.py"))]


def _numba(folder: Path) -> list[Part]:
    """Numba's tests are installed with it, and need nothing of the folder."""
    try:
        package = importlib.util.find_spec("numba.cuda.tests.cudadrv")
    except ImportError:
        return []
    places = [] if package is None else [Path(place) for place in package.submodule_search_locations or ()]
    options = ("-o", "consider_namespace_packages=true")
    return [Part("numba", path, options) for place in places for path in sorted(place.glob("test_*.py"))]


FINDERS = {"pytorch": _pytorch, "cupy": _cupy, "numba": _numba}


# ---- running one part -------------------------------------------------------------------------------------


def run_part(part: Part, allocator: str, seconds: float = FILE_SECONDS, logs: Path | None = None) -> Outcomes:
    """Run one file with one allocator. What a crash or the time limit prevents has failed."""
    log = Path(os.devnull) if logs is None else logs / f"{part.name.replace(' ', '-')}-{allocator}.txt"
    with tempfile.TemporaryDirectory(prefix="vram-peers-") as made, log.open("w") as output:
        report = Path(made, "report.txt")
        # -c: neither our settings nor those of the other project, which need plugins of theirs.
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-c", os.devnull]
        command += ["-p", "peer_allocator", "-p", "no:cacheprovider", *part.options, str(part.path)]
        process = subprocess.Popen(
            command,
            env=_environment(part, allocator, report),
            cwd=made,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        lines = report.read_text().splitlines() if report.exists() else []
        return read_outcomes(lines, status)


def read_outcomes(lines: Iterable[str], status: int) -> Outcomes:
    """Return the outcomes in a report of the plugin; `status` is the exit status of the process.

    A test that fails once, such as while it is torn down, has failed, and so has one without an outcome.
    """
    outcomes: Outcomes = {}
    for line in lines:
        event, _, test = line.partition(" ")
        test = test.partition("::")[2] or test  # the part says which file it is
        if outcomes.get(test) != "failed":
            outcomes[test] = event
    for test, event in outcomes.items():
        if event == "collected":
            outcomes[test] = "failed"
    if status not in (PASSED, SOME_FAILED, NONE_COLLECTED):
        outcomes[CRASHED] = "failed"
    return outcomes


def _environment(part: Part, allocator: str, report: Path) -> dict[str, str]:
    places = (Path(__file__).parent, part.imports, os.environ.get("PYTHONPATH"))
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(str(place) for place in places if place),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VRAM_PEER": part.peer,
        "VRAM_PEER_ALLOCATOR": allocator,
        "VRAM_PEER_REPORT": str(report),
    }
    if part.peer == "numba" and allocator == "vram":
        environment["NUMBA_CUDA_MEMORY_MANAGER"] = "vram.numba"
    return environment


# ---- comparing --------------------------------------------------------------------------------------------


def only_with_vram(own: Outcomes, ours: Outcomes) -> list[str]:
    """Return the tests that pass with the library's own allocator and fail, or are missing, with vram."""
    wanted = {test for test, outcome in own.items() if outcome == "passed"}
    found = {test for test in wanted if ours.get(test, "failed") == "failed"}
    if CRASHED in ours and CRASHED not in own:
        found.add(CRASHED)
    return sorted(found)


def unexpected(part: Part, tests: Iterable[str], exceptions: Mapping[str, str] = EXCEPTIONS) -> list[str]:
    """Return the tests that are no exceptions. Exceptions are named `peer test`, without parameters."""
    return [test for test in tests if f"{part.peer} {test.partition('[')[0]}" not in exceptions]


def table(results: Sequence[tuple[Part, Outcomes, Outcomes]]) -> list[str]:
    """Return the lines of the comparison: counts for each file, then the tests that differ."""
    head = ("file", *(f"{who} {what}" for who in ALLOCATORS for what in ("passed", "failed", "skipped")))
    rows = [(part.name, *_counts(own), *_counts(ours)) for part, own, ours in results]
    widths = [max(len(str(row[column])) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    for part, own, ours in results:
        different = only_with_vram(own, ours)
        new = set(unexpected(part, different))
        lines += [
            f"{'FAILS ONLY WITH VRAM' if t in new else 'exception'}: {part.name}: {t}" for t in different
        ]
    return lines


def _counts(outcomes: Outcomes) -> tuple[int, ...]:
    counted = Counter(outcomes.values())
    return tuple(counted[outcome] for outcome in ("passed", "failed", "skipped"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path, help="has pytorch/ and cupy/ (see docs/internals/testing.md)")
    parser.add_argument("--peer", action="append", choices=FINDERS, help="only this suite; may be repeated")
    parser.add_argument("--jobs", type=int, default=4, help="files that run at a time (default: 4)")
    parser.add_argument("--seconds", type=float, default=FILE_SECONDS, help="time limit of a file")
    parser.add_argument("--logs", type=Path, help="a folder for the output of each file")
    options = parser.parse_args(arguments)
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    parts = find_parts(options.folder.resolve(), options.peer or FINDERS)
    if not parts:
        print(f"no test file found in {options.folder}; see docs/internals/testing.md", file=sys.stderr)
        return 2
    runs = [(part, allocator) for part in parts for allocator in ALLOCATORS]
    with ThreadPoolExecutor(options.jobs) as threads:
        outcomes = list(threads.map(lambda run: run_part(*run, options.seconds, options.logs), runs))
    results = list(zip(parts, outcomes[::2], outcomes[1::2], strict=True))
    print("\n".join(table(results)))
    return int(any(unexpected(part, only_with_vram(own, ours)) for part, own, ours in results))


if __name__ == "__main__":
    sys.exit(main())
