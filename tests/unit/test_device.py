"""Devices, streams and events from Python: identity, order, errors of launched functions, forks, exit."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from programs import run_program
from waiting import PATIENCE

from vram.core import observer
from vram.core.device import Device, devices
from vram.core.stream import Event, Reads, Stream, stream_handle
from vram.errors import ConfigError, DeviceError, OutOfMemory

MIB = 1 << 20
TIMEOUT = PATIENCE


@pytest.fixture
def host() -> Device:
    return Device("host")


@pytest.fixture
def model() -> Device:
    return Device.model("1GiB", manual=True)


# ---- devices ----------------------------------------------------------------------------------


def test_the_host_is_one_device(host: Device) -> None:
    assert Device() == host == Device(host) and hash(Device()) == hash(host)
    assert Device().backend is host.backend
    assert (host.name, host.kind, host.index, host.pages) == ("host", "host", 0, True)
    assert host in devices()
    assert "host" in repr(host)


def test_memory_is_counted(host: Device) -> None:
    address = host.backend.reserve(4 * MIB)
    try:
        assert host.free_memory <= host.total_memory - 4 * MIB
    finally:
        host.backend.release(address, 4 * MIB)


def test_each_model_is_a_new_device() -> None:
    one, two = Device.model("141GiB"), Device("model:2GiB")
    assert one != two and one.name != two.name
    assert one.kind == two.kind == "model"
    assert one.total_memory == 141 << 30 and two.free_memory == 2 << 30
    assert not Device.model("1GiB", pages=False).pages


def test_a_bad_model_is_refused() -> None:
    for capacity, lag_us in [(0, 1.0), ("big", 1.0), ("1GiB", -1.0), ("1GiB", float("nan"))]:
        with pytest.raises(ConfigError):
            Device.model(capacity, lag_us=lag_us)


def test_missing_devices_say_what_was_looked_for() -> None:
    with pytest.raises(DeviceError, match=r"(libcuda\.so\.1|cuInit).*devices\(\)") as caught:
        Device("cuda:0")
    assert caught.value.device == "cuda:0" and caught.value.code == "missing"
    with pytest.raises(DeviceError, match="host"):
        Device("gpu7")
    with pytest.raises(TypeError):
        Device(7)  # type: ignore[arg-type]


def test_failures_carry_their_facts(model: Device) -> None:
    backend: Any = model.backend
    backend.fail("page_create", nth=1, code="failed", native=700)
    with pytest.raises(DeviceError) as caught:
        backend.page_create(2 * MIB)
    assert (caught.value.call, caught.value.code, caught.value.native) == ("page_create", "failed", 700)
    with pytest.raises(OutOfMemory) as full:
        backend.reserve(2 << 30)
    assert full.value.code == "out_of_memory" and isinstance(full.value, MemoryError)
    with pytest.raises(ValueError, match="has no call"):
        backend.fail("page_make")
    with pytest.raises(ValueError, match="unknown code"):
        backend.fail("map", code="broken")
    assert backend.counts()["pages"] == 0 and backend.check() is None


# ---- streams and events -----------------------------------------------------------------------


def test_work_runs_in_order_and_off_this_thread(host: Device) -> None:
    ran: list[object] = []
    with Stream(host) as stream:
        for number in range(100):
            stream.launch(ran.append, number)
        stream.launch(lambda: ran.append(threading.get_ident()))
        stream.synchronize()
        assert stream.query()
    assert ran[:-1] == list(range(100))
    assert ran[-1] != threading.get_ident()


def test_two_streams_overlap(host: Device) -> None:
    meeting = threading.Barrier(2, timeout=TIMEOUT)  # passes only when both functions run at once
    with Stream(host) as one, Stream(host) as two:
        one.launch(meeting.wait)
        two.launch(meeting.wait)
        one.synchronize()
        two.synchronize()


def test_a_stream_waits_for_another(host: Device) -> None:
    gate, order = threading.Event(), []
    with Stream(host) as producer, Stream(host) as consumer:
        producer.launch(gate.wait, TIMEOUT)
        producer.launch(order.append, "produced")
        consumer.wait_stream(producer)
        consumer.launch(order.append, "consumed")
        assert not consumer.query() and not producer.query()
        gate.set()
        consumer.synchronize()
    assert order == ["produced", "consumed"]


def test_an_event_passes_with_the_work_before_it(host: Device) -> None:
    gate = threading.Event()
    event = Event(host)
    assert event.query()
    event.synchronize()
    with Stream(host) as stream:
        stream.launch(gate.wait, TIMEOUT)
        assert stream.record_event(event) is event
        assert not event.query()
        gate.set()
        event.synchronize()
        assert event.query()


def test_an_event_may_go_while_it_is_awaited(host: Device) -> None:
    gate, order = threading.Event(), []
    with Stream(host) as stream:
        default = Stream.default(host)
        default.launch(gate.wait, TIMEOUT)
        default.launch(order.append, 1)
        event = default.record_event()
        event.wait(stream)
        del event
        stream.launch(order.append, 2)
        gate.set()
        stream.synchronize()
    assert order == [1, 2]


def test_the_model_steps_by_hand(model: Device) -> None:
    backend: Any = model.backend
    ran: list[int] = []
    with Stream(model) as stream:
        stream.launch(ran.append, 1)
        event = stream.record_event()
        assert not event.query() and ran == []
        assert backend.step(stream.handle) and ran == [1] and not event.query()
        assert backend.step(stream.handle) and event.query()
        stream.launch(ran.append, 2)
        model.synchronize()
        assert ran == [1, 2]


def test_the_models_clock_moves_when_the_host_waits() -> None:
    model = Device.model("1GiB", lag_us=100.0)
    backend: Any = model.backend
    event = Stream.default(model).record_event()
    backend.advance(99.0)
    assert not event.query()
    event.synchronize()
    assert backend.now() == 100.0 and backend.host_waits() == 1
    assert backend.driver_us() > 0 and backend.memory_calls() == 0


def test_streams_compare_by_device_and_handle(host: Device, model: Device) -> None:
    stream = Stream(host)
    assert stream != Stream.default(host)
    assert Stream.default(host) == Stream.default() and Stream.default(host) != Stream.default(model)
    assert len({Stream.default(host), Stream.default(), stream}) == 2
    assert stream.device == host and stream.__cuda_stream__() == (0, stream.handle)
    stream.close()
    assert "closed" in repr(stream)


def test_a_closed_stream_is_refused_everywhere(host: Device) -> None:
    stream, event = Stream(host), Event(host)
    stream.close()
    stream.close()
    uses = [
        stream.synchronize,
        stream.query,
        stream.__cuda_stream__,
        stream.record_event,
        lambda: stream.launch(print),
        lambda: stream.wait_event(event),
        lambda: stream_handle(stream, host),
    ]
    for use in uses:
        with pytest.raises(DeviceError, match="closed"):
            use()


def test_the_default_stream_stays_open(host: Device) -> None:
    default = Stream.default(host)
    default.close()
    default.synchronize()


def test_closing_lets_queued_work_finish(host: Device) -> None:
    gate, done = threading.Event(), threading.Event()
    stream = Stream(host)
    stream.launch(gate.wait, TIMEOUT)
    stream.launch(done.set)
    stream.close()
    gate.set()
    host.synchronize()
    assert done.is_set()


def test_garbage_gives_streams_and_events_back(model: Device) -> None:
    backend: Any = model.backend
    stream, event = Stream(model), Event(model)
    assert (backend.counts()["streams"], backend.counts()["events"]) == (2, 1)
    del stream, event
    gc.collect()
    assert (backend.counts()["streams"], backend.counts()["events"]) == (1, 0)


def test_a_view_of_a_stream_does_not_own_it(host: Device) -> None:
    with Stream(host) as stream:
        event = Event(host)
        event.record(stream.handle)
        event.wait(stream.handle)
        gc.collect()
        stream.synchronize()


# ---- errors of launched functions -------------------------------------------------------------


def test_an_error_comes_out_of_the_streams_synchronize_once(host: Device) -> None:
    with Stream(host) as stream, Stream(host) as other:
        ran = []
        stream.launch(lambda: 1 / 0)
        stream.launch(ran.append, 1)
        other.synchronize()
        with pytest.raises(ZeroDivisionError):
            stream.synchronize()
        assert ran == [1]
        stream.synchronize()


def test_an_error_comes_out_of_an_event_or_the_device(host: Device) -> None:
    with Stream(host) as stream:
        stream.launch(lambda: 1 / 0)
        event = stream.record_event()
        with pytest.raises(ZeroDivisionError):
            event.synchronize()
        stream.launch(lambda: {}["missing"])
        with pytest.raises(KeyError):
            host.synchronize()


def test_later_errors_of_a_stream_are_reported_not_lost(
    host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: reported.append(info.exc_type))
    with Stream(host) as stream:
        stream.launch(lambda: 1 / 0)
        stream.launch(lambda: {}["missing"])
        with pytest.raises(ZeroDivisionError):
            stream.synchronize()
    assert reported == [KeyError]


def test_a_function_lets_go_of_what_it_held(host: Device) -> None:
    class Held:
        def work(self) -> None:
            pass

    held = Held()
    gone = weakref.ref(held)
    with Stream(host) as stream:
        stream.launch(held.work)
        del held
        stream.synchronize()
        assert gone() is None


def test_a_function_cannot_wait_for_its_own_stream(host: Device) -> None:
    with Stream(host) as stream:
        stream.launch(stream.synchronize)
        with pytest.raises(DeviceError):
            stream.synchronize()


def test_a_stream_may_be_closed_by_its_own_work(host: Device) -> None:
    closed = threading.Event()
    stream = Stream(host)

    def close() -> None:
        stream.close()
        closed.set()

    stream.launch(close)
    assert closed.wait(TIMEOUT)


def test_only_callables_can_be_launched(host: Device) -> None:
    with pytest.raises(TypeError):
        Stream.default(host).launch(7)  # type: ignore[arg-type]


# ---- other people's streams -------------------------------------------------------------------


def test_streams_of_other_libraries_are_understood(host: Device) -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 5)

    assert stream_handle(None, host) == 0
    assert stream_handle(9, host) == 9
    assert stream_handle(Protocol(), host) == 5
    assert stream_handle(SimpleNamespace(__cuda_stream__=(0, 6)), host) == 6
    assert stream_handle(SimpleNamespace(cuda_stream=7), host) == 7
    assert stream_handle(SimpleNamespace(ptr=8), host) == 8
    assert stream_handle(SimpleNamespace(handle=ctypes.c_void_p(10)), host) == 10
    assert stream_handle(SimpleNamespace(handle=ctypes.c_void_p(0)), host) == 0
    assert stream_handle(SimpleNamespace(handle=11), host) == 11


def test_anything_else_is_not_a_stream(host: Device) -> None:
    for bad in ("5", 5.0, True, object(), SimpleNamespace(handle=None), SimpleNamespace(ptr="8")):
        with pytest.raises(TypeError, match="not a stream"):
            stream_handle(bad, host)
    for bad_handle in (-1, 2**64):
        with pytest.raises(ValueError, match="handle"):
            stream_handle(bad_handle, host)


def test_a_stream_of_another_device_is_refused(host: Device, model: Device) -> None:
    with pytest.raises(DeviceError, match="belongs to"):
        stream_handle(Stream.default(model), host)
    with pytest.raises(DeviceError, match="belongs to"):
        Event(host).record(Stream.default(model))
    with pytest.raises(DeviceError, match="belongs to"):
        Stream.default(host).wait_stream(Stream.default(model))
    with pytest.raises(DeviceError):
        Event(host).record(123456)


# ---- observing order --------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_record(self, event: Event, stream: Stream) -> None:
        self.lines.append(f"record {stream.handle}")

    def on_wait(self, stream: Stream, event: Event) -> None:
        self.lines.append(f"wait {stream.handle}")

    def on_sync(self, what: Stream | Event | Device) -> Callable[[], None]:
        return lambda: self.lines.append(f"sync {type(what).__name__}")

    def on_launch(
        self, stream: Stream, work: Callable[[], object], arguments: tuple[Any, ...]
    ) -> Callable[[], object]:
        self.lines.append(f"launch {stream.handle} {arguments}")
        return work

    def on_close(self, stream: Stream) -> None:
        self.lines.append(f"close {stream._handle}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    log = Log()
    monkeypatch.setattr(observer, "active", log)
    yield log


def test_the_observer_sees_what_orders_what(host: Device, log: Log) -> None:
    with Stream(host) as stream:
        handle = stream.handle
        stream.launch(lambda *_: None, 1, 2)
        Stream.default(host).wait_stream(stream)
        event = Event(host)
        assert event.query()
        event.record(handle)
        event.synchronize()
        stream.synchronize()
        host.synchronize()
    assert log.lines == [
        f"launch {handle} (1, 2)",
        f"record {handle}",
        "wait 0",
        "sync Event",
        f"record {handle}",
        "sync Event",
        "sync Stream",
        "sync Device",
        f"close {handle}",
    ]


def test_an_argument_that_is_only_read_arrives_plain(host: Device) -> None:
    seen: list[object] = []
    with Stream(host) as stream:
        stream.launch(lambda *values: seen.extend(values), Reads("x"), "y")
        stream.synchronize()
    assert seen == ["x", "y"]


# ---- forks and exit ---------------------------------------------------------------------------


@pytest.mark.fork
def test_a_forks_child_gets_a_device_of_its_own() -> None:
    result = run_program("""
        import os, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from vram.core.device import Device
        from vram.core.stream import Event, Stream
        from vram.errors import DeviceError
        host, gate = Device("host"), threading.Event()
        stream, event = Stream(host), Event(host)
        stream.launch(gate.wait, 30)
        event.record(stream)
        child = os.fork()
        if child == 0:
            try:
                event.synchronize()
            except DeviceError as error:
                assert error.code == "closed" and "fork" in str(error), error
            else:
                raise AssertionError("the parent's device answered")
            own, ran = Device("host"), []
            assert own != host and own.backend is not host.backend
            with Stream(own) as fresh:
                fresh.launch(ran.append, 1)
                fresh.synchronize()
            assert ran == [1]
            del stream, event, host
            raise SystemExit(0)  # through the interpreter's whole exit
        _, status = os.waitpid(child, 0)
        gate.set()
        stream.synchronize()
        assert os.waitstatus_to_exitcode(status) == 0, status
        print("parent done")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "parent done\n", "")


def test_exit_lets_busy_streams_finish() -> None:
    result = run_program("""
        import atexit, time
        from vram.errors import DeviceError
        def too_late():
            try:
                stream.launch(print, "never")
            except DeviceError as error:
                print("refused:", error.code)
        atexit.register(too_late)  # runs after vram's own
        from vram.core.device import Device
        from vram.core.stream import Stream
        host = Device("host")
        stream, other = Stream(host), Stream(host)
        def chain(left):
            time.sleep(0.01)
            if left:
                other.launch(chain, left - 1)
            else:
                print("last")
        stream.launch(time.sleep, 0.2)
        stream.launch(chain, 3)
        Stream(host).launch(time.sleep, 0.1)
    """)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "last\nrefused: closed\n"


def test_exit_reports_errors_nobody_waited_for() -> None:
    result = run_program("""
        from vram.core.stream import Stream
        stream = Stream()
        stream.launch(lambda: 1 / 0)
    """)
    assert result.returncode == 0
    assert "ZeroDivisionError" in result.stderr


def test_exit_forgets_what_a_model_never_ran() -> None:
    result = run_program("""
        from vram.core.device import Device
        from vram.core.stream import Stream
        model = Device.model("1GiB", manual=True)
        stream = Stream(model)
        stream.launch(lambda: (model, stream))
    """)
    assert (result.returncode, result.stderr) == (0, "")


def test_threads_may_launch_while_others_synchronize(host: Device) -> None:
    ran: list[int] = []

    def client() -> None:
        with Stream(host) as stream:
            for number in range(50):
                stream.launch(ran.append, number)
                stream.record_event().synchronize()

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(TIMEOUT)
    assert len(ran) == 200
