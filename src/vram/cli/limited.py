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
from typing import Any, NoReturn, ParamSpec, TypeVar

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
    sys.stdout.flush()
    sys.stderr.flush()
    output, answer = os.pipe()
    with warnings.catch_warnings():  # of other threads, which a program has that runs this command itself
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
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
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        _end(child)
        raise
    finally:
        os.close(output)
    for stream in ("stdout", "stderr"):
        getattr(sys, stream).write(answers.get(stream, ""))
    if "value" in answers:
        return answers["value"]
    if "exit" in answers:
        raise Exit(answers["exit"])
    if "usage" in answers:
        raise click.UsageError(answers["usage"])
    _show_cursor()
    raise TraceError(f"{names}: {why_it_ended(status, watch=watch)}", place="file", status=status)


def _end(child: int) -> None:
    """End the child. Ctrl-C in a terminal reaches it, too, and it may restore the terminal."""
    deadline = time.monotonic() + INTERRUPT_SECONDS
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
        kept = [stream for stream in ("stdout", "stderr") if not _has_descriptor(getattr(sys, stream))]
        for stream in kept:  # what is written to memory would end with this process
            setattr(sys, stream, io.StringIO())
        with open(answer, "wb", buffering=0) as answers:

            def tell(kind: str, content: Any) -> None:
                answers.write(f"{kind} {json.dumps(content)}\n".encode())

            enter_limits(lambda count: tell("memory", count), with_parent=True)
            outcome = _outcome(work, names)
            for stream in ("stdout", "stderr"):
                if stream in kept:
                    tell(stream, getattr(sys, stream).getvalue())
                with contextlib.suppress(BrokenPipeError):
                    getattr(sys, stream).flush()
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
    except Exit as error:
        return "exit", error.exit_code
    except click.UsageError as error:
        return "usage", error.message
    except Exception as error:
        traceback.print_exc()
        what = f"{names}: {type(error).__name__}: {error}; {HOSTILE}, or this is an error of vram"
        return "exit", report_error(TraceError(what, place="file"))
