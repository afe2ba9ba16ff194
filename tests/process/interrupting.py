"""Runs a program in which Ctrl-C arrives while the main thread waits for a device."""

from __future__ import annotations

import subprocess

from programs import run_program

# The launched function holds the stream until `gate` opens, so only the handler's exception can end the wait.
# It sends the signal once the main thread is inside `try`, however early the function itself starts.
PROGRAM = """
    import os, signal, threading, vram
    signal.signal(signal.SIGINT, signal.default_int_handler)
    device = vram.Device("{device}")
    stream = vram.Stream(device)
    pool = vram.Pool(device, limit="64MiB", cross_stream="never")
    x = pool.allocate("32MiB", stream=stream)
    event = vram.Event(device)
    calling, gate = threading.Event(), threading.Event()

    def interrupt():
        calling.wait()
        os.kill(os.getpid(), signal.SIGINT)
        gate.wait()

    x.fill(1)
    stream.launch(interrupt)
    event.record(stream)
    {prepare}
    try:
        calling.set()
        {call}
    except KeyboardInterrupt:
        print("interrupted")
    gate.set()
    stream.synchronize()
"""
INTACT = """
    assert pool.check() is None
    assert not pool.closed and not stream.closed
    pool.close()
"""


def run_interrupted(
    device: str, call: str, *, prepare: str = "", afterwards: str = INTACT
) -> subprocess.CompletedProcess[str]:
    """Prints "interrupted" if Ctrl-C ended `call`. `prepare` runs before it, when the stream is busy."""
    return run_program(PROGRAM.format(device=device, prepare=prepare, call=call), afterwards)
