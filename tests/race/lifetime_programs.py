"""When does memory go, and to whom? Frees, reuse, arenas, growable buffers, pools and plans."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
from racing import MIB, UNIT, Bench, correct, kernel, racy

import vram
from vram.race.checker import reads

# ---- free -------------------------------------------------------------------------------------------------


@racy("free")
def freed_while_another_stream_reads(e: Bench):
    x = e.take()
    e.b.launch(kernel, reads(x.ptr))
    x.free()


@correct()
def freed_after_record_stream(e: Bench):
    x = e.take()
    e.b.launch(kernel, x.ptr)
    x.record_stream(e.b)
    x.free()


@racy("free")
def record_stream_of_another_stream(e: Bench):
    x = e.take()
    e.b.launch(kernel, x.ptr)
    x.record_stream(e.c)
    x.free()


@correct()
def record_stream_covers_later_work_too(e: Bench):
    x = e.take()
    x.record_stream(e.b)
    e.b.launch(kernel, x.ptr)
    x.free()


@correct()
def record_stream_of_a_stream_that_waited(e: Bench):
    x = e.take()
    e.b.launch(kernel, x.ptr)
    e.c.wait_stream(e.b)
    x.record_stream(e.c)
    x.free()


@racy("free")
def raw_pointer_freed(e: Bench):
    p = e.pool.malloc(UNIT, e.a)
    e.b.launch(kernel, p)
    e.pool.free(p)


@correct()
def raw_pointer_recorded(e: Bench):
    p = e.pool.malloc(UNIT, e.a)
    e.b.launch(kernel, p)
    e.pool.record_stream(p, e.b)
    e.pool.free(p)


@racy("free")
def dropped_while_a_pointer_is_used(e: Bench):
    x = e.pool.allocate(UNIT, stream=e.a)
    e.b.launch(kernel, x.ptr)
    del x


@correct()
def dropped_while_the_work_holds_it(e: Bench):
    x = e.pool.allocate(UNIT, stream=e.a)
    e.b.launch(kernel, x)
    del x


@correct()
def dropped_after_the_work_that_held_it_has_finished(e: Bench):
    x = e.pool.allocate(UNIT, stream=e.a)
    e.b.launch(kernel, x)
    e.device.backend.stream_synchronize(e.b.handle)  # behind the checker's back
    del x


@correct(on="host")
def dropped_while_an_array_of_it_is_used(e: Bench):
    x = e.pool.allocate(UNIT, stream=e.a)
    e.b.launch(kernel, np.asarray(x))
    del x


@correct()
def with_block_that_waits(e: Bench):
    with e.take() as x:
        e.b.launch(kernel, x)
        e.b.synchronize()


@racy("free")
def with_block_that_does_not_wait(e: Bench):
    with e.take() as x:
        e.b.launch(kernel, reads(x))


@racy("free")
def freed_by_a_launched_function(e: Bench):
    x = e.take()
    e.c.launch(kernel, reads(x.ptr))
    e.b.launch(x.free)
    e.b.synchronize()


@correct()
def freed_by_a_launched_function_behind_the_use(e: Bench):
    x = e.take()
    e.b.launch(kernel, x.ptr)
    e.b.launch(x.free)
    e.b.synchronize()


@racy("use after free")
def pointer_used_after_free(e: Bench):
    x = e.take()
    p = x.ptr
    x.free()
    e.a.launch(kernel, p)


@racy("use after free")
def pointer_in_a_dict_used_after_free(e: Bench):
    x = e.take()
    state = {"p": x.ptr}
    x.free()
    e.a.launch(kernel, state)


@racy("use after free")
def closure_over_a_pointer_used_after_free(e: Bench):
    x = e.take()
    p = x.ptr
    x.free()
    e.a.launch(lambda: kernel(p))


@correct()
def list_that_remembers_old_pointers(e: Bench):
    x = e.take()
    seen = [x.ptr]
    x.free()
    e.a.launch(lambda: seen.append(0))


# ---- reuse ------------------------------------------------------------------------------------------------


@racy("unordered")
def fill_free_reallocate_and_use_elsewhere(e: Bench):
    x = e.take()
    x.fill(1)
    x.free()
    y = e.take()
    e.b.launch(kernel, y.ptr)
    e.a.wait_stream(e.b)


@racy("unordered")
def launch_free_reallocate_and_use_elsewhere(e: Bench):
    x = e.take()
    e.a.launch(kernel, x.ptr)
    x.free()
    y = e.take()
    e.b.launch(kernel, {"y": y})
    e.a.wait_stream(e.b)


@correct()
def fill_free_reallocate_and_wait(e: Bench):
    x = e.take()
    x.fill(1)
    x.free()
    y = e.take()
    e.b.wait_stream(e.a)
    e.b.launch(kernel, y.ptr)
    e.a.wait_stream(e.b)


@correct()
def reused_on_its_own_stream(e: Bench):
    for _ in range(10):
        x = e.take()
        x.fill(1)
        e.a.launch(kernel, x.ptr)
        x.free()


@correct()
def reused_after_the_host_has_waited(e: Bench):
    x = e.take()
    x.fill(1)
    e.a.synchronize()
    x.free()
    y = e.take()
    e.b.launch(kernel, y.ptr)
    e.b.synchronize()
    y.free()


@racy("unordered")
def reused_three_times_and_used_elsewhere(e: Bench):
    x = e.take()
    x.fill(1)
    x.free()
    for _ in range(3):
        e.take().free()
    y = e.take()
    e.b.launch(kernel, reads(y.ptr))
    e.a.wait_stream(e.b)


@correct()
def new_memory_elsewhere(e: Bench):
    x = e.take(3 * MIB)
    e.b.launch(kernel, x.ptr)
    e.a.wait_stream(e.b)
    x.free()


@correct()
def a_part_that_nobody_used_is_reused_elsewhere(e: Bench):
    x = e.take(2 * UNIT)
    e.a.launch(kernel, first(x))
    x.free()
    y = e.take(2 * UNIT)
    e.b.launch(kernel, second(y))
    e.a.wait_stream(e.b)


class Part:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False)}


def first(x: vram.Buffer) -> Part:
    return Part(x.ptr, UNIT)


def second(x: vram.Buffer) -> Part:
    return Part(x.ptr + UNIT, UNIT)


# ---- arenas -----------------------------------------------------------------------------------------------


@correct()
def arena_told_of_the_stream(e: Bench):
    arena = e.arena()
    x = arena.allocate(UNIT)
    e.b.wait_stream(e.a)
    e.b.launch(kernel, x)
    arena.record_stream(e.b)
    arena.reset()


@correct()
def arena_told_of_the_stream_beforehand(e: Bench):
    arena = e.arena()
    arena.record_stream(e.b)
    x = arena.allocate(UNIT)
    e.b.launch(kernel, x)
    arena.reset()


@racy("free")
def arena_told_before_the_last_reset_only(e: Bench):
    arena = e.arena()
    arena.record_stream(e.b)
    arena.reset()
    x = arena.allocate(UNIT)
    e.b.launch(kernel, x.ptr)
    arena.reset()


@racy("free")
def arena_not_told(e: Bench):
    arena = e.arena()
    x = arena.allocate(UNIT)
    e.b.launch(kernel, x.ptr)
    arena.reset()


@racy("free")
def scope_ends_while_its_memory_is_used(e: Bench):
    arena = e.arena()
    with arena.scope():
        x = arena.allocate(UNIT)
        e.b.launch(kernel, x.ptr)


@correct()
def scope_that_waits(e: Bench):
    arena = e.arena()
    with arena.scope():
        x = arena.allocate(UNIT)
        e.b.launch(kernel, x.ptr)
        e.a.wait_stream(e.b)
    e.a.launch(kernel, arena.allocate(UNIT))


@racy("free")
def arena_closed_while_its_memory_is_used(e: Bench):
    arena = e.arena()
    x = arena.allocate(UNIT)
    e.b.launch(kernel, x.ptr)
    del x
    arena.close()


@correct()
def arena_closed_after_its_stream_waited(e: Bench):
    arena = e.arena()
    x = arena.allocate(UNIT)
    e.b.launch(kernel, x.ptr)
    e.a.wait_stream(e.b)
    del x
    arena.close()


@correct(on="model")
def arena_whose_stream_waits_at_the_reset(e: Bench):
    arena, y = e.arena(), e.take()
    arena.record_stream(e.b)
    e.b.launch(kernel, y)
    arena.reset()
    e.a.launch(kernel, y)


@racy("unordered", on="model")
def memory_of_an_arena_used_by_a_third_stream(e: Bench):
    arena = e.arena()
    x = arena.allocate(UNIT)
    e.b.launch(kernel, x.ptr)
    arena.record_stream(e.b)
    arena.reset()
    y = arena.allocate(UNIT)
    assert y.ptr == x.ptr
    e.c.launch(kernel, y.ptr)
    e.device.synchronize()


@racy("use after free")
def pointer_of_an_arena_after_its_reset(e: Bench):
    arena = e.arena()
    p = arena.allocate(UNIT).ptr
    arena.reset()
    e.a.launch(kernel, p)


# ---- growable buffers -------------------------------------------------------------------------------------


@racy("free")
def growable_closed_while_it_is_used(e: Bench):
    g = e.growable()
    e.b.launch(kernel, g.ptr)
    g.close()


@correct()
def growable_closed_after_record_stream(e: Bench):
    g = e.growable()
    e.b.launch(kernel, g.ptr)
    g.record_stream(e.b)
    g.close()


@racy("free")
def growable_shrunk_below_what_is_used(e: Bench):
    g = e.growable(8 * MIB)
    e.b.launch(kernel, reads(g.ptr + 6 * MIB))
    g.resize(4 * MIB)


@correct()
def growable_shrunk_beyond_what_is_used(e: Bench):
    g = e.growable(8 * MIB)
    e.b.launch(kernel, reads(g.view(0, MIB)))
    g.resize(4 * MIB)
    e.b.synchronize()


@correct()
def growable_shrunk_after_record_stream(e: Bench):
    g = e.growable(8 * MIB)
    e.b.launch(kernel, g.ptr + 6 * MIB)
    g.record_stream(e.b)
    g.resize(4 * MIB)


@racy("use after free")
def pointer_beyond_what_is_left(e: Bench):
    g = e.growable(8 * MIB)
    g.resize(2 * MIB)
    e.a.launch(kernel, g.ptr + 6 * MIB)


@correct()
def grown_again_and_used_there(e: Bench):
    g = e.growable(8 * MIB)
    g.view().fill(1)
    g.resize(2 * MIB)
    g.resize(8 * MIB)
    e.a.launch(kernel, g.ptr + 6 * MIB)
    g.view().fill(2)


@racy("unordered")
def grown_again_and_used_elsewhere(e: Bench):
    g = e.growable(8 * MIB)
    g.view().fill(1)
    g.resize(2 * MIB)
    g.resize(8 * MIB)
    e.b.launch(kernel, g.ptr + 6 * MIB)
    g.record_stream(e.b)


@racy("unordered")
def workspace_used_on_a_second_stream(e: Bench):
    scratch = vram.Scratch(e.a, pool=e.pool, max_size=64 * MIB)
    with scratch.get(MIB) as x:
        e.b.launch(kernel, x.ptr)
    with scratch.get(MIB) as y:
        e.a.launch(kernel, y.ptr)
    e.device.synchronize()


@correct()
def workspaces_in_turn(e: Bench):
    scratch = vram.Scratch(e.a, pool=e.pool, max_size=64 * MIB)
    for _ in range(100):
        with scratch.get(MIB) as x:
            e.a.launch(kernel, x.ptr)
    scratch.close()


# ---- pools and plans --------------------------------------------------------------------------------------


@correct()
def pool_closed_while_work_runs(e: Bench):
    pool = vram.Pool(e.device)
    x = pool.allocate(UNIT, stream=e.a)
    e.b.launch(kernel, x.ptr)
    pool.close()


@correct()
def pool_that_closes_waits_for_the_device(e: Bench):
    x, pool = e.take(), vram.Pool(e.device)
    pool.allocate(UNIT, stream=e.a)
    e.b.launch(kernel, x)
    pool.close()
    e.a.launch(kernel, x)


@racy("use after free")
def pointer_of_a_closed_pool(e: Bench):
    pool = vram.Pool(e.device)
    p = pool.malloc(UNIT, e.a)
    pool.close()
    e.a.launch(kernel, reads(p))


@correct()
def allocated_on_another_thread(e: Bench):
    x = e.pool.allocate_async(UNIT, stream=e.a).result()
    e.b.launch(kernel, x)
    x.record_stream(e.b)
    x.free()


@correct()
def pipeline(e: Bench):
    if e.device.kind == "host":
        with vram.Pipeline(lambda x: x + 1, device="host", pool=e.pool, chunk="8KiB", depth=2) as pipe:
            assert pipe.run(np.zeros(20_000)).sum() == 20_000


@correct()
def pinned_staging(e: Bench):
    with vram.PinnedPool(e.device) as pinned:
        for _ in range(3):
            source, target = pinned.allocate(UNIT), e.take()
            target.copy_from(source, stream=e.b)
            source.free()
            target.free()
        e.device.synchronize()


@racy("unordered")
def pinned_source_overwritten(e: Bench):
    with vram.PinnedPool(e.device) as pinned:
        source, target = pinned.allocate(UNIT), e.take()
        target.copy_from(source, stream=e.b)
        source.fill(1, stream=e.c)
        e.device.synchronize()


@correct()
def from_before_the_check(e: Bench):
    e.a.launch(kernel, e.take())
