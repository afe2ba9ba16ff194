"""`Pool`: the allocator as Python uses it. Allocating and freeing are methods of the native base class.

This module adds configuration, asynchronous allocation, callbacks, statistics and snapshots. `stats` names
the numbers, `snapshot` describes the blocks, `oom` explains failures.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from vram import _native
from vram.arguments import shown, whole_number
from vram.config import AUTO, OPTIONS, Config, limit_bytes, parse_pool_options, read_options
from vram.core.advice import Patterns, find_patterns
from vram.core.buffer import Buffer
from vram.core.closing import Closing
from vram.core.device import Device
from vram.core.journal import pool_trace
from vram.core.locks import new_lock
from vram.core.measure import Measurement, Peaks
from vram.core.observer import closing, failures, register, resuming, suspending
from vram.core.oom import explain_out_of_memory
from vram.core.release import follow_threshold
from vram.core.signals import raised_by_handler
from vram.core.snapshot import Leak, Mark, Snapshot, Stack, leaks_of, mark_of
from vram.core.spill import (
    SavedTensors,
    Spilled,
    SpilledTag,
    after_spill,
    before_spill,
    look_after,
    promised_host_bytes,
    spill_facts,
    spillable,
    spilled_of,
    spilled_tags_of,
    steer,
    with_saved,
)
from vram.core.stats import Raw, Stats, Uncounted, counts_of
from vram.core.tags import current_tag
from vram.errors import ConfigError, DeviceError, OutOfMemory
from vram.sizes import format_size, parse_size
from vram.trace.model import Trace

__all__ = ["OomHandle", "PinnedPool", "Pool"]

ASYNC_WORKERS = 2
"""Threads that serve `allocate_async` for all pools; slow calls wait without the GIL."""
MODEL_HOSTS: Final = 4
"""The host memory of a model is this many times the memory of the model."""
KEEPS = ("host", "discard", "mapped")
"""What `suspend` may do with contents."""
MAPPED: Final = "mapped"
MOST_WARM = 1 << 20
"""The most blocks that one warmup prepares."""
MOST_EXPLAINED = 200_000
"""With more live blocks than this, OutOfMemory does not examine each of them."""

_log = logging.getLogger("vram")


class Pool(Closing, _native.PoolCore):
    """An allocator for the memory of one device: `allocate` returns a Buffer, `malloc` a plain address.

    `device` is a name or a Device (default: the default device). `config` takes the options of
    `vram.config`: limit, cross_stream, pages, stream_cache, journal, stacks and others; options that are not
    given come from VRAM_CONF. Any thread may use the pool. `close()`, the end of a `with` block, or garbage
    collection after the last Buffer releases the memory.
    """

    _title = "vram.Pool"
    _auto_spill = False  # the option spill is "auto"

    def __init__(self, device: str | Device | None = None, **config: Any) -> None:
        """Create a pool; it takes nothing from the device before the first allocation."""
        settings = Config(config, ("core", "pool"))
        place = device if isinstance(device, Device) else Device(device)
        self._memory = self._memory_of(place)
        super().__init__(place, self._options(settings, config), self._memory)
        self._begin(place, settings)

    def _options(self, settings: Config, given: Mapping[str, object]) -> dict[str, object]:
        """The options of the native pool. `spill` of VRAM_CONF has no effect where memory cannot spill."""
        self._auto_spill = settings["spill"] == AUTO
        promised = promised_host_bytes(self) if self._auto_spill else 0
        options = settings.core_options(self._memory.total_bytes, promised)
        if not given.get("spill") and self._why_unspillable(options):
            return {**options, "spill": 0}
        self._require_spillable(options, options)
        return options

    def _require_spillable(self, given: Mapping[str, object], options: Mapping[str, object]) -> None:
        if given.get("spill") and (why := self._why_unspillable(options)):
            raise ConfigError(
                f"spill does not apply to this memory: {why}", option="spill", value=given["spill"]
            )

    def _why_unspillable(self, options: Mapping[str, object]) -> str:
        """Why the memory of a pool with these options cannot spill; "" if it can."""
        if spillable(self._memory):
            return "" if options.get("pages", True) else "the option pages is off"
        return "it is host memory already" if self._memory.host_accessible else "it cannot map host memory"

    def _begin(self, place: Device, settings: Config) -> None:
        """Set up the Python side, once the native pool exists."""
        self._stack_wishes: set[int] = set()
        self._keep_stacks(settings["stacks"] == "python", self)
        self._recorder: Any = None  # the vram.Recorder of this pool, which sets it
        self._peaks = Peaks()
        self._apart = Uncounted()  # requests of warmup and reserve
        self._saved: dict[str | None, SavedTensors] = {}  # by tag
        self._callbacks = _Callbacks()
        self._futures: set[Future[Any]] = set()
        self._store: Pool | None = None
        self.number = -1
        place._core.add_listener(self.stream_listener())
        register(self)
        follow_threshold(self)
        self._tell_before_spill()

    def _keep_stacks(self, wanted: bool, who: object) -> None:
        """Keep the Python stacks of allocations while at least one owner asks for them."""
        (self._stack_wishes.add if wanted else self._stack_wishes.discard)(id(who))
        self.keeps_stacks = bool(self._stack_wishes)

    @property
    def memory(self) -> str:
        """Where its memory is: the name of the device, or "host" for memory locked for a device."""
        return self.device.name

    def _memory_of(self, place: Device) -> _native.Backend:
        """The backend that the memory comes from."""
        return place.backend

    # ---- allocation -------------------------------------------------------------------------------------

    def allocate_async(
        self, size: int | str, *, stream: Any = None, tag: str | None = None
    ) -> Future[Buffer]:
        """Allocate on another thread; returns a Future of the Buffer, or of the error.

        The tag in force at the call counts. Closing the pool cancels requests that have not started.
        """
        label = current_tag() if tag is None else tag
        return self._submit(lambda: self.allocate(size, stream=stream, tag=label))

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        future = _workers().submit(work)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def reserve(self, size: int | str, *, stream: Any = None) -> None:
        """Prepare `size` contiguous bytes for `stream`, so that later allocations there need no growth.

        Memory that is ready already counts. Raises OutOfMemory if there is not enough.
        """
        wanted = parse_size(size)

        def work(made: list[int]) -> None:
            address = self.malloc(wanted, stream)
            made.append(wanted)
            self._free_all([address])

        self._uncounted([wanted], work)

    def reserve_async(self, size: int | str, *, stream: Any = None) -> Future[None]:
        """Like reserve, on another thread. The caches continue to serve requests meanwhile."""
        return self._submit(lambda: self.reserve(size, stream=stream))

    def warmup(
        self, sizes: Mapping[int | str, int] | Iterable[tuple[int | str, int]], *, stream: Any = None
    ) -> None:
        """Prepare blocks in the cache of `stream`: `{size: count}`, or pairs of these; all or none.

        The cache may hold all of them, regardless of `stream_cache`.
        """
        pairs = sizes.items() if isinstance(sizes, Mapping) else sizes
        wanted = _repeated([(parse_size(size), _checked_count(count)) for size, count in pairs])

        def work(made: list[int]) -> None:
            # All at once: a search for the next size would merge the blocks prepared for this one.
            addresses = self.malloc_batch(wanted, stream)
            made += wanted
            room = self.raw_stats()["cached_blocks"] + len(wanted)
            if room > self.config()["stream_cache"]:
                self.reconfigure({"stream_cache": room})
            self._free_all(addresses)
            for size in dict.fromkeys(wanted):  # this also prepares the code path of the first real use
                address = self.malloc(size, stream)
                made.append(size)
                self._free_all([address])

        self._uncounted(wanted, work)

    def _uncounted(self, wanted: list[int], work: Callable[[list[int]], None]) -> None:
        """Do work that allocates and frees `wanted`, and appends to its argument what it has allocated."""

        def work_apart() -> None:
            made: list[int] = []
            before = super(Pool, self).raw_stats()
            try:
                work(made)
            finally:
                self._apart.add(counts_of(made), before, super(Pool, self).raw_stats())

        self._peaks.around(self, work_apart, counts_of(wanted))

    def raw_stats(self) -> Raw:
        """The native counts, without what `warmup` and `reserve` do: statistics are about the program."""
        return with_saved(self._apart.taken_from(super().raw_stats()), self._saved)

    def _free_all(self, addresses: list[int]) -> None:
        """Free blocks that the program has not seen, even if zeroing fails; raises the first failure."""
        failure: DeviceError | OutOfMemory | None = None
        for address in addresses:
            try:
                self.free(address)
            except (DeviceError, OutOfMemory) as error:
                failure = failure or error
                with contextlib.suppress(DeviceError, OutOfMemory):
                    self.free(address)
        if failure is not None:
            raise failure

    # ---- limits and housekeeping ------------------------------------------------------------------------

    def reconfigure(self, options: Mapping[str, object], /) -> None:
        """Change options of `vram.config` that can change while the pool is in use; the others stay."""
        auto = read_options(options, ("core",)).get("spill") == AUTO
        promised = promised_host_bytes(self) if auto else 0
        settings = parse_pool_options(options, capacity=self._memory.total_bytes, promised=promised)
        for name in settings:
            if not OPTIONS[name].live:
                raise ConfigError(f"{name} cannot change; set it when you create the pool", option=name)
        self._require_spillable(settings, self.config())
        super().reconfigure(settings)
        if "spill" in settings:
            self._auto_spill = auto
        follow_threshold(self)
        self._tell_before_spill()

    @property
    def limit(self) -> int | None:
        """The most bytes to hold from the device, or None. Set bytes, "20GiB" or a share (0.9)."""
        return self.config()["limit"] or None

    @limit.setter
    def limit(self, value: int | float | str | None) -> None:
        read = read_options({"limit": value})["limit"]
        self.set_limit(limit_bytes(read, self._memory.total_bytes))

    def _limit_name(self) -> str:
        """The name of the option that bounds the pool, for OutOfMemory."""
        return "limit"

    def allow_access(self, device: str | Device) -> None:
        """Let kernels of another device use the memory of this pool, including what is allocated later.

        This is what cudaMemPoolSetAccess and cudaDeviceEnablePeerAccess are for; `device.can_access` says
        whether it is possible. Copies with `Buffer.copy_from` and `copy_to` do not need it. Access cannot be
        revoked. Memory that is opened to more devices takes longer to map, and a device applies it to new
        memory of all its pools with pages.
        """
        other = device if isinstance(device, Device) else Device(device)
        if other == self.device:
            return
        if self._memory.host_accessible or not other.can_access(self.device):
            why = "memory on the host" if self._memory.host_accessible else f"memory of {self.device.name}"
            raise DeviceError(
                f"{other.name} cannot use {why} directly; copy it with Buffer.copy_from, which stages copies "
                "in host memory where needed, or allocate from a pool of that device.",
                device=self.device.name,
                other=other.name,
                code="unsupported",
            )
        self.add_peer(other.index)
        if self._why_no_pages():
            other.backend.open_plain(self.device.backend)

    def trim(self, to: int | str = 0, *, wait: bool = False) -> int:
        """Release unused memory until at most `to` bytes are reserved; returns the number of bytes released.

        Memory that queued work still uses stays, unless `wait` is true. So does memory whose release would
        itself wait for everything running on the device: plain segments of a GPU, and page-locked memory.
        Visits every stream, free page and segment.
        """
        before = self._reserved()
        self.trim_to(parse_size(to), wait)
        return max(0, before - self._reserved())

    # ---- suspending -------------------------------------------------------------------------------------

    def suspend(self, tag: str | None = None, keep: str = "host", *, store: Pool | None = None) -> int:
        """Release the memory of live buffers until `resume()`; returns the number of bytes released.

        Suspends the buffers allocated under `tag`, or all. They keep their addresses: pointers, tensors and
        captured graphs are valid again after `resume()`, and must not be used before. `keep="host"` copies
        the contents to page-locked memory of `store` (default: the pool's own, see `store`); `"discard"`
        leaves them undefined. `"mapped"` spills them (see `Buffer.spill`; it needs the option `spill`): they
        can be used all the time, over the bus. Free and cached memory is released as well; a page that other
        buffers also use stays. The call waits for work queued on the streams of these buffers and for the
        copies, without the GIL and without stopping the pool. If it fails, nothing is suspended. Visits every
        block.
        """
        if keep not in KEEPS:
            raise ConfigError(
                f"keep={keep!r} is neither 'host' (contents come back) nor 'discard' (they are lost) nor "
                "'mapped' (they stay usable in host memory)",
                option="keep",
                value=keep,
            )
        if keep == MAPPED:
            return self._park(tag, store)
        raw, kept = self.raw_stats(), keep == "host"
        # Contents to keep of buffers that are suspended already may be on a page that is released now.
        place = (store or self.store) if raw["paged"] and (kept or raw["suspended_blocks"]) else None
        try:
            with suspending(self, tag):
                return self.suspend_blocks(tag, kept and raw["paged"], place)
        except OutOfMemory as error:
            error.add_note("suspend() keeps contents in this host memory; nothing was suspended or lost.")
            raise

    def resume(self, tag: str | None = None) -> int:
        """Back buffers suspended under `tag`, or all, at the same addresses; returns the number of bytes.

        When it returns, the contents that were kept are there, for every stream. If there is not enough
        memory, it raises OutOfMemory, everything stays suspended, and you can try again. Of what was
        suspended with `keep="mapped"`, as much returns as fits. Visits every block.
        """
        with resuming(self):
            resumed = self.resume_blocks(tag)
        return resumed + (self.unpark_blocks(tag) if self.raw_stats().get("parked") else 0)

    def _park(self, tag: str | None, store: Pool | None) -> int:
        """Suspend with `keep="mapped"`."""
        if store is not None:
            raise ConfigError(
                f"keep={MAPPED!r} keeps contents under their addresses; omit store", option="store"
            )
        self._require_spill(f"keep={MAPPED!r}", option="keep", value=MAPPED)
        before = self._reserved()
        self.park_blocks(tag)
        self.trim_to(0, True)
        return max(0, before - self._reserved())

    def _require_spill(self, what: str, **facts: Any) -> None:
        options = self.config()
        if why := self._why_unspillable(options):
            raise ConfigError(f"{what} does not apply to this memory: {why}", **facts)
        if not options.get("spill"):
            raise ConfigError(f"{what} moves memory to host pages: it needs the option spill", **facts)

    def park_blocks(self, tag: str | None, /) -> int:
        """Move allocations under `tag`, or all, to host memory, where they stay; returns the bytes moved."""
        self._know_streams()
        steer(self)
        return super().park_blocks(tag)

    def unpark_blocks(self, tag: str | None, /) -> int:
        """Move what `park_blocks` moved back to the device; returns the bytes moved."""
        self._know_streams()
        return super().unpark_blocks(tag)

    def suspend_async(
        self, tag: str | None = None, keep: str = "host", *, store: Pool | None = None
    ) -> Future[int]:
        """Like suspend, on another thread. Unless `keep` is "mapped", do not use the buffers from then on."""
        return self._submit(lambda: self.suspend(tag, keep, store=store))

    def resume_async(self, tag: str | None = None) -> Future[int]:
        """Like resume, on another thread: the program continues while contents are copied."""
        return self._submit(lambda: self.resume(tag))

    @property
    def store(self) -> Pool:
        """The pool of page-locked memory where `suspend` keeps contents, created on first use.

        It keeps its memory for the next time. Locking memory takes long, so `store.reserve("8GiB")` in
        advance makes the first suspend as fast as later ones; `store.trim()` releases the memory.
        """
        if self._store is None or self._store.closed:
            self._store = _store_for(self)
        return self._store

    # ---- spilling ---------------------------------------------------------------------------------------

    def spilled(self) -> list[Spilled]:
        """The allocations that are in host memory now, wholly or in part, most bytes first.

        Memory moves there when the device is full and the option `spill` is set, or with `Buffer.spill`.
        Visits every block.
        """
        return spilled_of(self)

    def spilled_tags(self) -> list[SpilledTag]:
        """What is in host memory, what was moved so far and how long that took, by tag; most moved first."""
        return spilled_tags_of(self.raw_spill_by_tag(), self._saved)

    def spill_block(self, ptr: int, /) -> int:
        """Move an allocation to host memory; returns the bytes that moved."""
        self._require_spill("spill()", option="spill")
        self._know_streams()
        steer(self)
        return super().spill_block(ptr)

    def prefetch_block(self, ptr: int, /) -> int:
        """Move an allocation back to the device; returns the bytes that moved."""
        self._know_streams()
        return super().prefetch_block(ptr)

    def bring_back(self, most: int, wait: bool = False, /) -> int:
        """Move at most so many bytes back to the device while enough of it is free; returns how many.

        With `wait`, memory counts as free that queued work still uses: this waits for it.
        """
        self._know_streams()
        return super().bring_back(most, wait)

    def _know_streams(self) -> None:
        """A swap holds the streams that vram knows; PyTorch's may not have been used for memory yet."""
        if isinstance(self._memory, _native.CudaBackend):
            self.device._core.adopt_torch()

    def _can_spill(self) -> bool:
        return not self._why_unspillable(self.config())

    def _tell_before_spill(self) -> None:
        if self.config().get("spill"):
            weak = weakref.ref(self)

            def tell(needed: int, moved: int) -> None:
                if (pool := weak()) is None:
                    return
                if moved:
                    return after_spill(pool, needed, moved)
                pool._know_streams()
                before_spill(pool, needed)

            self.set_spill_callback(tell)
            look_after(self)

    def _reserved(self) -> int:
        return int(self.raw_stats()["reserved"]["current"])

    def on_oom(self, callback: Callable[..., object]) -> OomHandle:
        """Call `callback(size, stream)` before an allocation fails; if it returns true, the pool tries again.

        Callbacks run in the order in which they were added, in the allocating thread, and may free, trim or
        allocate. A callback may take fewer arguments. Its exceptions are logged, and are in the error's
        `report` if the allocation fails. Call `remove()` of the returned handle to remove the callback.
        """
        first = not self._callbacks
        handle = self._callbacks.add(callback)
        if first:
            self.set_oom_callback(_weakly(self))
        return handle

    def on_high_water(
        self, mark: int | float | str | None, callback: Callable[[int], object] | None = None
    ) -> None:
        """Call `callback(reserved)` when the reserved memory has risen above `mark`: a soft cap.

        `mark` is bytes, a string such as "20GiB" or a share of the device (0.9); None removes the callback,
        and another call replaces it. It runs after the allocation, in the allocating thread, and may free,
        trim or allocate. It is called once, and again only after the reserved memory was at the mark or below
        when the pool looked, which it does after allocations that no cache served. Its exceptions are
        reported and ignored.
        """
        try:
            read = read_options({"limit": mark})["limit"]
        except ConfigError as error:
            raise ConfigError(
                f'mark cannot be {shown(mark)}; valid: bytes, a string such as "20GiB", a fraction of the '
                "device above 0 and at most 1.0, or None",
                value=mark,
            ) from error
        size = limit_bytes(read, self._memory.total_bytes)
        if not callable(callback) and (size or callback is not None):
            raise TypeError(f"on_high_water takes a callable, not {type(callback).__name__}")
        self.set_high_water(size, callback if size else None)

    # ---- statistics and snapshots -----------------------------------------------------------------------

    def stats(self) -> Stats:
        """The statistics now, under the keys of torch.cuda.memory_stats and ours. Visits every stream."""
        return Stats(self._peaks.raw_stats(self), self._why_no_pages())

    def _why_no_pages(self) -> str:
        """Empty if pages are mapped, or the pool does not know."""
        if self._memory.pages:
            return "" if self.config().get("pages", True) else "plain segments: the option pages is off"
        return f"plain segments: {self._memory.no_pages or 'the device has no pages'}"

    def reset_peak(self) -> None:
        """Restart all peaks at the current values. Measurements under way keep theirs."""
        self._peaks.reset(self)

    def _restart_peaks(self) -> None:
        super().reset_peak()

    def measure(self) -> Measurement:
        """Measure a `with` block: its own allocations, bytes, frees, peak, hits and fragmentation."""

        def only_this(add: Callable[[Pool], object]) -> Callable[[], None]:
            add(self)
            return lambda: None

        return Measurement(only_this)

    def snapshot(self) -> Snapshot:
        """Every segment and block at this moment."""
        return Snapshot.of(self.device.name, self.raw_snapshot(), self.raw_stats())

    def mark(self) -> Mark:
        """Remember the live allocations, for `leaks(since=...)`."""
        return mark_of(self.snapshot())

    def leaks(self, since: Mark | None = None) -> list[Leak]:
        """Live allocations, newer than the mark if one is given, grouped by tag and size; most bytes first.

        With the option `stacks="python"` each group has the stacks that allocated it.
        """
        return leaks_of(self.snapshot(), since)

    def journal(self) -> Trace:
        """The events that the journal keeps (option `journal`), and the segments there are now."""
        return pool_trace(self)

    def patterns(self) -> Patterns:
        """Diagnose the program: sizes, hit rate, churn, and suggestions.

        Sizes are known if a journal is kept (option `journal`, or `journal_start()`).
        """
        journal = pool_trace(self, segments=False)
        return find_patterns(self._peaks.raw_stats(self), self.config(), journal)

    # ---- end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the device and release all memory; live buffers become invalid.

        A recorder of the pool is closed first. Closing again does nothing. Visits every stream and block.
        """
        if not self.closed:  # in the child of a fork no thread would finish them
            if self._recorder is not None:
                self._recorder.close()
            for future in tuple(self._futures):
                future.cancel()
            if not _here.works:  # otherwise a callback closes it, and would wait for its own allocation
                wait(tuple(self._futures))
        with closing(self):
            super().close()
        if self._store is not None:
            self._store.close()

    def __repr__(self) -> str:
        if "_futures" not in self.__dict__:
            return f"<{self._title}, not made>"
        if self.closed:
            return f"<{self._title} on {self.device.name}, closed>"
        raw: Raw = self.raw_stats()
        held = f"{format_size(raw['live'])} allocated, {format_size(raw['reserved']['current'])} reserved"
        return f"<{self._title} on {self.device.name}: {held}>"

    def _repr_html_(self) -> str:
        from vram.core.html import pool_html

        return pool_html(self)


class PinnedPool(Pool):
    """A pool of host memory that is page-locked for a device's copies.

    `device` is the device whose streams order the copies (default: the default device). The options are
    those of `Pool` except `pages`; a `limit` given as a share refers to the machine's memory. Buffers are
    NumPy arrays without a copy: `np.asarray(buffer)`. Copies between them and buffers of the device are
    queued on the stream and return immediately. Because the host writes here without waiting for a stream,
    a freed buffer is reused only when the copies that use it have completed, even on its own stream. Use
    `record_stream` for copies made by other libraries.
    """

    _title = "vram.PinnedPool"

    def __init__(self, device: str | Device | None = None, **config: Any) -> None:
        """Create a pool; it takes nothing from the machine before the first allocation."""
        settings = Config(config, ("core", "pool"))
        if "pages" in config and settings["pages"]:
            raise ConfigError(
                "pages cannot be true: page-locked memory is registered in whole pieces and not mapped page "
                "by page; leave the option out",
                option="pages",
                value=config["pages"],
            )
        config["pages"] = False
        super().__init__(device, **config)

    @property
    def memory(self) -> str:
        """Always "host"."""
        return "host"

    def _memory_of(self, place: Device) -> _native.Backend:
        return _native.PinnedBackend(place.backend)

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked for a GPU; other devices do not need it."""
        return isinstance(self._memory, _native.PinnedBackend) and self._memory.pinned


def _store_for(pool: Pool) -> Pool:
    """A new pool for the contents that `pool.suspend` keeps; for a model it has only addresses, too."""
    kind = _ModelStore if isinstance(pool._memory, _native.ModelBackend) else PinnedPool
    zero = pool.config()["zero_on_free"]
    # Contents are large pieces of any size, so each gets exactly what it needs.
    return kind(pool.device, limit=None, segment_size="2MiB", zero_on_free=zero, journal=0, stacks="none")


class _ModelStore(PinnedPool):
    """Host memory that a model's copies never touch, large enough for a large model."""

    def _memory_of(self, place: Device) -> _native.Backend:
        return _native.HostBackend(MODEL_HOSTS * place.total_memory)


def _repeated(pairs: list[tuple[int, int]]) -> list[int]:
    """Each size as often as requested."""
    blocks = sum(count for _, count in pairs)
    if blocks > MOST_WARM:
        raise ConfigError(f"warmup prepares at most {MOST_WARM} blocks, not {blocks}", value=blocks)
    return [size for size, count in pairs for _ in range(count)]


def _checked_count(count: Any) -> int:
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise ConfigError(f"{shown(count)} is not a number of blocks; write {{size: count}}", value=count)
    return whole_number(count, "the number of blocks")


# ---- asynchronous allocation ------------------------------------------------------------------------------


class _Worker(threading.local):
    """Whether this thread serves `allocate_async`."""

    works = False


_here = _Worker()


def _begin_work() -> None:
    _here.works = True


_executor: ThreadPoolExecutor | None = None
_executor_lock = new_lock()  # a finalizer may ask while it is created


def _workers() -> ThreadPoolExecutor:
    """The threads shared by all pools. Python waits for them at exit."""
    global _executor
    with _executor_lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(ASYNC_WORKERS, "vram-allocate", initializer=_begin_work)
        return _executor


def _after_fork_in_child() -> None:
    global _executor
    _executor = None


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- out of memory ----------------------------------------------------------------------------------------


class OomHandle:
    """A callback registered with `Pool.on_oom`."""

    def __init__(self, callbacks: _Callbacks, callback: Callable[..., object]) -> None:
        """Created by `Pool.on_oom`."""
        self.callback = callback
        self._callbacks = callbacks
        self._arguments = _arguments_taken(callback)

    def remove(self) -> None:
        """Remove the callback. Removing it again does nothing."""
        self._callbacks.remove(self)

    def __call__(self, size: int, stream: int) -> bool:
        """Call it as the pool does."""
        return bool(self.callback(*(size, stream)[: self._arguments]))


def _arguments_taken(callback: Callable[..., object]) -> int:
    try:
        parameters = inspect.signature(callback).parameters.values()
    except (ValueError, TypeError):
        return 2
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return 2
    return min(2, sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters))


class _Here(threading.local):
    """The state of callbacks in one thread."""

    busy = False
    errors: tuple[str, ...] = ()


class _Callbacks:
    """The out-of-memory callbacks of one pool, in order."""

    def __init__(self) -> None:
        self._handles: tuple[OomHandle, ...] = ()
        self._lock = new_lock()  # a finalizer may come in between
        self._here = _Here()

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, callback: Callable[..., object]) -> OomHandle:
        if not callable(callback):
            raise TypeError(f"on_oom takes a callable, not {type(callback).__name__}")
        handle = OomHandle(self, callback)
        with self._lock:
            self._handles = (*self._handles, handle)
        return handle

    def remove(self, handle: OomHandle) -> None:
        with self._lock:
            self._handles = tuple(each for each in self._handles if each is not handle)

    def call(self, size: int, stream: int) -> bool:
        """Call all of them; true if one asks to try again. Allocations inside do not call them again."""
        if self._here.busy:
            return False
        self._here.busy, self._here.errors = True, ()
        try:
            return any([self._call_one(handle, size, stream) for handle in self._handles])
        finally:
            self._here.busy = False

    def _call_one(self, handle: OomHandle, size: int, stream: int) -> bool:
        try:
            return handle(size, stream)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._here.errors += (repr(error),)
            _log.exception("the out-of-memory callback %r failed", handle.callback)
            return False

    def take_errors(self) -> tuple[str, ...]:
        """The errors of this thread's callbacks during the last request."""
        errors, self._here.errors = self._here.errors, ()
        return errors


def _weakly(pool: Pool) -> Callable[[int, int], bool]:
    """What the native pool calls: it does not keep the pool alive or hide callbacks from the collector."""
    find = weakref.ref(pool)

    def call(size: int, stream: int) -> bool:
        found = find()
        return found is not None and found._callbacks.call(size, stream)

    return call


def _out_of_memory(pool: _native.PoolCore, size: int, stream: int, report: dict[str, int]) -> OutOfMemory:
    """Called by the native core to explain its report, with no lock held, before it raises."""
    tags, pending, places = _holders(pool)
    raw = pool.raw_stats()
    error = explain_out_of_memory(
        pool.device.name,
        size,
        stream,
        {**report, **spill_facts(raw)},
        tags=tags,
        pending_streams=pending,
        places=places,
        spilled_tags=spilled_tags_of(pool.raw_spill_by_tag(), getattr(pool, "_saved", {})),
        cross_stream=pool.config()["cross_stream"],
        rounding=_rounding(raw),
        callback_errors=pool._callbacks.take_errors() if isinstance(pool, Pool) else (),
        limit_name=pool._limit_name() if isinstance(pool, Pool) else "limit",
        can_spill=isinstance(pool, Pool) and pool._can_spill(),
    )
    if isinstance(pool, Pool):
        _tell_of_failure(pool, error)
    return error


def _tell_of_failure(pool: Pool, error: OutOfMemory) -> None:
    for follow in failures:
        try:
            follow(pool, error)
        except Exception as raised:
            if raised_by_handler(raised):
                raise
            _log.exception("the listener %r for out-of-memory errors failed", follow)


def _holders(
    pool: _native.PoolCore,
) -> tuple[dict[str | None, int], dict[int, int], dict[str, int]]:
    """Live bytes by tag, pending bytes by stream, and live bytes by the line that allocated, most first; all
    without what is in host memory.
    """
    tags: defaultdict[str | None, int] = defaultdict(int)
    pending: defaultdict[int, int] = defaultdict(int)
    stacks: defaultdict[Stack, int] = defaultdict(int)
    counts = pool.raw_stats()["allocations"]
    if counts["small"]["current"] + counts["large"]["current"] <= MOST_EXPLAINED:
        for segment in pool.raw_snapshot():
            for _address, size, _requested, state, stream, tag, _serial, stack, spilled in segment["blocks"]:
                if state == "live":
                    tags[tag] += size - spilled
                    stacks[stack[:1]] += size - spilled
                elif state == "pending":
                    pending[stream] += size
    places = {
        f"{frame.filename}:{frame.line} in {frame.name}": stacks[frame,] for (frame,) in filter(None, stacks)
    }
    return _most_first(tags), _most_first(pending), _most_first(places)


def _rounding(raw: Mapping[str, Any]) -> int:
    """Live bytes added by rounding."""
    return int(
        sum(raw["bytes"][kind]["current"] - raw["requested"][kind]["current"] for kind in raw["bytes"])
    )


def _most_first(totals: Mapping[Any, int]) -> dict[Any, int]:
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
