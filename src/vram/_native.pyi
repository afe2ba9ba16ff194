"""The native core of vram. Private: use the classes of the vram package."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from vram.core.device import Device
from vram.trace.model import Frame



class Backend:
    """The contract of a device; see native/backends/backend.hpp."""

    @property
    def name(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def pages(self) -> bool: ...

    @property
    def host_pages(self) -> bool: ...

    @property
    def no_pages(self) -> str: ...

    @property
    def host_accessible(self) -> bool: ...

    def canonical(self, stream: int) -> int:
        """The canonical handle of a stream that has several."""

    def capture_of(self, stream: int) -> int:
        """The id of the capture of this stream; 0 for none."""

    def memory_info(self) -> tuple[int, int]: ...

    def reserve(self, bytes: int) -> int: ...

    def release(self, address: int, bytes: int) -> None: ...

    def space_reserve(self, bytes: int) -> int: ...

    def space_release(self, address: int, bytes: int) -> None: ...

    def page_create(self, bytes: int) -> int: ...

    def page_release(self, page: int, bytes: int) -> None: ...

    def map(self, address: int, bytes: int, page: int) -> None: ...

    def set_access(self, address: int, bytes: int) -> None: ...

    def can_access(self, other: Backend) -> bool:
        """Whether work here can use the other device's memory."""

    def open_plain(self, other: Backend) -> None:
        """Let work here use all plain memory of the other device."""

    def unmap(self, address: int, bytes: int) -> None: ...

    def stream_create(self) -> int: ...

    def stream_destroy(self, stream: int) -> None: ...

    def lasting(self, stream: int) -> bool:
        """
        Whether the stream exists until the pools are told that it will be destroyed.
        """

    def stream_adopt(self, stream: int) -> None:
        """
        Make the stream lasting: the caller tells the pools before it is destroyed.
        """

    def stream_disown(self, stream: int) -> None:
        """Make the stream foreign again."""

    def stream_synchronize(self, stream: int) -> None: ...

    def stream_query(self, stream: int) -> bool: ...

    def stream_wait(self, stream: int, event: int) -> None: ...

    def event_create(self) -> int: ...

    def event_destroy(self, event: int) -> None: ...

    def event_record(self, event: int, stream: int) -> None: ...

    def event_query(self, event: int) -> bool: ...

    def event_synchronize(self, event: int) -> None: ...

    def waits_for(self, other: Backend) -> bool:
        """Whether streams here can wait for events of the other device."""

    def stream_wait_peer(self, stream: int, other: Backend, event: int) -> None: ...

    def timing_event_create(self) -> int: ...

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two completed timing events."""

    def copy(self, to: int, source: int, bytes: int, stream: int) -> None: ...

    def copy_now(self, to: int, source: int, bytes: int, stream: int) -> None:
        """
        Copy in stream order and wait for it. The memory is not used after the call returns or raises.
        """

    def fill(self, to: int, value: int, bytes: int, stream: int) -> None: ...

    def copy_across(self, to: int, stream: int, other: Backend, source: int, other_stream: int, bytes: int) -> None:
        """Copy from another device, ordered on a stream of each."""

    def launch(self, stream: int, function: object) -> None:
        """
        Run function() in stream order. The next synchronize raises its exceptions.
        """

class CudaBackend(Backend):
    """A CUDA device; the driver is loaded at run time."""

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
        """Return a device attribute by its number; 0 if unknown."""

    def module_load(self, image: str) -> int:
        """Load PTX text, compiled by the driver."""

    def module_unload(self, module: int) -> None: ...

    def module_function(self, module: int, name: str) -> int: ...

    def launch_kernel(self, function: int, grid: Sequence[int], block: Sequence[int], parameters: Sequence[bytes], stream: int = 0, shared_bytes: int = 0) -> None:
        """Launch a kernel. Each parameter is a bytes object with its value."""

    def host_pinned(self, address: int, bytes: int) -> bool:
        """Whether all of this host memory is pinned."""

    def capture_begin(self, stream: int) -> None: ...

    def capture_end(self, stream: int) -> int:
        """Return the graph, ready to run."""

    def graph_launch(self, graph: int, stream: int) -> None: ...

    def graph_destroy(self, graph: int) -> None: ...

def cuda_devices() -> tuple[int, str]:
    """Return the number of CUDA devices, and why there are none."""

class HostBackend(Backend):
    """Real memory, and one thread for each stream."""

    def __init__(self, capacity: int = 0) -> None: ...

    def synchronize(self) -> None: ...

    def check(self) -> str | None:
        """Verify its internal data; return what is wrong, or None."""

class ModelBackend(Backend):
    """Addresses only, with a virtual clock and failures on demand."""

    def __init__(self, capacity: int, pages: bool = True, lag_us: float = 5000.0, manual: bool = False, release_waits: bool = False, number: int = -1, host_gb_per_s: float = 0.0, copy_engines: int = 3) -> None: ...

    def synchronize(self) -> None: ...

    def now(self) -> float:
        """Microseconds of the virtual clock."""

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
        """Number of calls of release while work was queued."""

    def counts(self) -> dict[str, int]:
        """Number of existing objects, by name."""

    def check(self) -> str | None:
        """Verify its internal data; return what is wrong, or None."""

    def capture_begin(self, stream: int) -> None: ...

    def capture_end(self, stream: int) -> int:
        """Return the graph, ready to run."""

    def graph_launch(self, graph: int, stream: int) -> None: ...

    def graph_destroy(self, graph: int) -> None: ...

    def link(self, other: ModelBackend, gb_per_s: float, access: bool) -> None:
        """
        Link two numbered models, in both directions: one clock, and copies at this speed.
        """

    @property
    def copy_engines(self) -> int: ...

    def opened(self, address: int, bytes: int, number: int) -> bool:
        """Whether work on the model with this number can use this memory."""

    def refused_in_capture(self) -> int:
        """Number of calls that were made although a capture forbids them."""

    def foreign_create(self) -> int:
        """
        Create a stream like another library; its handle may be that of a destroyed stream.
        """

    def foreign_destroy(self, stream: int) -> None:
        """Destroy such a stream. A later use of its handle ends the process."""

class PinnedBackend(Backend):
    """Host memory in the order of a device's streams, pinned for a GPU."""

    def __init__(self, device: Backend, threads: int = 0) -> None: ...

    @property
    def pinned(self) -> bool:
        """Whether the memory is pinned."""

def stop_launches() -> None:
    """Called once at exit; see vram/core/device.py."""

class HostCopies:
    """Copies host memory with several threads."""

    def __init__(self, threads: int = 0) -> None: ...

    @property
    def threads(self) -> int:
        """Number of threads used by one copy."""

    def copy(self, to: int, source: int, bytes: int) -> None:
        """Copy now; return when the copy has completed."""

    def queue(self, backend: Backend, stream: int, to: int, source: int, bytes: int) -> None:
        """Copy in stream order; the memory must stay valid until then."""

class PinCore:
    """The native part of vram.pin."""

    def __init__(self, device: Backend, memory: object) -> None: ...

    def lock(self) -> None: ...

    def unlock(self) -> None:
        """Wait for everything queued on the device, then release the memory."""

    @property
    def ptr(self) -> int:
        """Address of the first byte."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    @property
    def writable(self) -> bool:
        """Whether copies may write to it."""

    @property
    def pinned(self) -> bool:
        """Whether it is pinned for a GPU now."""

    @property
    def closed(self) -> bool:
        """Whether close() was called."""

def plug_set_pool(device: int, pool: object | None) -> None:
    """Set the pool that serves other libraries on a CUDA device, or None."""

def plug_pool(device: int) -> object | None:
    """Return the pool that serves PyTorch on a CUDA device, or None."""

def plug_set_maker(function: object | None) -> None:
    """
    Set the `function(device)` that sets the pool of a CUDA device on first use, or None.
    """

def plug_set_adopter(function: object | None) -> None:
    """
    Set the `function(device)` that is called before the first use of a stream on a CUDA device, or None.
    """

def plug_engine() -> int:
    """
    Return the address of the table of functions that plug/engine.h describes.
    """

def plug_set_pinned_pool(pool: object | None) -> None:
    """Set the pool of pinned memory that serves other libraries, or None."""

def plug_set_pinned_maker(function: object | None) -> None:
    """
    Set the `function(device)` that sets the pool of pinned memory on first use, or None.
    """

def plug_functions() -> dict[str, int]:
    """Return the addresses of the functions that other libraries call."""

def plug_set_throw(function: int) -> None:
    """
    Set the address of void(const char*) that throws the other library's out-of-memory error; 0: none.
    """

def stack_here() -> tuple[Frame, ...]:
    """
    Return the current stack, innermost call first, without frames of this package.
    """

class Buffer:
    """
    One live block of a pool. Dropping it frees the block; it keeps its pool alive. Or a part of an arena, with shape and type: it keeps the arena alive.
    """

    def __repr__(self) -> str: ...

    def __len__(self) -> int: ...

    def free(self) -> None:
        """Free the memory now; later use raises InvalidFree."""

    def record_stream(self, stream: Any, /) -> None:
        """
        Record that work on another stream uses the buffer. After its free, the memory is not reused before that work has completed.
        """

    def fill(self, value: int | bytes, *, stream: Any = None) -> None:
        """Set every byte to a number, or repeat up to 16 bytes, in stream order."""

    def copy_from(self, source: Any, /, *, stream: Any = None) -> None:
        """
        Copy from a Buffer of any device or vram.pin (queued on the stream) or from other host memory (completed on return) of the same size. If the other Buffer is on another GPU, the copy is also ordered on its own stream. A Buffer on the host is host memory for other devices.
        """

    def copy_to(self, target: Any, /, *, stream: Any = None) -> None:
        """
        Copy to a Buffer of any device or vram.pin (queued on the stream) or to other writable host memory (completed on return) of the same size. If the other Buffer is on another GPU, the copy is also ordered on its own stream. A Buffer on the host is host memory for other devices.
        """

    def spill(self) -> int:
        """
        Move the contents to host memory, under the same address; kernels can still use them. Return the bytes that moved; pages that must stay on the device stay. Needs a pool with the option spill. Waits for work that is queued on the device.
        """

    def prefetch(self) -> int:
        """
        Move what was spilled back to the device. Return the bytes that moved. Raises OutOfMemory if the device has too little free memory; what did not fit stays on the host.
        """

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        """
        Export the memory as a DLPack capsule of bytes, without a copy. The consumer's `stream` (1 or None: the default, 2: the thread's, a handle, -1: no ordering) waits for the buffer's.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device of the memory."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    @property
    def ptr(self) -> int:
        """Address of the first byte."""

    @property
    def size(self) -> int:
        """Requested bytes."""

    @property
    def spilled(self) -> int:
        """Bytes of it that are in host memory now."""

    @property
    def device(self) -> Device:
        """The device of the memory."""

    @property
    def pool(self) -> PoolCore:
        """The pool it was allocated from; the buffer keeps it alive."""

    @property
    def stream(self) -> int:
        """Handle of the stream that orders the memory."""

    @property
    def tag(self) -> str | None:
        """The tag of the allocation, or None."""

    @property
    def freed(self) -> bool:
        """Whether free() was called, or its scope in an arena has ended."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements in each dimension; bytes for a block of a pool."""

    @property
    def typestr(self) -> str:
        """NumPy's name of the element type; bytes for a block of a pool."""

    @property
    def base(self) -> object | None:
        """
        The object that it is a part of and keeps alive, or None; free() then frees nothing.
        """

    @property
    def views(self) -> int:
        """Number of memoryviews and DLPack capsules of it."""

    @property
    def suspended(self) -> bool:
        """
        Whether Pool.suspend() has released its memory; it can then be freed, but not used.
        """

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, an array of bytes; only for device memory on CUDA."""

class PoolCore:
    """The native part of vram.Pool."""

    def __init__(self, device: Device, config: dict[str, Any], backend: Backend | None = None) -> None:
        """Make a pool on a device, with options as in PoolConfig."""

    def malloc(self, size: int | str, stream: Any = 0) -> int:
        """
        Allocate memory and return its address, without a handle object; free it with free().
        """

    def free(self, ptr: int, /) -> None:
        """Free memory allocated with malloc()."""

    def allocate(self, size: int | str, *, stream: Any = None, align: int | str | None = None, tag: str | None = None) -> Buffer:
        """Allocate a Buffer of `size` bytes, ordered by `stream`."""

    def allocate_batch(self, sizes: Sequence[int | str], stream: Any = None, tag: str | None = None) -> list[Buffer]:
        """Allocate Buffers for all sizes or none, contiguous where possible."""

    def malloc_batch(self, sizes: Sequence[int | str], stream: Any = None, tag: str | None = None) -> list[int]:
        """Like allocate_batch, with raw addresses."""

    def record_stream(self, ptr: int, stream: Any, /) -> None:
        """
        Record that work on another stream uses the allocation with this address.
        """

    def growable_open(self, max: int, stream: Any, /) -> tuple[int, int]:
        """
        Reserve addresses for a growable buffer without memory. Return its address and the handle of its stream.
        """

    def growable_resize(self, ptr: int, bytes: int, ahead: int, stream: int, tag: str | None, /) -> None:
        """
        Back its first `bytes` with memory, a multiple of 2 MiB, and `ahead` more in the background.
        """

    def growable_prepare(self, ptr: int, bytes: int, /) -> None:
        """Map pages for this many more bytes, as far as there are any."""

    def growable_close(self, ptr: int, dropped: bool = False, /) -> None:
        """Release its memory and its addresses."""

    def growable_info(self, ptr: int, /) -> dict[str, int]:
        """Return the bytes that are backed, pending and ready, and the maximum."""

    def part_of(self, block: int, offset: int, size: int, stream: Any, base: object, /) -> Buffer:
        """A Buffer over a part of a growable buffer that `base` holds."""

    def trim_to(self, keep: int, wait: bool, /) -> None:
        """Release unused memory until at most `keep` bytes are reserved."""

    def suspend_blocks(self, tag: str | None, keep: bool, store: PoolCore | None, /) -> int:
        """
        Release the pages of allocations and move their contents to the store. Return the released bytes.
        """

    def resume_blocks(self, tag: str | None, /) -> int:
        """
        Back suspended allocations with memory again. Return the restored bytes.
        """

    def set_spill_callback(self, function: Callable[[int, int], object] | None, /) -> None:
        """
        function(needed, moved), called before memory moves to the host because the device is full, with 0, and afterwards; None removes it.
        """

    def steer_spill(self, first: Sequence[str], never: Sequence[str], /) -> None:
        """Names of tags whose memory goes to the host first, or never."""

    def steer_spill_allocations(self, first: Sequence[int], last: Sequence[int], /) -> None:
        """
        Addresses of allocations that go to the host first, or last. Replaces what was said before.
        """

    def spill_block(self, ptr: int, /) -> int:
        """Move an allocation to host memory. Return the bytes that moved."""

    def prefetch_block(self, ptr: int, /) -> int:
        """Move an allocation back to the device. Return the bytes that moved."""

    def park_blocks(self, tag: str | None, /) -> int:
        """
        Move allocations to host memory, where they stay. Return the bytes that moved.
        """

    def unpark_blocks(self, tag: str | None, /) -> int:
        """
        Move parked allocations back to the device. Return the bytes that moved.
        """

    def bring_back(self, most: int, wait: bool = False, /) -> int:
        """
        Move at most so many bytes back to the device while enough of it is free; with `wait`, after all work queued so far. Return the bytes that moved.
        """

    def create_ahead(self, spare: int, most: int, /) -> int:
        """
        Create host memory to spill to until `spare` bytes are unused, but at most `most` bytes. Return the bytes that were created.
        """

    def usage(self, restart_peak: bool, /) -> tuple[int, int, int]:
        """
        Return live bytes, their peak since the last call that restarted it, and how many of them are in host memory.
        """

    def take_host_bytes(self, bytes: int, /) -> bool:
        """
        Take a part of the option `spill` for other copies in host memory. Return whether there was so much.
        """

    def give_host_bytes(self, bytes: int, /) -> None:
        """Return what `take_host_bytes` took. It is kept for the next time."""

    def release_host_bytes(self) -> None:
        """Let pages have the host memory that was returned and kept."""

    def release_unused(self, wait: bool, /) -> None:
        """
        Release unused memory beyond the release threshold, with what the streams' caches keep.

        `wait`: wait for the device if memory is still in use.
        """

    def coalesce(self) -> None:
        """Empty the stream caches and merge free blocks."""

    def set_limit(self, bytes: int, /) -> None:
        """Set the maximum memory to hold from the device; 0 for no limit."""

    def add_peer(self, number: int, /) -> None:
        """
        Let the device with this number use the memory, including what is allocated later.
        """

    def stream_listener(self) -> Callable[[int | None], bool]:
        """
        Return the function that streams call with their handle before they are destroyed. It holds no reference and returns False once the pool is gone; None only queries.
        """

    def retire_stream(self, handle: int, /) -> None:
        """
        The stream will be destroyed: take over its memory once its work has finished.
        """

    def set_high_water(self, mark: int, function: Callable[[int], object] | None, /) -> None:
        """
        function(reserved), called when the reserved bytes have risen above the mark; None removes it.
        """

    def set_oom_callback(self, function: Callable[[int, int], bool] | None, /) -> None:
        """function(size, stream) -> bool, called before an allocation fails."""

    def reconfigure(self, options: dict[str, Any], /) -> None:
        """Change options of a pool in use."""

    def config(self) -> dict[str, Any]:
        """Return the effective options."""

    def raw_stats(self) -> dict[str, Any]:
        """Return all counters."""

    def raw_snapshot(self) -> list[dict[str, Any]]:
        """Return all segments and blocks."""

    def raw_holders(self) -> list[tuple[str | None, tuple[Frame, ...], int, int, int, int]]:
        """
        Live blocks by tag and stack: (tag, stack, blocks, bytes, requested, spilled) each.
        """

    def raw_spill_by_tag(self) -> list[tuple[str | None, int, int, int, float]]:
        """
        Return what spilling has moved, and what is in host memory now, by tag.
        """

    def journal_start(self, entries: int, /) -> None:
        """Keep this many events for each stream; 0 turns the journal off."""

    def info(self, ptr: int, /) -> dict[str, Any]:
        """Return what is known about a live allocation."""

    def reset_peak(self) -> None:
        """Restart all peaks."""

    def live_bytes(self) -> int:
        """Return the bytes of live allocations."""

    def check(self) -> str | None:
        """Verify every invariant; return None or what is wrong."""

    def close(self) -> None:
        """
        Wait for the device and release all memory; live buffers become invalid.
        """

    @property
    def closed(self) -> bool:
        """
        Whether close() was called, or the pool belongs to the parent of a fork.
        """

    @property
    def device(self) -> Device:
        """The device of the pool."""

    keeps_stacks: bool
    """Whether allocations are kept with their Python stacks."""

def set_tag_source(variable: object | None) -> None:
    """Set the ContextVar that holds the current tag, or None."""

def set_watcher(watcher: object | None) -> None:
    """
    Set the object that is notified of allocations, frees and uses, or None.
    """

class DriverPoolCore(PoolCore):
    """The native part of vram.DriverPool."""

    def __init__(self, device: Device, config: dict[str, Any], origin: str, kind: str = "device", shareable: bool = False, max_size: int = 0, fd: int = -1) -> None:
        """Open a driver pool: origin "created", "default" or "imported"."""

    def attribute(self, name: str, /) -> int:
        """Return an attribute of the driver's pool."""

    def set_attribute(self, name: str, value: int, /) -> None:
        """Set an attribute of the driver's pool."""

    def export_fd(self) -> int:
        """Return a file descriptor that another process can import."""

    def export_pointer(self, ptr: int, /) -> tuple[bytes, int]:
        """
        Return the driver's exported pointer, and the offset of the allocation in what it mean.
        """

    def import_pointer(self, words: bytes, offset: int, size: int, stream: Any = None, /) -> Buffer:
        """A Buffer over another process's allocation."""

class ArenaCore:
    """The native part of vram.Arena."""

    def __init__(self, pool: PoolCore, size: int, growable: bool, align: int, stream: Any, tag: str | None, checked: bool) -> None: ...

    def allocate(self, size: int | str, *, align: int | None = None) -> Buffer:
        """Allocate `size` bytes as a Buffer, on any device."""

    def take_array(self, shape: int | tuple[int, ...], item: int, typestr: str, code: int, /) -> Buffer:
        """Allocate a Buffer with a shape and a type."""

    def mark(self) -> tuple[int, int]:
        """Begin a nested lifetime and return its id."""

    def rewind(self, id: int, depth: int) -> None:
        """End a lifetime and those nested in it."""

    def reset_memory(self, zero: bool) -> None:
        """Release everything."""

    def call_at_end(self, function: Callable[[], object]) -> None:
        """Call a function without arguments when the lifetime ends."""

    def is_open(self, id: int, depth: int) -> bool:
        """Whether a lifetime that mark() began has not ended."""

    def record_stream(self, stream: Any) -> None:
        """
        Record that work on a stream uses the arena's memory, from now until the next reset, which then waits for it in stream order.
        """

    def stream_listener(self) -> Callable[[int | None], bool]:
        """
        The function that streams call with their handle before they are destroyed; None only queries.
        """

    def adopt(self) -> None:
        """
        Make the calling thread the owner of the arena. No other thread may be using it.
        """

    def trim(self) -> None:
        """
        Return chunks without live allocations to the pool. The next growth is one chunk for the maximum ever used.
        """

    def end(self) -> None:
        """
        End all lifetimes, and return the memory when the last view is dropped.
        """

    def raw_stats(self) -> dict[str, int]:
        """Return all counters."""

    def reset_peak(self) -> None:
        """Restart the high-water mark from the current use."""

    def check(self) -> str | None:
        """Verify every invariant; return None or what is wrong."""

    @property
    def closed(self) -> bool:
        """
        Whether it or its pool was closed, or it belongs to the parent of a fork.
        """

    @property
    def callbacks(self) -> int:
        """Number of registered functions that have not been called yet."""

    @property
    def pool(self) -> PoolCore:
        """The pool that provides its memory."""

    @property
    def host_accessible(self) -> bool:
        """
        Whether its memory is host memory, so that its arrays are NumPy arrays.
        """

    @property
    def checked(self) -> bool:
        """Whether uses after the end of a scope are detected."""

    @property
    def stream(self) -> int:
        """Handle of the stream that orders the memory."""

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
    """Replays a recorded program through a policy."""

    def __init__(self, policy: str, conf: dict[str, Any], capacity: int, lag_us: float, segment_size: Any, segment_address: Any, keep_sizes: bool = False) -> None: ...

    def run(self, op: object, id: object, size: object, stream: object, time_us: object, event: object, completed: object, emptied: object, steps: object, ask: object | None = None) -> bool:
        """
        Run the rows; return whether memory was enough. `ask` is called every 50 ms and can end the replay by raising, like Ctrl-C.
        """

    def result(self) -> dict[str, Any]: ...

    def segment_sizes(self) -> list[int]: ...

    def spill_steps(self) -> list[dict[str, Any]]:
        """What spilling had done when each step began, and at the end."""

    def look(self, restart_peak: bool = False) -> tuple[int, int, int, int]:
        """
        Return live, peak and spilled bytes, and how many were lacking since the last look when pages had to move. The peak is that since the last look that restarted it.
        """

    def bring_back(self, most: int, time_us: int) -> int:
        """
        Move at most so many bytes back to the device while enough of it is free; return how many.
        """

    def take_host_bytes(self, bytes: int) -> bool:
        """
        Take host memory for copies of tensors. Return whether there was so much.
        """

    def give_host_bytes(self, bytes: int) -> None:
        """Return it."""

    def steer(self, first: Sequence[int], last: Sequence[int]) -> None:
        """
        Ids of allocations that go to the host first, or last. Replaces what was said before.
        """

    def broken(self) -> str:
        """Return the first violated invariant of the policy, or an empty string."""

def plan(lower: Any, upper: Any, size: Any, align: int, capacity: int, time_limit: float, seed: int) -> dict[str, Any]:
    """Return offsets for buffers with known lifetimes."""

def bench_pairs(pool: object, scenario: str) -> float:
    """
    Run a scenario in C++ on the default stream and return nanoseconds per pair.
    """

def bench_driver_pairs(backend: CudaBackend, scenario: str) -> float:
    """
    The same with cuMemAllocFromPoolAsync and cuMemFreeAsync, from a separate driver pool.
    """

def bench_threads(pools: Sequence[object], streams: Sequence[int], hand_over: bool, batches: int) -> tuple[float, float, float]:
    """
    Run one thread per stream, on one pool or one pool each. Return wall and processor nanoseconds per pair, and the share of blocks freed by another thread.
    """

def bench_layer() -> tuple[list[int], list[int], int]:
    """
    A layer of the transformer step: sizes kept until the backward pass, temporary sizes, layers.
    """

def bench_swaps() -> list[tuple[int, int]]:
    """The scenario with variable sizes: (slot, bytes) of each replacement."""
