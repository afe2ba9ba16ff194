"""`Stats`: the statistics of a pool, with the keys of torch.cuda.memory_stats and our own.

The native core counts; this module names the counts and computes ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeAlias

from vram.sizes import format_count, format_size

__all__ = [
    *("KINDS", "MEASURES", "Counts", "Raw", "Stats", "Uncounted"),
    *("both", "counts_of", "fragmentation", "ratio", "ready"),
]

Raw: TypeAlias = dict[str, Any]
"""What the native `raw_stats()` returns; see PoolStats in native/pool/pool.hpp."""

KINDS = ("small", "large")
Counts: TypeAlias = dict[tuple[str, ...], int]
"""Numbers by their path in a Raw."""

UNIT = 512
"""Blocks are multiples of this."""
SMALL = 1 << 20
"""The largest block of the kind "small"."""
MEASURES = ("current", "peak", "allocated", "freed")
READY_RUNGS = ("stream_cache", "own_blocks", "passed_pending", "finished_elsewhere")
"""The rungs that serve an allocation without calling the driver."""
_SLOW_FIRST = (
    *(
        "spill",
        "driver",
        "give_back",
        "host_wait",
        "callbacks",
        "flush",
        "stream_wait",
        "growth",
        "free_pages",
    ),
    *("finished_elsewhere", "passed_pending", "own_blocks", "stream_cache"),
)


class Stats(Mapping[str, float]):
    """The statistics of a pool at one moment: a mapping, with attributes for the most common numbers.

    Keys are those of `torch.cuda.memory_stats` ("allocated_bytes.all.current"), where "active" is allocated
    or pending, and also `cache.*`, `rung.*`, `pages.*`, `waste.*` and `fragmentation`. Pages are not divided
    between small and large blocks, so reserved memory and pending blocks count as "large_pool".
    "inactive_split" counts what has changed between two readings.
    """

    def __init__(self, raw: Raw, pages: str = "") -> None:
        """Name the numbers of a pool's `raw_stats()`; `pages` says whether it maps pages, and why not."""
        self._raw = raw
        self._pages = pages

    @cached_property
    def _numbers(self) -> dict[str, float]:
        return {**_torch_numbers(self._raw), **_own_numbers(self._raw)}

    def __getitem__(self, key: str) -> float:
        return self._numbers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def allocated(self) -> int:
        """Bytes in live blocks."""
        return int(self._raw["live"])

    @property
    def requested(self) -> int:
        """Bytes requested by live allocations, before rounding."""
        return both(self._raw["requested"], "current")

    @property
    def reserved(self) -> int:
        """Bytes held from the device."""
        return int(self._raw["reserved"]["current"])

    @property
    def pending(self) -> int:
        """Bytes freed that a stream may still use."""
        return int(self._raw["pending"]["current"])

    @property
    def pages(self) -> str:
        """Whether the pool maps pages: "mapped", or why it uses plain segments; see `pages.enabled`."""
        return self._pages or ("mapped" if self._raw["paged"] else "plain segments")

    @property
    def suspended(self) -> int:
        """Bytes that suspended buffers released and `resume()` takes again; not in `reserved`."""
        return int(self._raw["suspended"])

    @property
    def spilled(self) -> int:
        """Bytes of pages under live memory that are in host memory; not in `reserved`."""
        return int(self._raw.get("spilled", 0))

    @property
    def cached(self) -> int:
        """Bytes in the streams' caches."""
        return int(self._raw["cached"])

    @property
    def free(self) -> int:
        """Bytes reserved and neither live, pending nor cached. What is suspended is not reserved."""
        return int(self._raw["free_bytes"])

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block, at most what is free."""
        return _largest_free(self._raw)

    @property
    def peak_allocated(self) -> int:
        """The most bytes that were live at once since the last reset_peak()."""
        return int(self._raw["peak_live"])

    @property
    def peak_reserved(self) -> int:
        """The most bytes held from the device since the last reset_peak()."""
        return int(self._raw["reserved"]["peak"])

    @property
    def allocations(self) -> int:
        """Allocations made so far."""
        return both(self._raw["allocations"], "total")

    @property
    def live(self) -> int:
        """Allocations not freed yet."""
        return both(self._raw["allocations"], "current")

    @property
    def frees(self) -> int:
        """Allocations freed so far."""
        return self.allocations - self.live

    @property
    def hits(self) -> int:
        """Allocations served without a driver call, from memory that the pool had ready."""
        return ready(self._raw)

    @property
    def hit_rate(self) -> float:
        """Share of allocations served without a driver call; 0 before the first. Warm-up does not count."""
        return ratio(self.hits, self.allocations, 0.0)

    @property
    def stream_cache_hits(self) -> int:
        """Allocations served by the stream's own cache, the fastest of the hits."""
        return int(self._raw["hits"])

    @property
    def stream_cache_hit_rate(self) -> float:
        """Share of allocations served by the stream's own cache; 0 before the first."""
        return ratio(self.stream_cache_hits, self.allocations, 0.0)

    @property
    def waste_ratio(self) -> float:
        """Peak reserved over peak allocated; 1 before the first allocation."""
        return ratio(self.peak_reserved, self.peak_allocated, 1.0)

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is free but cannot serve a large request; 0 with nothing live."""
        return fragmentation(self._raw)

    @property
    def out_of_memory(self) -> int:
        """Requests that failed."""
        return int(self._raw["out_of_memory"])

    @property
    def rungs(self) -> dict[str, int]:
        """Allocations served by each rung of the ladder, by name."""
        return dict(self._raw["rungs"])

    @property
    def streams(self) -> list[dict[str, Any]]:
        """For each stream its handle, live, cached and free bytes, and pending blocks."""
        return [dict(stream) for stream in self._raw["streams"]]

    def to_dict(self) -> dict[str, float]:
        """The mapping as a plain dict."""
        return dict(self._numbers)

    def _repr_html_(self) -> str:
        from vram.core.html import stats_html

        return stats_html(self)

    def __repr__(self) -> str:
        return (
            f"<vram.Stats {format_size(self.allocated)} allocated in {format_count(self.live, 'block')}, "
            f"{format_size(self.reserved)} reserved, hit rate {self.hit_rate:.1%}, "
            f"fragmentation {self.fragmentation:.1%}>"
        )


def fragmentation(raw: Raw) -> float:
    """The share of reserved memory that is free, but not in whole pages (without pages: not in one block).

    With nothing live it is 0: all of it can be merged or released.
    """
    if not raw["live"]:
        return 0.0
    usable = raw["free_page_bytes"] if raw["paged"] else raw["largest_free"]
    return ratio(max(0, raw["free_bytes"] - usable), raw["reserved"]["current"], 0.0)


def ready(raw: Raw) -> int:
    """Allocations served without a driver call."""
    rungs = raw["rungs"]
    return sum(int(rungs.get(name, 0)) for name in READY_RUNGS)


def _largest_free(raw: Raw) -> int:
    """With pages a free block is a range of addresses, which may be larger than the free memory."""
    return int(min(raw["largest_free"], raw["free_bytes"]))


def both(kinds: Mapping[str, Mapping[str, int]], measure: str) -> int:
    """The sum over small and large allocations."""
    return sum(int(kinds[kind][measure]) for kind in KINDS)


def ratio(part: float, whole: float, otherwise: float) -> float:
    """`part / whole`, or `otherwise` where `whole` is 0."""
    return part / whole if whole else otherwise


class Uncounted:
    """Requests that are not the program's own, for example of a warm-up. Gauges and peaks are left alone."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._counts: Counts = {}

    def add(self, counts: Counts, before: Raw, after: Raw) -> None:
        """Do not count these allocations, which were made and freed between two readings of the rungs.

        If others allocated meanwhile, it is not known which rung served whom: the slow ones are taken first.
        """
        total = sum(count for (stat, *_), count in counts.items() if stat == "allocations")
        changes: Counts = {(stat, kind, "total"): count for (stat, kind), count in counts.items()}
        for name in sorted(after["rungs"], key=_SLOW_FIRST.index):
            served = min(total, after["rungs"][name] - before["rungs"][name])
            changes["rungs", name] = served
            total -= served
        changes["hits",] = changes.get(("rungs", "stream_cache"), 0)
        known = self._counts
        self._counts = {path: known.get(path, 0) + changes.get(path, 0) for path in {**known, **changes}}

    def taken_from(self, raw: Raw) -> Raw:
        """The reading without them; `raw` is changed."""
        for (*way, last), count in self._counts.items():
            inside = raw
            for name in way:
                inside = inside[name]
            inside[last] -= count
        return raw


def counts_of(sizes: Iterable[int]) -> Counts:
    """What requests of these sizes count as, by statistic and kind."""
    counts: Counts = {}
    for size in sizes:
        held = max(1, -(-size // UNIT)) * UNIT
        kind = KINDS[held > SMALL]
        for stat, count in (("allocations", 1), ("bytes", held), ("requested", size)):
            counts[stat, kind] = counts.get((stat, kind), 0) + count
    return counts


# ---- torch's names ----------------------------------------------------------------------------------------


def _torch_numbers(raw: Raw) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for stat, pools in _torch_stats(raw).items():
        for pool, values in pools.items():
            for measure, value in zip(MEASURES, values, strict=True):
                numbers[f"{stat}.{pool}.{measure}"] = value
    numbers.update(
        {
            "num_alloc_retries": raw["retries"],
            "num_ooms": raw["out_of_memory"],
            "num_sync_all_streams": raw["rungs"].get("host_wait", 0),
            "num_device_alloc": raw.get("driver_grow", raw["segments"]["total"]),
            "num_device_free": raw.get(
                "driver_shrink", raw["segments"]["total"] - raw["segments"]["current"]
            ),
            "max_split_size": -1,
        }
    )
    for kind in ("oversize_allocations", "oversize_segments"):
        numbers.update({f"{kind}.{measure}": 0 for measure in MEASURES})
    return numbers


_Four: TypeAlias = tuple[int, int, int, int]
"""current, peak, allocated, freed."""


def _torch_stats(raw: Raw) -> dict[str, dict[str, _Four]]:
    pending = raw["pending"]["current"]
    return {
        "allocation": _split(raw["allocations"]),
        "segment": _whole(_four(raw["segments"])),
        "active": _active(raw["allocations"], raw["pending_blocks"], None),
        "inactive_split": _whole(_four(raw["inactive"])),
        "allocated_bytes": _split(raw["bytes"], raw["peak_live"]),
        "reserved_bytes": _whole(_four(raw["reserved"])),
        "active_bytes": _active(raw["bytes"], pending, raw["peak_active"]),
        "inactive_split_bytes": _whole(_four(raw["inactive_bytes"])),
        "requested_bytes": _split(raw["requested"], raw["peak_live"]),
    }


def _four(meter: Mapping[str, int]) -> _Four:
    return (meter["current"], meter["peak"], meter["total"], meter["total"] - meter["current"])


def _whole(values: _Four) -> dict[str, _Four]:
    return {"all": values, "small_pool": (0, 0, 0, 0), "large_pool": values}


def _split(kinds: Mapping[str, Mapping[str, int]], most: int | None = None) -> dict[str, _Four]:
    """By size. The peak of all is at most the sum of the two, which need not be reached at one moment, and at
    most `most`, if given: the peak of all live bytes.
    """
    small, large = (_four(kinds[kind]) for kind in KINDS)
    current, summed, allocated, freed = (one + two for one, two in zip(small, large, strict=True))
    return {
        "all": (current, summed if most is None else min(summed, most), allocated, freed),
        "small_pool": small,
        "large_pool": large,
    }


def _active(kinds: Mapping[str, Mapping[str, int]], pending: int, peak: int | None) -> dict[str, _Four]:
    """What is allocated, or freed and still used. What is still used counts as large, as far as it can be."""
    stat = _split(kinds)
    if peak is not None:
        current, _, allocated, freed = stat["all"]
        stat["all"] = (current, peak, allocated, freed)
    large = min(pending, stat["large_pool"][3])
    for pool, used in (("all", pending), ("small_pool", pending - large), ("large_pool", large)):
        current, highest, allocated, freed = stat[pool]
        active = current + used
        stat[pool] = (active, max(highest, active), allocated, freed - used)
    return stat


# ---- our own ----------------------------------------------------------------------------------------------


def _own_numbers(raw: Raw) -> dict[str, float]:
    allocations, hits = both(raw["allocations"], "total"), ready(raw)
    rounding = both(raw["bytes"], "current") - both(raw["requested"], "current")
    numbers: dict[str, float] = {
        "cache.hits": hits,
        "cache.misses": allocations - hits,
        "cache.hit_rate": ratio(hits, allocations, 0.0),
        "stream_cache.hits": raw["hits"],
        "stream_cache.hit_rate": ratio(raw["hits"], allocations, 0.0),
        "cache.bytes": raw["cached"],
        "cache.blocks": raw["cached_blocks"],
        "pages.enabled": int(raw["paged"]),
        "pages.free_bytes": raw["free_page_bytes"],
        "pages.mappings": raw["mappings"],
        "free.bytes": raw["free_bytes"],
        "free.blocks": raw["free_blocks"],
        "free.largest": _largest_free(raw),
        "suspended.bytes": raw["suspended"],
        "suspended.blocks": raw["suspended_blocks"],
        "suspended.kept_bytes": raw["kept"],
        "waste.ratio": ratio(raw["reserved"]["peak"], raw["peak_live"], 1.0),
        "waste.bytes": raw["reserved"]["current"]
        - (raw["live"] - raw["suspended_live"] - raw.get("spilled_live", 0)),
        "waste.rounding_bytes": rounding,
        "fragmentation": fragmentation(raw),
        "streams": len(raw["streams"]),
        "tags": raw["tags"],
        "tags.other": raw["other_tags"],
        "stacks": raw["stacks"],
        "stacks.lost": raw["lost_stacks"],
    }
    numbers.update(_spill_numbers(raw))
    numbers.update({f"rung.{name}": count for name, count in raw["rungs"].items()})
    return numbers


def _spill_numbers(raw: Raw) -> dict[str, float]:
    """What is in host memory, and what was moved so far."""
    if "spill" not in raw:  # the driver's own pool
        return {}
    moved = raw["spill"]
    return {
        "spill.bytes": raw["spilled"],
        "spill.host_bytes": raw["host"],
        "spill.parked_bytes": raw["parked"],
        "spill.moved_out_bytes": moved["spilled_bytes"],
        "spill.moved_back_bytes": moved["returned_bytes"],
        "spill.saved_bytes": moved["saved"],
        "spill.saved_out_bytes": moved["saved_out_bytes"],
        "spill.saved_back_bytes": moved["saved_back_bytes"],
        "spill.count": moved["spills"],
        "spill.returns": moved["returns"],
        "spill.late": moved["late"],
        "spill.failures": moved["failures"],
        "spill.seconds": moved["seconds"],
    }
