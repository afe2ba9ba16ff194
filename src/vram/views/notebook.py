"""`%load_ext vram`: in a notebook or IPython, `%vram` shows what is held and `%%vram` measures a cell.

`vram.observe.measure` measures, `vram.core.html` draws.
"""

from __future__ import annotations

import time
from typing import Any

from vram.core.html import heading, status_html, table
from vram.observe.measure import Stretch
from vram.observe.status import Observatory
from vram.sizes import format_count, format_size

__all__ = ["CellReport", "Held", "load_ipython_extension", "unload_ipython_extension"]

MOST_LEFT = 10


def load_ipython_extension(shell: Any) -> None:
    """Add the magics; called by `%load_ext vram`."""

    def magic(line: str, cell: str | None = None) -> object:
        """%vram shows every pool and device; %%vram runs the cell and shows its peak and what it leaves."""
        return Held(Observatory().status(history=0)) if cell is None else _measured(shell, cell)

    shell.register_magic_function(magic, magic_kind="line_cell", magic_name="vram")


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magics."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("vram", None)


def _measured(shell: Any, cell: str) -> CellReport:
    begin = time.perf_counter()
    with Stretch(leaks=True) as stretch:
        shell.run_cell(cell)  # IPython shows what it raises
    return CellReport(stretch, time.perf_counter() - begin)


class Held:
    """The output of `%vram`."""

    def __init__(self, told: dict[str, Any]) -> None:
        """Store a status of `vram.observe.status`."""
        self.told = told

    def _repr_html_(self) -> str:
        return status_html(self.told)

    def __repr__(self) -> str:
        pools = (
            f"{pool['kind']} {pool['pool']} on {pool['device']}: {format_size(pool['allocated'])} allocated, "
            f"{format_size(pool['reserved'])} reserved"
            for pool in self.told["pools"]
        )
        return "\n".join(pools) or "no pools yet"


class CellReport:
    """The output of `%%vram`: the peak of a cell, and what it left behind."""

    def __init__(self, stretch: Stretch, seconds: float) -> None:
        """Store the numbers of a cell that ran for `seconds`."""
        self.peaks = {place: size for place, size in stretch.peaks.items() if stretch.allocations[place]}
        self.kept = {place: stretch.kept[place] for place in self.peaks}
        self.allocations = {place: stretch.allocations[place] for place in self.peaks}
        self.left = [str(leak) for leak in stretch.left]
        self.seconds = seconds

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (place, format_size(peak), format_size(self.kept[place]), f"{self.allocations[place]:,}")
            for place, peak in self.peaks.items()
        ]

    def _title(self) -> str:
        held = "" if self.peaks else ", nothing allocated from vram's pools"
        return f"{self.seconds:.3f} s{held}"

    def _repr_html_(self) -> str:
        parts = [heading(self._title())]
        if self.peaks:
            parts.append(table("device|>peak|>kept|>allocations", self._rows()))
        if self.left:
            parts.append(heading("left behind"))
            parts.append(table("allocations", [[line] for line in self.left[:MOST_LEFT]]))
        return "".join(parts)

    def __repr__(self) -> str:
        lines = [self._title()]
        for place, peak, kept, allocations in self._rows():
            lines.append(f"{place}: peak {peak}, kept {kept}, {allocations} allocations")
        if self.left:
            lines.append(f"left behind: {format_count(len(self.left), 'group')}")
            lines += [f"  {line}" for line in self.left[:MOST_LEFT]]
        return "\n".join(lines)
