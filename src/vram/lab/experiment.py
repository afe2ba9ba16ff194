"""An experiment: a claim, a measurement, and a verdict that is computed from the measurement.

`Bench` provides what experiments use: the device, its kernels, the driver, clocks and streams. The
experiments are in the other modules of this package; `vram.cli.lab` prints them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from vram.core.device import Device
from vram.core.stream import Stream
from vram.errors import DeviceError
from vram.lab.kernels import Kernels

from .driver import Driver

__all__ = [
    "KIB",
    "MIB",
    "Bench",
    "Experiment",
    "Judgement",
    "Observation",
    "Quantity",
    "Result",
    "Table",
    "Verdict",
    "experiment",
]

KIB, MIB = 1 << 10, 1 << 20

Verdict: TypeAlias = Literal["holds", "does not hold", "depends"]
Judgement: TypeAlias = tuple[Verdict, str]
"""The verdict and the sentence that explains it."""
Cell: TypeAlias = str | int | float | bool


class Quantity(NamedTuple):
    """A number with its unit: ms, µs, bytes, MiB, GB/s, or a count of something."""

    value: float
    unit: str


@dataclass(frozen=True)
class Table:
    """Rows of an experiment that measures the same for several candidates."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def records(self) -> list[dict[str, Cell]]:
        """Return the rows as dicts."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Observation:
    """What was measured, before it is judged."""

    numbers: dict[str, Quantity]
    table: Table | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.numbers[name].value

    def rows(self) -> list[dict[str, Cell]]:
        """The rows of the table as dicts."""
        return [] if self.table is None else self.table.records()


Measure: TypeAlias = Callable[["Bench"], Observation]
Judge: TypeAlias = Callable[[Observation], Judgement]


@dataclass(frozen=True)
class Experiment:
    """A common claim, how it is measured, and how the measurement is judged."""

    name: str
    claim: str
    why: str
    """Why it matters to a user."""
    measure: Measure
    judge: Judge
    needs_gpu: bool = False
    needs_pages: bool = False

    def run(self, bench: Bench) -> Result:
        """Measure and judge. An error becomes part of the result, so that the other experiments still run."""
        if self.needs_gpu and not bench.on_gpu:
            return Result(self, skipped="needs a GPU")
        if self.needs_pages and not bench.device.pages:
            return Result(self, skipped=f"needs pages, and {bench.device.name} has none")
        start = time.perf_counter()
        try:
            observation = self.measure(bench)
            verdict, sentence = self.judge(observation)
        except Exception as error:
            return Result(self, failed=f"{type(error).__name__}: {error}")
        finally:
            with contextlib.suppress(DeviceError):
                bench.device.synchronize()
        return Result(self, observation, verdict, sentence, seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class Result:
    """The result of an experiment, or why it did not run."""

    experiment: Experiment
    observation: Observation = field(default_factory=lambda: Observation({}))
    verdict: Verdict | None = None
    sentence: str = ""
    skipped: str = ""
    failed: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        seen = self.observation
        document: dict[str, Any] = {
            "name": self.experiment.name,
            "claim": self.experiment.claim,
            "why": self.experiment.why,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "measured": {name: quantity._asdict() for name, quantity in seen.numbers.items()},
            "notes": list(seen.notes),
            "seconds": self.seconds,
        }
        if seen.table is not None:
            document["table"] = {"columns": list(seen.table.columns), "rows": [*map(list, seen.table.rows)]}
        excuses = {"skipped": self.skipped, "failed": self.failed}
        return document | {key: text for key, text in excuses.items() if text}


def experiment(
    name: str, claim: str, *, judge: Judge, needs_gpu: bool = False, needs_pages: bool = False
) -> Callable[[Measure], Experiment]:
    """Make an experiment from a measuring function; its docstring says why the claim matters."""

    def make(measure: Measure) -> Experiment:
        why = " ".join((measure.__doc__ or "").split())
        return Experiment(name, claim, why, measure, judge, needs_gpu, needs_pages)

    return make


# ---- the bench --------------------------------------------------------------------------------------------


class Bench:
    """The device under test and the tools to measure it with."""

    def __init__(self, device: str | Device | None = None, *, quick: bool = False) -> None:
        """Open a device; `quick` makes everything smaller and shorter."""
        self.device = device if isinstance(device, Device) else Device(device)
        self.quick = quick
        self.kernels = Kernels(self.device)
        self.on_gpu = self.device.kind == "cuda"
        self._driver = Driver(self.device) if self.on_gpu else None

    @property
    def backend(self) -> Any:
        """The native backend, with the individual calls of its contract."""
        return self.device.backend

    @property
    def driver(self) -> Driver:
        """The driver's own calls (GPU only)."""
        if self._driver is None:
            raise DeviceError(f"{self.device.name} does not use a CUDA driver", code="unsupported")
        return self._driver

    @property
    def busy_ms(self) -> float:
        """Duration of the kernel that other calls might wait for."""
        return 20.0 if self.quick else 50.0

    @property
    def checked_bytes(self) -> int:
        """Bytes in which a pattern is verified; fewer on the host, where a Python loop checks it."""
        return 4 * MIB if self.on_gpu else 16 * KIB

    @contextlib.contextmanager
    def streams(self, count: int) -> Iterator[list[Stream]]:
        """Create streams for the duration of a `with` block; their work has completed at its end."""
        made = [Stream(self.device) for _ in range(count)]
        try:
            yield made
        finally:
            for stream in made:
                stream.synchronize()
                stream.close()

    @contextlib.contextmanager
    def reserved(self, *sizes: int) -> Iterator[list[int]]:
        """Allocate plain device memory for the duration of a `with` block."""
        held: list[tuple[int, int]] = []
        try:
            for size in sizes:
                held.append((self.backend.reserve(size), size))
            yield [address for address, _ in held]
        finally:
            self.device.synchronize()
            for address, size in held:
                self.backend.release(address, size)

    def busy(self, stream: Stream, ms: float | None = None) -> float:
        """Keep a stream busy, wait until its kernel runs, and return that time on `clock_ms()`."""
        self.kernels.spin(stream, self.busy_ms if ms is None else ms)
        started = clock_ms()
        time.sleep(0.002)
        return started

    @staticmethod
    def timed(call: Callable[[], object]) -> float:
        """Return for how many milliseconds a call blocks the host."""
        start = clock_ms()
        call()
        return clock_ms() - start

    def timed_until_done(self, call: Callable[[], object], *streams: Stream, times: int = 3) -> float:
        """Return the milliseconds until a call's work completes on its streams; median of several runs."""

        def once() -> None:
            call()
            for stream in streams:
                stream.synchronize()

        once()
        return statistics.median(self.timed(once) for _ in range(times))


def clock_ms() -> float:
    """Return milliseconds of the host's clock."""
    return time.perf_counter_ns() / 1e6


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else "none"
