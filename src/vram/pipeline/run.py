"""One run of a pipeline: chunks on their way through the lanes, what they hold, and when it is released.

Events define the order; the host waits only for what it returns. `pipeline` has the diagram and guarantees.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from vram import _native
from vram.core.buffer import Buffer
from vram.core.device import Device, wait_out
from vram.core.pool import PinnedPool, Pool
from vram.core.stream import Event, Stream
from vram.errors import DeviceError, OutOfMemory
from vram.pipeline.arrays import HostArray, Library, Result, host_array, leaves, np, walk
from vram.pipeline.report import PipelineReport, Span, compute_lane, lanes_of, peer_lane

__all__ = ["Chunk", "Run", "Stage", "Target"]

TAG: Final = "pipeline"
"""The tag of the allocations."""
MOST_UPLOADS_AHEAD: Final = 2
"""Chunks that may be uploading before computed ones are returned."""


class LaneEvents:
    """The timing events of one chunk, two per lane; later chunks reuse them."""

    def __init__(self, devices: dict[str, Device]) -> None:
        self._devices = devices  # by lane, in order
        self._events: dict[tuple[str, bool], Event] = {}
        self.ends: dict[str, Event] = {}

    def _event(self, lane: str, end: bool) -> Event:
        if (lane, end) not in self._events:
            self._events[lane, end] = Event(self._devices[lane], timing=True)
        return self._events[lane, end]

    def begin(self, lane: str, stream: Stream) -> None:
        self._event(lane, False).record(stream)

    def end(self, lane: str, stream: Stream) -> None:
        event = self._event(lane, True)
        event.record(stream)
        self.ends[lane] = event

    def last(self) -> Event | None:
        """The end of the last lane that was entered."""
        return next((self.ends[lane] for lane in reversed(self._devices) if lane in self.ends), None)

    def spans(self, chunk: int, origins: dict[Device, Event], moved: dict[str, int]) -> list[Span]:
        def since(event: Event) -> float:
            return max(
                0.0, event.elapsed_ms(origins[event.device])
            )  # another stream may have been slightly earlier

        return [
            Span(chunk, lane, since(self._events[lane, False]), since(end), moved.get(lane, 0))
            for lane, end in self.ends.items()
        ]


class Chunk:
    """One batch in flight. It releases what it holds lane by lane; `Run` decides when."""

    def __init__(self, index: int, events: LaneEvents, stream: Stream) -> None:
        self.index = index
        self.events = events
        self.stream = stream  # of its computation
        self.size = 0  # bytes of input
        self.rows = slice(0, 0)  # rows of the array that run() splits
        self.moved: dict[str, int] = {}  # bytes, by lane
        self.batch: Any = None  # the structure, with its arrays on the host
        self.buffers: dict[int, Buffer] = {}  # device input, by the id of the host array
        self.staging: list[Buffer] = []  # pinned input
        self.results: Any = None  # results of compute: Result in place of arrays
        self.passed: list[Any] = []  # results of earlier functions, which another device copies
        self.received: list[Buffer] = []  # input of later functions
        self.out_staging: list[tuple[Buffer, HostArray]] = []  # pinned results and their destination
        self.output: Any = None
        self.output_buffers: list[Buffer] = []  # the pinned memory of the output
        self.pinned_outputs: set[int] = set()
        self.computed = False  # or queued
        self.last_use = "compute"  # the lane after which its device input can be freed
        self.error: BaseException | None = None
        self.host_ms = 0.0  # time spent queuing it
        self.times: dict[str, float] = {}  # time in each lane, and of the host

    def fail(self, error: BaseException) -> None:
        """Keep an error until the chunk's turn, without what the frames of its traceback hold."""
        if self.error is None:
            self.error = error
        each: BaseException | None = error
        while each is not None:
            traceback.clear_frames(each.__traceback__)
            each = each.__context__


class Target:
    """The destination of the rows of `Pipeline.run`."""

    def __init__(self, rows: int, out: Any, whole: Any) -> None:
        self.out = out
        self._rows = rows
        if out is not None:
            walk(out, lambda array: _check_out(array, rows, list(leaves(whole))))

    def destinations(self, chunk: Chunk) -> list[HostArray]:
        """Return the rows of `out` for a chunk's results. Called for the chunks in order."""
        results = [leaf for leaf in leaves(chunk.results) if leaf is not None]
        rows = chunk.rows.stop - chunk.rows.start
        for result in results:
            if not isinstance(result, Result) or result.shape[:1] != (rows,):
                shown = result.shape if isinstance(result, Result) else type(result).__name__
                raise ValueError(
                    f"compute got {rows} rows and returned {shown}; run() needs arrays with as many rows, "
                    "or None. Use map() for anything else."
                )
        if self.out is None and results:
            if chunk.rows.start:
                raise ValueError("compute returned arrays for this chunk and None for earlier ones")
            self.out = walk(chunk.results, self._made)
        places = [array[chunk.rows] for array in leaves(self.out) if array is not None]
        if len(places) != len(results):
            raise ValueError(f"compute returned {len(results)} arrays, but out has {len(places)}")
        for place, result in zip(places, results, strict=True):
            if (place.shape, place.dtype) != (result.shape, result.dtype):
                raise ValueError(
                    f"compute returned {result.dtype} of shape {result.shape}; "
                    f"out has {place.dtype} of shape {place.shape} there"
                )
        return places

    def _made(self, leaf: Result | None) -> HostArray | None:
        return None if leaf is None else np.empty((self._rows, *leaf.shape[1:]), leaf.dtype)


def _check_out(array: Any, rows: int, inputs: list[HostArray]) -> None:
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("out must be a writable C-contiguous NumPy array, or a structure of such arrays")
    if array.shape[:1] != (rows,):
        raise ValueError(f"out has {array.shape[0] if array.shape else 'no'} rows, but the input has {rows}")
    for each in inputs:
        same = array.ctypes.data == each.ctypes.data and array.nbytes == each.nbytes
        if not same and np.may_share_memory(array, each):
            raise ValueError("out partly overlaps the input; use another array")


@dataclass
class Stage:
    """One function of a pipeline, with the device it runs on."""

    device: Device
    compute: Callable[..., Any]
    library: Library
    pool: Pool
    computes: list[Stream]
    send: Stream | None = None  # on the device of the function before
    receive: Stream | None = None  # on this one


class Setup(Protocol):
    """What a run uses of its pipeline."""

    depth: int
    device: Device
    library: Library
    pool: Pool
    pinned: PinnedPool
    _pinned_out: PinnedPool  # of the last device
    _stages: list[Stage]
    _staging: bool | None
    _copies: _native.HostCopies
    _streams: dict[str, Stream]  # by lane, without those of the computation
    _computes: list[Stream]  # of the first function
    _here: threading.local  # .stream: that of the call of `compute` on this thread

    def _all_streams(self) -> list[Stream]:
        """Return the streams of all lanes."""

    def _direct(self, array: HostArray) -> bool:
        """Return whether an array is copied without staging."""


class Run:
    """One pass of batches through a pipeline."""

    def __init__(self, pipe: Setup, target: Target | None) -> None:
        self.pipe = pipe
        self.target = target
        self.depth = pipe.depth
        self.on_host = pipe.device.kind == "host"  # compute runs on the stream's thread
        self.uploads_ahead = (
            1 if self.on_host else min(MOST_UPLOADS_AHEAD, pipe.depth)
        )  # the host waits for memory there
        self.report = PipelineReport(
            pipe.device.name, pipe.library.name, pipe.depth, compute_streams=len(pipe._computes)
        )
        lanes = self.report.lanes = lanes_of(len(pipe._stages))
        self.report.sums_ms, self.report.sums_bytes = dict.fromkeys(lanes, 0.0), dict.fromkeys(lanes, 0)
        self.last_device = pipe._stages[-1].device
        self.devices = dict.fromkeys(lanes, pipe.device)  # by lane
        for number, stage in enumerate(pipe._stages[1:], start=2):
            self.devices[peer_lane(number)] = self.devices[compute_lane(number)] = stage.device
        self.devices["download"] = self.devices["stage out"] = self.last_device
        self.origins = {device: Event(device, timing=True) for device in self.devices.values()}
        self.chunks_made = 0
        self.rows_made = 0
        self.alive: deque[Chunk] = deque()  # started and not finished, oldest first
        self.staged: deque[Chunk] = deque()  # with pinned input
        self.holding: deque[Chunk] = deque()  # with device input
        self.spare_events: list[LaneEvents] = []
        self.more = True

    def chunks(self, source: Iterator[Any]) -> Generator[Chunk, None, None]:
        """Process everything; yield each chunk when it has completed, in order."""
        fed: deque[Chunk] = deque()  # uploading
        waiting: deque[Chunk] = deque()  # computed or queued, and not yet returned
        try:
            for device, origin in self.origins.items():
                first = device == self.pipe.device
                origin.record(self.pipe._streams["upload"] if first else self._receiver(device))
            while True:
                # Before the function is called, which may take long, and before any wait.
                while len(fed) < self.uploads_ahead and self._feed(source):
                    fed.append(self.alive[-1])
                if fed and len(waiting) < self.depth:
                    self._compute(fed[0])
                    waiting.append(fed.popleft())
                elif waiting:
                    self._finish(waiting[0])
                    left = time.perf_counter()
                    yield waiting.popleft()
                    self.report.consumer_ms += (time.perf_counter() - left) * 1e3
                else:
                    return
        finally:
            self._end()

    # ---- to the device ----------------------------------------------------------------------------------

    def _feed(self, source: Iterator[Any]) -> bool:
        """Take the next batch, if any, and queue its upload. An error is kept for the chunk's turn."""
        if not self.more:
            return False
        events = self.spare_events.pop() if self.spare_events else LaneEvents(self.devices)
        computes = self.pipe._computes
        chunk = Chunk(self.chunks_made, events, computes[self.chunks_made % len(computes)])
        begun = time.perf_counter()
        try:
            chunk.batch = next(source)
        except StopIteration:
            self.more = False
            self.spare_events.append(chunk.events)
            return False
        except Exception as error:
            chunk.fail(error)
        finally:
            self.report.input_ms += (time.perf_counter() - begun) * 1e3
        self.chunks_made += 1
        self.alive.append(chunk)
        if chunk.error is None:
            with self._host_time(chunk):
                try:
                    self._upload(chunk)
                except Exception as error:
                    chunk.fail(error)
        self.more = chunk.error is None
        return True

    @contextlib.contextmanager
    def _host_time(self, chunk: Chunk) -> Iterator[None]:
        """Count the time that the host works, without waits."""
        begun = time.thread_time()
        yield
        chunk.host_ms += (time.thread_time() - begun) * 1e3

    def _upload(self, chunk: Chunk) -> None:
        arrays = self._take(chunk)
        staged = [array for array in arrays if array.nbytes and not self.pipe._direct(array)]
        sources = self._stage(chunk, staged) if staged else {}
        while len(self.holding) >= self.depth:
            self._release(self.holding[0])
        stream = self.pipe._streams["upload"]
        for array in arrays:
            chunk.buffers[id(array)] = self._allocate(
                self.pipe.pool, array.nbytes, stream, self.holding, self._release
            )
        self.holding.append(chunk)
        if staged:
            stream.wait_event(chunk.events.ends["stage in"])
        chunk.events.begin("upload", stream)
        for array in arrays:
            if array.nbytes:
                source = sources.get(id(array), array.ctypes.data)
                self.pipe.device.backend.copy(
                    chunk.buffers[id(array)].ptr, source, array.nbytes, stream.handle
                )
        chunk.events.end("upload", stream)
        chunk.moved["upload"] = chunk.size

    def _take(self, chunk: Chunk) -> list[HostArray]:
        """Return the arrays of a batch, which stay in it until it is finished."""
        arrays: dict[int, HostArray] = {}

        def taken(leaf: Any) -> Any:
            array = host_array(leaf)
            if array is None:
                return leaf
            array = array if array.flags.c_contiguous else np.array(array, order="C")
            return arrays.setdefault(id(array), array)

        chunk.batch = walk(chunk.batch, taken)
        chunk.size = sum(array.nbytes for array in arrays.values())
        if self.target is not None:
            rows = next(iter(arrays.values())).shape[0]
            chunk.rows = slice(self.rows_made, self.rows_made + rows)
            self.rows_made += rows
        return list(arrays.values())

    def _stage(self, chunk: Chunk, arrays: list[HostArray]) -> dict[int, int]:
        """Queue copies into pinned memory; return its address for each array."""
        while len(self.staged) >= self.depth:
            self._unstage(self.staged[0])
        stream = self.pipe._streams["stage in"]
        sources = {}
        for array in arrays:
            buffer = self._allocate(self.pipe.pinned, array.nbytes, stream, self.staged, self._unstage)
            chunk.staging.append(buffer)
            sources[id(array)] = buffer.ptr
        self.staged.append(chunk)
        chunk.events.begin("stage in", stream)
        for array in arrays:
            self.pipe._copies.queue(
                self.pipe.device.backend, stream.handle, sources[id(array)], array.ctypes.data, array.nbytes
            )
        chunk.events.end("stage in", stream)
        chunk.moved["stage in"] = sum(array.nbytes for array in arrays)
        return sources

    def _allocate(
        self,
        pool: Pool,
        size: int,
        stream: Stream,
        holders: deque[Chunk],
        let_go: Callable[[Chunk], None],
    ) -> Buffer:
        """Allocate; if memory is short, earlier chunks release theirs first, in stream order.

        Results may be in the same pool, so wait for them before failing.
        """
        while True:
            try:
                return pool.allocate(size, stream=stream, tag=TAG)
            except OutOfMemory:
                if not holders and not self._fetch_results():
                    raise
            if holders:
                let_go(holders[0])

    def _fetch_results(self) -> bool:
        """Wait for results that are being downloaded and release them; return false if there are none."""
        found = [chunk for chunk in self.alive if chunk.results is not None and not self.on_host]
        for chunk in found:
            last = chunk.events.last()
            if last is not None:
                last.synchronize()
            chunk.results = None
            chunk.passed.clear()
            chunk.received.clear()
        return bool(found)

    def _unstage(self, chunk: Chunk) -> None:
        """Free a chunk's pinned input behind its upload, in the order of the staging stream."""
        if chunk in self.staged:
            self.staged.remove(chunk)
        if "upload" in chunk.events.ends:
            self.pipe._streams["stage in"].wait_event(chunk.events.ends["upload"])
        chunk.staging.clear()

    def _release(self, chunk: Chunk) -> None:
        """Free a chunk's device input behind its last use, in the order of the upload stream."""
        self._compute(chunk)  # if memory is so short that it is not its turn yet
        if chunk in self.holding:
            self.holding.remove(chunk)
        end = chunk.events.ends.get(chunk.last_use)
        if end is not None:
            if self.on_host:
                end.synchronize()  # until then Python holds arrays on it
            else:
                self.pipe._streams["upload"].wait_event(end)
        while chunk.buffers:
            _, buffer = chunk.buffers.popitem()
            try:
                buffer.free()
            except BufferError:  # an array on it still exists and keeps the memory
                buffer.record_stream(chunk.stream)

    # ---- on the device ----------------------------------------------------------------------------------

    def _compute(self, chunk: Chunk) -> None:
        """Queue the function and the download. On a GPU it is called now, on the host by the stream."""
        if chunk.computed or chunk.error is not None:
            return
        chunk.computed = True
        with self._host_time(chunk):
            try:
                (self._compute_on_host if self.on_host else self._compute_queued)(chunk)
            except Exception as error:
                chunk.fail(error)
        self.more = self.more and chunk.error is None

    def _begin(self, lane: str, after: str, chunk: Chunk) -> Stream:
        stream = chunk.stream if lane == "compute" else self.pipe._streams[lane]
        stream.wait_event(chunk.events.ends[after])
        chunk.events.begin(lane, stream)
        return stream

    def _compute_queued(self, chunk: Chunk) -> None:
        stream = self._begin("compute", "upload", chunk)
        self._call(chunk)
        chunk.events.end("compute", stream)
        inputs = [(buffer.ptr, buffer.ptr + buffer.size) for buffer in chunk.buffers.values()]
        for number in range(2, len(self.pipe._stages) + 1):
            if chunk.error is None:
                self._pass_on(chunk, number, inputs)
        if chunk.error is not None or not self._has_results(chunk):
            return
        inputs = inputs if len(self.pipe._stages) == 1 else []
        down = self._begin("download", compute_lane(len(self.pipe._stages)), chunk)
        for result, to in self._targets(chunk):
            self.last_device.backend.copy(to, result.ptr, result.size, down.handle)
            if any(begin <= result.ptr < end for begin, end in inputs):
                chunk.last_use = "download"
        chunk.events.end("download", down)
        if chunk.last_use == "download":  # the chunk owns the memory; the library's array can be dropped
            chunk.results = walk(chunk.results, lambda leaf: _without_input(leaf, inputs))
        if chunk.out_staging:
            stream = self._begin("stage out", "download", chunk)
            for buffer, place in chunk.out_staging:
                self.pipe._copies.queue(
                    self.last_device.backend, stream.handle, place.ctypes.data, buffer.ptr, place.nbytes
                )
            chunk.events.end("stage out", stream)

    def _receiver(self, device: Device) -> Stream:
        """Return the stream on which a device receives the results of the one before."""
        streams = (stage.receive for stage in self.pipe._stages if stage.device == device)
        return next(stream for stream in streams if stream is not None)

    def _pass_on(self, chunk: Chunk, number: int, inputs: list[tuple[int, int]]) -> None:
        """Copy the results to the device of the next function, and call it."""
        before, stage = self.pipe._stages[number - 2 : number]
        send, receive = stage.send, stage.receive
        assert send is not None and receive is not None
        results, chunk.results = chunk.results, None  # not to be released if memory is short
        chunk.passed.append(results)
        lane, done = peer_lane(number), chunk.events.ends[compute_lane(number - 1)]
        arrays = {id(leaf): leaf for leaf in leaves(results) if isinstance(leaf, Result)}
        buffers = {
            key: self._allocate(stage.pool, leaf.size, receive, deque(), self._release)
            for key, leaf in arrays.items()
        }
        chunk.received += buffers.values()
        for stream in (send, receive):
            stream.wait_event(done)
        chunk.events.begin(lane, receive)
        for key, leaf in arrays.items():
            if leaf.size:
                stage.device.backend.copy_across(
                    buffers[key].ptr, receive.handle, before.device.backend, leaf.ptr, send.handle, leaf.size
                )
            if any(begin <= leaf.ptr < end for begin, end in inputs):
                chunk.last_use = lane
        chunk.events.end(lane, receive)
        chunk.moved[lane] = sum(leaf.size for leaf in arrays.values())
        stream = stage.computes[chunk.index % len(stage.computes)]
        stream.wait_event(chunk.events.ends[lane])
        chunk.events.begin(compute_lane(number), stream)

        def wrapped(leaf: Any) -> Any:
            here = isinstance(leaf, Result)
            return stage.library.wrap(buffers[id(leaf)], leaf.shape, leaf.dtype) if here else leaf

        try:
            chunk.results = self._called(stage, stream, lambda: walk(results, wrapped))
        except Exception as error:
            chunk.fail(error)
        chunk.events.end(compute_lane(number), stream)

    def _compute_on_host(self, chunk: Chunk) -> None:
        stream = self._begin("compute", "upload", chunk)
        stream.launch(self._call, chunk)
        chunk.events.end("compute", stream)
        down = self._begin("download", "compute", chunk)
        down.launch(self._fetch, chunk)
        chunk.events.end("download", down)
        chunk.last_use = "download"
        if self.pipe._staging and self.target is not None:
            stream = self._begin("stage out", "download", chunk)
            stream.launch(self._store, chunk)
            chunk.events.end("stage out", stream)

    def _call(self, chunk: Chunk) -> None:
        """Call the user's function with the chunk's arrays, and convert what it returns."""
        try:
            chunk.results = self._returned(chunk)
        except BaseException as error:
            if not self.on_host and not isinstance(error, Exception):
                raise  # an interrupt of this thread
            chunk.fail(error)

    def _returned(self, chunk: Chunk) -> Any:
        stage = self.pipe._stages[0]
        return self._called(
            stage, chunk.stream, lambda: walk(chunk.batch, lambda leaf: self._on_device(chunk, leaf))
        )

    def _called(self, stage: Stage, stream: Stream, batch: Callable[[], Any]) -> Any:
        with self._stream_here(stream), stage.library.current(stream):
            value = stage.compute(batch())
            return walk(value, lambda leaf: stage.library.result(leaf) or leaf)

    @contextlib.contextmanager
    def _stream_here(self, stream: Stream) -> Iterator[None]:
        """Make it the `stream` of the pipeline on this thread."""
        self.pipe._here.stream = stream
        try:
            yield
        finally:
            del self.pipe._here.stream

    def _on_device(self, chunk: Chunk, leaf: Any) -> Any:
        buffer = chunk.buffers.get(id(leaf))
        return leaf if buffer is None else self.pipe.library.wrap(buffer, leaf.shape, leaf.dtype)

    # ---- back to the host -------------------------------------------------------------------------------

    def _has_results(self, chunk: Chunk) -> bool:
        """Return whether there is anything to copy; if not, the output is what was returned."""
        if self.target is not None:
            return self.target.out is not None or any(leaf is not None for leaf in leaves(chunk.results))
        if any(isinstance(leaf, Result) for leaf in leaves(chunk.results)):
            return True
        chunk.output = chunk.results
        return False

    def _targets(self, chunk: Chunk) -> Iterator[tuple[Result, int]]:
        """Yield each non-empty result and the address it is copied to."""
        chunk.moved["download"] = sum(leaf.size for leaf in leaves(chunk.results) if isinstance(leaf, Result))
        # On the host this runs on the stream's own thread, where memory cannot wait for that stream.
        stream = None if self.on_host else self.pipe._streams["download"]
        pinned = self.pipe._pinned_out
        if self.target is not None:
            results = [leaf for leaf in leaves(chunk.results) if isinstance(leaf, Result)]
            for result, place in zip(results, self.target.destinations(chunk), strict=True):
                if not result.size:
                    continue
                if self.pipe._direct(place):
                    yield result, place.ctypes.data
                    continue
                buffer = pinned.allocate(result.size, stream=stream, tag=TAG)
                chunk.out_staging.append((buffer, place))
                chunk.moved["stage out"] = chunk.moved.get("stage out", 0) + result.size
                yield result, buffer.ptr
            return
        copies: list[tuple[Result, int]] = []

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Result):
                return leaf
            if not leaf.size:
                return np.empty(leaf.shape, leaf.dtype)
            buffer = pinned.allocate(leaf.size, stream=stream, tag=TAG)
            chunk.output_buffers.append(buffer)
            array = np.frombuffer(buffer, leaf.dtype).reshape(leaf.shape)
            chunk.pinned_outputs.add(id(array))
            copies.append((leaf, buffer.ptr))
            return array

        chunk.output = walk(chunk.results, placed)
        yield from copies

    def _fetch(self, chunk: Chunk) -> None:
        """Download on the host, on its stream's thread."""
        try:
            if chunk.error is None and self._has_results(chunk):
                for result, to in self._targets(chunk):
                    self.pipe._copies.copy(to, result.ptr, result.size)
        except Exception as error:
            chunk.fail(error)
        chunk.results = None

    def _store(self, chunk: Chunk) -> None:
        """Stage output on the host, on its stream's thread."""
        for buffer, place in chunk.out_staging:
            self.pipe._copies.copy(place.ctypes.data, buffer.ptr, place.nbytes)

    # ---- the end of a chunk, and of everything ----------------------------------------------------------

    def _finish(self, chunk: Chunk) -> None:
        """Wait for a chunk, release everything except its output, and record its times."""
        last = chunk.events.last()
        if last is not None:
            last.synchronize()
        if chunk.error is not None:
            error, chunk.error = chunk.error, None
            error.add_note(f"in chunk {chunk.index} of {self.pipe!r}")
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        spans = chunk.events.spans(chunk.index, self.origins, chunk.moved)
        chunk.times = {span.lane: span.end_ms - span.begin_ms for span in spans}
        chunk.times["host"] = chunk.host_ms
        self.report.host_ms += chunk.host_ms
        self.report.add_chunk(chunk.size, spans)
        self._unstage(chunk)
        self._release(chunk)
        chunk.results = chunk.batch = None
        chunk.passed.clear()
        chunk.received.clear()
        chunk.out_staging.clear()
        self.alive.remove(chunk)
        chunk.events.ends.clear()
        self.spare_events.append(chunk.events)

    def _end(self) -> None:
        """Wait for queued work and release everything."""
        if self.alive:
            self._settle()
        self.staged.clear()
        self.holding.clear()
        for chunk in self.alive:
            chunk.batch = chunk.results = chunk.output = chunk.error = None
            chunk.passed.clear()
            chunk.received.clear()
            chunk.staging.clear()
            chunk.out_staging.clear()
            chunk.output_buffers.clear()
            chunk.buffers.clear()
        self.alive.clear()
        self.spare_events.clear()

    def _settle(self) -> None:
        """Wait for all streams, or for the whole device if a stream raises or was closed."""
        try:
            for stream in self.pipe._all_streams():
                wait_out(stream.synchronize)
        except DeviceError:
            for device in self.origins:
                self._settle_device(device)

    def _settle_device(self, device: Device) -> None:
        for _ in range(2):
            with contextlib.suppress(DeviceError):
                wait_out(device.synchronize)
                return


def _without_input(leaf: Any, inputs: list[tuple[int, int]]) -> Any:
    ours = isinstance(leaf, Result) and any(begin <= leaf.ptr < end for begin, end in inputs)
    return None if ours else leaf
