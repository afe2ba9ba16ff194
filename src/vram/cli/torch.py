"""`vram torch`: PyTorch on vram."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from vram.errors import DeviceError
from vram.torch.companion import ALLOCATOR, DIRECTORY_VARIABLE, build_companion

__all__ = ["torch_command"]


@click.group("torch")
def torch_command() -> None:
    """Prepare PyTorch's use of vram."""


@torch_command.command("build")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Directory for the library (default: the cache). ${DIRECTORY_VARIABLE} names it when programs run.",
)
def build_command(output: Path | None) -> None:
    """Compile vram's allocator for the installed PyTorch ahead, for images without a compiler."""
    try:
        import torch
    except ImportError as error:
        raise DeviceError(f"PyTorch cannot be imported: {error}", code="missing") from error
    click.echo(build_companion(torch, ALLOCATOR, output))
