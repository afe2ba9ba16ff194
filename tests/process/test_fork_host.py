"""Devices, streams and events in the child of a fork: DeviceError, and no hang or abort."""

from __future__ import annotations

import pytest
from programs import assert_quiet, run_program
from test_fork import PREAMBLE

pytestmark = pytest.mark.fork


def test_a_child_opens_the_host_after_the_parent_closed_streams() -> None:
    """Their threads have ended and are not joined yet: the child must leave them alone."""
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            for _ in range(8):
                streams = [Stream("host") for _ in range(4)]
                events = [vram.Event("host") for _ in streams]
                for stream, event in zip(streams, events):
                    stream.launch(int)
                    event.record(stream)
                    stream.close()

                def body():
                    assert Device("host").free_memory > 0
                    Pool("host").allocate(1 << 20).fill(1)
                    events.clear()
                    gc.collect()

                child(body)
            """,
        )
    )


def test_every_call_of_a_busy_parents_device_is_refused() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            device, stream, event = Device("host"), Stream("host"), vram.Event("host")
            timing = vram.Event("host", timing=True)
            stop = threading.Event()

            def busy():
                while not stop.is_set():
                    stream.launch(int)
                    event.record(stream)
                    stream.synchronize()

            threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()

            def body():
                for use in (
                    device.synchronize, lambda: device.free_memory, stream.synchronize, stream.query,
                    stream.record_event, lambda: stream.wait_event(event), lambda: stream.launch(int),
                    lambda: Stream(device), lambda: event.record(stream), event.query,
                    event.synchronize, lambda: event.wait(stream), lambda: timing.elapsed_ms(timing),
                    lambda: vram.Event(device), lambda: vram.Event(device, timing=True),
                    lambda: stream.wait_stream(stream), stream.close,
                ):
                    refused(use)
                assert "fork" in device.backend.check()

            for _ in range(20):
                child(body)
            stop.set()
            for thread in threads:
                thread.join()
            """,
        )
    )
