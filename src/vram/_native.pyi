"""The native core of vram. Private: use the classes of the vram package."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from vram.core.device import Device
from vram.trace.model import Frame



class Backend:
    """The contract a device fulfils; see native/backends/backend.hpp."""

    @property
    def name(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def pages(self) -> bool: ...

    @property
    def no_pages(self) -> str: ...

    @property
    def host_accessible(self) -> bool: ...

    def canonical(self, stream: int) -> int:
        """The one handle of a stream that has several names."""

    def capture_of(self, stream: int) -> int:
        """The number of the capture its work goes into; 0 for none."""

    def memory_info(self) -> tuple[int, int]: ...

    def reserve(self, bytes: int) -> int: ...

    def release(self, address: int, bytes: int) -> None: ...

    def space_reserve(self, bytes: int) -> int: ...

    def space_release(self, address: int, bytes: int) -> None: ...

    def page_create(self, bytes: int) -> int: ...

    def page_release(self, page: int, bytes: int) -> None: ...

    def map(self, address: int, bytes: int, page: int) -> None: ...

    def set_access(self, address: int, bytes: int) -> None: ...

    def unmap(self, address: int, bytes: int) -> None: ...

    def stream_create(self) -> int: ...

    def stream_destroy(self, stream: int) -> None: ...

    def lasting(self, stream: int) -> bool:
        """Whether the stream exists until the pools are told that it goes."""

    def stream_adopt(self, stream: int) -> None:
        """
        The stream is lasting from now on: the caller tells the pools before it goes.
        """

    def stream_disown(self, stream: int) -> None:
        """The stream is not lasting any more."""

    def stream_synchronize(self, stream: int) -> None: ...

    def stream_query(self, stream: int) -> bool: ...

    def stream_wait(self, stream: int, event: int) -> None: ...

    def event_create(self) -> int: ...

    def event_destroy(self, event: int) -> None: ...

    def event_record(self, event: int, stream: int) -> None: ...

    def event_query(self, event: int) -> bool: ...

    def event_synchronize(self, event: int) -> None: ...

    def timing_event_create(self) -> int: ...

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two timing events that have passed."""

    def copy(self, to: int, source: int, bytes: int, stream: int) -> None: ...

    def copy_now(self, to: int, source: int, bytes: int, stream: int) -> None:
        """
        Copy in stream order and wait for it. The memory may go as soon as the call returns or raises.
        """

    def fill(self, to: int, value: int, bytes: int, stream: int) -> None: ...

    def launch(self, stream: int, function: object) -> None:
        """
        Runs function() in stream order. What it raises comes out of the next synchronize.
        """

class CudaBackend(Backend):
    """A CUDA device, through the driver found at run time."""

    def __init__(self, index: int) -> None: ...

    def synchronize(self) -> None: ...

    def abandon(self) -> None:
        """
        Another library resets the device: refuse every call from now on instead of passing it to the driver.
        """

    @property
    def hardware(self) -> str: ...

    @property
    def driver_version(self) -> int: ...

    def attribute(self, number: int) -> int:
        """A device attribute by its number; 0: unknown."""

    def module_load(self, image: str) -> int:
        """PTX text, compiled by the driver."""

    def module_unload(self, module: int) -> None: ...

    def module_function(self, module: int, name: str) -> int: ...

    def launch_kernel(self, function: int, grid: Sequence[int], block: Sequence[int], parameters: Sequence[bytes], stream: int = 0, shared_bytes: int = 0) -> None:
        """Each parameter is the bytes of its value."""

    def host_pinned(self, address: int, bytes: int) -> bool:
        """Whether all of this host memory is page-locked."""

    def capture_begin(self, stream: int) -> None: ...

    def capture_end(self, stream: int) -> int:
        """The graph, ready to run."""

    def graph_launch(self, graph: int, stream: int) -> None: ...

    def graph_destroy(self, graph: int) -> None: ...

def cuda_devices() -> tuple[int, str]:
    """How many CUDA devices there are, and why there are none."""

class HostBackend(Backend):
    """Real memory; a thread for each stream."""

    def __init__(self, capacity: int = 0) -> None: ...

    def synchronize(self) -> None: ...

    def check(self) -> str | None:
        """What is wrong with its books, or None."""

class ModelBackend(Backend):
    """Addresses only, a virtual clock, failures on demand."""

    def __init__(self, capacity: int, pages: bool = True, lag_us: float = 5000.0, manual: bool = False, release_waits: bool = False) -> None: ...

    def synchronize(self) -> None: ...

    def now(self) -> float:
        """Microseconds on the virtual clock."""

    def advance(self, us: float) -> None: ...

    def set_time(self, us: float) -> None: ...

    def set_lag(self, us: float) -> None: ...

    def set_manual(self, manual: bool) -> None: ...

    def step(self, stream: int) -> bool: ...

    def run_all(self) -> bool: ...

    def work(self, stream: int, id: int, address: int = 0, bytes: int = 0) -> None: ...

    def executed(self) -> list[int]: ...

    def clear_executed(self) -> None: ...

    def fail(self, call: str, nth: int = 1, code: str = 'failed', native: int = 0) -> None: ...

    def fail_any(self, nth: int = 1, code: str = 'failed', native: int = 0) -> None: ...

    def clear_failures(self) -> None: ...

    def calls(self, call: str) -> int: ...

    def total_calls(self) -> int: ...

    def driver_calls(self) -> int: ...

    def memory_calls(self) -> int: ...

    def driver_us(self) -> float: ...

    def memory_us(self) -> float: ...

    def host_waits(self) -> int: ...

    def host_wait_us(self) -> float: ...

    def busy_releases(self) -> int:
        """Calls of release made while work was queued."""

    def counts(self) -> dict[str, int]:
        """What exists now, by name."""

    def check(self) -> str | None:
        """What is wrong with its books, or None."""

    def capture_begin(self, stream: int) -> None: ...

    def capture_end(self, stream: int) -> int:
        """The graph, ready to run."""

    def graph_launch(self, graph: int, stream: int) -> None: ...

    def graph_destroy(self, graph: int) -> None: ...

    def refused_in_capture(self) -> int:
        """Calls that a capture forbids and that were made all the same."""

    def foreign_create(self) -> int:
        """
        A stream as another library makes it; its handle may be one that was destroyed before.
        """

    def foreign_destroy(self, stream: int) -> None:
        """Destroy such a stream. Using its handle afterwards ends the process."""

class PinnedBackend(Backend):
    """Host memory in the order of a device's streams, page-locked for a GPU."""

    def __init__(self, device: Backend, threads: int = 0) -> None: ...

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""

def stop_launches() -> None:
    """Called once at exit; see vram/device.py."""

class HostCopies:
    """Copies within host memory by several threads at once."""

    def __init__(self, threads: int = 0) -> None: ...

    @property
    def threads(self) -> int:
        """Threads that take part in one copy."""

    def copy(self, to: int, source: int, bytes: int) -> None:
        """Copy now; returns when it is done."""

    def queue(self, backend: Backend, stream: int, to: int, source: int, bytes: int) -> None:
        """Copy when the stream has come so far; the memory must stay until then."""

class PinCore:
    """The native part of vram.pin."""

    def __init__(self, device: Backend, memory: object) -> None: ...

    def lock(self) -> None: ...

    def unlock(self) -> None:
        """Wait for everything queued on the device, then let go of the memory."""

    @property
    def ptr(self) -> int:
        """Address of the first byte."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def writable(self) -> bool:
        """Whether copies may go into it."""

    @property
    def pinned(self) -> bool:
        """Whether it is page-locked for a GPU now."""

    @property
    def closed(self) -> bool:
        """Whether close() was called."""

def plug_set_pool(device: int, pool: object | None) -> None:
    """
    The pool that serves what other libraries allocate on a CUDA device, or None.
    """

def plug_set_maker(function: object | None) -> None:
    """
    Have `function(device)` called to set the pool of a CUDA device on its first use, or None.
    """

def plug_set_adopter(function: object | None) -> None:
    """
    Have `function(device)` called before a stream is first used on a CUDA device, or None.
    """

def plug_functions() -> dict[str, int]:
    """The addresses of the functions that other libraries call."""

def plug_set_throw(function: int) -> None:
    """
    The address of void(const char*) that throws the other library's out-of-memory error; 0: none.
    """

def stack_here() -> tuple[Frame, ...]:
    """
    The calls that led here, innermost first, without those inside this package.
    """

class Buffer:
    """
    One live block of a pool. Dropping it frees the block; it keeps its pool alive. Or a piece of an arena, with shape and type: it keeps the arena alive.
    """

    def __repr__(self) -> str: ...

    def __len__(self) -> int: ...

    def free(self) -> None:
        """Give the memory back now; later use raises InvalidFree."""

    def record_stream(self, stream: Any, /) -> None:
        """
        Tell the pool that work on another stream uses the buffer: once freed, it is not reused before that work has finished.
        """

    def fill(self, value: int, *, stream: Any = None) -> None:
        """Set every byte, in stream order."""

    def copy_from(self, source: Any, /, *, stream: Any = None) -> None:
        """
        Copy a Buffer or a vram.pin (queued on the stream) or other host memory (done when it returns) of the same size into this one.
        """

    def copy_to(self, target: Any, /, *, stream: Any = None) -> None:
        """
        Copy into a Buffer or a vram.pin (queued on the stream) or other writable host memory (done when it returns) of the same size.
        """

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        """
        The memory as a DLPack capsule of bytes, without a copy. The consumer's `stream` (1 or None: the default, 2: the thread's, a handle, -1: no order) waits for the buffer's.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device of the memory."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    @property
    def ptr(self) -> int:
        """Address of the first byte."""

    @property
    def size(self) -> int:
        """Bytes asked for."""

    @property
    def device(self) -> Device:
        """The device the memory is on."""

    @property
    def pool(self) -> PoolCore:
        """The pool it came from, kept alive by it."""

    @property
    def stream(self) -> int:
        """Handle of the stream whose order governs it."""

    @property
    def tag(self) -> str | None:
        """The label it was allocated under, or None."""

    @property
    def freed(self) -> bool:
        """Whether free() was called, or its scope of an arena has ended."""

    @property
    def shape(self) -> tuple[int, ...]:
        """How many elements there are in each dimension; of a pool's: bytes."""

    @property
    def typestr(self) -> str:
        """NumPy's name of the type of elements; of a pool's: bytes."""

    @property
    def base(self) -> object | None:
        """
        What it is a part of and keeps alive, or None; free() then frees nothing.
        """

    @property
    def views(self) -> int:
        """Memoryviews and DLPack capsules that exist over it."""

    @property
    def suspended(self) -> bool:
        """
        Whether Pool.suspend() has taken its memory; using it is then an error, freeing it is not.
        """

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, an array of bytes; only of device memory on CUDA."""

class PoolCore:
    """The native part of vram.Pool."""

    def __init__(self, device: Device, config: dict[str, Any], backend: Backend | None = None) -> None:
        """Make a pool on a device, with options as in PoolConfig."""

    def malloc(self, size: int | str, stream: Any = 0) -> int:
        """
        The address of new memory, without a handle object; give it back with free().
        """

    def free(self, ptr: int, /) -> None:
        """Give back what malloc() returned."""

    def allocate(self, size: int | str, *, stream: Any = None, align: int | str | None = None, tag: str | None = None) -> Buffer:
        """A Buffer of `size` bytes, ordered by `stream`."""

    def allocate_batch(self, sizes: Sequence[int | str], stream: Any = None, tag: str | None = None) -> list[Buffer]:
        """Buffers for all sizes or none, side by side where possible."""

    def malloc_batch(self, sizes: Sequence[int | str], stream: Any = None, tag: str | None = None) -> list[int]:
        """As allocate_batch, with raw addresses."""

    def record_stream(self, ptr: int, stream: Any, /) -> None:
        """Work on another stream uses the allocation that holds this address."""

    def growable_open(self, max: int, stream: Any, /) -> tuple[int, int]:
        """
        The address of a growable buffer without memory, and the handle of its stream.
        """

    def growable_resize(self, ptr: int, bytes: int, ahead: int, stream: int, tag: str | None, /) -> None:
        """
        Have memory under its first `bytes`, a multiple of 2 MiB, and in the background under `ahead` more.
        """

    def growable_prepare(self, ptr: int, bytes: int, /) -> None:
        """Have pages mapped for so many bytes more, as far as there are any."""

    def growable_close(self, ptr: int, dropped: bool = False, /) -> None:
        """Give its memory and its addresses back."""

    def growable_info(self, ptr: int, /) -> dict[str, int]:
        """Bytes that have memory, are pending, are ready, and the most."""

    def part_of(self, block: int, offset: int, size: int, stream: Any, base: object, /) -> Buffer:
        """A Buffer over a part of a growable buffer that `base` holds."""

    def trim_to(self, keep: int, wait: bool, /) -> None:
        """Give unused memory back until at most `keep` bytes are reserved."""

    def suspend_blocks(self, tag: str | None, keep: bool, store: PoolCore | None, /) -> int:
        """
        Give the pages of allocations back, their contents to the store; returns the bytes given back.
        """

    def resume_blocks(self, tag: str | None, /) -> int:
        """Back suspended allocations again; returns the bytes taken."""

    def coalesce(self) -> None:
        """Empty the stream caches and merge what is free."""

    def set_limit(self, bytes: int, /) -> None:
        """The most to hold from the device; 0 for no limit."""

    def stream_listener(self) -> Callable[[int | None], bool]:
        """
        What streams are to call with their handle before they go. It holds nothing, and answers False once the pool is gone; None only asks.
        """

    def retire_stream(self, handle: int, /) -> None:
        """
        The stream is about to go: take its memory over once its work has finished.
        """

    def set_oom_callback(self, function: Callable[[int, int], bool] | None, /) -> None:
        """function(size, stream) -> bool, called before an allocation fails."""

    def reconfigure(self, options: dict[str, Any], /) -> None:
        """Change options of a pool in use."""

    def config(self) -> dict[str, Any]:
        """The options in force."""

    def raw_stats(self) -> dict[str, Any]:
        """All counters."""

    def raw_snapshot(self) -> list[dict[str, Any]]:
        """All segments and blocks."""

    def raw_holders(self) -> list[tuple[str | None, tuple[Frame, ...], int, int, int]]:
        """
        Live blocks by tag and stack: (tag, stack, blocks, bytes, requested) each.
        """

    def journal_start(self, entries: int, /) -> None:
        """Keep that many events for each stream; 0 stops."""

    def info(self, ptr: int, /) -> dict[str, Any]:
        """What is known of a live allocation."""

    def reset_peak(self) -> None:
        """Start all peaks anew."""

    def live_bytes(self) -> int:
        """Bytes of live allocations."""

    def check(self) -> str | None:
        """Verify every invariant; None, or what is wrong."""

    def close(self) -> None:
        """
        Wait for the device and return all memory; live buffers become invalid.
        """

    @property
    def closed(self) -> bool:
        """Whether close() was called, or the pool is a parent's after a fork."""

    @property
    def device(self) -> Device:
        """The device it was made for."""

    keeps_stacks: bool
    """Whether allocations are kept with their Python stacks."""

def set_tag_source(variable: object | None) -> None:
    """The ContextVar that holds the tag in force, or None."""

def set_watcher(watcher: object | None) -> None:
    """The object told of allocations, frees and uses, or None."""

class DriverPoolCore(PoolCore):
    """The native part of vram.DriverPool."""

    def __init__(self, device: Device, config: dict[str, Any], origin: str, kind: str = "device", shareable: bool = False, max_size: int = 0, fd: int = -1) -> None:
        """Open a driver pool: origin "created", "default" or "imported"."""

    def attribute(self, name: str, /) -> int:
        """What the driver says of its pool, by name."""

    def set_attribute(self, name: str, value: int, /) -> None:
        """Set what the driver lets be set."""

    def export_fd(self) -> int:
        """A file descriptor that another process can import."""

    def export_pointer(self, ptr: int, /) -> tuple[bytes, int]:
        """
        The driver's words for an allocation, and where it begins in what they mean.
        """

    def import_pointer(self, words: bytes, offset: int, size: int, stream: Any = None, /) -> Buffer:
        """A Buffer over another process's allocation."""

class ArenaCore:
    """The native part of vram.Arena."""

    def __init__(self, pool: PoolCore, size: int, growable: bool, align: int, stream: Any, tag: str | None, checked: bool) -> None: ...

    def allocate(self, size: int | str, *, align: int | None = None) -> Buffer:
        """Take `size` bytes as a Buffer, on any device."""

    def take_array(self, shape: int | tuple[int, ...], item: int, typestr: str, code: int, /) -> Buffer:
        """A Buffer with a shape and a type."""

    def mark(self) -> tuple[int, int]:
        """Begin a lifetime inside the present one; what it is known by."""

    def rewind(self, id: int, depth: int) -> None:
        """End a lifetime and all that began in it."""

    def reset_memory(self, zero: bool) -> None:
        """End everything."""

    def is_open(self, id: int, depth: int) -> bool:
        """Whether a lifetime that mark began has not ended."""

    def record_stream(self, stream: Any) -> None:
        """
        Tell the arena that work on a stream uses its memory, from now until the next reset: that then waits for it, in stream order.
        """

    def stream_listener(self) -> Callable[[int | None], bool]:
        """
        What streams are to call with their handle before they go; None only asks.
        """

    def adopt(self) -> None:
        """
        Make the calling thread the one that may use the arena. Nobody else may be using it.
        """

    def trim(self) -> None:
        """
        Give chunks that hold nothing live back to the pool. The next growth is by one chunk for all that was ever needed.
        """

    def end(self) -> None:
        """End all lifetimes, and give the memory back once nobody looks at it."""

    def raw_stats(self) -> dict[str, int]:
        """All counters."""

    def reset_peak(self) -> None:
        """Let the high-water mark start anew from what is used."""

    def check(self) -> str | None:
        """Verify every invariant; None, or what is wrong."""

    @property
    def closed(self) -> bool:
        """
        Whether it was closed, or its pool was, or it is a parent's after a fork.
        """

    @property
    def pool(self) -> PoolCore:
        """The pool whose memory it hands out."""

    @property
    def host_accessible(self) -> bool:
        """Whether its memory is the host's, so that arrays of it are NumPy's."""

    @property
    def checked(self) -> bool:
        """Whether what outlives its scope is looked for."""

    @property
    def stream(self) -> int:
        """Handle of the stream whose order the memory follows."""

class EventReader:
    """The events of a pool as columns of a trace."""

    def __init__(self, pool: PoolCore, tables: Any, start_ns: int) -> None:
        """
        `tables` numbers streams, tags and stacks (vram.trace.tables); times count from `start_ns` of the monotonic clock.
        """

    def read_journal(self) -> int:
        """
        Copy the events that the pool's journal keeps; returns how many wait for columns().
        """

    def record(self, most: int) -> None:
        """
        Have the pool keep up to `most` events until they are collected; 0 ends it.
        """

    def collect(self) -> int:
        """Take the recorded events; returns how many wait for columns()."""

    def columns(self) -> tuple[dict[str, memoryview], list[tuple[int, int]], int]:
        """
        The events as columns, valid until the next call, marks as (number, time_us), and the number of dropped events.
        """

    def mark(self, number: int) -> None:
        """Mark this point between the events of a recording."""

class Replayer:
    """A recorded program on its way through a policy."""

    def __init__(self, policy: str, conf: dict[str, Any], capacity: int, lag_us: float, segment_size: Any, segment_address: Any, keep_sizes: bool = False) -> None: ...

    def run(self, op: object, id: object, size: object, stream: object, time_us: object, event: object, completed: object, emptied: object, ask: object | None = None) -> None:
        """
        Run the rows. `ask` is called every 50 ms, and ends the replay by raising; Ctrl-C does, too.
        """

    def result(self) -> dict[str, Any]: ...

    def segment_sizes(self) -> list[int]: ...

    def broken(self) -> str:
        """Empty, or the first invariant of the policy that does not hold."""

def plan(lower: Any, upper: Any, size: Any, align: int, capacity: int, time_limit: float, seed: int) -> dict[str, Any]:
    """Offsets for buffers with known lifetimes."""

def bench_pairs(pool: object, scenario: str) -> float:
    """
    One run of a scenario in C++ on the default stream: nanoseconds a pair.
    """

def bench_driver_pairs(backend: CudaBackend, scenario: str) -> float:
    """
    The same through cuMemAllocFromPoolAsync and cuMemFreeAsync, from a pool of their own.
    """

def bench_threads(pools: Sequence[object], streams: Sequence[int], hand_over: bool, batches: int) -> tuple[float, float, float]:
    """
    One run of a thread for each stream, over one pool or one each: wall and processor nanoseconds a pair, and the share of the blocks that another thread freed.
    """

def bench_layer() -> tuple[list[int], list[int], int]:
    """
    A layer of the transformer step: sizes kept until the way back, sizes of its temporaries, layers.
    """

def bench_swaps() -> list[tuple[int, int]]:
    """The scenario of variable sizes: (slot, bytes) of each replacement."""
