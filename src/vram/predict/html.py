"""How a notebook shows a prediction: the pieces of `vram.core.html`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram.core.html import heading, ranking_html, table
from vram.sizes import format_size

if TYPE_CHECKING:
    from .gpus import Gpu, Gpus
    from .prediction import Fits, Prediction
    from .search import Found

__all__ = ["fits_html", "found_html", "gpus_html", "prediction_html"]

MOST_HOLDERS = 8


def prediction_html(prediction: Prediction) -> str:
    """The verdict, the peaks, other GPUs, who holds memory at the peak, and allocators."""
    peaks = {
        "peak allocated": prediction.peak_allocated,
        "peak reserved": prediction.peak_reserved,
        "used of the device": prediction.peak_used,
        "room": prediction.room,
    }
    holders = [
        (group.label, format_size(group.bytes), str(group.blocks))
        for group in prediction.holders()[:MOST_HOLDERS]
    ]
    parts = [
        heading(prediction.text),
        table("|>bytes", [(name, format_size(size)) for name, size in peaks.items()]),
        fits_html(prediction.table()),
        table("held at the peak|>bytes|>blocks", holders) if holders else "",
        ranking_html(prediction.settings()),
    ]
    return "".join(parts)


def fits_html(fits: Fits) -> str:
    """Which GPUs have enough memory."""
    rows = [(each.gpu.name, format_size(each.gpu.memory), format_size(each.room), each.fits) for each in fits]
    return table("GPU|>memory|>room|fits", rows)


def gpus_html(gpus: Gpus) -> str:
    """The names of GPUs and what their memory is."""
    rows = [
        (gpu.key, gpu.name, format_size(gpu.memory), ".".join(map(str, gpu.capability)), _source(gpu))
        for gpu in gpus
    ]
    return table("GPU|name|>memory|>compute capability|memory", rows)


def _source(gpu: Gpu) -> str:
    return "measured" if gpu.measured else "published"


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
