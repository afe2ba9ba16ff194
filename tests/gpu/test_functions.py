"""Python functions as work of a CUDA stream: in order, their errors told, and never against the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from programs import assert_quiet, run_program

from vram import Device, Pool, Stream

pytestmark = pytest.mark.gpu

MIB = 1 << 20
MakePool = Callable[..., Pool]


def test_functions_run_in_the_order_of_their_stream(device: Device) -> None:
    order: list[int] = []
    with Stream(device) as stream:
        for number in range(200):
            stream.launch(order.append, number)
        stream.synchronize()
    assert order == list(range(200))


@pytest.mark.real_gpu
def test_work_behind_a_function_waits_for_it(make_pool: MakePool, device: Device) -> None:
    pool, gate = make_pool(), threading.Event()
    with Stream(device) as stream:
        buffer = pool.allocate(MIB, stream=stream)
        buffer.fill(1)
        stream.launch(gate.wait, 30.0)
        buffer.fill(2)
        assert not stream.query()
        gate.set()
        data = bytearray(MIB)
        buffer.copy_to(data)
        assert set(data) == {2}


def test_what_a_function_raises_comes_out_of_synchronize(device: Device) -> None:
    def fail() -> None:
        raise ZeroDivisionError("on the stream")

    with Stream(device) as stream:
        stream.launch(fail)
        with pytest.raises(ZeroDivisionError, match="on the stream"):
            stream.synchronize()
        stream.synchronize()


# A call that waits for the stream while it has the GIL would wait forever for a function that needs it.
PREAMBLE = """
    import time
    from vram import Pool, Stream
    pool, stream = Pool("cuda:0"), Stream("cuda:0")
    buffer, other = (pool.allocate("1MiB", stream=stream) for _ in range(2))
    done = []
    def slow():
        for _ in range(20):
            time.sleep(0.01)
"""
BEHIND = {
    "copies to the host": "buffer.copy_to(bytearray(1 << 20))",
    "copies from the host": "buffer.copy_from(bytes(1 << 20))",
    "more fills than the driver queues": "for _ in range(5000): buffer.fill(1)",
    "more copies than the driver queues": "for _ in range(5000): buffer.copy_from(other)",
    "more functions than the driver queues": "for _ in range(5000): stream.launch(done.append, 1)",
    "frees and allocations": """
for _ in range(5000):
    buffer.record_stream(0)
    buffer.free()
    buffer = pool.allocate("1MiB", stream=stream)
""",
    "the end of the pool": "pool.close()",
}


@pytest.mark.fork
@pytest.mark.parametrize("what", BEHIND)
def test_nothing_holds_the_gil_while_it_waits_for_a_function(what: str) -> None:
    assert_quiet(
        run_program(
            PREAMBLE,
            "stream.launch(slow)",
            BEHIND[what],
            "stream.launch(done.append, 2); stream.synchronize()",
        )
    )
