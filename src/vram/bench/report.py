"""The result of a benchmark: tables of plain values with units, the machine, and what was not measured.

Independent of how it was measured and how it is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from vram.core.device import Device

__all__ = ["Column", "Left", "Report", "Table", "shown"]

Unit: TypeAlias = Literal["text", "ns", "us", "ms", "ratio", "share", "count"]
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its key in a row, its heading and its unit."""

    key: str
    title: str
    unit: Unit = "text"


@dataclass(frozen=True)
class Table:
    """Rows of one kind. A value that was not measured is missing or None."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""


@dataclass(frozen=True)
class Left:
    """What was not measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of one benchmark run."""

    bench: str
    machine: Mapping[str, Any]
    tables: Sequence[Table]
    left_out: Sequence[Left] = field(default=())
    quick: bool = False

    @classmethod
    def of(
        cls,
        bench: str,
        device: Device,
        tables: Sequence[Table],
        left_out: Sequence[Left] = (),
        *,
        quick: bool = False,
    ) -> Report:
        """Combine tables with the machine on which they were measured."""
        from vram.system.machine import (
            describe_machine,  # a report can be read without the native core
        )

        return cls(bench, describe_machine(device), tables, left_out, quick)

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as plain values."""
        return asdict(self)


def shown(value: object, unit: str) -> str:
    """Format a value; a dash if nothing was measured."""
    if value is None:
        return "–"
    if not isinstance(value, (int, float)):
        return str(value)
    match unit:
        case "ns":
            return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
        case "us" | "ms":
            return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
        case "ratio":
            return f"{value:.2f}×"
        case "share":
            return f"{value:.0%}"
        case _:
            return str(value)
