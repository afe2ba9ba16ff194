"""`vram predict`: whether a program fits a GPU, without a GPU. Runs it with `vram.predict` and prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import rich_click as click
from rich.console import Console

from vram.predict import Found, Prediction, Trial, find, run
from vram.predict.search import read_range
from vram.sizes import format_count, format_size

from .console import (
    BAD_INPUT,
    FINDING,
    NO_CODE,
    draw_facts,
    draw_grid,
    draw_line,
    json_option,
    open_console,
    progress_bar,
    read_size,
)
from .predict_screen import ProgramScreen

__all__ = ["predict_command"]

MOST_HOLDERS = 10
MOST_LISTED = 10
MOST_LARGER, MOST_SMALLER = 9, 4
"""GPUs that are listed: of those that fit the smallest, and of the others the largest."""
BAR = 40
"""Characters of the longest bar of a curve."""
FITS = {"yes": "yes", "tight": "yes, after releasing cached memory", "no": "no", "unknown": "unknown"}


class _PredictCommand(click.RichCommand):
    """A command whose options may stand before the program or after it, as far as it has no such option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the options of this command in front of the program."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        valued = {name: not each.is_flag for each in options for name in each.opts}
        ours, program = _split(args, valued)
        return super().parse_args(ctx, [*ours, "--", *program])


def _split(args: Sequence[str], valued: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The words of this command and those of the program. Everything behind `--` is the program's."""
    ours: list[str] = []
    program: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, _value = word.partition("=")
        if word == "--" and not program:
            return ours, list(words)
        if name not in valued or (program and name in ("-h", "--help")):
            if not program and word.startswith("-") and word != "-m":
                raise click.UsageError(NO_CODE) if word == "-c" else click.NoSuchOption(word)
            program.append(word)
            continue
        if program:
            _require_ours(name, program)
        ours.append(word)
        if valued[name] and not equals:
            ours += [next(words, "")]
    return ours, program


def _require_ours(option: str, program: Sequence[str]) -> None:
    """Refuse to guess whose an option is that the script has, too."""
    script = program[0]
    if not script.endswith(".py") or not os.path.isfile(script):
        return
    source = Path(script).read_text("utf-8", errors="replace")
    if f'"{option}"' in source or f"'{option}'" in source:
        raise click.UsageError(
            f"{script} has an option {option}, too. Put the options of vram first, then --, then the "
            f"program: vram predict [OPTIONS] -- {script} {option} ..."
        )


@click.command("predict", cls=_PredictCommand)
@click.option(
    "--gpu",
    metavar="NAME[:N]",
    help="GPU such as h200, a100-80gb or rtx4090; h200:8 is eight.  [default: h200]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=read_size,
    help="Memory of the GPU, such as 24GiB, instead of its own.",
)
@click.option("--gpus", metavar="N", type=click.IntRange(min=1), help="Number of GPUs.")
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=1),
    help="Stop the program after N steps of its optimizer or of vram.step.",
)
@click.option(
    "--find",
    "wanted",
    metavar="NAME=LOW..HIGH",
    help="Find the largest value of an argument, or of an environment variable (env:NAME), that fits.",
)
@click.option(
    "--save",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the recording, for vram explain, serve and diff.",
)
@json_option
@click.argument("program", metavar="PROGRAM [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def predict_command(
    ctx: click.Context,
    gpu: str | None,
    memory: int | None,
    gpus: int | None,
    steps: int | None,
    wanted: str | None,
    save: Path | None,
    as_json: bool,
    program: tuple[str, ...],
) -> None:
    """Predict how much GPU memory a program needs, and whether it fits. Needs no GPU.

    PROGRAM is a script, -m MODULE or a command such as torchrun. It runs unmodified on a null GPU, on which
    kernels do nothing and allocations are real. Ctrl-C ends it with the prediction so far. Exits with 0 if it
    fits, 1 if it does not, and 2 if the program or the command failed.
    """
    if wanted is not None:
        if save is not None:
            raise click.UsageError("--save keeps the recording of one run; omit it with --find")
        _find(ctx, wanted, program, gpu, memory, gpus, steps, as_json)
        return
    with ProgramScreen(as_json) as screen:
        found = run(
            program,
            gpu,
            memory=memory,
            gpus=gpus,
            steps=steps,
            progress=screen.show,
            stdout=screen.stdout,
            stderr=screen.stderr,
        )
    saved = [] if save is None else found.save(save)
    if as_json:
        click.echo(json.dumps({**found.to_json(), "saved": [*map(str, saved)]}))
    else:
        _draw(found, saved, open_console())
    ctx.exit(_status(found))


def _status(found: Prediction) -> int:
    if found.outcome == "failed":
        return BAD_INPUT
    return 0 if found.fits else FINDING


# ---- one run ----------------------------------------------------------------------------------------------


def _draw(found: Prediction, saved: Sequence[Path], console: Console) -> None:
    draw_line(console, found.text, "bold")
    _draw_facts(found, console)
    _draw_processes(found, console)
    if found.outcome != "failed":
        _draw_gpus(found, console)
    _draw_holders(found, console)
    if found.outcome != "failed":
        _draw_settings(found, console)
    _draw_doubts(found, console)
    for path in saved:
        draw_line(console, f"Saved the recording to {path}; open it with vram explain or vram serve.")


def _draw_facts(found: Prediction, console: Console) -> None:
    needed = found.unlimited
    facts = {
        "peak allocated": format_size(found.peak_allocated),
        "peak reserved": format_size(found.peak_reserved),
        "used of the device": f"{format_size(found.peak_used)}, "
        f"with {format_size(found.gpu.overhead)} for the context",
        "ran": f"{format_count(found.steps, 'step')}, {found.seconds:.0f} s on the null GPU",
    }
    if needed is not None and needed.outcome in ("completed", "stopped"):
        facts["without a limit"] = (
            f"{format_size(needed.peak_allocated)} allocated, {format_size(needed.peak_reserved)} reserved, "
            f"{format_size(needed.peak_used)} used of the device"
        )
    caught = sum(each.caught for each in found.failures)
    if caught:
        facts["ran out of memory"] = f"{format_count(caught, 'time')}, and continued"
    if found.error is not None and found.outcome == "failed":
        facts["error"] = f"{found.error['type']}: {found.error['message']}"
    draw_facts(console, facts)


def _draw_processes(found: Prediction, console: Console) -> None:
    if len(found.uses) < 2:
        return
    console.print()
    draw_grid(
        console,
        "process|device|>peak allocated|>peak reserved|>used of the device",
        [
            (
                use.name,
                f"cuda:{use.device}",
                *(format_size(size) for size in (use.allocated, use.reserved, use.used)),
            )
            for use in found.uses
        ],
    )


def _draw_gpus(found: Prediction, console: Console) -> None:
    """The GPUs around the smallest that fits; the others are obvious."""
    table = found.table()
    large = [each for each in table if each.fits != "no"]
    small = [each for each in table if each.fits == "no"]
    console.print()
    draw_grid(
        console,
        "GPU|>memory|>room|fits",
        [
            (each.gpu.key, format_size(each.gpu.memory), format_size(each.room), FITS[each.fits])
            for each in (*large[-MOST_LARGER:], *small[:MOST_SMALLER])
        ],
    )
    more = max(0, len(large) - MOST_LARGER)
    if more:
        draw_line(console, f"and {format_count(more, 'larger GPU')}: --json lists all", "dim")


def _draw_holders(found: Prediction, console: Console) -> None:
    groups = found.holders()
    if not groups:
        return
    moment = "held when memory ran out" if found.outcome == "out of memory" else "held at the peak"
    whole = max(1, sum(group.bytes for group in groups))
    console.print()
    draw_grid(
        console,
        f"{moment}|>size|>share|>blocks",
        [
            (group.label, format_size(group.bytes), f"{group.bytes / whole:.1%}", str(group.blocks))
            for group in groups
        ],
        top=MOST_HOLDERS,
        rest="--save FILE, then vram summary FILE",
    )


def _draw_settings(found: Prediction, console: Console) -> None:
    with progress_bar("settings") as progress:
        ranked = found.settings(progress)
    if not ranked:
        return
    console.print()
    draw_grid(
        console,
        "allocator|>smallest device|>peak reserved|setting",
        [
            (
                each.policy,
                "none"
                if each.smallest_capacity is None
                else format_size(each.smallest_capacity + found.gpu.overhead),
                format_size(each.peak_reserved),
                each.environment or "defaults",
            )
            for each in ranked
        ],
    )


def _draw_doubts(found: Prediction, console: Console) -> None:
    """What is not exact: guesses, unknown functions and notes."""
    if found.guesses:
        console.print()
        draw_grid(
            console,
            "guessed at|what|value|assumed|>times",
            [
                tuple(str(each.get(name, "")) for name in ("where", "what", "value", "assumed", "count"))
                for each in found.guesses
            ],
            top=MOST_LISTED,
            rest="--json lists all",
        )
    if found.unknown:
        console.print()
        draw_line(console, f"Functions that the null GPU does not know: {', '.join(found.unknown)}")
    if found.notes:
        console.print()
    for note in found.notes:
        draw_line(console, f"Note: {note}.")


# ---- a search ---------------------------------------------------------------------------------------------


def _find(
    ctx: click.Context,
    wanted: str,
    program: tuple[str, ...],
    gpu: str | None,
    memory: int | None,
    gpus: int | None,
    steps: int | None,
    as_json: bool,
) -> None:
    name, low, high = read_range(wanted)

    def show(trial: Trial) -> None:
        if sys.stderr.isatty():
            verdict = f"fits with {format_size(trial.peak_used)}" if trial.fits else "does not fit"
            click.echo(f"{name} = {trial.value}: {verdict}", err=True)

    found = find(program, name, low, high, gpu, memory=memory, gpus=gpus, steps=steps, progress=show)
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        _draw_search(found, open_console())
    ctx.exit(0 if found.best is not None else FINDING)


def _draw_search(found: Found, console: Console) -> None:
    draw_line(console, found.text, "bold")
    console.print()
    draw_grid(
        console,
        f">{found.name}|>peak reserved|>used of the device|fits|",
        [
            (
                str(trial.value),
                format_size(trial.peak_reserved),
                format_size(trial.peak_used),
                "yes" if trial.fits else "no",
                "█" * max(1, round(BAR * trial.peak_used / found.gpu.memory)) if trial.fits else "",
            )
            for trial in found.trials
        ],
    )
