"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

__all__ = ["version"]


def version() -> str:
    """Return the version, like `vram.__version__`."""
    try:
        return installed_version("vram")
    except PackageNotFoundError:
        return "0+unknown"
