"""The environment that puts a program on a null GPU, and whether this machine can provide it.

The null GPU is a library that is loaded before those of CUDA (native/null_gpu). Real GPUs are not touched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vram.arguments import require
from vram.errors import ConfigError
from vram.torch.companion import cache_directory

from .gpus import Gpu

__all__ = ["LIBRARY", "cuda_of_torch", "null_environment", "require_cuda_torch", "wheel_hint"]

PACKAGE: Final = Path(__file__).resolve().parents[1]
LIBRARY: Final = PACKAGE / "lib" / "libvram_null_gpu.so"
INSIDE: Final = PACKAGE / "predict" / "inside"
DRIVER: Final = PACKAGE / "predict" / "driver"
"""The folder in which Triton looks for the driver when it links."""
CACHES: Final = {
    "CUPY_CACHE_DIR": "cupy",
    "PYTORCH_KERNEL_CACHE_PATH": "pytorch",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
}
"""Variables with the folders in which libraries keep compiled kernels."""
FORGOTTEN = ("CUDA_VISIBLE_DEVICES", "VRAM_PREDICT_FOLDER", "VRAM_PREDICT_STEPS")
"""Variables that the program does not inherit: they name real GPUs, or belong to another prediction."""


def null_environment(gpu: Gpu, devices: int = 1, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base` (default: the environment of this process) with `devices` null GPUs of a kind."""
    _require_linux()
    kept = os.environ if base is None else base
    if not isinstance(kept, Mapping):
        raise TypeError(f"an environment must be a mapping, not {type(kept).__name__}")
    setting = require(gpu, Gpu, "a GPU").setting(devices)
    return {
        **{name: value for name, value in kept.items() if name not in FORGOTTEN},
        "VRAM_NULL_GPU": setting,
        "LD_PRELOAD": _joined(str(_library()), kept.get("LD_PRELOAD", "")),
        "PYTHONPATH": _joined(str(INSIDE), kept.get("PYTHONPATH", "")),
        "TRITON_LIBCUDA_PATH": str(DRIVER),
        **_caches(),
    }


def _caches() -> dict[str, str]:
    """Folders of their own for what libraries compile.

    Kernels that were built or tuned on a null GPU must not be found by a program on a real one.
    """
    cache = cache_directory() / "null-gpu"
    folders = {name: cache / folder for name, folder in CACHES.items()}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    return {name: str(folder) for name, folder in folders.items()}


def _joined(first: str, others: str) -> str:
    rest = [each for each in others.split(os.pathsep) if each and each != first]
    return os.pathsep.join([first, *rest])


def _require_linux() -> None:
    if sys.platform != "linux":
        raise ConfigError(
            f"a null GPU needs Linux, because it replaces CUDA's libraries with LD_PRELOAD; this is "
            f"{sys.platform}. Run it in a Linux container or in WSL"
        )


def _library() -> Path:
    if not LIBRARY.is_file():
        raise ConfigError(
            f"the null GPU is not part of this installation: {LIBRARY} is missing. "
            "Install the package with pip; the source tree does not contain it",
            path=str(LIBRARY),
        )
    if re.search(r"[\s:]", str(LIBRARY)):
        raise ConfigError(
            f"the null GPU cannot be loaded from {LIBRARY}, because LD_PRELOAD allows no spaces or colons; "
            "install vram in another folder",
            path=str(LIBRARY),
        )
    return LIBRARY


# ---- PyTorch ----------------------------------------------------------------------------------------------


def cuda_of_torch() -> str | None:
    """The CUDA version of the PyTorch that this Python would import; "" if it has none, None without PyTorch.

    PyTorch is not imported.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    version = Path(spec.submodule_search_locations[0], "version.py")
    try:
        found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", version.read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else ""


def require_cuda_torch() -> None:
    """Raise a ConfigError if PyTorch is there, but was built without CUDA."""
    if cuda_of_torch() == "":
        raise ConfigError(f"PyTorch in {sys.prefix} was built without CUDA. {wheel_hint()}")


def wheel_hint() -> str:
    """What to install."""
    return (
        "A prediction needs a CUDA build of PyTorch, but no GPU. Install the wheel whose version ends in "
        "+cu130 from PyTorch's package index for CUDA 13.0: pip install --force-reinstall torch "
        "--index-url ADDRESS (PyTorch's installation page gives the address)"
    )
