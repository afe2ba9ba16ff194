"""`Pipeline`: host data streamed through device work, so that upload, compute and download overlap.

Each step has its own stream, and chunks pass from one to the next by events. `arrays` adapts the array
libraries, `chunk_size` chooses the sizes of chunks, `run` executes one run, and `report` describes it.

One chunk, from left to right; `stage in` and `stage out` only if host memory is not pinned:

    batch ──stage in──► pinned ──upload──► device ──compute──► result ──download──► pinned ──stage out──► out

Bounds of the memory: at most `depth` chunks hold pinned input, at most `depth` hold device input, and at most
`depth` have been computed and not been returned. A chunk's device input is freed in the order of the upload
stream, behind its last use: the next upload reuses the memory without a host wait.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vram import _native
from vram.arguments import whole_number
from vram.core.buffer import Buffer
from vram.core.closing import Closing
from vram.core.device import Device
from vram.core.manager import get_memory_manager
from vram.core.pinned import shared_pinned_pool
from vram.core.pool import PinnedPool, Pool
from vram.core.stream import Stream
from vram.errors import ConfigError
from vram.pipeline.arrays import HostArray, Library, host_array, leaves, library_for, walk
from vram.pipeline.chunk_size import ChunkSizes
from vram.pipeline.report import LANES, PipelineReport
from vram.pipeline.run import Chunk, Run, Stage, Target
from vram.sizes import parse_size

__all__ = ["Pipeline", "PipelineReport"]

MOST_STREAMS = 128
"""The most compute streams: no GPU runs more kernels at once."""
MEMORY_SHARE = 0.5
"""Share of the free memory that chunks of a measured size may use."""


class Pipeline(Closing):
    """Streams host data through `compute`, a function of arrays on a device.

    `for out in pipe.map(batches)` processes batches one after the other. `pipe.run(array, out=…)` splits an
    array of any size into chunks. `compute` gets a batch (an array, or a tuple, list or dict of arrays and
    other values) with its arrays on the device, as arrays of the library named by `like`: "torch", "cupy",
    "numba", "numpy" (host) or "buffer". It returns such arrays, in any structure, or None. While it runs, the
    library's current stream is `pipe.stream`. Its arguments are valid only during the call: copy what must be
    kept.

    `chunk` is a size in bytes for `run`, or "auto" to find it by measuring. `depth` chunks are in flight at
    once. Device memory comes from `pool` (default: the manager's pool), pinned memory from `pinned`.
    `staging` tells whether host memory is first copied to pinned memory; by default this is done for memory
    that a GPU cannot access directly. With several `compute_streams`, which chunks use in turn, kernels of
    consecutive chunks overlap, and `compute` must not rely on the order of the chunks.

    With a list of functions and a list of as many devices (GPUs, or linked models), each function gets what
    the one before returned, copied to its own device; `pool` is then a list as well, or None.
    """

    def __init__(
        self,
        compute: Callable[[Any], Any] | Sequence[Callable[[Any], Any]],
        chunk: int | str = "auto",
        depth: int = 3,
        device: str | Device | Sequence[str | Device] | None = None,
        *,
        like: str | None = None,
        pool: Pool | Sequence[Pool] | None = None,
        pinned: PinnedPool | None = None,
        staging: bool | None = None,
        compute_streams: int = 1,
    ) -> None:
        """Create a pipeline; it holds memory only while it runs."""
        functions, places = _stages_of(compute, device, pool)
        self.depth = _checked_depth(depth)
        self.compute_streams = whole_number(compute_streams, "compute_streams", least=1, most=MOST_STREAMS)
        self._chunk = None if chunk == "auto" else parse_size(chunk)
        if self._chunk == 0:
            raise ConfigError("a chunk must have at least one byte, not 0", value=chunk)
        self.device = places[0][0]
        self.library: Library = library_for(like, self.device)
        libraries = [self.library, *(library_for(like, place) for place, _ in places[1:])]
        pools = [given or get_memory_manager().pool(place) for place, given in places]
        self.pool = pools[0]
        if pinned is not None and not isinstance(pinned, PinnedPool):
            raise TypeError(f"pinned must be a vram.PinnedPool, not {type(pinned).__name__}")
        self.pinned = pinned if pinned is not None else shared_pinned_pool(self.device)
        if self.pinned.device != self.device:
            raise ConfigError(f"the pinned pool is for {self.pinned.device.name}, not for {self.device.name}")
        last = places[-1][0]
        self._pinned_out = self.pinned if last == self.device else shared_pinned_pool(last)
        self._staging = staging
        self._copies = _native.HostCopies()
        self._sizes: dict[tuple[Any, ...], int] = {}
        self._handed: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._report: PipelineReport | None = None
        self._here = threading.local()
        with contextlib.ExitStack() as stack:
            self._streams = {
                lane: stack.enter_context(Stream(last if lane in ("download", "stage out") else self.device))
                for lane in LANES
                if lane != "compute"
            }
            self._stages = [
                Stage(
                    place,
                    function,
                    library,
                    pool,
                    [stack.enter_context(library.make_stream()) for _ in range(self.compute_streams)],
                )
                for function, (place, _), library, pool in zip(
                    functions, places, libraries, pools, strict=True
                )
            ]
            for before, stage in itertools.pairwise(self._stages):
                stage.send = stack.enter_context(Stream(before.device))
                stage.receive = stack.enter_context(Stream(stage.device))
            stack.pop_all()
        self._computes = self._stages[0].computes

    @property
    def compute(self) -> Callable[[Any], Any]:
        """The function, or the first of several. Set it between runs to use another one."""
        return self._stages[0].compute

    @compute.setter
    def compute(self, function: Callable[[Any], Any]) -> None:
        self._stages[0].compute = _checked_function(function)

    @property
    def stream(self) -> Stream:
        """The stream that `compute` runs on: during a call that of its chunk, otherwise the first one."""
        return getattr(self._here, "stream", self._computes[0])

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Process batches of any size; yield what `compute` returned for each, in order, on the host.

        Arrays are returned as separate NumPy arrays, other values unchanged. The arrays are in pinned memory,
        which is reused after they are dropped; while arrays of more than `depth` batches are held, further
        ones are copied to pageable memory. Do not change a batch before its result is returned. An error in
        `compute` or `batches` is raised in place of its result, after the earlier results. Leaving the loop
        early waits for queued work and releases everything.
        """
        run = Run(self, None)
        self._report = run.report
        with contextlib.closing(run.chunks(iter(batches))) as chunks:
            for chunk in chunks:
                yield self._handed_out(chunk)

    def run(self, array: Any, out: Any = None) -> Any:
        """Process an array, or a tuple, list or dict of arrays of equal length, in chunks of rows.

        `compute` must return as many rows as it gets, or None every time. The rows are written to `out`,
        which is created if it is not given, and returned. For results with another number of rows use `map`.
        """
        whole = walk(array, _required_array)
        rows = _rows_of(whole)
        target = Target(rows, out, whole)
        sizes, row_bytes, key = self._chunk_sizes(whole, rows)
        run = Run(self, target)
        self._report = run.report
        if rows == 0 and out is None:  # compute determines the result of zero rows as well
            parts = iter([walk(whole, operator.itemgetter(slice(0, 0)))])
        else:
            parts = _slices(whole, rows, row_bytes, sizes)
        for chunk in run.chunks(parts):
            sizes.add(chunk.size, chunk.times)
        if sizes.lanes and sizes.chosen is not None:
            self._sizes[key] = sizes.chosen
            run.report.measured = {"chunk": sizes.chosen, "lanes": dict(sizes.lanes)}
        return target.out

    def report(self) -> PipelineReport:
        """Return the report of the last run so far: timeline, bandwidths, share of the ideal, limit."""
        if self._report is None:
            raise ValueError("the pipeline has not run yet; call map() or run() first")
        return self._report

    def close(self) -> None:
        """Close the streams after running work. Later runs are refused. Calling it again has no effect."""
        for stream in self._all_streams():
            stream.close()

    def _all_streams(self) -> list[Stream]:
        passing = [stream for stage in self._stages for stream in (stage.send, stage.receive)]
        return [
            *self._streams.values(),
            *(stream for stage in self._stages for stream in stage.computes),
            *(stream for stream in passing if stream is not None),
        ]

    def __repr__(self) -> str:
        name = getattr(self.compute, "__name__", type(self.compute).__name__)
        return (
            f"<vram.Pipeline of {name} on {self.device.name}, like {self.library.name}, depth {self.depth}>"
        )

    # ---- memory -----------------------------------------------------------------------------------------

    def _direct(self, array: HostArray) -> bool:
        """Return whether the device can copy this host memory directly."""
        if self._staging is not None:
            return not self._staging
        backend = self.device.backend
        if not isinstance(backend, _native.CudaBackend):
            return True
        return backend.host_pinned(array.ctypes.data, array.nbytes)

    def _handed_out(self, chunk: Chunk) -> Any:
        """Return the user's result: arrays in pinned memory, or copies if many of those are held."""
        output, chunk.output = chunk.output, None
        if len(self._handed) > self.depth:
            output = walk(output, lambda leaf: leaf.copy() if id(leaf) in chunk.pinned_outputs else leaf)
        elif chunk.output_buffers:
            self._handed.add(chunk.output_buffers[0])
        chunk.output_buffers.clear()
        return output

    def _chunk_sizes(self, whole: Any, rows: int) -> tuple[ChunkSizes, int, tuple[Any, ...]]:
        arrays = list(leaves(whole))
        key = tuple((array.dtype.str, array.shape[1:]) for array in arrays)
        row_bytes = max(1, sum(array.nbytes for array in arrays) // max(1, rows))
        total = row_bytes * rows
        if self._chunk is not None:
            fixed = self._chunk
            return ChunkSizes(total, self.depth, lambda: fixed, fixed), row_bytes, key
        chosen = self._sizes.get(key)
        return ChunkSizes(total, self.depth, self._most_chunk_bytes, chosen), row_bytes, key

    def _most_chunk_bytes(self) -> int:
        """Return the largest chunk size for which `depth` chunks with results fit into a share of memory."""
        report = self._report
        ratio = 2.0 if report is None or not report.bytes_in else 1 + report.bytes_out / report.bytes_in
        raw = self.pool.raw_stats()
        limit = self.pool.limit or self.device.total_memory
        free = min(limit - raw["live"], self.device.free_memory + raw["reserved"]["current"] - raw["live"])
        return max(1, int(free * MEMORY_SHARE / (self.depth * ratio)))


def _checked_function(function: Any) -> Callable[[Any], Any]:
    if not callable(function):
        raise TypeError(f"compute must be a function of a batch, not {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _checked_depth(depth: object) -> int:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ConfigError(f"depth must be at least 1, not {depth!r}", value=depth)
    return depth


def _stages_of(
    compute: Any, device: Any, pool: Any
) -> tuple[list[Callable[[Any], Any]], list[tuple[Device, Pool | None]]]:
    """Return the functions, and for each its device and the given pool."""
    several = isinstance(compute, (list, tuple))
    functions = list(compute) if several else [compute]
    for function in functions:
        _checked_function(function)
    devices = list(device) if several and isinstance(device, (list, tuple)) else [device]
    pools = list(pool) if several and isinstance(pool, (list, tuple)) else [pool]
    if not functions or (several and pool is None and len(devices) != len(functions)):
        raise ConfigError(
            f"{len(functions)} functions need as many devices, not {len(devices)}; name one for each",
            value=device,
        )
    pools = pools if pool is not None else [None] * len(functions)
    devices = devices if device is not None else [None] * len(functions)
    if not len(functions) == len(devices) == len(pools):
        raise ConfigError(
            f"{len(functions)} functions need as many devices and pools, not {len(devices)} and "
            f"{len(pools)}; name one for each",
            value=device,
        )
    places = [(_device_of(*each), each[1]) for each in zip(devices, pools, strict=True)]
    for (one, _), (other, _) in itertools.pairwise(places):
        if one == other or not (
            one.backend.waits_for(other.backend) and other.backend.waits_for(one.backend)
        ):
            raise ConfigError(
                f"a pipeline cannot pass results from {one.name} to {other.name}; it takes different GPUs, "
                "or models that vram.Device.models linked",
                value=device,
            )
    return functions, places


def _device_of(device: str | Device | None, pool: Pool | None) -> Device:
    if pool is None:
        return device if isinstance(device, Device) else Device(device)
    if not isinstance(pool, Pool):
        raise TypeError(f"pool must be a vram.Pool, not {type(pool).__name__}")
    if device is not None and Device(device) != pool.device:
        raise ConfigError(f"the pool is on {pool.device.name}, not on {Device(device).name}")
    return pool.device


# ---- arrays that are split --------------------------------------------------------------------------------


def _required_array(leaf: Any) -> HostArray:
    array = host_array(leaf)
    if array is None:
        raise TypeError(f"run() takes arrays on the host, not {type(leaf).__name__}")
    return array


def _rows_of(whole: Any) -> int:
    shapes = [array.shape for array in leaves(whole)]
    if not shapes or any(not shape for shape in shapes):
        raise ValueError("run() splits arrays along their first axis; zero-dimensional arrays have none")
    lengths = {shape[0] for shape in shapes}
    if len(lengths) != 1:
        raise ValueError(f"the arrays have different lengths: {sorted(lengths)}; run() needs equal lengths")
    return int(lengths.pop())


def _slices(whole: Any, rows: int, row_bytes: int, sizes: ChunkSizes) -> Iterator[Any]:
    begin = 0
    while begin < rows:
        part = slice(begin, min(rows, begin + max(1, sizes.next() // row_bytes)))
        yield walk(whole, operator.itemgetter(part))
        begin = part.stop
