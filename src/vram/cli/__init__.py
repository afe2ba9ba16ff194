"""The `vram` command line. Each command has its own file that parses and prints; the library computes.

Exit codes: 0 success; 1 a finding (out of memory, a leak, a gap above the limit); 2 wrong usage or a bad
file; 130 interrupted by Ctrl-C (except `vram serve`, which is stopped that way and exits with 0); 141 the
reader of the output closed the pipe early.
"""

from __future__ import annotations

import difflib
import importlib
import os
import shlex
from typing import Any

import rich_click as click

from vram.system.clibrary import PKGCONFIG, compiler_flags, folder_of

from .console import Commands

__all__ = ["main"]

GROUPS = {
    "Explain a recording": ("explain", "summary", "leaks", "diff", "merge", "replay", "plan", "convert"),
    "Watch a program, or look at a recording": ("serve", "report", "top", "attach"),
    "Run a program": ("run", "predict", "torch", "demo"),
    "Measure and inspect this machine": ("bench", "lab", "doctor", "info", "completion"),
}
"""The commands as the help shows them."""
COMMANDS = tuple(sorted(name for names in GROUPS.values() for name in names))
"""Each is `NAME_command` in the module of its name, which is imported when the command is used."""


class _Vram(Commands):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, for the help and for shells."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"vram.cli.{cmd_name}")
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command; a message about an unknown one names what was probably meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=2)
            if os.path.exists(args[0]):
                hint = f" To explain this file: {ctx.command_path} explain {shlex.quote(args[0])}"
            else:
                hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"{error.message}{hint}", ctx) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the commands in groups, under any name that the program was started by."""
        groups = [{"name": name, "commands": list(commands)} for name, commands in GROUPS.items()]
        formatter.config.command_groups = {ctx.command_path: groups}
        super().format_help(ctx, formatter)


@click.group(
    cls=_Vram,
    invoke_without_command=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="vram", prog_name="vram", message="%(prog)s %(version)s")
@click.option("--include", "--cflags", "include", is_flag=True, help="Print compiler flags for C and C++.")
@click.option("--libs", is_flag=True, help="Print linker flags for the C library.")
@click.option("--pkgconfig", is_flag=True, help="Print the directory of vram.pc, for PKG_CONFIG_PATH.")
@click.pass_context
def main(ctx: click.Context, include: bool, libs: bool, pkgconfig: bool) -> None:
    """Find out why a job ran out of GPU memory, compare allocators, and inspect this machine."""
    if include or libs or pkgconfig:
        words = compiler_flags(include=include, libs=libs)
        words += [str(folder_of(PKGCONFIG))] if pkgconfig else []
        click.echo(shlex.join(words))
        ctx.exit()
