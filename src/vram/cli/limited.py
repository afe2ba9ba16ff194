"""What a command does with files of unknown origin runs in a child with limits.

The child is a fork of the command, which has no other threads, so it starts at once. It inherits the terminal
and the files that the command has opened for its output; it can open no others for writing.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TextIO, TypeVar

import rich_click as click
from click.exceptions import Exit
from rich.console import Console

from vram.errors import TraceError, VramError
from vram.trace.limits import TOO_MUCH_MEMORY, enter_limits
from vram.trace.sandbox import HOSTILE, Watch, follow_child, why_it_ended

from .console import INTERRUPTED, READER_LEFT, report_error

__all__ = ["limited"]

P = ParamSpec("P")
T = TypeVar("T")

STREAMS = ("stdout", "stderr")
INTERRUPT_SECONDS = 1.0
"""How long a child may take to end after Ctrl-C."""


def limited(work: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that works on files: it runs in a child. What it returns must be plain data.

    The child prints errors itself, and the command exits with its status. If the child dies, the command says
    so and exits like after any bad file.
    """

    @functools.wraps(work)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if sys.platform != "linux":  # there are no limits to set
            return work(*args, **options)
        given = (*args, *options.values())
        files = [path for each in given for path in (each if isinstance(each, tuple) else [each])]
        names = ", ".join(os.fspath(path) for path in files if isinstance(path, Path))
        found: T = _call(lambda: work(*args, **options), names)
        return found

    return run


# ---- the command -------------------------------------------------------------------------------------------


def _call(work: Callable[[], Any], names: str) -> Any:
    for stream in _open_streams():
        stream.flush()
    output, answer = os.pipe()
    try:
        with warnings.catch_warnings():  # of other threads, which a program has that runs this command itself
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
    except OSError as error:
        os.close(output)
        os.close(answer)
        what = f"cannot start a process to read {names} safely: {error.strerror}"
        raise TraceError(what, place="file") from error
    if child == 0:
        os.close(output)
        _answer(work, answer, names)
    os.close(answer)
    watch, answers = Watch(child), dict[str, Any]()
    try:
        for kind, content in follow_child(output, watch):
            if kind == "memory":
                watch.allow(content)
            answers[kind] = content
        status = _wait(child)
    except BaseException:
        _end(child)
        raise
    finally:
        os.close(output)
    for name in STREAMS:
        if text := answers.get(name):
            getattr(sys, name).write(text)
    if "system" in answers:
        raise OSError(*answers["system"])
    if "value" in answers:
        return answers["value"]
    if "exit" in answers:
        raise Exit(answers["exit"])
    if "usage" in answers:
        raise click.UsageError(answers["usage"])
    _show_cursor()
    raise TraceError(f"{names}: {why_it_ended(status, watch=watch)}", place="file", status=status)


def _open_streams() -> list[TextIO]:
    """Standard output and error, as far as they were open when the command began."""
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]


def _wait(child: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # SIGCHLD is ignored, so the system keeps no status
        return 0


def _end(child: int) -> None:
    """End the child. Ctrl-C in a terminal reaches it, too, and it may restore the terminal."""
    deadline = time.monotonic() + INTERRUPT_SECONDS
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                _show_cursor()
                return
            time.sleep(0.01)


def _show_cursor() -> None:
    """A progress bar of the child may have hidden it."""
    Console(stderr=True).show_cursor()


# ---- the child ---------------------------------------------------------------------------------------------


def _answer(work: Callable[[], Any], answer: int, names: str) -> NoReturn:
    """Do the work, send its result and exit, whatever happens: the caller's code must not go on here."""
    try:
        given = [name for name in STREAMS if getattr(sys, name) is not None]
        kept = [name for name in given if not _has_descriptor(getattr(sys, name))]
        for stream in kept:  # what is written to memory would end with this process
            setattr(sys, stream, io.StringIO())
        with open(answer, "wb", buffering=0) as answers:

            def tell(kind: str, content: Any) -> None:
                answers.write(f"{kind} {json.dumps(content)}\n".encode())

            enter_limits(lambda count: tell("memory", count), with_parent=True)
            outcome = _outcome(work, names)
            for name in given:
                if name in kept:
                    tell(name, getattr(sys, name).getvalue())
                try:
                    getattr(sys, name).flush()
                except BrokenPipeError:
                    pass
                except OSError as error:
                    outcome = _system_error(error)
            tell(*outcome)
    finally:
        os._exit(0)


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


def _outcome(work: Callable[[], Any], names: str) -> tuple[str, Any]:
    """What the command goes on with: a value, an exit code or a usage error."""
    try:
        return "value", work()
    except VramError as error:
        return "exit", report_error(error)
    except MemoryError:
        return "exit", report_error(TraceError(f"{names}: {TOO_MUCH_MEMORY}; {HOSTILE}", place="file"))
    except KeyboardInterrupt:  # the command says so
        return "exit", INTERRUPTED
    except BrokenPipeError:
        return "exit", READER_LEFT
    except OSError as error:  # a full disk, for example; errors of reading are TraceErrors
        return _system_error(error)
    except Exit as error:
        return "exit", error.exit_code
    except click.UsageError as error:
        return "usage", error.message
    except Exception as error:
        if sys.stderr is not None:
            traceback.print_exc()
        what = f"{names}: {type(error).__name__}: {error}; {HOSTILE}, or this is an error of vram"
        return "exit", report_error(TraceError(what, place="file"))


def _system_error(error: OSError) -> tuple[str, Any]:
    return "system", [error.errno or 0, error.strerror or str(error)]
