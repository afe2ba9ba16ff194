"""`vram info`: devices, versions and settings in force. Draws what `vram.machine` found."""

from __future__ import annotations

import json
from typing import Any

import rich_click as click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vram.config import OPTIONS
from vram.sizes import format_size

from .console import open_console

__all__ = ["info_command"]


@click.command("info")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info_command(as_json: bool) -> None:
    """Show devices, what they can do, versions found, and the settings in force."""
    from vram.machine import info  # needs the native core; the other commands do not

    found = info()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    console = open_console()
    console.print(Text(f"vram {found['vram']}, Python {found['python']}, {found['system']}", style="bold"))
    for device in found["devices"]:
        _section(console, device["name"], _device_facts(device))
    if found["no_cuda"]:
        console.print(Text(f"\nNo CUDA device: {found['no_cuda']}"), soft_wrap=True)
    _section(console, "libraries", found["packages"] or {"none": "of those vram works with"})
    _section(console, "settings", _settings(found["settings"]))


def _section(console: Console, title: str, facts: dict[str, str]) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        table.add_row(Text(f"  {name}"), Text(value))
    console.print(table)


def _device_facts(device: dict[str, Any]) -> dict[str, str]:
    facts = {
        "hardware": device["hardware"],
        "memory": f"{format_size(device['total_bytes'])}, {format_size(device['free_bytes'])} free",
        "pages": _pages(device),
    }
    if device["kind"] == "cuda":
        facts |= {
            "driver": f"{device['driver'] or 'version unknown'}, CUDA {device['driver_cuda']}",
            "compute capability": device["compute_capability"],
            "multiprocessors": str(device["multiprocessors"]),
            "copy engines": str(device["async_engines"]),
        }
    return facts


def _pages(device: dict[str, Any]) -> str:
    if device["pages"]:
        return "yes, of " + ", ".join(format_size(size) for size in device["page_sizes"])
    return f"no, plain segments only: {device['no_pages']}"


def _settings(settings: dict[str, Any]) -> dict[str, str]:
    """The variables that are set, then every option; those somebody set are marked."""
    chosen = set(settings["set"])
    facts = dict(settings["environment"]) or {"environment": "sets nothing (VRAM_CONF is empty)"}
    for name, value in settings["options"].items():
        facts[name] = _value(name, value) + ("  (set)" if name in chosen else "")
    return facts


def _value(name: str, value: object) -> str:
    in_bytes = "MiB" in OPTIONS[name].takes or "GiB" in OPTIONS[name].takes
    if type(value) is int and in_bytes:
        return format_size(value) if value > 0 else "none"
    return str(value)
