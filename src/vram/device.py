"""Devices, their streams and events: the Python side of the backend contract.

A `Device` is a light handle of one backend; a `Stream` is an ordered queue of its work; an `Event` is a point
in a stream. Memory is the pool's business. `observer` lets a race checker watch what orders what.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from vram import _native
from vram.arguments import shown
from vram.errors import ConfigError, DeviceError, VramError
from vram.locks import new_lock
from vram.sizes import format_size, parse_size

if TYPE_CHECKING:
    from vram.graph import Graph

__all__ = ["Device", "Event", "Observer", "Reads", "Stream", "devices", "is_default", "stream_handle"]


class Observer(Protocol):
    """What a watcher of stream order implements. What it raises comes out of the call that it watches."""

    def on_record(self, event: Event, stream: Stream) -> None:
        """`event` now marks everything queued on `stream` so far."""

    def on_wait(self, stream: Stream, event: Event) -> None:
        """Later work on `stream` waits for the mark of `event`."""

    def on_sync(self, what: Stream | Event | Device) -> Callable[[], None]:
        """The host asks for all that is queued now on a stream or device, or for what an event marks now.

        What is returned is called once the host knows that it has finished.
        """

    def on_launch(
        self, stream: Stream, work: Callable[[], object], arguments: tuple[Any, ...]
    ) -> Callable[[], object]:
        """`work` is about to be queued on `stream`; what is returned is queued in its place.

        `arguments` are those of launch as they were given, `Reads` included.
        """

    def on_close(self, stream: Stream) -> None:
        """The handle of `stream` is about to become invalid. Must not raise."""

    def on_capture(self, graph: Graph, stream: Stream) -> None:
        """What is queued on `stream` from now on goes into the graph."""

    def on_captured(self, graph: Graph, stream: Stream) -> None:
        """Work on `stream` runs again."""

    def on_graph(self, graph: Graph, handle: int) -> None:
        """Everything captured is about to be queued on a stream."""

    def on_suspend(self, pool: Any, tag: str | None) -> Callable[[], None]:
        """A pool is about to wait for the work on buffers and to give their memory up, until `on_resume`.

        What is returned is called once it has.
        """

    def on_resume(self, pool: Any) -> None:
        """Suspended buffers of a pool, or some of them, have their memory again."""

    def on_pool_close(self, pool: Any) -> Callable[[], None]:
        """A pool waits for its device and gives everything back. What is returned is called then."""


observer: Observer | None = None
"""The one watcher of stream order in this process, or None. Set it as `vram.device.observer = …`."""


class Reads:
    """An argument of `Stream.launch` that the work only reads. The function gets the plain value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        """Mark a value; see `vram.race.reads`."""
        self.value = value


def _nothing() -> None:
    pass


def _asked(what: Stream | Event | Device) -> Callable[[], None]:
    """Tell the observer that the host asks for `what`; returns what to call once it knows."""
    return _nothing if observer is None else observer.on_sync(what)


@contextlib.contextmanager
def host_knows(what: Stream | Event | Device) -> Iterator[None]:
    """Tell the observer that the host waits for `what` in this block, by other means than these classes."""
    known = _asked(what)
    yield
    known()


@contextlib.contextmanager
def suspending(pool: Any, tag: str | None) -> Iterator[None]:
    """Tell the observer that buffers of a pool are suspended in this block, unless that fails."""
    done = _nothing if observer is None else observer.on_suspend(pool, tag)
    yield
    done()


@contextlib.contextmanager
def resuming(pool: Any) -> Iterator[None]:
    """Tell the observer that suspended buffers of a pool come back in this block, unless that fails."""
    yield
    if observer is not None:
        observer.on_resume(pool)


@contextlib.contextmanager
def closing(pool: Any) -> Iterator[None]:
    """Tell the observer that a pool is closed in this block, unless that fails."""
    done = _nothing if observer is None or pool.closed else observer.on_pool_close(pool)
    yield
    done()


def wait_out(wait: Callable[[], None]) -> None:
    """Call `wait` to its end, because what it waits for uses memory that is about to go.

    What interrupts it, such as Ctrl-C, is raised after that.
    """
    try:
        wait()
    except VramError:
        raise
    except BaseException:
        wait_out(wait)
        raise


# ---- devices ----------------------------------------------------------------------------------------------


TORCH_PRIORITIES, TORCH_STREAMS = 4, 32
"""PyTorch's pools of streams on each device, and the streams of each."""

_AnyBackend: TypeAlias = _native.HostBackend | _native.ModelBackend | _native.CudaBackend


class _Core:
    """What all `Device` objects of one device share: its backend and who listens to it."""

    def __init__(self, kind: str, index: int, name: str, backend: _AnyBackend) -> None:
        self.kind = kind
        self.index = index
        self.name = name
        self.backend = backend
        self.process = os.getpid()
        self.pools: list[Callable[[int | None], bool]] = []
        self.adopted: set[int] = set()  # streams of CuPy, which tell before they go
        self.torch_adopted = False

    def stream_closing(self, handle: int) -> None:
        """Tell the pools before a stream goes: they ask nothing of its handle from now on."""
        for tell in tuple(self.pools):
            tell(handle)

    def adopt_torch(self) -> None:
        """Let the streams of PyTorch's own pools count as lasting, as PyTorch never destroys them."""
        torch = sys.modules.get("torch")
        if self.torch_adopted or torch is None or not torch.cuda.is_initialized():
            return
        self.torch_adopted = True
        # Each priority has a pool, whose streams PyTorch gives in turn.
        for priority in range(0, -TORCH_PRIORITIES, -1):
            for _ in range(TORCH_STREAMS):
                self.backend.stream_adopt(torch.cuda.Stream(self.index, priority=priority).cuda_stream)

    def adopt_cupy(self, stream: Any) -> None:
        """Let a stream that a CuPy object owns count as lasting: the object tells before it destroys it."""
        kind = sys.modules["cupy"].cuda.Stream
        if not isinstance(stream, kind) or getattr(stream, "_foreign_stream_ref", None) is not None:
            return
        _announce_ends(kind)
        self.backend.stream_adopt(stream.ptr)
        self.adopted.add(stream.ptr)

    def adopted_goes(self, handle: int) -> None:
        """Tell the pools before an adopted stream goes."""
        if handle in self.adopted:
            self.stream_closing(handle)
            self.adopted.discard(handle)
            self.backend.stream_disown(handle)


class Device:
    """Where memory lives: "host", a "model" of a device (addresses only), or "cuda:0".

    `Device("host")` is the same device every time in a process; after a fork the child gets its own, and what
    it inherited answers with DeviceError. `Device()` is the default device: the host, where there is no GPU.
    `Device("model:16GiB")` makes a new model each time, as `Device.model` does.
    """

    __slots__ = ("__weakref__", "_core")

    def __init__(self, name_or_device: str | Device | None = None) -> None:
        """Open a device by name, or take another handle of the same device."""
        self._core = _core_of(name_or_device)

    @classmethod
    def model(
        cls,
        capacity: int | str = "141GiB",
        *,
        pages: bool = True,
        lag_us: float = 5000.0,
        manual: bool = False,
        release_waits: bool = False,
    ) -> Device:
        """Make a new model of a device: addresses only, a virtual clock, failures on demand.

        Work takes `lag_us` on the virtual clock, or with `manual` happens only when it is stepped. With
        `release_waits` giving plain memory back waits for all of it, as on a GPU. The
        controls are methods of `.backend`: advance, step, fail, counts and others.
        """
        return cls._of(_model_core(capacity, pages, lag_us, manual, release_waits))

    @classmethod
    def _of(cls, core: _Core) -> Device:
        device = cls.__new__(cls)
        device._core = core
        return device

    @property
    def name(self) -> str:
        """The name: "host", "cuda:0", "model:0"."""
        return self._core.name

    @property
    def kind(self) -> str:
        """One of "host", "model" and "cuda"."""
        return self._core.kind

    @property
    def index(self) -> int:
        """The number among devices of its kind."""
        return self._core.index

    @property
    def backend(self) -> _native.Backend:
        """The native backend object; pools and tests talk to it."""
        return self._core.backend

    @property
    def pages(self) -> bool:
        """Whether pages can be mapped at chosen addresses here."""
        return self._core.backend.pages

    @property
    def total_memory(self) -> int:
        """The bytes of physical memory."""
        return self._core.backend.total_bytes

    @property
    def free_memory(self) -> int:
        """The bytes that are not taken by anyone."""
        return self._core.backend.memory_info()[0]

    def synchronize(self) -> None:
        """Wait until everything queued on every stream is done; raises what launched functions raised."""
        known = _asked(self)
        try:
            self._core.backend.synchronize()
        finally:
            known()

    def add_pool(self, listener: Callable[[int | None], bool]) -> None:
        """Have a pool told before any stream of this device is destroyed; see `PoolCore.stream_listener`."""
        pools = self._core.pools
        if listener(None):
            pools.append(listener)
        for gone in [each for each in pools if not each(None)]:
            _forget(pools, gone)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self._core is other._core

    def __hash__(self) -> int:
        return hash(id(self._core))

    def __repr__(self) -> str:
        return f"<vram.Device {self.name}, {format_size(self.total_memory)}>"


def devices() -> list[Device]:
    """List the devices of this machine, GPUs first. Models are not listed: they are made on demand."""
    gpus, _ = _native.cuda_devices()
    return [*(Device(f"cuda:{index}") for index in range(gpus)), Device("host")]


def is_default(device: Device) -> bool:
    """Whether `Device()` is this device. Does not open the default device to find out."""
    return device.name == ("cuda:0" if _native.cuda_devices()[0] else "host")


_host: _Core | None = None
_cuda: dict[int, _Core] = {}
_host_lock = new_lock()  # a finalizer may open a device while one is opened
_model_numbers = itertools.count()
_CUDA_NAME = re.compile(r"cuda(?::(\d+))?")


def _core_of(what: str | Device | None) -> _Core:
    if isinstance(what, Device):
        return what._core
    if what is None:
        return _cuda_core(0) if _native.cuda_devices()[0] else _host_core()
    if what == "host":
        return _host_core()
    if not isinstance(what, str):
        raise TypeError(f"a device is a name or a vram.Device, not {type(what).__name__}")
    if what.startswith("model:"):
        return _model_core(what.removeprefix("model:"), True, 5000.0, False, False)
    if match := _CUDA_NAME.fullmatch(what):
        return _cuda_core(int(match[1] or 0))
    raise DeviceError(
        f"{what!r} is not the name of a device. There are: {_known_names()}; "
        '"model:<capacity>" makes a model of a device.',
        device=what,
        code="missing",
    )


def _known_names() -> str:
    return ", ".join(device.name for device in devices())


def _host_core() -> _Core:
    global _host
    core = _host
    if core is not None and core.process == os.getpid():
        return core
    with _host_lock:
        core = _host
        if core is None or core.process != os.getpid():
            made = _Core("host", 0, "host", _native.HostBackend())
            _host = made if _host is core else _host  # unless one came in between
        assert _host is not None
        return _host


def _cuda_core(index: int) -> _Core:
    with _host_lock:
        core = _cuda.get(index)
        if core is not None and core.process == os.getpid():
            return core
        count, why = _native.cuda_devices()
        if core is not None or index >= count:
            why = "a CUDA device cannot be used after a fork" if core is not None else why
            raise DeviceError(
                f"there is no device cuda:{index}: {why or f'libcuda.so.1 has {count} device(s)'}. "
                "vram.devices() lists what is there.",
                device=f"cuda:{index}",
                code="missing",
            )
        core = _cuda[index] = _Core("cuda", index, f"cuda:{index}", _native.CudaBackend(index))
        return core


def adopt_torch_streams(index: int) -> None:
    """Let the streams of PyTorch's own pools on a device count as lasting."""
    _cuda_core(index).adopt_torch()


def adopt_cupy_stream(index: int, stream: Any) -> None:
    """Let a stream that a CuPy object owns count as lasting. Quick where it does already."""
    core = _cuda.get(index)
    if core is None or stream.ptr not in core.adopted:
        _cuda_core(index).adopt_cupy(stream)


def forget_cuda_device(index: int) -> None:
    """Another library resets the device: what was opened there is lost, and a later use opens it anew."""
    with _host_lock:
        core = _cuda.pop(index, None)
    if core is not None:
        core.adopted.clear()
        assert isinstance(core.backend, _native.CudaBackend)
        core.backend.abandon()


def _model_core(capacity: int | str, pages: bool, lag_us: float, manual: bool, release_waits: bool) -> _Core:
    size = parse_size(capacity)
    if size == 0 or not lag_us >= 0:
        raise ConfigError(
            f"a model needs a capacity above 0 and a lag of at least 0, not {capacity!r} and {lag_us!r}",
            capacity=capacity,
            lag_us=lag_us,
        )
    number = next(_model_numbers)
    backend = _native.ModelBackend(size, pages, lag_us, manual, release_waits)
    return _Core("model", number, f"model:{number}", backend)


def _forget(listeners: list[Any], dead: Any) -> None:
    with contextlib.suppress(ValueError):
        listeners.remove(dead)


# While Python still runs: launched functions finish, later ones are refused. The threads of the host's
# streams never touch Python after this.
atexit.register(_native.stop_launches)


# ---- streams ----------------------------------------------------------------------------------------------


class Stream:
    """An ordered queue of work on a device. Work on different streams may overlap.

    `Stream(device)` makes one and owns it: `close()`, the end of a `with` block or garbage collection gives
    it back after its queued work. `Stream.default(device)` is the device's default stream, which nobody owns.
    """

    __slots__ = ("__weakref__", "_core", "_handle", "_open", "_owner")

    def __init__(self, device: str | Device | None = None) -> None:
        """Make a new stream on a device (the default device where none is given)."""
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
        """Return a stream that somebody else owns."""
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
        """Wait until everything queued here has finished; raises what a launched function raised."""
        handle, known = self.handle, _asked(self)
        try:
            self._core.backend.stream_synchronize(handle)
        finally:
            known()

    def query(self) -> bool:
        """Whether everything queued here has finished. Never waits."""
        known = _asked(self)
        finished: bool = self._core.backend.stream_query(self.handle)
        if finished:
            known()
        return finished

    def record_event(self, event: Event | None = None) -> Event:
        """Mark everything queued here so far with an event, a new one where none is given."""
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

        It runs on the stream's thread. What it raises comes out of the next synchronize of this stream, its
        device or an event recorded on it. It must not wait for its own stream.
        """
        values = [each.value if type(each) is Reads else each for each in arguments]
        work = functools.partial(function, *values) if values else function
        handle = self.handle
        if observer is not None:
            work = observer.on_launch(self, work, arguments)
        self._core.backend.launch(handle, work)

    def capture(self) -> Graph:
        """Capture what is queued here in a `with` block into a graph, instead of running it."""
        from vram.graph import Graph

        return Graph(self)

    def close(self) -> None:
        """Give the stream back; its queued work still finishes. Closing again does nothing.

        Nor does closing a stream that is not owned here, such as the default stream. What a launched function
        raised and nobody asked for is reported (`sys.unraisablehook`), once no event recorded here is left.
        """
        if not self._owner:
            return
        try:
            handle = self._open.pop()
        except IndexError:
            return
        try:
            self._core.stream_closing(handle)
        except BaseException:  # a pool still counts on it, or Ctrl-C came in between: it stays open
            self._open.append(handle)
            raise
        if observer is not None:
            observer.on_close(self)
        self._core.backend.stream_destroy(handle)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # In the child of a fork the backend refuses, and there is nothing to give back. At the very end the
        # class of the error may be gone (ImportError).
        with contextlib.suppress(VramError, AttributeError, ImportError):
            self.close()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (protocol version, handle), as other libraries ask for it."""
        return (0, self.handle)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._core is other._core and self._handle == other._handle

    def __hash__(self) -> int:
        return hash((id(self._core), self._handle))

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<vram.Stream {self._handle} of {self._core.name}{state}>"


def stream_handle(stream: Any, device: Device) -> int:
    """Return the backend's handle of a stream, whoever's object it is.

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


def _announce_ends(kind: Any) -> None:
    """Have the streams of a class tell the pools before they destroy themselves."""
    destroy = kind.__del__
    if getattr(destroy, "announces", False):
        return

    def announce(stream: Any) -> None:
        if not sys.is_finalizing() and (core := _cuda.get(stream.device_id)) is not None:
            try:
                core.adopted_goes(stream.ptr)
            except VramError:  # it is captured; pools still use it, so it must stay
                return
        destroy(stream)

    announce.announces = True  # type: ignore[attr-defined]
    kind.__del__ = announce


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
    """A point in a stream. One that was never recorded counts as passed; recording again moves it.

    With `timing` it also keeps the moment it passed, on the device's own clock: see `elapsed_ms`.
    """

    __slots__ = ("__weakref__", "_core", "_handle")

    def __init__(self, device: str | Device | None = None, *, timing: bool = False) -> None:
        """Make an event on a device (the default device where none is given)."""
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
        if observer is not None:
            observer.on_record(self, target)

    def query(self) -> bool:
        """Whether the point has passed. Never waits."""
        known = _asked(self)
        passed: bool = self._core.backend.event_query(self._handle)
        if passed:
            known()
        return passed

    def synchronize(self) -> None:
        """Wait until the point has passed; raises what a function launched on that stream raised."""
        known = _asked(self)
        try:
            self._core.backend.event_synchronize(self._handle)
        finally:
            known()

    def wait(self, stream: Any = None) -> None:
        """Make later work on `stream` wait for what this event marks now. The host does not wait."""
        target = self._stream(stream)
        self._core.backend.stream_wait(target.handle, self._handle)
        if observer is not None:
            observer.on_wait(target, self)

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


_Kind = TypeVar("_Kind")


def _require(value: Any, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"a vram.{kind.__name__} is wanted, not {type(value).__name__}")
    return value
