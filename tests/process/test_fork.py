"""Forks: the child never touches what the parent holds, is told so by type, and may start afresh."""

from __future__ import annotations

import pytest
from programs import FORK, assert_quiet, run_program

pytestmark = pytest.mark.fork

PREAMBLE = f"""
    {FORK}
    import gc, os, sys, threading
    import vram
    from vram import Device, DeviceError, Pool, Stream
"""


def test_the_child_is_told_and_the_parent_goes_on() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            pool = Pool("host")
            stream = Stream("host")
            buffer, address = pool.allocate(1 << 20), pool.malloc(4096)
            ours = [pool.allocate(size, stream=stream) for size in (1, 1 << 20, 40 << 20)]
            buffer.fill(7)
            stream.synchronize()
            pool.device.synchronize()

            def body():
                assert pool.closed
                for use in (
                    lambda: pool.allocate(1),
                    lambda: pool.malloc(1),
                    lambda: pool.free(address),
                    lambda: pool.allocate_batch([1, 2]),
                    lambda: pool.warmup({4096: 2}),
                    lambda: pool.allocate_async(1).result(),
                    lambda: pool.record_stream(address, 0),
                    pool.trim,
                    pool.coalesce,
                    buffer.free,
                    lambda: buffer.fill(1),
                    lambda: buffer.copy_from(bytes(1 << 20)),
                    lambda: memoryview(buffer),
                    lambda: buffer.record_stream(0),
                    lambda: Stream(pool.device),
                ):
                    refused(use)
                pool.close()

            child(body)
            again = pool.allocate(1 << 20)
            assert set(bytes(buffer)) == {7}
            assert pool.stats().live == 6 and pool.check() is None
            pool.free(address)
            """,
        )
    )


def test_an_arena_is_the_parents() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            import numpy as np
            pool = Pool("host")
            held = {"arena": vram.Arena(pool), "scope": vram.Arena(pool, checked=True)}
            arena, array = held["arena"], held["arena"].empty(1000)
            array[:] = 7
            called = []
            for each in held.values():
                each.on_reset(called.append, 1)
            held["open"] = held["scope"].scope()
            held["open"].__enter__()

            def body():
                assert arena.closed and "closed" in repr(arena)
                for use in (lambda: arena.empty(1), arena.reset, arena.trim, arena.scope().__enter__):
                    refused(use)
                arena.close()
                held.clear()
                assert not called, "what a callback would release is the parent's"

            child(body)
            assert arena.empty(10).shape == (10,) and (array == 7).all() and not called
            arena.reset()
            assert called == [1]
            assert arena.check() is None and pool.check() is None
            """,
        )
    )


def test_dropping_what_was_inherited_is_silent() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            held = {"pool": Pool("host"), "stream": Stream("host")}
            held["buffers"] = [held["pool"].allocate(size) for size in (0, 4096, 1 << 20, 40 << 20)]
            held["recorded"] = held["pool"].allocate(4096)
            held["recorded"].record_stream(held["stream"])
            held["view"] = memoryview(held["pool"].allocate(4096))
            held["event"] = held["stream"].record_event()
            held["cycle"] = held

            child(held.clear)
            held["buffers"][1].fill(3)
            held["pool"].device.synchronize()
            assert set(bytes(held["buffers"][1])) == {3} and held["pool"].check() is None
            """,
        )
    )


def test_a_child_that_ends_by_itself_reports_no_error() -> None:
    """Not by os._exit: the interpreter of the child is taken down with everything it inherited."""
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            pool, stream = Pool("host"), Stream("host")
            buffers = [pool.allocate(size, stream=stream) for size in (4096, 1 << 20, 40 << 20)]
            event = stream.record_event()
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            buffers[0].fill(1)
            pool.device.synchronize()
            """,
        )
    )


def test_the_child_may_start_afresh() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            parents = Pool("host")
            kept = parents.allocate(1 << 20)
            kept.fill(1)
            parents.device.synchronize()

            def body():
                device = Device("host")
                assert device != parents.device
                with Pool(device) as pool, Stream(device) as stream:
                    buffer = pool.allocate(1 << 20, stream=stream)
                    buffer.fill(2)
                    stream.synchronize()
                    assert set(bytes(buffer)) == {2}
                    stream.launch(lambda: None)
                    stream.synchronize()
                    assert pool.allocate_async(4096).result().size == 4096
                    refused(lambda: parents.allocate(1))
                child(lambda: Pool("host").allocate(1 << 20))

            child(body)
            child(body)
            assert set(bytes(kept)) == {1}
            """,
        )
    )


def test_a_fork_while_threads_and_streams_are_at_work() -> None:
    """Locks that other threads held at the fork stay locked in the child; nothing there may want them."""
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            pool = Pool("host")
            stop = threading.Event()
            stream = Stream("host")

            def churn():
                mine = Stream("host")
                while not stop.is_set():
                    buffers = [pool.allocate(size, stream=mine) for size in (4096, 3 << 20, 100)]
                    pool.stats()
                    buffers[0].fill(1)

            threads = [threading.Thread(target=churn) for _ in range(3)]
            for thread in threads:
                thread.start()
            kept = pool.allocate(1 << 20)

            def body():
                refused(lambda: pool.allocate(4096))
                refused(lambda: pool.allocate(3 << 20))
                refused(kept.free)
                repr(pool)
                pool.close()
                with Pool(Device("host")) as fresh:
                    fresh.allocate(4096).free()

            for _ in range(10):
                child(body)
            stop.set()
            for thread in threads:
                thread.join()
            kept.free()
            assert pool.check() is None and pool.stats().live == 0
            """,
        )
    )


def test_every_call_of_an_inherited_pool_is_refused_while_the_parent_is_busy() -> None:
    """Whatever lock a thread of the parent held at the fork, no call waits for it."""
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            pools = [Pool("host"), vram.DriverPool(Device.model("1GiB")), Pool("host", journal=100)]
            kept = [pool.allocate(4096) for pool in pools]
            stop = threading.Event()

            def churn(pool):
                while not stop.is_set():
                    pool.allocate(3 << 20)
                    pool.raw_stats(), pool.raw_snapshot(), pool.journal(), pool.config()

            threads = [threading.Thread(target=churn, args=(pool,)) for pool in pools for _ in range(2)]
            for thread in threads:
                thread.start()

            def body():
                for pool, buffer in zip(pools, kept):
                    pointer = buffer.ptr
                    for use in (
                        pool.stats, pool.snapshot, pool.journal, pool.trim, pool.check, pool.raw_stats,
                        pool.raw_snapshot, pool.raw_holders, pool.config, pool.coalesce, pool.mark,
                        pool.leaks, pool.patterns, pool.reset_peak, pool.live_bytes,
                        lambda: pool.limit, lambda: setattr(pool, "limit", 1 << 30),
                        lambda: pool.measure().__enter__(), lambda: pool.journal_start(10),
                        lambda: pool.reconfigure({}), lambda: pool.info(pointer),
                        lambda: pool.free(pointer), lambda: pool.record_stream(pointer, 0),
                        lambda: pool.on_oom(print), lambda: pool.allocate_batch([1]),
                        lambda: pool.reserve(1), lambda: pool.warmup({512: 1}),
                        lambda: buffer.fill(1), buffer.free,
                    ):
                        refused(use)
                    repr(pool), repr(buffer)
                    pool.close()

            for _ in range(20):
                child(body)
            stop.set()
            for thread in threads:
                thread.join()
            """,
        )
    )


def test_a_fork_with_asynchronous_requests_under_way() -> None:
    """The threads that would serve them do not exist in the child; leaving a pool there must not wait."""
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            from vram import OutOfMemory
            gate = threading.Event()
            pool = Pool("host", limit="4MiB")
            held = pool.allocate("4MiB")
            pool.on_oom(lambda: gate.wait(30))
            futures = [pool.allocate_async("1MiB") for _ in range(4)]

            def body():
                with pool:
                    pass
                assert pool.closed

            child(body)
            held.free()
            gate.set()
            assert [future.result().size for future in futures] == [1 << 20] * 4
            """,
        )
    )


def test_the_process_wide_manager_starts_afresh_in_the_child() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            manager = vram.get_memory_manager()
            address = manager.allocate_memory(1 << 20)

            def body():
                fresh = vram.get_memory_manager()
                mine = fresh.allocate_memory(4096)
                fresh.free_memory(mine, 4096)

            child(body)
            manager.free_memory(address, 1 << 20)
            """,
        )
    )


def test_a_model_is_refused_in_the_child_as_well() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            pool = Pool(Device.model("1GiB"))
            buffer = pool.allocate(1 << 20)

            def body():
                refused(lambda: pool.allocate(1))
                refused(buffer.free)
                with Pool(Device.model("1GiB")) as fresh:
                    fresh.allocate(1 << 20)

            child(body)
            buffer.free()
            """,
        )
    )


def test_page_locked_memory_stays_the_parents() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            held = {"pool": vram.PinnedPool("host"), "memory": bytearray(1 << 20)}
            held["pin"] = vram.pin(held["memory"], "host")
            buffer = held["buffer"] = held["pool"].allocate(1 << 20)
            view = memoryview(buffer)
            view[:4] = b"text"

            def body():
                assert held["pool"].closed and bytes(view[:4]) == b"text"
                view[:4] = b"mine"
                refused(lambda: held["pool"].allocate(1))
                held["pin"].close()
                held["memory"].append(1)
                held.clear()
                with vram.PinnedPool("host") as pool, vram.pin(bytearray(10), "host"):
                    assert memoryview(pool.allocate(1 << 20))[0] == 0

            child(body)
            assert bytes(view[:4]) == b"text" and not held["pin"].closed
            del view
            held["pin"].close()
            held["pool"].close()
            """,
        )
    )


def test_a_fork_in_the_middle_of_swaps() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            import logging

            logging.getLogger("vram").setLevel(logging.ERROR)  # the line at the first spill
            pool = Pool(Device.model("64MiB"), spill="64MiB")
            buffer = pool.allocate("16MiB", tag="old")
            done = threading.Event()

            def swap():
                while not done.is_set():
                    buffer.spill()
                    buffer.prefetch()
                    pool.suspend("old", keep="mapped")
                    pool.resume("old")

            def body():
                for use in (buffer.spill, buffer.prefetch, lambda: pool.suspend(keep="mapped"), pool.resume):
                    refused(use)
                with Pool(Device.model("32MiB"), spill="64MiB") as own:  # spills by itself
                    kept = [own.allocate("4MiB") for _ in range(12)]
                    assert own.stats().spilled and own.check() is None
                pool.close()

            swapping = threading.Thread(target=swap)
            swapping.start()
            for _ in range(5):
                child(body)
            done.set()
            swapping.join()
            assert buffer.spilled == 0 and pool.check() is None
            """,
        )
    )
