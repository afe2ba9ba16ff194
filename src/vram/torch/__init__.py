"""PyTorch on vram: `install()` replaces PyTorch's CUDA allocator in the whole process, `mem_pool()` feeds one
`torch.cuda.MemPool`. What the allocator hands out comes from the pools of `vram.get_memory_manager()`.

The functions that PyTorch calls are native (native/plug/plug.cpp). `patches` answers what PyTorch refuses
to answer with a pluggable allocator, and `companion` raises `torch.OutOfMemoryError`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vram import _native
from vram.core.device import adopt_torch_streams
from vram.core.locks import new_lock
from vram.core.manager import get_memory_manager
from vram.core.pool import Pool
from vram.errors import DeviceError
from vram.integrations.adaptors import require_library
from vram.observe.recorder import PoolsRecorder, record_pools
from vram.torch.companion import thrower
from vram.torch.patches import History, Patches, replacements
from vram.torch.watch import Watch

__all__ = ["install", "installed", "mem_pool", "resume", "suspend", "uninstall_patches", "watch"]

HOOKS = {
    "record_stream": ("set_record_stream_fn",),
    "empty_cache": ("set_reset_fn",),
    "memory_fraction": ("set_memory_fraction_fn",),
    "base": ("set_base_alloc_fn",),
    "heap_begin": ("set_begin_allocate_to_pool", "set_begin_allocate_to_pool_fn"),
    "heap_end": ("set_end_allocate_to_pool_fn",),
    "heap_release": ("set_release_pool", "set_release_pool_fn"),
}
"""Our functions, and under which names PyTorch's allocator object takes them."""

_log = logging.getLogger("vram")


class _Installation:
    """The one of this process. PyTorch frees memory until its very end, so nothing here is ever let go."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.allocator: Any = None  # the one PyTorch uses
        self.scoped: Any = None  # the one that feeds MemPools
        self.pools: dict[int, Pool] = {}
        self.history = History(self.pools, lambda: get_memory_manager()._pool_settings()["journal"])
        self.patches = Patches()

    def plug(self, device: int) -> None:
        """Let the manager's pool serve a CUDA device."""
        with self.lock:
            if device not in self.pools:
                pool = get_memory_manager().pool(f"cuda:{device}")
                self.history.join(device, pool)
                self.pools[device] = pool
                _native.plug_set_adopter(adopt_torch_streams)
                _native.plug_set_pool(device, pool)


_installation = _Installation()


def install(**config: Any) -> None:
    """Have PyTorch allocate all CUDA memory from vram, from now to the end of the process.

    Call it before the first use of CUDA; afterwards it is a DeviceError. `config` takes the options of
    `vram.configure`. Each device gets its pool on its first use, so that other devices are left alone.
    The first call on a machine compiles a small library (a few seconds, then cached), so that out of memory
    is a `torch.OutOfMemoryError`; without a compiler it is a RuntimeError, and a warning is logged. Calling
    it again only applies `config`.
    """
    torch = require_library("torch", "PyTorch")
    with _installation.lock:
        if _installation.allocator is None:
            _require_unused(torch)
            get_memory_manager().configure(config)
            _install(torch)
        elif config:
            get_memory_manager().configure(config)


def installed() -> bool:
    """Whether PyTorch allocates from vram."""
    return _installation.allocator is not None


def uses_pools() -> bool:
    """Whether any of PyTorch's memory comes from vram's pools: by `install()` or a `mem_pool()`."""
    return installed() or _installation.scoped is not None


def uninstall_patches() -> None:
    """Put PyTorch's own functions back where vram answers for them.

    The allocator stays: PyTorch cannot change it once it is in use. What it refuses under a plugged
    allocator (`torch.cuda.memory_stats` and the like) raises again.
    """
    with _installation.lock:
        _installation.patches.restore()


def mem_pool(device: Any = None) -> Any:
    """Return a new `torch.cuda.MemPool` whose segments come from vram, for `torch.cuda.use_mem_pool`.

    PyTorch's own allocator stays in charge and takes whole segments, so this needs no `install()`, and may
    come after the first use of CUDA. `device` is an index or a torch.device; without, the current one.
    """
    torch = require_library("torch", "PyTorch")
    if installed():
        raise DeviceError(
            "PyTorch allocates everything from vram already; MemPools are part of the allocator it replaced",
            code="invalid",
        )
    index = _index(torch, device)
    with _installation.lock:
        _installation.plug(index)
        if _installation.scoped is None:
            _installation.scoped = _new_allocator(torch, "vram_plug_try_allocate")
    return torch.cuda.MemPool(_installation.scoped.allocator())


def suspend(tag: str | None = None, keep: str = "host") -> int:
    """Give the memory of tensors allocated under `vram.tag(tag)`, or of all, back to the devices.

    As `Pool.suspend`, on every device that PyTorch has used; returns how many bytes went. The tensors keep
    their addresses and must not be touched before `resume()`, nor a captured graph be replayed that uses
    them. Under `mem_pool()` it is whole segments of PyTorch's that have tags: those in force when it took
    them.
    """
    return sum(pool.suspend(tag, keep) for pool in _plugged())


def resume(tag: str | None = None) -> int:
    """Bring back what `suspend` took: tensors and captured graphs work as before; returns how many bytes.

    OutOfMemory where a device has no room; what is not back then stays suspended.
    """
    return sum(pool.resume(tag) for pool in _plugged())


def _plugged() -> tuple[Pool, ...]:
    """The pools that PyTorch allocates from."""
    with _installation.lock:
        if _installation.allocator is None and _installation.scoped is None:
            raise DeviceError(
                "PyTorch does not allocate from vram; call vram.torch.install() first, or use mem_pool()",
                code="invalid",
            )
        return tuple(_installation.pools.values())


def watch(path: str | os.PathLike[str], **options: Any) -> Watch | PoolsRecorder:
    """Record PyTorch's memory to a trace file until `close()`, the end of a `with` block or of the process.

    PyTorch's own allocator stays; its history is read every `every` seconds (5) and when memory runs out,
    so `entries` (200 000) should hold what happens in between. With `install()` in force, vram's own pools
    are recorded instead, with the options of `vram.record`. The first device's file is `path`, others lie
    beside it; in a job whose launcher numbers its processes, as torchrun does, each writes to a name of its
    own (`run.rank-3.vtrace`). `rotate` and `keep` are as for `vram.record`. Marks of `vram.step` and
    `vram.annotate` go in as well.
    """
    torch = require_library("torch", "PyTorch")
    if installed():
        return record_pools(get_memory_manager(), path, **options)
    return Watch(torch, path, **options)


def _index(torch: Any, device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(torch.cuda.current_device() if index is None else index)


def _require_unused(torch: Any) -> None:
    if torch.cuda.is_initialized():
        raise DeviceError(
            "PyTorch has used CUDA already, and cannot change its allocator then; call vram.torch.install() "
            "before anything touches the GPU, or start the program with `vram run --torch script.py`",
            code="invalid",
        )
    count, why = _native.cuda_devices()
    if count == 0:
        raise DeviceError(f"there is no CUDA device for PyTorch to use: {why}", code="missing")


def _install(torch: Any) -> None:
    _native.plug_set_throw(thrower(torch))
    allocator = _new_allocator(torch, "vram_plug_allocate")
    _set_hooks(allocator._allocator)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise DeviceError(
            f"PyTorch does not let its allocator be replaced: {error}", code="invalid"
        ) from error
    _native.plug_set_maker(_installation.plug)
    _installation.allocator = allocator
    devices, _why = _native.cuda_devices()
    functions = replacements(_installation.pools, _installation.history, devices)
    _installation.patches.replace_functions(torch._C, functions)
    _installation.patches.without_graph_trees()


def _new_allocator(torch: Any, allocate: str) -> Any:
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, allocate, "vram_plug_free")


def _set_hooks(target: Any) -> None:
    """Give PyTorch every function it has a place for. Those it calls nothing for now need none."""
    functions = _native.plug_functions()
    for ours, names in HOOKS.items():
        setter = next((getattr(target, name) for name in names if hasattr(target, name)), None)
        if setter is None:
            _log.warning("this PyTorch takes no function for %s; that will not work", ours)
        else:
            setter(functions[ours])
