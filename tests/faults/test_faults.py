"""Every call to the device made to fail in turn: a typed error or none, the pool intact, nothing lost.

A program runs on a model device again and again; in run n the nth call that reaches the device fails.
Whatever the program was doing, what it holds stays usable, and once all is closed the device holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import vram
from effort import sample
from vram import Device, DeviceError, OutOfMemory, Pool, Stream, VramError

KIB, MIB = 1 << 10, 1 << 20
NATIVE = 700  # the number a driver would give

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pages": ({}, {}),
    "plain": ({"pages": False}, {}),
    "wait": ({}, {"cross_stream": "wait"}),
    "never": ({}, {"cross_stream": "never"}),
    "limit": ({}, {"limit": "48MiB"}),
    "zeroing": ({}, {"zero_on_allocate": True, "zero_on_free": True}),
    "idle": ({}, {"release_threshold": "8MiB", "stream_cache": 0}),
    "manual": ({"manual": True}, {"limit": "64MiB"}),
}


class Run:
    """One run of the program; `attempt` lets a step fail with a typed error, and checks the pool after it."""

    def __init__(self, kind: str) -> None:
        device_options, options = KINDS[kind]
        self.device = Device.model("1GiB", **device_options)
        self.backend: Any = self.device.backend
        self.pool: Pool = vram.Pool(self.device, **options)
        self.errors: list[VramError] = []

    def attempt(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (DeviceError, OutOfMemory) as error:
            self.errors.append(error.with_traceback(None))  # whose frames would hold buffers
            return None
        finally:
            assert self.pool.check() is None

    def program(self) -> None:
        """Grow, use, share between streams, shrink; hold some of everything at the end."""
        pool, attempt = self.pool, self.attempt
        one, two = (attempt(lambda: Stream(self.device)) for _ in range(2))
        streams = [stream for stream in (one, two) if stream is not None] or [None]
        held = [
            attempt(lambda size=size, stream=stream: pool.allocate(size, stream=stream))
            for size in (4 * KIB, MIB, 3 * MIB, 9 * MIB, 2 * MIB)
            for stream in (None, streams[0])
        ]
        for buffer in filter(None, held):
            attempt(lambda buffer=buffer: buffer.fill(1))
            attempt(lambda buffer=buffer: buffer.record_stream(streams[-1]))
        for buffer in filter(None, held[::2]):
            attempt(buffer.free)
        kept = [
            attempt(lambda size=size: pool.allocate(size, stream=streams[-1]))
            for size in (4 * KIB, 3 * MIB, 17 * MIB)
        ]
        kept.append(attempt(lambda: pool.allocate_batch([5 * MIB, 100 * KIB, 5 * MIB])))
        kept.append(attempt(lambda: pool.allocate(MIB, align=4 * MIB)))
        attempt(lambda: pool.warmup({64 * KIB: 3}, stream=streams[0]))
        attempt(lambda: pool.allocate("2GiB"))
        attempt(lambda: pool.trim("20MiB"))
        attempt(lambda: pool.trim(wait=True))
        if one is not None:
            attempt(one.close)
        attempt(pool.coalesce)
        held.extend(attempt(lambda: pool.allocate(6 * MIB)) for _ in range(2))
        self.kept = [buffer for buffer in [*held, *kept] if buffer is not None]

    def assert_live_is_what_is_held(self) -> None:
        held = [each for kept in self.kept for each in (kept if isinstance(kept, list) else [kept])]
        addresses = {buffer.ptr for buffer in held if not buffer.freed}
        assert {block.address for block in self.pool.snapshot().blocks("live")} == addresses

    def assert_works(self) -> None:
        del self.kept[::2]
        self.kept.append(self.pool.allocate(MIB))
        self.pool.allocate(5 * MIB).free()

    def end(self) -> None:
        self.kept.clear()
        assert self.pool.stats().live == 0
        self.attempt(self.pool.close)
        assert self.pool.closed

    def left(self) -> dict[str, int]:
        counts = self.backend.counts()
        return {name: counts[name] for name in counts if counts[name] and name not in ("streams", "queued")}


def calls_of_a_whole_run(kind: str) -> int:
    run = Run(kind)
    run.program()
    assert {type(error) for error in run.errors} == {OutOfMemory}
    run.end()
    assert run.left() == {}
    return run.backend.total_calls()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["failed", "out_of_memory"])
def test_each_call_fails_in_turn(kind: str, code: str) -> None:
    for nth in sample(range(1, calls_of_a_whole_run(kind) + 1)):
        run = Run(kind)
        run.backend.fail_any(nth, code, NATIVE)
        run.program()
        run.assert_live_is_what_is_held()
        run.backend.clear_failures()
        run.assert_works()
        run.end()
        assert run.backend.check() is None
        assert run.left() == {}, f"lost after call {nth} failed ({run.errors})"
        unexpected = [error for error in run.errors if getattr(error, "native", 0) not in (0, NATIVE)]
        assert unexpected == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_fails_in_turn_while_closing(kind: str) -> None:
    """A close that meets a failure says so, and still gives back all that the device takes."""
    nth = 0
    while True:
        nth += 1
        run = Run(kind)
        run.program()
        run.kept.clear()
        before = run.backend.total_calls()
        run.backend.fail_any(nth, "failed", NATIVE)
        run.errors.clear()
        run.attempt(run.pool.close)
        assert run.pool.closed
        if run.backend.total_calls() - before < nth:
            break
        left = run.left()
        lost = left.get("page_bytes", 0) + left.get("plain_bytes", 0)
        assert lost <= 32 * MIB and left.get("events", 0) <= 1, f"call {nth} of close: {left} lost"
        assert not lost or run.errors, f"call {nth} of close failed in silence: {left} lost"


@pytest.mark.parametrize(
    "call", ["reserve", "page_create", "map", "set_access", "space_reserve", "event_create"]
)
def test_a_device_that_fails_and_recovers(call: str) -> None:
    """A failure of one kind, repeated for a while, then gone."""
    device = Device.model("1GiB", pages=call != "reserve")
    backend: Any = device.backend
    with vram.Pool(device) as pool, Stream(device) as stream:
        for nth in range(1, 40):
            backend.fail(call, nth, "failed", NATIVE)
        held = []
        for size in (4 * KIB, 3 * MIB, 40 * MIB) * 10:
            for place in (None, stream):
                try:
                    held.append(pool.allocate(size, stream=place))
                except DeviceError as error:
                    assert (error.native, error.code) == (NATIVE, "failed")
                assert pool.check() is None
            if len(held) > 4:
                held.pop(0)
        backend.clear_failures()
        held.clear()
        assert pool.allocate(100 * MIB).size == 100 * MIB


def test_a_full_device_is_out_of_memory_and_not_a_device_error() -> None:
    """Other processes may hold the memory: then there is nothing wrong with the device."""
    device = Device.model("64MiB")
    backend: Any = device.backend
    others = backend.reserve(40 * MIB)
    with vram.Pool(device) as pool:
        held = pool.allocate(20 * MIB)
        with pytest.raises(OutOfMemory) as caught:
            pool.allocate(20 * MIB)
        assert caught.value.report["outside"] == 40 * MIB
        backend.release(others, 40 * MIB)
        assert pool.allocate(20 * MIB).size == held.size


def test_a_free_that_fails_leaves_the_buffer_as_it_was() -> None:
    device = Device.model("1GiB")
    backend: Any = device.backend
    with vram.Pool(device, zero_on_free=True) as pool:
        buffer, address = pool.allocate(MIB), pool.malloc(MIB)
        for free in (buffer.free, lambda: pool.free(address)):
            backend.fail("fill", 1, "failed", NATIVE)
            try:
                free()
            except DeviceError:
                assert pool.check() is None
                free()
        assert pool.stats().live == 0


@pytest.mark.parametrize("pages", [True, False])
def test_a_buffer_that_is_dropped_where_zeroing_fails_is_freed_once_it_works(pages: bool) -> None:
    device = Device.model("1GiB")
    backend: Any = device.backend
    with vram.Pool(device, zero_on_free=True, pages=pages) as pool:
        buffer = pool.allocate(4 * MIB)
        zeroed = backend.calls("fill")
        backend.fail("fill", 1, "failed", NATIVE)
        del buffer
        raw = pool.raw_stats()
        assert (raw["live"], raw["pending_blocks"]) == (0, 1)  # nobody gets what is not zeroed
        backend.fail("fill", 1, "failed", NATIVE)
        pool.trim(wait=True)  # looks twice
        assert pool.raw_stats()["pending_blocks"] == 0 and pool.check() is None
        assert backend.calls("fill") == zeroed + 3
        pool.trim(wait=True)
        assert pool.raw_stats()["reserved"]["current"] == 0


def test_a_copy_that_fails_is_told() -> None:
    device = Device.model("1GiB")
    backend: Any = device.backend
    with vram.Pool(device) as pool:
        one, two = pool.allocate(MIB), pool.allocate(MIB)
        for call, use in [
            ("fill", lambda: one.fill(1)),
            ("copy", lambda: one.copy_from(two)),
            ("copy", lambda: one.copy_to(bytearray(MIB))),
            ("stream_synchronize", lambda: one.copy_from(bytes(MIB))),
        ]:
            backend.fail(call, 1, "failed", NATIVE)
            with pytest.raises(DeviceError) as caught:
                use()
            assert (caught.value.call, caught.value.native) == (call, NATIVE)
        one.free()
        two.free()
