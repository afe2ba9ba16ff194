"""`vram --include --libs --pkgconfig`: what C and C++ programs need to be built with the library."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import rich_click as click

from vram.system.clibrary import PKGCONFIG, compiler_flags, folder_of

__all__ = ["flag_options", "print_flags"]

_OPTIONS = (
    click.option(
        "--include", "--cflags", "include", is_flag=True, help="Print the flags to compile C and C++."
    ),
    click.option("--libs", is_flag=True, help="Print the flags to link with the C library."),
    click.option("--pkgconfig", is_flag=True, help="Print the folder of vram.pc, for PKG_CONFIG_PATH."),
)


def flag_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of the command itself, before any other command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def print_flags(ctx: click.Context, *, include: bool, libs: bool, pkgconfig: bool) -> None:
    """Print what was asked for on one line, and end; without any of them go on."""
    if not (include or libs or pkgconfig):
        return
    words = compiler_flags(include=include, libs=libs)
    if pkgconfig:
        words.append(str(folder_of(PKGCONFIG)))
    click.echo(" ".join(shlex.quote(word) for word in words))
    ctx.exit()
