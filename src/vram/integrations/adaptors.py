"""Code shared by the adaptors for other libraries: their memory, and the error for a missing library.

Each adaptor (`vram.cupy`, `vram.numba`, `vram.cuda_core`, `vram.dask`) implements its library's interface.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType
from typing import Any

from vram.core.buffer import Buffer
from vram.core.device import Device, forget_cuda_device
from vram.core.manager import get_memory_manager
from vram.core.pinned import drop_shared_pinned_pool, shared_pinned_pool
from vram.core.pool import PinnedPool, Pool
from vram.core.tags import _current
from vram.errors import DeviceError

__all__ = ["DevicePools", "pinned_pool", "prepare", "reopen_if_reset", "require_library"]

_CONTEXT_IS_DESTROYED = 709  # CUDA_ERROR_CONTEXT_IS_DESTROYED
_users_tag = _current.get  # vram.current_tag() without a Python call: this is a hot path


def require_library(module: str, name: str) -> ModuleType:
    """Import another library; if it is missing, the ImportError names the adaptor that needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"vram's adaptor for {name} needs the module {module}, which cannot be imported: {error}. "
            f"Install {name} first.",
            name=module,
        ) from error


def prepare(config: dict[str, Any]) -> None:
    """First step of every install(): check that there is a CUDA device, and apply the settings."""
    Device("cuda:0")  # raises DeviceError if there is none
    if config:
        get_memory_manager().configure(config)


def reopen_if_reset(device: int) -> None:
    """Start again on a CUDA device that another library has reset: all memory there is lost."""
    place = Device(f"cuda:{device}")
    try:
        place.backend.memory_info()
    except DeviceError as error:
        if error.facts.get("native") != _CONTEXT_IS_DESTROYED:
            raise
        forget_cuda_device(device)
        for pool in (get_memory_manager().drop_pool(place), drop_shared_pinned_pool(place)):
            if pool is not None:
                with contextlib.suppress(DeviceError):
                    pool.close()


class DevicePools:
    """The manager's pools of the CUDA devices, by number. Allocations get the user's tag, else the library's.

    A closed pool is replaced by the manager's next one.
    """

    __slots__ = ("_pools", "_tag")

    def __init__(self, tag: str) -> None:
        """Set the name of the library that allocates through this object."""
        self._tag = tag
        self._pools: dict[int, Pool] = {}

    def allocate(self, size: int, device: int, stream: int) -> Buffer:
        """Allocate on a device, ordered by the handle of one of its streams."""
        pool = self._pools.get(device)
        if pool is None:
            pool = self.pool(device)
        try:
            return pool.allocate(size, stream=stream, tag=_users_tag() or self._tag)
        except DeviceError:
            if not pool.closed:
                raise
            return self.pool(device).allocate(size, stream=stream, tag=_users_tag() or self._tag)

    def pool(self, device: int) -> Pool:
        """Return the manager's pool of a device, created if needed."""
        pool = self._pools[device] = get_memory_manager().pool(f"cuda:{device}")
        return pool


def pinned_pool() -> PinnedPool:
    """Return the pinned host memory that all adaptors of this process share."""
    return shared_pinned_pool(Device("cuda:0"))
