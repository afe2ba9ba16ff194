"""The page as one file that needs no server: the answers it would ask for lie in it as data."""

from __future__ import annotations


def write_report() -> None:
    """X."""
