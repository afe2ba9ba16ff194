"""How a notebook shows a prediction: the pieces of `vram.core.html`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram.core.html import heading, ranking_html, table
from vram.sizes import format_size

if TYPE_CHECKING:
    from .prediction import Prediction

__all__ = ["prediction_html"]

MOST_HOLDERS = 8


def prediction_html(prediction: Prediction) -> str:
    """The verdict, the peaks, other GPUs, who holds memory at the peak, and allocators."""
    peaks = {
        "peak allocated": prediction.peak_allocated,
        "peak reserved": prediction.peak_reserved,
        "used of the device": prediction.peak_used,
        "room": prediction.room,
    }
    gpus = [
        (each.gpu.name, format_size(each.gpu.memory), format_size(each.room), each.fits)
        for each in prediction.table()
    ]
    holders = [
        (group.label, format_size(group.bytes), str(group.blocks))
        for group in prediction.holders()[:MOST_HOLDERS]
    ]
    parts = [
        heading(prediction.text),
        table("|>bytes", [(name, format_size(size)) for name, size in peaks.items()]),
        table("GPU|>memory|>room|fits", gpus),
        table("held at the peak|>bytes|>blocks", holders) if holders else "",
        ranking_html(prediction.settings()),
    ]
    return "".join(parts)
