"""A pool as a `Trace`: the events that its journal keeps, and the segments and blocks that it has now.

PyTorch's snapshots, `Pool.patterns`, the manager's dump and the recorder all read pools through this module.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Any

from vram import _native
from vram.core.snapshot import Block, Snapshot, backed_runs
from vram.trace.model import COLUMNS, BlockState, Segment, Trace
from vram.trace.model import Block as TraceBlock
from vram.trace.pieces import rebased
from vram.trace.tables import Tables, make_trace

__all__ = ["device_number", "pool_trace", "trace_segments", "trace_settings"]

_STATES = {"live": BlockState.LIVE, "suspended": BlockState.LIVE, "pending": BlockState.PENDING}


def pool_trace(pool: Any, *, events: bool = True, segments: bool = True) -> Trace:
    """The pool's journal as a trace, with the segments there are now; either part may be left out."""
    tables = Tables()
    # The segments come first: events that happen meanwhile mention every block that they change.
    snapshot = pool.snapshot() if segments else None
    columns, dropped = _journal(pool, tables) if events else (_no_events(), 0)
    trace = make_trace(
        tables,
        columns,
        source=repr(pool),
        device=device_number(pool),
        start_us=(time.time_ns() - time.monotonic_ns()) // 1000,
        dropped=dropped,
        segments=() if snapshot is None else trace_segments(snapshot, tables),
        settings={} if snapshot is None else trace_settings(pool, snapshot),
    )
    return rebased(trace)


def _no_events() -> dict[str, array[int]]:
    return {name: array(typecode) for name, typecode in COLUMNS.items()}


def _journal(pool: Any, tables: Tables) -> tuple[dict[str, array[int]], int]:
    reader = _native.EventReader(pool, tables, 0)
    reader.read_journal()
    views, _marks, dropped = reader.columns()
    columns = _no_events()
    for name, column in columns.items():
        column.frombytes(views[name])
    return columns, dropped


def device_number(pool: Any) -> int:
    """The number of a pool's device in a trace."""
    number = pool.device.name.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def trace_settings(pool: Any, snapshot: Snapshot) -> dict[str, object]:
    """The settings of a trace that ends with `snapshot`: what the pool runs under, and totals."""
    raw = pool.raw_stats()
    return {
        "allocator": "vram",
        "device": pool.device.name,
        "device_total": pool.device.total_memory,
        "reserved": snapshot.reserved,
        "suspended": snapshot.suspended,
        "spilled": snapshot.spilled,
        "other_tags": raw["other_tags"],
        "lost_stacks": raw["lost_stacks"],
        **pool.config(),
    }


def trace_segments(snapshot: Snapshot, tables: Tables) -> Iterator[Segment]:
    """The segments of a snapshot as those of a trace: the runs of blocks that have memory behind them."""
    for segment in snapshot.segments:
        for run in backed_runs(segment):
            yield Segment(
                address=run[0].address,
                total_size=sum(block.size for block in run),
                stream=tables.stream(segment.stream),
                kind=segment.kind,
                is_expandable=not segment.plain,
                blocks=tuple(_block(block, tables) for block in run),
            )


def _block(block: Block, tables: Tables) -> TraceBlock:
    state = _STATES.get(block.state, BlockState.FREE)
    requested = block.requested if state != BlockState.FREE else 0
    return TraceBlock(block.address, block.size, requested, state, tables.stack(block.stack))
