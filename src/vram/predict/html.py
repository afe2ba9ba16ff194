"""How a notebook shows a prediction: the pieces of `vram.core.html`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram.core.html import heading, ranking_html, table
from vram.sizes import format_size

if TYPE_CHECKING:
    from .prediction import Prediction
    from .search import Found

__all__ = ["found_html", "prediction_html"]

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


def found_html(found: Found) -> str:
    """The answer, and the memory of every value that was tried."""
    rows = [
        (
            str(trial.value),
            format_size(trial.peak_allocated),
            format_size(trial.peak_reserved),
            format_size(trial.peak_used),
            "yes" if trial.fits else "no",
        )
        for trial in found.trials
    ]
    return heading(found.text) + table(f">{found.name}|>allocated|>reserved|>used of the device|fits", rows)
