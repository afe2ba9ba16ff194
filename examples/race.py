"""The classic cross-stream bug on the host device, its two fixes, and how `vram.race_check` finds it.

Stream 2 reads a buffer of stream 1 late. The buffer is freed before that, stream 1 reuses its memory, and
stream 2 reads the new contents. A gate delays the read, so that the bug shows every time.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Literal

import vram
from vram.race.checker import reads

SIZE = 1024
OLD, NEW = 2, 31  # what stream 2 should read, and what is written over it
PATIENCE = 30.0  # seconds until an unopened gate times out

Cure = Literal["record_stream", "wait"] | None


def late_read(address: int, gate: threading.Event, seen: bytearray) -> None:
    """Stands in for a kernel that starts late and knows only an address."""
    gate.wait(PATIENCE)
    seen[:] = ctypes.string_at(address, SIZE)


def run(protect: Cure = None) -> bytes:
    """Return what stream 2 reads from a buffer that was filled with OLD and then freed."""
    gate, seen = threading.Event(), bytearray()
    with vram.Pool("host") as pool, vram.Stream("host") as s1, vram.Stream("host") as s2:
        try:
            free_too_early(pool, s1, s2, protect, gate, seen)
        finally:
            gate.set()
            s2.synchronize()  # the read completes before the pool releases its memory
    return bytes(seen)


def free_too_early(
    pool: vram.Pool, s1: vram.Stream, s2: vram.Stream, protect: Cure, gate: threading.Event, seen: bytearray
) -> None:
    x = pool.allocate(SIZE, stream=s1)
    x.fill(OLD)
    s2.wait_stream(s1)
    s2.launch(late_read, reads(x.ptr), gate, seen)

    if protect == "record_stream":
        x.record_stream(s2)  # the memory is not reused before stream 2 is done
    elif protect == "wait":
        s1.wait_stream(s2)  # stream 1 continues only after stream 2
    x.free()

    y = pool.allocate(SIZE, stream=s1)
    y.fill(NEW)
    if protect != "wait":
        s1.synchronize()  # the memory is overwritten before the gate opens
    # With the wait, stream 1 is behind stream 2, which is behind the gate: the host must not wait yet.
    gate.set()
    s1.synchronize()


def describe(read: bytes) -> str:
    values = sorted(set(read))
    verdict = "right" if values == [OLD] else "WRONG: the memory was already reused"
    return f"stream 2 reads {values}, {verdict}"


def main() -> None:
    cures: dict[str, Cure] = {"nothing": None, "record_stream": "record_stream", "a stream wait": "wait"}
    for name, cure in cures.items():
        print(f"protected by {name:13}  {describe(run(cure))}")
    for name, cure in cures.items():
        with vram.race_check("collect") as checker:
            run(cure)
        print(f"\nrace_check, protected by {name}: {len(checker.races)} race(s)")
        for race in checker.races:
            print(race)


if __name__ == "__main__":
    main()
