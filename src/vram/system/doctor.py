"""What is wrong with a set-up, and how to mend it: the checks of `vram doctor`, each a function of a `Scene`.

Looks and judges; changes nothing and imports no framework. Drawing is the command's.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from vram.config import VARIABLES, Config, limit_bytes
from vram.errors import ConfigError, DeviceError, VramError
from vram.sizes import format_size

__all__ = ["CHECKS", "Finding", "Scene", "examine", "look"]

Level: TypeAlias = Literal["wrong", "warning", "hint"]
"""wrong: something does not work; warning: it works other than one would think; hint: it could be better."""
LEVELS: tuple[Level, ...] = ("wrong", "warning", "hint")

OUR_VARIABLES = ("VRAM_CONF", "VRAM_RUNTIME_DIR", *VARIABLES)
TORCH_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
LEAST_LOCKED = 1 << 30
"""A limit of locked memory below this is called low."""
LEAST_FREE = 0.1
"""A device with less than this share free is called full."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found: what is so, why it matters, and what to do."""

    level: Level
    title: str
    why: str
    fix: str

    def to_dict(self) -> dict[str, str]:
        """The finding as plain text by name."""
        return asdict(self)


@dataclass(frozen=True)
class Scene:
    """All that the checks look at, so that a test can set one."""

    environ: Mapping[str, str]
    devices: list[dict[str, Any]] = field(default_factory=list)
    """As `vram.system.machine.describe_device` has them."""
    no_cuda: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    plugged: Mapping[str, bool] = field(default_factory=dict)
    features: list[dict[str, Any]] = field(default_factory=list)
    torch_began: bool = False
    """Whether PyTorch has used CUDA in this process."""
    held_before: Mapping[str, int] = field(default_factory=dict)
    """Bytes that libraries which allocate from vram still hold from before."""
    reserved: Mapping[str, int] = field(default_factory=dict)
    """Bytes that this process's pools hold, by device."""
    no_compiler: str = ""
    locked_limit: int | None = None
    """Bytes that may be locked; None for no limit."""
    container: bool = False
    driver_files: tuple[str, ...] = ()
    """Signs that the kernel has an NVIDIA driver."""
    unsafe_runtime: str = ""

    @property
    def has_cuda(self) -> bool:
        """Whether there is a GPU that vram can use."""
        return any(device["kind"] == "cuda" for device in self.devices)


def examine(scene: Scene | None = None) -> list[Finding]:
    """Run every check on a scene (by default this process), the gravest finding first."""
    seen = look() if scene is None else scene
    found = [finding for check in CHECKS for finding in check(seen)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


# ---- settings ---------------------------------------------------------------------------------------------


def check_settings(scene: Scene) -> Iterator[Finding]:
    """VRAM_CONF and the single variables can be read."""
    try:
        Config(environ=scene.environ)
    except ConfigError as error:
        yield Finding("wrong", "a setting cannot be read", "no pool can be made with it", str(error))


def check_limit(scene: Scene) -> Iterator[Finding]:
    """A limit that is no limit."""
    try:
        limit = Config(environ=scene.environ)["limit"]
    except ConfigError:
        return
    for device in scene.devices:
        total = device["total_bytes"]
        most = limit_bytes(limit, total)
        if most > total:
            yield Finding(
                "warning",
                f"limit is {format_size(most)}, and {device['name']} has {format_size(total)}",
                "it limits nothing there",
                "lower it, or give a share such as limit:0.9",
            )


def check_variables(scene: Scene) -> Iterator[Finding]:
    """Variables that look like ours and are not."""
    for name in scene.environ:
        if name.upper().startswith("VRAM") and name not in OUR_VARIABLES:
            close = difflib.get_close_matches(name.upper(), OUR_VARIABLES, n=1, cutoff=0.5)
            yield Finding(
                "warning",
                f"{name} is set, and vram does not know it",
                "nothing reads it",
                f"did you mean {close[0]}?" if close else f"the variables are {', '.join(OUR_VARIABLES)}",
            )


# ---- other libraries --------------------------------------------------------------------------------------


def check_torch_settings(scene: Scene) -> Iterator[Finding]:
    """PyTorch's allocator is told something that nobody hears."""
    given = [name for name in TORCH_VARIABLES if scene.environ.get(name)]
    if given and scene.plugged.get("torch"):
        yield Finding(
            "warning",
            f"{' and '.join(given)} is set while PyTorch allocates from vram",
            "only PyTorch's own allocator heeds it",
            "remove it, and set what vram offers in VRAM_CONF: pages are mapped as expandable_segments does",
        )


def check_late_plug(scene: Scene) -> Iterator[Finding]:
    """PyTorch was there first."""
    if scene.torch_began and not scene.plugged.get("torch", True):
        yield Finding(
            "hint",
            "PyTorch has used CUDA with its own allocator",
            "it cannot be replaced any more in this process, and pools of vram share the device with it",
            "call vram.torch.install() before the first use of CUDA, start the program with "
            "vram run --torch, or feed a part of it with vram.torch.mem_pool()",
        )
    for library, size in scene.held_before.items():
        yield Finding(
            "warning",
            f"{library} holds {format_size(size)} from before it was given to vram",
            "vram cannot reuse that memory when the device runs full",
            f"call vram.{library}.install() before the first array, or free the library's own pool",
        )


def check_preallocation(scene: Scene) -> Iterator[Finding]:
    """JAX takes three quarters of a GPU when it starts."""
    told = scene.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    if "jax" in scene.packages and scene.has_cuda and not told:
        yield Finding(
            "hint",
            "JAX is installed and will preallocate",
            "it takes most of a GPU at its first use, which pools of vram on the same GPU then lack",
            "set XLA_PYTHON_CLIENT_PREALLOCATE=false where both are used",
        )


def check_numba(scene: Scene) -> Iterator[Finding]:
    """Numba's memory manager is another one."""
    manager = scene.environ.get("NUMBA_CUDA_MEMORY_MANAGER", "")
    if manager and manager not in ("vram.numba", "default"):
        yield Finding(
            "hint",
            f"NUMBA_CUDA_MEMORY_MANAGER is {manager!r}",
            "Numba does not allocate from vram",
            "set it to vram.numba",
        )


def check_compiler(scene: Scene) -> Iterator[Finding]:
    """The companion that throws torch.OutOfMemoryError is compiled."""
    if "torch" in scene.packages and scene.has_cuda and scene.no_compiler:
        yield Finding(
            "hint",
            "there is no C++ compiler",
            "under vram.torch.install() out of memory is a RuntimeError, not a torch.OutOfMemoryError",
            f"install g++ ({scene.no_compiler})",
        )


# ---- the machine ------------------------------------------------------------------------------------------


def check_driver(scene: Scene) -> Iterator[Finding]:
    """A GPU that cannot be reached."""
    if scene.has_cuda:
        return
    hidden = scene.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        yield Finding(
            "warning",
            f"CUDA_VISIBLE_DEVICES is {hidden!r}",
            "it hides every GPU, so vram uses the host",
            "unset it, or name the devices to use",
        )
    elif scene.driver_files and scene.container:
        yield Finding(
            "wrong",
            f"this container sees a GPU's driver ({scene.driver_files[0]}), but: {scene.no_cuda}",
            "vram uses the host instead",
            "start the container with the driver's library in it: docker run --gpus all, or the runtime of "
            "the NVIDIA container toolkit",
        )
    elif scene.driver_files:
        yield Finding(
            "wrong",
            f"the kernel has an NVIDIA driver ({scene.driver_files[0]}), but: {scene.no_cuda}",
            "vram uses the host instead",
            "install libcuda.so.1 of the same version; after an update of the driver, reboot",
        )
    elif scene.container:
        yield Finding(
            "hint",
            f"this container has no GPU: {scene.no_cuda}",
            "vram uses the host",
            "where the machine has one: docker run --gpus all",
        )


def check_devices(scene: Scene) -> Iterator[Finding]:
    """GPUs that map no pages, or are full of what is not ours."""
    for device in scene.devices:
        if device["kind"] != "cuda":
            continue
        if not device["pages"]:
            yield Finding(
                "hint",
                f"{device['name']} maps no pages",
                f"pools take plain segments, which waste more: {device['no_pages']}",
                "a newer driver, or a GPU with virtual memory management",
            )
        ours = scene.reserved.get(device["name"], 0)
        if device["free_bytes"] + ours < LEAST_FREE * device["total_bytes"]:
            yield Finding(
                "warning",
                f"{device['name']} has only {format_size(device['free_bytes'])} free of "
                f"{format_size(device['total_bytes'])}, and {format_size(ours)} are this process's pools'",
                "pools will run out early",
                "nvidia-smi shows who else is there",
            )


def check_locked_memory(scene: Scene) -> Iterator[Finding]:
    """A low limit of locked memory."""
    if scene.has_cuda and scene.locked_limit is not None and scene.locked_limit < LEAST_LOCKED:
        yield Finding(
            "hint",
            f"at most {format_size(scene.locked_limit)} may be locked (ulimit -l)",
            "RDMA, and some drivers, count page-locked memory of vram.PinnedPool and vram.pin against it",
            "where pinning fails, raise it: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )


def check_runtime(scene: Scene) -> Iterator[Finding]:
    """No place for the monitor's socket."""
    if scene.unsafe_runtime:
        yield Finding(
            "wrong", "vram.monitor() cannot work", scene.unsafe_runtime, "see above, or set VRAM_RUNTIME_DIR"
        )


def check_features(scene: Scene) -> Iterator[Finding]:
    """What much depends on and is missing; `vram info` lists the rest."""
    for each in scene.features:
        if each["name"] == "trace" and not each["there"]:
            yield Finding("hint", "pyarrow is missing", f"it is for {each['for']}", each["install"])


CHECKS: tuple[Callable[[Scene], Iterator[Finding]], ...] = (
    check_settings,
    check_variables,
    check_limit,
    check_torch_settings,
    check_late_plug,
    check_preallocation,
    check_numba,
    check_compiler,
    check_driver,
    check_devices,
    check_locked_memory,
    check_runtime,
    check_features,
)


# ---- looking ----------------------------------------------------------------------------------------------


def look() -> Scene:
    """This process and its machine."""
    from vram.system.machine import features, packages, plugged

    devices, no_cuda = _devices()
    return Scene(
        environ=dict(os.environ),
        devices=devices,
        no_cuda=no_cuda,
        packages=packages(),
        plugged=plugged(),
        features=features(),
        torch_began=_torch_began(),
        held_before=_held_before(plugged()),
        reserved=_reserved(),
        no_compiler=_no_compiler(),
        locked_limit=_locked_limit(),
        container=any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv"))),
        driver_files=tuple(filter(os.path.exists, ("/proc/driver/nvidia/version", "/dev/nvidiactl"))),
        unsafe_runtime=_unsafe_runtime(),
    )


def _devices() -> tuple[list[dict[str, Any]], str]:
    from vram import _native
    from vram.core.device import devices
    from vram.system.machine import describe_device

    count, why = _native.cuda_devices()
    return [describe_device(device) for device in devices()], "" if count else why


def _torch_began() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())


def _held_before(plugged: Mapping[str, bool]) -> dict[str, int]:
    cupy = sys.modules.get("cupy")
    held = cupy.get_default_memory_pool().total_bytes() if cupy is not None and plugged.get("cupy") else 0
    return {"cupy": int(held)} if held else {}


def _reserved() -> dict[str, int]:
    from vram.core.observer import open_pools

    found: dict[str, int] = {}
    for pool in open_pools():
        found[pool.memory] = found.get(pool.memory, 0) + pool.stats().reserved
    return found


def _no_compiler() -> str:
    from vram.system.compiler import find_compiler

    try:
        find_compiler()
    except DeviceError as error:
        return str(error)
    return ""


def _locked_limit() -> int | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _unsafe_runtime() -> str:
    from vram.system.runtime import runtime_directory

    try:
        runtime_directory()
    except VramError as error:
        return str(error)
    return ""
