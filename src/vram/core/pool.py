"""`Pool`: the allocator as Python uses it. Allocating and freeing are the native base class's own methods.

Added here: configuration, asynchronous allocation, callbacks, and the pool's account of itself. Numbers are
worded by `stats`, blocks by `snapshot`, failures by `oom`.
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
from vram.config import Config, limit_bytes, read_options
from vram.core.advice import Patterns, find_patterns
from vram.core.buffer import Buffer
from vram.core.device import Device
from vram.core.journal import pool_trace
from vram.core.locks import new_lock
from vram.core.measure import Measurement, Peaks
from vram.core.observer import closing, failures, register, resuming, suspending
from vram.core.oom import explain_out_of_memory
from vram.core.snapshot import Leak, Mark, Snapshot, Stack, leaks_of, mark_of
from vram.core.stats import Raw, Stats
from vram.core.tags import current_tag
from vram.errors import ConfigError, DeviceError, OutOfMemory
from vram.sizes import format_size, parse_size
from vram.trace.model import Trace

__all__ = ["OomHandle", "PinnedPool", "Pool"]

ASYNC_WORKERS = 2
"""Threads that serve `allocate_async` for all pools; what is slow there waits without the GIL."""
PIECE: Final = 64 << 20
"""The least bytes to lock at a time, where segment_size does not say otherwise: locking costs by the call."""
MODEL_HOSTS: Final = 4
"""The host of a model has so many times the model's memory."""
KEEPS = ("host", "discard")
"""What `suspend` may do with contents."""
MOST_WARM = 1 << 20
"""Blocks that one warmup makes ready."""
MOST_EXPLAINED = 200_000
"""With more live blocks than this, OutOfMemory does not look at each of them."""

_log = logging.getLogger("vram")


class Pool(_native.PoolCore):
    """An allocator of one device's memory: `allocate` gives a Buffer, `malloc` and `free` plain addresses.

    `device` is a name or a Device (by default the default device); `config` takes the options of
    `vram.config`: limit, cross_stream, pages, stream_cache, journal, stacks and others, which otherwise come
    from VRAM_CONF. Any thread may use it. `close()`, the end of a `with` block, or garbage collection after
    the last Buffer gives the memory back.
    """

    _title = "vram.Pool"

    def __init__(self, device: str | Device | None = None, **config: Any) -> None:
        """Make a pool; it takes nothing from the device before the first allocation."""
        settings = Config(config, ("core", "pool"))
        place = device if isinstance(device, Device) else Device(device)
        self._memory = self._memory_of(place)
        super().__init__(place, settings.core_options(self._memory.total_bytes), self._memory)
        self._begin(place, settings)

    def _begin(self, place: Device, settings: Config) -> None:
        """What the Python side keeps, once the native pool is made."""
        self._stack_wishes: set[int] = set()
        self._keep_stacks(settings["stacks"] == "python", self)
        self._recorder: Any = None  # the vram.Recorder of this pool, which takes its place here
        self._peaks = Peaks()
        self._callbacks = _Callbacks()
        self._futures: set[Future[Any]] = set()
        self._store: Pool | None = None
        self.number = -1
        place._core.add_listener(self.stream_listener())
        register(self)

    def _keep_stacks(self, wanted: bool, who: object) -> None:
        """Keep the Python stacks of allocations as long as anybody wants them."""
        (self._stack_wishes.add if wanted else self._stack_wishes.discard)(id(who))
        self.keeps_stacks = bool(self._stack_wishes)

    @property
    def memory(self) -> str:
        """Where its memory is: the name of the device, or "host" for memory that is only locked for one."""
        return self.device.name

    def _memory_of(self, place: Device) -> _native.Backend:
        """Where the memory comes from: the device itself."""
        return place.backend

    # ---- allocation -------------------------------------------------------------------------------------

    def allocate_async(
        self, size: int | str, *, stream: Any = None, tag: str | None = None
    ) -> Future[Buffer]:
        """Allocate on another thread; returns a Future of the Buffer, or of the error.

        The tag in force here counts. Closing the pool cancels what has not begun.
        """
        label = current_tag() if tag is None else tag
        return self._submit(lambda: self.allocate(size, stream=stream, tag=label))

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        future = _workers().submit(work)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def reserve(self, size: int | str, *, stream: Any = None) -> None:
        """Have `size` bytes in one piece ready for `stream`, so that later allocations there need no growth.

        Memory that is ready already counts. OutOfMemory where it cannot be had.
        """
        self._give_back([self.malloc(size, stream)])

    def reserve_async(self, size: int | str, *, stream: Any = None) -> Future[None]:
        """As reserve, on another thread: growth ahead of need. The caches serve on meanwhile."""
        return self._submit(lambda: self.reserve(size, stream=stream))

    def warmup(
        self, sizes: Mapping[int | str, int] | Iterable[tuple[int | str, int]], *, stream: Any = None
    ) -> None:
        """Make blocks ready in the cache of `stream`: `{size: count}`, or pairs of these; all or none.

        The cache is allowed to hold them all, whatever `stream_cache` says.
        """
        pairs = sizes.items() if isinstance(sizes, Mapping) else sizes
        wanted = _repeated([(parse_size(size), _checked_count(count)) for size, count in pairs])
        # All at once: what one size made ready, a search for the next would merge again.
        addresses = self.malloc_batch(wanted, stream)
        room = self.raw_stats()["cached_blocks"] + len(wanted)
        if room > self.config()["stream_cache"]:
            self.reconfigure({"stream_cache": room})
        self._give_back(addresses)
        for size in dict.fromkeys(wanted):  # the way of the first real use is walked, too
            self._give_back([self.malloc(size, stream)])

    def _give_back(self, addresses: list[int]) -> None:
        """Free what the program has not seen, also where zeroing fails; raises the first failure."""
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

    @property
    def limit(self) -> int | None:
        """The most bytes to hold from the device, or None. Set it in bytes, as "20GiB" or a share (0.9)."""
        return self.config()["limit"] or None

    @limit.setter
    def limit(self, value: int | float | str | None) -> None:
        read = read_options({"limit": value})["limit"]
        self.set_limit(limit_bytes(read, self._memory.total_bytes))

    def _limit_name(self) -> str:
        """The option that bounds the pool, as an OutOfMemory names it."""
        return "limit"

    def trim(self, to: int | str = 0, *, wait: bool = False) -> int:
        """Give unused memory back until at most `to` bytes are reserved; returns how many bytes went.

        What queued work still uses stays, unless `wait` waits for it. So does memory whose release would
        itself wait for whatever runs on the device: plain segments of a GPU, and page-locked memory. Looks
        at every stream, free page and segment.
        """
        before = self._reserved()
        self.trim_to(parse_size(to), wait)
        return max(0, before - self._reserved())

    # ---- suspending -------------------------------------------------------------------------------------

    def suspend(self, tag: str | None = None, keep: str = "host", *, store: Pool | None = None) -> int:
        """Give the memory of live buffers back to the device until `resume()`; returns how many bytes went.

        Those allocated under `tag`, or all. Their addresses stay theirs: pointers, tensors and captured
        graphs are valid again after `resume()`, and must not be used before. `keep="host"` copies the
        contents to page-locked memory of `store` (by default the pool's own, see `store`); `"discard"` leaves
        them undefined. What is free or cached is given back as well; a page that other buffers use, too,
        stays. The call waits for work queued on the streams of these buffers and for the copies, without the
        GIL and without stopping the pool. Where it fails, nothing is suspended. Looks at every block.
        """
        if keep not in KEEPS:
            raise ConfigError(
                f"keep={keep!r} is neither 'host' (contents come back) nor 'discard' (they are lost)",
                option="keep",
                value=keep,
            )
        raw, kept = self.raw_stats(), keep == "host"
        # What was to be kept of others that are suspended may still lie on a page that goes now.
        place = (store or self.store) if raw["paged"] and (kept or raw["suspended_blocks"]) else None
        try:
            with suspending(self, tag):
                return self.suspend_blocks(tag, kept and raw["paged"], place)
        except OutOfMemory as error:
            error.add_note("This was host memory for what suspend() keeps; nothing is suspended, or lost.")
            raise

    def resume(self, tag: str | None = None) -> int:
        """Back what was suspended under `tag`, or all of it, at the same addresses; returns how many bytes.

        When it returns, contents that were kept are there, for every stream. OutOfMemory where the memory
        cannot be had: everything stays suspended, and it may be tried again. Looks at every block.
        """
        with resuming(self):
            return self.resume_blocks(tag)

    def suspend_async(
        self, tag: str | None = None, keep: str = "host", *, store: Pool | None = None
    ) -> Future[int]:
        """As suspend, on another thread. From its start on the buffers must not be used."""
        return self._submit(lambda: self.suspend(tag, keep, store=store))

    def resume_async(self, tag: str | None = None) -> Future[int]:
        """As resume, on another thread: the program goes on while pages are made and contents copied."""
        return self._submit(lambda: self.resume(tag))

    @property
    def store(self) -> Pool:
        """The pool of page-locked memory where `suspend` keeps contents, made when first asked for.

        It holds what it has for the next time. Locking memory takes long, so `store.reserve("8GiB")` ahead
        makes the first suspend as fast as the later ones; `store.trim()` gives the memory back.
        """
        if self._store is None or self._store.closed:
            self._store = _store_for(self)
        return self._store

    def _reserved(self) -> int:
        return int(self.raw_stats()["reserved"]["current"])

    def on_oom(self, callback: Callable[..., object]) -> OomHandle:
        """Have `callback(size, stream)` called before an allocation fails; true: it is tried again.

        Callbacks run in the order they were added, in the allocating thread, and may free, trim or allocate.
        One that takes fewer arguments gets fewer. What one raises is logged, and found in the
        error's `report` if the allocation fails. `remove()` of what is returned takes it out again.
        """
        first = not self._callbacks
        handle = self._callbacks.add(callback)
        if first:
            self.set_oom_callback(_weakly(self))
        return handle

    # ---- what it says of itself -------------------------------------------------------------------------

    def stats(self) -> Stats:
        """The statistics now, under the keys of torch.cuda.memory_stats and ours. Visits every stream."""
        return Stats(self._peaks.raw_stats(self), self._why_no_pages())

    def _why_no_pages(self) -> str:
        """Empty where pages are mapped, or the pool does not say."""
        if self._memory.pages:
            return "" if self.config().get("pages", True) else "plain segments: the option pages is off"
        return f"plain segments: {self._memory.no_pages or 'the device has no pages'}"

    def reset_peak(self) -> None:
        """Let all peaks start anew from what is current. Measurements under way keep theirs."""
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
        """Remember what is live now, for `leaks(since=...)`."""
        return mark_of(self.snapshot())

    def leaks(self, since: Mark | None = None) -> list[Leak]:
        """Live allocations, newer than the mark if one is given, grouped by tag and size; most bytes first.

        With the option `stacks="python"` each group has the stacks that made it.
        """
        return leaks_of(self.snapshot(), since)

    def journal(self) -> Trace:
        """The events that the journal keeps (option `journal`), and the segments there are now."""
        return pool_trace(self)

    def patterns(self) -> Patterns:
        """Diagnose the program: sizes, hit rate, churn, and suggestions in words.

        Sizes are known where a journal is kept (option `journal`, or `journal_start()`).
        """
        journal = pool_trace(self, segments=False)
        return find_patterns(self._peaks.raw_stats(self), self.config(), journal)

    # ---- end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the device and give all memory back; live buffers become invalid. Again: nothing.

        A recorder of the pool is closed first. Looks at every stream and block.
        """
        if not self.closed:  # in the child of a fork nobody would finish them
            if self._recorder is not None:
                self._recorder.close()
            for future in tuple(self._futures):
                future.cancel()
            if not _here.works:  # else a callback closes it, and would wait for its own allocation
                wait(tuple(self._futures))
        with closing(self):
            super().close()
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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

    `device` is the one whose streams order the copies (by default the default device); the options are those
    of `Pool` but for `pages`, and a `limit` given as a share is one of the machine's memory. Its buffers are
    NumPy arrays without a copy: `np.asarray(buffer)`. Copies between them and buffers of the device are
    queued on the stream and return at once. As the host writes here without asking any stream, a freed
    buffer is reused only when the copies that use it have finished, on its own stream, too. Copies made by
    other libraries are told with `record_stream`.
    """

    _title = "vram.PinnedPool"

    def __init__(self, device: str | Device | None = None, **config: Any) -> None:
        """Make a pool; it takes nothing from the machine before the first allocation."""
        settings = Config(config, ("core", "pool"))
        if "pages" in config and settings["pages"]:
            raise ConfigError(
                "pages cannot be true: page-locked memory is registered in whole pieces and not mapped page "
                "by page; leave the option out",
                option="pages",
                value=config["pages"],
            )
        config["pages"] = False
        if not settings.is_set("segment_size"):
            config["segment_size"] = PIECE
        super().__init__(device, **config)

    @property
    def memory(self) -> str:
        """The host's."""
        return "host"

    def _memory_of(self, place: Device) -> _native.Backend:
        return _native.PinnedBackend(place.backend)

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked for a GPU; on other devices there is no need to."""
        return isinstance(self._memory, _native.PinnedBackend) and self._memory.pinned


def _store_for(pool: Pool) -> Pool:
    """Return a new pool for what `pool.suspend` keeps. That of a model is addresses only, as the model is."""
    kind = _ModelStore if isinstance(pool._memory, _native.ModelBackend) else PinnedPool
    zero = pool.config()["zero_on_free"]
    # Contents come in large pieces of any size, so each gets just what it needs.
    return kind(pool.device, limit=None, segment_size="2MiB", zero_on_free=zero, journal=0, stacks="none")


class _ModelStore(PinnedPool):
    """Host memory that a model's copies never touch, and as much of it as a large model may want."""

    def _memory_of(self, place: Device) -> _native.Backend:
        return _native.HostBackend(MODEL_HOSTS * place.total_memory)


def _repeated(pairs: list[tuple[int, int]]) -> list[int]:
    """Each size as often as it is wanted."""
    blocks = sum(count for _, count in pairs)
    if blocks > MOST_WARM:
        raise ConfigError(f"warmup makes at most {MOST_WARM} blocks ready, not {blocks}", value=blocks)
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
_executor_lock = new_lock()  # a finalizer may ask while it is made


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
        """Made by `Pool.on_oom`."""
        self.callback = callback
        self._callbacks = callbacks
        self._arguments = _arguments_taken(callback)

    def remove(self) -> None:
        """Take the callback out; once more does nothing."""
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
    """What the callbacks of one thread are doing."""

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
        """Call all of them; true if one wants another try. Allocations inside do not call them again."""
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
            self._here.errors += (repr(error),)
            _log.exception("the out-of-memory callback %r failed", handle.callback)
            return False

    def take_errors(self) -> tuple[str, ...]:
        """What callbacks of this thread raised during the last request."""
        errors, self._here.errors = self._here.errors, ()
        return errors


def _weakly(pool: Pool) -> Callable[[int, int], bool]:
    """What the native pool calls: it neither keeps the pool alive nor hides callbacks from the collector."""
    find = weakref.ref(pool)

    def call(size: int, stream: int) -> bool:
        found = find()
        return found is not None and found._callbacks.call(size, stream)

    return call


def _out_of_memory(pool: _native.PoolCore, size: int, stream: int, report: dict[str, int]) -> OutOfMemory:
    """Called by the native core to word its report, with no lock held, before it raises."""
    tags, pending, places = _holders(pool)
    error = explain_out_of_memory(
        pool.device.name,
        size,
        stream,
        report,
        tags=tags,
        pending_streams=pending,
        places=places,
        cross_stream=pool.config()["cross_stream"],
        rounding=_rounding(pool.raw_stats()),
        callback_errors=pool._callbacks.take_errors() if isinstance(pool, Pool) else (),
        limit_name=pool._limit_name() if isinstance(pool, Pool) else "limit",
    )
    if isinstance(pool, Pool):
        _tell_of_failure(pool, error)
    return error


def _tell_of_failure(pool: Pool, error: OutOfMemory) -> None:
    for follow in failures:
        try:
            follow(pool, error)
        except Exception:
            _log.exception("%r, which was to be told that memory ran out, failed", follow)


def _holders(pool: _native.PoolCore) -> tuple[dict[str | None, int], dict[int, int], dict[str, int]]:
    """Live bytes by tag, pending bytes by stream, and live bytes by the line that allocated; most first."""
    tags: defaultdict[str | None, int] = defaultdict(int)
    pending: defaultdict[int, int] = defaultdict(int)
    stacks: defaultdict[Stack, int] = defaultdict(int)
    counts = pool.raw_stats()["allocations"]
    if counts["small"]["current"] + counts["large"]["current"] <= MOST_EXPLAINED:
        for segment in pool.raw_snapshot():
            for _address, size, _requested, state, stream, tag, _serial, stack in segment["blocks"]:
                if state == "live":
                    tags[tag] += size
                    stacks[stack[:1]] += size
                elif state == "pending":
                    pending[stream] += size
    places = {
        f"{frame.filename}:{frame.line} in {frame.name}": stacks[frame,] for (frame,) in filter(None, stacks)
    }
    return _most_first(tags), _most_first(pending), _most_first(places)


def _rounding(raw: Mapping[str, Any]) -> int:
    """Live bytes that nobody asked for."""
    return int(
        sum(raw["bytes"][kind]["current"] - raw["requested"][kind]["current"] for kind in raw["bytes"])
    )


def _most_first(totals: Mapping[Any, int]) -> dict[Any, int]:
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
