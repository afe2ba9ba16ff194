"""What launched functions raise: kept while somebody can ask for it, and no longer."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest

import vram


class Thing:
    pass


def fail(thing: Thing) -> None:
    raise ValueError("of the work")


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def hook(report: Any) -> None:
        seen.append(str(report.exc_value))

    monkeypatch.setattr(sys, "unraisablehook", hook)
    return seen


def test_the_error_of_a_closed_stream_is_reported_and_lets_go(reported: list[str]) -> None:
    stream = vram.Stream("host")
    thing = Thing()
    alive = weakref.ref(thing)
    stream.launch(fail, thing)
    other = vram.Stream("host")
    other.wait_stream(stream)
    other.synchronize()
    assert reported == []
    stream.close()
    del thing
    gc.collect()
    assert reported == ["of the work"]
    assert alive() is None


def test_an_event_still_raises_the_error_of_a_closed_stream(reported: list[str]) -> None:
    stream = vram.Stream("host")
    stream.launch(fail, Thing())
    event = stream.record_event()
    stream.close()
    with pytest.raises(ValueError, match="of the work"):
        event.synchronize()
    assert reported == []


def test_work_that_runs_while_an_object_is_dropped_under_an_error(reported: list[str]) -> None:
    device = vram.Device.model("1GiB", manual=True)
    stream, done = vram.Stream(device), list[int]()
    pools = [vram.Pool(device)]
    buffer = pools[0].allocate("1MiB")
    buffer.record_stream(stream)
    stream.launch(lambda: done.append(len(done)))
    buffer.free()
    del buffer
    with pytest.raises(TypeError, match="not 'Pool'"):
        int(pools.pop())  # type: ignore[call-overload]  # drops the pool, which waits for the stream
    stream.synchronize()
    assert (done, reported) == ([0], [])


def test_elapsed_across_devices_is_refused() -> None:
    ours, other = (vram.Event(device, timing=True) for device in ("host", vram.Device.model("1GiB")))
    for event in (ours, other):
        event.record()
        event.device.synchronize()
    with pytest.raises(vram.DeviceError, match="belongs to"):
        ours.elapsed_ms(other)


def test_a_model_without_lag_does_its_work_at_once() -> None:
    device = vram.Device.model("1GiB", lag_us=0.0)
    pool, stream = vram.Pool(device), vram.Stream(device)
    done: list[int] = []
    buffer = pool.allocate("4MiB", stream=stream)
    buffer.fill(1)
    stream.launch(done.append, 1)
    assert done == [1]
    assert stream.query()
    buffer.free()
    pool.close()


def test_integers_of_numpy_are_sizes_everywhere() -> None:
    import numpy as np

    size = np.int64(1 << 20)
    pool = vram.Pool("host")
    assert pool.allocate(size).size == size
    buffer = vram.GrowableBuffer(np.uint32(8 << 20), pool, size=size)
    assert buffer.grow(np.int32(16)) == size
    assert buffer.view(np.int8(8), size).size == size
    assert vram.parse_size(size) == size
    with pytest.raises(vram.ConfigError):
        vram.parse_size(True)
    assert buffer.array(np.int16(16), "uint8").shape == (16,)


@pytest.mark.parametrize("dtype", [object, "O", [("a", object)]])
def test_arrays_of_python_objects_are_refused(dtype: Any) -> None:
    buffer = vram.GrowableBuffer("8MiB", vram.Pool("host"), size="2MiB")
    with pytest.raises(vram.ConfigError, match="references to Python objects"):
        buffer.array(4, dtype)
    with pytest.raises(vram.ConfigError, match="references to Python objects"):
        vram.Arena(vram.Pool("host"), "2MiB").empty(4, dtype)


@pytest.mark.parametrize("given", [False, True])
def test_a_pipeline_over_no_rows_returns_no_rows(given: bool) -> None:
    import numpy as np

    with vram.Pipeline(lambda x: x * 2, device="host") as pipeline:
        out = np.empty((0, 3), "float32") if given else None
        result = pipeline.run(np.empty((0, 3), "float32"), out)
    assert (result.shape, result.dtype) == ((0, 3), np.float32)
    assert out is None or result is out
