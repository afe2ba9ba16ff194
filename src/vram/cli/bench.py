"""`vram bench`: what memory costs on this machine. Prints the reports of `vram.bench`; measures nothing."""

from __future__ import annotations

import json
from typing import Any

import rich_click as click
from rich.console import Console
from rich.text import Text

from vram.bench import BENCHES
from vram.bench import run as run_bench
from vram.bench.report import Report, Table, shown
from vram.sizes import format_size

from .console import draw_grid, open_console

__all__ = ["bench_commands"]


@click.group("bench")
def bench_commands() -> None:
    """Measure the cost of memory operations on this machine, next to other installed allocators."""


def _command(name: str, purpose: str) -> click.Command:
    @click.command(name, help=purpose)
    @click.option("--device", metavar="NAME", help="Device to measure, such as cuda:0 or host.")
    @click.option("--quick", is_flag=True, help="Finish in seconds, with less reliable figures.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    def command(device: str | None, quick: bool, as_json: bool) -> None:
        report = run_bench(name, device, quick=quick)
        if as_json:
            click.echo(json.dumps(report.to_json(), indent=1))
        else:
            _draw(report, open_console())

    return command


for _name, _purpose in BENCHES.items():
    bench_commands.add_command(_command(_name, _purpose))


def _draw(report: Report, console: Console) -> None:
    for line in _machine_lines(report.machine):
        console.print(Text(line), soft_wrap=True)
    if report.quick:
        console.print(Text("Quick run: these figures are not reliable enough to quote.", style="bold"))
    for table in report.tables:
        console.print()
        console.print(Text(table.title, style="bold"), soft_wrap=True)
        draw_grid(console, _columns(table), _rows(table))
        if table.note:
            console.print(Text(table.note, style="dim"), soft_wrap=True)
    if report.left_out:
        console.print()
        console.print(Text("Not measured:", style="bold"))
        for left in report.left_out:
            console.print(Text(f"  {left.name}: {left.reason}"), soft_wrap=True)


def _columns(table: Table) -> str:
    return "|".join(column.title if column.unit == "text" else f">{column.title}" for column in table.columns)


def _rows(table: Table) -> list[list[str]]:
    return [[shown(row.get(column.key), column.unit) for column in table.columns] for row in table.rows]


def _machine_lines(machine: Any) -> list[str]:
    """Describe the machine in a few lines, printed above the tables."""
    device = machine["device"]
    driver = f", driver {device['driver'] or ''} (CUDA {device['driver_cuda']})" if "driver" in device else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return [
        f"{device['name']}: {device['hardware']}, {format_size(device['total_bytes'])}{driver}",
        f"{machine['processors']} × {machine['processor']}, {machine['system']}",
        f"vram {machine['vram']}, Python {machine['python']}" + (f", {versions}" if versions else ""),
        machine["date"],
    ]
