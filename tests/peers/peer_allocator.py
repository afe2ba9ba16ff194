"""A pytest plugin for the suites of other libraries: $VRAM_PEER_ALLOCATOR says whose memory they use.

`own` leaves the library as it is; `vram` installs vram before any test is imported. $VRAM_PEER names the
library. The outcomes are written to $VRAM_PEER_REPORT.
"""

from __future__ import annotations

import importlib
import os

import pytest

MODULES = {"pytorch": "vram.torch", "cupy": "vram.cupy"}
"""Numba is not here: it takes its memory manager from $NUMBA_CUDA_MEMORY_MANAGER (see compare_peers.py)."""

if os.environ["VRAM_PEER_ALLOCATOR"] == "vram" and os.environ.get("VRAM_PEER") in MODULES:
    importlib.import_module(MODULES[os.environ["VRAM_PEER"]]).install()


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request: pytest.FixtureRequest) -> None:
    """Define the fixture of Numba's tests, which its wheel lacks."""
    request.cls._dump_failed_filechecks = False


# ---- the report: a line for each event, written at once, so that a crash loses nothing ---------------------


def _report(event: str, test: str) -> None:
    with open(os.environ["VRAM_PEER_REPORT"], "a") as file:
        file.write(f"{event} {test}\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _report("collected", item.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _report("failed", report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.skipped or report.when == "call":
        _report(report.outcome, report.nodeid)
