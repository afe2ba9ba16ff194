"""What a program needs: peaks, whether it fits, what holds memory, and what was guessed.

Made from what the processes of the program left (`program`). Recordings are read when they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from vram.analysis.groups import GROUPINGS, Group, group_blocks
from vram.analysis.memory import memory_at
from vram.analysis.moments import find_moment
from vram.arguments import shown
from vram.errors import ConfigError
from vram.observe.recording import beside
from vram.replay import Ranking, Setting, sweep
from vram.replay.executors import FAILURES
from vram.sizes import format_size
from vram.trace import Action, Trace, lifetimes, open_trace
from vram.trace.convert import convert

from .gpus import GPUS, Gpu
from .program import Ended, Program

__all__ = ["Failure", "Fit", "Fits", "Prediction", "Use", "failure_text"]

Show: TypeAlias = "Callable[[int, int], None]"
"""Shows how many of how many settings were tried."""
MOST_IN_JSON = 50
STATIC_RUNTIME = (
    "contains the CUDA runtime (linked statically), which the null GPU cannot replace: its calls fail, "
    "and the memory that it would allocate is missing"
)
SETTINGS = (
    Setting("torch", {}),
    Setting("torch", {"max_split_size_mb": "128"}),
    Setting("torch", {"roundup_power2_divisions": "8"}),
    Setting("torch", {"garbage_collection_threshold": "0.8"}),
    Setting("torch-expandable", {}),
    Setting("cuda-async", {}),
    Setting("vram", {}),
    Setting("vram", {"cross_stream": "wait"}),
)
"""The allocators and settings that a prediction compares; `vram replay --sweep` has more."""


@dataclass(frozen=True)
class Use:
    """What one process needs of one device, in bytes. `used` is everything, with the context's overhead.

    `retries` counts how often PyTorch had to release cached memory to serve a request.
    """

    pid: int
    rank: int | None
    device: int
    allocated: int
    reserved: int
    used: int
    retries: int
    recording: str | None = None

    @property
    def name(self) -> str:
        """The process for a person."""
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class Failure:
    """A request that failed: its bytes, what was `allocated`, `reserved` and `free` then, after which step.

    `place` is the line of the program, None if it is not known. `caught` is set if the program continued.
    """

    pid: int
    rank: int | None
    device: int
    size: int
    free: int
    allocated: int
    reserved: int
    steps: int
    place: str | None
    caught: bool


@dataclass(frozen=True)
class Fit:
    """Whether the program fits a GPU: "yes", "tight" (PyTorch must release cached memory), "no" or "unknown".

    `room` is what is left of the GPU's memory at the peak, negative if it is too small.
    """

    gpu: Gpu
    fits: str
    room: int


class Fits(tuple[Fit, ...]):
    """Whether a program fits GPUs: a tuple that a notebook shows as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        fitting = ", ".join(each.gpu.key for each in self if each.fits == "yes")
        return f"<Fits of {len(self)} GPUs; enough memory: {fitting or 'none'}>"

    def _repr_html_(self) -> str:
        from .html import fits_html

        return fits_html(self)


class Prediction:
    """What a program needs on a GPU; made by `vram.predict.run`. Sizes are bytes, peaks of one device."""

    def __init__(self, program: Program, gpu: Gpu, devices: int, ended: Ended, folder: str) -> None:
        """Read what the program left in `folder`, which must stay as long as the prediction."""
        self.program = program
        self.gpu = gpu
        self.devices = devices
        self.unlimited: Prediction | None = None
        self._ended = ended
        self._folder = folder
        self._results = [each for each in ended.results if each["outcome"] != "no cuda"]
        self._untried: dict[str, None] = {}  # why replays failed
        self.uses = tuple(_uses(self._results, folder))

    # ---- how it ended -------------------------------------------------------------------------------------

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        """The requests that failed, as far as they were recorded."""
        fields = ("device", "size", "free", "allocated", "reserved", "steps", "place")
        return tuple(
            Failure(
                pid=each["pid"],
                rank=each["rank"],
                **{name: failure[name] for name in fields},
                caught=not _died_of_memory(each, self._ended.status),
            )
            for each in self._results
            for failure in each["failures"]
        )

    @property
    def failure(self) -> Failure | None:
        """The request that ended the program; None if none did.

        A process whose launcher reports its error seems to have caught it.
        """
        if self.outcome != "out of memory":
            return None
        uncaught = [each for each in self.failures if not each.caught]
        return next(reversed(uncaught or self.failures), None)

    @cached_property
    def outcome(self) -> str:
        """How it ended: "completed", "stopped" by `steps`, "interrupted", "out of memory" or "failed"."""
        if any(_died_of_memory(each, self._ended.status) for each in self._results):
            return "out of memory"
        if self._ended.interrupted:
            return "interrupted"
        if self._ended.status != 0:
            return "failed"
        stopped = any(each["outcome"] == "stopped" for each in self._results)
        return "stopped" if stopped else "completed"

    @property
    def fits(self) -> bool:
        """Whether the program fits the GPU, as far as it ran."""
        return self.outcome != "out of memory" and self.room >= 0

    @property
    def error(self) -> dict[str, Any] | None:
        """The exception that ended the program: `type`, `message` and `place`; None if there was none."""
        return next((each["error"] for each in self._results if each["error"]), None)

    @property
    def status(self) -> int:
        """The program's own exit status; negative for a signal."""
        return self._ended.status

    @property
    def steps(self) -> int:
        """Steps that were completed: optimizer steps, or those marked with `vram.step`."""
        return max((each["steps"] for each in self._results), default=0)

    @property
    def seconds(self) -> float:
        """How long the program ran on the null GPU."""
        return self._ended.seconds

    # ---- what it needs ------------------------------------------------------------------------------------

    @cached_property
    def largest(self) -> Use | None:
        """The process and device with the highest peak."""
        return max(self.uses, key=lambda each: (each.used, each.reserved), default=None)

    @property
    def peak_allocated(self) -> int:
        """The most that PyTorch had allocated on one device."""
        return max((each.allocated for each in self.uses), default=0)

    @property
    def peak_reserved(self) -> int:
        """The most that PyTorch had reserved on one device."""
        return max((each.reserved for each in self.uses), default=0)

    @cached_property
    def peak_used(self) -> int:
        """The most that was used of one device: reserved memory, libraries, and the context's overhead.

        Processes that share a device are counted as if their peaks coincided.
        """
        return self._used_of(self.gpu)

    def _used_of(self, gpu: Gpu) -> int:
        """The same on another GPU, whose contexts take more or less."""
        by_device: dict[int, int] = {}
        for each in self.uses:
            used = each.used + gpu.overhead - self.gpu.overhead
            by_device[each.device] = by_device.get(each.device, 0) + used
        return max(by_device.values(), default=0)

    @property
    def room(self) -> int:
        """What is left of the GPU's memory at the peak."""
        return self.gpu.memory - self.peak_used

    def table(self) -> Fits:
        """Whether the program would fit other GPUs, the largest first.

        The peak is that of this prediction; other GPUs choose other kernels with other workspaces. If the
        program ran out of memory, the peak is that of a run without a limit.
        """
        ordered = sorted(GPUS, key=lambda each: -each.memory)
        return Fits(Fit(gpu, self._fits_on(gpu), gpu.memory - self.known._used_of(gpu)) for gpu in ordered)

    def _fits_on(self, gpu: Gpu) -> str:
        """A larger GPU than one that was too small may be enough, another one is not."""
        known = self.known
        if self.outcome == "out of memory" and gpu.memory <= self.gpu.memory:
            return "no"
        used = known._used_of(gpu)
        smallest = known.smallest_memory + used - known.peak_used
        if known.outcome not in ("completed", "stopped", "interrupted"):
            return "no" if smallest > gpu.memory else "unknown"
        if used <= gpu.memory:
            return "yes"
        return "tight" if smallest <= gpu.memory else "no"

    @property
    def known(self) -> Prediction:
        """The run that says most about what the program needs: the one without a limit, if there is one."""
        return self.unlimited or self

    @cached_property
    def smallest_memory(self) -> int:
        """The smallest device on which the program completes: PyTorch releases cached memory if it must."""
        ranked = self._sweep((Setting(self._policy, {}),))
        found = ranked[0].smallest_capacity if ranked else None
        if found is None or self.largest is None:
            return self.peak_used
        return min(self.peak_used, found + self.peak_used - self.largest.reserved)

    # ---- the recording ------------------------------------------------------------------------------------

    @cached_property
    def trace(self) -> Trace | None:
        """The recording of the process and device with the highest peak; None if there is none."""
        return None if self.largest is None else self._open(self.largest)

    def _open(self, use: Use) -> Trace | None:
        if use.recording is None:
            return None
        trace = open_trace(os.path.join(self._folder, use.recording), device=use.device, trusted=True)
        settings = {**trace.settings, "device_total": self.gpu.memory}
        return replace(trace, source=str(self.program), settings=settings)

    @property
    def _policy(self) -> str:
        settings = self.trace.settings if self.trace is not None else {}
        if settings.get("allocator") == "vram":
            return "vram"
        return "torch-expandable" if settings.get("expandable_segments") else "torch"

    def _sweep(self, settings: tuple[Setting, ...], progress: Show | None = None) -> Ranking:
        if self.trace is None or not self.trace.events:
            return Ranking()
        # A program that continued without the memory of a failed request does not need it.
        program = self.trace if self.outcome == "out of memory" else lifetimes(self.trace)
        try:
            return sweep(program, settings, progress=progress)
        except FAILURES as error:  # the prediction does not depend on it
            why = str(error) or type(error).__name__
            self._untried[f"allocators could not be compared, because a replay failed: {why}"] = None
            return Ranking()

    def settings(self, progress: Show | None = None) -> Ranking:
        """What the program would need with other allocators and settings, the best first."""
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be a function, not {type(progress).__name__}")
        return self.known._sweep(SETTINGS, progress)

    def holders(self, by: str = "line") -> list[Group]:
        """Who holds memory at the peak, or when it ran out; `by` is one of `vram.analysis.GROUPINGS`."""
        if by not in GROUPINGS:
            raise ValueError(f"by must be one of {', '.join(GROUPINGS)}, not {shown(by)}")
        if self.trace is None or not self.trace.events:
            return []
        failed = self.outcome == "out of memory" and Action.OOM in self.trace.action
        memory = memory_at(self.trace, find_moment(self.trace, "oom" if failed else "peak").event)
        groups = group_blocks(self.trace, memory.blocks(), by)
        return [replace(group, label=_near(group.label)) for group in groups]

    def save(self, path: str | os.PathLike[str]) -> list[Path]:
        """Write the recording to `path`, and those of other processes and devices beside it.

        `vram explain`, `summary`, `diff` and `serve` open them.
        """
        written: list[Path] = []
        for use in sorted(self.uses, key=lambda each: each is not self.largest):
            trace = self.trace if use is self.largest else self._open(use)
            if trace is not None:
                target = beside(Path(path), _suffix(use)) if written else Path(path)
                convert(trace, "parquet", target)
                written.append(target)
        if not written:
            raise ConfigError("the program left no recording that could be saved")
        return written

    # ---- what is not exact --------------------------------------------------------------------------------

    @property
    def guesses(self) -> list[dict[str, Any]]:
        """Values that the program read and that had to be guessed, with the line that asked."""
        return [guess for each in self._results for guess in each["guesses"]]

    @property
    def unknown(self) -> list[str]:
        """Functions of CUDA that the program called and the null GPU does not know."""
        return sorted({name for each in self._results for name in each["unknown"]})

    @property
    def notes(self) -> list[str]:
        """What else a reader should know."""
        found = [problem for each in self._results for problem in each["problems"]]
        for path in sorted({path for each in self._results for path in each["static_runtimes"]}):
            found.append(f"{path} {STATIC_RUNTIME}")
        found += [_unreported(each) for each in self._results if each["outcome"] == "running"]
        if len({each.device for each in self.uses}) < len(self.uses):
            found.append("several processes share a device: their peaks are added, as if they coincided")
        if self.trace is not None and not self.trace.complete:
            found.append("the recording begins after the start of the program, because it was too long")
        return [*found, *self._untried, *(self.known._untried if self.unlimited else ())]

    # ---- for people and programs --------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        gpu = f"{self.gpu.name} ({format_size(self.gpu.memory)})"
        failure = self.failure
        if self.outcome == "out of memory":
            if failure is None:
                return f"Does not fit {gpu}: the program ran out of memory."
            where = f" at {_near(failure.place)}" if failure.place else ""
            return (
                f"Does not fit {gpu}: ran out of memory in step {failure.steps + 1}{where}, requesting "
                f"{format_size(failure.size)} with {format_size(failure.reserved)} reserved and "
                f"{format_size(failure.free)} free on the device."
            )
        if self.outcome == "failed":
            return f"The program {failure_text(self.status)}; up to there it fitted {gpu}."
        so_far = " so far" if self.outcome == "interrupted" else ""
        if not self.fits:
            return f"Does not fit {gpu}: it lacks {format_size(-self.room)}."
        return f"Fits {gpu}{so_far}, with {format_size(self.room)} to spare."

    def to_json(self) -> dict[str, Any]:
        """Plain data; the command line prints it as JSON."""
        return {
            "program": list(self.program.words),
            "gpu": {"key": self.gpu.key, "name": self.gpu.name, "memory": self.gpu.memory},
            "devices": self.devices,
            "outcome": self.outcome,
            "fits": self.fits if self.outcome != "failed" else None,
            "status": self.status,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "peak_used": self.peak_used,
            "room": self.room,
            "unlimited": self.unlimited and _peaks(self.unlimited),
            "failure": self.failure and asdict(self.failure),
            "caught_failures": sum(each.caught for each in self.failures),
            "error": self.error,
            "processes": [asdict(use) for use in self.uses],
            "gpus": [
                {"key": each.gpu.key, "memory": each.gpu.memory, "fits": each.fits, "room": each.room}
                for each in self.table()
            ],
            "holders": [group.to_json() for group in self.holders()[:MOST_IN_JSON]],
            "settings": [asdict(each) for each in self.settings()],
            "guesses": self.guesses,
            "unknown": self.unknown,
            "notes": self.notes,
            "text": self.text,
        }

    def __repr__(self) -> str:
        return f"<vram.predict.Prediction of {self.program}: {self.text}>"

    def _repr_html_(self) -> str:
        from .html import prediction_html

        return prediction_html(self)


def _near(place: str) -> str:
    """A place with the name of its file relative to the current folder, if it is in there."""
    return place.removeprefix(os.path.join(os.getcwd(), ""))


def _uses(results: list[dict[str, Any]], folder: str) -> list[Use]:
    return [
        Use(
            pid=each["pid"],
            rank=each["rank"],
            device=used["device"],
            allocated=used["peak_allocated"],
            reserved=used["peak_reserved"],
            used=used["peak_used"],
            retries=used["retries"],
            recording=_recording(each["recordings"], place, folder) if used["peak_reserved"] else None,
        )
        for each in results
        for place, used in enumerate(each["devices"])
    ]


def _recording(names: list[str], place: int, folder: str) -> str | None:
    """The file of the process's device: a snapshot has all devices, vram writes one file for each."""
    if not names:
        return None
    name = names[min(place, len(names) - 1)]
    return name if os.path.exists(os.path.join(folder, name)) else None


def _died_of_memory(result: dict[str, Any], status: int) -> bool:
    error = result["error"]
    if error is not None:
        return bool(error["out_of_memory"])
    lived_on = result["outcome"] in ("completed", "stopped", "running")
    return bool(result["failures"]) and status != 0 and not lived_on


def _unreported(result: dict[str, Any]) -> str:
    """What is known of a process that was killed, or is not a Python program."""
    who = f"process {result['pid']}" if result["rank"] is None else f"rank {result['rank']}"
    refused = max((each.get("refused", 0) for each in result["devices"]), default=0)
    last = f"; the last request that the device refused was {format_size(refused)}" if refused else ""
    return (
        f"{who} ended without a report: what it used of the device is exact, what PyTorch allocated and "
        f"reserved is from its last step{last}"
    )


def _peaks(found: Prediction) -> dict[str, Any]:
    return {
        "outcome": found.outcome,
        "peak_allocated": found.peak_allocated,
        "peak_reserved": found.peak_reserved,
        "peak_used": found.peak_used,
    }


def failure_text(status: int) -> str:
    """How a program failed, for a sentence."""
    return f"failed with exit status {status}" if status > 0 else f"was ended by signal {-status}"


def _suffix(use: Use) -> str:
    process = f"pid-{use.pid}" if use.rank is None else f"rank-{use.rank}"
    return f"{process}.cuda-{use.device}"
