"""Benchmarks of memory operations: `hotpath`, `threads`, `scenarios`, `pages` and `warmup`.

Each has a `run(device)` that measures everything it compares in turn and returns a `Report` of plain tables.
The command line (`vram bench`) prints them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram.bench.report import Report
    from vram.core.device import Device

__all__ = ["BENCHES", "run"]

BENCHES = {
    "hotpath": "An allocate+free pair in six scenarios, from Python and C++, and with every installed peer.",
    "threads": "Threads with one stream each, and with half of the frees on another thread.",
    "scenarios": "Six kinds of program, compared with PyTorch's allocator.",
    "pages": "Growing, remapping and a first training step: pages compared with plain driver memory.",
    "warmup": "The first use of prepared blocks and of unprepared blocks.",
}
"""All benchmarks by name, with what they measure."""


def run(name: str, device: str | Device | None = None, *, quick: bool = False) -> Report:
    """Run one benchmark on a device; `quick` is for trying the command, not for reliable figures."""
    report: Report = importlib.import_module(f"vram.bench.{name}").run(device, quick=quick)
    return report
