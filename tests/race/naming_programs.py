"""Programs about what code does with what it names: aliases, loops, helpers, views and odd holders."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
import types

import numpy as np
from racing import HALF, Bench, correct, kernel, racy

import vram


@correct(on="host")
def asarray_halves_in_closures(e: Bench):
    x = e.take()

    def left():
        np.asarray(x)[:HALF] = 1

    def right():
        np.asarray(x)[HALF:] = 2

    e.a.launch(left)
    e.b.launch(right)


@correct(on="host")
def memoryview_halves_in_closures(e: Bench):
    x = e.take()
    m = memoryview(x)

    def left():
        m[:HALF] = bytes(HALF)

    def right():
        m[HALF:] = bytes(HALF)

    e.a.launch(left)
    e.b.launch(right)


@racy("unordered", on="host")
def pack_into_memory(e: Bench):
    x = memoryview(e.take())
    e.a.launch(lambda: struct.pack_into("I", x, 0, 1))
    e.b.launch(lambda: struct.unpack_from("I", x, 0))


@racy("unordered", on="host")
def ufunc_at(e: Bench):
    x = np.asarray(e.take())
    e.a.launch(lambda: np.add.at(x, [0, 1], 1))
    e.b.launch(lambda: x.sum())


@correct()
def only_sizes_are_read(e: Bench):
    x = e.take()
    out = []
    e.a.launch(kernel, x)
    e.b.launch(lambda: out.append(x.size))


@racy("unordered")
def module_attribute(e: Bench):
    x = e.take()
    mod = types.ModuleType("mod")
    mod.buf = x
    e.a.launch(kernel, x)
    e.b.launch(lambda: kernel(mod.buf))


@racy("unordered")
def class_attribute_of_argument(e: Bench):
    x = e.take()

    class Holder:
        shared = x

    e.a.launch(kernel, x)
    e.b.launch(kernel, Holder())


@racy("unordered")
def class_itself(e: Bench):
    x = e.take()

    class Holder:
        shared = [x]  # noqa: RUF012

    e.a.launch(kernel, x)
    e.b.launch(kernel, Holder)


@racy("unordered")
def nested_partial_method_args(e: Bench):
    x = e.take()

    class W:
        def go(self, m):
            kernel(m)

    e.a.launch(kernel, x)
    e.b.launch(functools.partial(W().go, [x]))


@racy("unordered")
def lambda_calls_method_with_attr(e: Bench):
    x = e.take()

    class T:
        def __init__(self):
            self.layers = {"w": [x]}

        def fwd(self):
            return self.run(self.layers["w"][0])

        def run(self, m):
            kernel(m)

    t = T()
    e.a.launch(kernel, x)
    e.b.launch(lambda: t.fwd())


@correct()
def trainer_with_two_layers(e: Bench):
    class T:
        def __init__(self):
            self.layers = [e.take(), e.take()]

        def fwd(self, i):
            kernel(self.layers[i])

    t = T()
    e.a.launch(kernel, t.layers[0])
    e.b.launch(t.fwd, 1)


@racy("unordered")
def loop_over_attr(e: Bench):
    class T:
        def __init__(self):
            self.layers = [e.take(), e.take()]

        def fwd(self):
            for layer in self.layers:
                kernel(layer)

    t = T()
    e.a.launch(kernel, t.layers[0])
    e.b.launch(t.fwd)


@racy("unordered")
def dict_items_loop(e: Bench):
    d = {"x": e.take()}

    def run():
        for k, v in d.items():
            if k != "q":
                kernel(v)

    e.a.launch(kernel, d["x"])
    e.b.launch(run)


@racy("unordered")
def tuple_unpack(e: Bench):
    pair = (e.take(), e.take())

    def run():
        p, q = pair  # noqa: RUF059
        kernel(q)

    e.a.launch(kernel, pair[1])
    e.b.launch(run)


@racy("unordered")
def walrus_and_local_alias(e: Bench):
    s = types.SimpleNamespace(x=e.take())

    def run():
        if (y := s.x) is not None:
            z = y
            kernel(z)

    e.a.launch(kernel, s.x)
    e.b.launch(run)


@racy("unordered")
def getattr_by_name(e: Bench):
    s = types.SimpleNamespace(x=e.take())
    e.a.launch(kernel, s.x)
    e.b.launch(lambda: kernel(s.x))


@racy("unordered")
def contextmanager_object(e: Bench):
    x = e.take()

    @contextlib.contextmanager
    def using():
        yield x

    def run():
        with using() as m:
            kernel(m)

    e.a.launch(kernel, x)
    e.b.launch(run)


@racy("unordered")
def inner_generator(e: Bench):
    xs = [e.take()]
    e.a.launch(kernel, xs[0])
    e.b.launch(lambda: list(kernel(q) for q in xs))


@racy("unordered")
def map_with_lambda(e: Bench):
    xs = [e.take()]
    e.a.launch(kernel, xs[0])
    e.b.launch(lambda: list(map(lambda q: kernel(q), xs)))


@correct()
def free_after_event_chain(e: Bench):
    x = e.take()
    ev = vram.Event(e.device)
    e.b.launch(kernel, x.ptr)
    ev.record(e.b)
    e.c.wait_event(ev)
    e.a.wait_stream(e.c)
    x.free()


@racy("free")
def free_with_event_on_wrong_stream(e: Bench):
    x = e.take()
    ev = vram.Event(e.device)
    e.b.launch(kernel, x.ptr)
    ev.record(e.b)
    e.c.wait_event(ev)
    x.free()


@racy("use after free", on="model")
def graph_of_freed_memory(e: Bench):
    x = e.take()
    with e.a.capture() as g:
        x.fill(1)
    x.free()
    g.launch(e.a)
    e.device.synchronize()


@racy("free", on="model")
def graph_running_when_freed(e: Bench):
    x = e.take()
    with e.a.capture() as g:
        e.a.launch(kernel, x)
    g.launch(e.b)
    x.free()
    e.device.synchronize()


@racy("unordered")
def allocate_free_many_then_other_stream(e: Bench):
    xs = [e.take() for _ in range(4)]
    for x in xs:
        x.fill(1)
    for x in xs:
        x.free()
    y = e.take()
    e.b.launch(kernel, y)
    e.a.wait_stream(e.b)


@correct()
def recorded_reuse_elsewhere(e: Bench):
    x = e.take()
    e.b.launch(kernel, x.ptr)
    x.record_stream(e.b)
    x.free()
    e.b.synchronize()
    y = e.take()
    e.a.launch(kernel, y)


@correct()
def malloc_batch_disjoint(e: Bench):
    p = e.pool.malloc_batch([512] * 4, e.a)
    for i, q in enumerate(p):
        (e.a, e.b)[i % 2].launch(kernel, q)
    e.a.wait_stream(e.b)
    for q in p:
        e.pool.free(q)


@racy("free")
def malloc_batch_freed(e: Bench):
    p = e.pool.malloc_batch([512] * 4, e.a)
    e.b.launch(kernel, p)
    e.pool.free(p[2])
    e.a.wait_stream(e.b)


@correct(on="host")
def read_only_views(e: Bench):
    m = memoryview(e.take()).toreadonly()
    e.a.launch(kernel, m)
    e.b.launch(kernel, m)


@correct(on="host")
def non_writeable_arrays(e: Bench):
    x = np.asarray(e.take())
    x = x.view()
    x.flags.writeable = False
    e.a.launch(kernel, x)
    e.b.launch(kernel, x)


@racy("unordered", on="host")
def byref(e: Bench):
    x = e.take()
    p = ctypes.c_void_p(x.ptr)
    e.a.launch(kernel, x)
    e.b.launch(kernel, ctypes.byref(p))


@correct()
def handing_over_by_two_hosts(e: Bench):
    x = e.take()
    done = threading.Event()

    def other():
        e.b.launch(kernel, x)
        e.b.synchronize()
        done.set()

    t = threading.Thread(target=other)
    t.start()
    done.wait()
    t.join()
    e.a.launch(kernel, x)


@racy("unordered")
def np_record_of_pointers(e: Bench):
    x = e.take()
    r = np.zeros(1, [("n", "i4"), ("p", "u8")])
    r["p"] = x.ptr
    e.a.launch(kernel, x)
    e.b.launch(kernel, r)


@racy("unordered")
def int_subclass(e: Bench):
    class P(int):
        pass

    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(kernel, P(x.ptr))


@racy("unordered")
def np_scalar_0d(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(kernel, np.array(x.ptr))


@racy("unordered")
def closure_over_pointer_arith(e: Bench):
    x = e.take()
    p = x.ptr
    e.a.launch(kernel, x)
    e.b.launch(lambda: kernel(p + 64))


@racy("unordered")
def closure_over_np_pointer(e: Bench):
    x = e.take()
    p = np.uint64(x.ptr)
    e.a.launch(kernel, x)
    e.b.launch(lambda: kernel(int(p)))


@racy("unordered", on="host")
def stores_in_a_loop_over_a_dict(e: Bench):
    state = {"x": np.asarray(e.take())}

    def clear():
        for each in state.values():
            each[:] = 0

    e.a.launch(clear)
    e.b.launch(clear)


@correct(on="host")
def items_of_a_list_are_replaced(e: Bench):
    results = [np.asarray(e.take()), None]

    def keep(i):
        results[i] = i

    e.a.launch(kernel, results[0])
    e.b.launch(keep, 1)
