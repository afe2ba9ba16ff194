"""Kernels for the tests here: write a pattern, count what differs from it, take time.

Compiled by CuPy and launched on any stream of the process by its handle. Order and memory are for the tests.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

SOURCE = r"""
__device__ unsigned word(unsigned seed, unsigned long long place) {
  unsigned mixed = seed * 2654435761u ^ (unsigned)place * 2246822519u ^ (unsigned)(place >> 32);
  return mixed ^ mixed >> 15;
}

extern "C" __global__ void fill(unsigned* to, unsigned long long words, unsigned seed) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step)
    to[i] = word(seed, i);
}

// counters[0] += words that differ, counters[1] += words looked at
extern "C" __global__ void check(const unsigned* from, unsigned long long words, unsigned seed,
                                 unsigned long long* counters) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long wrong = 0;
  for (unsigned long long i = first; i < words; i += step) wrong += from[i] != word(seed, i);
  if (wrong != 0) atomicAdd(counters, wrong);
  if (first == 0) atomicAdd(counters + 1, words);
}

extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
"""
THREADS = 256
MOST_BLOCKS = 1024


class Work:
    """The kernels, and one pair of counters for what they checked. Any thread may launch."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._module = cupy.RawModule(code=SOURCE)
        self._kernels = {name: self._module.get_function(name) for name in ("fill", "check", "spin")}
        self._counters = cupy.zeros(2, cupy.uint64)
        self._seeds = itertools.count(1)
        self._warm_up()

    def _warm_up(self) -> None:
        """Launch each once: the driver loads a kernel at its first launch, which a capture may not allow."""
        scratch = self._cupy.zeros(128, self._cupy.uint32)
        self.fill(scratch.data.ptr, 512, 1, 0)
        self.check(scratch.data.ptr, 512, 1, 0)
        self.spin(0.001, 0)
        self._cupy.cuda.Device().synchronize()
        assert self.take_counts() == (0, 512)

    def new_seed(self) -> int:
        """A pattern that nobody has used yet."""
        return next(self._seeds)

    def fill(self, address: int, size: int, seed: int, stream: int) -> None:
        """Write the pattern of `seed` over whole words of [address, address + size)."""
        self._launch("fill", stream, size, self._u64(address), self._u64(size // 4), self._u32(seed))

    def check(self, address: int, size: int, seed: int, stream: int) -> None:
        """Count the words that are not the pattern of `seed`."""
        counters = self._u64(self._counters.data.ptr)
        self._launch(
            "check", stream, size, self._u64(address), self._u64(size // 4), self._u32(seed), counters
        )

    def spin(self, milliseconds: float, stream: int) -> None:
        """Keep the stream busy for that long."""
        self._launch("spin", stream, 4, self._u64(int(milliseconds * 1e6)))

    def take_counts(self) -> tuple[int, int]:
        """Wait for the device; returns (bytes that differed, bytes checked) since the last call."""
        self._cupy.cuda.Device().synchronize()
        wrong, checked = (4 * int(count) for count in self._counters.get())
        self._counters.fill(0)
        self._cupy.cuda.Device().synchronize()
        return wrong, checked

    def _launch(self, name: str, stream: int, size: int, *arguments: Any) -> None:
        threads = 1 if name == "spin" else THREADS
        blocks = max(1, min(MOST_BLOCKS, -(-size // (4 * threads)))) if threads > 1 else 1
        with self._cupy.cuda.ExternalStream(stream):
            self._kernels[name]((blocks,), (threads,), arguments)

    def _u64(self, value: int) -> Any:
        import numpy

        return numpy.uint64(value)

    def _u32(self, value: int) -> Any:
        import numpy

        return numpy.uint32(value & 0xFFFFFFFF)


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
