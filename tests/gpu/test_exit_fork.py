"""Exit, fork and spawn with a GPU in use: the end is quiet and quick, the child never calls the driver."""

from __future__ import annotations

import time

import pytest
from programs import FORK, assert_quiet, run_program

pytestmark = [pytest.mark.gpu, pytest.mark.fork]

SOON = 30.0  # seconds for a whole program, the start of the interpreter and the driver included

PREAMBLE = """
    import gc, os, sys, threading, time
    import vram
    from vram import Device, DeviceError, Pool, Stream

    def busy(pool, stream, times=300):
        buffer = pool.allocate("4GiB", stream=stream)
        for _ in range(times):
            buffer.fill(1)
        return buffer
"""

ENDINGS = {
    "live buffers": """
        pool = Pool("cuda:0")
        buffers = [pool.allocate(size) for size in (0, 1, 4096, 1 << 20, 40 << 20)]
        raw = pool.malloc(1 << 20)
    """,
    "running kernels": """
        pool, stream = Pool("cuda:0"), Stream("cuda:0")
        buffer = busy(pool, stream)
        assert not stream.query()
    """,
    "running kernels and memory pending behind them": """
        pool, stream = Pool("cuda:0"), Stream("cuda:0")
        buffer = busy(pool, stream)
        used = pool.allocate("64MiB")
        used.record_stream(stream)
        used.free()
        taken = pool.allocate("64MiB", stream=stream)
    """,
    "plain segments and running kernels": """
        pool, stream = Pool("cuda:0", pages=False), Stream("cuda:0")
        buffer = busy(pool, stream)
        del buffer
    """,
    "a function on a stream": """
        pool, stream = Pool("cuda:0"), Stream("cuda:0")
        buffer = busy(pool, stream)
        stream.launch(time.sleep, 0.1)
        stream.launch(lambda: None)
    """,
    "a closed pool with buffers": """
        pool = Pool("cuda:0")
        buffers = [pool.allocate("32MiB") for _ in range(10)]
        pool.close()
    """,
    "the manager": """
        manager = vram.get_memory_manager()
        address = manager.allocate_memory(1 << 20)
    """,
    "daemon threads that allocate": """
        pool = Pool("cuda:0")
        def churn():
            stream = Stream("cuda:0")
            while True:
                buffers = [pool.allocate(size, stream=stream) for size in (100, 4096, 3 << 20)]
                buffers[1].fill(1)
                pool.stats()
        threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
    """,
    "cycles": """
        pool = Pool("cuda:0")
        for size in (4096, 1 << 20, 3 << 20):
            node = {"buffer": pool.allocate(size), "pool": pool, "stream": Stream("cuda:0")}
            node["self"] = node
        pool.node = node
        gc.disable()
        del pool, node
    """,
}


@pytest.mark.parametrize(
    "ending",
    [pytest.param(name, marks=pytest.mark.real_gpu if name == "running kernels" else ()) for name in ENDINGS],
)
def test_the_interpreter_ends_without_errors_and_soon(ending: str) -> None:
    begin = time.monotonic()
    assert_quiet(run_program(PREAMBLE, ENDINGS[ending]))
    assert time.monotonic() - begin < SOON


@pytest.mark.real_gpu
def test_the_child_of_a_fork_is_told_and_the_parent_goes_on() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            FORK,
            """
            pool, stream = Pool("cuda:0"), Stream("cuda:0")
            buffer, address = pool.allocate(1 << 20), pool.malloc(4096)
            buffer.fill(7)
            pool.device.synchronize()

            def body():
                assert pool.closed
                for use in (
                    lambda: pool.allocate(1),
                    lambda: pool.malloc(1),
                    lambda: pool.free(address),
                    lambda: pool.allocate_batch([1, 2]),
                    pool.trim,
                    buffer.free,
                    lambda: buffer.fill(1),
                    lambda: buffer.copy_to(bytearray(1 << 20)),
                    lambda: buffer.record_stream(0),
                    stream.synchronize,
                    lambda: Stream(pool.device),
                    lambda: Device("cuda:0"),
                    lambda: Pool("cuda:0"),
                ):
                    refused(use)
                pool.close()
                with Pool("host") as mine:
                    assert mine.allocate(4096).size == 4096

            child(body)
            child(body)
            data = bytearray(1 << 20)
            buffer.copy_to(data)
            assert set(data) == {7} and pool.check() is None and pool.stats().live == 2
            pool.free(address)
            """,
        )
    )


def test_dropping_what_was_inherited_is_silent() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            FORK,
            """
            held = {"pool": Pool("cuda:0"), "stream": Stream("cuda:0")}
            held["buffers"] = [held["pool"].allocate(size) for size in (0, 4096, 1 << 20, 40 << 20)]
            held["buffers"][2].record_stream(held["stream"])
            held["event"] = held["stream"].record_event()
            held["cycle"] = held

            child(held.clear)
            held["buffers"][1].fill(3)
            held["pool"].device.synchronize()
            assert held["pool"].check() is None
            """,
        )
    )


def test_a_child_that_ends_by_itself_reports_no_error() -> None:
    """Not by os._exit: the interpreter of the child is taken down with everything it inherited."""
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            pool, stream = Pool("cuda:0"), Stream("cuda:0")
            buffers = [pool.allocate(size, stream=stream) for size in (4096, 1 << 20, 40 << 20)]
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            buffers[0].fill(1)
            pool.device.synchronize()
            """,
        )
    )


@pytest.mark.real_gpu
def test_a_spawned_process_has_a_pool_of_its_own() -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            """
            import multiprocessing
            pool = Pool("cuda:0")
            buffer = pool.allocate("64MiB")
            buffer.fill(5)
            theirs = '''
            import vram
            with vram.Pool("cuda:0") as pool:
                buffer, data = pool.allocate("64MiB"), bytearray(64 << 20)
                buffer.fill(6)
                buffer.copy_to(data)
                assert set(data) == {6}
            '''
            import textwrap
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=exec, args=(textwrap.dedent(theirs), {}))
            process.start()
            process.join(60)
            assert process.exitcode == 0, process.exitcode
            data = bytearray(64 << 20)
            buffer.copy_to(data)
            assert set(data) == {5} and pool.check() is None
            """,
        )
    )
