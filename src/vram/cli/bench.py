"""`vram bench`: what memory costs on this machine. Prints the reports of `vram.bench`; measures nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import rich_click as click
from rich.console import Console
from rich.text import Text

from vram.bench import BENCHES
from vram.bench import run as run_bench
from vram.bench.report import Report, Table, machine_lines, shown

from .console import draw_grid, json_option, open_console

__all__ = ["bench_command", "measuring_command"]


@click.group("bench")
def bench_command() -> None:
    """Measure the cost of memory operations on this machine, next to other installed allocators."""


def measuring_command(
    name: str, purpose: str | None, run: Callable[..., Report], *options: Any
) -> click.Command:
    """A command that runs one benchmark and prints its report; `options` are passed on to `run`.

    The scripts in `benchmarks/` are such commands, too.
    """

    @click.command(name, help=purpose)
    @click.option("--device", metavar="NAME", help="Device to measure, such as cuda:0 or host.")
    @click.option("--quick", is_flag=True, help="Finish in seconds, with less reliable figures.")
    @json_option
    def command(device: str | None, quick: bool, as_json: bool, **more: Any) -> None:
        report = run(device, quick=quick, **more)
        if as_json:
            click.echo(json.dumps(report.to_json(), indent=1))
        else:
            _draw(report, open_console())

    for option in options:
        option(command)
    return command


for _name, _purpose in BENCHES.items():
    bench_command.add_command(measuring_command(_name, _purpose, partial(run_bench, _name)))


def _draw(report: Report, console: Console) -> None:
    hardware, host, versions = machine_lines(report.machine)
    device, system = report.machine["device"]["name"], report.machine["system"]
    for line in (f"{device}: {hardware}", f"{host}, {system}", versions, report.machine["date"]):
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
