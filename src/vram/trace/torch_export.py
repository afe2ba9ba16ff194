"""A Trace as the pickle that PyTorch's memory viewer opens: the dicts of `torch.cuda.memory._snapshot()`.

The counterpart of `torch_snapshot`, which reads the same trace back. Needs no PyTorch.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, BinaryIO

from .model import Action, Block, BlockState, Segment, Trace

__all__ = ["to_torch", "write_torch"]

PROTOCOL = 4  # the highest the viewer knows

_STATES = {
    BlockState.LIVE: "active_allocated",
    BlockState.PENDING: "active_pending_free",
    BlockState.FREE: "inactive",
}


def write_torch(trace: Trace, file: BinaryIO) -> None:
    """Write `trace` as a pickled snapshot."""
    pickle.dump(to_torch(trace), file, protocol=PROTOCOL)


def to_torch(trace: Trace) -> dict[str, Any]:
    """Return `trace` as a snapshot; frames and stacks are shared, as PyTorch shares them."""
    frames = [{"filename": each.filename, "line": each.line, "name": each.name} for each in trace.frames]
    stacks = [[frames[index] for index in stack] for stack in trace.stacks]
    events: list[list[dict[str, Any]]] = [[] for _ in range(trace.device + 1)]
    events[trace.device] = list(_entries(trace, stacks))
    return {
        "segments": [_segment(segment, trace, stacks) for segment in trace.segments],
        "device_traces": events,
        "allocator_settings": dict(trace.settings),
        "external_annotations": [
            {
                "stage": mark.stage,
                "name": mark.name,
                "device": trace.device,
                "time_us": trace.start_us + mark.time_us,
            }
            for mark in trace.annotations
        ],
    }


def _entries(trace: Trace, stacks: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    names = [action.name.lower() for action in Action]
    columns = (trace.action, trace.address, trace.size, trace.stream, trace.time_us, trace.tag, trace.stack)
    for action, address, size, stream, time, tag, stack in zip(*columns, strict=True):
        entry: dict[str, Any] = {
            "action": names[action],
            "device_free" if action == Action.OOM else "addr": address,
            "size": size,
            "stream": trace.streams[stream],
        }
        if trace.timed:
            entry["time_us"] = trace.start_us + time
        yield {
            **entry,
            "compile_context": "N/A",
            "user_metadata": trace.tags[tag],
            "frames": stacks[stack],
        }


def _segment(segment: Segment, trace: Trace, stacks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    live = [block for block in segment.blocks if block.state == BlockState.LIVE]
    active = [block for block in segment.blocks if block.state != BlockState.FREE]
    return {
        "device": trace.device,
        "address": segment.address,
        "total_size": segment.total_size,
        "allocated_size": sum(block.size for block in live),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested_size for block in active),
        "stream": trace.streams[segment.stream],
        "segment_type": segment.kind,
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable,
        "frames": stacks[segment.stack],
        "blocks": [_block(block, stacks) for block in segment.blocks],
    }


def _block(block: Block, stacks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested_size,
        "state": _STATES[block.state],
        "frames": stacks[block.stack],
    }
