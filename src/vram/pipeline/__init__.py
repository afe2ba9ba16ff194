"""Overlapping copies and computation: a `Pipeline` moves data through streams in chunks."""

from __future__ import annotations

from vram.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
