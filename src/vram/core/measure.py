"""`Measurement`: what pools did inside a `with` block, and the peaks behind it.

The native core counts one set of peaks per pool; `Peaks` keeps them apart for several measurements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

from vram.core.locks import new_lock
from vram.core.stats import KINDS, Counts, Raw, both, fragmentation, ratio, ready
from vram.sizes import format_count, format_size

__all__ = ["Follow", "Measurement", "Peaks"]

Follow: TypeAlias = Callable[[Callable[[Any], object]], Callable[[], object]]
"""Calls a function with each pool, present and future, until the function it returns is called."""

MEASURED = (
    *("allocations", "frees", "bytes", "requested", "kept", "peak", "peak_allocated"),
    *("peak_reserved", "hits", "stream_cache_hits"),
)
"""The numbers of one pool; over several pools they are summed."""
_METERS = (
    *((stat, kind) for stat in ("allocations", "bytes", "requested") for kind in KINDS),
    ("reserved",),
    ("segments",),
    ("pending",),
)
_SCALARS = ("peak_live", "peak_active")


class Peaks:
    """The peaks of one pool, kept apart for the pool itself and for each measurement.

    When a measurement starts or ends, the pool's peaks are noted for all of them and restart at the current
    values.
    """

    def __init__(self) -> None:
        """Start without measurements; the pool's own peaks are those it counts."""
        self._lock = new_lock()  # a finalizer may ask for statistics while they are made
        self._pools: dict[Any, int] = {}
        self._watches: list[dict[Any, int]] = []

    def begin(self, pool: Any) -> tuple[Raw, dict[Any, int]]:
        """Start a watch; returns the numbers at its start and the watch, for the calls below."""
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
        """The numbers now, with the peaks of a watch that continues."""
        with self._lock:
            return _raised(pool.raw_stats(), watch)

    def raw_stats(self, pool: Any) -> Raw:
        """The pool's numbers, with its peaks since the last `reset`."""
        with self._lock:
            return _raised(pool.raw_stats(), self._pools)

    def reset(self, pool: Any) -> None:
        """Restart the pool's peaks; watches keep theirs."""
        with self._lock:
            self._settle(pool)
            self._pools = {}

    def around(self, pool: Any, work: Callable[[], object], counts: Counts) -> None:
        """Do work that has at most `counts` live at once, and keep that out of everybody's peaks.

        No lock is held meanwhile: the work may call the program. What others do at the same time counts, up
        to the same amount less.
        """
        with self._lock:
            self._settle(pool)
        try:
            work()
        finally:
            with self._lock:
                raw: Raw = pool.raw_stats()
                for path, count in counts.items():
                    meter = _meter(raw, path)
                    meter["peak"] = max(meter["current"], meter["peak"] - count)
                live = sum(count for (stat, *_), count in counts.items() if stat == "bytes")
                for name in _SCALARS:
                    raw[name] = max(raw["live"], raw[name] - live)
                for watch in (self._pools, *self._watches):
                    _note(raw, watch)
                pool._restart_peaks()

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
    """`raw` with each peak at least as high as in `watch`."""
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


class _Part:
    """One pool of a measurement: its numbers at the start, and at the end or now."""

    def __init__(self, pool: Any) -> None:
        self.memory: str = pool.memory
        self._pool = pool
        self._start, self._watch = pool._peaks.begin(pool)
        self._end: Raw | None = None

    def end(self) -> None:
        # A pool that was closed inside counts nothing any more; its last numbers stand.
        self._end = self._pool._peaks.end(self._pool, self._watch)
        self._pool = None

    def now(self) -> Raw:
        if self._end is not None:
            return self._end
        found: Raw = self._pool._peaks.of(self._pool, self._watch)
        return found

    def numbers(self) -> tuple[int, ...]:
        """In the order of MEASURED."""
        start, now = self._start, self.now()

        def rise(stat: str, measure: str) -> int:
            return both(now[stat], measure) - both(start[stat], measure)

        allocations = rise("allocations", "total")
        return (
            allocations,
            allocations - rise("allocations", "current"),
            rise("bytes", "total"),
            rise("requested", "total"),
            rise("bytes", "current"),
            now["peak_live"] - start["live"],
            now["peak_live"],
            now["reserved"]["peak"],
            ready(now) - ready(start),
            now["hits"] - start["hits"],
        )


class Measurement:
    """What a pool did inside a `with pool.measure():` block; inside it, what it did so far.

    Counts everything the pool served meanwhile, on any thread. Measurements nest and overlap freely. Over
    several pools, all numbers are sums, except that the fragmentation is that of the most fragmented pool.
    """

    def __init__(self, follow: Follow) -> None:
        """Created by `Pool.measure()`, for example. `follow` gives the pools to measure."""
        self._follow = follow
        self._unfollow: Callable[[], object] | None = None
        self._parts: list[_Part] = []

    def __enter__(self) -> Measurement:
        if self._unfollow is not None:
            raise RuntimeError("a measurement is entered once; call measure() again")
        self._unfollow = self._follow(lambda pool: self._parts.append(_Part(pool)))
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._unfollow is not None
        self._unfollow()
        for part in self._parts:
            part.end()

    @property
    def allocations(self) -> int:
        """Allocations made."""
        return self._sum("allocations")

    @property
    def frees(self) -> int:
        """Allocations freed."""
        return self._sum("frees")

    @property
    def bytes(self) -> int:
        """Bytes allocated, in blocks; freed ones included."""
        return self._sum("bytes")

    @property
    def requested(self) -> int:
        """Bytes requested, before rounding; freed ones included."""
        return self._sum("requested")

    @property
    def kept(self) -> int:
        """Bytes live at the end beyond those at the beginning; negative where more was freed."""
        return self._sum("kept")

    @property
    def peak(self) -> int:
        """The most bytes live at once, above those live at the beginning."""
        return self._sum("peak")

    @property
    def peak_allocated(self) -> int:
        """The most bytes live at once, including those live before."""
        return self._sum("peak_allocated")

    @property
    def peak_reserved(self) -> int:
        """The most bytes held from the device at once."""
        return self._sum("peak_reserved")

    @property
    def hits(self) -> int:
        """Allocations served without a driver call."""
        return self._sum("hits")

    @property
    def hit_rate(self) -> float:
        """Share of allocations served without a driver call; 0 without any."""
        return ratio(self.hits, self.allocations, 0.0)

    @property
    def stream_cache_hits(self) -> int:
        """Allocations served by a stream's own cache, the fastest of the hits."""
        return self._sum("stream_cache_hits")

    @property
    def stream_cache_hit_rate(self) -> float:
        """Share of allocations served by a stream's own cache; 0 without any."""
        return ratio(self.stream_cache_hits, self.allocations, 0.0)

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that was free and of little use at the end; see `Stats`."""
        return max((fragmentation(part.now()) for part in self._begun()), default=0.0)

    def by_memory(self, name: str) -> dict[str, int]:
        """One of the numbers, such as "peak", by the memory that the pools allocate from ("cuda:0")."""
        totals: defaultdict[str, int] = defaultdict(int)
        for part in self._begun():
            totals[part.memory] += part.numbers()[MEASURED.index(name)]
        return dict(totals)

    def to_dict(self) -> dict[str, float]:
        """Every number by name."""
        return {
            name: getattr(self, name)
            for name in (*MEASURED, "hit_rate", "stream_cache_hit_rate", "fragmentation")
        }

    def _sum(self, name: str) -> int:
        return sum(self.by_memory(name).values())

    def _begun(self) -> list[_Part]:
        if self._unfollow is None:
            raise RuntimeError("nothing is measured yet; enter it: with pool.measure() as step:")
        return self._parts

    def _repr_html_(self) -> str:
        from html import escape

        from vram.core.html import measurement_html

        return escape(repr(self)) if self._unfollow is None else measurement_html(self)

    def __repr__(self) -> str:
        if self._unfollow is None:
            return "<vram.Measurement, not begun>"
        return (
            f"<vram.Measurement {format_count(self.allocations, 'allocation')} of {format_size(self.bytes)}, "
            f"{format_count(self.frees, 'free')}, peak {format_size(self.peak)}, "
            f"hit rate {self.hit_rate:.1%}>"
        )
