"""Recording PyTorch's own allocator: `vram.torch.watch(path)`, when vram is not installed in PyTorch.

PyTorch keeps a history in a ring. It is read periodically, and new events go to a trace file.
`vram.trace.torch_snapshot` reads the snapshot, `vram.trace` writes the file.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vram.errors import DeviceError, TraceError
from vram.observe.recorder import DEFAULT_KEEP
from vram.observe.recording import Recording, beside, path_of_rank, require_writable
from vram.observe.remote_agent import read_history
from vram.sizes import parse_size
from vram.trace import Segment, Trace, TraceWriter
from vram.trace.torch_snapshot import decode_snapshot, is_used

__all__ = ["Watch"]

DEFAULT_ENTRIES = 200_000
"""Events that PyTorch keeps between two reads."""
MOST_SHARE = 0.05
"""Maximum share of the program's time spent reading: the more a read costs, the less often it happens."""
TAIL = 8
"""Number of events that identify where the last read ended."""

_log = logging.getLogger("vram")


class Watch(Recording):
    """A recording of PyTorch's allocator, created by `vram.torch.watch`. Any thread may use it."""

    _title = "vram.torch.Watch"

    def __init__(
        self,
        torch: Any,
        path: str | os.PathLike[str],
        *,
        every: float = 5.0,
        entries: int = DEFAULT_ENTRIES,
        rotate: int | str | None = None,
        keep: int = DEFAULT_KEEP,
    ) -> None:
        """Begin; see `vram.torch.watch`."""
        super().__init__(path_of_rank(Path(path)))
        for other in Watch.open_ones():
            raise DeviceError(f"PyTorch is watched already, into {other.path}; close that one first")
        require_writable(self.path)
        self._torch = torch
        self._memory = torch.cuda.memory
        self._options: dict[str, Any] = {
            "piece_bytes": None if rotate is None else parse_size(rotate),
            "max_pieces": keep,
        }
        self._every = every
        self._files: dict[int, _DeviceFile] = {}
        self._marks: deque[tuple[str, str, int]] = deque()
        self._entries = entries
        self._kept_by_program = _keeps_history(torch)
        self._record_history: Callable[..., None] = self._memory._record_memory_history
        _begin_history(self._record_history, entries)
        self._memory._record_memory_history = self._history_changes
        _observe_out_of_memory(torch)
        self._start("vram-watch")

    def _writers(self) -> list[TraceWriter]:
        return [file.writer for file in self._files.copy().values()]

    def mark(self, stage: str, name: str) -> None:
        """Record the "START" or "END" of `name` at the current time."""
        self._marks.append((stage, name, time.time_ns() // 1000))

    def _run(self) -> None:
        pause = self._every
        while not self._ending.wait(pause):
            begin = time.monotonic()
            with self._lock:
                self._write_or_fail()
            pause = max(self._every, (time.monotonic() - begin) / MOST_SHARE)

    def _write_or_fail(self) -> None:
        try:
            if not self.closed:
                self._write()
        except Exception as error:
            self._fail(error)

    def _history_changes(self, *args: Any, **kwargs: Any) -> None:
        """The program switches PyTorch's history on or off, which this recording needs to stay on."""
        with self._lock:
            self._write_or_fail()
            self._record_history(*args, **kwargs)
            self._kept_by_program = bool(args[0] if args else kwargs.get("enabled", "all"))
            if not self._kept_by_program and not self.closed:
                _begin_history(self._record_history, self._entries)
                for file in self._files.values():
                    file.begin_again()

    def _write(self) -> None:
        """Each device has a file from its first event on; marks wait for the first file."""
        snapshot = read_history(self._torch)
        devices = {
            *self._files,
            *(device for device, events in enumerate(snapshot.get("device_traces", ())) if is_used(events)),
            *(segment.get("device", 0) for segment in snapshot.get("segments", ())),
        }
        marked = [self._marks.popleft() for _ in range(len(self._marks))] if devices else []
        for device in sorted(devices):
            self._file(device).write(snapshot, marked)

    def _file(self, device: int) -> _DeviceFile:
        if device not in self._files:
            path = beside(self.path, f"cuda:{device}") if self._files else self.path
            self._files[device] = self._new_file(path, device)
        return self._files[device]

    def _new_file(self, path: Path, device: int) -> _DeviceFile:
        try:
            return _DeviceFile(path, device, self._options)
        except TraceError as error:
            if not error.facts.get("in_use"):
                raise
        own = beside(path, f"pid-{os.getpid()}")
        _log.warning("another recording is being written to %s; this one goes to %s", path, own)
        return _DeviceFile(own, device, self._options)

    def files(self) -> list[tuple[Path, str]]:
        """The files, and the devices whose memory they have."""
        return [(file.path, f"cuda:{device}") for device, file in self._files.copy().items()]

    def _finish(self) -> None:
        self._write()
        if not self._files:  # no device was used
            self._file(0)
            self._write()
        for file in self._files.values():
            file.close()

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        self._memory._record_memory_history = self._record_history

    def _stop(self) -> None:
        """Turn off PyTorch's history, unless the program has turned it on itself."""
        self._memory._record_memory_history = self._record_history
        if not self._kept_by_program:
            with contextlib.suppress(RuntimeError):
                self._record_history(enabled=None)


class _DeviceFile:
    """The events of one device that have been read."""

    def __init__(self, path: Path, device: int, options: dict[str, Any]) -> None:
        self.device = device
        self.path = path
        self._start_us = time.time_ns() // 1000
        self.writer = TraceWriter(path, device=device, start_us=self._start_us, **options)
        self._tail: list[tuple[Any, ...]] = []
        self._marks_seen = 0
        self._segments: tuple[Segment, ...] = ()
        self._settings: dict[str, object] = {}

    def write(self, snapshot: dict[str, Any], marked: Sequence[tuple[str, str, int]]) -> None:
        """Append the new events of a snapshot and the program's marks."""
        traces = list(snapshot.get("device_traces", ()))
        events = traces[self.device] if self.device < len(traces) else []
        first = self._first_new(events)
        ran_over = bool(self._tail and events and first == 0)
        new = events[first:]
        if new:
            self._tail = [_identity(event) for event in events[-TAIL:]]
        traces[self.device : self.device + 1] = [new]
        trace = decode_snapshot({**snapshot, "device_traces": traces}, self.device)
        offset = trace.start_us - self._start_us if new else -self._start_us
        theirs = [(mark.stage, mark.name, mark.time_us + offset) for mark in trace.annotations]
        ours = [(stage, name, time_us - self._start_us) for stage, name, time_us in marked]
        for mark in sorted([*theirs[self._marks_seen :], *ours], key=lambda each: each[2]):
            self.writer.annotate(*mark)
        self._marks_seen = len(theirs)
        self._append(trace, offset, ran_over=ran_over)
        self._settings = {"allocator": "torch", **trace.settings}

    def begin_again(self) -> None:
        """All events of the next snapshot are new."""
        self._tail = []

    def _first_new(self, events: Sequence[dict[str, Any]]) -> int:
        """Return the index of the first event that the last read did not have; 0 if none of those is left."""
        for end in range(len(events) if self._tail else 0, 0, -1):
            if _identity(events[end - 1]) != self._tail[-1]:
                continue
            before = [_identity(event) for event in events[max(0, end - TAIL) : end]]
            if before == self._tail[-len(before) :]:
                return end
        return 0

    def _append(self, trace: Trace, offset: int, *, ran_over: bool) -> None:
        stacks = [self.writer.stack(trace.frames_of(number)) for number in range(len(trace.stacks))]
        streams = [self.writer.stream(handle) for handle in trace.streams]
        tags = [self.writer.tag(name) for name in trace.tags]
        self.writer.append(
            {
                "action": trace.action,
                "stream": array("I", map(streams.__getitem__, trace.stream)),
                "address": trace.address,
                "size": trace.size,
                "time_us": array("q", [time_us + offset for time_us in trace.time_us]),
                "stack": array("I", map(stacks.__getitem__, trace.stack)),
                "tag": array("I", map(tags.__getitem__, trace.tag)),
            },
            dropped=int(ran_over),
        )
        self._segments = tuple(_renumbered(segment, streams, stacks) for segment in trace.segments)

    def close(self) -> None:
        self.writer.close(self._segments, self._settings)


def _identity(event: dict[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes an event from its neighbours."""
    return (*(event.get(key) for key in ("action", "addr", "device_free", "size", "stream", "time_us")),)


def _renumbered(segment: Segment, streams: Sequence[int], stacks: Sequence[int]) -> Segment:
    blocks = tuple(replace(block, stack=stacks[block.stack]) for block in segment.blocks)
    return replace(segment, stream=streams[segment.stream], stack=stacks[segment.stack], blocks=blocks)


# ---- PyTorch's side ---------------------------------------------------------------------------------------


def _keeps_history(torch: Any) -> bool:
    """Whether the program has switched PyTorch's history on, as far as this version and allocator tell."""
    try:
        # Before PyTorch has used CUDA, it has no allocator to ask, and crashes.
        return bool(torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled())
    except (AttributeError, RuntimeError):
        return False


def _begin_history(record: Callable[..., None], entries: int) -> None:
    """Make PyTorch keep Python stacks and `entries` events, with the arguments that this version accepts."""
    wanted = {"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": entries}
    try:
        taken = inspect.signature(record).parameters
    except (TypeError, ValueError):
        taken = inspect.signature(lambda enabled, **_more: None).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        wanted = {name: value for name, value in wanted.items() if name in taken}
    record(**wanted)


def _observe_out_of_memory(torch: Any) -> None:
    """Register once per process: PyTorch offers no way to remove an observer."""
    global _observing
    attach = next(
        (
            found
            for name in ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")
            if (found := getattr(torch._C, name, None)) is not None
        ),
        None,
    )
    if attach is None:
        _log.warning("this version of PyTorch has no out-of-memory observer; the recording may miss it")
    elif not _observing:
        attach(_out_of_memory)
        _observing = True


def _out_of_memory(_device: int, _size: int, _allocated: int, _free: int) -> None:
    """Called by PyTorch without its locks, before it raises: the program may not live much longer."""
    for watch in Watch.open_ones():
        try:
            watch.flush()
        except Exception as error:
            _log.error("failed to write the events before memory ran out to %s: %s", watch.path, str(error))


_observing = False
