"""More programs of all sorts, written as an adversary of the checker would."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import collections
import concurrent.futures
import functools
import operator
import queue
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from racing import HALF, MIB, UNIT, Bench, correct, kernel, racy

import vram
from vram.race.checker import reads


@correct()
def ring_of_three(e: Bench):
    slots, done = [e.take() for _ in range(3)], [vram.Event(e.device) for _ in range(3)]
    for i in range(9):
        e.a.wait_event(done[i % 3])
        e.a.launch(kernel, slots[i % 3])
        e.b.wait_event(e.a.record_event())
        e.b.launch(kernel, slots[i % 3])
        e.c.wait_event(e.b.record_event())
        e.c.launch(kernel, reads(slots[i % 3]))
        done[i % 3].record(e.c)


@correct()
def ring_of_three_that_waits_for_one_slot_more(e: Bench):
    slots, done = [e.take() for _ in range(3)], [vram.Event(e.device) for _ in range(3)]
    for i in range(9):
        e.a.launch(kernel, slots[i % 3])
        e.b.wait_event(e.a.record_event())
        e.b.launch(kernel, slots[i % 3])
        done[i % 3].record(e.b)
        e.a.wait_event(done[(i + 2) % 3])


@correct()
def list_in_a_closure_by_argument(e: Bench):
    bufs = [e.take(), e.take()]

    def run(i):
        kernel(bufs[i])

    bufs[0].fill(1)
    e.a.launch(run, 0)
    e.b.launch(run, 1)


@racy("unordered")
def list_in_a_closure_by_the_same_argument(e: Bench):
    bufs = [e.take(), e.take()]

    def run(i):
        kernel(bufs[i])

    bufs[1].fill(1)
    e.b.launch(run, 1)


@correct()
def dict_in_a_closure_by_default_argument(e: Bench):
    bufs = {"a": e.take(), "b": e.take()}
    for name, stream in (("a", e.a), ("b", e.b)):
        stream.launch(kernel, bufs[name])
    for name, stream in (("a", e.a), ("b", e.b)):
        stream.launch(lambda n=name: kernel(bufs[n]))


@correct(on="host")
def rows_of_a_matrix(e: Bench):
    m = np.asarray(e.take()).view(np.float32).reshape(8, -1)
    for i in range(8):
        (e.a, e.b, e.c)[i % 3].launch(kernel, m[i])


@racy("unordered", on="host")
def rows_of_a_matrix_one_twice(e: Bench):
    m = np.asarray(e.take()).view(np.float32).reshape(8, -1)
    for i in (0, 1, 2, 3, 2):
        (e.a, e.b)[i == 3].launch(kernel, m[i])
    e.c.launch(kernel, m[2:3])


@correct(on="host")
def tiles(e: Bench):
    m = np.asarray(e.take()).reshape(64, 64)
    e.a.launch(kernel, m[:32, :32], m[32:, 32:])
    e.b.launch(kernel, m[:32, 32:], m[32:, :32])


@racy("unordered", on="host")
def tiles_that_touch(e: Bench):
    m = np.asarray(e.take()).reshape(64, 64)
    e.a.launch(kernel, m[:33, :33])
    e.b.launch(kernel, m[32:, 32:])


@correct(on="host")
def split_array(e: Bench):
    parts = np.array_split(np.asarray(e.take()), 5)
    for i, part in enumerate(parts):
        (e.a, e.b)[i % 2].launch(kernel, part)


@correct(on="host")
def cast_memory_views(e: Bench):
    m = memoryview(e.take()).cast("I")
    e.a.launch(kernel, m[: HALF // 4])
    e.b.launch(kernel, m[HALF // 4 :])


@racy("unordered", on="host")
def sub_class_of_an_array(e: Bench):
    class Mine(np.ndarray):
        pass

    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(kernel, np.asarray(x).view(Mine))


@racy("unordered", on="host")
def masked_array(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(kernel, np.ma.masked_array(np.asarray(x), mask=False))


@racy("unordered", on="host")
def stores_through_views(e: Bench):
    x = np.asarray(e.take())

    def store():
        x.reshape(64, 64).T[0] = 1

    e.a.launch(store)
    e.b.launch(lambda: x.mean())


@racy("unordered", on="host")
def stores_by_an_operator(e: Bench):
    x = np.asarray(e.take())
    e.a.launch(operator.setitem, x, slice(0, 10), 1)
    e.b.launch(lambda: x[5] + 1)


@racy("unordered", on="host")
def stores_by_ellipsis(e: Bench):
    x = np.asarray(e.take())

    def clear():
        x[...] = 0

    e.a.launch(clear)
    e.b.launch(clear)


@racy("unordered", on="host")
def stores_in_a_loop(e: Bench):
    m = np.asarray(e.take()).reshape(64, 64)

    def clear():
        for row in m:
            row[:] = 0

    e.a.launch(clear)
    e.b.launch(lambda: m[3].sum())


@racy("unordered", on="host")
def stores_in_a_with_block(e: Bench):
    x, lock = np.asarray(e.take()), threading.Lock()

    def clear():
        with lock:
            x[:8] = 0

    e.a.launch(clear)
    e.b.launch(clear)


@correct(on="host")
def stores_in_parts_by_argument(e: Bench):
    x = np.asarray(e.take())

    def clear(i):
        x[i * 64 : (i + 1) * 64] = 0

    for i in range(16):
        (e.a, e.b)[i % 2].launch(clear, i)


@racy("unordered", on="host")
def stores_in_parts_by_argument_that_overlap(e: Bench):
    x = np.asarray(e.take())

    def clear(i):
        x[i * 64 : (i + 2) * 64] = 0

    for i in range(16):
        (e.a, e.b)[i % 2].launch(clear, i)


@racy("unordered")
def callback_in_a_table(e: Bench):
    x = e.take()
    table = {"k": lambda: kernel(x)}
    e.a.launch(kernel, x)
    e.b.launch(table["k"])


@racy("unordered")
def star_arguments(e: Bench):
    bufs = (e.take(), e.take())
    e.a.launch(kernel, bufs[1])
    e.b.launch(lambda: kernel(*bufs))


@racy("unordered")
def double_star_arguments(e: Bench):
    state = {"w": e.take()}
    e.a.launch(kernel, state["w"])
    e.b.launch(lambda: kernel(**state))


@racy("unordered")
def conditional_expression(e: Bench):
    x, y, flag = e.take(), e.take(), [True]
    e.a.launch(kernel, x)
    e.b.launch(lambda: kernel(x if flag else y))


@racy("unordered")
def try_and_finally(e: Bench):
    x = e.take()

    def run():
        try:
            raise KeyError
        except KeyError:
            pass
        finally:
            kernel(x)

    e.a.launch(kernel, x)
    e.b.launch(run)


class Base:
    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def step(self) -> None:
        kernel(self._memory)


class Derived(Base):
    __slots__ = ()

    def step(self) -> None:
        super().step()


class Delegating:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@racy("unordered")
def method_of_a_base_class(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(Derived(x).step)


@racy("unordered")
def delegated_attribute(e: Bench):
    x = e.take()
    outer = Delegating(Base(x))
    e.a.launch(kernel, x)
    e.b.launch(lambda: outer.step())


@correct()
def two_workers_of_one_class(e: Bench):
    one, two = Derived(e.take()), Derived(e.take())
    e.a.launch(kernel, one._memory)
    e.b.launch(kernel, two._memory)
    e.a.launch(one.step)
    e.b.launch(two.step)


@racy("unordered")
def memory_in_an_exception(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(kernel, ValueError("bad", x))


@racy("unordered")
def memory_in_a_queue(e: Bench):
    x, waiting = e.take(), queue.Queue()
    waiting.put(x)
    e.a.launch(kernel, x)
    e.b.launch(lambda: kernel(waiting.get()))


@racy("unordered")
def memory_in_a_future(e: Bench):
    x, future = e.take(), concurrent.futures.Future()
    future.set_result(x)
    e.a.launch(kernel, x)
    e.b.launch(kernel, future)


@racy("unordered")
def memory_in_a_user_list(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(kernel, collections.UserList([collections.UserDict({"x": x})]))


@racy("unordered")
def memory_in_an_enum(e: Bench):
    x = e.take()
    slots = Enum("slots", {"FIRST": x.ptr})
    e.a.launch(kernel, x)
    e.b.launch(kernel, slots.FIRST)


@racy("unordered")
def cached_function(e: Bench):
    x = e.take()

    @functools.cache
    def run():
        kernel(x)

    e.a.launch(kernel, x)
    e.b.launch(run)


@dataclass(frozen=True, slots=True)
class Frozen:
    left: Any
    right: Any

    def use_left(self) -> None:
        kernel(self.left)

    def use_right(self) -> None:
        kernel(self.right)


@correct()
def frozen_dataclass_by_halves(e: Bench):
    both = Frozen(e.take(), e.take())
    e.a.launch(kernel, both.left)
    e.b.launch(both.use_right)


@racy("unordered")
def frozen_dataclass_by_the_same_half(e: Bench):
    both = Frozen(e.take(), e.take())
    e.a.launch(kernel, both.left)
    e.b.launch(both.use_left)


@racy("free")
def rebound_while_its_pointer_is_used(e: Bench):
    x = e.pool.allocate(UNIT, stream=e.a)
    e.b.launch(kernel, [x.ptr])
    x = None


@racy("unordered")
def source_overwritten_before_it_is_copied(e: Bench):
    x, y = e.take(), e.take()
    y.copy_from(x, stream=e.b)
    x.fill(0)


@correct()
def chain_of_copies(e: Bench):
    x, y, z = e.take(), e.take(), e.take()
    x.fill(1)
    e.b.wait_stream(e.a)
    y.copy_from(x, stream=e.b)
    e.c.wait_stream(e.b)
    z.copy_from(y, stream=e.c)
    e.a.wait_stream(e.c)
    for each in (x, y, z):
        each.free()


@racy("free")
def record_stream_of_the_wrong_buffer(e: Bench):
    x, y = e.take(), e.take()
    e.b.launch(kernel, x.ptr)
    y.record_stream(e.b)
    x.free()


@racy("unordered")
def another_device_is_waited_for(e: Bench):
    x, other = e.take(), vram.Device.model("1GiB")
    e.b.launch(kernel, x)
    other.synchronize()
    e.a.launch(kernel, x)


@racy("unordered")
def trim_is_no_order(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    e.pool.trim()
    e.a.launch(kernel, x)


@racy("free")
def inner_scope_ends_too_early(e: Bench):
    arena = e.arena()
    with arena.scope():
        outer = arena.allocate(UNIT)
        with arena.scope():
            inner = arena.allocate(UNIT)
            e.b.launch(kernel, inner.ptr)
        e.a.wait_stream(e.b)
        e.a.launch(kernel, outer)


@correct()
def growable_that_moves_up_and_down(e: Bench):
    g = e.growable(2 * MIB)
    for i in range(6):
        g.grow(4 * MIB)
        g.view(2 * MIB).fill(i)
        e.b.wait_stream(e.a)
        e.b.launch(kernel, reads(g.view()))
        g.record_stream(e.b)
        e.a.wait_stream(e.b)
        g.shrink(4 * MIB)


@correct()
def swapped_attributes(e: Bench):
    class State:
        def __init__(self) -> None:
            self.front, self.back = e.take(), e.take()

    state = State()
    for _ in range(6):
        e.a.launch(kernel, state.back)
        e.b.launch(kernel, reads(state.front))
        e.a.wait_stream(e.b)
        e.b.wait_stream(e.a)
        state.front, state.back = state.back, state.front
