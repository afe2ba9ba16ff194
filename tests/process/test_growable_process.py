"""Growable buffers at the ends of processes: exit with live ones, forks, and the thread that works ahead."""

from __future__ import annotations

import pytest
from programs import FORK, assert_quiet, run_program

OPEN = """
    import gc, os, sys, time
    import vram
    from vram import Device, DeviceError, GrowableBuffer, Pool, Stream

    pool, stream = Pool("host"), Stream("host")
    buffers = [GrowableBuffer("64MiB", pool, stream=stream, size=n << 20) for n in range(5)]
    view = buffers[4].view()
    view.fill(7)
    while buffers[4].ready == 0:
        time.sleep(0.001)
"""


def test_the_process_may_end_with_live_buffers_and_a_thread_ahead() -> None:
    assert_quiet(run_program(OPEN))


def test_a_pool_that_goes_ends_its_thread() -> None:
    assert_quiet(
        run_program(
            OPEN,
            """
            def threads():
                return len(os.listdir("/proc/self/task"))
            before = threads()
            stream.synchronize()
            pool.close()
            assert buffers[0].closed
            while threads() >= before:  # the system lists a thread a little longer than a join waits for it
                time.sleep(0.001)
            assert threads() == before - 1, (before, threads())
            """,
        )
    )


@pytest.mark.fork
def test_the_child_of_a_fork_is_told_and_the_parent_goes_on() -> None:
    assert_quiet(
        run_program(
            FORK,
            OPEN,
            """
            stream.synchronize()

            def body():
                global buffers, view, pool
                assert buffers[4].closed
                for use in (lambda: buffers[4].resize(0), buffers[4].view, lambda: view.fill(1)):
                    refused(use)
                buffers[3].close()
                del use, buffers, view, pool
                gc.collect()
                with GrowableBuffer("8MiB", Pool("host"), size="4MiB") as own:
                    own.view().fill(1)
                    own.device.synchronize()

            child(body)
            buffers[4].resize("40MiB")
            assert bytes(memoryview(view)[:2]) == bytes([7, 7])
            assert pool.check() is None
            """,
        )
    )
