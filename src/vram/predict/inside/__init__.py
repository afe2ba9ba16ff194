"""What runs inside a predicted program. Uses nothing but the standard library, and PyTorch if it is there.

The program's Python may be another one than that of vram, so nothing here imports vram. `sitecustomize` is
found by Python itself through PYTHONPATH and loads this package under the name PACKAGE.
"""

from __future__ import annotations

__all__ = ["FOLDER", "PACKAGE", "STEPS"]

PACKAGE = "_vram_predict"
"""The name of this package inside the program."""
FOLDER = "VRAM_PREDICT_FOLDER"
"""The environment variable with the folder for results. Without it, nothing is recorded."""
STEPS = "VRAM_PREDICT_STEPS"
"""The environment variable with the number of steps after which the program is stopped."""
