"""Events that tell the time: on every device by its own clock, and only where both points have passed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from waiting import PATIENCE

import vram
from vram import Device, DeviceError, Event, Stream


def test_on_the_host_the_order_of_points_is_that_of_their_times() -> None:
    with Stream("host") as stream:
        gate = threading.Event()
        events = [Event("host", timing=True) for _ in range(3)]
        events[0].record(stream)
        stream.launch(gate.wait, PATIENCE)
        events[1].record(stream)
        with pytest.raises(DeviceError) as caught:
            events[1].elapsed_ms(events[0])
        assert caught.value.code == "not_ready"
        gate.set()
        events[2].record(stream)
        stream.synchronize()
        assert 0 <= events[1].elapsed_ms(events[0]) <= events[2].elapsed_ms(events[0])
        assert events[0].elapsed_ms(events[2]) == -events[2].elapsed_ms(events[0])


def test_a_timing_event_orders_work_as_any_other() -> None:
    with Stream("host") as one, Stream("host") as two:
        gate, seen = threading.Event(), []
        event = Event("host", timing=True)
        assert event.query()
        one.launch(gate.wait, PATIENCE)
        one.launch(seen.append, 1)
        one.record_event(event)
        two.wait_event(event)
        two.launch(seen.append, 2)
        assert not event.query()
        gate.set()
        two.synchronize()
        event.synchronize()
        assert seen == [1, 2]


def test_on_a_model_time_is_virtual() -> None:
    device = Device.model("1GiB", lag_us=5000.0)
    backend: Any = device.backend
    with Stream(device) as stream:
        begin, end = Event(device, timing=True), Event(device, timing=True)
        begin.record(stream)
        backend.advance(2000.0)
        end.record(stream)
        with pytest.raises(DeviceError):
            end.elapsed_ms(begin)
        stream.synchronize()
        assert end.elapsed_ms(begin) == pytest.approx(2.0)


@pytest.mark.parametrize("device", ["host", "model:1GiB"])
def test_other_events_and_those_never_recorded_have_no_time(device: str) -> None:
    place = vram.Device(device)
    with Stream(place) as stream:
        timing, plain, never = Event(place, timing=True), Event(place), Event(place, timing=True)
        timing.record(stream)
        plain.record(stream)
        stream.synchronize()
        assert timing.elapsed_ms(timing) == 0.0
        for other in (plain, never):
            with pytest.raises(DeviceError) as caught:
                other.elapsed_ms(timing)
            assert caught.value.code == "invalid"
