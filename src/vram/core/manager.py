"""The process-wide `MemoryManager`: one configured pool per device, with the method names of the reference
design (`allocate_memory`, `cleanup_cache`, …), and its adaptive mode.

It chooses pools and settings; the pools allocate and count.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import math
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, SupportsIndex, TextIO

from vram.arguments import real_number, require, require_path
from vram.config import DEFAULT_WARMUP, OPTIONS, Config
from vram.core.advice import Patterns
from vram.core.device import Device, is_default
from vram.core.journal import pool_trace
from vram.core.locks import new_lock
from vram.core.measure import Measurement
from vram.core.observer import Listeners
from vram.core.pool import Pool
from vram.core.spill import spillable
from vram.core.stats import fragmentation
from vram.core.ticker import every_second
from vram.errors import ConfigError, DeviceError, InvalidFree, VramError
from vram.sizes import format_size, parse_size
from vram.trace.model import Action

__all__ = [
    "AllocationStatistics",
    "MemoryManager",
    "PerformanceContext",
    "configure",
    "get_memory_manager",
]

STATS_JOURNAL = 65536
"""Events the journal of each stream keeps while statistics are enabled."""
MOST_STREAM_CACHE = 65536
"""Blocks a stream's cache is never expanded beyond."""
MOST_SHOWN = 4
"""Pools that the text of a manager names."""


_log = logging.getLogger("vram")


@dataclass(frozen=True)
class AllocationStatistics:
    """Statistics of the manager's pools, under the names of the reference design. Bytes and counts."""

    total_allocations: int = 0
    total_freed: int = 0
    peak_memory_usage: int = 0
    current_memory_usage: int = 0
    reserved_memory: int = 0
    cache_hits: int = 0
    """Allocations served without a driver call. Those of a warm-up do not count anywhere."""
    cache_misses: int = 0
    fragmentation_ratio: float = 0.0
    stream_cache_hits: int = 0
    """Of the hits, those that the stream's own cache served."""

    @property
    def cache_hit_rate(self) -> float:
        """Share of allocations served without a driver call; 0 before the first."""
        return self.cache_hits / self.total_allocations if self.total_allocations else 0.0

    @property
    def stream_cache_hit_rate(self) -> float:
        """Share of allocations served by the stream's own cache; 0 before the first."""
        return self.stream_cache_hits / self.total_allocations if self.total_allocations else 0.0

    def efficiency_score(self) -> float:
        """Efficiency of the caches from 0 to 1: the share of allocations they served; 1 before the first."""
        return self.cache_hit_rate if self.total_allocations else 1.0


class PerformanceContext(Measurement):
    """What happened inside `with manager.performance_context() as perf:`; read `perf.stats`."""

    @property
    def stats(self) -> AllocationStatistics:
        """The statistics of the block alone; `peak_memory_usage` is above what was live at its beginning."""
        return AllocationStatistics(
            total_allocations=self.allocations,
            total_freed=self.frees,
            peak_memory_usage=self.peak,
            current_memory_usage=self.kept,
            reserved_memory=self.peak_reserved,
            cache_hits=self.hits,
            cache_misses=self.allocations - self.hits,
            fragmentation_ratio=self.fragmentation,
            stream_cache_hits=self.stream_cache_hits,
        )


class MemoryManager:
    """One pool per device, created on first use, all with the same settings.

    Settings come from `configure()`, then from VRAM_CONF, VRAM_SEGMENT_SIZE, VRAM_CACHE_SIZE, VRAM_WARMUP
    and VRAM_STATS. Methods that allocate use the default device unless you name one; methods that inspect or
    clean up apply to all pools. Any thread may use it; after a fork the child needs a new one.
    """

    def __init__(self, **settings: Any) -> None:
        """Create a separate manager; `get_memory_manager()` returns the one of the process."""
        self._lock = new_lock()
        self._config = Config(settings)
        self._pools: dict[Device, Pool] = {}
        self._new_pools = Listeners()
        self._process = os.getpid()
        self._operations = itertools.count(1)
        self._only: Pool | None = None  # if it is the only one and on the default device, the usual case
        self._adapt_every = 0
        self._stream_cache_before: int | None = None
        self._end_upkeep: weakref.finalize[Any, Any] | None = None
        self._note_adaptive()

    # ---- pools ------------------------------------------------------------------------------------------

    def pool(self, device: str | Device | None = None) -> Pool:
        """The pool of a device (default: the default device), created if necessary."""
        place = device if isinstance(device, Device) else Device(device)
        found = self._pools.get(place)
        return found if found is not None and not found.closed else self._make_pool(place)

    def _make_pool(self, place: Device) -> Pool:
        self._require_own_process()
        with self._lock:
            found = self._pools.get(place)
            if found is not None and not found.closed:
                return found
            settings = self._pool_settings()
            if not spillable(place.backend):
                settings["spill"] = 0
            pool = Pool(place, **settings)
            if pairs := self._warmup_pairs():
                pool.warmup(pairs)
            self._new_pools.tell(pool)
            self._pools[place] = pool
            self._only = pool if len(self._pools) == 1 and is_default(place) else None
            self._note_adaptive()
            return pool

    def drop_pool(self, device: Device) -> Pool | None:
        """Forget the pool of a device and return it; the next use creates another."""
        with self._lock:
            pool = self._pools.pop(require(device, Device, "device"), None)
            self._only = None if self._only is pool else self._only
            return pool

    def _follow(self, follow: Callable[[Pool], object]) -> Callable[[], object]:
        """Call `follow` with every pool now, and with each new pool before its first use.

        Returns a function that ends it.
        """
        seen: dict[Pool, object] = {}  # a pool made meanwhile is told twice, perhaps by two threads

        def once(pool: Pool) -> None:
            mine = object()
            if seen.setdefault(pool, mine) is mine:
                follow(pool)

        end = self._new_pools.add(once)
        for pool in self.pools:  # without the lock: `follow` takes locks of the pool
            once(pool)
        return end

    def _pool_settings(self) -> dict[str, Any]:
        settings = {name: self._config[name] for name, option in OPTIONS.items() if option.scope != "manager"}
        if self._config["enable_stats"]:
            settings["journal"] = settings["journal"] or STATS_JOURNAL
        return settings

    def _warmup_pairs(self) -> tuple[tuple[int, int], ...]:
        wanted, pairs = self._config["enable_warmup"], self._config["warmup_sizes"]
        if wanted is False:
            return ()
        return pairs or (DEFAULT_WARMUP if wanted else ())

    def _require_own_process(self) -> None:
        if self._process != os.getpid():
            raise DeviceError(
                "this memory manager belongs to the parent process; call vram.get_memory_manager() again",
                code="closed",
            )

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Every open pool created so far."""
        with self._lock:
            return tuple(pool for pool in self._pools.values() if not pool.closed)

    # ---- allocation -------------------------------------------------------------------------------------

    def allocate_memory(
        self, size: int | str, *, stream: Any = None, device: str | Device | None = None
    ) -> int:
        """Allocate memory and return its address; `free_memory` frees it."""
        pool = self._only
        if pool is None or device is not None or pool.closed:
            pool = self.pool(device)
        address = pool.malloc(size, stream)
        if self._adapt_every:
            self._tick()
        return address

    def free_memory(
        self, ptr: int, size: int | str | None = None, *, device: str | Device | None = None
    ) -> None:
        """Free what `allocate_memory` returned. A `size` other than the requested one raises InvalidFree."""
        pool = self._only
        if pool is None or device is not None:
            pool = self._pool_of(ptr, device)
        if size is not None:
            text = isinstance(size, (bool, float, str))
            _require_size(pool, ptr, parse_size(size) if text else operator.index(size))  # type: ignore[arg-type]
        pool.free(ptr)
        if self._adapt_every:
            self._tick()

    def allocate_batch(
        self, sizes: Sequence[int | str], *, stream: Any = None, device: str | Device | None = None
    ) -> list[int]:
        """Allocate all sizes or none, adjacent if possible; returns their addresses."""
        addresses = self.pool(device).malloc_batch(sizes, stream=stream)
        if self._adapt_every:
            self._tick()
        return addresses

    def allocate_async(
        self, size: int | str, *, stream: Any = None, device: str | Device | None = None
    ) -> Future[int]:
        """Allocate on another thread; a Future of the address."""
        pool = self.pool(device)
        return pool._submit(functools.partial(pool.malloc, size, stream))

    def warmup_cache(
        self,
        sizes: Sequence[int | str],
        counts: Sequence[int] | int = 1,
        *,
        stream: Any = None,
        device: str | Device | None = None,
    ) -> None:
        """Prepare `counts[i]` blocks of `sizes[i]` bytes in the cache of a stream."""
        sizes = list(sizes)
        numbers = [counts] * len(sizes) if isinstance(counts, SupportsIndex) else list(counts)
        if len(numbers) != len(sizes):
            raise ConfigError(f"{len(sizes)} sizes need as many counts, not {len(numbers)}")
        self.pool(device).warmup(list(zip(sizes, numbers, strict=True)), stream=stream)

    def _pool_of(self, ptr: int, device: str | Device | None) -> Pool:
        pools = self.pools
        if device is not None or len(pools) <= 1:
            return self.pool(device) if device is not None or not pools else pools[0]
        for pool in pools:
            with contextlib.suppress(InvalidFree, DeviceError):
                pool.info(ptr)
                return pool
        return pools[0]

    # ---- settings ---------------------------------------------------------------------------------------

    def configure(self, settings: Mapping[str, object] | None = None, **more: Any) -> None:
        """Change settings, by dict or keyword; the others stay. Takes every option of `vram.config`.

        Existing pools follow immediately. Options that cannot change while memory is in use (`pages`) raise
        ConfigError then. `warmup_sizes` are prepared in existing and in new pools.
        """
        changes = {**(settings or {}), **more}
        with self._lock:
            self._require_changeable(changes)
            read = self._config.set(changes)
            core = {name: value for name, value in read.items() if OPTIONS[name].scope == "core"}
            for pool in self.pools:
                self._apply(pool, core, read)
            self._note_adaptive()
            if "stream_cache" in read:
                self._stream_cache_before = None

    def _require_changeable(self, changes: Mapping[str, object]) -> None:
        fixed = [name for name in changes if name in OPTIONS and not OPTIONS[name].live and name != "journal"]
        if fixed and self.pools:
            raise ConfigError(
                f"{fixed[0]} cannot change while a pool is in use; set it before the first allocation, "
                "or in VRAM_CONF",
                option=fixed[0],
            )

    def _apply(self, pool: Pool, core: Mapping[str, Any], read: Mapping[str, Any]) -> None:
        live = {name: value for name, value in core.items() if OPTIONS[name].live}
        if not spillable(pool.device.backend):
            live.pop("spill", None)
        if live:
            pool.reconfigure(live)
        if "journal" in read or "enable_stats" in read:
            pool.journal_start(self._pool_settings()["journal"])
        if "warmup_sizes" in read or read.get("enable_warmup"):
            pool.warmup(self._warmup_pairs())

    @property
    def settings(self) -> dict[str, Any]:
        """Every option in force, by name."""
        return dict(self._config)

    # ---- numbers ----------------------------------------------------------------------------------------

    def get_statistics(self) -> AllocationStatistics:
        """The statistics of all pools together."""
        every = [pool.stats() for pool in self.pools]
        return AllocationStatistics(
            total_allocations=sum(each.allocations for each in every),
            total_freed=sum(each.frees for each in every),
            peak_memory_usage=sum(each.peak_allocated for each in every),
            current_memory_usage=sum(each.allocated for each in every),
            reserved_memory=sum(each.reserved for each in every),
            cache_hits=sum(each.hits for each in every),
            cache_misses=sum(each.allocations - each.hits for each in every),
            fragmentation_ratio=max((each.fragmentation for each in every), default=0.0),
            stream_cache_hits=sum(each.stream_cache_hits for each in every),
        )

    def performance_context(self) -> PerformanceContext:
        """Measure a `with` block over all pools; read the `stats` of what it yields."""
        return PerformanceContext(self._follow)

    def analyze_allocation_patterns(self, device: str | Device | None = None) -> Patterns:
        """Diagnose a device's pool: sizes, hit rate, churn, suggestions. Print it, or read its attributes."""
        return self.pool(device).patterns()

    def dump_allocation_trace(self, file: str | os.PathLike[str] | TextIO | None = None) -> str:
        """Write live allocations and journal events to a file or path (default: stderr); returns the text.

        The journal is kept while `enable_stats` is set.
        """
        text = "".join(f"{line}\n" for pool in self.pools for line in _trace_lines(pool))
        if isinstance(file, (str, os.PathLike)):
            with open(require_path(file), "w", encoding="utf-8") as opened:
                opened.write(text)
        elif file is None or hasattr(file, "write"):
            print(text, end="", file=file or sys.stderr)
        else:
            raise TypeError(f"a trace is written to a path or a text file, not {type(file).__name__}")
        return text

    # ---- caches -----------------------------------------------------------------------------------------

    def cleanup_cache(self, threshold: float = 0.0, force: bool = False) -> int:
        """Release unused memory to the devices, down to `threshold` of what is reserved; returns the bytes.

        `force` waits for queued work that still uses freed memory, and releases everything unused.
        """
        threshold = real_number(threshold, "threshold, the share to keep,", least=0, most=1)
        keep = 0.0 if force else threshold
        released = 0
        for pool in self.pools:
            with _unless_closed(pool):
                released += pool.trim(math.floor(keep * pool.stats().reserved), wait=force)
        return released

    def enable_aggressive_coalescing(self, enabled: bool = True) -> None:
        """Merge free blocks now and with every free: streams keep no cache until you disable this again."""
        with self._lock:
            if enabled and self._stream_cache_before is None:
                before = self._config["stream_cache"]
                self.configure(stream_cache=0)
                self._stream_cache_before = before
            elif not enabled and self._stream_cache_before is not None:
                self.configure(stream_cache=self._stream_cache_before)
        if enabled:
            self.coalesce_free_blocks()

    def expand_cache_size(self, factor: float = 1.5) -> int:
        """Let each stream's cache keep `factor` times as many blocks; returns the number of blocks.

        Ends aggressive coalescing.
        """
        factor = real_number(factor, "factor", least=sys.float_info.min, most=sys.float_info.max)
        with self._lock:
            self.enable_aggressive_coalescing(False)
            blocks: int = min(
                MOST_STREAM_CACHE,
                math.ceil(min(MOST_STREAM_CACHE, max(1, self._config["stream_cache"]) * factor)),
            )
            warmed = {pool: pool.config()["stream_cache"] for pool in self.pools}
            self.configure(stream_cache=blocks)
            for pool, room in warmed.items():
                if room > blocks:  # made for a warm-up
                    pool.reconfigure({"stream_cache": room})
            return blocks

    def coalesce_free_blocks(self) -> None:
        """Empty the streams' caches and merge free blocks, in all pools."""
        for pool in self.pools:
            with _unless_closed(pool):
                pool.coalesce()

    def garbage_collect(self) -> int:
        """Collect Python's garbage, merge free blocks and release unused memory; returns the bytes."""
        gc.collect()
        self.coalesce_free_blocks()
        return self.cleanup_cache()

    # ---- adaptive mode ----------------------------------------------------------------------------------

    def memory_pressure(self) -> float:
        """The largest share of its limit, or of its device, that a pool's live and pending blocks take."""
        return max((_pressure(pool) for pool in self.pools), default=0.0)

    def adapt(self, pressure: float | None = None) -> str:
        """React to the memory pressure, measured unless given; returns "clean", "expand" or "rest".

        Above `pressure_high`, unused memory is released and freed blocks merge immediately. Below
        `pressure_low`, the caches expand by `expand_factor`. At any pressure, cached blocks merge in pools
        whose fragmentation exceeds `coalescing_threshold`. The adaptive mode does this
        once a second, and every `adapt_every` operations of the manager.
        """
        now = self.memory_pressure()
        if pressure is not None:
            now = real_number(pressure, "pressure", least=0, most=sys.float_info.max)
        if now > self._config["pressure_high"]:
            self.enable_aggressive_coalescing()
            self.cleanup_cache()
            return "clean"
        if now < self._config["pressure_low"]:
            self.expand_cache_size(self._config["expand_factor"])
        else:
            self.enable_aggressive_coalescing(False)
        self._coalesce_fragmented()
        return "expand" if now < self._config["pressure_low"] else "rest"

    def _coalesce_fragmented(self) -> None:
        for pool in self.pools:
            with _unless_closed(pool):
                if fragmentation(pool.raw_stats()) > self._config["coalescing_threshold"]:
                    pool.coalesce()

    def _tick(self) -> None:
        every = self._adapt_every  # may have become 0 meanwhile
        if every and next(self._operations) % every == 0:
            try:
                self.adapt()
            except VramError:  # the allocation itself has succeeded
                _log.warning("adapting to the memory pressure failed", exc_info=True)

    def _note_adaptive(self) -> None:
        self._adapt_every = max(1, self._config["adapt_every"]) if self._config["adaptive"] else 0
        wanted = self._config["adaptive"] or self._config.is_set("coalescing_threshold")
        if wanted and self._end_upkeep is None and self._pools:
            self._end_upkeep = weakref.finalize(self, every_second(_weakly(self)))
            self._end_upkeep.atexit = False
        elif self._end_upkeep is not None and not (wanted and self._pools):
            self._end_upkeep()
            self._end_upkeep = None

    def _keep_up(self) -> None:
        """What happens once a second, whoever allocates from the pools."""
        if self._config["adaptive"]:
            self.adapt()
        else:
            self._coalesce_fragmented()

    def close(self) -> None:
        """Close every pool; the next allocation creates new ones."""
        with self._lock:
            pools, self._pools, self._only = self._pools, {}, None
            self._note_adaptive()
        for pool in pools.values():
            pool.close()

    def _repr_html_(self) -> str:
        from vram.core.html import manager_html

        return manager_html(self)

    def __repr__(self) -> str:
        pools = self.pools
        more = f", and {len(pools) - MOST_SHOWN} more" if len(pools) > MOST_SHOWN else ""
        shown = ", ".join(map(repr, pools[:MOST_SHOWN])) + more
        return f"<vram.MemoryManager {shown or 'without pools yet'}>"


def _pressure(pool: Pool) -> float:
    raw = pool.raw_stats()
    total = pool.device.total_memory
    used = raw["live"] + raw["pending"]["current"] - raw["suspended_live"] - raw.get("spilled_live", 0)
    return float(used / max(1, min(pool.limit or total, total)))


@contextlib.contextmanager
def _unless_closed(pool: Pool) -> Iterator[None]:
    """Let another thread close the pool meanwhile."""
    try:
        yield
    except DeviceError:
        if not pool.closed:
            raise


def _weakly(manager: MemoryManager) -> Callable[[], None]:
    reference = weakref.ref(manager)

    def keep_up() -> None:
        if (found := reference()) is not None and found._process == os.getpid():
            found._keep_up()

    return keep_up


def _require_size(pool: Pool, ptr: int, size: int) -> None:
    known = pool.info(ptr)["requested"]
    if size != known:
        raise InvalidFree(
            f"the allocation at {ptr:#x} has {known} bytes, not {size}; free it with the requested size",
            ptr=ptr,
            size=size,
            requested=known,
        )


def _trace_lines(pool: Pool) -> Iterable[str]:
    yield repr(pool)
    for leak in pool.leaks():
        yield f"  live: {leak}"
    trace = pool_trace(pool, segments=False)
    if trace.dropped:
        yield f"  … {trace.dropped} earlier events were dropped"
    rows = zip(trace.action, trace.time_us, trace.address, trace.size, trace.stream, trace.tag, strict=True)
    for event, (action, time_us, address, size, stream, tag) in enumerate(rows):
        label = f" tag {trace.tags[tag]!r}" if tag else ""
        yield (
            f"  {event:>8} {time_us / 1e6:.6f} s {Action(action).name.lower():<14} {address:#x} "
            f"{format_size(size)} stream {trace.streams[stream]}{label}"
        )


# ---- the manager of the process----------------------------------------------------------------------------

_manager: MemoryManager | None = None
_manager_lock = new_lock()  # a finalizer may ask while it is created


def get_memory_manager() -> MemoryManager:
    """Return the memory manager of this process, created from the environment on first use."""
    global _manager
    found = _manager
    if found is not None:
        return found
    with _manager_lock:
        if _manager is None:
            _manager = MemoryManager()
        return _manager


def current_config() -> Config | None:
    """The settings of the process's manager; None before it is created."""
    return None if _manager is None else _manager._config


def configure(settings: Mapping[str, object] | None = None, **more: Any) -> None:
    """Change settings of the process-wide manager, by dict or keyword; see `MemoryManager.configure`."""
    get_memory_manager().configure(settings, **more)


def _after_fork_in_child() -> None:
    global _manager
    _manager = None


os.register_at_fork(after_in_child=_after_fork_in_child)
