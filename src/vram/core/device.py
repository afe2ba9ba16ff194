"""Devices: the Python side of the backend contract.

A `Device` is a light handle of one backend. `stream` has streams and events, `pool` allocates memory.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from vram import _native
from vram.arguments import real_number, whole_number
from vram.core import observer
from vram.core.locks import new_lock
from vram.core.release import after_waiting
from vram.errors import ConfigError, DeviceError, VramError
from vram.sizes import format_size, parse_size

__all__ = ["Device", "DeviceProperties", "devices", "is_default", "wait_out"]

MOST_MODELS: Final = 64
"""The most models that `Device.models` links."""
SLOWEST_GB_PER_S, FASTEST_GB_PER_S = 1e-3, 1e6
"""The speeds of links that `Device.models` takes."""


def wait_out(wait: Callable[[], None]) -> None:
    """Call `wait` until it completes, because the work it waits for uses memory that is about to be freed.

    An interruption, such as Ctrl-C, is raised after that.
    """
    try:
        wait()
    except VramError:
        raise
    except BaseException:
        wait_out(wait)
        raise


TORCH_PRIORITIES, TORCH_STREAMS = 4, 32
"""The number of PyTorch's stream pools per device, and of the streams in each."""

_AnyBackend: TypeAlias = _native.HostBackend | _native.ModelBackend | _native.CudaBackend


@dataclass(frozen=True)
class DeviceProperties:
    """What the hardware of a device has, as cudaGetDeviceProperties tells it; 0 or None: not known here.

    On the host and on models, the numbers are those of the memory engine: what overlaps there, and which
    kinds of memory there are.
    """

    name: str
    """The product: "NVIDIA H200"."""
    compute_capability: tuple[int, int] | None
    """Major and minor number; None unless it is a CUDA device."""
    copy_engines: int
    """asyncEngineCount: copies that run at the same time as kernels."""
    concurrent_kernels: bool
    """Whether kernels of different streams can run at the same time."""
    most_concurrent_kernels: int
    """The most kernels (grids) that can run at once; the rest wait. 128 on most GPUs since Volta."""
    multiprocessors: int
    """The number of streaming multiprocessors (SMs)."""
    warps_per_multiprocessor: int
    """The most warps that are resident on one multiprocessor, of all kernels together."""
    registers_per_multiprocessor: int
    """32-bit registers of one multiprocessor."""
    shared_memory_per_multiprocessor: int
    """Bytes of shared memory of one multiprocessor."""
    l2_cache: int
    """Bytes of the second-level cache."""
    memory_bus_bits: int
    """Width of the memory bus."""
    memory_bandwidth: float | None
    """Bytes a second by bus width and memory clock, if the driver tells both."""
    unified_addressing: bool
    """Whether host and devices share one address space, so that an address tells where its memory is."""
    integrated: bool
    """Whether the device uses the host's memory."""
    managed_memory: bool
    """Whether managed memory can be used by host and device at the same time."""
    memory_pools: bool
    """Whether the driver has stream-ordered pools (cudaMallocAsync): see `vram.DriverPool`."""
    virtual_memory: bool
    """Whether pages can be mapped at chosen addresses (cuMemMap)."""


class _Core:
    """What all `Device` objects of one device share: its backend and its listeners."""

    def __init__(self, kind: str, index: int, name: str, backend: _AnyBackend) -> None:
        self.kind = kind
        self.index = index
        self.name = name
        self.backend = backend
        self.process = os.getpid()
        self.listeners = observer.Listeners()  # of pools and arenas
        self.properties: DeviceProperties | None = None
        self.adopted: set[int] = set()  # streams of CuPy, which announce their end
        self.torch_adopted = False

    def add_listener(self, listener: Callable[[int | None], bool]) -> None:
        """Call `listener` before a stream of this device is destroyed; see `PoolCore.stream_listener`.

        Listeners whose pool is gone answer None with False and are dropped.
        """
        self.listeners.add(listener)
        self.listeners.drop(lambda each: not each(None))

    def stream_closing(self, handle: int) -> None:
        """Tell the pools before a stream is destroyed: they do not use its handle from now on."""
        self.listeners.tell(handle)

    def adopt_torch(self) -> None:
        """Treat the streams of PyTorch's own pools as lasting, because PyTorch never destroys them."""
        torch = sys.modules.get("torch")
        if self.torch_adopted or torch is None or not torch.cuda.is_initialized():
            return
        self.torch_adopted = True
        # Each priority has a pool, whose streams PyTorch returns in turn.
        for priority in range(0, -TORCH_PRIORITIES, -1):
            for _ in range(TORCH_STREAMS):
                self.backend.stream_adopt(torch.cuda.Stream(self.index, priority=priority).cuda_stream)

    def adopt_cupy(self, stream: Any) -> None:
        """Treat a stream that a CuPy object owns as lasting: the object announces that it destroys it."""
        kind = sys.modules["cupy"].cuda.Stream
        if not isinstance(stream, kind) or getattr(stream, "_foreign_stream_ref", None) is not None:
            return
        _announce_ends(kind)
        self.backend.stream_adopt(stream.ptr)
        self.adopted.add(stream.ptr)

    def adopted_goes(self, handle: int) -> None:
        """Tell the pools before an adopted stream is destroyed."""
        if handle in self.adopted:
            self.stream_closing(handle)
            self.adopted.discard(handle)
            self.backend.stream_disown(handle)


class Device:
    """Where memory is: "host", a "model" of a device (addresses only), or "cuda:0".

    `Device("host")` is the same device every time in a process; after a fork the child gets its own, and
    inherited objects raise DeviceError. `Device()` is the default device: the first GPU, or the host if there
    is none. `Device("model:16GiB")` creates a new model each time, as `Device.model` does.
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
        """Create a new model of a device: addresses only, a virtual clock, failures on demand.

        Work takes `lag_us` on the virtual clock; with `manual` it runs only when it is stepped. With
        `release_waits` releasing plain memory waits for all work, as on a GPU. The controls are methods of
        `.backend`: advance, step, fail, counts and others.
        """
        return cls._of(_model_core(capacity, pages, lag_us, manual, release_waits))

    @classmethod
    def models(
        cls,
        count: int,
        capacity: int | str = "141GiB",
        *,
        peer_access: bool = True,
        link_gb_per_s: float = 450.0,
        host_gb_per_s: float = 55.0,
        copy_engines: int = 3,
        lag_us: float = 5.0,
        pages: bool = True,
    ) -> list[Device]:
        """Create models that stand for the GPUs of one machine: they share a virtual clock and are linked.

        A copy between device and host memory takes its size divided by `host_gb_per_s` (10⁹ bytes a second),
        a copy between two models its size divided by `link_gb_per_s`. Without `peer_access`, copies between
        them are staged in host memory. `copy_engines` (1 to 3) is the number of copies that run at once on
        one model: uploads, downloads and copies between devices each have their own if there are 3. All
        other work takes `lag_us`.
        """
        whole_number(count, "count", least=1, most=MOST_MODELS)
        whole_number(copy_engines, "copy_engines", least=1, most=3)
        link = real_number(link_gb_per_s, "link_gb_per_s", least=SLOWEST_GB_PER_S, most=FASTEST_GB_PER_S)
        host = real_number(host_gb_per_s, "host_gb_per_s", least=SLOWEST_GB_PER_S, most=FASTEST_GB_PER_S)
        cores = [_model_core(capacity, pages, lag_us, False, False, host, copy_engines) for _ in range(count)]
        for one, other in itertools.combinations(cores, 2):
            assert isinstance(one.backend, _native.ModelBackend)
            assert isinstance(other.backend, _native.ModelBackend)
            one.backend.link(other.backend, link, bool(peer_access))
        return [cls._of(core) for core in cores]

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
        """The native backend object, for pools and tests."""
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
        """The bytes that are free."""
        return self._core.backend.memory_info()[0]

    @property
    def copy_engines(self) -> int:
        """How many copies run at the same time as kernels (CUDA's asyncEngineCount); 0 on the host.

        With 1, uploads and downloads take turns; with 2, both overlap with kernels; a third one copies
        between GPUs at the same time.
        """
        return self.properties.copy_engines

    @property
    def properties(self) -> DeviceProperties:
        """What the hardware has: engines, multiprocessors, memory. Asked once."""
        core = self._core
        if core.properties is None:
            core.properties = _properties_of(core)
        return core.properties

    def can_access(self, other: str | Device) -> bool:
        """Whether work on this device can use memory of `other` directly, as with cudaDeviceCanAccessPeer.

        A pool must also allow it: see `Pool.allow_access`. Copies between devices need neither: they are
        staged in host memory where there is no access. A device can access its own memory; a GPU cannot
        access memory of the device "host" (but that of a PinnedPool).
        """
        core = _core_of(other)
        return core is self._core or bool(self._core.backend.can_access(core.backend))

    def synchronize(self) -> None:
        """Wait until everything queued on every stream has completed; raises errors of launched functions."""
        known = observer.asked(self)
        try:
            self._core.backend.synchronize()
        finally:
            known()
        after_waiting(self._core, everything=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self._core is other._core

    def __hash__(self) -> int:
        return hash(id(self._core))

    def __repr__(self) -> str:
        return f"<vram.Device {self.name}, {format_size(self.total_memory)}>"


def devices() -> list[Device]:
    """List the devices of this machine, GPUs first. Models are not listed: they are created on demand."""
    gpus, _ = _native.cuda_devices()
    return [*(Device(f"cuda:{index}") for index in range(gpus)), Device("host")]


def is_default(device: Device) -> bool:
    """Whether `Device()` is this device. Does not open the default device."""
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
        '"model:<capacity>" creates a model of a device.',
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
            _host = made if _host is core else _host  # unless another was created meanwhile
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
    """Treat the streams of PyTorch's own pools on a device as lasting."""
    _cuda_core(index).adopt_torch()


def adopt_cupy_stream(index: int, stream: Any) -> None:
    """Treat a stream that a CuPy object owns as lasting. Fast if it is adopted already."""
    core = _cuda.get(index)
    if core is None or stream.ptr not in core.adopted:
        _cuda_core(index).adopt_cupy(stream)


def forget_cuda_device(index: int) -> None:
    """Another library resets the device: what was opened there is lost, and a later use opens it again."""
    with _host_lock:
        core = _cuda.pop(index, None)
    if core is not None:
        core.adopted.clear()
        assert isinstance(core.backend, _native.CudaBackend)
        core.backend.abandon()


def _model_core(
    capacity: int | str,
    pages: bool,
    lag_us: float,
    manual: bool,
    release_waits: bool,
    host_gb_per_s: float = 0.0,
    copy_engines: int = 3,
) -> _Core:
    size = parse_size(capacity)
    if size == 0 or not lag_us >= 0:
        raise ConfigError(
            f"a model needs a capacity above 0 and a lag of at least 0, not {capacity!r} and {lag_us!r}",
            capacity=capacity,
            lag_us=lag_us,
        )
    number = next(_model_numbers)
    linked = number if host_gb_per_s else -1  # such models have addresses of their own
    backend = _native.ModelBackend(
        size, pages, lag_us, manual, release_waits, linked, host_gb_per_s, copy_engines
    )
    return _Core("model", number, f"model:{number}", backend)


_RESIDENT_GRIDS = {(5, 3): 16, (6, 2): 16, (7, 2): 16, (5, 0): 32, (5, 2): 32, (6, 1): 32}
"""Of the compute capabilities where it is not 128."""


def _properties_of(core: _Core) -> DeviceProperties:
    backend = core.backend
    if isinstance(backend, _native.CudaBackend):
        return _cuda_properties(backend)
    model = isinstance(backend, _native.ModelBackend)
    return DeviceProperties(
        name=f"model of a device with {format_size(backend.total_bytes)}" if model else "host",
        compute_capability=None,
        copy_engines=backend.copy_engines if isinstance(backend, _native.ModelBackend) else 0,
        concurrent_kernels=True,
        most_concurrent_kernels=0,
        multiprocessors=0,
        warps_per_multiprocessor=0,
        registers_per_multiprocessor=0,
        shared_memory_per_multiprocessor=0,
        l2_cache=0,
        memory_bus_bits=0,
        memory_bandwidth=None,
        unified_addressing=True,
        integrated=not model,
        managed_memory=False,
        memory_pools=model,
        virtual_memory=backend.pages,
    )


def _cuda_properties(backend: _native.CudaBackend) -> DeviceProperties:
    """Ask the driver, by the numbers of CUdevice_attribute."""
    ask = backend.attribute
    capability = (ask(75), ask(76))
    clock_khz, bus_bits = ask(36), ask(37)
    bandwidth = 2.0 * clock_khz * 1e3 * bus_bits / 8  # two transfers a clock
    return DeviceProperties(
        name=backend.hardware,
        compute_capability=capability,
        copy_engines=ask(40),
        concurrent_kernels=bool(ask(31)),
        most_concurrent_kernels=_RESIDENT_GRIDS.get(capability, 128) if ask(31) else 1,
        multiprocessors=ask(16),
        warps_per_multiprocessor=ask(39) // max(1, ask(10)),
        registers_per_multiprocessor=ask(82),
        shared_memory_per_multiprocessor=ask(81),
        l2_cache=ask(38),
        memory_bus_bits=bus_bits,
        memory_bandwidth=bandwidth or None,
        unified_addressing=bool(ask(41)),
        integrated=bool(ask(18)),
        managed_memory=bool(ask(89)),
        memory_pools=bool(ask(115)),
        virtual_memory=bool(ask(102)),
    )


def _announce_ends(kind: Any) -> None:
    """Make the streams of a class tell the pools before they are destroyed."""
    destroy = kind.__del__
    if getattr(destroy, "announces", False):
        return

    def announce(stream: Any) -> None:
        if not sys.is_finalizing() and (core := _cuda.get(stream.device_id)) is not None:
            try:
                core.adopted_goes(stream.ptr)
            except VramError:  # it is being captured, and pools still use it, so it must stay
                return
        destroy(stream)

    announce.announces = True  # type: ignore[attr-defined]
    kind.__del__ = announce


# While Python still runs: launched functions complete, later ones are refused. The threads of the host's
# streams never use Python after this.
atexit.register(_native.stop_launches)
