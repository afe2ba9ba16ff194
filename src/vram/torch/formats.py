"""Statistics, snapshot and journal of a pool in PyTorch's formats: its nested statistics, and the dicts of
`torch.cuda.memory._snapshot()`, which PyTorch's viewer and `vram.open` read.

This module converts plain data and does not need PyTorch. `patches` decides when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vram.core.snapshot import Block, Segment, Snapshot, Stack, backed_runs
from vram.core.stats import MEASURES

__all__ = ["ACCUMULATED", "KEYS", "DeviceRecord", "nested_stats", "torch_snapshot"]

METERS = (
    *("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes"),
    *("active_bytes", "inactive_split_bytes", "requested_bytes"),
)
POOLS = ("all", "small_pool", "large_pool")
COUNTERS = (
    *("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"),
)
KEYS: tuple[str, ...] = (
    *(f"{meter}.{pool}.{measure}" for meter in METERS for pool in POOLS for measure in MEASURES),
    *(f"{kind}.{measure}" for kind in ("oversize_allocations", "oversize_segments") for measure in MEASURES),
    *COUNTERS,
    "max_split_size",
)
"""All keys of torch.cuda.memory_stats."""
ACCUMULATED = frozenset(key for key in KEYS if key.endswith((".allocated", ".freed"))) | frozenset(COUNTERS)
"""The keys that only increase until reset_accumulated_memory_stats."""

_BLOCK_STATES = {
    "live": "active_allocated",
    "suspended": "active_allocated",
    "pending": "active_pending_free",
    "cached": "inactive",
    "free": "inactive",
}
# An immediate free is both of torch's steps.
_ACTIONS: dict[str, tuple[str, ...]] = {
    "allocate": ("alloc",),
    "free": ("free_requested", "free_completed"),
    "free_pending": ("free_requested",),
    "free_complete": ("free_completed",),
    "out_of_memory": ("oom",),
}

JournalEvent: TypeAlias = tuple[int, int, str, int, int, int, str | None, int, Stack]
"""An event of `Pool.journal()`: sequence, time_ns, action, address, size, stream, tag, serial, stack."""


# ---- statistics -------------------------------------------------------------------------------------------


def nested_stats(stats: Mapping[str, float], since: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return a pool's `Stats` like torch.cuda.memory_stats_as_nested_dict, with exactly the same keys.

    `since` has the accumulated numbers at the time of their reset. Missing keys count as 0.
    """
    start = since or {}
    nested: dict[str, Any] = {}
    for key in KEYS:
        *path, last = key.split(".")
        place = nested
        for name in path:
            place = place.setdefault(name, {})
        place[last] = int(stats.get(key, 0)) - int(start.get(key, 0))
    return nested


# ---- snapshots --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceRecord:
    """The data of one device: its snapshot and the events of its journal, in order."""

    snapshot: Snapshot
    events: Iterable[JournalEvent] = ()


def torch_snapshot(
    records: Mapping[int, DeviceRecord],
    *,
    devices: int = 0,
    epoch_ns: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the dict of torch.cuda.memory._snapshot() for pools by device index, out of `devices` in total.

    `epoch_ns` is added to the journal's times, which count from an arbitrary start. Growth of a pool is not
    among the events: pages have no fixed address, and torch requires one.
    """
    frames = _Frames()
    count = max([devices, *(index + 1 for index in records)])
    return {
        "segments": [
            segment
            for index, record in sorted(records.items())
            for whole in record.snapshot.segments
            for segment in _segments(whole, index, frames)
        ],
        "device_traces": [
            list(_entries(records[index], epoch_ns, frames)) if index in records else []
            for index in range(count)
        ],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "vram": dict(settings or {}),
        },
        "external_annotations": [],
    }


class _Frames:
    """Stacks as lists of dicts. Equal stacks share one list, as in torch, which keeps files small."""

    def __init__(self) -> None:
        self._lists: dict[Stack, list[dict[str, Any]]] = {}
        self._dicts: dict[Any, dict[str, Any]] = {}

    def of(self, stack: Stack) -> list[dict[str, Any]]:
        found = self._lists.get(stack)
        if found is None:
            found = self._lists[stack] = [self._frame(frame) for frame in stack]
        return found

    def _frame(self, frame: Any) -> dict[str, Any]:
        return self._dicts.setdefault(
            frame, {"filename": frame.filename, "line": frame.line, "name": frame.name}
        )


def _segments(segment: Segment, device: int, frames: _Frames) -> Iterator[dict[str, Any]]:
    for blocks in backed_runs(segment):
        live = [block for block in blocks if block.state in ("live", "suspended")]
        pending = sum(block.size for block in blocks if block.state == "pending")
        allocated = sum(block.size for block in live)
        yield {
            "device": device,
            "address": blocks[0].address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": allocated,
            "active_size": allocated + pending,
            "requested_size": sum(block.requested for block in live),
            "stream": segment.stream,
            "segment_type": segment.kind,
            "segment_pool_id": (0, 0),
            "is_expandable": not segment.plain,
            "frames": [],
            "blocks": [_block(block, frames) for block in blocks],
        }


def _block(block: Block, frames: _Frames) -> dict[str, Any]:
    used = block.state in ("live", "pending")
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested if used else 0,
        "state": _BLOCK_STATES[block.state],
        "frames": frames.of(block.stack) if used else [],
    }


# ---- events -----------------------------------------------------------------------------------------------


def _entries(record: DeviceRecord, epoch_ns: int, frames: _Frames) -> Iterator[dict[str, Any]]:
    for _sequence, time_ns, action, address, size, stream, tag, _serial, stack in record.events:
        for name in _ACTIONS.get(action, ()):
            yield {
                "action": name,
                ("device_free" if name == "oom" else "addr"): address,
                "size": size,
                "stream": stream,
                "time_us": (time_ns + epoch_ns) // 1000,
                "compile_context": "N/A",
                "user_metadata": tag or "",
                "frames": frames.of(stack if action == "allocate" else ()),
            }
