"""Streams, events and graphs: the order of work on a device.

A `Stream` is an ordered queue of work; an `Event` is a point in a stream; a `Graph` is work captured from a
stream once and launched many times.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from vram import _native
from vram.arguments import require, shown
from vram.core import observer
from vram.core.closing import Closing
from vram.core.device import Device, _Core, _core_of
from vram.core.release import after_waiting
from vram.errors import DeviceError, VramError

__all__ = ["Event", "Graph", "Reads", "Stream", "named_handle", "stream_handle"]


class Reads:
    """An argument of `Stream.launch` that the work only reads. The function gets the plain value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        """Mark a value; see `vram.race.checker.reads`."""
        self.value = value


class Stream(Closing):
    """An ordered queue of work on a device. Work on different streams may overlap.

    `Stream(device)` creates a stream and owns it: `close()`, the end of a `with` block or garbage collection
    destroys it after its queued work. `Stream.default(device)` is the default stream, which has no owner.
    """

    __slots__ = ("__weakref__", "_core", "_handle", "_open", "_owner")

    def __init__(self, device: str | Device | None = None) -> None:
        """Create a new stream on a device (default: the default device)."""
        self._core = _core_of(device)
        self._handle = self._core.backend.stream_create()
        self._owner = True
        self._open = [self._handle]  # close() pops it: one step, so it happens once

    @classmethod
    def default(cls, device: str | Device | None = None) -> Stream:
        """Return the default stream of a device."""
        return cls._view(_core_of(device), 0)

    @classmethod
    def _view(cls, core: _Core, handle: int) -> Stream:
        """Return a stream that another library owns."""
        stream = cls.__new__(cls)
        stream._core = core
        stream._handle = handle
        stream._owner = False
        stream._open = [handle]
        return stream

    @property
    def handle(self) -> int:
        """The backend's own handle; 0 is the default stream."""
        if not self._open:
            raise DeviceError(
                f"stream {self._handle} of {self._core.name} was closed; make a new vram.Stream",
                device=self._core.name,
                stream=self._handle,
                code="closed",
            )
        return self._handle

    @property
    def device(self) -> Device:
        """The device whose work this stream orders."""
        return Device._of(self._core)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return not self._open

    def synchronize(self) -> None:
        """Wait until everything queued here has completed; raises errors of launched functions."""
        handle, known = self.handle, observer.asked(self)
        try:
            self._core.backend.stream_synchronize(handle)
        finally:
            known()
        after_waiting(self._core, everything=False)

    def query(self) -> bool:
        """Whether everything queued here has completed. Never waits."""
        known = observer.asked(self)
        finished: bool = self._core.backend.stream_query(self.handle)
        if finished:
            known()
        return finished

    def record_event(self, event: Event | None = None) -> Event:
        """Mark everything queued here so far with an event (default: a new one)."""
        if event is None:
            event = Event(self.device)
        _require(event, Event).record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Make later work here wait for what `event` marks now. The host does not wait."""
        _require(event, Event).wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Make later work here wait for everything queued on `stream` so far."""
        self.wait_event(_require(stream, Stream).record_event())

    def launch(self, function: Callable[..., object], *arguments: Any) -> None:
        """Queue `function(*arguments)` as work of this stream (host and model devices).

        It runs on the stream's thread and must not wait for its own stream. The next synchronize of this
        stream, its device or an event recorded on it raises its errors.
        """
        values = [each.value if type(each) is Reads else each for each in arguments]
        work = functools.partial(function, *values) if values else function
        handle = self.handle
        if observer.active is not None:
            work = observer.active.on_launch(self, work, arguments)
        self._core.backend.launch(handle, work)

    def capture(self) -> Graph:
        """Capture work queued here in a `with` block into a graph, instead of running it."""
        return Graph(self)

    def close(self) -> None:
        """Destroy the stream; its queued work still completes. Closing again does nothing.

        Closing a stream that is not owned here, such as the default stream, does nothing, too. Errors of
        launched functions that no call has raised are reported (`sys.unraisablehook`), once no event recorded
        here is left.
        """
        if not self._owner:
            return
        try:
            handle = self._open.pop()
        except IndexError:
            return
        try:
            self._core.stream_closing(handle)
        except BaseException:  # a pool still needs it, or Ctrl-C interrupted: it stays open
            self._open.append(handle)
            raise
        if observer.active is not None:
            observer.active.on_close(self)
        self._core.backend.stream_destroy(handle)

    def __del__(self) -> None:
        # In the child of a fork the backend refuses, and there is nothing to destroy. During interpreter
        # shutdown the class of the error may be gone (ImportError).
        with contextlib.suppress(VramError, AttributeError, ImportError):
            self.close()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (protocol version, handle), for other libraries."""
        return (0, self.handle)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._core is other._core and self._handle == other._handle

    def __hash__(self) -> int:
        return hash((id(self._core), self._handle))

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<vram.Stream {self._handle} of {self._core.name}{state}>"


def stream_handle(stream: Any, device: Device) -> int:
    """Return the backend's handle of a stream of any library.

    Takes None (the default stream), a handle, a vram.Stream of this device, any object with
    `__cuda_stream__`, and the streams of PyTorch, CuPy and Numba.
    """
    if stream is None:
        return 0
    if isinstance(stream, Stream):
        if stream._core is not device._core:
            raise _other_device("stream", stream._core, device._core)
        return stream.handle
    if hasattr(stream, "__index__") and not isinstance(stream, bool):
        return _checked_handle(operator.index(stream))
    found = _foreign_handle(stream)
    if found is None:
        raise TypeError(
            f"{type(stream).__name__} is not a stream: pass None, an int handle, a vram.Stream, an object "
            "with __cuda_stream__, or a stream of PyTorch, CuPy or Numba"
        )
    return _checked_handle(found)


def named_handle(stream: Any, device: Device) -> int:
    """As `stream_handle`, for a call of a pool."""
    handle = stream_handle(stream, device)
    if not isinstance(stream, Stream) and not hasattr(stream, "__index__"):
        meet(handle, device, stream)
    return handle


def meet(handle: int, device: Device, stream: Any = None) -> None:
    """Adopt the stream if its library is known to keep it or to tell before it goes.

    Pools ask nothing of any other stream except during a call that names it. `stream` is its object, where
    there is one.
    """
    core = device._core
    if core.kind != "cuda" or core.backend.lasting(handle):
        return
    core.adopt_torch()
    if (cupy := sys.modules.get("cupy")) is not None:
        owner = cupy.cuda.get_current_stream() if stream is None else stream
        if getattr(owner, "ptr", None) == handle:
            core.adopt_cupy(owner)


def _foreign_handle(stream: Any) -> int | None:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        return int(pair[1])
    for name in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, Numba
        value = getattr(stream, name, None)
        if name == "handle" and value is not None and hasattr(value, "value"):
            value = value.value or 0  # ctypes gives None for the default stream
        if isinstance(value, int) and not isinstance(value, bool):
            return int(value)
    return None


def _checked_handle(handle: int) -> int:
    if not 0 <= handle < 2**64:
        raise ValueError(f"a stream handle is a number from 0 to 2**64 - 1, not {shown(handle)}")
    return handle


def _other_device(what: str, theirs: _Core, ours: _Core) -> DeviceError:
    same = theirs.name == ours.name
    return DeviceError(
        f"the {what} belongs to {theirs.name}"
        + (" of another process" if same else f", not to {ours.name}")
        + f"; use one made on the same device ({ours.name})",
        device=ours.name,
        other=theirs.name,
        code="invalid",
    )


# ---- events -----------------------------------------------------------------------------------------------


class Event:
    """A point in a stream. An event that was never recorded counts as passed; recording again moves it.

    With `timing` it also keeps the time at which it passed, on the device's own clock: see `elapsed_ms`.
    """

    __slots__ = ("__weakref__", "_core", "_handle")

    def __init__(self, device: str | Device | None = None, *, timing: bool = False) -> None:
        """Create an event on a device (default: the default device)."""
        self._core = _core_of(device)
        backend = self._core.backend
        self._handle: int = backend.timing_event_create() if timing else backend.event_create()

    @property
    def handle(self) -> int:
        """The backend's own handle."""
        return self._handle

    @property
    def device(self) -> Device:
        """The device whose work it marks."""
        return Device._of(self._core)

    def record(self, stream: Any = None) -> None:
        """Mark everything queued on `stream` so far (None: the default stream)."""
        target = self._stream(stream)
        self._core.backend.event_record(self._handle, target.handle)
        if observer.active is not None:
            observer.active.on_record(self, target)

    def query(self) -> bool:
        """Whether the point has passed. Never waits."""
        known = observer.asked(self)
        passed: bool = self._core.backend.event_query(self._handle)
        if passed:
            known()
        return passed

    def synchronize(self) -> None:
        """Wait until the point has passed; raises errors of functions launched on that stream."""
        known = observer.asked(self)
        try:
            self._core.backend.event_synchronize(self._handle)
        finally:
            known()
        after_waiting(self._core, everything=False)

    def wait(self, stream: Any = None) -> None:
        """Make later work on `stream` wait for what this event marks now. The host does not wait.

        `stream` may belong to another CUDA device, or to a model that is linked with this one.
        """
        theirs = stream._core if isinstance(stream, Stream) else self._core
        if theirs is not self._core and theirs.backend.waits_for(self._core.backend):
            target = stream
            theirs.backend.stream_wait_peer(target.handle, self._core.backend, self._handle)
        else:
            target = self._stream(stream)
            self._core.backend.stream_wait(target.handle, self._handle)
        if observer.active is not None:
            observer.active.on_wait(target, self)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from `since` to this point; both are timing events that have passed, of one device."""
        if _require(since, Event)._core is not self._core:
            raise _other_device("event", since._core, self._core)
        return self._core.backend.elapsed_ms(since._handle, self._handle)

    def _stream(self, stream: Any) -> Stream:
        handle = stream_handle(stream, self.device)
        return stream if isinstance(stream, Stream) else Stream._view(self._core, handle)

    def __del__(self) -> None:
        with contextlib.suppress(VramError, AttributeError, ImportError):
            self._core.backend.event_destroy(self._handle)

    def __repr__(self) -> str:
        return f"<vram.Event {self._handle:#x} of {self._core.name}>"


# ---- graphs -----------------------------------------------------------------------------------------------


class Graph:
    """What was queued on a stream inside `with stream.capture() as graph:`; `launch()` runs it.

    Memory allocated on a stream while it is captured belongs to the graph: the pool does not reuse it until
    the graph is destroyed, even if another library captures.

    Inside the block nothing runs, and the stream can be neither synchronised nor queried. `close()` or
    garbage collection destroys the graph; launches under way still complete, and then its memory is free.
    """

    def __init__(self, stream: Stream) -> None:
        """Prepare a graph to be captured on `stream`; use `Stream.capture()`."""
        backend = require(stream, Stream, "stream").device.backend
        if not isinstance(backend, (_native.CudaBackend, _native.ModelBackend)):
            raise DeviceError(
                f"work on {stream.device.name} cannot be captured into a graph; CUDA devices and models can",
                device=stream.device.name,
                code="unsupported",
            )
        if stream.handle == 0:
            raise DeviceError(
                "the default stream cannot be captured into a graph; capture a vram.Stream of your own",
                device=stream.device.name,
                code="unsupported",
            )
        self._backend = backend
        self._stream = stream
        self._open: list[int] = []  # close() pops it: one step, so it happens once

    @property
    def device(self) -> Device:
        """The device whose work it holds."""
        return self._stream.device

    @property
    def ready(self) -> bool:
        """Whether it can be launched: captured, and not closed."""
        return bool(self._open)

    def __enter__(self) -> Graph:
        if self._open:
            raise DeviceError("the graph is captured already; capture another one", code="invalid")
        self._backend.capture_begin(self._stream.handle)
        if observer.active is not None:
            observer.active.on_capture(self, self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if observer.active is not None:
            observer.active.on_captured(self, self._stream)
        try:
            self._open.append(self._backend.capture_end(self._stream.handle))
        except VramError:
            if kind is None:  # otherwise the error inside says why
                raise
        if kind is not None:
            self.close()

    def launch(self, stream: Any = None) -> None:
        """Queue everything captured on `stream` (default: the one it was captured on)."""
        if not self._open:
            raise DeviceError("the graph is not captured yet, or was closed", code="closed")
        handle = self._stream.handle if stream is None else stream_handle(stream, self.device)
        if observer.active is not None:
            observer.active.on_graph(self, handle)
        self._backend.graph_launch(self._open[0], handle)

    def close(self) -> None:
        """Destroy the graph. Closing again does nothing."""
        with contextlib.suppress(IndexError):
            self._backend.graph_destroy(self._open.pop())

    def __del__(self) -> None:
        # In the child of a fork the backend refuses, and there is nothing to destroy.
        with contextlib.suppress(VramError, AttributeError):
            self.close()

    def __repr__(self) -> str:
        state = "ready" if self._open else "not ready"
        return f"<vram.Graph of {self.device.name}, {state}>"


_Kind = TypeVar("_Kind")


def _require(value: Any, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"expected a vram.{kind.__name__}, not {type(value).__name__}")
    return value
