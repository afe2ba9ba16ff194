"""The companion libraries: C++ compiled against the installed PyTorch, once, then cached.

`ALLOCATOR` (the folder native/) is the allocator that `install()` puts into PyTorch. `THROWER` only throws
`torch.OutOfMemoryError`; it is used where the allocator cannot be compiled. A library is made for one
PyTorch, CUDA, Python and vram. All of these are in its name and in the file, so another one is never loaded.
In the cache, each installation of PyTorch has its own: a library contains the places of the headers and
libraries that it was compiled against. A cache in which other users can write is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vram.errors import DeviceError
from vram.system.compiler import find_compiler
from vram.system.runtime import writable_by_others

__all__ = [
    *("ALLOCATOR", "THROWER", "Companion", "build_companion", "cache_directory", "load_companion", "thrower"),
]

DIRECTORY_VARIABLE = "VRAM_TORCH_LIBRARIES"
"""Names a directory with libraries that `vram torch build --output` made; it is searched before the cache.

Like PYTHONPATH, it is trusted because the user named it."""
COMPILE_SECONDS = 600
"""Far more than a compiler needs; a longer run means that it hangs."""

_log = logging.getLogger("vram")


@dataclass(frozen=True)
class Companion:
    """A library and the files it is made from, relative to this package."""

    name: str
    sources: tuple[str, ...]
    libraries: tuple[str, ...]
    cuda: bool
    """Whether it needs CUDA's headers."""

    def texts(self) -> dict[str, bytes]:
        """Every file that decides what is made: those that the compiler reads, and this one, by name."""
        home = Path(__file__).parent
        folders = sorted({(home / source).parent for source in self.sources} - {home})
        paths = [Path(__file__), *(home / source for source in self.sources)]
        paths += [path for folder in folders for path in sorted(folder.glob("*.h*"))]
        return {path.name: path.read_bytes() for path in paths}


ALLOCATOR = Companion(
    "allocator",
    ("native/allocator.cpp", "native/history.cpp", "native/host_allocator.cpp"),
    ("c10", "c10_cuda", "torch_cpu", "torch_cuda"),
    cuda=True,
)
THROWER = Companion("thrower", ("out_of_memory.cpp",), ("c10",), cuda=False)


def load_companion(torch: Any, companion: Companion) -> ctypes.CDLL:
    """Load a library, compiling it first if there is none. DeviceError says what is missing."""
    path = _existing(torch, companion) or build_companion(torch, companion)
    if identity(torch, companion).encode() not in path.read_bytes():
        raise DeviceError(f"{path} was made for another PyTorch or vram; delete it", code="failed")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"{path} cannot be loaded: {error}", code="failed") from error


def build_companion(torch: Any, companion: Companion, output: Path | None = None) -> Path:
    """Compile a library into `output`, or into the cache, and return its path.

    Of several processes that do this at once, such as those of torchrun, one compiles and the others wait.
    """
    if companion.cuda and _cuda_version(torch) is None:
        raise DeviceError(f"this PyTorch ({torch.__version__}) is not built for CUDA", code="missing")
    command = [*_command(torch, companion)]
    cached = output is None
    target = (cache_directory() if output is None else output) / _file_name(torch, companion, cached=cached)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _turn(target.with_suffix(".lock")):
            if not target.exists() or (cached and writable_by_others(target)):
                _compile(command, target)
    except OSError as error:
        raise DeviceError(f"cannot write {target}: {error.strerror}", code="failed") from error
    return target


def identity(torch: Any, companion: Companion) -> str:
    """Say what a library was made for and from, in one line."""
    text = hashlib.sha256(b"\0".join(companion.texts().values())).hexdigest()[:16]
    python = sysconfig.get_config_var("SOABI") or sys.version
    version = metadata.version("vram")
    made_for = f"torch-{torch.__version__} cuda-{_cuda_version(torch)} {python}"
    return f"vram-{version} {companion.name}-{text} {made_for}"


def thrower(torch: Any) -> int:
    """Return the address of void(const char*) that throws torch.OutOfMemoryError; 0 if it is unavailable."""
    try:
        function = load_companion(torch, THROWER).vram_torch_out_of_memory
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    except (DeviceError, AttributeError) as error:
        _log.warning("out-of-memory errors will be RuntimeError instead of torch.OutOfMemoryError: %s", error)
        return 0


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/vram`, created if needed.

    Returns a temporary directory, the same one in later calls, if that one is not writable or not safe.
    """
    wanted = _cache_path()
    with contextlib.suppress(OSError):
        wanted.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(wanted, os.W_OK):
            why = writable_by_others(wanted)
            if not why:
                return wanted
            _log_unused(wanted, why)
    return _temporary_directory()


@functools.cache
def _log_unused(cache: Path, why: str) -> None:
    _log.warning(
        "compiled libraries are not kept in %s: %s. Set XDG_CACHE_HOME to a directory of your own", cache, why
    )


@functools.cache
def _temporary_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="vram-"))


def _cuda_version(torch: Any) -> str | None:
    version: str | None = getattr(getattr(torch, "version", None), "cuda", None)
    return version


def _cache_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vram")


def _file_name(torch: Any, companion: Companion, *, cached: bool) -> str:
    made_for = [identity(torch, companion), *([str(Path(torch.__file__).parent)] if cached else [])]
    key = hashlib.sha256("\n".join(made_for).encode()).hexdigest()[:16]
    return f"torch-{torch.__version__}-{companion.name}-{key}.so"


def _existing(torch: Any, companion: Companion) -> Path | None:
    if named := os.environ.get(DIRECTORY_VARIABLE):
        path = Path(named, _file_name(torch, companion, cached=False))
        if path.exists():
            return path
    path = _cache_path() / _file_name(torch, companion, cached=True)
    return path if path.exists() and not writable_by_others(path) else None


# ---- compiling --------------------------------------------------------------------------------------------


def _command(torch: Any, companion: Companion) -> Iterator[str]:
    """The compiler's words, without the output."""
    here, home = Path(__file__).parent, Path(torch.__file__).parent
    abi = int(bool(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)))
    yield from find_compiler()
    yield from ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
    yield "-Wno-deprecated-declarations"
    yield from (f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f'-DVRAM_IDENTITY="{identity(torch, companion)}"')
    yield from ("-isystem", str(home / "include"))
    yield from ("-isystem", str(home / "include/torch/csrc/api/include"))
    if companion.cuda:
        yield "-DPYTORCH_C10_DRIVER_API_SUPPORTED"  # as PyTorch itself; else its headers warn of settings
        yield from ("-isystem", str(_cuda_headers(home)))
    yield from (str(here / source) for source in companion.sources)
    yield from (f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-Wl,--no-as-needed")
    yield from (f"-l{library}" for library in companion.libraries)
    # The C++ library is the one that PyTorch has loaded. Some compilers link in a copy, which crashes.
    yield from ("-nodefaultlibs", "-lgcc_s", "-lgcc", "-lc")


def _cuda_headers(home: Path) -> Path:
    """A complete folder of CUDA's headers: of a toolkit, or of a package beside PyTorch's."""
    packages = home.parent
    places = [Path(root, "include") for name in ("CUDA_HOME", "CUDA_PATH") if (root := os.environ.get(name))]
    places += [Path("/usr/local/cuda/include")]
    places += sorted(packages.glob("nvidia/cu*/include"), reverse=True)
    places += [packages / "nvidia/cuda_runtime/include", packages / "triton/backends/nvidia/include"]
    for place in places:
        if all((place / name).exists() for name in ("cuda.h", "cuda_runtime.h", "crt/host_config.h")):
            return place
    raise DeviceError(
        f"CUDA's headers (cuda_runtime.h) were not found in CUDA_HOME, /usr/local/cuda or {packages}; "
        "install Triton or the CUDA toolkit",
        code="missing",
    )


@contextlib.contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """One process at a time, where the file system has locks."""
    with lock.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], target: Path) -> None:
    """Compile into a file of its own and rename it, so that nobody loads half a library."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", name], capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
            why = errors[0][:300] or f"exit status {done.returncode}, without a message"
            raise DeviceError(f"{command[0]} failed: {why}", code="failed")
        os.chmod(name, 0o755)
        os.replace(name, target)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"{command[0]} did not finish in {COMPILE_SECONDS} s", code="failed") from error
    finally:
        Path(name).unlink(missing_ok=True)
