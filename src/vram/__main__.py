"""`python -m vram`: the same as the `vram` command."""

from __future__ import annotations

from vram.cli import main

if __name__ == "__main__":
    main()
