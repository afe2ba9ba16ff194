"""PyTorch on vram: `install()` replaces PyTorch's CUDA allocator in the whole process; `mem_pool()` creates a
`torch.cuda.MemPool` on vram. All memory comes from the pools of `vram.get_memory_manager()`.

`companion` compiles the allocator (the folder native/) against the installed PyTorch. Where that is
impossible, PyTorch's pluggable allocator is used (native/plug/pluggable.cpp in the sources), and `patches`
implements queries that PyTorch does not support with it.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

from vram import _native
from vram.core.device import adopt_torch_streams
from vram.core.locks import new_lock
from vram.core.manager import get_memory_manager
from vram.core.pool import PinnedPool, Pool
from vram.errors import DeviceError
from vram.observe.recorder import PoolsRecorder, record_pools
from vram.torch.companion import ALLOCATOR, load_companion, thrower
from vram.torch.gpu import WITHOUT_GPU, require_cuda_build, require_gpu, require_torch
from vram.torch.inherit import inherit
from vram.torch.patches import History, Patches, replacements
from vram.torch.spill import steer_spilling
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
"""Our functions, and their names in PyTorch's pluggable allocator."""

_log = logging.getLogger("vram")


class _Installation:
    """The installation of this process. Never released: PyTorch frees memory until the process ends."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.allocator: Any = None  # the one PyTorch uses: our library, or a pluggable allocator
        self.scoped: Any = None  # the one for MemPools
        self.pools: dict[int, Pool] = {}
        self.pinned: PinnedPool | None = None
        self.history = History(self.pools, lambda: get_memory_manager()._pool_settings()["journal"])
        self.patches = Patches()

    def plug(self, device: int) -> None:
        """Make the manager's pool serve a CUDA device."""
        with self.lock:
            if device not in self.pools:
                pool = get_memory_manager().pool(f"cuda:{device}")
                self.history.join(device, pool)
                self.pools[device] = pool
                _native.plug_set_adopter(adopt_torch_streams)
                _native.plug_set_pool(device, pool)

    def plug_pinned(self, device: int) -> None:
        """Make one pool serve all pinned host memory; `device` has a context already."""
        with self.lock:
            if self.pinned is None:
                self.pinned = PinnedPool(f"cuda:{device}", limit=None)
                _native.plug_set_pinned_pool(self.pinned)


_installation = _Installation()


def install(**config: Any) -> None:
    """Make PyTorch allocate all CUDA memory from vram until the process ends.

    Call it before the first use of CUDA; afterwards it raises DeviceError. `config` takes the options of
    `vram.configure`. Each device gets its pool on first use, so other devices are not touched. The first call
    on a machine compiles a library against PyTorch (about half a minute, then cached; `vram torch build` does
    it ahead). Without a compiler or CUDA's headers, PyTorch's pluggable allocator is used, which lacks some
    features, and a warning says so. Calling `install` again only applies `config`. Processes that
    `multiprocessing` starts afterwards, by `spawn` or `forkserver`, use vram with the same `config`.
    """
    torch = require_torch()
    with _installation.lock:
        if _installation.allocator is None:
            _require_unused(torch)
            get_memory_manager().configure(config)
            _install(torch)
        elif config:
            get_memory_manager().configure(config)
        if get_memory_manager()._pool_settings()["spill"]:
            steer_spilling(torch)
        inherit(config)


def installed() -> bool:
    """Return whether PyTorch allocates from vram."""
    return _installation.allocator is not None


def uses_pools() -> bool:
    """Return whether any of PyTorch's memory comes from vram, through `install()` or `mem_pool()`."""
    return installed() or _installation.scoped is not None


def uninstall_patches() -> None:
    """Restore PyTorch's own functions that vram had replaced.

    Functions are replaced only where PyTorch's pluggable allocator is used (see `install`). The allocator
    stays, because PyTorch cannot change it once it is in use. Functions that PyTorch does not support with a
    pluggable allocator (such as `torch.cuda.memory_stats`) raise again.
    """
    with _installation.lock:
        _installation.patches.restore()


def mem_pool(device: Any = None) -> Any:
    """Return a new `torch.cuda.MemPool` whose segments come from vram, for `torch.cuda.use_mem_pool`.

    Without `install()`, PyTorch's own allocator stays in use and takes whole segments; this works also after
    the first use of CUDA. `device` is an index or a torch.device. Default: the current device.
    """
    torch = require_torch()
    if isinstance(_installation.allocator, ctypes.CDLL):
        with torch.cuda.device(_index(torch, device)):
            return torch.cuda.MemPool()
    if installed():
        raise DeviceError(
            "PyTorch already allocates everything from vram; MemPools belong to the allocator that vram "
            "replaced",
            code="invalid",
        )
    require_gpu(torch)
    index = _index(torch, device)
    with _installation.lock:
        _installation.plug(index)
        if _installation.scoped is None:
            _installation.scoped = _new_allocator(torch, "vram_plug_try_allocate")
    return torch.cuda.MemPool(_installation.scoped.allocator())


def suspend(tag: str | None = None, keep: str = "host") -> int:
    """Release the memory of tensors allocated under `vram.tag(tag)`, or of all tensors, to the devices.

    Works like `Pool.suspend`, on every device that PyTorch has used. Returns the released bytes. The tensors
    keep their addresses. Do not use them, or replay a captured graph that uses them, before `resume()`. With
    `mem_pool()`, tags apply to whole segments of PyTorch: a segment has the tag that was active when PyTorch
    allocated it.
    """
    return sum(pool.suspend(tag, keep) for pool in _plugged())


def resume(tag: str | None = None) -> int:
    """Restore what `suspend` released and return the bytes. Tensors and captured graphs work again.

    Raises OutOfMemory if a device has too little memory; what was not restored stays suspended.
    """
    return sum(pool.resume(tag) for pool in _plugged())


def _plugged() -> tuple[Pool, ...]:
    """Return the pools that PyTorch allocates from."""
    with _installation.lock:
        if _installation.allocator is None and _installation.scoped is None:
            raise DeviceError(
                "PyTorch does not allocate from vram; call vram.torch.install() first, or use mem_pool()",
                code="invalid",
            )
        return tuple(_installation.pools.values())


def watch(path: str | os.PathLike[str], **options: Any) -> Watch | PoolsRecorder:
    """Record PyTorch's memory to a trace file until `close()`, the end of a `with` block or of the process.

    PyTorch keeps its own allocator. Its history is read every `every` seconds (5) and when memory runs out,
    so `entries` (200 000) must hold the events in between. If `install()` is active, vram's own pools are
    recorded instead, with the options of `vram.record`. The first device writes to `path`, other devices to
    files next to it. If a launcher such as torchrun numbers the processes, each writes to its own file
    (`run.rank-3.vtrace`). `rotate` and `keep` are those of `vram.record`. Marks of `vram.step` and
    `vram.annotate` are recorded as well. Without a GPU it raises a DeviceError that says what works there.
    """
    torch = require_torch()
    if installed():
        return record_pools(get_memory_manager(), path, **options)
    require_gpu(torch)
    return Watch(torch, path, **options)


def _index(torch: Any, device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(torch.cuda.current_device() if index is None else index)


def _require_unused(torch: Any) -> None:
    if torch.cuda.is_initialized():
        raise DeviceError(
            "PyTorch has already used CUDA and can no longer change its allocator; call vram.torch.install() "
            "before anything touches the GPU, or start the program with `vram run --torch script.py`",
            code="invalid",
        )
    require_cuda_build(torch)
    count, why = _native.cuda_devices()
    if count == 0:
        raise DeviceError(f"PyTorch has no CUDA device to use: {why}. {WITHOUT_GPU}", code="missing")


def _install(torch: Any) -> None:
    try:
        library = load_companion(torch, ALLOCATOR)
    except DeviceError as error:
        _log.warning(
            "vram uses PyTorch's pluggable allocator, without CUDA-graph trees and torch.cuda.MemPool; "
            "its own could not be built: %s",
            error,
        )
        _installation.allocator = _install_pluggable(torch)
    else:
        _install_allocator(library)
        _installation.allocator = library
    _native.plug_set_maker(_installation.plug)
    _native.plug_set_pinned_maker(_installation.plug_pinned)


def _install_allocator(library: ctypes.CDLL) -> None:
    library.vram_torch_install.argtypes = [ctypes.c_void_p]
    library.vram_torch_install.restype = ctypes.c_char_p
    why = library.vram_torch_install(_native.plug_engine())
    if why is not None:
        raise DeviceError(f"PyTorch refused to replace its allocator: {why.decode()}", code="invalid")


def _install_pluggable(torch: Any) -> Any:
    _native.plug_set_throw(thrower(torch))
    allocator = _new_allocator(torch, "vram_plug_allocate")
    _set_hooks(allocator._allocator)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise DeviceError(f"PyTorch refused to replace its allocator: {error}", code="invalid") from error
    devices, _why = _native.cuda_devices()
    functions = replacements(_installation.pools, _installation.history, devices)
    _installation.patches.replace_functions(torch._C, functions)
    _installation.patches.without_graph_trees()
    return allocator


def _new_allocator(torch: Any, allocate: str) -> Any:
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, allocate, "vram_plug_free")


def _set_hooks(target: Any) -> None:
    """Pass PyTorch every function it has a setter for. Functions that PyTorch does not call yet need none."""
    functions = _native.plug_functions()
    for ours, names in HOOKS.items():
        setter = next((getattr(target, name) for name in names if hasattr(target, name)), None)
        if setter is None:
            _log.warning("this version of PyTorch has no hook for %s, which will not work", ours)
        else:
            setter(functions[ours])
