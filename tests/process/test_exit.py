"""The end of the interpreter with everything still in use: exit code 0 and not a word on stderr."""

from __future__ import annotations

import pytest
from programs import assert_quiet, run_program

pytestmark = pytest.mark.fork

PREAMBLE = """
    import atexit, gc, sys, threading, time
    import vram
    from vram import Device, Event, Pool, Stream
"""

ENDINGS = {
    "a global pool with buffers": """
        pool = Pool("host")
        buffers = [pool.allocate(size) for size in (0, 1, 4096, 1 << 20, 40 << 20)]
        raw = pool.malloc(1 << 20)
        view = memoryview(buffers[2])
    """,
    "a closed pool with buffers": """
        pool = Pool("host")
        buffers = [pool.allocate(4096) for _ in range(10)]
        pool.close()
    """,
    "a model": """
        pool = Pool(Device.model("1GiB", manual=True))
        stream = Stream(pool.device)
        buffer = pool.allocate(1 << 20, stream=stream)
        buffer.fill(1)
        buffer.record_stream(None)
        stream.launch(print, "never")
    """,
    "a thread in the middle of swaps": """
        pool = Pool(Device.model("64MiB"), spill="64MiB")
        buffer = pool.allocate("16MiB")
        started = threading.Event()

        def swap():
            while True:
                buffer.spill()
                buffer.prefetch()
                started.set()
                pool.suspend(keep="mapped")
                pool.resume()

        threading.Thread(target=swap, daemon=True).start()
        started.wait()
    """,
    "the manager": """
        manager = vram.get_memory_manager()
        address = manager.allocate_memory(1 << 20)
        batch = manager.allocate_batch([4096] * 10)
    """,
    "arenas with arrays, scopes and work": """
        pool, stream = Pool("host"), Stream("host")
        arenas = [vram.Arena(pool, checked=True), vram.Arena(pool, stream=stream)]
        arenas.append(vram.Arena("host", pinned=True))
        held = [arena.empty(1000) for arena in arenas]
        scope = arenas[0].scope()
        scope.__enter__()
        stream.launch(time.sleep, 0.2)
        for arena in arenas[1:]:
            arena.record_stream(stream)
            arena.reset()
        held += [arena.empty(1000) for arena in arenas]
        arenas[1].close()
    """,
    "cycles": """
        class Node:
            pass
        pool = Pool("host")
        for size in (4096, 1 << 20, 3 << 20):
            node = Node()
            node.self, node.buffer, node.pool = node, pool.allocate(size), pool
            node.stream = Stream("host")
            node.stream.launch(lambda node=node: node.buffer)
        pool.node = node
        gc.disable()
        del pool, node
    """,
    "a cycle of a pool, a busy stream and its buffer": """
        cycle = {"pool": Pool("host"), "stream": Stream("host")}
        cycle["buffer"] = cycle["pool"].allocate("64MiB", stream=cycle["stream"])
        cycle["self"] = cycle
        for _ in range(100):
            cycle["buffer"].fill(1)
        del cycle
        gc.collect()
    """,
    "a busy stream and its buffer in a module with functions": """
        def busy(pool, stream):
            buffer = pool.allocate("64MiB", stream=stream)
            for _ in range(100):
                buffer.fill(1)
            return buffer
        pool, stream = Pool("host"), Stream("host")
        buffer = busy(pool, stream)
    """,
    "a callback that knows its pool": """
        pool = Pool("host", limit="4MiB")
        buffer = pool.allocate("4MiB")
        pool.on_oom(lambda size, stream: bool(pool.stats()))
        pool.me = pool
        del pool
    """,
    "a stream busy in a function": """
        stream = Stream("host")
        pool = Pool("host")
        buffer = pool.allocate(1 << 20, stream=stream)
        stream.launch(time.sleep, 0.2)
        stream.launch(lambda: buffer.fill(1))
        buffer.fill(3)
        buffer.record_stream(None)
    """,
    "a stream waiting for another": """
        one, two = Stream("host"), Stream("host")
        pool = Pool("host")
        one.launch(time.sleep, 0.2)
        two.wait_stream(one)
        buffer = pool.allocate(1 << 20, stream=one)
        buffer.record_stream(two)
        del buffer
        taken = pool.allocate(1 << 20, stream=two)
    """,
    "functions that allocate while the program ends": """
        pool, stream = Pool("host"), Stream("host")
        def work(left=200):
            pool.allocate(4096, stream=stream).fill(1)
            if left:
                try:
                    stream.launch(work, left - 1)
                except vram.DeviceError:
                    pass
        work()
    """,
    "daemon threads that allocate": """
        pool = Pool("host")
        def churn():
            stream = Stream("host")
            while True:
                buffers = [pool.allocate(size, stream=stream) for size in (100, 4096, 3 << 20)]
                buffers[1].fill(1)
                pool.stats()
        threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
    """,
    "daemon threads that wait for the device": """
        pool = Pool("host", limit="4MiB")
        stream, gate = Stream("host"), threading.Event()
        buffer = pool.allocate("4MiB")
        buffer.record_stream(stream)
        stream.launch(gate.wait, 1.0)
        buffer.free()
        started = threading.Event()
        def wait():
            started.set()
            pool.allocate("4MiB")
        threading.Thread(target=wait, daemon=True).start()
        started.wait()
    """,
    "asynchronous requests": """
        pool = Pool("host")
        futures = [pool.allocate_async(4096) for _ in range(50)]
    """,
    "an allocation after everything at exit": """
        pool = Pool("host")
        def late():
            buffer = pool.allocate(1 << 20)
            buffer.fill(1)
            pool.device.synchronize()
            Pool("host").allocate(1)
        atexit.register(late)
    """,
    "buffers that go when modules go": """
        class Keeper:
            def __init__(self, pool):
                self.pool, self.buffer = pool, pool.allocate(1 << 20)
            def __del__(self):
                self.buffer.free()
                self.buffer = self.pool.allocate(4096)
        keeper = Keeper(Pool("host"))
        sys.keeper = keeper
    """,
    "arrays over buffers": """
        import numpy
        pool = Pool("host")
        arrays = [numpy.from_dlpack(pool.allocate(4096)) for _ in range(10)]
        capsule = pool.allocate(4096).__dlpack__()
        del pool
    """,
    "an error that holds a report": """
        try:
            Pool("host", limit="2MiB").allocate("4MiB")
        except vram.OutOfMemory as error:
            kept = error
    """,
    "sys.exit in the middle": """
        with Pool("host") as pool:
            buffer = pool.allocate(1 << 20)
            sys.exit(0)
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_without_errors(ending: str) -> None:
    assert_quiet(run_program(PREAMBLE, ENDINGS[ending]))


def test_an_error_of_a_launched_function_is_told_at_the_end() -> None:
    ended = run_program(PREAMBLE, "stream = Stream('host')\nstream.launch(lambda: 1 / 0)\n")
    assert ended.returncode == 0 and "ZeroDivisionError" in ended.stderr
