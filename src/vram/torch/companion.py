"""The companion library that throws `torch.OutOfMemoryError`: compiled once for each PyTorch, then cached.

PyTorch recognizes the error by its C++ type, so `out_of_memory.cpp` must be compiled against the installed
PyTorch. This takes a few seconds on the first `install()`; later calls use the cache. Without a compiler, an
out-of-memory error is a RuntimeError with the same message.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from vram.errors import DeviceError
from vram.system.compiler import find_compiler

__all__ = ["cache_directory", "compile_companion", "thrower"]

SYMBOL = "vram_torch_out_of_memory"
COMPILE_SECONDS = 120
"""Far more than a compiler needs for this file; a longer run means that it hangs."""

_log = logging.getLogger("vram")


def thrower(torch: Any) -> int:
    """Return the address of void(const char*) that throws torch.OutOfMemoryError; 0 if it is unavailable."""
    try:
        library = ctypes.CDLL(str(compile_companion(torch)))
        address = ctypes.cast(getattr(library, SYMBOL), ctypes.c_void_p).value
    except (DeviceError, OSError, AttributeError) as error:
        _log.warning("out-of-memory errors will be RuntimeError instead of torch.OutOfMemoryError: %s", error)
        return 0
    return address or 0


def compile_companion(torch: Any) -> Path:
    """Return the library for this PyTorch, cached or newly compiled; DeviceError explains a failure.

    Several processes may do this at once: each compiles into its own file and renames it.
    """
    compiler = find_compiler()
    source = Path(__file__).with_name("out_of_memory.cpp")
    home = Path(torch.__file__).parent
    abi = int(bool(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)))
    flags = [
        *("-std=c++20", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *("-isystem", str(home / "include"), f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"),
    ]
    identity = (torch.__version__, *compiler, *flags, source.read_text(), sysconfig.get_config_var("SOABI"))
    key = hashlib.sha256("\0".join(map(str, identity)).encode()).hexdigest()[:16]
    target = cache_directory() / f"torch-{torch.__version__}-{key}.so"
    if not target.exists():
        _compile([*compiler, *flags, str(source), "-lc10"], target)
    return target


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/vram`, created if needed, or a temporary directory if it is not writable."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    wanted = Path(base, "vram")
    try:
        wanted.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(wanted, os.W_OK):
            return wanted
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="vram-"))


def _compile(command: list[str], target: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", name], capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
            raise DeviceError(f"{command[0]} failed on {command[-2]}: {errors[0][:300]}", code="failed")
        os.chmod(name, 0o755)
        os.replace(name, target)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"{command[0]} did not finish in {COMPILE_SECONDS} s on {command[-2]}", code="failed"
        ) from error
    finally:
        Path(name).unlink(missing_ok=True)
