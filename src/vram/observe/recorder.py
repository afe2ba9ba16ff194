"""Recording a pool: `vram.record(pool, path)` writes every event to a trace file while the program runs.

This module decides when and where to write. Events come from the native core as columns
(native/bindings/recording.cpp), `vram.trace` writes the file, marks come through `vram.core.observer`.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from array import array
from pathlib import Path
from typing import Any

from vram import _native
from vram.arguments import require_label, require_path, shown, whole_number
from vram.core.closing import Closing
from vram.core.journal import device_number, trace_segments, trace_settings
from vram.core.manager import MemoryManager
from vram.core.pool import Pool
from vram.errors import ConfigError, DeviceError, OutOfMemory, TraceError, VramError
from vram.observe.recording import Recording, beside, close_after, path_of_rank, require_writable
from vram.sizes import parse_size
from vram.trace import Action, Segment, TraceWriter
from vram.trace.checked import MAX_INT64

__all__ = ["PoolsRecorder", "Recorder", "record", "record_pools"]

MOST_WAITING = 4 << 20
"""Events the pool keeps until they are written, 56 bytes each; further ones are dropped and counted."""
LOOK_SECONDS, BUSY_SECONDS = 0.1, 0.01
"""How often the writing thread collects events, normally and while there are many: events that are collected
soon are still in the processor's caches."""
WRITE_SECONDS = 0.5
"""The longest time before events are in the file: what a crash can lose."""
WRITE_EVENTS = 1 << 16
"""This many events are written sooner; a quarter of them within one look count as many."""
DEFAULT_KEEP = 8
"""Files of a rotating recording that are kept."""

_log = logging.getLogger("vram")


def record(
    pool: Pool,
    path: str | os.PathLike[str],
    *,
    stacks: str | None = "python",
    rotate: int | str | None = None,
    keep: int = DEFAULT_KEEP,
) -> Recorder:
    """Write everything `pool` does to the file `path`, until `close()` or the end of a `with` block.

    Allocations that are live at the beginning come first. `stacks="python"` records each allocation with the
    calls that made it; None leaves them out. A file that another recording of any process is written to is
    refused with a TraceError: give each its own. With `rotate` (a size, such as "256MiB") a file of that size
    is renamed to `path.000001` and so on; the last `keep` files stay. A crash of the process loses at most
    half a second; `vram.open(path)` reads what is there. Needs `pip install "vram[trace]"`.
    """
    return Recorder(pool, path, stacks=stacks, rotate=rotate, keep=keep)


class Recorder(Recording):
    """A recording under way, created by `vram.record`. Any thread may use it."""

    _title = "vram.Recorder"

    def __init__(
        self,
        pool: Pool,
        path: str | os.PathLike[str],
        *,
        stacks: str | None = "python",
        rotate: int | str | None = None,
        keep: int = DEFAULT_KEEP,
    ) -> None:
        """Start to record; see `vram.record`."""
        _check(pool, stacks, keep)
        super().__init__(Path(require_path(path)))
        self.pool = pool
        self._writer = TraceWriter(
            self.path,
            device=device_number(pool),
            start_us=time.time_ns() // 1000,
            piece_bytes=None if rotate is None else parse_size(rotate),
            max_pieces=keep,
        )
        self._marks: dict[int, tuple[str, str]] = {}
        self._mark_numbers = itertools.count()
        self._written_at = time.monotonic()
        pool._keep_stacks(stacks == "python", self)
        self._start_ns = time.monotonic_ns()
        self._events = _native.EventReader(pool, self._writer, self._start_ns)
        self._events.record(MOST_WAITING)
        pool._recorder = self
        self._start("vram-record")

    def _writers(self) -> tuple[TraceWriter]:
        return (self._writer,)

    def mark(self, stage: str, name: str) -> None:
        """Note the "START" or "END" of the phase `name`, between the events before and after."""
        if stage not in ("START", "END"):
            raise ConfigError(f"a mark is the START or the END of a phase, not {shown(stage)}", value=stage)
        require_label(name, "the name of a phase")
        number = next(self._mark_numbers)
        self._marks[number] = (stage, name)
        self._events.mark(number)

    def note_failure(self, error: OutOfMemory) -> None:
        """Write the failure of a request that began before the recording; the pool records the others."""
        if not isinstance(error, OutOfMemory):
            raise TypeError(f"a failed request is a vram.OutOfMemory, not {type(error).__name__}")
        with self._lock:
            if self.closed:
                return
            self._write()
            self._writer.append(
                {
                    "action": bytes([Action.OOM]),
                    "stream": array("I", [self._writer.stream(error.stream)]),
                    "address": array("Q", [error.report["device_free"]]),
                    "size": array("Q", [min(error.requested, MAX_INT64)]),
                    "time_us": array("q", [(time.monotonic_ns() - self._start_ns) // 1000]),
                    "stack": array("I", [self._writer.stack(_native.stack_here())]),
                }
            )

    # ---- writing ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._ending.wait(pause):
            with self._lock:
                if not self.closed:
                    pause = BUSY_SECONDS if self._look() >= WRITE_EVENTS // 4 else LOOK_SECONDS

    def _look(self) -> int:
        """Write if it is time to; returns the number of events."""
        try:
            waiting = self._events.collect()
            late = time.monotonic() - self._written_at >= WRITE_SECONDS
            if waiting >= WRITE_EVENTS or (waiting and late):
                self._write()
        except Exception as error:
            self._fail(error)
            return 0
        return waiting

    def _write(self) -> None:
        self._events.collect()
        columns, marked, dropped = self._events.columns()
        for number, time_us in marked:
            self._writer.annotate(*self._marks.pop(number), time_us)
        if len(columns["action"]) or dropped:
            self._writer.append(columns, dropped=dropped)
        elif marked:
            self._writer.flush()
        self._written_at = time.monotonic()

    # ---- the end ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        segments, settings = self._ending_state()
        self._write()
        self._writer.close(segments, settings)

    def _stop(self) -> None:
        self._events.record(0)
        self.pool._keep_stacks(False, self)
        self.pool._recorder = None

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        self.pool._recorder = None

    def _ending_state(self) -> tuple[list[Segment], dict[str, object]]:
        """Taken before the last events, which therefore mention every block of it."""
        snapshot = self.pool.snapshot()
        return list(trace_segments(snapshot, self._writer)), trace_settings(self.pool, snapshot)


def _check(pool: Pool, stacks: str | None, keep: int) -> None:
    if not isinstance(pool, Pool):
        raise TypeError(f"a pool is recorded, not {type(pool).__name__}")
    if stacks not in ("python", None):
        raise ConfigError(f'stacks is "python" or None, not {shown(stacks)}', value=stacks)
    whole_number(keep, "keep", least=1)
    if pool.closed:
        raise DeviceError("the pool is closed, so there is nothing to record", code="closed")
    if pool._recorder is not None:
        raise VramError(f"the pool is being recorded to {pool._recorder.path}; close that recorder first")


# ---- all pools of a manager -------------------------------------------------------------------------------


class PoolsRecorder(Closing):
    """A recording of every pool of a manager, created by `record_pools`: one file per device and process."""

    def __init__(self, manager: MemoryManager, path: str | os.PathLike[str], **options: Any) -> None:
        """Record existing pools from now on, and new ones from their first allocation on."""
        self.path = path_of_rank(Path(path))
        require_writable(self.path)
        self.recorders: list[Recorder] = []
        self._options = options
        self._begun = False
        self._end = manager._follow(self._record)
        self._begun = True

    def _record(self, pool: Pool) -> None:
        names = [recorder.pool.device.name for recorder in self.recorders]
        again = f"-{names.count(pool.device.name) + 1}" if pool.device.name in names else ""
        path = beside(self.path, pool.device.name + again) if names else self.path
        try:
            self.recorders.append(self._recorder(pool, path))
        except (VramError, OSError) as error:
            if not self._begun:
                raise
            _log.error("%s is not recorded to %s: %s", pool.device.name, path, error)

    def _recorder(self, pool: Pool, path: Path) -> Recorder:
        try:
            return Recorder(pool, path, **self._options)
        except TraceError as error:
            if not error.facts.get("in_use"):
                raise
        own = beside(path, f"pid-{os.getpid()}")
        _log.warning("another recording is being written to %s; this one goes to %s", path, own)
        return Recorder(pool, own, **self._options)

    def __exit__(self, *exception: object) -> None:
        close_after(exception, self)

    def close(self) -> None:
        """End every recording; new pools are not recorded."""
        self._end()
        for recorder in self.recorders:
            recorder.close()


def record_pools(manager: MemoryManager, path: str | os.PathLike[str], **options: Any) -> PoolsRecorder:
    """Record all pools of `manager`, with the options of `vram.record`.

    The first goes to `path`, others to a file beside it, as `run.cuda-1.vtrace` beside `run.vtrace`. In a
    job of several processes each has files of its own: `run.rank-3.vtrace` where the launcher numbers them,
    as torchrun, mpirun and srun do, and `run.pid-4711.vtrace` where another process records to the same
    path.
    """
    return PoolsRecorder(manager, path, **options)
