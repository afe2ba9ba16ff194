"""Runs one program through one policy: prepares columns for the native loop and names its results."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vram.arguments import real_number, require
from vram.config import read_options
from vram.errors import ConfigError, DeviceError
from vram.sizes import parse_size
from vram.trace import Lifetimes, Trace, find_steps, peak_allocated
from vram.trace.lifetimes import intended

from .executors import check_cancelled
from .policies import POLICY_KINDS, policy_kind
from .recorded import recorded_setting
from .saved import replay_saved
from .traffic import SpillTraffic, traffic

__all__ = [
    "DEFAULT_LAG_US",
    "NEVER_FULL",
    "POLICIES",
    "ReplayReport",
    "ReplayResult",
    "SpillTraffic",
    "compare",
    "replay",
    "replay_stream",
]

SPILLING = "vram"
"""The policy that can spill to host memory."""
NEVER_FULL = 0
"""As a capacity: the model device has as much memory as needed."""
MOST_STREAMS = 1 << 15
"""The most streams of one pool, including the default one."""
DEFAULT_LAG_US = 5000.0
"""How long work takes on the model device, in recorded time."""


@dataclass(frozen=True)
class ReplayResult:
    """What one policy did. Bytes, counts and microseconds.

    `driver_us` is modelled from measured costs of driver calls; `retries` counts requests that were retried
    after cached memory was released. `oom` is None, or the first request that failed: `event` (index in the
    trace), `step` (of `find_steps`, None if unknown), `size`, and the bytes `allocated` and `reserved` then.
    `events_per_second` is the speed of the replay on this machine. `segment_sizes` are the bytes of
    every growth, in order (`vram`: none). `spill` is None unless the policy could spill to host memory.
    """

    policy: str
    peak_allocated: int
    peak_reserved: int
    ratio: float
    driver_calls: int
    driver_us: float
    retries: int
    events_per_second: float
    oom: dict[str, Any] | None
    segment_sizes: tuple[int, ...] = field(default=(), repr=False)
    spill: SpillTraffic | None = None

    def _repr_html_(self) -> str:
        from vram.core.html import results_html

        return results_html([self])


@dataclass(frozen=True)
class ReplayReport:
    """One trace through several policies. `peak_allocated` is that of the trace; see `vram.trace`.

    `heading` identifies the trace; see `Trace.heading`. `recorded` is the policy that the trace was recorded
    with, if it was replayed with the recorded settings.
    """

    heading: Mapping[str, Any]
    span_us: int
    peak_allocated: int
    capacity: int | None
    results: tuple[ReplayResult, ...]
    recorded: str | None = None

    def _repr_html_(self) -> str:
        from vram.core.html import report_html

        return report_html(self)

    def __repr__(self) -> str:
        names = ", ".join(result.policy for result in self.results)
        return f"<ReplayReport of {self.heading['source']!r}: {names}>"

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; the command line prints it as JSON."""
        return {
            "trace": {**self.heading, "peak_allocated": self.peak_allocated},
            "policies": [_result_json(result) for result in self.results],
            "recorded": self.recorded,
        }


def _result_json(result: ReplayResult) -> dict[str, Any]:
    spill = result.spill
    derived = spill and {"added_us": spill.added_us, "slowdown": spill.slowdown}
    return {**asdict(result), "spill": spill and {**asdict(spill), **(derived or {})}}


def replay(
    trace: Trace | Lifetimes,
    policy: str = "vram",
    *,
    capacity: int | str | None = None,
    conf: Mapping[str, object] | None = None,
    lag_us: float = DEFAULT_LAG_US,
    spill: int | str = 0,
) -> ReplayResult:
    """Run `trace` through `policy` on a model device of `capacity` bytes (default: never full).

    `conf` has the policy's settings under its own names: of PYTORCH_ALLOC_CONF for `torch`, of VRAM_CONF for
    `vram`. Work on the device completes `lag_us` after it was issued, so memory that `vram` used on one
    stream is not immediately free for another; the other policies use the recorded times.

    A failed request that `trace` ends with is served, too.

    `spill` is the host memory that `vram` may move cold memory to when the device is full. The result then
    has a `SpillTraffic`.
    """
    policy_kind(policy)
    program = trace if isinstance(trace, Lifetimes) else intended(trace)
    settings = spilling(policy, conf, spill)
    replayer = _replayer(policy, program, capacity, settings, lag_us, keep_sizes=True)
    _feed(replayer, program)
    rows = replayer.spill_steps()
    answer = {**replayer.result(), "segment_sizes": replayer.segment_sizes(), "spill": traffic(rows, program)}
    if answer["oom"] is None and rows and rows[-1]["swaps"] and program.role and program.steps:
        answer["spill"] = _with_saved(program, capacity, settings, lag_us) or answer["spill"]
    return _result(policy, program, answer, trace if isinstance(trace, Trace) else None)


def _with_saved(
    program: Lifetimes, capacity: int | str | None, settings: Mapping[str, object], lag_us: float
) -> SpillTraffic | None:
    """The traffic if saved tensors leave before pages must. None: the program then runs out of memory."""
    replayer = _replayer(SPILLING, program, capacity, settings, lag_us, keep_sizes=False)
    device_bytes = read_capacity(capacity)
    copied = replay_saved(replayer, program, device_bytes, check_cancelled)
    return None if copied is None else traffic(replayer.spill_steps(), program, copied)


def compare(
    trace: Trace,
    policies: Iterable[str] = ("vram",),
    *,
    capacity: int | str | None = None,
    conf: Mapping[str, object] | Mapping[str, Mapping[str, object]] | None = None,
    lag_us: float = DEFAULT_LAG_US,
    spill: int | str = 0,
) -> ReplayReport:
    """Run `trace` through each of `policies` under the same conditions.

    `conf` has settings for all of them, or for each by its name. `spill` is for `vram` alone.
    """
    program = intended(trace)
    own = recorded_setting(trace)
    policies = tuple(policies)
    as_recorded = own and own.policy in policies and conf_of(own.policy, conf or {}) == own.conf
    results = [
        _with_step(
            replay(
                program,
                name,
                capacity=capacity,
                conf=conf_of(name, conf or {}),
                lag_us=lag_us,
                spill=spill if name == SPILLING else 0,
            ),
            trace,
        )
        for name in policies
    ]
    return ReplayReport(
        heading=trace.heading(),
        span_us=trace.span_us,
        peak_allocated=peak_allocated(program),
        capacity=None if capacity is None else parse_size(capacity),
        results=tuple(results),
        recorded=own.policy if own and as_recorded else None,
    )


def replay_stream(
    pieces: Iterable[Lifetimes],
    policy: str = "vram",
    *,
    capacity: int | str | None = None,
    conf: Mapping[str, object] | None = None,
    lag_us: float = DEFAULT_LAG_US,
) -> ReplayResult:
    """Run a program that comes in pieces and may be larger than memory: only live allocations are kept.

    A piece is a `Lifetimes` whose ids may be reused once their allocation was freed; `event` continues from
    one piece to the next. The `event` of an oom is that of the row, its `step` is unknown.
    """
    replayer = None
    events, failed_event = 0, None
    for piece in pieces:
        require(piece, Lifetimes, "each of the pieces")
        if replayer is None:
            replayer = _replayer(policy, piece, capacity, dict(conf or {}), lag_us, keep_sizes=False)
        done = replayer.result()["rows"]
        _feed(replayer, piece)
        events = piece.event[-1] + 1 if len(piece) else events
        failure = replayer.result()["oom"]
        if failure is not None:
            failed_event = piece.event[failure["event"] - done]
            break
    if replayer is None:
        raise ConfigError("the program has no pieces; give at least one, even an empty one")
    answer = replayer.result()
    if answer["oom"] is not None:
        answer = {**answer, "oom": {**answer["oom"], "event": failed_event, "step": None}}
        events = failed_event or 0
    return _named(policy, answer, events, answer["oom"])


def spilling(policy: str, conf: Mapping[str, object] | None, spill: int | str) -> dict[str, object]:
    """`conf` with the host memory that the policy may spill to."""
    settings = dict(conf or {})
    if policy != SPILLING:
        if spill:
            what = f"only {SPILLING} spills to host memory, not {policy}"
            raise ConfigError(what, option="spill", value=spill)
        return settings
    if spill:
        settings["spill"] = spill
    read = read_options({name: settings[name] for name in ("pages", "spill") if name in settings}, ("core",))
    if read.get("spill") and not read.get("pages", True):
        what = "spill moves pages: it has no effect with pages off"
        raise ConfigError(what, option="spill", value=settings["spill"])
    return settings


def conf_of(policy: str, conf: Mapping[str, Any]) -> dict[str, object]:
    """The settings for `policy`; `conf` may have them by policy."""
    require(conf, Mapping, "conf")  # type: ignore[type-abstract]
    by_policy = {name for name, value in conf.items() if isinstance(value, Mapping)}
    if not by_policy:
        return dict(conf)
    for name in conf:
        if name not in by_policy:
            raise ConfigError(
                f"conf holds settings by policy, and {name!r} beside them; give one or the other"
            )
        policy_kind(name)
    return dict(conf.get(policy, {}))


def read_capacity(capacity: int | str | None) -> int:
    """Bytes, or NEVER_FULL for None."""
    if capacity is None:
        return NEVER_FULL
    size = parse_size(capacity)
    if size == 0:
        raise ConfigError(
            "a device of 0 bytes serves nothing; leave the capacity out for one that is never full"
        )
    return size


def _result(policy: str, program: Lifetimes, answer: Mapping[str, Any], trace: Trace | None) -> ReplayResult:
    failure = answer["oom"]
    operations = len(program) if failure is None else failure["event"]
    covered = program.carried + program.event[operations - 1] + 1 if operations else 0
    oom = failure and {**failure, "event": program.event[failure["event"]], "step": None}
    result = _named(policy, answer, covered, oom)
    return result if trace is None else _with_step(result, trace)


def _with_step(result: ReplayResult, trace: Trace) -> ReplayResult:
    """`result` with the step in which memory ran out."""
    if result.oom is None or result.oom["event"] < 0:
        return result
    return replace(result, oom={**result.oom, "step": find_steps(trace).of(result.oom["event"])})


def _named(policy: str, answer: Mapping[str, Any], events: int, oom: dict[str, Any] | None) -> ReplayResult:
    allocated, reserved = answer["peak_allocated"], answer["peak_reserved"]
    return ReplayResult(
        policy=policy,
        peak_allocated=allocated,
        peak_reserved=reserved,
        ratio=reserved / allocated if allocated else 1.0,
        driver_calls=answer["driver_calls"],
        driver_us=answer["driver_us"],
        retries=answer.get("retries", 0),
        events_per_second=events / max(answer["seconds"], 1e-9),
        oom=oom,
        segment_sizes=tuple(answer.get("segment_sizes", ())),
        spill=answer["spill"] if isinstance(answer["spill"], SpillTraffic) else None,
    )


# --- the native loop ----------------------------------------------------------------------------------------


def _replayer(
    policy: str,
    program: Lifetimes,
    capacity: int | str | None,
    conf: Mapping[str, object],
    lag_us: float,
    *,
    keep_sizes: bool,
) -> Any:
    size = read_capacity(capacity)
    lag = real_number(lag_us, "lag_us", least=0, most=sys.float_info.max)
    settings = policy_kind(policy).read(conf, size)
    if policy == "vram" and program.streams > MOST_STREAMS:
        raise ConfigError(
            f"the program uses {program.streams} streams, and a vram pool supports at most {MOST_STREAMS}; "
            "replay it through another policy, such as torch",
            value=program.streams,
        )
    return _native().Replayer(
        policy, settings, size, lag, program.segment_size, program.segment_address, keep_sizes
    )


def _feed(replayer: Any, piece: Lifetimes) -> None:
    """Pass the columns without a copy."""
    replayer.run(
        piece.op,
        piece.id,
        piece.size,
        piece.stream,
        piece.time_us,
        piece.event,
        piece.completed_event,
        piece.emptied,
        piece.steps,
        check_cancelled,
    )


def can_replay() -> bool:
    """Whether this installation has the native core, which replays need."""
    try:
        return bool(_native())
    except DeviceError:
        return False


def _native() -> Any:
    try:
        return importlib.import_module("vram._native")
    except ImportError as error:
        raise DeviceError(
            f"replay needs the native core, which is not built here ({error}). Linux on x86_64 and aarch64 "
            "has it: install vram with pip, or build it with `pip install .` in the source tree",
            call="import",
        ) from error


POLICIES = tuple(POLICY_KINDS)
"""Every allocator that a trace can be replayed through."""
