"""`vram info`: devices, versions and effective settings. Prints what `vram.system.machine` found."""

from __future__ import annotations

import json
from typing import Any

import rich_click as click
from rich.console import Console
from rich.text import Text

from vram.config import OPTIONS
from vram.sizes import format_size

from .console import draw_facts, json_option, open_console, pid_argument

__all__ = ["info_command"]


@click.command("info")
@pid_argument
@json_option
def info_command(pid: int | None, as_json: bool) -> None:
    """Show devices and their features, versions, and the effective settings with the origin of each.

    With PID, show a running process of yours that has called vram.monitor(), as that process sees it.
    """
    found = _found(pid)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    console = open_console()
    console.print(Text(f"vram {found['vram']}, Python {found['python']}, {found['system']}", style="bold"))
    for device in found["devices"]:
        _section(console, device["name"], _device_facts(device))
    if found["no_cuda"]:
        console.print(Text(f"\nNo CUDA device: {found['no_cuda']}"), soft_wrap=True)
    _section(console, "libraries", found["packages"] or {"none": "no supported library is installed"})
    _section(console, "features", {each["name"]: _feature(each) for each in found["features"]})
    _section(console, "this process", _process(found))
    _section(console, "settings", _settings(found["settings"]))


def _found(pid: int | None) -> dict[str, Any]:
    if pid is None:
        from vram.system.machine import info  # only this command needs the native core

        return info()
    from vram.observe.monitor import attach

    with attach(pid) as client:
        return client.info()


def _section(console: Console, title: str, facts: dict[str, str]) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    draw_facts(console, facts)


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
    return f"no, only plain segments: {device['no_pages']}"


def _feature(feature: dict[str, Any]) -> str:
    missing = "" if feature["there"] else f": missing; {feature['install']}"
    return f"{feature['for']}{missing}"


def _process(found: dict[str, Any]) -> dict[str, str]:
    """Describe which libraries use vram in this process, and what records or checks it."""
    facts = {
        library: "allocates from vram" if plugged else "has its own allocator"
        for library, plugged in found["plugged"].items()
    } or {"libraries": "no library is loaded that could allocate from vram"}
    seen = found["observed"]
    facts["monitor"] = seen["monitor"] or "off"
    facts["recordings"] = ", ".join(seen["recordings"]) or "none"
    facts["race check"] = "on" if seen["race_check"] else "off"
    return facts


def _settings(settings: dict[str, Any]) -> dict[str, str]:
    """Show the environment variables that are set, then every option, with its origin if it was set."""
    origins = settings["origins"]
    facts = dict(settings["environment"]) or {"environment": "no settings (VRAM_CONF is empty)"}
    for name, value in settings["options"].items():
        facts[name] = _value(name, value) + (f" (set by {origins[name]})" if name in origins else "")
    return facts


def _value(name: str, value: object) -> str:
    in_bytes = "MiB" in OPTIONS[name].takes or "GiB" in OPTIONS[name].takes
    if type(value) is int and in_bytes:
        return format_size(value) if value > 0 else "none"
    return str(value)
