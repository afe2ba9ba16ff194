"""Planned steps while every call to the device fails in turn: a typed error or none, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from test_faults import KIB, KINDS, MIB, NATIVE, Run

import vram
from vram import Stream


class PlannedRun(Run):
    """Steps that repeat, differ, share between streams and outlive each other."""

    def program(self) -> None:
        attempt, self.kept = self.attempt, []
        one, two = (attempt(lambda: Stream(self.device)) for _ in range(2))
        for number in range(6):
            attempt(lambda number=number: self.step(number, one, two))
        attempt(lambda: self.pool.trim("4MiB"))
        attempt(lambda: self.step(6, one, two))
        if one is not None:
            attempt(one.close)
        attempt(lambda: self.step(7, None, two))
        attempt(vram.planned(self.pool).close)
        self.kept = [buffer for buffer in self.kept if buffer is not None]

    def step(self, number: int, one: Any, two: Any) -> None:
        attempt, pool = self.attempt, self.pool
        with vram.planned(pool, time_limit=0.02):
            for stream in (one, two):
                first = attempt(lambda stream=stream: pool.allocate(3 * MIB, stream=stream))
                if first is not None and number % 3 == 1:
                    attempt(lambda first=first: first.fill(1))
                    attempt(lambda first=first: first.record_stream(two if one is not None else None))
                self.let_go(first)
                second = attempt(lambda stream=stream: pool.allocate(3 * MIB, stream=stream))
                third = attempt(lambda: pool.allocate((64 + number // 4) * KIB))
                self.let_go(third)
                self.let_go(second)
            if number == 2:
                self.kept.append(attempt(lambda: pool.allocate(3 * MIB, stream=two)))

    def let_go(self, buffer: Any) -> None:
        """What cannot be zeroed stays live, and is freed again."""
        while buffer is not None and not buffer.freed:
            self.attempt(buffer.free)


def calls_of_a_whole_run(kind: str) -> int:
    run = PlannedRun(kind)
    run.program()
    assert run.errors == []
    run.end()
    assert run.left() == {}
    return run.backend.total_calls()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["failed", "out_of_memory"])
def test_each_call_fails_in_turn(kind: str, code: str) -> None:
    for nth in range(1, calls_of_a_whole_run(kind) + 1):
        run = PlannedRun(kind)
        run.backend.fail_any(nth, code, NATIVE)
        run.program()
        run.backend.clear_failures()
        run.assert_works()
        run.end()
        assert run.backend.check() is None
        assert run.left() == {}, f"lost after call {nth} failed ({run.errors})"
        unexpected = [error for error in run.errors if getattr(error, "native", 0) not in (0, NATIVE)]
        assert unexpected == []
