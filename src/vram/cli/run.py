"""`vram run`: run a Python program with vram, without changing the program."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import rich_click as click

from vram.arguments import require_python
from vram.config import read_options
from vram.errors import ConfigError, VramError

from .console import INTERRUPTED, NO_CODE, one_line, read_conf

if TYPE_CHECKING:
    from .program_recording import ProgramRecording

__all__ = ["run_command"]

FAILED = 1
ARGUMENTS = "vram.cli.run.arguments"
"""Where the context keeps the words of the command as they were written."""
NOT_THE_PROGRAM = (__file__, "<frozen runpy>", runpy.__file__)
kept_variables: list[dict[str, Any]] = []
"""Those of the program, until the process ends."""


class NothingRecorded(ConfigError):
    """The program completed without using memory that can be recorded."""


class _RunCommand(click.RichCommand):
    """A command whose own options end where the program begins, as in `python`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Pass everything after the script, or after `-m MODULE`, to the program."""
        options = [each for each in self.params if isinstance(each, click.Option) and not each.is_flag]
        valued = {name for each in options for name in each.opts}
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, _with_end_of_options(args, valued))


def _with_end_of_options(args: list[str], valued: set[str]) -> list[str]:
    place = 0
    while place < len(args) and args[place].startswith("-") and args[place] not in ("-", "--"):
        if args[place] == "-c":
            raise click.UsageError(NO_CODE)
        if args[place] == "-m":
            return [*args[: place + 2], "--", *args[place + 2 :]]
        place += 2 if args[place] in valued else 1
    return args


def _read_report(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and value != "html" and not value.endswith(".html"):
        raise click.BadParameter(f"{value!r} is neither html nor the name of an .html file", ctx, param)
    return value


@click.command(
    "run",
    cls=_RunCommand,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
@click.option("--torch", "with_torch", is_flag=True, help="Make PyTorch allocate from vram.")
@click.option(
    "--conf",
    metavar="KEY:VALUE,...",
    default="",
    callback=read_conf,
    help="Settings as in VRAM_CONF; child processes inherit them.",
)
@click.option(
    "--spill",
    metavar="SIZE|auto",
    help="When a device is full, move cold memory to host memory, at most SIZE, instead of failing.",
)
@click.option(
    "--record",
    "recording",
    metavar="FILE",
    help="Record PyTorch's allocator and vram's pools, one trace file per device and rank.",
)
@click.option(
    "--on-oom",
    "on_oom",
    metavar="explain,snapshot",
    default="",
    help="When memory runs out, print why and where, write vram-oom-PID-N.vtrace, or both.",
)
@click.option(
    "--report",
    metavar="html|FILE.html",
    callback=_read_report,
    help="After the program ends, write an HTML report, next to the recording if there is one.",
)
@click.option("--monitor", is_flag=True, help="Allow vram top to watch the program; see vram.monitor.")
@click.option("--web", is_flag=True, help="Serve a live page of the program's memory and print its address.")
@click.option(
    "--null-gpu",
    "null_gpu",
    metavar="NAME[:N]",
    help="Run on a null GPU, such as h200, or on N of them: kernels do nothing, no GPU is needed.",
)
@click.option(
    "--null-gpus", "null_gpus", metavar="N", type=click.IntRange(min=1), help="Number of null GPUs."
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does.")
@click.argument("program", metavar="[SCRIPT] [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run_command(
    ctx: click.Context,
    with_torch: bool,
    conf: dict[str, object],
    spill: str | None,
    recording: str | None,
    on_oom: str,
    report: str | None,
    monitor: bool,
    web: bool,
    null_gpu: str | None,
    null_gpus: int | None,
    module: str | None,
    program: tuple[str, ...],
) -> None:
    """Run a Python script or module with vram configured, and optionally as PyTorch's allocator.

    Under torchrun: torchrun --nproc-per-node=8 --no-python vram run --torch train.py

    Any command on a null GPU: vram run --null-gpu h200 -- pytest tests/
    """
    if module is None and not program:
        raise click.UsageError("name a script to run, or a module with -m")
    if spill is not None:
        read_options({"spill": spill}, source="--spill")
        conf = {**conf, "spill": spill}
    if null_gpu is not None or null_gpus is not None:
        _enter_null_gpu(null_gpu, null_gpus, ctx.meta[ARGUMENTS])
        if module is None:
            options = any((with_torch, conf, recording, on_oom, report, monitor, web))
            _become_command(program, options)
    _configure(conf)
    _find(module, program)
    if with_torch:
        _install_under_torch()
    if on_oom:
        _keep_failures(on_oom)
    if monitor or web:
        _monitor(web)
    with contextlib.ExitStack() as ends:
        recorded = None
        if recording is not None or report is not None:
            recorded = _record(ends, recording, report)
        try:
            _run(module, program)
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        except BaseException as error:
            _end_as_python_does(error)
        if recorded is not None:
            _require_events(recorded)


def _require_events(recorded: ProgramRecording) -> None:
    """Fail if the program completed and nothing was recorded."""
    recorded.wait()
    if not recorded.events:
        raise NothingRecorded(f"nothing was recorded: {recorded.why_empty()}")


def _enter_null_gpu(name: str | None, count: int | None, arguments: tuple[str, ...]) -> None:
    """Start this command again with the null GPU, which must be there before a process starts.

    Returns in the process that has it.
    """
    from vram.predict.environment import null_environment
    from vram.predict.gpus import read_gpu

    gpu, devices = read_gpu(name)
    wanted = null_environment(gpu, count or devices)
    if any(os.environ.get(key) != wanted[key] for key in ("VRAM_NULL_GPU", "LD_PRELOAD", "PYTHONPATH")):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", "vram", "run", *arguments], wanted)


def _become_command(words: tuple[str, ...], options: bool) -> None:
    """Replace this process by a command that is not Python; return for a script or module."""
    from vram.predict.program import read_program

    program = read_program(words)
    if len(program.command) > len(words):  # a script, before which Python was put
        return
    if options:
        raise click.UsageError(f"the other options are for Python programs, which {words[0]} may not be")
    os.execv(program.command[0], program.command)


def _configure(conf: dict[str, object]) -> None:
    """Set VRAM_CONF, which is read when the first pool is created, here and in child processes."""
    read_options(conf, source="--conf")
    entries = [os.environ.get("VRAM_CONF", ""), *(f"{key}:{value}" for key, value in conf.items())]
    if conf:
        os.environ["VRAM_CONF"] = ",".join(filter(None, entries))


def _install_under_torch() -> None:
    import vram.torch

    try:
        vram.torch.install()
    except ImportError as error:
        raise ConfigError(f"--torch needs PyTorch: {error}") from error


def _record(ends: contextlib.ExitStack, recording: str | None, report: str | None) -> ProgramRecording:
    """Record the program until the process ends; `ends` then writes the report.

    Raises before the program runs if no recording can be written.
    """
    from vram.observe.recording import path_of_rank
    from vram.trace.arrow import require_pyarrow

    from .program_recording import ProgramRecording

    require_pyarrow()
    target = None if report is None else path_of_rank(_report_path(recording, report))
    if recording is None:
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="vram-run-"))
        recording = os.path.join(folder, "run.vtrace")
    recorded = ProgramRecording(os.path.abspath(recording))
    if target is not None:
        ends.push(lambda _kind, error, _trace: _end_reports(error, recorded, target))
    return recorded


def _report_path(recording: str | None, report: str) -> Path:
    """Choose the path of the report; raise before the program runs if it cannot be written."""
    from vram.web.assets import built_page

    built_page()
    if report != "html":
        return Path(report).absolute()
    beside_it = Path(recording or f"vram-run-{os.getpid()}").with_suffix(".html")
    return beside_it.absolute()


def _end_reports(error: BaseException | None, recorded: ProgramRecording, target: Path) -> None:
    """Write the reports however the program ended, unless there is nothing to report."""
    if not isinstance(error, NothingRecorded):
        _write_reports(recorded, target)


def _write_reports(recorded: ProgramRecording, target: Path) -> None:
    """Write one report per device. Failures are reported and do not change how the program ends."""
    from vram.observe.recording import beside
    from vram.trace import open_trace
    from vram.web import write_report

    try:
        recorded.close()
        for place, (path, device) in enumerate(recorded.files()):
            page = beside(target, device) if place else target
            write_report(open_trace(path, trusted=True), page)
            click.echo(f"vram: wrote the report to {page}", err=True)
        if not recorded.files():
            click.echo(f"vram: no report: nothing was recorded: {recorded.why_empty()}", err=True)
    except (VramError, OSError, ImportError) as error:
        click.echo(f"vram: no report: {one_line(str(error))}", err=True)


def _keep_failures(kinds: str) -> None:
    from vram.observe.on_oom import keep_failures

    keep_failures(filter(None, (kind.strip() for kind in kinds.split(","))))


def _monitor(web: bool) -> None:
    from vram.observe.monitor import monitor

    watched = monitor(stacks="python", web=web)
    if web:
        click.echo(f"vram: {watched.page.url}", err=True)


def _find(module: str | None, program: tuple[str, ...]) -> None:
    """Check that the program exists where Python would look for it; raise ConfigError if not."""
    if module is None:
        script = program[0]
        if not os.path.exists(script):
            raise ConfigError(f"script {script!r} not found in {os.getcwd()}")
        require_python(script)
        sys.path[0] = os.path.dirname(os.path.realpath(script))
        return
    sys.path[0] = os.getcwd()
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent package does not exist
        found = None
    if found is None:
        raise ConfigError(f"module {module!r} not found on the path of python -m")


def _run(module: str | None, program: tuple[str, ...]) -> None:
    """Run the program. Its variables stay, as under Python, so that a recording ends with what they hold."""
    try:
        if module is not None:
            sys.argv = [module, *program]
            kept_variables.append(runpy.run_module(module, run_name="__main__", alter_sys=True))
        else:
            sys.argv = list(program)
            kept_variables.append(runpy.run_path(program[0], run_name="__main__"))
    except BaseException as error:
        if (place := _of_program(error.__traceback__)) is not None:
            kept_variables.append(place.tb_frame.f_globals)
        raise


def _end_as_python_does(error: BaseException) -> NoReturn:
    """Print the program's traceback without the frames of vram, and exit with Python's exit code."""
    error.__traceback__ = _of_program(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED)


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    place: Any = traceback
    while place is not None and place.tb_frame.f_code.co_filename in NOT_THE_PROGRAM:
        place = place.tb_next
    return place if place is not None else traceback
