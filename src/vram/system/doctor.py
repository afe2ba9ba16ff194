"""The checks of `vram doctor`: each is a function of a `Scene` and yields problems and how to fix them.

The checks change nothing and import no framework. The command prints the findings.
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
"""wrong: something does not work; warning: it works differently than expected; hint: it can be improved."""
LEVELS: tuple[Level, ...] = ("wrong", "warning", "hint")

OUR_VARIABLES = ("VRAM_CONF", "VRAM_RUNTIME_DIR", *VARIABLES)
TORCH_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
LEAST_LOCKED = 1 << 30
"""A limit on locked memory below this is reported as low."""
LEAST_FREE = 0.1
"""A device with a smaller fraction of free memory is reported as full."""


@dataclass(frozen=True)
class Finding:
    """One finding: what is the case, why it matters, and what to do."""

    level: Level
    title: str
    why: str
    fix: str

    def to_dict(self) -> dict[str, str]:
        """Return the finding as a dict of strings."""
        return asdict(self)


@dataclass(frozen=True)
class Scene:
    """Everything that the checks read, so that tests can provide it."""

    environ: Mapping[str, str]
    devices: list[dict[str, Any]] = field(default_factory=list)
    """As returned by `vram.system.machine.describe_device`."""
    no_cuda: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    plugged: Mapping[str, bool] = field(default_factory=dict)
    features: list[dict[str, Any]] = field(default_factory=list)
    torch_began: bool = False
    """Whether PyTorch has used CUDA in this process."""
    held_before: Mapping[str, int] = field(default_factory=dict)
    """Bytes that libraries on vram still hold from their own allocators."""
    reserved: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the pools of this process hold, by device."""
    no_compiler: str = ""
    locked_limit: int | None = None
    """Bytes that may be locked; None means no limit."""
    container: bool = False
    driver_files: tuple[str, ...] = ()
    """Files that show that the kernel has an NVIDIA driver."""
    unsafe_runtime: str = ""

    @property
    def has_cuda(self) -> bool:
        """Whether there is a GPU that vram can use."""
        return any(device["kind"] == "cuda" for device in self.devices)


def examine(scene: Scene | None = None) -> list[Finding]:
    """Run every check on a scene (default: this process); the most severe finding comes first."""
    seen = look() if scene is None else scene
    found = [finding for check in CHECKS for finding in check(seen)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


# ---- settings ---------------------------------------------------------------------------------------------


def check_settings(scene: Scene) -> Iterator[Finding]:
    """VRAM_CONF and the single variables are valid."""
    try:
        Config(environ=scene.environ)
    except ConfigError as error:
        yield Finding("wrong", "a setting is invalid", "no pool can be created with it", str(error))


def check_limit(scene: Scene) -> Iterator[Finding]:
    """A limit that has no effect."""
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
                f"the limit is {format_size(most)}, but {device['name']} has only {format_size(total)}",
                "it has no effect there",
                "lower it, or use a fraction such as limit:0.9",
            )


def check_variables(scene: Scene) -> Iterator[Finding]:
    """Variables that look like ours but are unknown."""
    for name in scene.environ:
        if name.upper().startswith("VRAM") and name not in OUR_VARIABLES:
            close = difflib.get_close_matches(name.upper(), OUR_VARIABLES, n=1, cutoff=0.5)
            yield Finding(
                "warning",
                f"{name} is set, but it is not a variable of vram",
                "it has no effect",
                f"did you mean {close[0]}?" if close else f"valid variables are {', '.join(OUR_VARIABLES)}",
            )


# ---- other libraries --------------------------------------------------------------------------------------


def check_torch_settings(scene: Scene) -> Iterator[Finding]:
    """Settings of PyTorch's allocator that have no effect."""
    given = [name for name in TORCH_VARIABLES if scene.environ.get(name)]
    if given and scene.plugged.get("torch"):
        yield Finding(
            "warning",
            f"{' and '.join(given)} is set while PyTorch allocates from vram",
            "only PyTorch's own allocator uses it",
            "remove it and use VRAM_CONF instead; vram maps pages like expandable_segments by default",
        )


def check_late_plug(scene: Scene) -> Iterator[Finding]:
    """PyTorch used CUDA before vram was installed in it."""
    if scene.torch_began and not scene.plugged.get("torch", True):
        yield Finding(
            "hint",
            "PyTorch has already used CUDA with its own allocator",
            "it can no longer be replaced in this process, and vram's pools share the device with it",
            "call vram.torch.install() before the first use of CUDA, start the program with "
            "vram run --torch, or use vram.torch.mem_pool() for parts of it",
        )
    for library, size in scene.held_before.items():
        yield Finding(
            "warning",
            f"{library} holds {format_size(size)} that it allocated before vram was installed in it",
            "vram cannot reuse that memory when the device is full",
            f"call vram.{library}.install() before the first array, or free the library's own pool",
        )


def check_preallocation(scene: Scene) -> Iterator[Finding]:
    """JAX preallocates three quarters of a GPU when it starts."""
    told = scene.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    if "jax" in scene.packages and scene.has_cuda and not told:
        yield Finding(
            "hint",
            "JAX is installed and will preallocate GPU memory",
            "it allocates most of a GPU on first use, which leaves little for vram's pools on that GPU",
            "set XLA_PYTHON_CLIENT_PREALLOCATE=false if you use both",
        )


def check_numba(scene: Scene) -> Iterator[Finding]:
    """Numba uses another memory manager."""
    manager = scene.environ.get("NUMBA_CUDA_MEMORY_MANAGER", "")
    if manager and manager not in ("vram.numba", "default"):
        yield Finding(
            "hint",
            f"NUMBA_CUDA_MEMORY_MANAGER is {manager!r}",
            "Numba does not allocate from vram",
            "set it to vram.numba",
        )


def check_compiler(scene: Scene) -> Iterator[Finding]:
    """A compiler is available for the library that throws torch.OutOfMemoryError."""
    if "torch" in scene.packages and scene.has_cuda and scene.no_compiler:
        yield Finding(
            "hint",
            "no C++ compiler is installed",
            "with vram.torch.install(), out of memory raises RuntimeError instead of torch.OutOfMemoryError",
            f"install g++ ({scene.no_compiler})",
        )


# ---- the machine ------------------------------------------------------------------------------------------


def check_driver(scene: Scene) -> Iterator[Finding]:
    """A GPU that cannot be used."""
    if scene.has_cuda:
        return
    hidden = scene.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        yield Finding(
            "warning",
            f"CUDA_VISIBLE_DEVICES is {hidden!r}",
            "it hides every GPU, so vram uses the host",
            "unset it, or set it to the devices to use",
        )
    elif scene.driver_files and scene.container:
        yield Finding(
            "wrong",
            f"this container has an NVIDIA driver ({scene.driver_files[0]}), but: {scene.no_cuda}",
            "vram uses the host instead",
            "start the container with the driver's library: docker run --gpus all, or the runtime of "
            "the NVIDIA container toolkit",
        )
    elif scene.driver_files:
        yield Finding(
            "wrong",
            f"the kernel has an NVIDIA driver ({scene.driver_files[0]}), but: {scene.no_cuda}",
            "vram uses the host instead",
            "install libcuda.so.1 of the same version; reboot after a driver update",
        )
    elif scene.container:
        yield Finding(
            "hint",
            f"this container has no GPU: {scene.no_cuda}",
            "vram uses the host",
            "if the machine has a GPU, use docker run --gpus all",
        )


def check_devices(scene: Scene) -> Iterator[Finding]:
    """GPUs that cannot map pages, or whose memory is used by others."""
    for device in scene.devices:
        if device["kind"] != "cuda":
            continue
        if not device["pages"]:
            yield Finding(
                "hint",
                f"{device['name']} cannot map pages",
                f"pools use plain segments, which waste more memory: {device['no_pages']}",
                "use a newer driver, or a GPU with virtual memory management",
            )
        ours = scene.reserved.get(device["name"], 0)
        if device["free_bytes"] + ours < LEAST_FREE * device["total_bytes"]:
            yield Finding(
                "warning",
                f"{device['name']} has only {format_size(device['free_bytes'])} free of "
                f"{format_size(device['total_bytes'])}, and {format_size(ours)} is in this process's pools",
                "pools will run out of memory early",
                "nvidia-smi shows the other processes",
            )


def check_locked_memory(scene: Scene) -> Iterator[Finding]:
    """A low limit on locked memory."""
    if scene.has_cuda and scene.locked_limit is not None and scene.locked_limit < LEAST_LOCKED:
        yield Finding(
            "hint",
            f"at most {format_size(scene.locked_limit)} of memory may be locked (ulimit -l)",
            "RDMA and some drivers count the pinned memory of vram.PinnedPool and vram.pin against this "
            "limit",
            "if pinning fails, raise it: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )


def check_runtime(scene: Scene) -> Iterator[Finding]:
    """No directory is available for the monitor's socket."""
    if scene.unsafe_runtime:
        yield Finding(
            "wrong", "vram.monitor() cannot work", scene.unsafe_runtime, "fix that, or set VRAM_RUNTIME_DIR"
        )


def check_features(scene: Scene) -> Iterator[Finding]:
    """Important optional packages that are missing; `vram info` lists the rest."""
    for each in scene.features:
        if each["name"] == "trace" and not each["there"]:
            yield Finding("hint", "pyarrow is missing", f"it is needed for {each['for']}", each["install"])


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


# ---- the scene of this process ----------------------------------------------------------------------------


def look() -> Scene:
    """Describe this process and its machine."""
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
