"""What orders two uses? Streams, events, waits of the host, and what looks like order and is none."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import threading

import numpy as np
from racing import MIB, UNIT, Bench, correct, kernel, racy

import vram
from vram.race.checker import reads

# ---- streams and events -----------------------------------------------------------------------------------


@correct()
def stream_waits_for_stream(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.wait_stream(e.a)
    e.b.launch(kernel, x)
    e.a.wait_stream(e.b)
    x.free()


@racy("unordered")
def stream_waits_before_the_work(e: Bench):
    x = e.take()
    e.b.wait_stream(e.a)
    e.a.launch(kernel, x)
    e.b.launch(kernel, x)


@racy("unordered")
def the_wrong_stream_waits(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.a.wait_stream(e.b)
    e.b.launch(kernel, x)


@correct()
def order_by_way_of_a_third_stream(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.c.wait_stream(e.a)
    e.b.wait_stream(e.c)
    e.b.launch(kernel, x)


@racy("unordered")
def third_stream_too_early(e: Bench):
    x = e.take()
    e.b.wait_stream(e.c)
    e.a.launch(kernel, x)
    e.c.wait_stream(e.a)
    e.b.launch(kernel, x)


@racy("unordered")
def event_recorded_too_early(e: Bench):
    x, event = e.take(), vram.Event(e.device)
    event.record(e.a)
    e.a.launch(kernel, x)
    e.b.wait_event(event)
    e.b.launch(kernel, x)


@racy("unordered")
def event_that_was_never_recorded(e: Bench):
    x, event = e.take(), vram.Event(e.device)
    e.a.launch(kernel, x)
    e.b.wait_event(event)
    e.b.launch(kernel, x)


@racy("unordered")
def event_recorded_again_elsewhere(e: Bench):
    x, event = e.take(), vram.Event(e.device)
    e.a.launch(kernel, x)
    event.record(e.a)
    event.record(e.c)
    e.b.wait_event(event)
    e.b.launch(kernel, x)


@correct()
def event_waited_for_and_then_recorded_again(e: Bench):
    x, event = e.take(), vram.Event(e.device)
    e.a.launch(kernel, x)
    event.record(e.a)
    e.b.wait_event(event)
    event.record(e.c)
    e.b.launch(kernel, x)


@racy("unordered")
def default_stream_orders_nothing(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    vram.Stream.default(e.device).launch(kernel, reads(x))


@correct()
def ping_pong(e: Bench):
    x = e.take()
    for _ in range(20):
        e.a.launch(kernel, x)
        e.b.wait_stream(e.a)
        e.b.launch(kernel, x)
        e.a.wait_stream(e.b)


@racy("unordered")
def ping_pong_without_the_way_back(e: Bench):
    x = e.take()
    for _ in range(2):
        e.a.launch(kernel, x)
        e.b.wait_stream(e.a)
        e.b.launch(kernel, x)


@correct()
def double_buffering(e: Bench):
    bufs, free = [e.take(), e.take()], [vram.Event(e.device), vram.Event(e.device)]
    for i in range(8):
        e.a.wait_event(free[i % 2])
        e.a.launch(kernel, bufs[i % 2])
        e.b.wait_stream(e.a)
        e.b.launch(kernel, reads(bufs[i % 2]))
        free[i % 2].record(e.b)


@racy("unordered")
def double_buffering_with_an_event_before_the_work(e: Bench):
    bufs, free = [e.take(), e.take()], [vram.Event(e.device), vram.Event(e.device)]
    for i in range(8):
        e.a.wait_event(free[i % 2])
        e.a.launch(kernel, bufs[i % 2])
        e.b.wait_stream(e.a)
        free[i % 2].record(e.b)
        e.b.launch(kernel, reads(bufs[i % 2]))


@correct()
def two_readers(e: Bench):
    x = e.take()
    x.fill(1)
    for stream in (e.b, e.c):
        stream.wait_stream(e.a)
        stream.launch(kernel, reads(x))


@racy("unordered")
def writer_after_one_of_two_readers(e: Bench):
    x = e.take()
    for stream in (e.b, e.c):
        stream.launch(kernel, reads(x))
    e.a.wait_stream(e.b)
    e.a.launch(kernel, x)


@correct()
def writer_after_both_readers(e: Bench):
    x = e.take()
    for stream in (e.b, e.c):
        stream.launch(kernel, reads(x))
        e.a.wait_stream(stream)
    e.a.launch(kernel, x)


# ---- the host waits ---------------------------------------------------------------------------------------


@correct()
def host_waits_for_a_stream(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    e.b.synchronize()
    e.a.launch(kernel, x)
    x.free()


@racy("unordered")
def host_waits_for_the_wrong_stream(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    e.c.synchronize()
    e.a.launch(kernel, x)


@correct()
def host_waits_for_an_event(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    e.b.record_event().synchronize()
    e.a.launch(kernel, x)


@racy("unordered")
def host_waits_for_an_older_event(e: Bench):
    x = e.take()
    event = e.b.record_event()
    e.b.launch(kernel, x)
    event.synchronize()
    e.a.launch(kernel, x)


@correct()
def host_waits_for_the_device(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    e.device.synchronize()
    e.a.launch(kernel, x)


@correct()
def host_waits_for_what_waited(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    e.c.wait_stream(e.b)
    e.c.synchronize()
    e.a.launch(kernel, x)


@correct()
def another_thread_waits(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    thread = threading.Thread(target=e.b.synchronize)
    thread.start()
    thread.join()
    e.a.launch(kernel, x)


@correct()
def copy_to_the_host_waits(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    x.copy_to(bytearray(UNIT), stream=e.b)
    e.a.launch(kernel, x)


@racy("unordered")
def copy_to_the_host_on_another_stream(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    x.copy_to(bytearray(UNIT))


@racy("unordered")
def copy_from_the_host_into_what_is_read(e: Bench):
    x = e.take()
    e.b.launch(kernel, reads(x))
    x.copy_from(bytes(UNIT))


@correct(on="model")
def host_memory_is_ready_when_it_is_copied(e: Bench):
    with vram.Pool("host") as pool, vram.Stream("host") as stream:
        x, h = e.take(), pool.allocate(UNIT, stream=stream)
        stream.launch(kernel, h)
        stream.synchronize()
        x.copy_from(h)


@correct(on="model")
def host_memory_is_written_before_it_is_copied(e: Bench):
    with vram.Pool("host") as pool, vram.Stream("host") as stream:
        x, h = e.take(), pool.allocate(UNIT, stream=stream)
        stream.launch(kernel, h)
        x.copy_from(h)
        stream.synchronize()


@racy("unordered", on="model")
def array_of_host_memory_is_still_written_when_it_is_copied(e: Bench):
    with vram.Pool("host") as pool, vram.Stream("host") as stream:
        x, h = e.take(), pool.allocate(UNIT, stream=stream)
        stream.launch(kernel, h)
        x.copy_from(np.asarray(h))
        stream.synchronize()


@correct(on="model")
def host_memory_is_read_before_it_is_copied_into(e: Bench):
    with vram.Pool("host") as pool, vram.Stream("host") as stream:
        x, h = e.take(), pool.allocate(UNIT, stream=stream)
        stream.launch(kernel, reads(h))
        x.copy_to(h)
        stream.synchronize()


@correct()
def query_that_says_yes(e: Bench):
    x = e.take()
    e.b.launch(kernel, x)
    e.b.synchronize()
    assert e.b.query()
    e.a.launch(kernel, x)


# ---- suspend ----------------------------------------------------------------------------------------------


@correct()
def suspend_and_resume_wait(e: Bench):
    x, y = e.take(4 * MIB), e.take(4 * MIB, e.b)
    y.fill(1)
    x.fill(1, stream=e.b)
    e.pool.suspend()
    e.pool.resume()
    e.a.launch(kernel, x, y)
    e.a.synchronize()
    x.free()


@correct()
def suspend_waits_for_recorded_streams(e: Bench):
    x = e.take(4 * MIB)
    e.b.launch(kernel, x)
    x.record_stream(e.b)
    e.pool.suspend()
    e.pool.resume()
    e.c.launch(kernel, x)
    e.c.synchronize()


@racy("free")
def suspend_of_memory_in_use_on_an_unknown_stream(e: Bench):
    x = e.take(4 * MIB)
    e.b.launch(kernel, x)
    e.pool.suspend()
    e.pool.resume()


@racy("use after free")
def use_while_suspended(e: Bench):
    x = e.take(4 * MIB)
    e.pool.suspend()
    e.a.launch(kernel, reads(x.ptr))
    e.a.synchronize()
    e.pool.resume()


@correct()
def use_after_resume(e: Bench):
    x = e.take(4 * MIB)
    e.pool.suspend(keep="discard")
    e.pool.resume()
    e.a.launch(kernel, x)


@correct()
def suspend_of_one_tag(e: Bench):
    with vram.tag("old"):
        x = e.take(4 * MIB)
    y = e.take(4 * MIB)
    x.fill(1)
    e.pool.suspend(tag="old")
    e.a.launch(kernel, y)
    e.pool.resume(tag="old")
    e.b.launch(kernel, x)
    e.b.synchronize()


@correct()
def suspend_async(e: Bench):
    x = e.take(4 * MIB)
    x.fill(1)
    e.pool.suspend_async().result()
    e.pool.resume_async().result()
    e.b.launch(kernel, x)
    e.b.synchronize()


# ---- graphs -----------------------------------------------------------------------------------------------


@correct(on="model")
def graph_launched_on_its_own_stream(e: Bench):
    x = e.take()
    with e.a.capture() as graph:
        e.a.launch(kernel, x)
    e.a.launch(kernel, x)
    graph.launch()
    e.a.synchronize()


@racy("unordered", on="model")
def graph_launched_beside_other_work(e: Bench):
    x = e.take()
    with e.a.capture() as graph:
        e.a.launch(kernel, x)
    e.b.launch(kernel, x)
    graph.launch(e.a)
    e.device.synchronize()


@racy("unordered", on="model")
def graph_launched_on_two_streams(e: Bench):
    x = e.take()
    with e.a.capture() as graph:
        x.fill(1)
    graph.launch(e.a)
    graph.launch(e.b)
    e.device.synchronize()


@correct(on="model")
def graph_that_is_captured_and_not_launched(e: Bench):
    x = e.take()
    with e.a.capture() as graph:
        e.a.launch(kernel, x)
    e.b.launch(kernel, x)
    e.device.synchronize()
    graph.close()


@correct(on="model")
def graph_launched_behind_other_work(e: Bench):
    x = e.take()
    with e.a.capture() as graph:
        e.a.launch(kernel, x)
    e.b.launch(kernel, x)
    e.a.wait_stream(e.b)
    graph.launch()
    e.b.wait_stream(e.a)
    e.b.launch(kernel, x)
    e.device.synchronize()


# ---- what is no order -------------------------------------------------------------------------------------


@racy("unordered", on="host")
def a_lock_is_no_order(e: Bench):
    x, done = e.take(), threading.Event()

    def first(memory):
        done.set()

    e.b.launch(first, x)
    done.wait(10)
    e.a.launch(kernel, x)


@racy("free")
def closing_a_stream_is_no_order(e: Bench):
    x = e.take()
    other = vram.Stream(e.device)
    other.launch(kernel, x)
    other.close()
    x.free()


@racy("unordered")
def allocating_is_no_order(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.take(stream=e.b)
    e.b.launch(kernel, x)


@correct()
def declared_uses_in_order(e: Bench):
    x = e.take()
    checker = vram.race.checker._active
    assert checker is not None
    checker.use(x, e.a)
    e.b.wait_stream(e.a)
    checker.use(x.ptr, e.b)
    e.a.wait_stream(e.b)
    x.free()


@racy("unordered")
def declared_uses_without_order(e: Bench):
    x = e.take()
    checker = vram.race.checker._active
    assert checker is not None
    checker.use({"x": [x]}, e.a)
    checker.use(x.ptr, e.b)
