"""`vram replay`: what recorded jobs would have cost under an allocator. Draws reports, computes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vram.replay import POLICIES, ReplayReport, ReplayResult, compare
from vram.sizes import format_size
from vram.trace import open_trace

from .console import FINDING, open_console, read_conf, read_duration, read_size

__all__ = ["replay_command"]

COLUMNS = (
    "policy",
    "peak allocated",
    "peak reserved",
    "ratio",
    "driver calls",
    "driver time",
    "of span",
    "events/s",
    "out of memory",
)


@click.command("replay")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["vram"],
    show_default=True,
    type=click.Choice(sorted(POLICIES)),
    help="Allocator to replay through; may be repeated.",
)
@click.option(
    "--capacity",
    metavar="SIZE",
    callback=read_size,
    help="Memory of the device, such as 40GiB; never full without.",
)
@click.option(
    "--conf",
    metavar="KEY:VALUE,...",
    default="",
    callback=read_conf,
    help="Settings of the pool, as in VRAM_CONF.",
)
@click.option(
    "--lag",
    metavar="TIME",
    callback=read_duration,
    default="5ms",
    show_default=True,
    help="How long after it was issued the device finishes work, in recorded time.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: one object, or a list of them for several files."
)
@click.pass_context
def replay_command(
    ctx: click.Context,
    files: tuple[Path, ...],
    policies: tuple[str, ...],
    capacity: int | None,
    conf: dict[str, object],
    lag: float,
    as_json: bool,
) -> None:
    """Run the allocations of recorded jobs through an allocator, on a device that is only modelled.

    FILE is a PyTorch memory snapshot (torch.cuda.memory._dump_snapshot), plain or compressed with gz, xz, bz2
    or zst. Exits with 1 if an allocator ran out of memory.
    """
    reports = []
    console = open_console()
    for path in files:
        report = compare(open_trace(path), policies, capacity=capacity, conf=conf, lag_us=lag)
        reports.append(report)
        if not as_json:
            _draw(report, console)
    if as_json:
        documents = [report.to_json() for report in reports]
        click.echo(json.dumps(documents[0] if len(documents) == 1 else documents))
    if any(result.oom for report in reports for result in report.results):
        ctx.exit(FINDING)


def _draw(report: ReplayReport, console: Console) -> None:
    title = f"{Path(report.source).name}: {report.events} events over {_duration(report.span_us)}"
    console.print(Text(title, style="bold"))
    table = Table(*COLUMNS[:1], box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right")
    for result in report.results:
        table.add_row(*_row(result, report))
    console.print(table)
    for result in report.results:
        console.print(Text(_sentence(result, report)), soft_wrap=True)
    console.print()


def _row(result: ReplayResult, report: ReplayReport) -> list[str]:
    return [
        result.policy,
        format_size(result.peak_allocated),
        format_size(result.peak_reserved),
        f"{result.ratio:.4f}",
        str(result.driver_calls),
        _duration(result.driver_us),
        _share(result.driver_us, report.span_us),
        f"{result.events_per_second / 1e6:.2f} M",
        "no" if result.oom is None else f"event {result.oom['event']}",
    ]


def _sentence(result: ReplayResult, report: ReplayReport) -> str:
    """What the row means."""
    if result.oom is not None:
        return (
            f"{result.policy} runs out of memory at event {result.oom['event']}: "
            f"{format_size(result.oom['size'])} asked, {format_size(result.oom['allocated'])} allocated and "
            f"{format_size(result.oom['reserved'])} reserved{_of_capacity(report)}; "
            "try a larger --capacity, or other settings with --conf."
        )
    return (
        f"{result.policy} takes {100 * (result.ratio - 1):.2f} % more from the device than the program "
        f"holds at its peak; its {result.driver_calls} driver calls take {_duration(result.driver_us)}, "
        f"{_share(result.driver_us, report.span_us)} of the recorded time."
    )


def _of_capacity(report: ReplayReport) -> str:
    return "" if report.capacity is None else f" of {format_size(report.capacity)}"


def _share(part_us: float, whole_us: float) -> str:
    return f"{100 * part_us / whole_us:.2f} %" if whole_us else "–"


def _duration(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.0f} µs"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e6:.2f} s"
