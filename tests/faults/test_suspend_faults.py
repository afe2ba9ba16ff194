"""Every call to the device made to fail in turn while a pool suspends and resumes: nothing lost, no leak.

A program runs on a model device; in run n the nth call fails. Whatever was suspended stays so or comes back,
the accounts agree, a second try succeeds, and once all is closed the device and the store hold nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import vram
from effort import sample
from vram import Device, DeviceError, OutOfMemory, Pool, Stream, VramError

KIB, MIB = 1 << 10, 1 << 20
NATIVE = 700
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pages": ({}, {}),
    "small pages": ({}, {"max_page": "2MiB"}),
    "limit": ({}, {"limit": "100MiB"}),
    "zeroing": ({}, {"zero_on_allocate": True, "zero_on_free": True}),
    "manual": ({"manual": True}, {"limit": "100MiB"}),
}


class Run:
    def __init__(self, kind: str) -> None:
        device_options, options = KINDS[kind]
        self.device = Device.model("1GiB", **device_options)
        self.backend: Any = self.device.backend
        self.pool: Pool = vram.Pool(self.device, **options)
        self.store = self.pool.store
        self.errors: list[VramError] = []
        streams = [None, Stream(self.device)]
        self.buffers = [
            self.pool.allocate(size, stream=stream, tag=tag)
            for size in (4 * KIB, MIB, 3 * MIB, 9 * MIB)
            for stream, tag in zip(streams, ("a", "b"), strict=True)
        ]
        for buffer in self.buffers:
            buffer.fill(1)
        self.buffers[1].record_stream(streams[0] or 0)
        self.buffers.pop(3).free()
        with streams[1].capture() as self.graph:  # type: ignore[union-attr]
            inner = self.pool.allocate(6 * MIB, stream=streams[1])
            inner.fill(2)
            inner.free()
            self.buffers.append(self.pool.allocate(5 * MIB, stream=streams[1], tag="b"))
            self.buffers[-1].fill(3)
        self.graph.launch()
        self.setup = self.backend.total_calls()

    def attempt(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (DeviceError, OutOfMemory) as error:
            self.errors.append(error.with_traceback(None))
            return None
        finally:
            assert self.pool.check() is None
            assert self.backend.check() is None

    def program(self) -> None:
        pool, attempt = self.pool, self.attempt
        attempt(lambda: pool.suspend("a"))
        extra = attempt(lambda: pool.allocate(20 * MIB))
        attempt(lambda: pool.suspend())
        attempt(lambda: pool.resume("b"))
        attempt(lambda: pool.suspend("b", keep="discard"))
        if extra is not None:
            attempt(extra.free)
        attempt(self.buffers.pop(2).free)
        attempt(lambda: pool.resume())

    def recover(self) -> None:
        """Without failures all comes back, and works."""
        self.backend.clear_failures()
        self.pool.resume()
        assert not any(buffer.suspended for buffer in self.buffers)
        assert self.pool.stats().suspended == self.pool.raw_stats()["kept"] == 0
        assert self.pool.check() is None
        assert self.store.stats().allocated == 0
        for buffer in self.buffers:
            buffer.fill(1)
        self.graph.launch()
        assert self.pool.suspend() > 0
        # What a graph has freed inside and is yet to be zeroed waits for the end of the graph.
        stats = self.pool.stats()
        assert self.backend.counts()["page_bytes"] == stats.reserved == stats.pending
        self.pool.resume()
        self.device.synchronize()

    def end(self) -> None:
        self.graph.close()
        self.buffers.clear()
        self.attempt(self.pool.close)
        counts = self.backend.counts()
        assert {name: counts[name] for name in counts if counts[name]} == {"streams": 2}


def calls_of_a_whole_run(kind: str) -> int:
    run = Run(kind)
    run.program()
    assert run.errors == []
    run.recover()
    run.end()
    again = Run(kind)
    again.program()
    calls: int = again.backend.total_calls() - again.setup
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["failed", "out_of_memory"])
def test_each_call_fails_in_turn(kind: str, code: str) -> None:
    for nth in sample(range(1, calls_of_a_whole_run(kind) + 1)):
        run = Run(kind)
        run.backend.fail_any(nth, code, NATIVE)
        run.program()
        run.recover()
        run.end()


@pytest.mark.parametrize("code", ["failed", "out_of_memory"])
def test_two_calls_in_a_row_fail(code: str) -> None:
    """Undoing fails as well: what was evicted stays suspended, and can be resumed later."""
    for nth in sample(range(1, calls_of_a_whole_run("pages") + 1)):
        run = Run("pages")
        run.backend.fail_any(nth, code, NATIVE)
        run.backend.fail_any(nth + 1, code, NATIVE)
        run.program()
        run.recover()
        run.end()


@pytest.mark.parametrize("call", ["unmap", "page_release", "copy", "event_record", "event_synchronize"])
def test_a_suspend_that_fails_leaves_nothing_suspended(call: str) -> None:
    run = Run("pages")
    run.backend.fail(call, 3, "failed", NATIVE)
    with pytest.raises(DeviceError):
        run.pool.suspend()
    assert not any(buffer.suspended for buffer in run.buffers)
    assert run.store.stats().allocated == 0
    run.recover()
    run.end()


@pytest.mark.parametrize("call", ["page_create", "map", "set_access", "copy"])
def test_a_resume_that_fails_leaves_all_suspended(call: str) -> None:
    run = Run("pages")
    run.pool.suspend()
    run.backend.fail(call, 3, "failed", NATIVE)
    with pytest.raises(DeviceError):
        run.pool.resume()
    assert all(buffer.suspended for buffer in run.buffers)
    assert run.pool.stats().reserved == 0
    run.recover()
    run.end()
