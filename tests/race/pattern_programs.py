"""Patterns of larger programs: rings, fan-out and fan-in, swaps, holders, stand-ins for kernels."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import ctypes
import functools
import operator
import threading
import types
import weakref

import numpy as np
from racing import HALF, MIB, UNIT, Bench, correct, kernel, racy

import vram
from vram.race.checker import reads


@correct()
def fan_out_fan_in(e: Bench):
    x, y, z = e.take(), e.take(stream=e.b), e.take(stream=e.c)
    e.a.launch(kernel, x)
    for s in (e.b, e.c):
        s.wait_stream(e.a)
    e.b.launch(kernel, reads(x), y)
    e.c.launch(kernel, reads(x), z)
    e.a.wait_stream(e.b)
    e.a.wait_stream(e.c)
    e.a.launch(kernel, reads(y), reads(z), x)


@racy("unordered")
def fan_in_forgets_one(e: Bench):
    x, y, z = e.take(), e.take(stream=e.b), e.take(stream=e.c)
    e.b.launch(kernel, y)
    e.c.launch(kernel, z)
    e.a.wait_stream(e.b)
    e.a.launch(kernel, reads(y), reads(z), x)


@racy("unordered")
def loop_carried_dependency(e: Bench):
    x = e.take()
    for _ in range(3):
        e.a.launch(kernel, x)
        e.b.wait_stream(e.a)
        e.b.launch(kernel, x)  # next iteration: a does not wait for b


@correct()
def double_buffer_swap(e: Bench):
    bufs = [e.take(), e.take()]
    for i in range(6):
        w, r = bufs[i % 2], bufs[1 - i % 2]
        e.a.launch(kernel, w)
        e.b.launch(kernel, reads(r))
        e.a.wait_stream(e.b)
        e.b.wait_stream(e.a)


@racy("unordered")
def double_buffer_no_swap(e: Bench):
    bufs = [e.take(), e.take()]
    for i in range(6):
        w, r = bufs[i % 2], bufs[i % 2]
        e.a.launch(kernel, w)
        e.b.launch(kernel, reads(r))
        e.a.wait_stream(e.b)
        e.b.wait_stream(e.a)


@correct()
def synchronize_in_thread(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    t = threading.Thread(target=e.a.synchronize)
    t.start()
    t.join()
    e.b.launch(kernel, x)
    e.a.wait_stream(e.b)


@racy("free")
def free_in_finally(e: Bench):
    x = e.pool.allocate(UNIT, stream=e.a)
    try:
        e.b.wait_stream(e.a)
        e.b.launch(kernel, x.ptr)
    finally:
        x.free()


@correct()
def free_in_finally_waits(e: Bench):
    x = e.pool.allocate(UNIT, stream=e.a)
    try:
        e.b.wait_stream(e.a)
        e.b.launch(kernel, x.ptr)
    finally:
        e.a.wait_stream(e.b)
        x.free()


@racy("free")
def exit_stack_frees(e: Bench):
    with contextlib.ExitStack() as st:
        x = st.enter_context(e.pool.allocate(UNIT, stream=e.a))
        e.b.launch(kernel, x.ptr)


@correct()
def exit_stack_waits(e: Bench):
    with contextlib.ExitStack() as st:
        x = st.enter_context(e.pool.allocate(UNIT, stream=e.a))
        st.callback(e.a.wait_stream, e.b)
        e.b.launch(kernel, x.ptr)


@racy("unordered")
def simple_namespace(e: Bench):
    x = e.take()
    ns = types.SimpleNamespace(deep=types.SimpleNamespace(x=x))
    e.a.launch(kernel, ns)
    e.b.launch(kernel, ns)


@racy("unordered")
def method_type(e: Bench):
    x = e.take()

    class T:
        def run(self):
            kernel(self.x)

    t = T()
    t.x = x
    e.a.launch(
        types.MethodType(T.run, t),
    )
    e.b.launch(kernel, x)


@racy("unordered")
def operator_methodcaller(e: Bench):
    x = e.take()

    class T:
        def __init__(s, m):
            s.m = m

        def go(s):
            kernel(s.m)

    t = T(x)
    e.a.launch(kernel, x)
    e.b.launch(operator.methodcaller("go"), t)


@racy("unordered")
def functools_partial_kw(e: Bench):
    x = e.take()
    e.a.launch(functools.partial(kernel, out=x))
    e.b.launch(functools.partial(kernel, src=x.ptr))


@racy("unordered")
def tuple_subclass(e: Bench):
    class P(tuple):
        pass

    x = e.take()
    e.a.launch(kernel, P([1, x]))
    e.b.launch(kernel, [P([x])])


@racy("unordered")
def dict_subclass_attr(e: Bench):
    class D(dict):
        pass

    x = e.take()
    d = D()
    d.extra = x
    e.a.launch(kernel, d)
    e.b.launch(kernel, x.ptr)


@racy("unordered")
def property_on_argument(e: Bench):
    x = e.take()

    class M:
        def __init__(s):
            s._w = {"w": x}

        @property
        def weight(s):
            return s._w["w"]

    m = M()

    def step(mod):
        kernel(mod.weight)

    e.a.launch(step, m)
    e.b.launch(step, m)


@racy("unordered")
def nonlocal_list_append(e: Bench):
    x = e.take()
    todo = []

    def add():
        todo.append(x)

    add()

    def run():
        for t in todo:
            kernel(t)

    e.a.launch(kernel, x)
    e.b.launch(run)


@racy("unordered")
def lambda_default_pointer(e: Bench):
    x = e.take()
    e.a.launch(lambda p=x.ptr: kernel(p))
    e.b.launch(kernel, x)


@racy("unordered")
def struct_packed_pointer_array(e: Bench):
    x = e.take()
    t = (ctypes.c_void_p * 2)(x.ptr, 0)
    e.a.launch(kernel, t)
    e.b.launch(kernel, x)


@racy("unordered")
def np_struct_field_pointer(e: Bench):
    x = e.take()
    r = np.zeros(1, dtype=[("p", "u8"), ("n", "i4")])
    r["p"] = x.ptr
    e.a.launch(kernel, r)
    e.b.launch(kernel, x)


@racy("unordered")
def shallow_copy_of_holder(e: Bench):
    class H:
        pass

    h = H()
    h.x = e.take()
    g = copy.copy(h)
    e.a.launch(kernel, h)
    e.b.launch(kernel, g)


@racy("unordered", on="host")
def frombuffer_view(e: Bench):
    x = e.take()
    v = np.frombuffer(x, dtype="f4")
    e.a.launch(kernel, v)
    e.b.launch(kernel, x)


@correct(on="host")
def frombuffer_views_disjoint(e: Bench):
    x = e.take()
    v = np.frombuffer(x, dtype="f4", count=512)
    w = np.frombuffer(x, dtype="f4", offset=2048)
    e.a.launch(kernel, v)
    e.b.wait_stream(e.a)
    e.b.launch(kernel, w)
    e.a.launch(kernel, v)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def reshape_view_overlap(e: Bench):
    x = e.take()
    v = np.asarray(x).reshape(64, 64)
    e.a.launch(kernel, v[:33])
    e.b.launch(kernel, v[32:])


@correct(on="host")
def reshape_view_disjoint(e: Bench):
    x = e.take()
    v = np.asarray(x).reshape(64, 64)
    e.a.launch(kernel, 0)
    e.b.wait_stream(e.a)
    e.a.launch(kernel, v[:32])
    e.b.launch(kernel, v[32:])
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def closure_reads_while_written(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)

    def w():
        m[:] = 1

    def r():
        return m.sum()

    e.a.launch(w)
    e.b.launch(r)
    e.a.wait_stream(e.b)


@correct(on="host")
def closure_two_reads(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)

    def r():
        return m.mean() + m[3]

    e.a.launch(r)
    e.b.launch(r)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def write_through_local_alias(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)

    def w():
        k = m[10:20]
        k += 1

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def np_add_out_positional(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)

    def w():
        np.add(m, 1, m)

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def setitem_call(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)

    def w():
        m.__setitem__(0, 1)

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def operator_setitem(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)
    e.a.launch(operator.setitem, m, 0, 1)
    e.b.launch(operator.setitem, m, 0, 2)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def flat_write(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)

    def w():
        m.flat[3] = 1

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def view_type_write(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)

    def w():
        m.view("f4")[:] = 1.0

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def memoryview_write(e: Bench):
    x = e.take()
    m = memoryview(x)
    e.b.wait_stream(e.a)

    def w():
        m[0] = 1

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def ctypes_memset(e: Bench):
    x = e.take()
    e.b.wait_stream(e.a)

    def w():
        ctypes.memset(x.ptr, 0, 16)

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@correct(on="host")
def ctypes_memset_halves(e: Bench):
    x = e.take()
    e.b.wait_stream(e.a)
    e.a.launch(ctypes.memset, x.ptr, 0, HALF)
    e.b.launch(ctypes.memset, x.ptr + HALF, 0, HALF)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def write_in_nested_helper_with_kwargs(e: Bench):
    x = e.take()
    m = np.asarray(x)
    e.b.wait_stream(e.a)

    def helper(dst, *, value):
        dst[...] = value

    def w():
        helper(dst=m, value=3)

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def write_via_method_helper(e: Bench):
    x = e.take()

    class W:
        def __init__(s):
            s.m = np.asarray(x)

        def _put(s, i, v):
            s.m[i] = v

        def go(s):
            for i in range(3):
                s._put(i, 0)

    w = W()
    e.b.wait_stream(e.a)
    e.a.launch(w.go)
    e.b.launch(w.go)
    e.a.wait_stream(e.b)


@racy("free")
def list_cleared(e: Bench):
    xs = [e.pool.allocate(UNIT, stream=e.a) for _ in range(3)]
    e.b.wait_stream(e.a)
    e.b.launch(kernel, [x.ptr for x in xs])
    xs.clear()


@correct()
def list_cleared_after_sync(e: Bench):
    xs = [e.pool.allocate(UNIT, stream=e.a) for _ in range(3)]
    e.b.wait_stream(e.a)
    e.b.launch(kernel, [x.ptr for x in xs])
    e.b.synchronize()
    xs.clear()


@racy("use after free")
def stale_pointer_from_cache(e: Bench):
    cache = {}
    x = e.pool.allocate(UNIT, stream=e.a)
    cache["p"] = x.ptr
    x.free()
    e.a.launch(kernel, cache)


@racy("free")
def reassign_in_loop(e: Bench):
    for _ in range(3):
        x = e.pool.allocate(UNIT, stream=e.a)
        e.a.launch(kernel, x)
        e.b.wait_stream(e.a)
        e.b.launch(kernel, x.ptr)
    e.b.synchronize()


@correct()
def reassign_in_loop_recorded(e: Bench):
    for _ in range(3):
        x = e.pool.allocate(UNIT, stream=e.a)
        e.a.launch(kernel, x)
        e.b.wait_stream(e.a)
        e.b.launch(kernel, x.ptr)
        x.record_stream(e.b)
    e.b.synchronize()


@racy("free")
def record_stream_then_more_owner_free_order(e: Bench):
    x, y = e.take(), e.take()
    e.b.wait_stream(e.a)
    e.b.launch(kernel, x.ptr, y.ptr)
    x.record_stream(e.b)
    x.free()
    y.free()


@correct()
def copy_between_streams(e: Bench):
    x, y = e.take(), e.take(stream=e.b)
    x.fill(1)
    e.b.wait_stream(e.a)
    y.copy_from(x, stream=e.b)
    e.a.wait_stream(e.b)


@racy("unordered")
def copy_between_streams_unordered(e: Bench):
    x, y = e.take(), e.take(stream=e.b)
    x.fill(1)
    y.copy_from(x, stream=e.b)


@racy("unordered")
def fill_on_other_stream(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    x.fill(0, stream=e.b)


@correct()
def new_each_on_its_stream(e: Bench):
    for s in (e.a, e.b, e.c):
        x = e.take(stream=s)
        s.launch(kernel, x)
        x.free()


@racy("unordered")
def reused_memory_across_heap(e: Bench):
    x = e.pool.allocate(8 * MIB, stream=e.a)
    e.a.launch(kernel, x)
    x.free()
    y = e.pool.allocate(8 * MIB, stream=e.a)
    e.kept.append(y)
    e.b.launch(kernel, y)


@correct()
def growable_append_and_read_other_rows(e: Bench):
    g = e.growable(8 * MIB)
    e.b.wait_stream(e.a)
    e.a.launch(kernel, g.view(0, MIB))
    e.b.launch(kernel, reads(g.view(4 * MIB, MIB)))
    e.a.wait_stream(e.b)


@racy("unordered")
def default_stream_vs_other(e: Bench):
    x = e.pool.allocate(UNIT)
    e.kept.append(x)
    x.fill(1)
    e.b.launch(kernel, x)


@correct()
def default_stream_device_sync(e: Bench):
    x = e.pool.allocate(UNIT)
    e.kept.append(x)
    x.fill(1)
    e.device.synchronize()
    e.b.launch(kernel, x)
    e.b.synchronize()


@correct()
def stream_closed_after_sync(e: Bench):
    s = vram.Stream(e.device)
    x = e.take()
    s.wait_stream(e.a)
    s.launch(kernel, x)
    s.synchronize()
    s.close()
    x.free()


@racy("unordered")
def chain_through_stale_event(e: Bench):
    x = e.take()
    ev = e.a.record_event()
    e.a.launch(kernel, x)
    e.b.wait_event(ev)
    e.b.launch(kernel, x)


@correct()
def wait_on_later_event(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.a.launch(kernel)
    ev = e.a.record_event()
    e.b.wait_event(ev)
    e.b.launch(kernel, x)
    e.a.wait_stream(e.b)


@racy("unordered")
def stub_method(e: Bench):
    class M:
        def __init__(s, x):
            s.x = x

        def step(s):
            pass

    m = M(e.take())
    e.b.wait_stream(e.a)
    e.a.launch(m.step)
    e.b.launch(m.step)
    e.a.wait_stream(e.b)


@racy("unordered")
def stub_callable_object(e: Bench):
    class M:
        def __init__(s, x):
            s.x = x

        def __call__(s): ...

    m = M(e.take())
    e.b.wait_stream(e.a)
    e.a.launch(m)
    e.b.launch(m)
    e.a.wait_stream(e.b)


@correct()
def stub_hook_inside(e: Bench):
    class M:
        def __init__(s, x, y):
            s.x, s.y = x, y

        def hook(s):
            pass

        def step(s, which):
            s.hook()
            kernel(getattr(s, which))

    m = M(e.take(), e.take())
    e.b.wait_stream(e.a)
    e.a.launch(m.step, "x")
    e.b.launch(m.step, "y")
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def partial_copyto(e: Bench):
    x, y = np.asarray(e.take()), np.zeros(UNIT, "u1")
    e.b.wait_stream(e.a)
    e.a.launch(functools.partial(np.copyto, x, y))
    e.b.launch(functools.partial(np.copyto, x, y))
    e.a.wait_stream(e.b)


@correct(on="host")
def partial_reader(e: Bench):
    x = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def total(m):
        return m.sum()

    e.a.launch(functools.partial(total, x))
    e.b.launch(functools.partial(total, m=x))
    e.a.wait_stream(e.b)


@racy("unordered")
def walrus_default(e: Bench):
    x = e.take()
    e.b.wait_stream(e.a)
    e.a.launch(kernel, x)
    if p := x.ptr:
        e.b.launch(kernel, p)


@racy("unordered")
def async_generator_like(e: Bench):
    x = e.take()
    e.b.wait_stream(e.a)

    def gen():
        while True:
            yield kernel(x.ptr)

    g = gen()
    e.a.launch(kernel, x)
    e.b.launch(next, g)


@racy("unordered")
def thread_launches(e: Bench):
    x = e.take()
    e.b.wait_stream(e.a)
    ts = [threading.Thread(target=s.launch, args=(kernel, x)) for s in (e.a, e.b)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()


@correct()
def executor_results_then_sync(e: Bench):
    x = e.take()
    with concurrent.futures.ThreadPoolExecutor(2) as ex:
        ex.submit(e.a.launch, kernel, x).result()
        ex.submit(e.a.synchronize).result()
        ex.submit(e.b.launch, kernel, x).result()
        ex.submit(e.b.synchronize).result()
    x.free()


@racy("free")
def weakref_finalize_free(e: Bench):
    x = e.pool.allocate(UNIT, stream=e.a)
    p = x.ptr
    e.b.wait_stream(e.a)
    e.b.launch(kernel, p)

    class Holder:
        pass

    o = Holder()
    weakref.finalize(o, x.free)
    del o


@racy("free")
def tuple_dropped(e: Bench):
    t = (e.pool.allocate(UNIT, stream=e.a), 1)
    e.b.wait_stream(e.a)
    e.b.launch(kernel, t[0].ptr)
    del t


@correct()
def tuple_passed_and_dropped(e: Bench):
    t = (e.pool.allocate(UNIT, stream=e.a), 1)
    e.b.wait_stream(e.a)
    e.b.launch(kernel, t)
    del t


@racy("unordered")
def three_stage_ring_bug(e: Bench):
    bufs = [e.take() for _ in range(3)]
    for i in range(6):
        b = bufs[i % 3]
        e.a.launch(kernel, b)
        e.b.wait_stream(e.a)
        e.b.launch(kernel, b)
        e.c.wait_stream(e.b)
        e.c.launch(kernel, reads(b))


@correct()
def three_stage_ring(e: Bench):
    bufs = [e.take() for _ in range(3)]
    done = [None] * 3
    for i in range(9):
        b = bufs[i % 3]
        if done[i % 3]:
            e.a.wait_event(done[i % 3])
        e.a.launch(kernel, b)
        e.b.wait_stream(e.a)
        e.b.launch(kernel, b)
        e.c.wait_stream(e.b)
        e.c.launch(kernel, reads(b))
        done[i % 3] = e.c.record_event()
    e.a.wait_stream(e.c)


@racy("unordered")
def three_stage_ring_event_too_early(e: Bench):
    bufs = [e.take() for _ in range(3)]
    done = [None] * 3
    for i in range(9):
        b = bufs[i % 3]
        if done[i % 3]:
            e.a.wait_event(done[i % 3])
        e.a.launch(kernel, b)
        e.b.wait_stream(e.a)
        done[i % 3] = e.b.record_event()
        e.b.launch(kernel, b)
