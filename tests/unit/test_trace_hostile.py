"""Files made to do harm: each is a TraceError in bounded time and memory, and nothing in it is ever run.

These are chosen by hand; tests/fuzz has files changed at random.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effort import sample
from vram.errors import TraceError
from vram.trace import open_trace

MARKER = "executed"
LIMIT_COST = 100  # times what REFERENCE steps of Python cost on this machine at this time
REFERENCE = 1_000_000
LIMIT_MEMORY_MIB = 1024


def touch(tmp_path: Path) -> bytes:
    return f"touch {tmp_path / MARKER}".encode()


# --- opcodes that name code ---------------------------------------------------------------------------------

CALLS: dict[str, Callable[[bytes], bytes]] = {
    "GLOBAL REDUCE": lambda command: b"cos\nsystem\n(V" + command + b"\ntR.",
    "STACK_GLOBAL": lambda command: (
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(command)]) + command + b"\x85R."
    ),
    "INST": lambda command: b"(V" + command + b"\nios\nsystem\n.",
    "OBJ": lambda command: b"(cos\nsystem\nV" + command + b"\no.",
    "NEWOBJ": lambda command: b"\x80\x02csubprocess\nPopen\nV" + command + b"\n\x85\x81.",
    "NEWOBJ_EX": lambda command: b"\x80\x04csubprocess\nPopen\nV" + command + b"\n\x85}\x92.",
    "BUILD of a class": lambda command: b"cbuiltins\nobject\n}b.",
    "inside a snapshot": lambda command: b"}Vsegments\ncos\nsystem\n(V" + command + b"\ntRs.",
    "PERSID": lambda command: b"P" + command + b"\n.",
    "BINPERSID": lambda command: b"\x80\x02V" + command + b"\nQ.",
    "EXT1": lambda command: b"\x80\x02\x82\x01.",
    "EXT2": lambda command: b"\x80\x02\x83\x01\x00.",
    "EXT4": lambda command: b"\x80\x02\x84\x01\x00\x00\x00.",
}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("family", CALLS)
def test_nothing_is_ever_executed(family: str, trusted: bool, tmp_path: Path) -> None:
    path = tmp_path / "hostile.pickle"
    path.write_bytes(CALLS[family](touch(tmp_path)))
    with pytest.raises(TraceError) as caught:
        open_trace(path, trusted=trusted)
    assert "pickle" in caught.value.place
    assert not (tmp_path / MARKER).exists()


def test_the_marker_would_appear_if_code_ran(tmp_path: Path) -> None:
    pickle.loads(CALLS["GLOBAL REDUCE"](touch(tmp_path)))
    assert (tmp_path / MARKER).exists()


# --- malformed and oversized --------------------------------------------------------------------------------


def uint32(value: int) -> bytes:
    return struct.pack("<I", value)


def uint64(value: int) -> bytes:
    return struct.pack("<Q", value)


def shared(depth: int) -> list[Any]:
    """A list that prints as 2**depth elements and is stored as `depth`."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


def in_snapshot(**fields: Any) -> bytes:
    return pickle.dumps({"segments": [], "device_traces": [], **fields})


FRAME = {"filename": "a", "line": 1, "name": "b"}
STACKS = [[FRAME] * 10_000 + [{**FRAME, "line": line}] for line in range(2)]
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "only STOP": b".",
    "text": b"hello, world\n",
    "unknown opcode": b"\x80\x04\xff.",
    "protocol 99": b"\x80\x63N.",
    "stack underflow": b"aaaa.",
    "unbalanced marks": b"(((t" * 1000 + b".",
    "POP of nothing": b"0000.",
    "REDUCE of data": b"](tR.",
    "OBJ of data": b"(]o.",
    "NEWOBJ of data": b"\x80\x02])\x81.",
    "BUILD of data": b"}}Va\nNsb.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "READONLY_BUFFER": b"\x80\x05C\x00\x98.",
    "missing memo": b"\x80\x02h\x05.",
    "memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo of 2**27": b"\x80\x02Nr\x00\x00\x00\x08.",
    "text memo of 10**18": b"Np1000000000000000000\n.",
    "negative memo": b"Np-1\n.",
    "unhashable key": b"}]Ns.",
    "BINBYTES of 4 GiB": b"\x80\x03B" + uint32(0xFFFFFFFF) + b"x.",
    "BINBYTES8 of 2**62": b"\x80\x04\x8e" + uint64(1 << 62) + b"x.",
    "BINBYTES8 of 1 GiB, absent": b"\x80\x04\x8e" + uint64(1 << 30) + b"x.",
    "BINUNICODE of 4 GiB": b"\x80\x02X" + uint32(0xFFFFFFFF) + b"x.",
    "BINUNICODE8 of 2**63": b"\x80\x04\x8d" + uint64(1 << 63) + b"x.",
    "BYTEARRAY8 of 2**40": b"\x80\x05\x96" + uint64(1 << 40) + b"x.",
    "BINSTRING of -1": b"T\xff\xff\xff\xff.",
    "FRAME of 2**62": b"\x80\x04\x95" + uint64(1 << 62) + b"N.",
    "LONG4 of 2**31-1": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "LONG4 of -1": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "LONG4 of 8 MB": b"\x80\x02\x8b" + struct.pack("<i", 8_000_000) + b"\x01" * 8_000_000 + b".",
    "LONG of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "line without end": b"S'" + b"x" * 5_000_000,
    "bad UTF-8": b"\x80\x02X\x04\x00\x00\x00\xff\xfe\xfd\xfc.",
    "lists nested 2 million deep": b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
    "tuples nested 2 million deep": b")" + b"\x85" * 2_000_000 + b".",
    "dicts nested 1 million deep": b"}N" * 1_000_000 + b"}" + b"s" * 1_000_000 + b".",
    "deep tuple as key": b"})" + b"\x85" * 2_000_000 + b"Ns.",
    "billion laughs as key": b"})" + b"2\x86" * 100 + b"Ns.",
    "5 million dicts": b"}" * 5_000_000 + b".",
    "5 million marks": b"(" * 5_000_000 + b".",
    "list that holds itself": b"]q\x00h\x00a.",
    "events that hold themselves": b"}(Vsegments\n]Vdevice_traces\n]q\x00h\x00au.",
    "billion laughs as events": in_snapshot(device_traces=[shared(100)]),
    "billion laughs as segments": in_snapshot(segments=shared(100)),
    "billion laughs as settings": in_snapshot(allocator_settings={"a": shared(100)}),
    "settings nested deep": in_snapshot(allocator_settings={"a": [[[[[[[[[[[[]]]]]]]]]]]]}),
    "blocks without number": in_snapshot(
        segments=[
            {
                "address": 0,
                "total_size": 1,
                "stream": 0,
                "segment_type": "large",
                "blocks": [{"size": 0, "state": "inactive"}] * 1000,
            }
        ]
        * 100_000
    ),
    "stacks without number": in_snapshot(
        device_traces=[
            [
                {"action": "alloc", "addr": i, "size": 1, "stream": 0, "frames": STACKS[i % 2]}
                for i in range(100_000)
            ]
        ]
    ),
}

MEASURE = """
import resource, sys, time
from vram.errors import TraceError

def reference():
    begin, seen = time.process_time(), {}
    for number in range(REFERENCE):
        seen[number & 1023] = number
    return time.process_time() - begin

once = reference()
from vram.trace import open_trace
try:
    open_trace(sys.argv[1])
    print("read")
except TraceError as error:
    assert error.place
    print("TraceError")
caller, child = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
spent = sum(usage.ru_utime + usage.ru_stime for usage in (caller, child))
print((spent - once) / max(once, reference()))
# Not ru_maxrss of the caller: that begins with the memory of the process that started it.
with open("/proc/self/status") as status:
    here = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(max(here, child.ru_maxrss) / 1024)
"""


def open_measured(path: Path) -> str:
    """Open `path` in a process of its own and hold it to the limits; "read" or "TraceError"."""
    command = [sys.executable, "-c", MEASURE.replace("REFERENCE", str(REFERENCE)), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outcome, cost, memory_mib = done.stdout.split()
    assert float(cost) < LIMIT_COST
    assert float(memory_mib) < LIMIT_MEMORY_MIB
    return outcome


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_in_bounds(case: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.pickle"
    path.write_bytes(HOSTILE[case])
    assert open_measured(path) == "TraceError"


# --- compression --------------------------------------------------------------------------------------------

BOMB_BYTES = 96 << 20
BOMBS: dict[str, Callable[[], bytes]] = {
    "one long string": lambda: b"\x80\x04\x8e" + uint64(BOMB_BYTES) + bytes(BOMB_BYTES),
    "many empty tuples": lambda: b")" * BOMB_BYTES,
}


PACKED = [(pack, content) for pack in (gzip.compress, bz2.compress, lzma.compress) for content in BOMBS]


@pytest.mark.slow
@pytest.mark.parametrize(("pack", "content"), sample(PACKED))
def test_a_compression_bomb_is_refused_in_bounds(pack: Any, content: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    options = {"preset": 0} if pack is lzma.compress else {"compresslevel": 1}
    path.write_bytes(pack(BOMBS[content](), **options))
    assert path.stat().st_size < BOMB_BYTES / 100
    assert open_measured(path) == "TraceError"


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("trusted", [True, False])
def test_cut_off_compression(pack: Any, trusted: bool, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    packed = pack(pickle.dumps(random.Random(1).randbytes(10_000)))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match="damaged or cut off"):
        open_trace(path, trusted=trusted)
