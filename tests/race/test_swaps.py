"""The programs of this folder on pools whose memory moves to the host and back around every operation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from racing import Bench, Program
from test_programs import CASES

import vram

PROGRAMS = [program for program, device in CASES if device == "model"]
AROUND = ("launch", "wait_stream", "wait_event", "record_event", "synchronize")
NEVER_MOVED = 20  # per cent of the programs: they have pinned or growable memory, or free all of it first


class Swaps:
    """Moves all memory of a pool out at one operation of any stream, and back at the next one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pool: vram.Pool | None = None
        self.moved = 0
        self._out = False
        for name in AROUND:
            patch.setattr(vram.Stream, name, self._around(getattr(vram.Stream, name)))

    def _around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._swap()
            try:
                return plain(*args, **named)
            finally:
                self._swap()

        return call

    def _swap(self) -> None:
        pool = self.pool
        if pool is None or pool.closed:
            return
        self._out = not self._out
        move = pool.spill_block if self._out else pool.prefetch_block
        for block in pool.snapshot().allocations():
            with contextlib.suppress(vram.DeviceError):  # a stream of it is captured, or it is suspended
                self.moved += move(block.address)


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> Swaps:
    return Swaps(monkeypatch)


def run(program: Program, swaps: Swaps) -> int:
    """Check the verdict and return how many bytes moved."""
    device = vram.Device.model("4GiB", lag_us=10.0)
    bench, before = Bench(device), swaps.moved
    bench.pool = swaps.pool = vram.Pool(device, spill="1GiB")
    with vram.race_check("collect") as checker:
        program.run(bench)
        device.synchronize()
    found = {str(race.kind) for race in checker.races}
    assert found == program.kinds, "\n\n".join([program.name, *map(str, checker.races)])
    assert bench.pool.check() is None
    swaps.pool = None
    return swaps.moved - before


def test_programs_get_the_same_verdicts(swaps: Swaps) -> None:
    still = [program.name for program in PROGRAMS if run(program, swaps) == 0]
    assert len(still) * 100 <= NEVER_MOVED * len(PROGRAMS), still
