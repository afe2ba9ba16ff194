"""Kernels for the tests here: write a pattern, count what differs from it, take time.

Compiled by the driver, and launched on any stream of the process by its handle. Order is for the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from vram import Device
from vram.observe.status import _nvml_memory

ATTEMPTS = 5
UNKNOWN = "Other processes may have used the device meanwhile: NVML does not say. Run the test again alone."


def held_by_others() -> int | None:
    """What other processes hold of the first device, in bytes; None where NVML cannot tell them from ours."""
    counted = _nvml_memory(Device("cuda:0"))
    return counted and counted["processes"]


@contextlib.contextmanager
def watch_others() -> Iterator[list[int]]:
    """Lists what other processes hold, a new item for every change; empty where NVML does not say."""
    seen: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while (held := held_by_others()) is not None:
            if seen[-1:] != [held]:
                seen.append(held)
            if ended.wait(0.01):
                return

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def judge(failures: list[tuple[Exception, list[int]]]) -> None:
    """Raise the error of an attempt that nobody disturbed; skip the test if there was none."""
    for error, seen in failures:
        if not seen:
            error.add_note(UNKNOWN)
        if len(seen) < 2:
            raise error
    error, seen = failures[-1]
    pytest.skip(
        f"other processes used the device in each of {len(failures)} attempts, holding {seen} bytes: {error}"
    )


def undisturbed(
    test: Callable[..., None], watch: Callable[[], AbstractContextManager[list[int]]] = watch_others
) -> Callable[..., None]:
    """For a test that compares totals of the device, which other processes change as well.

    The test has to pass once in five attempts. Otherwise it fails, unless the memory of other processes
    changed in every attempt: then the test is skipped, and the reason says so.
    """

    def attempt(*arguments: Any, **named: Any) -> tuple[Exception, list[int]] | None:
        with watch() as seen:
            try:
                test(*arguments, **named)
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # frees what the test held
                return error, seen
        return None

    @functools.wraps(test)
    def repeated(*arguments: Any, **named: Any) -> None:
        failures = list[tuple[Exception, list[int]]]()
        while len(failures) < ATTEMPTS:
            failed = attempt(*arguments, **named)
            if failed is None:
                return
            failures.append(failed)
            gc.collect()
        judge(failures)

    return repeated


def undisturbed_child(test: Callable[..., None]) -> Callable[..., None]:
    """As `undisturbed`, for a test in a child process, which NVML counts as another one; never skipped."""
    return undisturbed(test, lambda: contextlib.nullcontext([]))


# Word `i` of a pattern is h ^ (h >> 15) with h = seed * 2654435761 ^ low(i) * 2246822519 ^ high(i), where low
# and high are halves of i. A thread takes the words place, place + step, …
WALK = """
  .reg .pred %differs, %past;
  .reg .b32 %seed, %block, %threads, %thread, %blocks, %word, %part, %found;
  .reg .b64 %from, %words, %place, %step, %wide, %wrong, %counters;
  ld.param.u64 %from, [memory];
  ld.param.u64 %words, [count];
  ld.param.u32 %seed, [key];
  mul.lo.u32 %seed, %seed, 2654435761;
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %blocks, %nctaid.x;
  mul.wide.u32 %place, %block, %threads;
  cvt.u64.u32 %wide, %thread;
  add.u64 %place, %place, %wide;
  mul.wide.u32 %step, %blocks, %threads;
"""
PATTERN = """
  cvt.u32.u64 %word, %place;
  mul.lo.u32 %word, %word, 2246822519;
  xor.b32 %word, %word, %seed;
  shr.u64 %wide, %place, 32;
  cvt.u32.u64 %part, %wide;
  xor.b32 %word, %word, %part;
  shr.u32 %part, %word, 15;
  xor.b32 %word, %word, %part;
  shl.b64 %wide, %place, 2;
  add.u64 %wide, %wide, %from;
"""
PTX = (
    """
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill(.param .u64 memory, .param .u64 count, .param .u32 key)
{"""
    + WALK
    + """
next:
  setp.ge.u64 %past, %place, %words;
  @%past bra done;"""
    + PATTERN
    + """
  st.global.u32 [%wide], %word;
  add.u64 %place, %place, %step;
  bra next;
done:
  ret;
}

// tally[0] += words that differ, tally[1] += words looked at
.visible .entry check(.param .u64 memory, .param .u64 count, .param .u32 key, .param .u64 tally)
{"""
    + WALK
    + """
  ld.param.u64 %counters, [tally];
  mov.u64 %wrong, 0;
  setp.ne.u64 %differs, %place, 0;
  @%differs bra next;
  red.global.add.u64 [%counters + 8], %words;
next:
  setp.ge.u64 %past, %place, %words;
  @%past bra done;"""
    + PATTERN
    + """
  ld.global.u32 %found, [%wide];
  setp.ne.u32 %differs, %found, %word;
  @%differs add.u64 %wrong, %wrong, 1;
  add.u64 %place, %place, %step;
  bra next;
done:
  setp.eq.u64 %past, %wrong, 0;
  @%past bra end;
  red.global.add.u64 [%counters], %wrong;
end:
  ret;
}

.visible .entry spin(.param .u64 nanoseconds)
{
  .reg .pred %wait;
  .reg .b64 %length, %begin, %now;
  ld.param.u64 %length, [nanoseconds];
  mov.u64 %begin, %globaltimer;
again:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %begin;
  setp.lt.u64 %wait, %now, %length;
  @%wait bra again;
  ret;
}
"""
)
THREADS = 256
MOST_BLOCKS = 1024
COUNTERS = 2 << 20  # bytes reserved for two numbers: the least that a device gives


class Work:
    """The kernels, and one pair of counters for what they checked. Any thread may launch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._backend: Any = device.backend
        self._module = self._backend.module_load(PTX)
        self._kernels = {
            name: self._backend.module_function(self._module, name) for name in ("fill", "check", "spin")
        }
        self._counters = self._backend.reserve(COUNTERS)
        self._seeds = itertools.count(1)
        self._backend.fill(self._counters, 0, 16, 0)
        self._warm_up()

    def _warm_up(self) -> None:
        """Launch each once: the driver loads a kernel at its first launch, which a capture may not allow."""
        scratch = self._counters + 4096
        self.fill(scratch, 512, 1, 0)
        self.check(scratch, 512, 1, 0)
        self.check(scratch, 512, 2, 0)
        self.spin(0.001, 0)
        assert self.take_counts() == (512, 1024)

    def close(self) -> None:
        self._device.synchronize()
        self._backend.release(self._counters, COUNTERS)
        self._backend.module_unload(self._module)

    def new_seed(self) -> int:
        """A pattern that nobody has used yet."""
        return next(self._seeds)

    def fill(self, address: int, size: int, seed: int, stream: int) -> None:
        """Write the pattern of `seed` over whole words of [address, address + size)."""
        self._launch("fill", stream, size, _u64(address), _u64(size // 4), _u32(seed))

    def check(self, address: int, size: int, seed: int, stream: int) -> None:
        """Count the words that are not the pattern of `seed`."""
        parameters = _u64(address), _u64(size // 4), _u32(seed), _u64(self._counters)
        self._launch("check", stream, size, *parameters)

    def spin(self, milliseconds: float, stream: int) -> None:
        """Keep the stream busy for that long."""
        self._backend.launch_kernel(self._kernels["spin"], [1], [1], [_u64(int(milliseconds * 1e6))], stream)

    @property
    def device(self) -> Any:
        """The device the kernels run on."""
        return self._device

    def take_counts(self) -> tuple[int, int]:
        """Wait for the device; returns (bytes that differed, bytes checked) since the last call."""
        self._device.synchronize()
        counts = (ctypes.c_uint64 * 2)()
        self._backend.copy(ctypes.addressof(counts), self._counters, 16, 0)
        self._backend.fill(self._counters, 0, 16, 0)
        self._device.synchronize()
        return 4 * counts[0], 4 * counts[1]

    def _launch(self, name: str, stream: int, size: int, *parameters: bytes) -> None:
        blocks = max(1, min(MOST_BLOCKS, -(-size // (4 * THREADS))))
        self._backend.launch_kernel(self._kernels[name], [blocks], [THREADS], parameters, stream)


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _u32(value: int) -> bytes:
    return (value & 0xFFFFFFFF).to_bytes(4, "little")


@contextlib.contextmanager
def intact_pools(device: Any, build: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """What makes pools on a device; they must be intact in the end, and are closed then."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(build(device, **options))
        return made[-1]

    yield make
    device.synchronize()
    try:
        for pool in made:
            assert pool.closed or pool.check() is None
    finally:
        for pool in made:
            pool.close()


class Marked:
    """A buffer of a pool with a pattern of its own, written and checked in stream order."""

    def __init__(self, pool: Any, work: Work, size: int, stream: Any = None) -> None:
        self.buffer = pool.allocate(size, stream=stream)
        self.work, self.seed, self.size = work, work.new_seed(), size
        work.fill(self.buffer.ptr, size, self.seed, self.buffer.stream)

    def check(self) -> None:
        """Queue a check on the buffer's own stream."""
        self.work.check(self.buffer.ptr, self.size, self.seed, self.buffer.stream)

    def check_on(self, stream: Any) -> None:
        """Queue a check on another stream, after what is written, and tell the pool of the use."""
        self.work.check(self.buffer.ptr, self.size, self.seed, stream.handle)
        self.buffer.record_stream(stream)


class Bytes:
    """Device memory as other libraries take it: torch.as_tensor(Bytes(…), device="cuda"), cupy.asarray, …"""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Hold:
    """Holds a stream until opened: a function of the stream waits. One at a time: they may share a thread."""

    LONGEST = 30.0  # seconds, after which the test has failed anyway

    def __init__(self, stream: Any) -> None:
        self._gate = threading.Event()
        stream.launch(self._gate.wait, self.LONGEST)

    def open(self) -> None:
        self._gate.set()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *exception: object) -> None:
        self.open()
