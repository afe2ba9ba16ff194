"""What memory costs here: `hotpath`, `threads`, `scenarios`, `pages` and `warmup`, each with a `run(device)`.

Each run measures all that it compares, peers in turn, and returns a `Report` of plain tables. Drawing them is
for the command line (`vram bench`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram.bench.report import Report
    from vram.core.device import Device

__all__ = ["BENCHES", "run"]

BENCHES = {
    "hotpath": "An allocate+free pair in six scenarios, from Python and C++, against every peer installed.",
    "threads": "Threads on streams of their own, and with half of the frees on another thread.",
    "scenarios": "Five kinds of program against PyTorch's allocator.",
    "pages": "Growing, mapping again, and a first training step: pages against plain driver memory.",
    "warmup": "The first use of blocks that were made ready, and of blocks that were not.",
}
"""Every benchmark by name, with what it measures."""


def run(name: str, device: str | Device | None = None, *, quick: bool = False) -> Report:
    """Run one benchmark on a device; `quick` is for trying the command, not for figures."""
    report: Report = importlib.import_module(f"vram.bench.{name}").run(device, quick=quick)
    return report
