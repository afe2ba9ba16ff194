"""What pools keep, release and fail to serve: the driver's attributes, trimming, fragmentation."""

from __future__ import annotations

from typing import Any

from vram.core.driver_pool import DriverPool
from vram.core.stream import Stream
from vram.errors import DeviceError
from vram.sizes import format_size

from .allocators import (
    Allocator,
    OpenPool,
    driver_pool,
    served,
    stream_ordered_pools,
    torch_installed,
    torch_pool,
    vram_pool,
)
from .experiment import (
    KIB,
    MIB,
    Bench,
    Judgement,
    Observation,
    Quantity,
    Table,
    clock_ms,
    experiment,
    listed,
)

RELEASE_THRESHOLD, RESERVED_NOW, RESERVED_HIGH = (
    "release_threshold",
    "reserved_mem_current",
    "reserved_mem_high",
)

# ---- the release threshold --------------------------------------------------------------------------------


def _judge_threshold(seen: Observation) -> Judgement:
    cost = seen["batch_at_0_ms"] / seen["batch_unlimited_ms"]
    kept, kept_always = seen["reserved_at_0"], seen["reserved_unlimited"]
    text = (
        f"A batch takes {seen['batch_at_0_ms']:.2f} ms with threshold 0 and {seen['batch_unlimited_ms']:.2f} "
        f"ms without a limit ({cost:.1f} times); {format_size(int(kept))} and "
        f"{format_size(int(kept_always))} stay reserved."
    )
    given_back, slower = kept < kept_always / 2, cost >= 1.5
    if given_back and slower:
        return "holds", text
    if not given_back and not slower:
        return "does not hold", text
    return "depends", text


@experiment(
    "release-threshold",
    "With the default release threshold of 0, cudaMallocAsync releases all memory at every synchronization, "
    "which slows down the next batch.",
    judge=_judge_threshold,
    needs_gpu=True,
)
def release_threshold(bench: Bench) -> Observation:
    """A loop that synchronizes after each batch may spend more time on the pool than on its work."""
    batches, blocks, size = 5 if bench.quick else 10, 8, 64 * MIB
    numbers: dict[str, Quantity] = {}
    with bench.streams(1) as (stream,):
        for name, threshold in (("at_0", 0), ("unlimited", None)):
            with DriverPool(bench.device, release_threshold=threshold) as pool:
                spent = [_batch(bench, pool, stream, blocks, size) for _ in range(batches + 1)][1:]
                numbers[f"batch_{name}_ms"] = Quantity(sum(spent) / batches, "ms")
                numbers[f"reserved_{name}"] = Quantity(pool.attribute(RESERVED_NOW), "bytes")
    return Observation(numbers)


def _batch(bench: Bench, pool: DriverPool, stream: Stream, blocks: int, size: int) -> float:
    start = clock_ms()
    held = [pool.malloc(size, stream) for _ in range(blocks)]
    for address in held:
        bench.kernels.fill(address, 64 * KIB, seed=1, stream=stream)
        pool.free(address)
    stream.synchronize()
    return clock_ms() - start


# ---- the high-water mark ----------------------------------------------------------------------------------


def _judge_high_water(seen: Observation) -> Judgement:
    refused = seen["status_of_setting"] != 0
    reset = seen["status_of_resetting"] == 0 and seen["high_after_reset"] < seen["high_before"]
    text = (
        f"Setting it returns {seen['status_of_setting']:.0f}, resetting it returns "
        f"{seen['status_of_resetting']:.0f}; the mark changes from {format_size(int(seen['high_before']))} "
        f"to {format_size(int(seen['high_after_reset']))}, which is the reserved memory."
    )
    if refused and reset:
        return "holds", text
    if not refused:
        return "does not hold", f"{text} It can be set."
    return "depends", f"{text} It can be neither set nor reset."


@experiment(
    "high-water-mark",
    "The high-water mark of a driver pool can be reset, but not set.",
    judge=_judge_high_water,
    needs_gpu=True,
)
def high_water_mark(bench: Bench) -> Observation:
    """Peaks per phase need resets between phases; a monitor that resets the mark affects other readers."""
    with bench.streams(1) as (stream,), DriverPool(bench.device) as pool:
        pool.free(pool.malloc(64 * MIB, stream))
        stream.synchronize()
        before = pool.attribute(RESERVED_HIGH)
        set_status = _status_of_setting(pool, RESERVED_HIGH, 1 << 30)
        pool.trim(wait=True)
        reset_status = _status_of_setting(pool, RESERVED_HIGH, 0)
        after = pool.attribute(RESERVED_HIGH)
        threshold_status = _status_of_setting(pool, "release_threshold", 1 << 30)
    return Observation(
        {
            "high_before": Quantity(before, "bytes"),
            "status_of_setting": Quantity(set_status, "driver status"),
            "status_of_resetting": Quantity(reset_status, "driver status"),
            "high_after_reset": Quantity(after, "bytes"),
            "status_of_setting_the_threshold": Quantity(threshold_status, "driver status"),
        }
    )


def _status_of_setting(pool: DriverPool, attribute: str, value: int) -> int:
    """The driver's own answer; 0 where it agrees."""
    try:
        pool.set_attribute(attribute, value)
    except DeviceError as error:
        return error.native or 1
    return 0


# ---- trimming ---------------------------------------------------------------------------------------------

COMPLETE = 0.05
"""Unused memory that may stay reserved, as a share."""


def _judge_trim(seen: Observation) -> Judgement:
    if seen["wrong_words"]:
        return "does not hold", f"{seen['wrong_words']:.0f} words of live memory changed during the trim."
    rows = seen.rows()
    complete = [_trimmed(row) >= 1 - COMPLETE for row in rows]
    told = "; ".join(f"{row['pool']}, {row['blocks']}: {100 * _trimmed(row):.0f} %" for row in rows)
    text = f"Share of unused memory that was released: {told}. Live memory is unchanged."
    if all(complete):
        return "holds", text
    return ("depends" if any(_trimmed(row) > 0 for row in rows) else "does not hold"), text


def _trimmed(row: dict[str, Any]) -> float:
    """Return the share of unused memory that was released."""
    unused = float(row["reserved MiB"]) - float(row["live MiB"])
    return 1.0 if unused <= 0 else (float(row["reserved MiB"]) - float(row["after MiB"])) / unused


@experiment("trim", "Trimming releases unused memory, and nothing else.", judge=_judge_trim)
def trim(bench: Bench) -> Observation:
    """Memory is released by the page: a page with one small live block stays reserved."""
    rows: list[tuple[str | float, ...]] = []
    wrong = 0
    with bench.streams(1) as (stream,):
        for size, blocks in ((8 * MIB, 8), (256 * KIB, 64)):
            for name, open_pool in stream_ordered_pools(bench).items():
                with open_pool() as allocator:
                    seen, errors = _trim_one(bench, allocator, stream, size, blocks)
                rows.append((name, f"{blocks} of {format_size(size)}", *(value / MIB for value in seen)))
                wrong += errors
    return Observation(
        {"wrong_words": Quantity(wrong, "words")},
        Table(("pool", "blocks", "live MiB", "reserved MiB", "after MiB"), rows),
    )


def _trim_one(
    bench: Bench, allocator: Allocator, stream: Stream, size: int, blocks: int
) -> tuple[tuple[int, int, int], int]:
    """Free every other block and trim. Return live bytes, reserved before and after, wrong words."""
    checked = min(size, bench.checked_bytes)
    held = [allocator.malloc(size, stream) for _ in range(blocks)]
    live, gone = held[::2], held[1::2]
    for seed, address in enumerate(live):
        bench.kernels.fill(address, checked, seed=seed, stream=stream)
    for address in gone:
        allocator.free(address, stream)
    stream.synchronize()
    before = allocator.reserved()
    allocator.trim()
    after = allocator.reserved()
    checks = [
        bench.kernels.check(address, checked, seed=seed, stream=stream) for seed, address in enumerate(live)
    ]
    errors = sum(each.count() for each in checks)
    for address in live:
        allocator.free(address, stream)
    stream.synchronize()
    return (size * len(live), before, after), errors


# ---- fragmentation ----------------------------------------------------------------------------------------

LIMIT = 256 * MIB
REQUEST = 64 * MIB
PATTERNS = {"every other 8 MiB": (8 * MIB, 2), "every other 512 KiB": (512 * KIB, 2)}
"""What is freed: the size of the blocks that fill the limit, and which of them are freed."""


def _judge_fragmentation(seen: Observation) -> Judgement:
    rows = [row for row in seen.rows() if float(row["free MiB"]) >= seen["request_mib"]]
    failed = [f"{row['allocator']} ({row['freed']})" for row in rows if not row["served"]]
    fine = [f"{row['allocator']} ({row['freed']})" for row in rows if row["served"]]
    asked = f"{seen['request_mib']:.0f} MiB while more than that is free"
    if not fine:
        return "holds", f"No allocator serves {asked}: {listed(failed)}."
    if not failed:
        return "does not hold", f"Every allocator serves {asked}: {listed(fine)}."
    return "depends", f"When asked for {asked}, these fail: {listed(failed)}; these succeed: {listed(fine)}."


@experiment(
    "fragmentation",
    "A request can fail although enough memory is free.",
    judge=_judge_fragmentation,
)
def fragmentation(bench: Bench) -> Observation:
    """Fragmentation is a common reason for out-of-memory errors; pages that can be remapped avoid it."""
    rows: list[tuple[str | float | bool, ...]] = []
    with bench.streams(1) as (stream,):
        for name, open_pool in _contenders(bench).items():
            for freed, (size, step) in PATTERNS.items():
                with open_pool() as allocator:
                    rows.append((name, freed, *_fragment(allocator, stream, size, step)))
    return Observation(
        {
            "limit_mib": Quantity(LIMIT // MIB, "MiB"),
            "request_mib": Quantity(REQUEST // MIB, "MiB"),
        },
        Table(("allocator", "freed", "free MiB", "served", "ms"), rows),
    )


def _contenders(bench: Bench) -> dict[str, OpenPool]:
    contenders: dict[str, OpenPool] = {}
    if bench.device.pages:
        contenders["vram with pages"] = lambda: vram_pool(bench, limit=LIMIT)
    contenders["vram without pages"] = lambda: vram_pool(bench, limit=LIMIT, pages=False)
    if bench.on_gpu:
        contenders["cudaMallocAsync"] = lambda: driver_pool(bench, LIMIT)
        if not bench.quick and torch_installed():
            contenders["PyTorch"] = lambda: torch_pool(bench, LIMIT)
    return contenders


def _fragment(allocator: Allocator, stream: Stream, size: int, step: int) -> tuple[float, bool, float]:
    """Fill the limit, free every `step`-th block, request a large one. Return free MiB, success and ms."""
    held: list[int] = []
    while len(held) * size < LIMIT and served(lambda: held.append(allocator.malloc(size, stream))):
        pass
    kept = [address for index, address in enumerate(held) if index % step]
    for address in held[::step]:
        allocator.free(address, stream)
    stream.synchronize()
    start = clock_ms()
    success = served(lambda: kept.append(allocator.malloc(REQUEST, stream)))
    spent = clock_ms() - start
    for address in kept:
        allocator.free(address, stream)
    stream.synchronize()
    return len(held[::step]) * size / MIB, success, spent
