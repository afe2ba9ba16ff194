"""The result of a benchmark: tables of plain values with units, the machine, and what was not measured.

Independent of how it was measured and how it is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vram.sizes import format_size

if TYPE_CHECKING:
    from vram.core.device import Device

__all__ = ["Column", "LeftOut", "Report", "Table", "machine_lines", "markdown", "shown"]

Unit: TypeAlias = Literal[
    "text", "ns", "us", "ms", "s", "bytes", "GB/s", "ratio", "exact ratio", "share", "exact share", "count"
]
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
class LeftOut:
    """What was not measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of one benchmark run."""

    bench: str
    machine: Mapping[str, Any]
    tables: Sequence[Table]
    left_out: Sequence[LeftOut] = field(default=())
    quick: bool = False

    @classmethod
    def of(
        cls,
        bench: str,
        device: Device,
        tables: Sequence[Table],
        left_out: Sequence[LeftOut] = (),
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
        case "us" | "ms" | "s":
            return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
        case "bytes":
            return format_size(int(value))
        case "GB/s":
            return f"{value:.1f}"
        case "ratio":
            return f"{value:.2f}×"
        case "exact ratio":
            return f"{value:.4f}"
        case "share":
            return f"{value:.0%}"
        case "exact share":
            return f"{value:.2%}"
        case "count":
            return f"{value:,.0f}"
        case _:
            return str(value)


def markdown(table: Mapping[str, Any]) -> str:
    """Return a table of a report's JSON, with its title and note, as Markdown."""
    columns = table["columns"]
    lines = [
        "| " + " | ".join(column["title"] for column in columns) + " |",
        "|" + "|".join("---" if column["unit"] == "text" else "---:" for column in columns) + "|",
    ]
    for row in table["rows"]:
        cells = (shown(row.get(column["key"]), column["unit"]) for column in columns)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    note = f"\n\n{table['note']}" if table["note"] else ""
    return f"**{table['title']}**\n\n" + "\n".join(lines) + note


def machine_lines(machine: Mapping[str, Any]) -> list[str]:
    """Return the machine of a report for a person: the device, the host, and the versions."""
    device = machine["device"]
    driver = (
        f", driver {device['driver'] or '?'} (CUDA {device['driver_cuda']})" if "driver" in device else ""
    )
    versions = "".join(f", {name} {version}" for name, version in machine["packages"].items())
    return [
        f"{device['hardware']}, {format_size(device['total_bytes'])}{driver}",
        f"{machine['processors']} × {machine['processor']}",
        f"vram {machine['vram']}, Python {machine['python']}{versions}",
    ]
