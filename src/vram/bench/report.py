"""What a benchmark hands out: tables of plain values with their units, the machine, and what was left out.

Knows neither how it was measured nor how it is drawn.
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
    """One column: where its values are in a row, its heading, what they are."""

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
    """What could not be measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The outcome of one benchmark run."""

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
        """Join tables with the machine they were measured on."""
        from vram.system.machine import (
            describe_machine,  # a report is read where the native core is not built
        )

        return cls(bench, describe_machine(device), tables, left_out, quick)

    def to_json(self) -> dict[str, Any]:
        """The whole report in plain values."""
        return asdict(self)


def shown(value: object, unit: str) -> str:
    """Return a value as a person reads it; a dash where nothing was measured."""
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
