"""Recordings of jobs that never ran.

`trace_of` takes events as they are; `Job` places allocations as PyTorch's default allocator does and records
them likewise. `Job.truth` has what was really held after each event, for tests of what is read back.
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vram.trace import Trace, open_trace

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FIRST_ADDRESS = 0x7F00_0000_0000


def trace_of(events: Sequence[tuple[int, ...]], **more: Any) -> Trace:
    """Events as (action, address, size) or (action, address, size, stack), a microsecond apart."""
    action, address, size, stack = zip(*((*event, 0)[:4] for event in events), strict=True)
    columns: dict[str, Any] = {
        "action": array("B", action),
        "stream": array("I", [0] * len(events)),
        "address": array("Q", address),
        "size": array("Q", size),
        "time_us": array("q", range(len(events))),
        "stack": array("I", stack),
    }
    made: dict[str, Any] = {"streams": (0,), "frames": (), "stacks": ((),), **columns, **more}
    return Trace(source="made", device=0, devices=(0,), start_us=0, timed=True, **made)


@dataclass
class Piece:
    """A block: `state` is "inactive", "active_allocated" or "active_pending_free"."""

    address: int
    size: int
    state: str = "inactive"
    requested: int = 0
    frames: list[Any] = field(default_factory=list)


@dataclass
class Held:
    """A segment."""

    address: int
    size: int
    stream: int
    small: bool
    pieces: list[Piece]

    @property
    def idle(self) -> bool:
        return all(piece.state == "inactive" for piece in self.pieces)


class Job:
    """Ask it for memory, and it records. Time goes on by 10 µs an event."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        self.held: list[Held] = []
        self.truth: list[tuple[set[tuple[int, ...]], set[tuple[int, ...]]]] = []
        self.settings = settings or {}
        self._next = FIRST_ADDRESS

    # ---- what a program does ----

    def alloc(self, size: int, line: int = 1, stream: int = 0, block: int | None = None) -> int:
        """Allocate; returns the address. `block` is the size it is rounded to, if not to 512 bytes."""
        rounded = block or max(512, -(-size // 512) * 512)
        small = size <= MIB
        fitting = [
            (piece.size, held.address, held, piece)
            for held in self.held
            if (held.stream, held.small) == (stream, small)
            for piece in held.pieces
            if piece.state == "inactive" and piece.size >= rounded
        ]
        held, piece = min(fitting, key=lambda each: each[:2])[2:] if fitting else self._grow(rounded, stream)
        if piece.size - rounded > (0 if small else MIB):
            rest = Piece(piece.address + rounded, piece.size - rounded)
            held.pieces.insert(held.pieces.index(piece) + 1, rest)
            piece.size = rounded
        piece.state, piece.requested = "active_allocated", size
        piece.frames = [{"filename": "site-packages/torch/nn/linear.py", "line": 9, "name": "forward"}]
        piece.frames.append({"filename": "train.py", "line": line, "name": "step"})
        self._record("alloc", piece.address, size, stream, piece.frames)
        return piece.address

    def free(self, address: int, *, pending: bool = False) -> None:
        """Free; `pending` leaves the memory to another stream's work, until `complete`."""
        held, piece = self._find(address)
        piece.state = "active_pending_free"
        self._record("free_requested", address, piece.requested, held.stream)
        if not pending:
            self.complete(address)

    def complete(self, address: int) -> None:
        """The memory of a free is free, and merges with its neighbours."""
        held, piece = self._find(address)
        size, piece.state, piece.requested = piece.requested, "inactive", 0
        merged: list[Piece] = []
        for each in held.pieces:
            if merged and merged[-1].state == each.state == "inactive":
                merged[-1].size += each.size
            else:
                merged.append(each)
        held.pieces = merged
        self._record("free_completed", address, size, held.stream)

    def empty_cache(self) -> None:
        """Give idle segments back."""
        for held in [held for held in self.held if held.idle]:
            self.held.remove(held)
            self._record("segment_free", held.address, held.size, held.stream)

    def out_of_memory(self, size: int, device_free: int, line: int = 99) -> None:
        """A request fails."""
        frames = [{"filename": "train.py", "line": line, "name": "step"}]
        self._record("oom", 0, size, 0, frames, device_free=device_free)

    def mark(self, name: str, stage: str = "START") -> None:
        """Annotate what comes next."""
        self.marks.append({"name": name, "stage": stage, "device": 0, "time_us": self._time() - 5})

    # ---- what is recorded ----

    def snapshot(self, since: int = 0) -> dict[str, Any]:
        """The recording; its ring lost the events before `since`."""
        return {
            "segments": [self._segment(held) for held in self.held],
            "device_traces": [self.events[since:]],
            "allocator_settings": self.settings,
            "external_annotations": self.marks,
        }

    def save(self, path: Path, since: int = 0) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot(since), protocol=4))
        return path

    def trace(self, since: int = 0) -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            return open_trace(self.save(Path(folder, "job.pickle"), since), trusted=True)

    def _grow(self, size: int, stream: int) -> tuple[Held, Piece]:
        small = size <= MIB
        bytes_taken = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        piece = Piece(self._next, bytes_taken)
        held = Held(self._next, bytes_taken, stream, small, [piece])
        self._next += bytes_taken + 64 * MIB
        self.held.append(held)
        self._record("segment_alloc", held.address, held.size, stream)
        return held, piece

    def _find(self, address: int) -> tuple[Held, Piece]:
        return next((held, piece) for held in self.held for piece in held.pieces if piece.address == address)

    def _time(self) -> int:
        return 1_000_000 + 10 * len(self.events)

    def _record(
        self, action: str, address: int, size: int, stream: int, frames: Any = (), **more: Any
    ) -> None:
        where = more or {"addr": address}
        event = {"action": action, "size": size, "stream": stream, "time_us": self._time(), **where}
        self.events.append({**event, "frames": list(frames)})
        in_use = {
            (piece.address, piece.size, piece.requested, piece.state == "active_pending_free")
            for held in self.held
            for piece in held.pieces
            if piece.state != "inactive"
        }
        self.truth.append((in_use, {(held.address, held.size) for held in self.held}))

    def _segment(self, held: Held) -> dict[str, Any]:
        return {
            "device": 0,
            "address": held.address,
            "total_size": held.size,
            "stream": held.stream,
            "segment_type": "small" if held.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": piece.address,
                    "size": piece.size,
                    "requested_size": piece.requested,
                    "state": piece.state,
                    "frames": piece.frames if piece.state != "inactive" else [],
                }
                for piece in held.pieces
            ],
        }
