"""The `vram` command. A command parses and renders, one file each; what it shows is computed by the library.

Exit codes: 0 fine, 1 a finding (such as an allocator that ran out of memory), 2 wrong usage or a bad file.
"""

from __future__ import annotations

import rich_click as click

from .bench import bench_commands
from .console import Commands
from .convert import convert_command
from .info import info_command
from .lab import lab_command
from .replay import replay_command
from .run import run_command

__all__ = ["main"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vram", prog_name="vram", message="%(prog)s %(version)s")
def main() -> None:
    """GPU memory: what a job would cost under another allocator, what this machine can do, and how fast."""


main.add_command(bench_commands)
main.add_command(convert_command)
main.add_command(info_command)
main.add_command(lab_command)
main.add_command(replay_command)
main.add_command(run_command)
