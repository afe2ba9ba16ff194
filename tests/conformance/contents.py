"""The bytes of a buffer, wherever they are: copied by its device, in the order of its stream."""

from __future__ import annotations

from typing import Any

import pytest


def write(buffer: Any, data: bytes) -> None:
    """Put `data` into the buffer; it is there when this returns."""
    buffer.copy_from(data)


def read(buffer: Any) -> bytes:
    """What the buffer holds once the work queued on its stream is done."""
    data = bytearray(buffer.size)
    buffer.copy_to(data)
    return bytes(data)


def require_contents(pool: Any) -> None:
    """Skip the test where memory is addresses only."""
    if pool.device.kind == "model":
        pytest.skip("a model has addresses only")
