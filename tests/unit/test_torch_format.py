"""A pool in PyTorch's shapes: its keys, and a snapshot that can be opened as one of PyTorch's."""

from __future__ import annotations

import pickle
from array import array
from pathlib import Path
from typing import Any

import vram
from vram.core.journal import trace_segments
from vram.core.snapshot import PAGE_BYTES, Block, Segment, Snapshot
from vram.torch.formats import ACCUMULATED, KEYS, nested_stats, torch_snapshot
from vram.trace.model import COLUMNS, Action, BlockState, Trace
from vram.trace.tables import Tables, make_trace

MIB = 1 << 20
BASE = 1 << 40


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def opened(snapshot: dict[str, Any], tmp_path: Path) -> vram.trace.Trace:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    return vram.open(path)


def segment_of(*parts: tuple[int, str], plain: bool = False) -> Segment:
    """A segment of blocks of (bytes, state), at a page's beginning."""
    blocks, address = [], BASE
    for serial, (size, state) in enumerate(parts):
        blocks.append(Block(address, size, size - 8 if state == "live" else 0, state, 0, None, serial))
        address += size
    return Segment(BASE, address - BASE, 0, "large", plain, tuple(blocks))


def state_of(*segments: Segment) -> Trace:
    tables = Tables()
    snapshot = Snapshot("cuda:0", segments, 0, 0, 0, 0)
    columns = {name: array(typecode) for name, typecode in COLUMNS.items()}
    return make_trace(tables, columns, segments=trace_segments(snapshot, tables))


# ---- statistics -------------------------------------------------------------------------------------------


def test_the_keys_are_torchs_and_each_says_what_the_pool_says() -> None:
    with vram.Pool(vram.Device.model("1GiB")) as pool:
        pool.malloc("3MiB")
        pool.free(pool.malloc(1000))
        stats = pool.stats()
        numbers = flat(nested_stats(stats))
    assert set(numbers) == set(KEYS) and len(KEYS) == 9 * 3 * 4 + 2 * 4 + 6
    assert numbers == {key: stats[key] for key in KEYS}
    assert numbers["allocated_bytes.all.current"] == 3 * MIB


def test_every_number_is_zero_for_a_device_not_in_use() -> None:
    assert set(flat(nested_stats({})).values()) == {0}


def test_accumulated_numbers_start_anew_and_others_do_not() -> None:
    with vram.Pool(vram.Device.model("1GiB")) as pool:
        kept = pool.malloc("3MiB")
        before = pool.stats()
        pool.free(kept)
        numbers = flat(nested_stats(pool.stats(), {key: before[key] for key in ACCUMULATED}))
    assert numbers["allocation.all.allocated"] == 0 and numbers["allocation.all.freed"] == 1
    assert numbers["allocated_bytes.all.peak"] == 3 * MIB


# ---- snapshots --------------------------------------------------------------------------------------------


def test_a_pools_snapshot_opens_as_one_of_torchs(tmp_path: Path) -> None:
    with vram.Pool(vram.Device.model("1GiB"), journal=1000, stacks="python") as pool:
        small, large = pool.malloc(1000), pool.malloc("40MiB")
        pool.free(pool.malloc("5MiB"))
        trace = opened(torch_snapshot({0: pool.journal()}, devices=1), tmp_path)
        reserved = pool.stats().reserved
    assert [Action(code).name for code in trace.action] == [
        "ALLOC", "ALLOC", "ALLOC", "FREE_REQUESTED", "FREE_COMPLETED",
    ]  # fmt: skip
    assert list(trace.address[:2]) == [small, large] and list(trace.size[2:]) == [5 * MIB] * 3
    live = {
        block.address: block
        for segment in trace.segments
        for block in segment.blocks
        if block.state == BlockState.LIVE
    }
    assert set(live) == {small, large} and live[small].requested_size == 1000
    stack = trace.frames_of(live[large].stack)
    assert stack == trace.frames_of(trace.stack[1])
    assert (stack[0].filename, stack[0].name) == (__file__, "test_a_pools_snapshot_opens_as_one_of_torchs")
    assert trace.complete
    assert sum(segment.total_size for segment in trace.segments) <= reserved


def test_the_structure_is_torchs(tmp_path: Path) -> None:
    with vram.Pool(vram.Device.model("1GiB"), journal=10) as pool:
        pool.malloc("4MiB")
        snapshot = torch_snapshot({0: pool.journal()}, devices=2)
    assert set(snapshot) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert [len(events) for events in snapshot["device_traces"]] == [1, 0]
    assert set(snapshot["segments"][0]) == {
        "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream",
        "segment_type", "segment_pool_id", "is_expandable", "frames", "blocks",
    }  # fmt: skip
    assert set(snapshot["segments"][0]["blocks"][0]) == {
        "address", "size", "requested_size", "state", "frames",
    }  # fmt: skip
    assert set(snapshot["device_traces"][0][0]) == {
        "action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "frames",
    }  # fmt: skip


def test_pending_memory_is_active_and_not_allocated() -> None:
    segment = segment_of((2 * MIB, "live"), (2 * MIB, "pending"), (2 * MIB, "cached"), plain=True)
    (written,) = torch_snapshot({0: state_of(segment)})["segments"]
    assert [block["state"] for block in written["blocks"]] == [
        "active_allocated", "active_pending_free", "inactive",
    ]  # fmt: skip
    sizes = written["allocated_size"], written["active_size"], written["total_size"]
    assert sizes == (2 * MIB, 4 * MIB, 6 * MIB)


def test_addresses_without_memory_are_left_out() -> None:
    segment = segment_of((MIB, "live"), (100 * MIB, "free"), (MIB, "live"), (50 * MIB, "free"))
    first, second = torch_snapshot({0: state_of(segment)})["segments"]
    assert (first["address"], first["total_size"]) == (BASE, PAGE_BYTES)
    assert [block["size"] for block in first["blocks"]] == [MIB, MIB]
    assert (second["address"], second["total_size"]) == (BASE + 100 * MIB, PAGE_BYTES)
    assert [block["state"] for block in second["blocks"]] == ["inactive", "active_allocated"]


def test_holes_within_a_page_keep_a_segment_together() -> None:
    segment = segment_of((MIB, "live"), (MIB // 2, "free"), (MIB // 4, "free"), (MIB // 4, "live"))
    (written,) = torch_snapshot({0: state_of(segment)})["segments"]
    assert [block["size"] for block in written["blocks"]] == [MIB, MIB * 3 // 4, MIB // 4]


def test_a_plain_segment_stays_whole() -> None:
    segment = segment_of((MIB, "free"), (100 * MIB, "free"), plain=True)
    (written,) = torch_snapshot({0: state_of(segment)})["segments"]
    assert written["total_size"] == 101 * MIB and not written["is_expandable"]


def test_a_free_that_waits_for_a_stream_has_two_times(tmp_path: Path) -> None:
    tables = Tables()
    events = [
        (Action.ALLOC, BASE, 100, 1, "weights"),
        (Action.SEGMENT_MAP, 0, MIB, 2, None),
        (Action.FREE_REQUESTED, BASE, 100, 3, None),
        (Action.FREE_COMPLETED, BASE, 100, 9, None),
        (Action.OOM, 0, 1 << 40, 10, None),
    ]
    columns = {name: array(typecode) for name, typecode in COLUMNS.items()}
    for action, address, size, time_us, tag in events:
        row = (action, tables.stream(7), address, size, time_us, 0, tables.tag(tag))
        for name, value in zip(COLUMNS, row, strict=True):
            columns[name].append(value)
    snapshot = torch_snapshot({1: make_trace(tables, columns, start_us=5)})
    trace = opened(snapshot, tmp_path)
    assert (trace.device, trace.start_us, list(trace.time_us)) == (1, 6, [0, 2, 8, 9])
    assert list(trace.size) == [100, 100, 100, 1 << 40]
    entries = snapshot["device_traces"][1]
    assert entries[0]["user_metadata"] == "weights" and "addr" not in entries[-1]
