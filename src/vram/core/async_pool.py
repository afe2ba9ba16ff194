"""`AsyncMemoryPool`: a pool of a given size whose requests are served by other threads."""

from __future__ import annotations

import functools
from concurrent.futures import Future, wait
from typing import Any

from vram.core.closing import Closing
from vram.core.device import Device
from vram.core.pool import Pool
from vram.core.stats import Stats
from vram.errors import OutOfMemory
from vram.sizes import parse_size

__all__ = ["AsyncMemoryPool"]


class AsyncMemoryPool(Closing):
    """Memory of a given size, reserved in the background; allocations return futures of addresses.

    It never holds more than `pool_size`. `config` takes the other options of `vram.Pool`; the pool itself is
    the attribute `pool`. `Pool.allocate_async` does the same for any pool, with a future of a Buffer.
    """

    def __init__(
        self, pool_size: int | str = "1GiB", device: str | Device | None = None, **config: Any
    ) -> None:
        """Create the pool and begin to reserve its memory; returns at once."""
        size = parse_size(pool_size)
        self.pool = Pool(device, limit=size, **config)
        self._reserving = self.pool._submit(functools.partial(self._reserve, size))

    def _reserve(self, size: int) -> None:
        try:
            self.pool.reserve(size)
        except OutOfMemory:  # the device has less: requests take what there is
            return

    def allocate_async(self, size: int | str, *, stream: Any = None) -> Future[int]:
        """Allocate on another thread; returns a Future of the address, or of the error."""
        return self.pool._submit(functools.partial(self._allocate, size, stream))

    def _allocate(self, size: int | str, stream: Any) -> int:
        wait([self._reserving])  # it was submitted before, so it has a thread
        return self.pool.malloc(size, stream)

    def free(self, ptr: int) -> None:
        """Free what `allocate_async` returned."""
        self.pool.free(ptr)

    def stats(self) -> Stats:
        """The statistics of the pool."""
        return self.pool.stats()

    def close(self) -> None:
        """Cancel requests that have not started, and release all memory."""
        self.pool.close()

    def __repr__(self) -> str:
        return f"<vram.AsyncMemoryPool over {self.pool!r}>"
