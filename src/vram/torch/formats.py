"""Statistics and traces of pools in the formats of PyTorch: its nested statistics, and the dicts that
`torch.cuda.memory._snapshot()` returns, which PyTorch's viewer and `vram.open` read.

Plain data in, plain data out; this needs no PyTorch. `patches` decides when they are used.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vram.core.stats import MEASURES
from vram.trace.model import COLUMNS, Action, Trace
from vram.trace.series import MAPPING_ACTIONS, events_of
from vram.trace.torch_export import to_torch

__all__ = ["ACCUMULATED", "KEYS", "nested_stats", "torch_snapshot"]

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


def torch_snapshot(
    traces: Mapping[int, Trace], *, devices: int = 0, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the dict of torch.cuda.memory._snapshot() for pools by device index, of `devices` in all."""
    written = {
        index: to_torch(replace(_without_growth(trace), device=index))
        for index, trace in sorted(traces.items())
    }
    count = max([devices, *(index + 1 for index in traces)])
    return {
        "segments": [segment for each in written.values() for segment in each["segments"]],
        "device_traces": [
            written[index]["device_traces"][index] if index in written else [] for index in range(count)
        ],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "vram": dict(settings or {}),
        },
        "external_annotations": [],
    }


def _without_growth(trace: Trace) -> Trace:
    """`trace` without the growth of its pool: pages back any address, while PyTorch expects one."""
    kept = events_of(trace, set(Action) - set(MAPPING_ACTIONS))
    columns: dict[str, Any] = {
        name: array(typecode, map(getattr(trace, name).__getitem__, kept))
        for name, typecode in COLUMNS.items()
    }
    return replace(trace, **columns)
