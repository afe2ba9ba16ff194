"""Streams: when memory may be reused, what goes wrong if that is too early, and what runs concurrently."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vram.core.pool import Pool
from vram.core.stream import Stream
from vram.lab.kernels import MULTIPROCESSORS, BlockRun

from .allocators import Allocator, OpenPool, driver_pool, naive_pool, stream_ordered_pools, vram_pool
from .experiment import MIB, Bench, Judgement, Observation, Quantity, Table, clock_ms, experiment, listed

OLD, NEW = 1, 2
"""Seeds of the data that a stream should read, and of the data that overwrites it."""

# ---- reuse across streams ---------------------------------------------------------------------------------

USED, REUSED = "used on another stream", "reused on another stream"
NOTHING = "nothing"


def _judge_cross_stream(seen: Observation) -> Judgement:
    rows = seen.rows()
    told = {id(row): f"{row['pool']} ({row['case']}, protected by {row['protected by']})" for row in rows}
    bare = [row for row in rows if row["protected by"] == NOTHING]
    broken = [told[id(row)] for row in rows if row["protected by"] != NOTHING and row["wrong words"]]
    lucky = [told[id(row)] for row in bare if not row["wrong words"]]
    if broken:
        return "does not hold", f"Protected cases that still read foreign data: {listed(broken)}."
    if lucky:
        text = f"Unprotected cases that read no foreign data: {listed(lucky)}."
        return ("does not hold" if len(lucky) == len(bare) else "depends"), text
    return "holds", (
        f"All {len(bare)} unprotected cases read foreign data, and none of the {len(rows) - len(bare)} "
        f"protected cases does ({seen['words']:.0f} words each)."
    )


@experiment(
    "cross-stream",
    "A stream that uses another stream's memory reads foreign data after the free, unless record_stream or "
    "a wait protects it.",
    judge=_judge_cross_stream,
)
def cross_stream(bench: Bench) -> Observation:
    """This bug does not crash: results are wrong now and then. A slow reader makes it happen every time."""
    size = bench.checked_bytes
    cases: list[tuple[str, OpenPool, str, str]] = [
        ("naive", lambda: naive_pool(bench, size), USED, NOTHING),
        ("naive", lambda: naive_pool(bench, size), USED, "a wait"),
        ("naive", lambda: naive_pool(bench, size), REUSED, NOTHING),
        ("vram", lambda: vram_pool(bench), USED, NOTHING),
        ("vram", lambda: vram_pool(bench), USED, "record_stream"),
        ("vram", lambda: vram_pool(bench), USED, "a wait"),
        ("vram, ready", lambda: vram_pool(bench, cross_stream="ready"), REUSED, "the pool"),
        ("vram, wait", lambda: vram_pool(bench, cross_stream="wait"), REUSED, "the pool"),
        ("vram, never", lambda: vram_pool(bench, cross_stream="never"), REUSED, "the pool"),
    ]
    if bench.on_gpu:
        cases += [
            ("cudaMallocAsync", lambda: driver_pool(bench), USED, NOTHING),
            ("cudaMallocAsync", lambda: driver_pool(bench), USED, "a wait"),
            ("cudaMallocAsync", lambda: driver_pool(bench), REUSED, "the pool"),
        ]
    rows: list[tuple[str | int, ...]] = []
    for name, open_pool, case, cure in cases:
        with open_pool() as allocator, bench.streams(2) as (first, second):
            use = _used_elsewhere if case == USED else _reused_elsewhere
            rows.append((name, case, cure, use(bench, allocator, first, second, cure)))
    return Observation(
        {"words": Quantity(size // 4, "words"), "cases": Quantity(len(rows), "cases")},
        Table(("pool", "case", "protected by", "wrong words"), rows),
    )


def _used_elsewhere(bench: Bench, allocator: Allocator, first: Stream, second: Stream, cure: str) -> int:
    """`second` reads memory of `first` late, after it was freed and reused by `first`."""
    size = bench.checked_bytes
    old = allocator.malloc(size, first)
    bench.kernels.fill(old, size, seed=OLD, stream=first)
    second.wait_stream(first)
    bench.kernels.spin(second, bench.busy_ms)
    late = bench.kernels.check(old, size, seed=OLD, stream=second)
    if cure == "record_stream":
        allocator.record_stream(old, second)
    elif cure == "a wait":
        first.wait_stream(second)
    allocator.free(old, first)
    return _overwrite(bench, allocator, first, late.count)


def _reused_elsewhere(bench: Bench, allocator: Allocator, first: Stream, second: Stream, cure: str) -> int:
    """Memory of `first` is freed before `first` has read it, and `second` allocates memory."""
    size = bench.checked_bytes
    old = allocator.malloc(size, first)
    bench.kernels.fill(old, size, seed=OLD, stream=first)
    bench.kernels.spin(first, bench.busy_ms)
    late = bench.kernels.check(old, size, seed=OLD, stream=first)
    allocator.free(old, first)
    return _overwrite(bench, allocator, second, late.count)


def _overwrite(bench: Bench, allocator: Allocator, stream: Stream, late: Callable[[], int]) -> int:
    """Write what the next owner writes; return how many words the late reader finds wrong."""
    new = allocator.malloc(bench.checked_bytes, stream)
    bench.kernels.fill(new, bench.checked_bytes, seed=NEW, stream=stream)
    wrong = late()
    bench.device.synchronize()
    allocator.free(new, stream)
    bench.device.synchronize()
    return wrong


# ---- record_stream ----------------------------------------------------------------------------------------


def _judge_record_stream(seen: Observation) -> Judgement:
    kernel, without, recorded = seen["kernel_ms"], seen["reuse_without_ms"], seen["reuse_with_ms"]
    text = (
        f"Behind a {kernel:.0f} ms kernel of the other stream, the memory is reused after {without:.2f} ms "
        f"without record_stream and {recorded:.2f} ms with it. A pool that can grow reserves "
        f"{seen['extra_mib']:.0f} MiB more instead, in {seen['growth_ms']:.2f} ms."
    )
    if without < kernel / 4 and recorded > kernel / 2:
        return "holds", text
    return ("depends" if recorded > 2 * without else "does not hold"), text


@experiment(
    "record-stream",
    "record_stream delays reuse until the other stream has completed its work.",
    judge=_judge_record_stream,
)
def record_stream(bench: Bench) -> Observation:
    """Safety has a cost: memory is returned later, and a full pool waits or grows in the meantime."""
    size = 8 * MIB
    without, _ = _reuse_ms(bench, size, limit=size, record=False)
    recorded, _ = _reuse_ms(bench, size, limit=size, record=True)
    growth, reserved = _reuse_ms(bench, size, limit=None, record=True)
    return Observation(
        {
            "kernel_ms": Quantity(bench.busy_ms, "ms"),
            "reuse_without_ms": Quantity(without, "ms"),
            "reuse_with_ms": Quantity(recorded, "ms"),
            "growth_ms": Quantity(growth, "ms"),
            "extra_mib": Quantity((reserved - size) / MIB, "MiB"),
        }
    )


def _reuse_ms(bench: Bench, size: int, *, limit: int | None, record: bool) -> tuple[float, int]:
    """Return the time in ms from a free behind a busy stream to the next allocation, and reserved bytes."""
    with bench.streams(2) as (first, second), Pool(bench.device, limit=limit) as pool:
        memory = pool.allocate(size, stream=first)
        bench.busy(second)
        if record:
            memory.record_stream(second)
        start = clock_ms()
        memory.free()
        again = pool.allocate(size, stream=first)
        spent = clock_ms() - start
        reserved = pool.stats().reserved
        second.synchronize()
        again.free()
    return spent, reserved


# ---- reuse on the same stream -----------------------------------------------------------------------------


def _judge_same_stream(seen: Observation) -> Judgement:
    rows = seen.rows()
    wrong = sum(int(row["wrong words"]) for row in rows)
    reused = all(int(row["addresses"]) < int(row["rounds"]) for row in rows)
    told = "; ".join(
        f"{row['pool']}: {row['rounds']} rounds on {row['addresses']} address(es), queued in "
        f"{row['queued ms']:.1f} ms, done in {row['done ms']:.1f} ms"
        for row in rows
    )
    if wrong:
        return "does not hold", f"{wrong} words were wrong. {told}."
    if not reused:
        return "depends", f"No memory was reused, so the test shows nothing. {told}."
    return "holds", f"No word was wrong. {told}."


@experiment(
    "same-stream",
    "Memory freed and allocated again on the same stream needs no synchronization.",
    judge=_judge_same_stream,
)
def same_stream(bench: Bench) -> Observation:
    """The work of one stream runs in order, so a pool may reuse memory before the earlier work has run."""
    rounds = 5 if bench.quick else 10
    rows: list[tuple[str | int | float, ...]] = []
    for name, open_pool in stream_ordered_pools(bench).items():
        with open_pool() as allocator, bench.streams(1) as (stream,):
            rows.append((name, rounds, *_rounds(bench, allocator, stream, rounds)))
    return Observation(
        {"words": Quantity(bench.checked_bytes // 4, "words")},
        Table(("pool", "rounds", "addresses", "wrong words", "queued ms", "done ms"), rows),
    )


def _rounds(bench: Bench, allocator: Allocator, stream: Stream, rounds: int) -> tuple[int, int, float, float]:
    size = bench.checked_bytes
    addresses, checks = set(), []
    start = clock_ms()
    for seed in range(rounds):
        address = allocator.malloc(size, stream)
        addresses.add(address)
        bench.kernels.fill(address, size, seed=seed, stream=stream)
        bench.kernels.spin(stream, 5)
        checks.append(bench.kernels.check(address, size, seed=seed, stream=stream))
        allocator.free(address, stream)
    queued = clock_ms() - start
    wrong = sum(each.count() for each in checks)
    return len(addresses), wrong, queued, clock_ms() - start


# ---- kernels at once --------------------------------------------------------------------------------------

FULL_BLOCK = 1024
"""Threads per block; two such blocks fit on one multiprocessor."""


def _judge_at_once(seen: Observation) -> Judgement:
    shared, total = seen["shared_multiprocessors"], seen["multiprocessors"]
    full = seen["shared_when_full"]
    text = (
        f"Two small kernels share {shared:.0f} of {total:.0f} multiprocessors, two large ones share "
        f"{full:.0f}. Of {seen['kernels_launched']:.0f} small kernels, {seen['kernels_at_once']:.0f} ran "
        "concurrently."
    )
    if shared == 0:
        return "does not hold", text
    return ("holds" if full < shared / 2 else "depends"), text


@experiment(
    "kernels-at-once",
    "Two kernels share a multiprocessor if their resources fit.",
    judge=_judge_at_once,
    needs_gpu=True,
)
def kernels_at_once(bench: Bench) -> Observation:
    """Streams help only if resources are free: a kernel that fills the device runs alone on any stream."""
    total = bench.backend.attribute(MULTIPROCESSORS)
    count = 64 if bench.quick else 160
    with bench.streams(2) as (first, second):
        roomy = _shared(bench, first, second, blocks=total)
        full = _shared(bench, first, second, blocks=2 * total)
    with bench.streams(count) as streams:
        kernels = [bench.kernels.where(stream, 20) for stream in streams]
        at_once = _most_at_once([block for each in kernels for block in each.read()])
    return Observation(
        {
            "multiprocessors": Quantity(total, "multiprocessors"),
            "shared_multiprocessors": Quantity(roomy, "multiprocessors"),
            "shared_when_full": Quantity(full, "multiprocessors"),
            "kernels_launched": Quantity(count, "kernels"),
            "kernels_at_once": Quantity(at_once, "kernels"),
        }
    )


def _shared(bench: Bench, first: Stream, second: Stream, *, blocks: int) -> int:
    """Count multiprocessors on which two kernels ran concurrently for at least half of their time."""
    ms = 10.0
    one = bench.kernels.where(first, ms, blocks=blocks, threads=FULL_BLOCK)
    two = bench.kernels.where(second, ms, blocks=blocks, threads=FULL_BLOCK)
    return len(_side_by_side(one.read(), two.read(), ms * 1e6 / 2))


def _side_by_side(one: Sequence[BlockRun], two: Sequence[BlockRun], least_ns: float) -> set[int]:
    """Return the multiprocessors on which both ran concurrently for at least that long."""
    return {
        a.multiprocessor
        for a in one
        for b in two
        if a.multiprocessor == b.multiprocessor
        and min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns) >= least_ns
    }


def _most_at_once(blocks: Sequence[BlockRun]) -> int:
    """Return the maximum number that ran at one moment."""
    edges = sorted([(block.start_ns, 1) for block in blocks] + [(block.end_ns, -1) for block in blocks])
    now = most = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most
