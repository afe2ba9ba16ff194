"""`vram completion`: shell completion for commands, options, files and monitored processes."""

from __future__ import annotations

import rich_click as click
from click.shell_completion import get_completion_class

__all__ = ["completion_command"]

SHELLS = {
    "bash": 'eval "$(vram completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(vram completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "vram completion fish | source  # in ~/.config/fish/config.fish",
}


@click.command("completion", epilog="Add to your shell's startup file: " + "; ".join(SHELLS.values()))
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the script that enables shell completion for vram."""
    found = get_completion_class(shell)
    assert found is not None  # click supports all three
    click.echo(found(ctx.find_root().command, {}, "vram", "_VRAM_COMPLETE").source())
