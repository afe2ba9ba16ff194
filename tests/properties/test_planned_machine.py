"""Planned steps among random programs, against the oracle of the pool's own machine.

Steps repeat a script and now and then differ from it in every way there is: another size, order, stream or
lifetime, less, more, use on other streams. Whatever comes, live memory never overlaps, contents stay, and
memory is reused in order.
"""

from __future__ import annotations

import weakref
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule
from test_pool_machine import (
    CHURN,
    LIMIT,
    OPTIONS,
    SIZES,
    WHICH,
    HostMachine,
    ModelMachine,
    PoolMachine,
    rounded,
)

import vram
from vram import OutOfMemory

NEXT_STEP, LASTS = 7, 8  # lifetimes that end in the next step, and after the step whenever somebody frees it
SCRIPTS = st.lists(
    st.lists(st.tuples(SIZES, st.integers(0, 1), st.integers(0, 8)), min_size=1, max_size=10),
    min_size=1,
    max_size=2,
)
CHANGES = st.sampled_from(
    [None, None, None, None, "skip", "extra", "size", "stream", "swap", "late", "early", "elsewhere", "end"]
)
REGION = "vram.planned"


class PlannedRules(PoolMachine):
    """What planned steps add to a machine."""

    def begin_steps(self, scripts: list[Any]) -> None:
        self.scripts = scripts
        self.waiting: list[Any] = []  # for the next step to free, weakly
        self.hits = 0

    def share(self, buffer: Any, which: int) -> None:
        """Use the buffer on some stream, too."""
        raise NotImplementedError

    def shares_pages(self) -> bool:
        return False  # a region in use holds more than what lives in it

    @rule(which=WHICH, times=st.integers(1, 4), change=CHANGES, where=WHICH)
    def repeat(self, which: int, times: int, change: str | None, where: int) -> None:
        script = self.scripts[which % len(self.scripts)]
        for _ in range(times):
            self.run_step(script, None, where)
        self.run_step(script, change, where)

    def run_step(self, script: list[Any], change: str | None, where: int) -> None:
        script, at = list(script), where % len(script)
        size, stream, lifetime = script[at]
        if change == "skip":
            del script[at]
        elif change == "extra":
            script.insert(at, (size + 4096, stream, lifetime))
        elif change == "size":
            script[at] = (size + 1 + where % 5000, stream, lifetime)
        elif change == "stream":
            script[at] = (size, stream + 1, lifetime)
        elif change == "swap":
            script[at - 1], script[at] = script[at], script[at - 1]
        elif change in ("late", "early"):
            script[at] = (size, stream, LASTS if change == "late" else 0)
        elif change == "end":
            del script[at:]
        self.may_wait_for(LIMIT)
        with vram.planned(self.pool, time_limit=0.05):
            self.play(script, at if change == "elsewhere" else None, where)
        self.hits = self.pool.planned_report()["hits"]

    def play(self, script: list[Any], shared: int | None, where: int) -> None:
        ends: dict[int, list[Any]] = {}
        waiting, self.waiting = self.waiting, []
        for moment, (size, stream, lifetime) in enumerate(script):
            for buffer in ends.pop(moment, []):
                self.let_go(buffer)
            if moment == min(1, len(script) - 1):
                for find in waiting:
                    self.let_go(find())
            self.may_wait_for(size)
            try:
                buffer = self.pool.allocate(size, stream=self.stream(stream))
            except OutOfMemory:
                self.failed += 1
                assert self.live
                continue
            self.note(buffer)
            if moment == shared:
                self.share(buffer, where)
            if lifetime < NEXT_STEP:
                ends.setdefault(moment + 1 + lifetime, []).append(buffer)
            elif lifetime == NEXT_STEP:
                self.waiting.append(weakref.ref(buffer))
            self.go_on(where + moment)
            self.the_pool_is_intact()
            self.live_blocks_never_overlap()
        for buffers in ends.values():
            for buffer in buffers:
                self.let_go(buffer)

    def let_go(self, buffer: Any) -> None:
        if buffer is None or self.live.get(buffer.ptr) is not buffer:
            return  # another rule was faster
        self.freeing(buffer)
        del self.live[buffer.ptr]
        buffer.free()

    @rule(**CHURN)
    def churn_in_a_step(self, **program: Any) -> None:
        self.may_wait_for(LIMIT)
        with vram.planned(self.pool, time_limit=0.05):
            self.churn(**program)

    @rule()
    def close_the_plan(self) -> None:
        vram.planned(self.pool).close()
        assert vram.planned(self.pool).report().steps == 0

    def regions(self) -> list[Any]:
        return [block for block in self.pool.snapshot().blocks("live") if block.tag == REGION]

    def in_a_region(self, buffer: Any) -> bool:
        return any(
            block.address < buffer.ptr and buffer.ptr + rounded(buffer.size) <= block.address + block.size
            for block in self.regions()
        )

    # A region is one allocation of the pool, whatever lives in it. So its accounts are those of blocks.

    def note_passing(self, most: int) -> None: ...

    @invariant()
    def accounts_are_exact(self) -> None:
        stats, regions = self.pool.stats(), self.regions()
        outside = [buffer for buffer in self.live.values() if not self.in_a_region(buffer)]
        assert stats.live == len(outside) + len(regions)
        assert stats.allocated == sum(rounded(each.size) for each in [*outside, *regions])
        assert stats.allocated + stats.cached + stats.pending + stats.free == stats.reserved <= LIMIT
        assert stats.out_of_memory == self.failed

    @invariant()
    def the_snapshot_is_what_is_live(self) -> None:
        blocks = {block.address for block in self.pool.snapshot().blocks("live")}
        outside = {address for address, buffer in self.live.items() if not self.in_a_region(buffer)}
        assert blocks - {region.address for region in self.regions()} == outside

    @invariant()
    def a_buffer_is_known_by_its_address(self) -> None:
        for address, buffer in self.live.items():
            assert self.pool.info(address)["requested"] == buffer.size


class PlannedHostMachine(PlannedRules, HostMachine):
    """Contents stay."""

    @initialize(options=OPTIONS, pages=st.booleans(), scripts=SCRIPTS)
    def open(self, options: dict[str, Any], pages: bool, scripts: list[Any]) -> None:  # type: ignore[override]
        self.begin_steps(scripts)
        HostMachine.open(self, options, pages)

    def share(self, buffer: Any, which: int) -> None:
        self.hold_up(which)
        self.read_elsewhere(list(self.live).index(buffer.ptr), which)


class PlannedModelMachine(PlannedRules, ModelMachine):
    """Memory is reused in order."""

    @initialize(options=OPTIONS, pages=st.booleans(), scripts=SCRIPTS)
    def open(self, options: dict[str, Any], pages: bool, scripts: list[Any]) -> None:  # type: ignore[override]
        self.begin_steps(scripts)
        ModelMachine.open(self, options, pages)

    def share(self, buffer: Any, which: int) -> None:
        self.use_elsewhere(list(self.live).index(buffer.ptr), which)


TestPlannedHost = PlannedHostMachine.TestCase
TestPlannedHost.settings = settings(max_examples=settings.default.max_examples, stateful_step_count=30)
TestPlannedModel = PlannedModelMachine.TestCase
TestPlannedModel.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=30)
