"""The observer hub: listeners come and go independently, and what observers ask for ends with them."""

from __future__ import annotations

import gc
import weakref

from made_jobs import trace_of

import vram
from vram.core import observer
from vram.core.measure import Measurement
from vram.observe.on_oom import keep_failures
from vram.trace import AT_ONCE, FREE, Action, lifetimes


def test_a_function_that_listens_twice_leaves_once() -> None:
    heard: list[int] = []
    listeners = observer.Listeners()
    end, _ = listeners.add(heard.append), listeners.add(heard.append)
    end()
    end()
    listeners.tell(7)
    assert heard == [7] and len(listeners) == 1


def test_a_listener_may_leave_while_all_are_told() -> None:
    heard: list[str] = []
    listeners = observer.Listeners()

    def once() -> None:
        heard.append("once")
        end()

    end = listeners.add(once)
    listeners.add(lambda: heard.append("other"))
    listeners.tell()
    listeners.tell()
    assert heard == ["once", "other", "other"]


def test_a_finalizer_may_listen_at_any_moment() -> None:
    listeners, missed = observer.Listeners(), list[str]()
    listeners.add(str)

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            listeners.add(int)

    uses = {"drop": lambda: listeners.drop(lambda listener: listener is int), "tell": lambda: [*listeners]}
    before = gc.get_threshold()
    try:
        for moment in range(1, 40):
            for name, use in uses.items():
                gc.collect()
                gc.disable()
                Cycle()
                gc.set_threshold(moment)  # so many allocations before it is collected
                gc.enable()
                try:
                    use()
                except RuntimeError:
                    missed.append(name)
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert missed == []


def test_the_end_of_a_listener_does_not_keep_it_alive() -> None:
    class Owner:
        def __init__(self, listeners: observer.Listeners) -> None:
            self.end = listeners.add(self.hear)

        def hear(self) -> None:
            pass

    owner = Owner(observer.Listeners())
    seen = weakref.ref(owner)
    gc.disable()
    try:
        owner.end()
        del owner
        assert seen() is None
    finally:
        gc.enable()


def test_pools_keep_stacks_as_long_as_somebody_asks() -> None:
    with vram.Pool(vram.Device.model("1GiB")) as before:
        first, second = observer.keep_stacks(), keep_failures(["explain"])
        with vram.Pool(vram.Device.model("1GiB")) as later:
            assert before.keeps_stacks and later.keeps_stacks
            first()
            assert before.keeps_stacks and later.keeps_stacks
            second()
            assert not before.keeps_stacks and not later.keeps_stacks


def test_a_measurement_sums_over_the_pools_it_follows() -> None:
    one, two = vram.Pool(vram.Device.model("1GiB")), vram.Pool(vram.Device.model("1GiB"))
    with one, two, Measurement(observer.follow_pools) as measured:
        addresses = one.malloc(1 << 20), two.malloc(2 << 20)
        one.free(addresses[0])
        with vram.Pool(one.device) as later:
            later.free(later.malloc(4 << 20))
    assert (measured.allocations, measured.frees, measured.kept) == (3, 2, 2 << 20)
    peaks = measured.by_memory("peak")
    assert (peaks[one.memory], peaks[two.memory]) == (5 << 20, 2 << 20)


def test_memory_that_is_free_without_a_request_was_freed() -> None:
    trace = trace_of([(Action.ALLOC, 0, 512), (Action.ALLOC, 512, 512), (Action.FREE_COMPLETED, 0, 512)])
    program = lifetimes(trace)
    assert [
        (program.id[row], program.event[row]) for row in range(len(program)) if program.op[row] == FREE
    ] == [(0, 2)]
    assert set(program.completed_event) == {AT_ONCE}
