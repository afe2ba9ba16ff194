"""`vram replay`: what recorded jobs would cost under other allocators. Prints reports; computes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich_click as click
from rich.console import Console

from vram.replay import POLICIES, Ranked, Ranking, ReplayReport, ReplayResult, compare, sweep_all
from vram.sizes import format_count, format_size
from vram.trace import Trace, open_trace

from .console import (
    FINDING,
    device_option,
    draw_grid,
    draw_line,
    files_argument,
    json_option,
    open_console,
    progress_bar,
    read_conf,
    read_duration,
    read_size,
)

__all__ = ["replay_command"]

COLUMNS = "policy|>peak allocated|>peak reserved|>ratio|>driver time|>events/s|>out of memory"
SWEEP_COLUMNS = ">rank|policy|>smallest device|>peak reserved|>retries|setting"


def read_policy_conf(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Parse `torch=max_split_size_mb:64` into settings by policy; without a policy name, for every policy."""
    shared: dict[str, object] = {}
    named: dict[str, dict[str, object]] = {}
    for value in values:
        name, equals, settings = value.partition("=")
        if equals and name.strip() in POLICIES:
            named.setdefault(name.strip(), {}).update(read_conf(ctx, param, settings))
        else:
            shared.update(read_conf(ctx, param, value))
    return {name: {**shared, **named.get(name, {})} for name in POLICIES} if named else shared


@click.command("replay")
@files_argument
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(sorted(POLICIES)),
    help="Allocator to replay through; repeatable. Default: vram, or all of them with --sweep.",
)
@click.option(
    "--capacity",
    metavar="SIZE",
    callback=read_size,
    help="Device memory, such as 40GiB. Default: unlimited.",
)
@click.option(
    "--conf",
    metavar="[POLICY=]KEY:VALUE,...",
    multiple=True,
    callback=read_policy_conf,
    help="Settings in the policy's own syntax, as in PYTORCH_ALLOC_CONF or VRAM_CONF; repeatable.",
)
@click.option(
    "--lag",
    metavar="TIME",
    callback=read_duration,
    default="5ms",
    show_default=True,
    help="How long after submission the device completes work, in recorded time.",
)
@click.option("--sweep", is_flag=True, help="Try common settings of each allocator and rank them.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), default=1, help="Parallel replays in a sweep.")
@click.option(
    "--executor",
    metavar="dask[=ADDRESS]",
    help="Sweep on a Dask cluster. Without an address: a local cluster with -j workers.",
)
@device_option
@json_option
@click.pass_context
def replay_command(
    ctx: click.Context,
    files: tuple[Path, ...],
    policies: tuple[str, ...],
    capacity: int | None,
    conf: Mapping[str, Any],
    lag: float,
    sweep: bool,
    jobs: int,
    executor: str | None,
    device: int | None,
    as_json: bool,
) -> None:
    """Replay the allocations of recorded jobs through allocators, on a simulated device.

    FILE is anything vram.open reads: a PyTorch memory snapshot, an RMM log or a vram recording. JSON is one
    object, or a list of objects for several files. Exits with 1 if an allocator ran out of memory, or if no
    setting of a sweep fits the device.
    """
    if sweep and conf:
        raise click.UsageError("--sweep chooses the settings itself; omit --conf")
    if not sweep and (executor or jobs > 1):
        raise click.UsageError("-j and --executor require --sweep")
    if sweep:
        traces = [open_trace(path, device=device) for path in files]
        with progress_bar("settings") as progress:
            rankings = sweep_all(
                traces,
                policies=policies or None,
                capacity=capacity,
                lag_us=lag,
                jobs=jobs,
                executor=executor,
                progress=progress,
            )
        _show_sweeps(traces, rankings, capacity, as_json)
        failed = any(all(each.smallest_capacity is None for each in ranked) for ranked in rankings)
    else:
        reports = []
        with progress_bar("files") as progress:
            for done, path in enumerate(files):
                progress(done, len(files))
                trace, chosen = open_trace(path, device=device), policies or ("vram",)
                reports.append(compare(trace, chosen, capacity=capacity, conf=conf, lag_us=lag))
        _show_reports(reports, as_json)
        failed = any(result.oom for report in reports for result in report.results)
    if failed:
        ctx.exit(FINDING)


def _print_json(documents: list[dict[str, Any]]) -> None:
    click.echo(json.dumps(documents[0] if len(documents) == 1 else documents))


def _show_reports(reports: list[ReplayReport], as_json: bool) -> None:
    if as_json:
        _print_json([report.to_json() for report in reports])
        return
    console = open_console()
    for report in reports:
        _draw(report, console)


# --- a sweep ------------------------------------------------------------------------------------------------


def _show_sweeps(traces: list[Trace], rankings: list[Ranking], capacity: int | None, as_json: bool) -> None:
    if as_json:
        _print_json(
            [
                {"trace": trace.heading(), "sweep": [*map(asdict, ranked)]}
                for trace, ranked in zip(traces, rankings, strict=True)
            ]
        )
        return
    console = open_console()
    for trace, ranked in zip(traces, rankings, strict=True):
        draw_line(console, f"{Path(trace.source).name}: {format_count(len(ranked), 'setting')}", "bold")
        draw_grid(console, SWEEP_COLUMNS, [*map(_sweep_row, ranked)])
        for line in _best(ranked, capacity):
            draw_line(console, line)
        console.print()


def _sweep_row(each: Ranked) -> list[str]:
    return [
        str(each.rank),
        each.policy,
        "none" if each.smallest_capacity is None else format_size(each.smallest_capacity),
        format_size(each.peak_reserved),
        str(each.retries),
        ",".join(f"{key}:{value}" for key, value in each.conf.items()) or "defaults",
    ]


def _best(ranked: tuple[Ranked, ...], capacity: int | None) -> Iterator[str]:
    best = ranked[0]
    if best.smallest_capacity is None:
        held = "" if capacity is None else f" with {format_size(capacity)}"
        yield f"No setting lets the job complete{held}; the best reserves {format_size(best.peak_reserved)}."
        return
    for position, (size, each) in enumerate(_best_of_each_policy(ranked)):
        device = "A device with " if position == 0 else ""
        yield f"{device}{format_size(size)} is enough with {each.policy}:"
        yield each.environment


def _best_of_each_policy(ranked: tuple[Ranked, ...]) -> list[tuple[int, Ranked]]:
    """Return the best setting of each policy that completes the job: not every user can switch policies."""
    best: dict[str, tuple[int, Ranked]] = {}
    for each in ranked:
        if each.smallest_capacity is not None:
            best.setdefault(each.policy, (each.smallest_capacity, each))
    return list(best.values())


# --- a replay -----------------------------------------------------------------------------------------------


def _draw(report: ReplayReport, console: Console) -> None:
    name, events = Path(report.heading["source"]).name, report.heading["events"]
    title = f"{name}: {events} events over {_duration(report.span_us)}"
    draw_line(console, title, "bold")
    draw_grid(console, COLUMNS, [*map(_row, report.results)])
    for result in report.results:
        draw_line(console, _sentence(result, report))
    console.print()


def _row(result: ReplayResult) -> list[str]:
    return [
        result.policy,
        format_size(result.peak_allocated),
        format_size(result.peak_reserved),
        f"{result.ratio:.4f}",
        _duration(result.driver_us),
        f"{result.events_per_second / 1e6:.2f} M",
        "no" if result.oom is None else f"event {result.oom['event']}",
    ]


def _sentence(result: ReplayResult, report: ReplayReport) -> str:
    """Explain one row of the table in a sentence."""
    if (oom := result.oom) is not None:
        step = "" if oom["step"] is None else f" in step {oom['step']}"
        capacity = "" if report.capacity is None else f" of {format_size(report.capacity)}"
        return (
            f"{result.policy} runs out of memory at event {oom['event']}{step}: "
            f"{format_size(oom['size'])} requested, {format_size(oom['allocated'])} allocated "
            f"and {format_size(oom['reserved'])} reserved{capacity}; "
            "try a larger --capacity, or other settings with --conf."
        )
    share = f", {result.driver_us / report.span_us:.2%} of the recorded time" if report.span_us else ""
    return (
        f"{result.policy} reserves {result.ratio - 1:.2%} more device memory than the program "
        f"allocates at its peak; its {result.driver_calls} driver calls take {_duration(result.driver_us)}"
        f"{share}."
    )


def _duration(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.0f} µs"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e6:.2f} s"
