"""Which branches does a function take, and which items does a loop touch?"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
from racing import Bench, correct, racy


@correct(on="host")
def closure_writes_own_row(e: Bench):
    x = e.take()
    m = np.asarray(x).reshape(2, -1)
    e.b.wait_stream(e.a)

    def w(i):
        m[i] = i

    e.a.launch(w, 0)
    e.b.launch(w, 1)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def closure_writes_same_row(e: Bench):
    x = e.take()
    m = np.asarray(x).reshape(2, -1)
    e.b.wait_stream(e.a)

    def w(i, j):
        m[i] = j

    e.a.launch(w, 1, 0)
    e.b.launch(w, 1, 1)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def enumerate_zip_write(e: Bench):
    xs = [np.asarray(e.take()) for _ in range(2)]
    ys = [1, 2]
    e.b.wait_stream(e.a)

    def w():
        for a, v in zip(xs, ys, strict=True):
            a[:] = v

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@correct(on="host")
def list_index_const(e: Bench):
    xs = [np.asarray(e.take()) for _ in range(2)]
    e.b.wait_stream(e.a)

    def w0():
        xs[0][:] = 1

    def w1():
        xs[-1][:] = 2

    e.a.launch(w0)
    e.b.launch(w1)
    e.a.wait_stream(e.b)


@correct(on="host")
def dict_by_fstring_key(e: Bench):
    d = {f"l{i}": np.asarray(e.take()) for i in range(2)}
    e.b.wait_stream(e.a)

    def w(i):
        d[f"l{i}"][:] = 1

    e.a.launch(w, 0)
    e.b.launch(w, 1)
    e.a.wait_stream(e.b)


@correct(on="host")
def attribute_by_getattr_arg(e: Bench):
    class S:
        pass

    s = S()
    s.a = np.asarray(e.take())
    s.b = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(name):
        getattr(s, name)[:] = 1

    e.a.launch(w, "a")
    e.b.launch(w, "b")
    e.a.wait_stream(e.b)


@correct(on="host")
def chunked_range_loop(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(lo, hi):
        for i in range(lo, hi):
            m[i] = i

    e.a.launch(w, 0, 100)
    e.b.launch(w, 100, 200)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def chunked_range_loop_overlap(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(lo, hi):
        for i in range(lo, hi):
            m[i] = i

    e.a.launch(w, 0, 101)
    e.b.launch(w, 100, 200)
    e.a.wait_stream(e.b)


@correct(on="host")
def class_workers_disjoint_slices(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    class W:
        def __init__(s, i):
            s.lo, s.hi = i * 100, i * 100 + 100

        def run(s):
            m[s.lo : s.hi] = 1

    e.a.launch(W(0).run)
    e.b.launch(W(1).run)
    e.a.wait_stream(e.b)


@correct(on="host")
def conditional_write_not_taken(e: Bench):
    m = np.asarray(e.take())
    n = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(which):
        (m if which else n)[:] = 1

    e.a.launch(w, True)
    e.b.launch(w, False)
    e.a.wait_stream(e.b)


@correct(on="host")
def match_statement(e: Bench):
    m = np.asarray(e.take())
    n = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(k):
        match k:
            case 0:
                m[:] = 1
            case 1:
                n[:] = 1

    e.a.launch(w, 0)
    e.b.launch(w, 1)
    e.a.wait_stream(e.b)


@correct(on="host")
def if_branch_by_arg(e: Bench):
    m = np.asarray(e.take())
    n = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(k):
        if k == 0:
            m[:] = 1
        else:
            n[:] = 1

    e.a.launch(w, 0)
    e.b.launch(w, 1)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def flag_set_in_loop(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(n):
        done = False
        for _ in range(n):
            if done:
                m[:] = 1
            done = True

    e.a.launch(w, 3)
    e.b.launch(w, 3)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def parameter_changed_in_loop(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(i, n):
        while i < n:
            if i == 2:
                m[0] = 1
            i += 1

    e.a.launch(w, 0, 5)
    e.b.launch(w, 0, 5)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def index_advances(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(i, n):
        while i < n:
            m[i] = 1
            i += 1

    e.a.launch(w, 0, 5)
    e.b.launch(w, 3, 8)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def nonlocal_flag(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)
    ready = False

    def setter():
        nonlocal ready
        ready = True

    def w():
        if ready:
            m[:] = 1

    e.a.launch(setter)
    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def early_return(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(skip):
        if skip:
            return
        m[:] = 1

    e.a.launch(w, False)
    e.b.launch(w, False)
    e.a.wait_stream(e.b)


@correct(on="host")
def early_return_taken(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(skip):
        if skip:
            return
        m[:] = 1

    e.a.launch(w, False)
    e.b.launch(w, True)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def raise_and_except(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(bad):
        try:
            if bad:
                raise ValueError
        except ValueError:
            m[:] = 1

    e.a.launch(w, True)
    e.b.launch(w, True)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def finally_clause(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(k):
        try:
            if k:
                return
        finally:
            m[:] = k

    e.a.launch(w, 1)
    e.b.launch(w, 1)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def and_or_conditions(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(a, b):
        if (a and not b) or a is None:
            m[:] = 1

    e.a.launch(w, 1, 0)
    e.b.launch(w, None, 0)
    e.a.wait_stream(e.b)


@correct(on="host")
def and_or_conditions_false(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(a, b):
        if (a and not b) or a is None:
            m[:] = 1

    e.a.launch(w, 1, 0)
    e.b.launch(w, 1, 1)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def chained_comparison(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(k):
        if 0 < k < 10:
            m[:] = 1

    e.a.launch(w, 1)
    e.b.launch(w, 2)
    e.a.wait_stream(e.b)


@correct(on="host")
def chained_comparison_out(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(k):
        if 0 < k < 10:
            m[:] = 1

    e.a.launch(w, 1)
    e.b.launch(w, 20)
    e.a.wait_stream(e.b)


@correct(on="host")
def strided_range(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(start):
        for i in range(start, 100, 2):
            m[i] = 1

    e.a.launch(w, 0)
    e.b.launch(w, 1)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def strided_range_overlap(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(start, step):
        for i in range(start, 100, step):
            m[i] = 1

    e.a.launch(w, 0, 2)
    e.b.launch(w, 1, 3)
    e.a.wait_stream(e.b)


@correct(on="host")
def blocks_by_loop(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(lo, hi):
        for i in range(lo, hi):
            m[i * 64 : (i + 1) * 64] = i

    e.a.launch(w, 0, 8)
    e.b.launch(w, 8, 16)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def blocks_by_loop_overlap(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(lo, hi):
        for i in range(lo, hi):
            m[i * 64 : (i + 1) * 64] = i

    e.a.launch(w, 0, 9)
    e.b.launch(w, 8, 16)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def countdown(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(n):
        for i in range(n, 0, -1):
            m[i] = i

    e.a.launch(w, 5)
    e.b.launch(w, 9)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def range_over_len(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w():
        for i in range(len(m)):
            m[i] = 1

    e.a.launch(w)
    e.b.launch(w)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def break_in_loop(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(stop):
        for i in range(10):
            if stop:
                break
            m[i] = 1
        else:
            m[50] = 2
        m[60] = 3

    e.a.launch(w, True)
    e.b.launch(w, True)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def while_true_break(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(n):
        while True:
            n -= 1
            if n < 0:
                break
        m[:] = 1

    e.a.launch(w, 2)
    e.b.launch(w, 2)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def nested_if(e: Bench):
    m = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(a, b):
        if a:
            if b:
                pass
            else:
                m[:] = 1
        elif b:
            m[:] = 2

    e.a.launch(w, 1, 0)
    e.b.launch(w, 0, 1)
    e.a.wait_stream(e.b)


@racy("unordered", on="host")
def ternary_assign(e: Bench):
    m = np.asarray(e.take())
    n = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(k):
        t = m if k else n
        t[:] = 1

    e.a.launch(w, 1)
    e.b.launch(w, 2)
    e.a.wait_stream(e.b)


@correct(on="host")
def ternary_assign_apart(e: Bench):
    m = np.asarray(e.take())
    n = np.asarray(e.take())
    e.b.wait_stream(e.a)

    def w(k):
        t = m if k else n
        t[:] = 1

    e.a.launch(w, 1)
    e.b.launch(w, 0)
    e.a.wait_stream(e.b)


@correct(on="host")
def struct_of_arrays_fields(e: Bench):
    m = np.asarray(e.take()).view([("a", "f4"), ("b", "f4")])
    e.b.wait_stream(e.a)

    def w(f):
        m[f] = 1

    e.a.launch(w, "a")
    e.b.launch(w, "b")
    e.a.wait_stream(e.b)


@correct(on="host")
def even_odd_rows(e: Bench):
    m = np.asarray(e.take()).reshape(64, 64)
    e.b.wait_stream(e.a)

    def w(p):
        m[p::2] = 1

    e.a.launch(w, 0)
    e.b.launch(w, 1)
    e.a.wait_stream(e.b)


@correct(on="host")
def two_d_tile_by_args(e: Bench):
    m = np.asarray(e.take()).reshape(64, 64)
    e.b.wait_stream(e.a)

    def w(i, j):
        m[i : i + 32, j : j + 32] = 1

    e.a.launch(w, 0, 0)
    e.b.launch(w, 0, 32)
    e.a.wait_stream(e.b)
