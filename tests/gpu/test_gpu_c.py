"""The C interface on a GPU: the program that tries everything, and streams that somebody else made."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vram
from vram.system import clibrary

SOURCE = Path(__file__).resolve().parents[1] / "process" / "c" / "promises.c"
LIBRARY = clibrary.PACKAGE / clibrary.LIBRARY
MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not LIBRARY.is_file(), reason=f"the C library is not installed: no {LIBRARY}"),
]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("pages", ["pages", "plain"])
def test_every_promise_holds_on_the_gpu(pages: str, tmp_path: Path) -> None:
    program = tmp_path / "promises"
    flags = subprocess.run(
        [sys.executable, "-m", "vram", "--include", "--libs"], capture_output=True, text=True, check=True
    ).stdout
    build = ["cc", "-std=c99", "-Wall", "-Wextra", "-pthread", str(SOURCE), "-o", str(program)]
    subprocess.run([*build, *shlex.split(flags)], check=True, timeout=120)
    ended = subprocess.run(
        [program, "cuda:0", pages], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout.split(" on ")[-1]) == (0, "cuda:0: 0 broken\n"), ended.stdout


class C:
    """The library beside the extension module, in the same primary context."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(LIBRARY))
        self.library.vram_last_error.restype = ctypes.c_char_p

    def __call__(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        assert status == 0, self.library.vram_last_error().decode()

    def make(self, name: str, *arguments: object) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        self(name, *arguments, ctypes.byref(out))
        return out


@pytest.fixture
def c() -> C:
    return C()


@pytest.fixture
def device(c: C) -> Iterator[ctypes.c_void_p]:
    opened = c.make("vram_device_open", b"cuda:0")
    yield opened
    c("vram_device_close", opened)


def test_memory_follows_a_stream_that_another_library_made(c: C, device: ctypes.c_void_p) -> None:
    pool = c.make("vram_pool_create", device, None)
    stream = vram.Stream("cuda:0")
    handle = ctypes.c_void_p(stream.handle)
    memory = c.make("vram_pool_allocate", pool, ctypes.c_size_t(MIB), handle)
    host = (ctypes.c_ubyte * MIB)()
    c("vram_fill", device, memory, 7, ctypes.c_size_t(MIB), handle)
    c("vram_copy", device, host, memory, ctypes.c_size_t(MIB), handle)
    stream.synchronize()
    assert bytes(host) == b"\x07" * MIB
    c("vram_pool_free", pool, memory)
    c("vram_stream_retire", device, handle)
    stream.close()
    again = c.make("vram_pool_allocate", pool, ctypes.c_size_t(MIB), None)
    c("vram_fill", device, again, 1, ctypes.c_size_t(MIB), None)
    c("vram_device_synchronize", device)
    c("vram_pool_destroy", pool)


def test_an_arena_is_reset_in_stream_order_without_a_host_wait(c: C, device: ctypes.c_void_p) -> None:
    pool = c.make("vram_pool_create", device, None)
    arena = c.make("vram_arena_create", pool, None)
    size = ctypes.c_size_t(64 * MIB)
    copies = [(ctypes.c_ubyte * 1)() for _ in range(20)]
    addresses = set()
    for number, copied in enumerate(copies):
        memory = c.make("vram_arena_allocate", arena, size, ctypes.c_size_t(0))
        addresses.add(memory.value)
        c("vram_fill", device, memory, number, size, None)
        c("vram_copy", device, copied, memory, ctypes.c_size_t(1), None)
        c("vram_arena_reset", arena, 0)
    c("vram_device_synchronize", device)
    assert [copied[0] for copied in copies] == list(range(20))
    assert len(addresses) == 1
    c("vram_arena_destroy", arena)
    c("vram_pool_destroy", pool)


def test_host_memory_is_locked_once_and_known_to_the_driver(c: C, device: ctypes.c_void_p) -> None:
    host = (ctypes.c_ubyte * (4 * MIB))()
    c("vram_pin", device, host, ctypes.c_size_t(4 * MIB))
    with pytest.raises(vram.DeviceError):  # the driver has it already
        vram.pin(host, "cuda:0")
    c("vram_unpin", device, host)
    with vram.pin(host, "cuda:0") as pin:
        assert pin.pinned
