"""Streams of other libraries: destroyed without a word, their handles used again for other streams.

The model device ends the process when a handle that is gone is used, so that every test here is one of that.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import vram.core.device
from vram import Arena, Device, GrowableBuffer, Pool, Stream
from vram.core.device import TORCH_PRIORITIES, TORCH_STREAMS, _Core, adopt_cupy_stream, adopt_torch_streams
from vram.errors import DeviceError

MIB = 1 << 20
MANY = 2000


@pytest.fixture
def model() -> Device:
    return Device.model("64GiB", lag_us=300)


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch, model: Device) -> Device:
    """A model that is taken for cuda:0."""
    core = _Core("cuda", 0, "cuda:0", model._core.backend)
    monkeypatch.setattr(vram.core.device, "_cuda", {0: core})
    return Device._of(core)


class Foreign:
    """Another library's stream: it destroys itself with its last reference and tells nobody."""

    def __init__(self, device: Device) -> None:
        self.backend: Any = device.backend
        self.cuda_stream: int = self.backend.foreign_create()

    def __del__(self) -> None:
        self.backend.foreign_destroy(self.cuda_stream)


class OfProtocol(Foreign):
    """As cuda.core names its streams."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)


class OfNumba:
    """A view of another stream, with the handle where Numba has it. It keeps nothing alive."""

    def __init__(self, device: Device) -> None:
        self.owner = Foreign(device)
        self.handle = ctypes.c_void_p(self.owner.cuda_stream)


def by_number(stream: Foreign) -> int:
    return stream.cuda_stream


@pytest.mark.parametrize("given", [by_number, lambda stream: stream], ids=["number", "object"])
@pytest.mark.parametrize("kind", [Foreign, OfProtocol])
@pytest.mark.parametrize("pages", [True, False])
def test_streams_come_and_go_by_the_thousand(
    model: Device, kind: type[Foreign], given: Callable[[Foreign], Any], pages: bool
) -> None:
    pool = Pool(model, pages=pages)
    backend: Any = model.backend
    live: deque[Any] = deque(maxlen=10)  # freed when they fall out, long after their streams
    handles = set()
    for i in range(MANY):
        stream, other = kind(model), kind(model)
        buffer = pool.allocate((3 if i % 2 else 1) * MIB // 2, stream=given(stream))
        backend.work(stream.cuda_stream, i, buffer.ptr, buffer.size)
        buffer.record_stream(given(other))
        backend.work(other.cuda_stream, i, buffer.ptr, buffer.size)
        handles |= {stream.cuda_stream, other.cuda_stream}
        live.append(buffer)
        del stream, other, buffer
        backend.advance(10)
    assert len(handles) < 100, "handles were not used again, so nothing was tested"
    assert len(pool.stats().streams) <= 600
    assert backend.counts()["events"] <= 2000
    live.clear()
    assert pool.check() is None and pool.stats().live == 0
    pool.trim(0, wait=True)
    assert pool.stats().reserved == 0
    pool.close()


def test_a_stream_of_numbas_kind_is_named_by_its_handle(model: Device) -> None:
    pool = Pool(model)
    for _ in range(100):
        stream = OfNumba(model)
        pool.allocate(MIB, stream=stream.owner.cuda_stream).free()
        buffer = pool.allocate(MIB, stream=stream)
        assert buffer.stream == stream.owner.cuda_stream
        del stream
        buffer.free()
    assert pool.check() is None


def test_a_live_stream_gets_its_memory_back_at_once(model: Device) -> None:
    pool, stream = Pool(model), Foreign(model)
    first = pool.allocate(20 * MIB, stream=stream)
    address = first.ptr
    first.free()
    assert pool.allocate(20 * MIB, stream=stream).ptr == address
    assert model.backend.calls("event_synchronize") == 0  # type: ignore[attr-defined]


def test_the_streams_of_buffers_may_be_gone_when_they_are_freed(model: Device) -> None:
    pool, backend = Pool(model), model.backend
    own = Stream(model)
    for _ in range(300):
        consumer = Foreign(model)
        buffer = pool.allocate(MIB, stream=own)
        capsule = buffer.__dlpack__(stream=consumer.cuda_stream)
        del consumer, capsule
        buffer.free()
        backend.advance(100)  # type: ignore[attr-defined]
    assert pool.check() is None
    pool.trim(0, wait=True)
    assert pool.stats().reserved == 0


def test_a_buffer_of_a_stream_that_is_gone_can_be_exported(model: Device) -> None:
    pool, stream = Pool(model), Foreign(model)
    backend: Any = model.backend
    buffer = pool.allocate(MIB, stream=stream.cuda_stream)
    backend.work(stream.cuda_stream, 7, buffer.ptr, MIB)
    del stream
    assert buffer.__dlpack__(stream=Stream(model).handle) is not None
    assert backend.executed() == [7], "the consumer sees what was queued before"


def test_a_growable_buffer_wants_a_stream_that_lasts(model: Device) -> None:
    pool, stream = Pool(model), Foreign(model)
    with pytest.raises(DeviceError, match=r"vram\.Stream") as refused:
        GrowableBuffer(8 * MIB, pool, stream=stream)
    assert refused.value.facts["code"] == "absent"


def test_an_arena_goes_after_its_stream(model: Device) -> None:
    backend: Any = model.backend
    handle = backend.foreign_create()
    arena = Arena(Pool(model), stream=handle)
    arena.empty(1000)
    arena.record_stream(0)
    backend.foreign_destroy(handle)
    arena.close()


# ---- CuPy -------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, as_cuda: Device) -> Any:
    """What there is of CuPy's streams: objects that own one, and others that only name it."""
    backend: Any = as_cuda.backend

    class Stream:
        device_id = 0
        _foreign_stream_ref = None

        def __init__(self) -> None:
            self.ptr: int = backend.foreign_create()

        def __del__(self) -> None:
            backend.foreign_destroy(self.ptr)

    class ExternalStream:
        device_id = 0

        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

    made = SimpleNamespace(cuda=SimpleNamespace(Stream=Stream, ExternalStream=ExternalStream))
    made.cuda.get_current_stream = lambda: made.current
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


def test_cupys_streams_tell_before_they_go(as_cuda: Device, cupy: Any) -> None:
    pool, backend = Pool(as_cuda), as_cuda.backend
    live: deque[Any] = deque(maxlen=10)
    for _ in range(MANY):
        stream = cupy.cuda.Stream()
        adopt_cupy_stream(0, stream)
        adopt_cupy_stream(0, stream)
        assert backend.lasting(stream.ptr)
        live.append(pool.allocate(3 * MIB, stream=stream.ptr))
        handle = stream.ptr
        del stream
        assert not backend.lasting(handle)
        backend.advance(100)  # type: ignore[attr-defined]
    assert len(pool.stats().streams) < 100 and pool.stats().reserved < 200 * MIB
    assert backend.host_waits() == 0, "a stream that tells is not waited for"  # type: ignore[attr-defined]
    assert pool.check() is None


def test_cupys_streams_are_known_by_their_objects(as_cuda: Device, cupy: Any) -> None:
    pool = Pool(as_cuda)
    cupy.current = cupy.cuda.Stream()
    pool.allocate(MIB, stream=cupy.current).free()
    assert as_cuda.backend.lasting(cupy.current.ptr)
    consumer = cupy.current = cupy.cuda.Stream()
    pool.allocate(MIB).__dlpack__(stream=consumer.ptr)
    assert as_cuda.backend.lasting(consumer.ptr)


def test_a_name_of_a_stream_does_not_make_it_last(as_cuda: Device, cupy: Any) -> None:
    pool, backend = Pool(as_cuda), as_cuda.backend
    cupy.current = None
    for _ in range(MANY):
        owner: Any = Foreign(as_cuda)
        stream = cupy.cuda.ExternalStream(owner.cuda_stream)
        adopt_cupy_stream(0, stream)
        assert not backend.lasting(stream.ptr)
        buffer = pool.allocate(3 * MIB, stream=stream)
        del owner
        buffer.free()
        backend.advance(100)  # type: ignore[attr-defined]
    assert len(pool.stats().streams) < 600 and pool.check() is None


def test_a_captured_stream_of_cupy_stays(as_cuda: Device, cupy: Any) -> None:
    pool, backend = Pool(as_cuda), as_cuda.backend
    stream = cupy.cuda.Stream()
    pool.allocate(3 * MIB, stream=stream).free()
    handle = stream.ptr
    backend.capture_begin(handle)  # type: ignore[attr-defined]
    pool.allocate(3 * MIB, stream=stream).free()
    del stream
    gc.collect()
    backend.capture_end(handle)  # type: ignore[attr-defined]
    pool.trim(0, wait=True)
    assert pool.check() is None


# ---- PyTorch ----------------------------------------------------------------------------------------------


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, as_cuda: Device) -> Any:
    """What there is of PyTorch's streams: pools that are made once and used in turn."""
    backend: Any = as_cuda.backend
    pools: dict[int, list[int]] = {}
    taken: dict[int, int] = {}

    class Stream:
        def __init__(self, device: int, priority: int = 0) -> None:
            pool = pools.setdefault(priority, [])
            if len(pool) < TORCH_STREAMS:
                pool.append(backend.foreign_create())
            taken[priority] = taken.get(priority, -1) + 1
            self.cuda_stream = pool[taken[priority] % TORCH_STREAMS]

    cuda = SimpleNamespace(Stream=Stream, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return SimpleNamespace(Stream=Stream, pools=pools)


def test_the_streams_of_pytorchs_pools_last(as_cuda: Device, torch: Any) -> None:
    backend: Any = as_cuda.backend
    adopt_torch_streams(0)
    adopt_torch_streams(0)
    assert len(torch.pools) == TORCH_PRIORITIES
    assert all(backend.lasting(each) for pool in torch.pools.values() for each in pool)
    assert sum(map(len, torch.pools.values())) == TORCH_PRIORITIES * TORCH_STREAMS
    assert not backend.lasting(Foreign(as_cuda).cuda_stream)


def test_pytorchs_streams_are_known_by_their_objects(as_cuda: Device, torch: Any) -> None:
    pool, stream = Pool(as_cuda), torch.Stream(0)
    pool.allocate(MIB, stream=stream).free()
    assert as_cuda.backend.lasting(stream.cuda_stream)
    external = Foreign(as_cuda)
    pool.allocate(MIB, stream=external).free()
    assert not as_cuda.backend.lasting(external.cuda_stream)
