"""Ctrl-C ends waits for a GPU, waits inside launched functions are refused, and a wait ends with the work.

How long waits take beside the driver's own is printed by `benchmarks/waits.py`.
"""

from __future__ import annotations

import pytest
from interrupting import run_interrupted
from programs import assert_quiet, run_program

pytestmark = pytest.mark.gpu

CALLS = {
    "stream": ("", "stream.synchronize()"),
    "event": ("", "event.synchronize()"),
    "device": ("", "device.synchronize()"),
    "close": ("", "pool.close()"),
    "trim": ("", "pool.trim(wait=True)"),
    "suspend": ("", "pool.suspend(keep='discard')"),
    "host_wait": ("y = vram.Stream(device); x.free()", "pool.allocate('64MiB', stream=y)"),
}
"""What runs before the call, and the call that waits."""


@pytest.mark.parametrize("call", CALLS)
def test_a_wait_is_interrupted_and_nothing_has_changed(call: str) -> None:
    prepare, wait = CALLS[call]
    ended = run_interrupted("cuda:0", wait, prepare=prepare)
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
