"""`vram replay`: what recorded jobs would cost under other allocators. Prints reports; computes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich_click as click
from rich.console import Console

from vram.analysis.capacity import describe_limit, recorded_capacity
from vram.analysis.moments import require_contents
from vram.config import read_options, spill_bytes
from vram.errors import ConfigError
from vram.replay import (
    POLICIES,
    Ranked,
    Ranking,
    ReplayReport,
    ReplayResult,
    Setting,
    SpillTraffic,
    compare,
    recorded_setting,
    sweep_all,
)
from vram.replay.recorded import uses_torch
from vram.replay.run import SPILLING
from vram.replay.sweep import collapsed, worthwhile
from vram.sizes import format_count, format_size
from vram.trace import Trace, open_trace
from vram.trace.lifetimes import last_failure

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
from .limited import limited

__all__ = ["replay_command"]

COLUMNS = "|policy|>peak allocated|>peak reserved|>ratio|>driver time|>out of memory|"
SWEEP_COLUMNS = ">rank||policy|>smallest device|>peak reserved|>driver time|>retries|setting"
COMPARED = ("torch", "torch-expandable", "cuda-async", "vram")
"""What a PyTorch job can use without changing its code."""
RECORDED, WORTHWHILE = "recorded", "*"
"""Mark the setting that the recording was made with, and those that no other beats in memory and time."""
DEFAULTS = "unset PYTORCH_CUDA_ALLOC_CONF"
"""How to use PyTorch's allocator with its defaults."""
LEGEND = f"{WORTHWHILE} no other needs less memory without more driver time"


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


def read_spill(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse the option spill. With `auto`, it is what a pool on this machine would take."""
    if value is None:
        return None
    try:
        return spill_bytes(read_options({"spill": value})["spill"])
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@click.command("replay")
@files_argument
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(sorted(POLICIES)),
    help="Allocator to replay through; repeatable. Default: PyTorch's and vram; with --sweep all of them.",
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
    help="Settings in the policy's own syntax, as in PYTORCH_ALLOC_CONF or VRAM_CONF; repeatable. Without "
    "--policy and POLICY=, they are for vram.",
)
@click.option(
    "--lag",
    metavar="TIME",
    callback=read_duration,
    default="5ms",
    show_default=True,
    help="How long after submission the device completes work, in recorded time.",
)
@click.option(
    "--spill",
    metavar="SIZE|auto",
    callback=read_spill,
    help="Host memory that vram may move cold memory to when the device of --capacity is full.",
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
    spill: int | None,
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
    if spill and (sweep or capacity is None):
        raise click.UsageError("--spill requires --capacity, and cannot be combined with --sweep")
    if spill and policies and SPILLING not in policies:
        raise click.UsageError(f"only {SPILLING} spills to host memory; omit --policy")
    if not sweep and (executor or jobs > 1):
        raise click.UsageError("-j and --executor require --sweep")
    run = _run if executor else limited(_run)  # the workers of a cluster are processes of their own
    if run(files, policies, capacity, conf, lag, spill or 0, sweep, jobs, executor, device, as_json):
        ctx.exit(FINDING)


def _run(
    files: tuple[Path, ...],
    policies: tuple[str, ...],
    capacity: int | None,
    conf: Mapping[str, Any],
    lag: float,
    spill: int,
    sweep: bool,
    jobs: int,
    executor: str | None,
    device: int | None,
    as_json: bool,
) -> bool:
    """Replay and print; returns whether an allocator ran out of memory, or no setting fits."""
    if sweep:
        traces = [_open(path, device) for path in files]
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
        return any(all(each.smallest_capacity is None for each in ranked) for ranked in rankings)
    else:
        reports, traces = [], []
        with progress_bar("files") as progress:
            for done, path in enumerate(files):
                progress(done, len(files))
                trace = _open(path, device)
                reports.append(_compare(trace, policies, capacity, conf, lag, spill))
                traces.append(trace)
        _show_reports(reports, traces, capacity, as_json)
        return any(result.oom for report in reports for result in report.results)


def _open(path: Path, device: int | None) -> Trace:
    trace = open_trace(path, device=device)
    require_contents(trace)
    return trace


def _print_json(documents: list[dict[str, Any]]) -> None:
    click.echo(json.dumps(documents[0] if len(documents) == 1 else documents))


def _compare(
    trace: Trace,
    policies: tuple[str, ...],
    capacity: int | None,
    conf: Mapping[str, Any],
    lag: float,
    spill: int,
) -> ReplayReport:
    """Replay through the chosen policies. That of the recording gets its settings, unless some are given."""
    for_vram = spill or (conf and not any(isinstance(value, Mapping) for value in conf.values()))
    chosen = policies or (("vram",) if for_vram else COMPARED)
    own = recorded_setting(trace)
    if not conf and own is not None:
        conf = {own.policy: own.conf}
    return compare(trace, chosen, capacity=capacity, conf=conf, lag_us=lag, spill=spill)


def _failed_request(trace: Trace) -> Iterator[str]:
    if (failure := last_failure(trace)) is not None:
        size = format_size(trace.size[failure])
        yield f"The recording ends with a failed request for {size}; the replays serve it."


def _notes(trace: Trace, capacity: int | None) -> Iterator[str]:
    """What a reader must know of the recorded job."""
    yield from _failed_request(trace)
    if capacity is None and (limit := _limit(trace, None)):
        yield f"The limit of the recorded job was {limit}; --capacity replays under a limit."


def _limit(trace: Trace, capacity: int | None) -> str:
    """The limit that matters, in words; empty if none is known."""
    return describe_limit(recorded_capacity(trace)) if capacity is None else format_size(capacity)


def _use(trace: Trace, setting: Setting | Ranked) -> str:
    """The line that makes the recorded job use a setting; empty if there is none."""
    if uses_torch(trace):
        return setting.environment or DEFAULTS
    pairs = ",".join(f"{key}:{value}" for key, value in setting.conf.items())
    return f"VRAM_CONF={pairs}" if setting.policy == "vram" and pairs else ""


def _show_reports(
    reports: list[ReplayReport], traces: list[Trace], capacity: int | None, as_json: bool
) -> None:
    if as_json:
        _print_json([report.to_json() for report in reports])
        return
    console = open_console()
    for report, trace in zip(reports, traces, strict=True):
        _draw(report, trace, capacity, console)


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
        draw_grid(console, SWEEP_COLUMNS, [*_sweep_rows(trace, ranked)])
        draw_line(console, LEGEND, "dim")
        for line in _failed_request(trace):
            draw_line(console, line)
        if limit := _limit(trace, capacity):
            draw_line(console, f"The limit {'was' if capacity is None else 'is'} {limit}.")
        for line in _best(trace, ranked, capacity):
            draw_line(console, line)
        console.print()


def _sweep_rows(trace: Trace, ranked: Ranking) -> Iterator[list[str]]:
    """The settings; those that come to the same in one row."""
    rows, own = collapsed(ranked), recorded_setting(trace)
    worth = worthwhile([(each.smallest_capacity or math.inf, each.driver_us) for each, _ in rows])
    for (each, others), good in zip(rows, worth, strict=True):
        same = {(one.policy, tuple(one.conf.items())) for one in (each, *others)}
        recorded = own is not None and (own.policy, tuple(own.conf.items())) in same
        alike = f", and {len(others)} more with the same result" if others else ""
        conf = ",".join(f"{key}:{value}" for key, value in each.conf.items()) or "defaults"
        yield [
            str(each.rank),
            WORTHWHILE if good and each.smallest_capacity else "",
            each.policy,
            "none" if each.smallest_capacity is None else format_size(each.smallest_capacity),
            format_size(each.peak_reserved),
            _duration(each.driver_us),
            str(each.retries),
            f"{conf}{alike}{f' ({RECORDED})' if recorded else ''}",
        ]


def _best(trace: Trace, ranked: tuple[Ranked, ...], capacity: int | None) -> Iterator[str]:
    best = ranked[0]
    if best.smallest_capacity is None:
        held = "" if capacity is None else f" with {format_size(capacity)}"
        yield f"No setting lets the job complete{held}; the best reserves {format_size(best.peak_reserved)}."
        return
    for position, (size, each) in enumerate(_best_of_each_policy(ranked)):
        device = "A device with " if position == 0 else ""
        line = _use(trace, each)
        yield f"{device}{format_size(size)} is enough with {each.policy}{':' if line else '.'}"
        if line:
            yield line


def _best_of_each_policy(ranked: tuple[Ranked, ...]) -> list[tuple[int, Ranked]]:
    """Return the best setting of each policy that completes the job: not every user can switch policies."""
    best: dict[str, tuple[int, Ranked]] = {}
    for each in ranked:
        if each.smallest_capacity is not None:
            best.setdefault(each.policy, (each.smallest_capacity, each))
    return list(best.values())


# --- a replay -----------------------------------------------------------------------------------------------


def _draw(report: ReplayReport, trace: Trace, capacity: int | None, console: Console) -> None:
    name, events = Path(report.heading["source"]).name, report.heading["events"]
    draw_line(console, f"{name}: {events} events over {_duration(report.span_us)}", "bold")
    completed = [result for result in report.results if result.oom is None]
    worth = worthwhile([(each.peak_reserved, each.driver_us) for each in completed])
    good = [each for each, marked in zip(completed, worth, strict=True) if marked and len(report.results) > 1]
    draw_grid(
        console,
        COLUMNS,
        [_row(result, result in good, result.policy == report.recorded) for result in report.results],
        styles={WORTHWHILE: "green"},
    )
    if good:
        draw_line(console, LEGEND, "dim")
    for note in _notes(trace, capacity):
        draw_line(console, note)
    for result in report.results:
        if len(report.results) == 1 or result.oom is not None:
            draw_line(console, _sentence(result, report))
            if result.spill is not None:
                draw_line(console, _spilled(result.spill))
        elif result in good and result.policy != report.recorded:
            draw_line(console, _trade(result, report, trace))
    console.print()


def _trade(result: ReplayResult, report: ReplayReport, trace: Trace) -> str:
    """What a policy costs in memory and driver time beside the recorded one, and how to use it."""
    line = _use(trace, Setting(result.policy, {}))
    use = f" To use it: {line}" if line else ""
    other = next((each for each in report.results if each.policy == report.recorded), None)
    if other is None:
        return f"To use {result.policy}: {line}"
    if other.oom is not None:
        return f"{result.policy} completes, unlike the recorded {other.policy}.{use}"
    memory, driver = result.peak_reserved - other.peak_reserved, result.driver_us - other.driver_us
    part = f"{format_size(abs(memory))} ({abs(memory) / max(1, other.peak_reserved):.1%})"
    needs = f"{part} {'less' if memory < 0 else 'more'} memory than" if memory else "as much memory as"
    share = f" ({abs(driver) / report.span_us:.1%} of the recorded time)" if report.span_us else ""
    return (
        f"{result.policy} needs {needs} the recorded {other.policy}, for "
        f"{_duration(abs(driver))} {'less' if driver <= 0 else 'more'} driver time{share}.{use}"
    )


def _row(result: ReplayResult, good: bool, recorded: bool) -> list[str]:
    return [
        WORTHWHILE if good else "",
        result.policy,
        format_size(result.peak_allocated),
        format_size(result.peak_reserved),
        f"{result.ratio:.4f}",
        _duration(result.driver_us),
        "no" if result.oom is None else f"event {result.oom['event']}",
        RECORDED if recorded else "",
    ]


def _sentence(result: ReplayResult, report: ReplayReport) -> str:
    """Explain one row of the table in a sentence."""
    if (oom := result.oom) is not None:
        step = "" if oom["step"] is None else f" in step {oom['step']}"
        capacity = "" if report.capacity is None else f" of {format_size(report.capacity)}"
        could_spill = result.spill is not None and (report.capacity is None or oom["size"] <= report.capacity)
        larger = ", a larger --spill" if could_spill else ""
        return (
            f"{result.policy} runs out of memory at event {oom['event']}{step}: "
            f"{format_size(oom['size'])} requested, {format_size(oom['allocated'])} allocated "
            f"and {format_size(oom['reserved'])} reserved{capacity}; "
            f"try a larger --capacity{larger}, or other settings with --conf."
        )
    share = f", {result.driver_us / report.span_us:.2%} of the recorded time" if report.span_us else ""
    more = "more" if result.ratio >= 1 else "less"
    return (
        f"{result.policy} reserves {abs(result.ratio - 1):.2%} {more} device memory than the program "
        f"allocates at its peak; its {result.driver_calls} driver calls take {_duration(result.driver_us)}"
        f"{share}."
    )


def _spilled(spill: SpillTraffic) -> str:
    """What spilling moves and costs."""
    if not spill.moved_out:
        return "Nothing is spilled."
    times = (
        "" if spill.slowdown is None else f", about {spill.slowdown:.2f}x the recorded time of these steps"
    )
    saved, other = "", ""
    if spill.saved:
        other = " of other memory"
        saved = (
            f"Under PyTorch, {format_size(spill.saved)} of saved tensors are copied to host memory ahead of "
            f"need, and back, which takes {_duration(spill.copied_us)} if nothing overlaps with computation. "
        )
    back = ""
    if spill.returns:
        size = format_size(spill.moved_back - spill.saved_back)
        back = f", and {size} back in {format_count(spill.returns, 'return')}"
    return (
        f"{saved}Spilling moves {format_size(spill.moved_out - spill.saved)}{other} to host memory in "
        f"{format_count(spill.swaps, 'swap')}{back}. The streams are held for "
        f"{_duration(spill.held_us - spill.copied_us)}. "
        f"If each block in host memory is read once in a step, {format_size(spill.read)} are read over the "
        f"bus in {_duration(spill.read_us)}. This affects {format_count(spill.steps, 'step')}{times}. "
        f"At most {format_size(spill.peak)} are in host memory, and creating its pages takes "
        f"{_duration(spill.created_us)} once."
    )


def _duration(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.0f} µs"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e6:.2f} s"
