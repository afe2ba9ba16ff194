"""Every call to the device made to fail in turn under an arena: a typed error or none, nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import vram
from effort import sample
from vram import Arena, Device, DeviceError, InvalidFree, OutOfMemory, Stream, VramError

KIB, MIB = 1 << 10, 1 << 20
NATIVE = 700

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "pages": ({}, {}, {}),
    "plain": ({"pages": False}, {}, {}),
    "sized": ({}, {}, {"size": "5MiB"}),
    "limit": ({}, {"limit": "24MiB"}, {}),
    "checked": ({}, {}, {"checked": True}),
    "zeroing": ({}, {"zero_on_free": True}, {}),
}


class Run:
    """One run of the program; `attempt` lets a step fail with a typed error, and checks what is there."""

    def __init__(self, kind: str) -> None:
        device_options, pool_options, self.options = KINDS[kind]
        self.device = Device.model("1GiB", **device_options)
        self.backend: Any = self.device.backend
        self.pool = vram.Pool(self.device, **pool_options)
        self.arena: Arena | None = None
        self.errors: list[VramError] = []

    def attempt(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (DeviceError, OutOfMemory) as error:
            self.errors.append(error.with_traceback(None))
            return None
        finally:
            assert self.pool.check() is None
            assert self.arena is None or self.arena.check() is None

    def iteration(self, arena: Arena, other: Stream | None) -> None:
        """Grow in the middle of scopes, use on another stream, leave by whatever fails."""
        pieces = [self.attempt(lambda size=size: arena.empty(size, "uint8")) for size in (100, 3 * MIB, MIB)]

        def inner() -> None:
            with arena.scope():
                pieces.append(arena.empty(6 * MIB, "uint8"))
                with arena.scope():
                    small = arena.empty((3, 100), "float32")
                    small.fill(1, stream=other)
                    arena.empty(5 * MIB, "uint8").fill(2)

        self.attempt(inner)
        for piece in filter(None, pieces[:3]):
            assert not piece.freed
            self.attempt(lambda piece=piece: piece.fill(3))

    def program(self) -> None:
        other = self.attempt(lambda: Stream(self.device))
        self.arena = self.attempt(lambda: Arena(self.pool, **self.options))
        if self.arena is None:
            return
        arena = self.arena
        for zero in (False, True, False):
            self.iteration(arena, other)
            self.attempt(lambda zero=zero: arena.reset(zero=zero))
        self.attempt(arena.trim)
        self.iteration(arena, other)
        if other is not None:
            self.attempt(other.close)
        self.attempt(arena.reset)
        self.iteration(arena, None)

    def end(self) -> None:
        if self.arena is not None:
            self.arena.reset()  # also where the end of a scope has failed
            assert self.arena.used == 0
            piece = self.arena.empty(7 * MIB, "uint8")  # it works
            piece.fill(1)
            self.arena.close()
            with pytest.raises(InvalidFree):
                piece.fill(1)
        assert self.pool.live_bytes() == 0
        self.pool.close()
        left = {name: count for name, count in self.backend.counts().items() if count and name != "streams"}
        assert not {name for name in left if name != "queued"}, left


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_fails_in_turn(kind: str) -> None:
    whole = Run(kind)
    before = whole.backend.total_calls()
    whole.program()
    calls = whole.backend.total_calls() - before
    assert calls > 30
    whole.end()
    for nth in sample(range(1, calls + 1)):
        for code in ("failed", "out_of_memory"):
            run = Run(kind)
            run.backend.fail_any(nth, code, NATIVE)
            run.program()
            run.backend.clear_failures()
            for error in run.errors:
                assert isinstance(error, OutOfMemory) or error.native in (NATIVE, 0), error
            run.end()


def test_a_growth_that_fails_leaves_the_scope_and_the_arena_as_they_were() -> None:
    device = Device.model("1GiB")
    backend: Any = device.backend
    with vram.Pool(device) as pool, Arena(pool) as arena:
        first = arena.empty(MIB, "uint8")
        with arena.scope():
            second = arena.empty(MIB, "uint8")
            for nth in range(1, 10):
                backend.fail("page_create", nth, "failed", NATIVE)
            with pytest.raises(DeviceError) as caught:
                arena.empty(40 * MIB, "uint8")
            assert caught.value.native == NATIVE
            backend.clear_failures()
            assert arena.used == 2 * MIB and not second.freed
            assert arena.empty(40 * MIB, "uint8").size == 40 * MIB
        assert second.freed and not first.freed and arena.used == MIB


def test_the_end_of_a_scope_that_fails_can_be_made_good_by_a_reset() -> None:
    device = Device.model("1GiB")
    backend: Any = device.backend
    with vram.Pool(device) as pool, Arena(pool) as arena, Stream(device) as other:
        for code, kind in (("failed", DeviceError), ("out_of_memory", OutOfMemory)):
            backend.fail("stream_wait", 1, code, NATIVE)
            with pytest.raises(kind), arena.scope():
                piece = arena.empty(MIB, "uint8")
                piece.fill(1, stream=other)
            assert not piece.freed and arena.stats().depth == 1
            arena.reset()
            assert arena.stats().depth == 0 and piece.freed and arena.check() is None
