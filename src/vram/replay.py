"""Runs the program of a trace through an allocator on a model device, and says what it would have cost.

The loop over operations is native; this prepares its columns and names its answer. Reading files is for
`trace`, drawing for the front ends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vram.config import parse_pool_options
from vram.errors import ConfigError, DeviceError
from vram.sizes import parse_size
from vram.trace import Lifetimes, Trace, lifetimes, peak_allocated

__all__ = ["POLICIES", "ReplayReport", "ReplayResult", "Run", "compare", "replay"]

NEVER_FULL = 0
"""As a capacity: the model device has as much memory as is ever needed."""
DEFAULT_LAG_US = 5000.0
"""How long after it was issued the model device finishes work, in recorded time."""


@dataclass(frozen=True)
class Run:
    """What a policy is asked to do: run `program` with settings `conf` on a model device.

    The device has `capacity` bytes (or is NEVER_FULL) and finishes work `lag_us` after it was issued.
    """

    program: Lifetimes
    capacity: int
    conf: Mapping[str, object]
    lag_us: float


@dataclass(frozen=True)
class ReplayResult:
    """What one policy did. Bytes, counts and microseconds.

    `driver_us` is modelled from measured costs of driver calls. `oom` is None, or the first request that
    failed: `event` (index in the trace), `size`, `allocated` and `reserved` at that moment.
    `events_per_second` counts the recorded events up to the last one run, against the clock of this machine.
    """

    policy: str
    peak_allocated: int
    peak_reserved: int
    ratio: float
    driver_calls: int
    driver_us: float
    events_per_second: float
    oom: dict[str, Any] | None


@dataclass(frozen=True)
class ReplayReport:
    """One trace through several policies. `peak_allocated` is the trace's, as `vram.trace` defines it."""

    source: str
    events: int
    span_us: int
    peak_allocated: int
    capacity: int | None
    results: tuple[ReplayResult, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; the shape is part of the command line's contract."""
        return {
            "trace": {"events": self.events, "peak_allocated": self.peak_allocated},
            "policies": [asdict(result) for result in self.results],
        }


def replay(
    trace: Trace | Lifetimes,
    policy: str = "vram",
    *,
    capacity: int | str | None = None,
    conf: Mapping[str, object] | None = None,
    lag_us: float = DEFAULT_LAG_US,
) -> ReplayResult:
    """Run `trace` through `policy` on a model device of `capacity` bytes (default: never full).

    `conf` holds the policy's settings. Work on the device finishes `lag_us` after it was issued, so memory
    used on one stream is not at once free for another.
    """
    run_policy = _policy(policy)
    if not lag_us >= 0:
        raise ConfigError(f"lag_us is {lag_us}; work cannot finish before it was issued, use 0 or more")
    program = trace if isinstance(trace, Lifetimes) else lifetimes(trace)
    answer = run_policy(Run(program, _capacity(capacity), dict(conf or {}), float(lag_us)))
    return _result(policy, program, answer)


def compare(
    trace: Trace,
    policies: Iterable[str] = ("vram",),
    *,
    capacity: int | str | None = None,
    conf: Mapping[str, object] | None = None,
    lag_us: float = DEFAULT_LAG_US,
) -> ReplayReport:
    """Run `trace` through each of `policies` under the same conditions."""
    program = lifetimes(trace)
    results = [replay(program, name, capacity=capacity, conf=conf, lag_us=lag_us) for name in policies]
    return ReplayReport(
        source=trace.source,
        events=trace.events,
        span_us=trace.span_us,
        peak_allocated=peak_allocated(program),
        capacity=None if capacity is None else parse_size(capacity),
        results=tuple(results),
    )


def _capacity(capacity: int | str | None) -> int:
    if capacity is None:
        return NEVER_FULL
    size = parse_size(capacity)
    if size == 0:
        raise ConfigError(
            "a device of 0 bytes serves nothing; leave the capacity out for one that is never full"
        )
    return size


def _policy(name: str) -> Callable[[Run], Mapping[str, Any]]:
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"no policy {name!r}; there is {', '.join(sorted(POLICIES))}") from None


def _result(policy: str, program: Lifetimes, answer: Mapping[str, Any]) -> ReplayResult:
    failure = answer["oom"]
    operations = len(program) if failure is None else failure["event"]
    covered = program.carried + program.event[operations - 1] + 1 if operations else 0
    allocated, reserved = answer["peak_allocated"], answer["peak_reserved"]
    return ReplayResult(
        policy=policy,
        peak_allocated=allocated,
        peak_reserved=reserved,
        ratio=reserved / allocated if allocated else 1.0,
        driver_calls=answer["driver_calls"],
        driver_us=answer["driver_us"],
        events_per_second=covered / max(answer["seconds"], 1e-9),
        oom=None if failure is None else _out_of_memory(program, failure),
    )


def _out_of_memory(program: Lifetimes, failure: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "event": program.event[failure["event"]],
        "size": failure["size"],
        "allocated": failure["allocated"],
        "reserved": failure["reserved"],
    }


def _run_vram(run: Run) -> Mapping[str, Any]:
    """The real pool. The columns are handed over without a copy."""
    program = run.program
    answer: Mapping[str, Any] = _native_replay()(
        program.op,
        program.id,
        program.size,
        program.stream,
        program.time_us,
        program.completed_us,
        max(program.streams, 1),
        run.capacity,
        parse_pool_options(run.conf, capacity=run.capacity),
        run.lag_us,
    )
    return answer


def _native_replay() -> Callable[..., Mapping[str, Any]]:
    try:
        native = importlib.import_module("vram._native")
    except ImportError as error:
        raise DeviceError(
            f"replay needs the native core, which is not built here ({error}); install vram with pip, "
            "or build it with `pip install .` in the source tree",
            call="import",
        ) from error
    function: Callable[..., Mapping[str, Any]] = native.replay
    return function


POLICIES: dict[str, Callable[[Run], Mapping[str, Any]]] = {"vram": _run_vram}
"""Every allocator a trace can be replayed through. A policy takes a Run and returns `peak_allocated`,
`peak_reserved`, `driver_calls`, `driver_us`, `seconds` and `oom`: None, or the first failure: `event` (an
index into the program here), its `size`, and the bytes `allocated` and `reserved` at that moment."""
