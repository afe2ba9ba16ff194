"""Ctrl-C ends waits for a GPU, and waits inside launched functions are refused.

How long waits take beside the driver's own is printed by `benchmarks/waits.py`.
"""

from __future__ import annotations

import pytest
from programs import assert_quiet, run_program

pytestmark = pytest.mark.gpu

PREPARE = """
    import os, signal, threading, vram
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stream = vram.Stream("cuda:0")
    pool = vram.Pool("cuda:0", limit="64MiB", cross_stream="never")
    x = pool.allocate("32MiB", stream=stream)
    event = vram.Event("cuda:0")
    gate = threading.Event()

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        gate.wait()  # only the handler's exception can end the wait

    x.fill(1)
    stream.launch(interrupt)
    event.record(stream)
    try:
        CALL
    except KeyboardInterrupt:
        print("interrupted")
    gate.set()
    stream.synchronize()
    assert pool.check() is None
    assert not pool.closed and not stream.closed
    pool.close()
"""

CALLS = {
    "stream": "stream.synchronize()",
    "event": "event.synchronize()",
    "device": 'vram.Device("cuda:0").synchronize()',
    "close": "pool.close()",
    "trim": "pool.trim(wait=True)",
    "suspend": "pool.suspend(keep='discard')",
    "host_wait": "y = vram.Stream('cuda:0'); x.free(); pool.allocate('64MiB', stream=y)",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wait_is_interrupted_and_nothing_has_changed(call: str) -> None:
    ended = run_program(PREPARE.replace("CALL", CALLS[call]))
    assert_quiet(ended)
    assert ended.stdout == "interrupted\n"


INSIDE = """
    import vram
    stream, other = vram.Stream("cuda:0"), vram.Stream("cuda:0")
    pool = vram.Pool("cuda:0")
    x = pool.allocate("1MiB", stream=other)
    event = other.record_event()
    codes = []

    def wait(call):
        try:
            call()
        except vram.DeviceError as error:
            codes.append(error.code)

    for call in (stream.synchronize, other.synchronize, event.synchronize,
                 vram.Device("cuda:0").synchronize, pool.close):
        stream.launch(wait, call)
    stream.synchronize()
    assert codes == ["deadlock"] * 5, codes
    assert not pool.closed and pool.check() is None
"""


def test_waits_inside_launched_functions_are_refused() -> None:
    assert_quiet(run_program(INSIDE))
