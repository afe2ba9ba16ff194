"""`vram doctor`: find problems in the setup and how to fix them. Prints what `vram.system.doctor` found."""

from __future__ import annotations

import json
from typing import Any

import rich_click as click
from rich.text import Text

from .console import FINDING, draw_line, json_option, one_line, open_console, pid_argument

__all__ = ["doctor_command"]

STYLES = {"wrong": "bold red", "warning": "bold yellow", "hint": "bold"}


@click.command("doctor")
@pid_argument
@json_option
@click.pass_context
def doctor_command(ctx: click.Context, pid: int | None, as_json: bool) -> None:
    """Check settings, drivers and the order of initialization for common problems, and show how to fix them.

    With PID, check a running process of yours that has called vram.monitor(). Exits with 1 if something does
    not work.
    """
    findings = _findings(pid)
    if as_json:
        click.echo(json.dumps(findings, indent=1))
    else:
        _draw(findings)
    if any(finding["level"] == "wrong" for finding in findings):
        ctx.exit(FINDING)


def _findings(pid: int | None) -> list[dict[str, Any]]:
    if pid is None:
        from vram.system.doctor import examine

        return [finding.to_dict() for finding in examine()]
    from vram.observe.monitor import attach

    with attach(pid) as client:
        found: list[dict[str, Any]] = client.info()["findings"]
        return found


def _draw(findings: list[dict[str, Any]]) -> None:
    console = open_console()
    for finding in findings:
        draw_line(console, f"{finding['level']}: {finding['title']}", STYLES[finding["level"]])
        for part in ("why", "fix"):
            console.print(Text(f"  {part}: {one_line(finding[part])}"), soft_wrap=True)
    if not findings:
        draw_line(console, "no problems found; vram info shows devices, versions and settings")
