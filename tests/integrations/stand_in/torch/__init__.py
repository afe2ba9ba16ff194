"""Stands in for PyTorch where it is not installed: the interfaces that vram.torch uses, and how they refuse
under a plugged allocator. It allocates nothing itself; the plug's functions are called as PyTorch calls them.
"""

from __future__ import annotations

import sys
from types import ModuleType

from . import _C, cuda

__all__ = ["_C", "cuda"]
__version__ = "0.stand-in"

_inductor = ModuleType("torch._inductor")
_inductor.config = ModuleType("torch._inductor.config")  # type: ignore[attr-defined]
_inductor.config.triton = type("triton", (), {"cudagraph_trees": True})  # type: ignore[attr-defined]
sys.modules |= {"torch._inductor": _inductor, "torch._inductor.config": _inductor.config}


class OutOfMemoryError(RuntimeError):
    """As PyTorch's."""
