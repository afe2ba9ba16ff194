"""The `vram` command line. Each command has its own file that parses and prints; the library computes.

Exit codes: 0 success; 1 a finding (out of memory, a leak, a gap above the limit); 2 wrong usage or a bad
file; 130 interrupted by Ctrl-C (except `vram serve`, which is stopped that way and exits with 0); 141 the
reader of the output closed the pipe early.
"""

from __future__ import annotations

import rich_click as click

from .bench import bench_commands
from .completion import completion_command
from .console import Commands
from .convert import convert_command
from .demo import demo_command
from .diff import diff_command
from .doctor import doctor_command
from .explain import explain_command
from .flags import flag_options, print_flags
from .info import info_command
from .lab import lab_command
from .leaks import leaks_command
from .merge import merge_command
from .plan import plan_command
from .replay import replay_command
from .report import report_command
from .run import run_command
from .serve import serve_command
from .summary import summary_command
from .top import top_command

__all__ = ["main"]


@click.group(
    cls=Commands,
    invoke_without_command=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="vram", prog_name="vram", message="%(prog)s %(version)s")
@flag_options
@click.pass_context
def main(ctx: click.Context, include: bool, libs: bool, pkgconfig: bool) -> None:
    """Find out why a job ran out of GPU memory, compare allocators, and inspect this machine."""
    print_flags(ctx, include=include, libs=libs, pkgconfig=pkgconfig)


main.add_command(bench_commands)
main.add_command(completion_command)
main.add_command(convert_command)
main.add_command(demo_command)
main.add_command(diff_command)
main.add_command(doctor_command)
main.add_command(explain_command)
main.add_command(info_command)
main.add_command(lab_command)
main.add_command(leaks_command)
main.add_command(merge_command)
main.add_command(plan_command)
main.add_command(replay_command)
main.add_command(report_command)
main.add_command(run_command)
main.add_command(serve_command)
main.add_command(summary_command)
main.add_command(top_command)
