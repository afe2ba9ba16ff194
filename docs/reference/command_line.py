"""The page of the command line, from the commands themselves; docs/site_hooks.py adds it to the site."""

from __future__ import annotations

import inspect

import click

from vram.cli import GROUPS, main

HEAD = """\
# Command line

`vram COMMAND --help` shows the same in the terminal.

Exit codes: 0 success; 1 a finding (out of memory, a leak, a difference above the limit); 2 wrong usage or a
bad file; 130 interrupted by Ctrl-C; 141 the reader of the output closed the pipe early.
"""


def text() -> str:
    """The whole page."""
    context = click.Context(main, info_name="vram")
    lines = [HEAD]
    for group, names in GROUPS.items():
        lines.append(f"## {group}\n")
        for name in names:
            command = main.get_command(context, name)
            assert command is not None, name
            lines += _command(command, click.Context(command, context, info_name=name))
    return "\n".join(lines)


def _command(command: click.Command, context: click.Context) -> list[str]:
    lines = [f"### {context.command_path}\n"]
    lines += ["```", " ".join([context.command_path, *command.collect_usage_pieces(context)]), "```\n"]
    lines += [inspect.cleandoc(command.help or "").replace("\b\n", "") + "\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            lines += _command(inner, click.Context(inner, context, info_name=name))
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if options:
        lines += ["| option | |", "|---|---|", *(_row(option, context) for option in options), ""]
    return lines


def _row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(option.opts + option.secondary_opts)
    value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    about = (option.help or "").replace("\n", " ")
    default = option.default if option.show_default and option.default is not None else None
    tail = f" Default: {default}." if default is not None else ""
    return "| {} | {} |".format(*(cell.replace("|", "\\|") for cell in (f"`{names}{value}`", about + tail)))
