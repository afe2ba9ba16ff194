"""Every public call against a concurrent close(): a value or a documented error, and accounts that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import assert_quiet, run_program

from effort import THOROUGH

pytestmark = [pytest.mark.fork, pytest.mark.slow]

RACE = """
    import random, sys, threading, traceback
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from surface import DOCUMENTED, World, calls

    def race(kind, round):
        # All calls in a random order on three threads, a close in the middle of them on a fourth.
        world = World(Path({folder!r}) / f"{{kind}}{{round}}", monitor=kind == "Monitor")
        if kind == "Arena":
            world.arena.adopt()
        listed = [*calls(world, kind).items()]
        start, wrong = threading.Barrier(4), []

        def use(seed):
            every = listed.copy()
            random.Random(seed).shuffle(every)
            start.wait()
            for name, call in every * 2:
                try:
                    call()
                except DOCUMENTED:
                    pass
                except BaseException:
                    wrong.append(f"{{name}}: {{traceback.format_exc()}}")

        def close():
            dice = random.Random(round)
            start.wait()
            for _ in range(dice.randrange(30)):
                world.pool.live_bytes()  # a random moment, without a clock
            try:
                closing[kind](world)
            except DOCUMENTED as error:
                wrong.append(f"close: {{error!r}}")

        threads = [threading.Thread(target=use, args=(10 * round + n,)) for n in range(3)]
        threads.append(threading.Thread(target=close))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, "\\n".join(wrong)
        for pool in (world.pool, world.driver_pool, world.pinned_pool):
            assert pool.check() is None, pool.check()
            stats = pool.stats()
            for name in ("live", "allocated", "reserved", "pending"):
                assert 0 <= getattr(stats, name) < 1 << 40, (name, getattr(stats, name))
            pool.close()
        for each in (world.recorder, world.pipeline, world.manager):
            each.close()

    closing = {{
        "Pool": lambda world: world.pool.close(),
        "DriverPool": lambda world: world.driver_pool.close(),
        "PinnedPool": lambda world: world.pinned_pool.close(),
        "AsyncMemoryPool": lambda world: world.async_pool.close(),
        "Arena": lambda world: world.pool.close(),  # an arena is its thread's: its pool goes
        "GrowableBuffer": lambda world: world.growable.close(),
        "Scratch": lambda world: world.scratch.close(),
        "Buffer": lambda world: world.pool.close(),
        "Stream": lambda world: world.stream.close(),
        "Event": lambda world: world.other.close(),
        "MemoryManager": lambda world: world.manager.close(),
        "Recorder": lambda world: world.recorder.close(),
        "Monitor": lambda world: world.monitor.close(),
        "Pipeline": lambda world: world.pipeline.close(),
    }}
    for round in range(ROUNDS):
        race({kind!r}, round)
"""

ROUNDS = 12 if THOROUGH else 3
KINDS = (
    "Pool", "DriverPool", "PinnedPool", "AsyncMemoryPool", "Arena", "GrowableBuffer", "Scratch", "Buffer",
    "Stream", "Event", "MemoryManager", "Recorder", "Monitor", "Pipeline",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_against_a_close(kind: str, tmp_path: Path) -> None:
    for round in range(ROUNDS):
        (tmp_path / f"{kind}{round}").mkdir()
    program = RACE.format(here=str(Path(__file__).parent), folder=str(tmp_path), kind=kind)
    assert_quiet(run_program(f"ROUNDS = {ROUNDS}", program))


def test_all_that_can_be_closed_is_tried() -> None:
    from surface import CLASSES

    assert {*CLASSES} - {*KINDS} == {"Device"}, "which has no end but that of the process"
