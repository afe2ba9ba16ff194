"""Growable buffers and scratch with every call to the device made to fail in turn: a typed error or none, the
length as before or as asked for, the pool intact, and nothing lost once all is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import vram
from effort import sample
from vram import Device, DeviceError, GrowableBuffer, OutOfMemory, Scratch, Stream

MIB = 1 << 20
NATIVE = 700  # the number a driver would give

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "wait": {"cross_stream": "wait"},
    "limit": {"limit": "40MiB", "max_page": "2MiB"},
    "zeroing": {"zero_on_allocate": True, "zero_on_free": True},
    "idle": {"release_threshold": "4MiB"},
}


class Run:
    """One run of the program; a step may fail with a typed error, after which the pool is checked."""

    def __init__(self, kind: str) -> None:
        self.device = Device.model("1GiB", lag_us=100)
        self.backend: Any = self.device.backend
        self.pool = vram.Pool(self.device, **KINDS[kind])
        self.failed = 0

    def attempt(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (DeviceError, OutOfMemory):
            self.failed += 1
            return None
        finally:
            assert self.pool.check() is None

    def resize(self, buffer: GrowableBuffer, size: int) -> None:
        before = (buffer.ptr, buffer.size, buffer.capacity)
        if self.attempt(lambda: buffer.resize(size)) is None:
            assert (buffer.ptr, buffer.size, buffer.capacity) == before

    def program(self) -> None:
        streams = [self.attempt(lambda: Stream(self.device)) for _ in range(2)]
        self.open = [
            buffer
            for stream in streams
            if (buffer := self.attempt(lambda stream=stream: self.opened(stream))) is not None
        ]
        self.held: list[Any] = []
        for size in (4, 20, 2, 9, 0, 12):
            for buffer in self.open:
                self.resize(buffer, size * MIB)
                self.attempt(lambda buffer=buffer: buffer.view().fill(1))
                self.attempt(lambda buffer=buffer: buffer.record_stream(streams[0]))
            self.backend.advance(40)
            self.held.append(self.attempt(lambda: self.pool.allocate(3 * MIB, stream=streams[-1])))
        if self.open:
            self.attempt(self.open.pop().close)
        scratch = self.attempt(lambda: Scratch(streams[0], pool=self.pool, max_size="64MiB"))
        if scratch is not None:
            for size in (1, 30, 2):
                self.attempt(lambda size=size: scratch.get(size * MIB).fill(2))
            self.attempt(scratch.trim)
        self.attempt(lambda: self.pool.trim(wait=True))
        self.open.extend(filter(None, [self.attempt(lambda: self.opened(streams[0]))]))
        for buffer in self.open:
            self.resize(buffer, 6 * MIB)

    def opened(self, stream: Any) -> GrowableBuffer:
        return GrowableBuffer("64MiB", self.pool, stream=stream, ahead=0)

    def end(self) -> None:
        self.held.clear()
        for buffer in self.open:
            buffer.close()
        self.pool.trim(wait=True)
        assert self.pool.stats().reserved == 0
        self.pool.close()
        counts = self.backend.counts()
        left = {name: counts[name] for name in counts if counts[name] and name not in ("streams", "queued")}
        assert left == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["failed", "out_of_memory"])
def test_each_call_fails_in_turn(kind: str, code: str) -> None:
    whole = Run(kind)
    whole.program()
    calls = whole.backend.total_calls()
    whole.end()
    assert whole.failed == 0 or kind == "limit"
    for nth in sample(range(1, calls + 1)):
        run = Run(kind)
        run.backend.fail_any(nth, code, NATIVE)
        run.program()
        run.backend.clear_failures()
        run.end()
        assert run.backend.check() is None
