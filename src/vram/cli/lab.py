"""`vram lab`: run experiments and print claim, verdict and numbers. Measures nothing itself."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import rich_click as click
from rich.console import Console
from rich.text import Text

from vram.errors import ConfigError

from .console import FINDING, draw_grid, open_console

__all__ = ["lab_command"]

STYLES = {"holds": "bold green", "does not hold": "bold red", "depends": "bold yellow"}


@click.command("lab")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="List the experiments and claims; run nothing.")
@click.option(
    "--device", metavar="DEVICE", help="Device to run on, such as cuda:0 or host. Default: the first GPU."
)
@click.option("--quick", is_flag=True, help="Run smaller and shorter versions, for a first look.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a section for a Markdown page.")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Show the JSON of an earlier run instead of running experiments.",
)
@click.pass_context
def lab_command(
    ctx: click.Context,
    names: tuple[str, ...],
    only_list: bool,
    device: str | None,
    quick: bool,
    as_json: bool,
    as_markdown: bool,
    source: Path | None,
) -> None:
    """Test common claims about GPU memory on this machine.

    Each experiment prints the claim, the measurements and whether the claim holds. Without NAME, all
    experiments run. Exits with 1 if an experiment failed to run.
    """
    if only_list:
        _list(names, as_json)
        return
    console = open_console()
    document = _read(source) if source else _run(names, device, quick, live=not (as_json or as_markdown))
    if as_json:
        click.echo(json.dumps(document, ensure_ascii=False))
    elif as_markdown:
        from vram.lab.markdown import markdown

        click.echo(markdown(document), nl=False)
    elif source:
        _draw_machine(document["machine"], console)
        for each in document["experiments"]:
            _draw(each, console)
    if any("failed" in each for each in document["experiments"]):
        ctx.exit(FINDING)


def _list(names: tuple[str, ...], as_json: bool) -> None:
    from vram.lab import choose

    chosen = choose(names)
    if as_json:
        keys = ("name", "claim", "why", "needs_gpu")
        click.echo(
            json.dumps([{key: getattr(each, key) for key in keys} for each in chosen], ensure_ascii=False)
        )
        return
    rows = [(each.name, each.claim, "a GPU" if each.needs_gpu else "") for each in chosen]
    draw_grid(open_console(), "experiment|claim|needs", rows)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        document["machine"], document["experiments"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not the output of `vram lab --json`", path=str(path)) from error
    return dict(document)


def _run(names: tuple[str, ...], device: str | None, quick: bool, *, live: bool) -> dict[str, Any]:
    """Run with progress on stderr; if `live`, print each result as soon as it is available."""
    from vram import lab
    from vram.core.device import Device

    chosen, place = lab.choose(names), Device(device)
    console, progress = open_console(), Console(stderr=True, highlight=False)
    if live:
        _draw_machine(lab.describe_machine(place), console)
    done = 0

    def started(experiment: lab.Experiment) -> None:
        nonlocal done
        done += 1
        progress.print(Text(f"{done}/{len(chosen)} {experiment.name} …", style="dim"))

    def finished(result: lab.Result) -> None:
        if live:
            _draw(result.to_json(), console)

    report = lab.run(names, place, quick=quick, on_start=started, on_result=finished)
    return report.to_json()


# ---- drawing ----------------------------------------------------------------------------------------------


def _draw_machine(machine: dict[str, str], console: Console) -> None:
    facts = [value for key, value in machine.items() if key != "note"]
    console.print(Text(", ".join(facts), style="bold"), soft_wrap=True)
    if note := machine.get("note"):
        console.print(Text(note), soft_wrap=True)
    console.print()


def _draw(each: dict[str, Any], console: Console) -> None:
    from vram.lab.markdown import cell_text, measured_text, outcome

    verdict = outcome(each)
    console.print(Text.assemble((each["name"], "bold"), "  ", each["claim"]), soft_wrap=True)
    line = Text("  ")
    line.append(verdict, style=STYLES.get(verdict, "bold magenta"))
    if explained := each.get("failed") or each["sentence"]:
        line.append(f": {explained}")
    console.print(line, soft_wrap=True)
    for name, quantity in each["measured"].items():
        words, number = measured_text(name, **quantity)
        console.print(Text(f"  {words}: {number}", style="dim"), soft_wrap=True)
    if table := each.get("table"):
        numbers = [not isinstance(cell, (str, bool)) for cell in table["rows"][0]] if table["rows"] else []
        titles = [
            f">{name}" if number else name
            for name, number in zip_longest(table["columns"], numbers, fillvalue=False)
        ]
        draw_grid(console, "|".join(map(str, titles)), [[*map(cell_text, row)] for row in table["rows"]])
    console.print()
