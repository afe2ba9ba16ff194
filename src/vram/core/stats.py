"""Numbers of a pool as people know them: `Stats` with the keys of torch.cuda.memory_stats and our own, and
`Measurement`, the numbers of one stretch of a program.

Counting is native; here counts are named, divided and compared. States of blocks are for `snapshot`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, TypeAlias

from vram.core.locks import new_lock
from vram.sizes import format_size

__all__ = ["Measurement", "Stats", "fragmentation"]

Raw: TypeAlias = dict[str, Any]
"""What the native `raw_stats()` returns; see PoolStats in native/pool/pool.hpp."""

KINDS = ("small", "large")
MEASURES = ("current", "peak", "allocated", "freed")
MEASURED = (
    *("allocations", "frees", "bytes", "requested", "kept", "peak", "peak_allocated"),
    *("peak_reserved", "hits", "hit_rate", "fragmentation"),
)


class Stats(Mapping[str, float]):
    """The statistics of a pool at one moment: a mapping, with attributes for the numbers asked for most.

    Keys are those of `torch.cuda.memory_stats` ("allocated_bytes.all.current"), where "active" is allocated
    or pending, and besides them `cache.*`, `rung.*`, `pages.*`, `waste.*` and `fragmentation`. Pages are not
    divided between small and large blocks, so what is reserved counts as "large_pool"; pending blocks too.
    Of "inactive_split" only `current` is counted as time goes by.
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
        """Bytes that live allocations asked for, before rounding."""
        return _both(self._raw["requested"], "current")

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
        """Bytes that suspended buffers have given back, and `resume()` takes again; not in `reserved`."""
        return int(self._raw["suspended"])

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
        return _both(self._raw["allocations"], "total")

    @property
    def live(self) -> int:
        """Allocations not freed yet."""
        return _both(self._raw["allocations"], "current")

    @property
    def frees(self) -> int:
        """Allocations freed so far."""
        return self.allocations - self.live

    @property
    def hits(self) -> int:
        """Allocations that the stream's own cache served."""
        return int(self._raw["hits"])

    @property
    def hit_rate(self) -> float:
        """Share of allocations that the stream's own cache served; 0 before the first."""
        return _ratio(self.hits, self.allocations, 0.0)

    @property
    def waste_ratio(self) -> float:
        """Peak reserved over peak allocated; 1 before the first allocation."""
        return _ratio(self.peak_reserved, self.peak_allocated, 1.0)

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is free and yet serves no large request."""
        return fragmentation(self._raw)

    @property
    def out_of_memory(self) -> int:
        """Requests that could not be served."""
        return int(self._raw["out_of_memory"])

    @property
    def rungs(self) -> dict[str, int]:
        """Allocations served by each rung of the ladder, by name."""
        return dict(self._raw["rungs"])

    @property
    def streams(self) -> list[dict[str, Any]]:
        """For each stream its handle, bytes live, cached and free, and blocks pending."""
        return [dict(stream) for stream in self._raw["streams"]]

    def to_dict(self) -> dict[str, float]:
        """The mapping as a plain dict."""
        return dict(self._numbers)

    def __repr__(self) -> str:
        return (
            f"<vram.Stats {format_size(self.allocated)} allocated in {self.live} blocks, "
            f"{format_size(self.reserved)} reserved, hit rate {self.hit_rate:.1%}, "
            f"fragmentation {self.fragmentation:.1%}>"
        )


def fragmentation(raw: Raw) -> float:
    """Return the share of reserved memory that is free, but not in whole pages (without: in one block)."""
    usable = raw["free_page_bytes"] if raw["paged"] else raw["largest_free"]
    return _ratio(max(0, raw["free_bytes"] - usable), raw["reserved"]["current"], 0.0)


def _largest_free(raw: Raw) -> int:
    """With pages a free block is a range of addresses; no more than the free memory can be behind it."""
    return int(min(raw["largest_free"], raw["free_bytes"]))


def _both(kinds: Mapping[str, Mapping[str, int]], measure: str) -> int:
    return sum(int(kinds[kind][measure]) for kind in KINDS)


def _ratio(part: float, whole: float, otherwise: float) -> float:
    return part / whole if whole else otherwise


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
    split_bytes = max(0, raw["free_bytes"] - raw["free_page_bytes"]) + raw["cached"]
    return {
        "allocation": _split(raw["allocations"]),
        "segment": _whole(_four(raw["segments"])),
        "active": _active(raw["allocations"], raw["pending_blocks"], None),
        "inactive_split": _whole(_now(raw["free_blocks"] + raw["cached_blocks"])),
        "allocated_bytes": _split(raw["bytes"], raw["peak_live"]),
        "reserved_bytes": _whole(_four(raw["reserved"])),
        "active_bytes": _active(raw["bytes"], pending, raw["peak_active"]),
        "inactive_split_bytes": _whole(_now(split_bytes)),
        "requested_bytes": _split(raw["requested"]),
    }


def _four(meter: Mapping[str, int]) -> _Four:
    return (meter["current"], meter["peak"], meter["total"], meter["total"] - meter["current"])


def _now(value: int) -> _Four:
    return (value, value, value, 0)


def _whole(values: _Four) -> dict[str, _Four]:
    return {"all": values, "small_pool": (0, 0, 0, 0), "large_pool": values}


def _split(kinds: Mapping[str, Mapping[str, int]], peak: int | None = None) -> dict[str, _Four]:
    small, large = (_four(kinds[kind]) for kind in KINDS)
    current, summed, allocated, freed = (one + two for one, two in zip(small, large, strict=True))
    return {
        "all": (current, summed if peak is None else peak, allocated, freed),
        "small_pool": small,
        "large_pool": large,
    }


def _active(kinds: Mapping[str, Mapping[str, int]], pending: int, peak: int | None) -> dict[str, _Four]:
    stat = _split(kinds, peak)
    for pool in ("all", "large_pool"):
        current, highest, allocated, freed = stat[pool]
        active = current + pending
        stat[pool] = (active, max(highest, active), allocated, freed - pending)
    return stat


# ---- our own ----------------------------------------------------------------------------------------------


def _own_numbers(raw: Raw) -> dict[str, float]:
    allocations, hits = _both(raw["allocations"], "total"), raw["hits"]
    rounding = _both(raw["bytes"], "current") - _both(raw["requested"], "current")
    numbers: dict[str, float] = {
        "cache.hits": hits,
        "cache.misses": allocations - hits,
        "cache.hit_rate": _ratio(hits, allocations, 0.0),
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
        "waste.ratio": _ratio(raw["reserved"]["peak"], raw["peak_live"], 1.0),
        "waste.bytes": raw["reserved"]["current"] - (raw["live"] - raw["suspended_live"]),
        "waste.rounding_bytes": rounding,
        "fragmentation": fragmentation(raw),
        "streams": len(raw["streams"]),
        "tags": raw["tags"],
        "tags.other": raw["other_tags"],
        "stacks": raw["stacks"],
        "stacks.lost": raw["lost_stacks"],
    }
    numbers.update({f"rung.{name}": count for name, count in raw["rungs"].items()})
    return numbers


# ---- peaks for several watchers ---------------------------------------------------------------------------


_METERS = (
    *((stat, kind) for stat in ("allocations", "bytes", "requested") for kind in KINDS),
    ("reserved",),
    ("segments",),
    ("pending",),
)
_SCALARS = ("peak_live", "peak_active")


class Peaks:
    """The peaks of one pool, which counts only one set of them, kept apart for everyone who watches.

    Whenever a watch begins or ends, the pool's peaks are noted for all and start anew from what is current.
    """

    def __init__(self) -> None:
        """Begin without watches; the pool's own peaks are those it counts."""
        self._lock = new_lock()  # a finalizer may ask for statistics while they are made
        self._pools: dict[Any, int] = {}
        self._watches: list[dict[Any, int]] = []

    def begin(self, pool: Any) -> tuple[Raw, dict[Any, int]]:
        """Start a watch; returns the numbers at its start and what `end` and `of` want."""
        with self._lock:
            self._settle(pool)
            watch: dict[Any, int] = {}
            self._watches.append(watch)
            return pool.raw_stats(), watch

    def end(self, pool: Any, watch: dict[Any, int]) -> Raw:
        """End a watch; returns the numbers at its end, with its own peaks."""
        with self._lock:
            raw = self._settle(pool)
            self._watches = [each for each in self._watches if each is not watch]
            return _raised(raw, watch)

    def of(self, pool: Any, watch: dict[Any, int]) -> Raw:
        """The numbers now, with the peaks of a watch that goes on."""
        with self._lock:
            return _raised(pool.raw_stats(), watch)

    def raw_stats(self, pool: Any) -> Raw:
        """The pool's numbers, with its peaks since the last `reset`."""
        with self._lock:
            return _raised(pool.raw_stats(), self._pools)

    def reset(self, pool: Any) -> None:
        """Let the pool's peaks start anew; watches keep theirs."""
        with self._lock:
            self._settle(pool)
            self._pools = {}

    def _settle(self, pool: Any) -> Raw:
        raw: Raw = pool.raw_stats()
        for watch in (self._pools, *self._watches):
            _note(raw, watch)
        pool._restart_peaks()
        return raw


def _note(raw: Raw, watch: dict[Any, int]) -> None:
    for path in _METERS:
        watch[path] = max(watch.get(path, 0), _meter(raw, path)["peak"])
    for name in _SCALARS:
        watch[name] = max(watch.get(name, 0), raw[name])


def _raised(raw: Raw, watch: dict[Any, int]) -> Raw:
    """`raw` with each peak at least as high as `watch` has it."""
    for path in _METERS:
        meter = _meter(raw, path)
        meter["peak"] = max(meter["peak"], watch.get(path, 0))
    for name in _SCALARS:
        raw[name] = max(raw[name], watch.get(name, 0))
    return raw


def _meter(raw: Raw, path: tuple[str, ...]) -> dict[str, int]:
    found: Any = raw
    for name in path:
        found = found[name]
    meter: dict[str, int] = found
    return meter


# ---- one stretch of a program -----------------------------------------------------------------------------


class Measurement:
    """What a pool did inside a `with pool.measure():` block; inside it, what it did so far.

    Counts everything the pool served meanwhile, on any thread. Measurements nest and overlap freely.
    """

    def __init__(self, pool: Any, peaks: Peaks) -> None:
        """Made by `Pool.measure()`."""
        self._pool = pool
        self._peaks = peaks
        self._watch: dict[Any, int] | None = None
        self._start: Raw | None = None
        self._end: Raw | None = None

    def __enter__(self) -> Measurement:
        if self._start is not None:
            raise RuntimeError("a measurement is entered once; call measure() again")
        self._start, self._watch = self._peaks.begin(self._pool)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._watch is not None
        # A pool that was closed inside has nothing left to count; its last numbers stand.
        self._end = self._peaks.end(self._pool, self._watch)
        self._pool = None

    @property
    def allocations(self) -> int:
        """Allocations made."""
        return self._difference("allocations", "total")

    @property
    def frees(self) -> int:
        """Allocations freed."""
        return self.allocations - self._difference("allocations", "current")

    @property
    def bytes(self) -> int:
        """Bytes allocated, in blocks; freed ones included."""
        return self._difference("bytes", "total")

    @property
    def requested(self) -> int:
        """Bytes asked for, before rounding; freed ones included."""
        return self._difference("requested", "total")

    @property
    def kept(self) -> int:
        """Bytes live at the end beyond those at the beginning; negative where more was freed."""
        return self._difference("bytes", "current")

    @property
    def peak(self) -> int:
        """The most bytes live at once, above what was live at the beginning."""
        start, now = self._both_ends()
        return int(now["peak_live"] - start["live"])

    @property
    def peak_allocated(self) -> int:
        """The most bytes live at once, with what was live before."""
        return int(self._both_ends()[1]["peak_live"])

    @property
    def peak_reserved(self) -> int:
        """The most bytes held from the device at once."""
        return int(self._both_ends()[1]["reserved"]["peak"])

    @property
    def hits(self) -> int:
        """Allocations that a stream's own cache served."""
        start, now = self._both_ends()
        return int(now["hits"] - start["hits"])

    @property
    def hit_rate(self) -> float:
        """Share of allocations that a stream's own cache served; 0 without any."""
        return _ratio(self.hits, self.allocations, 0.0)

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that was free and of little use at the end; see `Stats`."""
        return fragmentation(self._both_ends()[1])

    def to_dict(self) -> dict[str, float]:
        """Every number by name."""
        return {name: getattr(self, name) for name in MEASURED}

    def _both_ends(self) -> tuple[Raw, Raw]:
        if self._start is None or self._watch is None:
            raise RuntimeError("nothing is measured yet; enter it: with pool.measure() as step:")
        if self._end is not None:
            return self._start, self._end
        return self._start, self._peaks.of(self._pool, self._watch)

    def _difference(self, stat: str, measure: str) -> int:
        start, now = self._both_ends()
        return _both(now[stat], measure) - _both(start[stat], measure)

    def _repr_html_(self) -> str:
        from html import escape

        from vram.core.html import measurement_html

        return escape(repr(self)) if self._start is None else measurement_html(self)

    def __repr__(self) -> str:
        if self._start is None:
            return "<vram.Measurement, not begun>"
        return (
            f"<vram.Measurement {self.allocations} allocations of {format_size(self.bytes)}, "
            f"{self.frees} frees, peak {format_size(self.peak)}, hit rate {self.hit_rate:.1%}>"
        )
