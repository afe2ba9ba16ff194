"""Small kernels for experiments and tests: stay busy, write a pattern, verify it, report where they ran.

On CUDA devices they are PTX that the driver compiles. On the host device the same work runs on the stream's
thread. They do not order anything, and race checkers do not see them: the caller must ensure the order.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import time
from array import array
from dataclasses import dataclass
from typing import Any, Protocol

from vram import _native
from vram.core.device import Device
from vram.core.locks import new_lock
from vram.core.stream import stream_handle
from vram.errors import DeviceError

__all__ = ["BlockRun", "BlockRuns", "Kernels", "Mismatches", "pattern"]

WORD = 4
"""Bytes of one word of a pattern."""
THREADS = 256
"""Threads per block of the kernels that process memory."""
BLOCKS_PER_MULTIPROCESSOR = 8
RESULT_BYTES = 2 << 20
"""Memory for results on a device: the smallest size a backend allocates."""
REGION_BYTES = 128 << 10
MULTIPROCESSORS = 16
"""The driver's number of the attribute "multiprocessors"."""

_INDEX_FACTOR, _SEED_FACTOR, _MIX_FACTOR = 0x9E3779B1, 0x27D4EB2F, 0x85EBCA77
_MASK = 0xFFFFFFFF

_TIMERS = """
.version 7.0
.target sm_70
.address_size 64

.visible .entry vram_spin(
    .param .u64 spin_nanoseconds
)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [spin_nanoseconds];
    mov.u64 %rd2, %globaltimer;
SPIN_AGAIN:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra SPIN_AGAIN;
    ret;
}

.visible .entry vram_where(
    .param .u64 where_out,
    .param .u64 where_nanoseconds
)
{
    .reg .pred %p<3>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<10>;

    ld.param.u64 %rd1, [where_out];
    ld.param.u64 %rd2, [where_nanoseconds];
    mov.u64 %rd3, %globaltimer;
WHERE_AGAIN:
    mov.u64 %rd4, %globaltimer;
    sub.u64 %rd5, %rd4, %rd3;
    setp.lt.u64 %p1, %rd5, %rd2;
    @%p1 bra WHERE_AGAIN;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra WHERE_END;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd6, %r2, 24;
    cvta.to.global.u64 %rd7, %rd1;
    add.u64 %rd8, %rd7, %rd6;
    mov.u32 %r3, %smid;
    cvt.u64.u32 %rd9, %r3;
    st.global.u64 [%rd8], %rd9;
    st.global.u64 [%rd8+8], %rd3;
    st.global.u64 [%rd8+16], %rd4;
WHERE_END:
    ret;
}
"""


def _over_words(name: str, parameters: str, start: str, body: str, end: str = "") -> str:
    """A kernel whose threads go over words of memory, in steps of all threads (%rd5).

    In `body`, %rd3 is the index of a word and %rd8 its address; %r1 is the first of the further parameters.
    `start` runs before the first word, `end` after the last.
    """
    return f"""
.visible .entry vram_{name}(
    .param .u64 {name}_words,
    .param .u64 {name}_count,
    {parameters}
)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<14>;
    .reg .b64 %rd<12>;

    ld.param.u64 %rd6, [{name}_words];
    ld.param.u64 %rd2, [{name}_count];
    {start.strip()}
    cvta.to.global.u64 %rd1, %rd6;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %nctaid.x;
    cvt.u64.u32 %rd7, %r4;
    mul.wide.u32 %rd4, %r3, %r2;
    add.u64 %rd3, %rd4, %rd7;
    mul.wide.u32 %rd5, %r5, %r2;
{name.upper()}_NEXT:
    setp.ge.u64 %p1, %rd3, %rd2;
    @%p1 bra {name.upper()}_DONE;
    shl.b64 %rd8, %rd3, 2;
    add.u64 %rd8, %rd1, %rd8;
    {body.strip()}
    add.u64 %rd3, %rd3, %rd5;
    bra {name.upper()}_NEXT;
{name.upper()}_DONE:
    {end.strip()}
    ret;
}}
"""


_PATTERN_WORD = """
    cvt.u32.u64 %r6, %rd3;
    mul.lo.u32 %r7, %r6, 0x9E3779B1;
    xor.b32 %r8, %r7, %r1;
    shr.u32 %r9, %r8, 15;
    xor.b32 %r10, %r8, %r9;
    mul.lo.u32 %r11, %r10, 0x85EBCA77;
    shr.u32 %r12, %r11, 13;
    xor.b32 %r12, %r11, %r12;
"""  # in %r12: the word of `pattern`, with the seed in %r1

_FILL = _over_words(
    "fill",
    ".param .u32 fill_seed",
    "ld.param.u32 %r1, [fill_seed];",
    _PATTERN_WORD + "    st.global.u32 [%rd8], %r12;",
)
_CHECK = _over_words(
    "check",
    ".param .u32 check_seed,\n    .param .u64 check_errors",
    """
    ld.param.u32 %r1, [check_seed];
    ld.param.u64 %rd9, [check_errors];
    cvta.to.global.u64 %rd10, %rd9;
    mov.u64 %rd11, 0;
    """,
    _PATTERN_WORD
    + """
    ld.global.u32 %r13, [%rd8];
    setp.ne.u32 %p2, %r13, %r12;
    @%p2 add.u64 %rd11, %rd11, 1;
    """,
    """
    setp.eq.u64 %p3, %rd11, 0;
    @%p3 bra NOTHING_WRONG;
    red.global.add.u64 [%rd10], %rd11;
NOTHING_WRONG:
    """,
)
_CHURN = _over_words(
    "churn",
    ".param .u32 churn_rounds",
    "ld.param.u32 %r1, [churn_rounds];",
    """
    ld.global.u32 %r6, [%rd8];
    mov.u32 %r7, %r1;
NEXT_ROUND:
    setp.eq.u32 %p2, %r7, 0;
    @%p2 bra NO_MORE_ROUNDS;
    mul.lo.u32 %r6, %r6, 1664525;
    add.u32 %r6, %r6, 1013904223;
    sub.u32 %r7, %r7, 1;
    bra NEXT_ROUND;
NO_MORE_ROUNDS:
    st.global.u32 [%rd8], %r6;
    """,
)
PTX = _TIMERS + _FILL + _CHECK + _CHURN


# ---- the pattern ------------------------------------------------------------------------------------------


def _mixed(seed: int) -> int:
    return (seed * _SEED_FACTOR + 0x165667B1) & _MASK


def pattern(words: int, seed: int) -> array[int]:
    """Word i of the pattern is a hash of (seed, i), the same on every device."""
    mixed = _mixed(seed)
    result = array("I", bytes(words * WORD))
    for index in range(words):
        value = (index * _INDEX_FACTOR & _MASK) ^ mixed
        value = (value ^ value >> 15) * _MIX_FACTOR & _MASK
        result[index] = value ^ value >> 13
    return result


# ---- results of kernels -----------------------------------------------------------------------------------


class Mismatches:
    """The number of words that a check found different; available after the stream has run the check."""

    def __init__(self, device: Device, stream: int, address: int | None = None) -> None:
        """Created by `Kernels.check`; `address` is the device's counter, None if the host counts."""
        self._device = device
        self._stream = stream
        self._address = address
        self._found = 0

    def count(self) -> int:
        """Wait for the check and return the number of wrong words."""
        if self._address is not None:
            self._found = struct.unpack("<Q", _read(self._device, self._address, 8, self._stream))[0]
        else:
            self._device.backend.stream_synchronize(self._stream)
        return self._found

    def _add(self, number: int) -> None:
        self._found += number


@dataclass(frozen=True)
class BlockRun:
    """Where and when one block of a kernel ran: its multiprocessor, and nanoseconds of the device's clock."""

    multiprocessor: int
    start_ns: int
    end_ns: int


class BlockRuns:
    """What a `where` kernel recorded; available after the stream has run it."""

    def __init__(self, device: Device, stream: int, address: int, blocks: int) -> None:
        """Created by `Kernels.where`."""
        self._device = device
        self._stream = stream
        self._address = address
        self._blocks = blocks

    def read(self) -> list[BlockRun]:
        """Wait for the kernel and return the place of each of its blocks."""
        raw = _read(self._device, self._address, 24 * self._blocks, self._stream)
        return [BlockRun(*entry) for entry in struct.iter_unpack("<QQQ", raw)]


def _read(device: Device, address: int, size: int, stream: int) -> bytes:
    target = ctypes.create_string_buffer(size)
    device.backend.copy_now(ctypes.addressof(target), address, size, stream)
    return target.raw


# ---- public class -----------------------------------------------------------------------------------------


class _Work(Protocol):
    def spin(self, stream: int, nanoseconds: int, blocks: int, threads: int) -> None: ...
    def fill(self, address: int, words: int, seed: int, stream: int) -> None: ...
    def check(self, address: int, words: int, seed: int, stream: int) -> Mismatches: ...
    def churn(self, address: int, words: int, rounds: int, stream: int) -> None: ...
    def where(self, stream: int, nanoseconds: int, blocks: int, threads: int) -> BlockRuns: ...


class Kernels:
    """The kernels of one device. They are compiled once per device and process; any thread may launch them.

    Memory is a Buffer, or an address with a size in bytes that is a multiple of 4.
    """

    def __init__(self, device: str | Device | None = None) -> None:
        """Load the kernels on a device (default: the default device)."""
        self.device = device if isinstance(device, Device) else Device(device)
        self._work = _work_of(self.device)

    def spin(self, stream: Any, ms: float, *, blocks: int = 1, threads: int = 1) -> None:
        """Keep `stream` busy for `ms` milliseconds; more blocks and threads occupy more multiprocessors."""
        self._work.spin(self._stream(stream), _nanoseconds(ms), blocks, threads)

    def fill(self, memory: Any, size: int | None = None, *, seed: int, stream: Any = None) -> None:
        """Write the pattern of `seed`."""
        self._work.fill(*_words(memory, size), seed, self._stream(stream))

    def check(self, memory: Any, size: int | None = None, *, seed: int, stream: Any = None) -> Mismatches:
        """Compare with the pattern of `seed`, on the device and in stream order."""
        return self._work.check(*_words(memory, size), seed, self._stream(stream))

    def churn(self, memory: Any, size: int | None = None, *, rounds: int, stream: Any = None) -> None:
        """Read, compute `rounds` times and write every word (CUDA only)."""
        self._work.churn(*_words(memory, size), rounds, self._stream(stream))

    def where(self, stream: Any, ms: float, *, blocks: int = 1, threads: int = 32) -> BlockRuns:
        """Make each block record its multiprocessor, start and end, `ms` apart (CUDA only)."""
        return self._work.where(self._stream(stream), _nanoseconds(ms), blocks, threads)

    def _stream(self, stream: Any) -> int:
        return stream_handle(stream, self.device)


def _nanoseconds(ms: float) -> int:
    if not 0 <= ms <= 60_000:
        raise ValueError(f"a kernel cannot be busy for {ms} ms; choose 0 to 60000")
    return int(ms * 1e6)


def _words(memory: Any, size: int | None) -> tuple[int, int]:
    address = memory if isinstance(memory, int) else memory.ptr
    if size is None:
        if isinstance(memory, int):
            raise TypeError("an address also needs a size in bytes")
        size = memory.size
    if size % WORD or address % WORD or size < 0:
        raise ValueError(f"patterns consist of whole 4-byte words; {size} bytes at {address:#x} do not")
    return address, size // WORD


_loaded: dict[Device, _Work] = {}
_lock = new_lock()


def _work_of(device: Device) -> _Work:
    if device.kind == "host":
        return _HostWork(device)
    if device.kind != "cuda":
        raise DeviceError(
            f"{device.name} has addresses only and runs no kernels; use a cuda device or the host",
            device=device.name,
            code="unsupported",
        )
    with _lock:
        if device not in _loaded:
            _loaded[device] = _CudaWork(device)
        return _loaded[device]


# ---- on a CUDA device -------------------------------------------------------------------------------------


class _CudaWork:
    """The module and its kernels. It stays loaded until the process ends, like the device."""

    def __init__(self, device: Device) -> None:
        backend = device.backend
        assert isinstance(backend, _native.CudaBackend)
        self._device, self._backend = device, backend
        self._grid = BLOCKS_PER_MULTIPROCESSOR * max(1, backend.attribute(MULTIPROCESSORS))
        module = backend.module_load(PTX)
        names = ("spin", "where", "fill", "check", "churn")
        self._functions = {name: backend.module_function(module, f"vram_{name}") for name in names}
        self._results = backend.reserve(RESULT_BYTES)
        self._tickets = itertools.count()
        self._warm_up()

    def _warm_up(self) -> None:
        """Launch each kernel once: the first launch may load it and wait for other work."""
        self.spin(0, 0, 1, 1)
        self.where(0, 0, 1, 32).read()
        self.fill(self._results, 1, 0, 0)
        self.churn(self._results, 1, 1, 0)
        self.check(self._results, 1, 0, 0).count()

    def spin(self, stream: int, nanoseconds: int, blocks: int, threads: int) -> None:
        self._launch("spin", blocks, threads, [struct.pack("<Q", nanoseconds)], stream)

    def fill(self, address: int, words: int, seed: int, stream: int) -> None:
        self._over(words, "fill", [*_range(address, words), struct.pack("<I", _mixed(seed))], stream)

    def check(self, address: int, words: int, seed: int, stream: int) -> Mismatches:
        errors = self._result_bytes(8)
        self._backend.fill(errors, 0, 8, stream)
        values = [*_range(address, words), struct.pack("<I", _mixed(seed)), struct.pack("<Q", errors)]
        self._over(words, "check", values, stream)
        return Mismatches(self._device, stream, errors)

    def churn(self, address: int, words: int, rounds: int, stream: int) -> None:
        self._over(words, "churn", [*_range(address, words), struct.pack("<I", rounds)], stream)

    def where(self, stream: int, nanoseconds: int, blocks: int, threads: int) -> BlockRuns:
        out = self._result_bytes(24 * blocks)
        values = [struct.pack("<Q", out), struct.pack("<Q", nanoseconds)]
        self._launch("where", blocks, threads, values, stream)
        return BlockRuns(self._device, stream, out, blocks)

    def _over(self, words: int, name: str, values: list[bytes], stream: int) -> None:
        blocks = max(1, min(self._grid, -(-words // THREADS)))
        self._launch(name, blocks, THREADS, values, stream)

    def _launch(self, name: str, blocks: int, threads: int, values: list[bytes], stream: int) -> None:
        self._backend.launch_kernel(self._functions[name], [blocks], [threads], values, stream)

    def _result_bytes(self, size: int) -> int:
        """Return memory for one result; it is reused after many others of its size (16384 counters)."""
        slot = 1 << (max(size, 8) - 1).bit_length()
        if slot not in _REGIONS:
            raise ValueError(f"{size} bytes of results exceed the maximum of one kernel: {max(_REGIONS)}")
        start = slot * (next(self._tickets) % (REGION_BYTES // slot))
        return self._results + _REGIONS[slot] + start


# Results of each size, 8 bytes to 32 KiB, have their own region: rings that never overlap.
_REGIONS = {8 << index: index * REGION_BYTES for index in range(13)}


def _range(address: int, words: int) -> list[bytes]:
    return [struct.pack("<Q", address), struct.pack("<Q", words)]


# ---- on the host ------------------------------------------------------------------------------------------


class _HostWork:
    """The same work as Python functions on the stream's thread."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def spin(self, stream: int, nanoseconds: int, blocks: int, threads: int) -> None:
        self._launch(stream, lambda: time.sleep(nanoseconds / 1e9))

    def fill(self, address: int, words: int, seed: int, stream: int) -> None:
        wanted = pattern(words, seed).tobytes()
        self._launch(stream, lambda: ctypes.memmove(address, wanted, len(wanted)))

    def check(self, address: int, words: int, seed: int, stream: int) -> Mismatches:
        wanted = pattern(words, seed)
        found = Mismatches(self._device, stream)
        self._launch(stream, lambda: found._add(_differing(address, wanted)))
        return found

    def churn(self, address: int, words: int, rounds: int, stream: int) -> None:
        raise self._needs_gpu("churn")

    def where(self, stream: int, nanoseconds: int, blocks: int, threads: int) -> BlockRuns:
        raise self._needs_gpu("where")

    def _launch(self, stream: int, work: Any) -> None:
        self._device.backend.launch(stream, work)

    def _needs_gpu(self, name: str) -> DeviceError:
        return DeviceError(
            f"the kernel {name} runs on cuda devices only, not on {self._device.name}",
            device=self._device.name,
            code="unsupported",
        )


def _differing(address: int, wanted: array[int]) -> int:
    found = array("I", ctypes.string_at(address, len(wanted) * WORD))
    return 0 if found == wanted else sum(a != b for a, b in zip(found, wanted, strict=True))
