"""Whether PyTorch can use a GPU here, and what a user can do where it cannot."""

from __future__ import annotations

from typing import Any

from vram import _native
from vram.errors import DeviceError
from vram.integrations.adaptors import require_library

__all__ = ["WITHOUT_GPU", "require_cuda_build", "require_gpu", "require_torch"]

WITHOUT_GPU = (
    "Without a GPU, `vram demo` shows what vram does, `vram explain FILE` explains a recording of another "
    "machine, and `vram predict train.py` predicts the memory that a program needs."
)


def require_torch() -> Any:
    """The module torch, or an ImportError that says what works without it."""
    try:
        return require_library("torch", "PyTorch")
    except ImportError as error:
        raise ImportError(f"{error} {WITHOUT_GPU}", name="torch") from error


def require_cuda_build(torch: Any) -> None:
    """Raise a DeviceError if this build of PyTorch has no allocator for GPUs."""
    version = getattr(torch, "version", None)
    kinds = [] if version is None else [getattr(version, kind, None) for kind in ("cuda", "hip")]
    if kinds == [None, None]:
        raise DeviceError(
            f"this PyTorch ({torch.__version__}) is built without CUDA; install a build for your GPU. "
            f"{WITHOUT_GPU}",
            code="missing",
        )


def require_gpu(torch: Any) -> None:
    """Raise a DeviceError if PyTorch finds no GPU."""
    require_cuda_build(torch)
    if not torch.cuda.is_available():
        _count, why = _native.cuda_devices()
        because = f": {why}" if why else ""
        raise DeviceError(f"PyTorch finds no GPU here{because}. {WITHOUT_GPU}", code="missing")
