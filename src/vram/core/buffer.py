"""`Buffer`: the Python handle of one live block. It is native; this only gives it its public place.

Allocation is the pool's.
"""

from __future__ import annotations

from vram._native import Buffer

__all__ = ["Buffer"]
