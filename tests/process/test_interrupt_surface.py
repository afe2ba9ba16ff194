"""Ctrl-C during every public call, while the device's streams are at work that does not end.

A call that waits for them is ended by it; any other returns by itself. `surface` knows every public name, so
a call that is added is tried as well, and the watchdog shows one that waits without noticing signals.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import assert_quiet, run_program
from surface import CLASSES

pytestmark = pytest.mark.slow

PROGRAM = """
    import faulthandler, os, signal, sys, threading
    from pathlib import Path
    sys.path.insert(0, {here!r})
    import vram
    from surface import DOCUMENTED, World, calls

    WATCHDOG = 60  # seconds for one call
    kind, folder = {kind!r}, Path({folder!r})
    during = False

    def handler(*_):
        if during:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)

    def press(over):
        while not over.wait(0.1):  # most calls have returned by then
            os.kill(os.getpid(), signal.SIGINT)

    def attempt(name, number):
        global during
        (folder / str(number)).mkdir()
        world = World(folder / str(number))
        call = calls(world, kind)[name]
        gate, over = threading.Event(), threading.Event()
        world.buffer.record_stream(world.other)
        for stream in (world.stream, world.other, vram.Stream.default(world.device)):
            stream.launch(gate.wait)
        world.event.record(world.other)
        interrupted = False
        presses = threading.Thread(target=press, args=(over,))
        presses.start()
        try:
            during = True
            call()
            during = False
        except KeyboardInterrupt:
            during = False
            interrupted = True
        except DOCUMENTED:
            during = False
        over.set()
        presses.join()
        gate.set()
        world.device.synchronize()
        for pool in (world.pool, world.driver_pool, world.pinned_pool):
            assert pool.check() is None, name
        world.recorder.close()
        return interrupted

    # The names are known without a device at work.
    (folder / "names").mkdir()
    names = sorted(calls(World(folder / "names"), kind))
    waited = []
    for number, name in enumerate(names):
        faulthandler.dump_traceback_later(WATCHDOG, exit=True)
        if attempt(name, number):
            waited.append(name)
    faulthandler.cancel_dump_traceback_later()
    print(*waited)
"""

WAIT = {
    "Pool": {"Pool.close", "Pool.suspend"},
    "Stream": {"Stream.synchronize"},
    "Event": {"Event.synchronize"},
    "Device": {"Device.synchronize"},
    "Buffer": {"Buffer.copy_to", "Buffer.copy_from"},
}
"""Calls that are known to wait: if they were not interrupted, this test would try nothing."""

LEFT_OUT = {"Monitor": "waits for clients, not for the device"}


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in LEFT_OUT])
def test_no_call_outlasts_ctrl_c(kind: str, tmp_path: Path) -> None:
    program = PROGRAM.format(here=str(Path(__file__).parent), folder=str(tmp_path), kind=kind)
    ended = run_program(program)
    assert_quiet(ended)
    assert WAIT.get(kind, set()) <= set(ended.stdout.split()), ended.stdout
