"""`vram --include --libs --pkgconfig`: compiler and linker flags for C and C++ programs that use vram."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import rich_click as click

from vram.system.clibrary import PKGCONFIG, compiler_flags, folder_of

__all__ = ["flag_options", "print_flags"]

_OPTIONS = (
    click.option(
        "--include", "--cflags", "include", is_flag=True, help="Print compiler flags for C and C++."
    ),
    click.option("--libs", is_flag=True, help="Print linker flags for the C library."),
    click.option("--pkgconfig", is_flag=True, help="Print the directory of vram.pc, for PKG_CONFIG_PATH."),
)


def flag_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `vram` itself, which come before any command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def print_flags(ctx: click.Context, *, include: bool, libs: bool, pkgconfig: bool) -> None:
    """Print the requested flags on one line and exit; do nothing if none was requested."""
    if not (include or libs or pkgconfig):
        return
    words = compiler_flags(include=include, libs=libs)
    if pkgconfig:
        words.append(str(folder_of(PKGCONFIG)))
    click.echo(" ".join(shlex.quote(word) for word in words))
    ctx.exit()
