"""Location of the C interface in this installation, and the flags for compilers and pkg-config.

`python -m vram --include --libs` prints `compiler_flags`. The interface itself is `vram.h`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vram.errors import ConfigError

__all__ = ["HEADER", "LIBRARY", "PKGCONFIG", "compiler_flags", "folder_of"]

PACKAGE: Final = Path(__file__).resolve().parents[1]
HEADER: Final = Path("include", "vram.h")
LIBRARY: Final = Path("lib", "libvram.so.0")
PKGCONFIG: Final = Path("lib", "pkgconfig", "vram.pc")


def folder_of(part: Path) -> Path:
    """Return the directory of HEADER, LIBRARY or PKGCONFIG; raise ConfigError if the package lacks them."""
    path = PACKAGE / part
    if not path.is_file():
        raise ConfigError(
            f"the C interface is not part of this installation: {path} is missing. "
            "Install the package with pip; the source tree does not contain it.",
            path=str(path),
        )
    return path.parent


def compiler_flags(*, include: bool, libs: bool) -> list[str]:
    """Return flags that compile a program (`include`) and link it (`libs`), with a run path."""
    flags = [f"-I{folder_of(HEADER)}"] if include else []
    if libs:
        folder = folder_of(LIBRARY)
        flags += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lvram"]
    return flags
