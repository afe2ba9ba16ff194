"""Ctrl-C ends every wait, and leaves things as they were."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from types import FrameType

import pytest
from interrupting import run_interrupted
from programs import assert_quiet

from vram.core.signals import raised_by_handler

CALLS = {
    "stream": ("", "stream.synchronize()"),
    "event": ("", "event.synchronize()"),
    "device": ("", "device.synchronize()"),
    "close": ("", "pool.close()"),
    "trim": ("", "pool.trim(wait=True)"),
    "suspend": ("", "pool.suspend(keep='host')"),
    "copy_to": ("", "x.copy_to(bytearray(32 << 20))"),
    "copy_from": ("", "x.copy_from(bytearray(32 << 20))"),
    "host_wait": ("y = vram.Stream(device); x.free()", "pool.allocate('64MiB', stream=y)"),
    "pin": ("p = vram.pin(bytearray(1 << 20), device=device)", "p.close()"),
}
"""What runs before the call, and the call that waits."""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("call", CALLS)
def test_a_wait_is_interrupted_and_nothing_has_changed(call: str) -> None:
    prepare, wait = CALLS[call]
    ended = run_interrupted("host", wait, prepare=prepare)
    assert_quiet(ended)
    assert ended.stdout == "interrupted\n"


def test_a_pool_whose_drop_is_interrupted_goes_later() -> None:
    ended = run_interrupted("host", "del pool, x; [None for _ in range(100)]", afterwards="")
    assert_quiet(ended)
    assert ended.stdout == "interrupted\n"


def test_an_interrupt_in_an_out_of_memory_callback_comes_out_of_the_allocation() -> None:
    result = run("""
        import vram

        pool = vram.Pool("host", limit="8MiB")

        def stop(*_):
            raise KeyboardInterrupt

        handle = pool.on_oom(stop)
        try:
            pool.allocate("16MiB")
        except KeyboardInterrupt:
            print("interrupted")
        handle.remove()
        pool.allocate("4MiB")
        assert pool.check() is None
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "interrupted\n", "")


@pytest.mark.parametrize("place", ["before a spill", "after a spill", "out of memory", "high water"])
def test_what_a_handler_of_a_signal_raises_in_a_callback_comes_out_of_the_allocation(place: str) -> None:
    result = run(f"""
        import signal, vram, vram.core.spill

        place = {place!r}
        device = vram.Device.model("64MiB")
        pool = vram.Pool(device, spill="8MiB" if place == "out of memory" else "64MiB")
        alive = []

        def expire(*_):
            raise TimeoutError

        def once(*_):
            if alive:
                alive.clear()
                signal.raise_signal(signal.SIGALRM)  # its handler runs here

        signal.signal(signal.SIGALRM, expire)
        if place == "before a spill":
            vram.core.spill.on_shortage(once)
        elif place == "after a spill":
            vram.core.pool.after_spill = once
        elif place == "out of memory":
            pool.on_oom(once)
        else:
            pool.on_high_water("60MiB", once)
        held = [pool.allocate("8MiB") for _ in range(7)]
        alive.append(True)
        try:
            for _ in range(3):
                held.append(pool.allocate("8MiB"))
            print("nothing was raised")
        except TimeoutError:
            print("expired")
        assert pool.check() is None and all(each.size for each in held)
        held.clear()
        held = [pool.allocate("8MiB") for _ in range(8)]
        assert pool.stats().live == 8
        pool.close()
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "expired\n", "")


def test_errors_of_enums_are_not_taken_for_those_of_handlers() -> None:
    """signal.SIG_DFL is an enum."""
    with pytest.raises(ValueError) as caught:
        signal.Handlers("none")
    assert not raised_by_handler(caught.value)


def test_a_handler_that_replaced_itself_is_recognized() -> None:
    def expire(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, expire)
    with pytest.raises(TimeoutError) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert raised_by_handler(caught.value)


def test_a_stream_whose_close_is_interrupted_is_still_open() -> None:
    result = run("""
        import vram

        pool = vram.Pool("host")
        stream = vram.Stream("host")
        x = pool.allocate("8MiB", stream=stream)

        def interrupt(handle):
            if handle is not None:
                raise KeyboardInterrupt
            return True

        listeners = stream.device._core.listeners
        listeners._all = {-1: interrupt, **listeners._all}
        try:
            stream.close()
        except KeyboardInterrupt:
            print("interrupted")
        del listeners._all[-1]
        x.fill(1)
        stream.synchronize()
        stream.close()
        x.free()
        pool.trim(wait=True)
        pool.close()
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "interrupted\n", "")


# ---- exit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work",
    [
        "def again(): stream.launch(again)\nagain()",
        """
def keep():
    while True:
        try:
            stream.launch(int)
        except vram.DeviceError:
            return
threading.Thread(target=keep, daemon=True).start()
""",
    ],
    ids=["itself", "daemon"],
)
def test_exit_ends_though_functions_are_launched_on_and_on(work: str) -> None:
    result = run("import threading, vram\nstream = vram.Stream('host')\n" + work)
    assert result.returncode == 0


NEVER = """
    import os, signal, sys, threading, time, vram
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stream, begun = vram.Stream("host"), threading.Event()

    def never():
        begun.set()
        while True:
            time.sleep(0.01)

    stream.launch(never)
    begun.wait()
    press = lambda: os.kill(os.getpid(), signal.SIGINT)
"""

LEFT = "vram: the program ends before 1 launched function(s) returned.\n"
WAITS = (
    "vram: waiting for 1 launched function(s) to return before the program ends. "
    "Press Ctrl-C to end it without them.\n"
)


def test_ctrl_c_ends_the_wait_for_a_function_that_never_returns() -> None:
    later = """
import atexit
exiting = threading.Event()
atexit.register(exiting.set)  # runs before what was registered earlier

def press_later():
    exiting.wait()
    time.sleep(1.0)
    press()

threading.Thread(target=press_later, daemon=True).start()
"""
    result = run(textwrap.dedent(NEVER) + later)
    # It says that it waits if the wait takes long, as on a busy machine.
    assert (result.returncode, result.stderr.removeprefix(WAITS)) == (0, LEFT)


@pytest.mark.slow
def test_exit_after_an_interrupt_does_not_wait_forever() -> None:
    interrupted = """
try:
    threading.Timer(0.1, press).start()
    stream.synchronize()
except KeyboardInterrupt:
    sys.exit(3)
"""
    result = run(textwrap.dedent(NEVER) + interrupted)
    told = "vram: waiting for 1 launched function(s) to return before the program ends, for up to 10 seconds"
    assert result.returncode == 3 and result.stderr.startswith(told) and result.stderr.endswith(LEFT)
