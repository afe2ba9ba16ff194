"""One process of a predicted program: records PyTorch's memory and leaves the result in a folder.

The result of a process that used the GPU is PID.json, with a snapshot of PyTorch or a recording of vram
beside it. `vram.predict.program` reads it. Whatever fails here must not change what the program does.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from . import FOLDER, STEPS, facts, tracebacks
from .imports import after_import

__all__ = ["Session", "begin"]

MOST_EVENTS = 1_000_000
"""Events of the recording, about 700 bytes each; of a longer program the last ones are kept."""
MOST_MARKS = 100_000
"""Beginnings and ends of steps and phases; of a longer program the last ones are kept."""
MOST_FAILURES = 20
PROGRESS_SECONDS = 0.25
INTERRUPTED = 128 + 2


def begin() -> None:
    """Begin the session of this process; values are followed even where nothing is recorded."""
    tracebacks.begin()
    after_import("torch", _follow_values)
    folder = os.environ.get(FOLDER)
    if folder:
        steps = os.environ.get(STEPS, "")
        Session(folder, int(steps) if steps.isdecimal() else None).begin()


def _follow_values(torch: Any) -> None:
    """Mirror the values of small tensors; without them, everything that the program reads is a guess."""
    try:
        importlib.import_module(f"{__package__}.values").begin(torch)
    except Exception as error:
        _note("values of tensors cannot be followed", error)


def _note(what: str, error: Exception) -> None:
    """Keep what went wrong for the result."""
    _problems.append(f"{what}: {type(error).__name__}: {error}")


_problems: list[str] = []


class Session:
    """The recording of this process. `finish` may be called any number of times; the first counts."""

    def __init__(self, folder: str, most_steps: int | None) -> None:
        """Prepare; `begin` starts."""
        self.folder = folder
        self.most_steps = most_steps
        self.torch: Any = None
        self.recorder: Any = None  # of vram, where the program installed it in PyTorch
        self.started = time.monotonic()
        self._forget()

    def _forget(self) -> None:
        """Start anew; also in the child of a fork."""
        self.pid = os.getpid()
        self.finished = False
        self.finishing = False  # the result is being written
        self.recording = False
        self.steps = 0
        self.counted: str | None = None  # what a step is: the name of an optimizer, or vram.step
        self.marks: deque[tuple[str, str, int]] = deque(maxlen=MOST_MARKS)
        self.failures: list[dict[str, Any]] = []
        self.peaks_before = facts.peaks()
        self.refusals_before = facts.refusals()
        self.earlier_peaks: dict[int, tuple[int, int]] = {}
        self.told_at = 0.0

    def begin(self) -> None:
        """Wait for PyTorch and vram to be imported, and for the end of the process."""
        after_import("torch", self._torch_imported)
        after_import("vram.core.observer", self._vram_imported)
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._forget)
        os._exit = self._finishing_first(os._exit)  # type: ignore[assignment]

    # ---- PyTorch and vram ---------------------------------------------------------------------------------

    def _torch_imported(self, torch: Any) -> None:
        from multiprocessing import util

        self.torch = torch
        if torch.version.cuda is None:
            self._write(self._result("no cuda"))
            raise SystemExit(f"PyTorch {torch.__version__} was built without CUDA")
        torch.cuda._lazy_call(self._cuda_started)
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_post_hook(self._optimizer_stepped)
        # Children that multiprocessing forks end without atexit.
        util.register_after_fork(self, lambda session: util.Finalize(None, session.finish, exitpriority=-1))

    def _vram_imported(self, observer: Any) -> None:
        observer.marks.add(self._marked)

    def _cuda_started(self) -> None:
        """Called when the program first uses CUDA."""
        self.recording = True
        try:
            self._record(self.torch)
        except Exception as error:
            _note("the memory of the program is not recorded", error)
        self._catch_signals()
        self._tell()

    def _record(self, torch: Any) -> None:
        plugged = sys.modules.get("vram.torch")
        if plugged is not None and plugged.installed():
            self.recorder = plugged.watch(os.path.join(self.folder, f"{self.pid}.vtrace"))
        else:
            memory = torch.cuda.memory
            memory._record_memory_history(stacks="python", context="alloc", max_entries=MOST_EVENTS)
            memory._record_memory_history = lambda *_arguments, **_options: None  # it is on, and stays on
        self._follow_resets(torch._C)
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)

    def _catch_signals(self) -> None:
        """End with a result on Ctrl-C and SIGTERM, unless the program has handlers of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._interrupted)

    def _interrupted(self, _number: int, _frame: FrameType | None) -> None:
        if not self.finishing:
            self._stop("interrupted", INTERRUPTED)

    def _finishing_first(self, leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        """Have a function that ends the process at once leave the result before it does."""

        @functools.wraps(leave)
        def finish_and_leave(status: int) -> NoReturn:
            try:
                self.finish("completed" if status == 0 else "failed")
            finally:
                leave(status)

        return finish_and_leave

    # ---- steps --------------------------------------------------------------------------------------------

    def _optimizer_stepped(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        self._stepped(f"optimizer {id(optimizer)}")

    def _marked(self, stage: str, name: str) -> None:
        self.marks.append((stage, name, time.time_ns() // 1000))
        if stage == "END" and name.startswith("step#"):
            if self.counted != "vram.step":  # marks of the program take precedence over optimizers
                self.counted, self.steps = "vram.step", 0
            self._stepped("vram.step")

    def _stepped(self, what: str) -> None:
        """Count the steps of whatever came first: a program may have several optimizers."""
        self.counted = self.counted or what
        if what != self.counted:
            return
        self.steps += 1
        if time.monotonic() - self.told_at > PROGRESS_SECONDS:
            self._tell()
        if self.most_steps is not None and self.steps >= self.most_steps:
            self._stop("stopped", 0)

    def _stop(self, outcome: str, status: int) -> NoReturn:
        """End the program: the way sys.exit does at first, at once if it went on after that."""
        again = self.finished
        self.finish(outcome)
        if again or threading.current_thread() is not threading.main_thread():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        raise SystemExit(status)

    # ---- running out of memory ----------------------------------------------------------------------------

    def _out_of_memory(self, device: int, size: int, allocated: int, free: int) -> None:
        """Called by PyTorch before it raises; in a backward pass by a thread without a Python stack."""
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(
                {
                    "device": device,
                    "size": size,
                    "free": free,
                    "allocated": self._stat(device, "allocated_bytes.all.current"),
                    "reserved": self._stat(device, "reserved_bytes.all.current"),
                    "steps": self.steps,
                    "place": facts.asker(),
                }
            )

    # ---- the result ---------------------------------------------------------------------------------------

    def _follow_resets(self, functions: Any) -> None:
        """Remember the peaks of a device before the program resets them."""
        reset = functions._cuda_resetPeakMemoryStats

        def keep_and_reset(device: int) -> None:
            self.earlier_peaks[device] = self._peaks(device)
            reset(device)

        functions._cuda_resetPeakMemoryStats = keep_and_reset

    def _peaks(self, device: int) -> tuple[int, int]:
        allocated, reserved = self.earlier_peaks.get(device, (0, 0))
        return (
            max(allocated, self._stat(device, "allocated_bytes.all.peak")),
            max(reserved, self._stat(device, "reserved_bytes.all.peak")),
        )

    def _stat(self, device: int, name: str) -> int:
        """A number of PyTorch's; 0 if it did not start CUDA, or was shown fewer devices."""
        if not self.recording or device >= self.torch.cuda.device_count():
            return 0
        return int(self.torch.cuda.memory_stats(device).get(name, 0))

    def _devices(self) -> list[dict[str, Any]]:
        """What the process used of each device, through PyTorch or another library."""
        found = []
        failed = {failure["device"] for failure in self.failures}
        before = zip(self.peaks_before, self.refusals_before, strict=True)
        after = zip(facts.peaks(), facts.refusals(), strict=True)
        for device, (earlier, (peak, refused)) in enumerate(zip(before, after, strict=True)):
            allocated, reserved = self._peaks(device)
            if reserved or peak > earlier[0] or refused != earlier[1] or device in failed:
                found.append(
                    {
                        "device": device,
                        "peak_allocated": allocated,
                        "peak_reserved": reserved,
                        "peak_used": peak,
                        "retries": self._stat(device, "num_alloc_retries"),
                    }
                )
        return found

    def _result(self, outcome: str) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "rank": facts.rank(),
            "outcome": outcome,
            "torch": getattr(self.torch, "__version__", None),
            "arguments": [str(each) for each in getattr(sys, "argv", [])],
            "seconds": time.monotonic() - self.started,
            "steps": self.steps,
            "devices": self._devices(),
            "failures": self.failures,
            "error": facts.error(),
            "recordings": [],
            "guesses": _guesses(),
            "unknown": facts.unknown(),
            "problems": _problems,
            "static_runtimes": [],
        }

    def _tell(self) -> None:
        """Leave what is known so far, for the progress line and in case that the process ends abruptly."""
        self.told_at = time.monotonic()
        self._write(self._result("running"))

    def finish(self, outcome: str | None = None) -> None:
        """Write the result, if the process used a GPU or failed before."""
        used = self.recording or facts.error() is not None or self._devices()
        if self.finished or not used or self.pid != os.getpid():
            return
        self.finished = self.finishing = True
        result = self._result(outcome or ("failed" if facts.error() else "completed"))
        if self.recording:
            try:
                result["recordings"] = self._recordings()
            except Exception as error:
                _note("the recording is not saved", error)
        result["static_runtimes"] = facts.static_runtimes()
        self._write(result)
        self.finishing = False

    def _recordings(self) -> list[str]:
        if self.recorder is not None:
            self.recorder.close()
            return [os.path.basename(each.path) for each in self.recorder.recorders]
        snapshot = self.torch.cuda.memory._snapshot()
        marks = snapshot.setdefault("external_annotations", [])
        marks += [{"stage": stage, "name": name, "time_us": time_us} for stage, name, time_us in self.marks]
        name = f"{self.pid}.pickle"
        with open(os.path.join(self.folder, name), "wb") as file:
            pickle.dump(snapshot, file, protocol=4)
        return [name]

    def _write(self, result: dict[str, Any]) -> None:
        path = os.path.join(self.folder, f"{self.pid}.json")
        part = f"{path}.part"
        try:
            with open(part, "w", encoding="utf-8") as file:
                json.dump(result, file)
            os.replace(part, path)
        except OSError:  # the folder is gone: nobody waits for the result any more
            self.finished = True


def _guesses() -> list[dict[str, Any]]:
    """What values were guessed, with the line that asked."""
    values = sys.modules.get(f"{__package__}.values")
    return [dataclasses.asdict(each) for each in values.guesses()] if values is not None else []
