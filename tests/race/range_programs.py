"""Which bytes does a use touch? Parts of one allocation that overlap, and parts that do not."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from racing import HALF, MIB, UNIT, Bench, correct, kernel, racy

from vram.race.checker import reads


def array(e: Bench, *shape: int) -> Any:
    """Bytes of stream a as an array of NumPy's."""
    return np.asarray(e.take()).reshape(shape or -1)


def both(e: Bench, first: Any, second: Any) -> None:
    e.a.launch(kernel, first)
    e.b.launch(kernel, second)


# ---- halves -----------------------------------------------------------------------------------------------


@correct()
def halves_by_pointer(e: Bench):
    x = e.take()
    both(e, x.ptr, x.ptr + HALF)


@racy("unordered")
def same_pointer(e: Bench):
    x = e.take()
    both(e, x.ptr + HALF, x.ptr + HALF)


@racy("unordered")
def buffer_and_a_pointer_into_it(e: Bench):
    x = e.take()
    both(e, x.ptr + HALF, x)


@correct(on="host")
def halves_by_slice(e: Bench):
    x = array(e)
    both(e, x[:HALF], x[HALF:])


@racy("unordered", on="host")
def slices_that_share_a_byte(e: Bench):
    x = array(e)
    both(e, x[: HALF + 1], x[HALF:])


@correct(on="host")
def halves_by_memory_view(e: Bench):
    x = memoryview(e.take())
    both(e, x[:HALF], x[HALF:])


@racy("unordered", on="host")
def memory_views_that_overlap(e: Bench):
    x = memoryview(e.take())
    both(e, x[: HALF + 8], x[HALF:])


@correct(on="host")
def a_slice_and_the_pointer_behind_it(e: Bench):
    x = e.take()
    both(e, np.asarray(x)[:HALF], x.ptr + HALF)


@racy("unordered", on="host")
def a_slice_and_the_pointer_before_it(e: Bench):
    x = e.take()
    both(e, np.asarray(x)[HALF:], x.ptr)


@correct()
def halves_by_ctypes_array(e: Bench):
    x, half = e.take(), ctypes.c_ubyte * HALF
    both(e, half.from_address(x.ptr), half.from_address(x.ptr + HALF))


@racy("unordered")
def ctypes_arrays_that_overlap(e: Bench):
    x, part = e.take(), ctypes.c_ubyte * (HALF + 1)
    both(e, part.from_address(x.ptr), part.from_address(x.ptr + HALF))


@correct(on="host")
def halves_by_memset(e: Bench):
    x = e.take()
    e.a.launch(ctypes.memset, x.ptr, 1, HALF)
    e.b.launch(ctypes.memset, x.ptr + HALF, 2, HALF)


@racy("unordered", on="host")
def memsets_that_overlap(e: Bench):
    x = e.take()
    e.a.launch(ctypes.memset, x.ptr, 1, HALF + 1)
    e.b.launch(ctypes.memset, x.ptr + HALF, 2, HALF)


@correct(on="host")
def two_memmoves_from_one_source(e: Bench):
    x, y, z = e.take(), e.take(), e.take()
    e.a.launch(ctypes.memmove, y.ptr, x.ptr, UNIT)
    e.b.launch(ctypes.memmove, z.ptr, x.ptr, UNIT)


@racy("unordered", on="host")
def memmove_into_what_is_read(e: Bench):
    x, y = e.take(), e.take()
    e.a.launch(ctypes.string_at, x.ptr, UNIT)
    e.b.launch(ctypes.memmove, x.ptr, y.ptr, UNIT)


class Exporter:
    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


@correct()
def halves_by_array_interface(e: Bench):
    x = e.take()
    both(e, Exporter(x.ptr, (HALF // 4,)), Exporter(x.ptr + HALF, (HALF // 4,)))


@racy("unordered")
def array_interfaces_that_overlap(e: Bench):
    x = e.take()
    both(e, Exporter(x.ptr, (HALF // 4 + 1,)), Exporter(x.ptr + HALF, (HALF // 4,)))


@correct()
def columns_by_array_interface(e: Bench):
    x = e.take()
    both(e, Exporter(x.ptr, (16, 8), (64, 4)), Exporter(x.ptr + 32, (16, 8), (64, 4)))


@racy("unordered")
def columns_by_array_interface_that_overlap(e: Bench):
    x = e.take()
    both(e, Exporter(x.ptr, (16, 9), (64, 4)), Exporter(x.ptr + 32, (16, 8), (64, 4)))


# ---- strides ----------------------------------------------------------------------------------------------


@correct(on="host")
def even_and_odd(e: Bench):
    x = array(e)
    both(e, x[::2], x[1::2])


@racy("unordered", on="host")
def every_second_and_every_third(e: Bench):
    x = array(e)
    both(e, x[::2], x[1::3])


@correct(on="host")
def left_and_right_columns(e: Bench):
    x = array(e, 64, 64)
    both(e, x[:, :32], x[:, 32:])


@racy("unordered", on="host")
def rows_and_columns(e: Bench):
    x = array(e, 64, 64)
    both(e, x[3], x[:, 7])


@correct(on="host")
def backwards_and_the_other_half(e: Bench):
    x = array(e)
    both(e, x[:HALF][::-1], x[HALF:])


@racy("unordered", on="host")
def backwards_over_everything(e: Bench):
    x = array(e)
    both(e, x[::-1], x[:1])


@correct(on="host")
def backwards_with_gaps(e: Bench):
    x = array(e)
    both(e, x[::-2], x[::2])


@racy("unordered", on="host")
def transposed(e: Bench):
    x = array(e, 64, 64)
    both(e, x.T, x[63])


@correct(on="host")
def fields_of_records(e: Bench):
    x = array(e).view([("left", "u4"), ("right", "u4")])
    both(e, x["left"], x["right"])


@correct(on="host")
def strided_memory_views(e: Bench):
    x = memoryview(e.take())
    both(e, x[::2], x[1::2])


@correct(on="host")
def checkerboard(e: Bench):
    x = array(e, 64, 64)
    both(e, [x[::2, ::2], x[1::2, 1::2]], [x[1::2, ::2], x[::2, 1::2]])


@correct(on="host")
def empty_slice(e: Bench):
    x = array(e)
    both(e, x, x[10:10])


@racy("unordered", on="host")
def broadcast_array(e: Bench):
    x = array(e)
    both(e, np.broadcast_to(x[5:6], (100,)), x)


@correct(on="host")
def slices_in_a_closure(e: Bench):
    x = array(e)

    def left():
        x[:HALF] = 1

    def right():
        x[HALF:] = 2

    e.a.launch(left)
    e.b.launch(right)


@racy("unordered", on="host")
def slices_in_a_closure_that_overlap(e: Bench):
    x = array(e)

    def left():
        x[: HALF + 1] = 1

    def right():
        x[2048:] = 2

    e.a.launch(left)
    e.b.launch(right)


@racy("free", on="host")
def a_part_is_used_when_all_is_freed(e: Bench):
    x = e.take()
    e.b.launch(kernel, reads(x.ptr + HALF))
    x.free()


@racy("unordered", on="host")
def many_parts_and_then_all(e: Bench):
    x = array(e)
    for i in range(0, UNIT, 64):
        e.a.launch(kernel, x[i : i + 64])
    e.b.launch(kernel, x[UNIT - 1 :])


@correct(on="host")
def many_parts_on_two_streams(e: Bench):
    x = array(e)
    for i in range(0, UNIT, 64):
        (e.a if i % 128 else e.b).launch(kernel, x[i : i + 64])


@correct(on="host")
def only_the_part_that_was_waited_for(e: Bench):
    x = array(e)
    e.a.launch(kernel, x[:HALF])
    done = e.a.record_event()
    e.a.launch(kernel, x[HALF:])
    e.b.wait_event(done)
    e.b.launch(kernel, x[:HALF])


@racy("unordered", on="host")
def more_than_the_part_that_was_waited_for(e: Bench):
    x = array(e)
    e.a.launch(kernel, x[:HALF])
    done = e.a.record_event()
    e.a.launch(kernel, x[HALF:])
    e.b.wait_event(done)
    e.b.launch(kernel, x)


# ---- growables, arenas, the pool's own copies -------------------------------------------------------------


@correct()
def views_of_a_growable(e: Bench):
    g = e.growable()
    g.view(0, 2 * MIB).fill(1)
    g.view(2 * MIB, 2 * MIB).fill(2, stream=e.b)


@racy("unordered")
def views_of_a_growable_that_overlap(e: Bench):
    g = e.growable()
    g.view(0, 2 * MIB + 1).fill(1)
    g.view(2 * MIB, 2 * MIB).fill(2, stream=e.b)


@correct()
def views_of_a_growable_in_launches(e: Bench):
    g = e.growable()
    both(e, g.view(0, 100), g.view(100, 100))
    g.record_stream(e.b)


@racy("unordered")
def a_view_and_the_whole_growable(e: Bench):
    g = e.growable()
    both(e, g.view(100, 100), g)
    g.record_stream(e.b)


@correct()
def arrays_of_a_growable(e: Bench):
    g = e.growable()
    both(e, g.array(100, "f4"), g.array(100, "f4", offset=400))
    g.record_stream(e.b)
    e.device.synchronize()


@racy("unordered")
def arrays_of_a_growable_that_overlap(e: Bench):
    g = e.growable()
    both(e, g.array(100, "f4"), g.array(100, "f4", offset=396))
    g.record_stream(e.b)
    e.device.synchronize()


@correct()
def a_growable_appended_on_one_stream_and_read_on_another(e: Bench):
    g = e.growable(size=MIB)
    g.view(0, MIB).fill(1)
    e.b.wait_stream(e.a)
    start = g.grow(8 * MIB)
    g.view(start, 8 * MIB).fill(2)
    e.b.launch(kernel, reads(g.view(0, MIB)))
    g.record_stream(e.b)


@correct()
def neighbours_in_an_arena(e: Bench):
    arena = e.arena()
    x, y = arena.allocate(256), arena.allocate(256)
    both(e, x, y)
    arena.record_stream(e.b)


@racy("unordered")
def one_piece_of_an_arena(e: Bench):
    arena = e.arena()
    x = arena.allocate(256)
    both(e, x, x)
    arena.record_stream(e.b)


@correct()
def copies_from_one_source_on_two_streams(e: Bench):
    x, y, z = e.take(), e.take(), e.take()
    y.copy_from(x, stream=e.a)
    z.copy_from(x, stream=e.b)


@racy("unordered")
def copies_to_one_target_on_two_streams(e: Bench):
    x, y, z = e.take(), e.take(), e.take()
    x.copy_to(z, stream=e.a)
    y.copy_to(z, stream=e.b)


@correct()
def batch_of_neighbours(e: Bench):
    x, y = e.pool.allocate_batch([512, 512], e.a)
    both(e, x, y)
    e.a.wait_stream(e.b)
