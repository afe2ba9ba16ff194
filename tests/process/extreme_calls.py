"""Calls a part of the public surface with every extreme argument; test_extreme_arguments.py runs it.

One parameter at a time takes each value of EXTREMES, the others what is usual. Each call is announced on
stdout before it is made, so that whoever reads knows which one ended the process. A call returns or raises an
error that is documented; afterwards the pool's books must be in order.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import itertools
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import vram

HANG_SECONDS = 100
MOST_BYTES = 160 << 30
"""Of memory that the process may write to, most of it never touched: what asks for more is refused."""
EXTREMES: list[Any] = [
    *(
        sign * (power + change)
        for power in (2**31, 2**32, 2**63, 2**64)
        for change in (-1, 0, 1)
        for sign in (1, -1)
    ),
    *(0, 1, -1, 10**30, 10**5000, True, False, None, ...),
    *(0.0, -0.0, 0.5, 1e308, float("inf"), float("-inf"), float("nan"), 1j),
    *(
        np.int8(-1),
        np.uint64(2**64 - 1),
        np.int64(-(2**63)),
        np.float32("nan"),
        np.bool_(True),
        np.zeros(0),
        np.zeros(3),
    ),
    *(
        "",
        "x",
        "0",
        "-1",
        "1e400",
        "9" * 400,
        "x" * 100_000,
        "\0",
        "\ud800",
        "1MiB",
        "99999999TiB",
        b"",
        b"x" * 70_000,
    ),
    *(
        [],
        (),
        {},
        [None],
        [-1],
        [2**63, 2**63],
        [2**64],
        {"x": 1},
        {1: 2**64},
        {2**63: 2},
        range(2),
        object(),
        lambda: None,
        int,
    ),
]
ALLOWED = (vram.VramError, TypeError, ValueError, OverflowError, MemoryError, OSError, BufferError)
DEFAULTS_ONLY = ("self", "args", "kwargs", "arguments", "arenas", "facts", "more", "config", "settings")
LEFT_OUT = {
    ("Stream", "launch"): "runs what it is given",
    ("Monitor", "serve_web"): "opens a port",
    ("Device", "add_pool"): "internal",
    ("Snapshot", "of"): "dresses what the native core returned",
}
"""What extreme arguments mean nothing to."""


class Subject:
    """Something with methods to call, made anew whenever a call has used it up."""

    def __init__(self, make: Callable[[], Any], pool: Callable[[Any], Any] = lambda _: None) -> None:
        self._make = make
        self._pool = pool
        self._made: Any = None

    def get(self) -> Any:
        if self._made is None or getattr(self._made, "closed", False):
            self._made = self._make()
        return self._made

    def check(self) -> None:
        pool = self._pool(self._made)
        if pool is not None and not pool.closed:
            pool.check()


# ---- what is called ---------------------------------------------------------------------------------------

folder = Path(tempfile.mkdtemp(prefix="vram-extreme-"))
numbers = itertools.count()


def new_path() -> str:
    return str(folder / f"{next(numbers)}.vtrace")


def subjects(kind: str) -> dict[str, Subject]:
    device = vram.Device("host") if kind == "host" else vram.Device.model("64GiB")

    def pool_of(each: Any) -> Any:
        return each.pool

    def new_pool() -> vram.Pool:
        return vram.Pool(device)

    def event() -> vram.Event:
        made = vram.Event(device, timing=True)
        made.record()
        return made

    def recorder() -> vram.Recorder:
        return vram.record(new_pool(), new_path())

    def graph() -> vram.Graph:
        with vram.Stream(device).capture() as made:
            pass
        return made

    found = {
        "Pool": Subject(new_pool, lambda each: each),
        "Buffer": Subject(lambda: new_pool().allocate(4096), lambda _: None),
        "Stream": Subject(lambda: vram.Stream(device)),
        "Event": Subject(event),
        "Device": Subject(lambda: device),
        "Arena": Subject(lambda: vram.Arena(device, "1MiB")),
        "GrowableBuffer": Subject(lambda: vram.GrowableBuffer("64MiB", new_pool()), pool_of),
        "Scratch": Subject(lambda: vram.Scratch(pool=new_pool()), pool_of),
        "MemoryManager": Subject(vram.MemoryManager),
        "Recorder": Subject(recorder, pool_of),
        "Snapshot": Subject(lambda: new_pool().snapshot()),
        "Stats": Subject(lambda: new_pool().stats()),
        "Plan": Subject(lambda: vram.plan([(0, 0, 1, 10)])),
        "Monitor": Subject(vram.monitor),
    }
    if kind == "model":
        found["DriverPool"] = Subject(lambda: vram.DriverPool(device), lambda each: each)
        found["Graph"] = Subject(graph)
    else:
        found["PinnedPool"] = Subject(lambda: vram.PinnedPool(device), lambda each: each)
        found["Pipeline"] = Subject(lambda: vram.Pipeline(lambda chunk: chunk, device=device))
    return found


def functions() -> dict[str, Callable[..., Any]]:
    """Everything public that is called by itself: functions, and classes."""
    return {name: getattr(vram, name) for name in vram.__all__ if callable(getattr(vram, name))}


USUAL: dict[str, Callable[[], Any]] = {
    "path": new_path,
    "file": new_path,
    "pool": lambda: vram.Pool("host"),
    "device_or_pool": lambda: "host",
    "device": lambda: "host",
    "device_name": lambda: "host",
    "stream": lambda: None,
    "size": lambda: 4096,
    "max_size": lambda: 1 << 20,
    "sizes": lambda: [4096],
    "shape": lambda: 16,
    "ptr": lambda: 4096,
    "buffers": lambda: [(0, 0, 1, 10)],
    "time_limit": lambda: 0.01,
    "interval": lambda: 1.0,
    "port": lambda: 0,
    "name": lambda: "x",
    "number": lambda: 1,
    "message": lambda: "x",
    "compute": lambda: abs,
    "web": lambda: False,
    "jobs": lambda: 1,
}


def parameters(function: Callable[..., Any]) -> list[tuple[str, bool, bool]]:
    """(name, whether it must be given, whether by name) of each; nanobind writes its signatures elsewhere."""
    try:
        known = inspect.signature(function).parameters.values()
    except ValueError:
        ((text, *_), *_) = getattr(function, "__nb_signature__", (("()",),))
        names = re.findall(r"(\w+): [^,()]*?(=)?(?=[,)])", text.replace("/, ", ""))
        return [(name, not default, False) for name, default in names if name != "self"]
    return [
        (each.name, each.default is each.empty, each.kind is each.KEYWORD_ONLY)
        for each in known
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def calls(function: Callable[..., Any]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(what is extreme, arguments, keywords) of each call to make."""
    known = parameters(function)
    for chosen, (name, _, by_name) in enumerate(known):
        for number, value in enumerate(EXTREMES):
            if name == "web" or (name == "pool" and isinstance(value, vram.Pool)):
                continue
            given = [
                USUAL.get(each, lambda: None)()
                for each, needed, named in known[:chosen]
                if not named and (needed or not by_name)
            ]
            if by_name:
                more = {
                    each: USUAL.get(each, lambda: None)() for each, needed, named in known if named and needed
                }
                yield f"{name}=#{number}", tuple(given), {**more, name: value}
            else:
                rest = [
                    USUAL.get(each, lambda: None)()
                    for each, needed, named in known[chosen + 1 :]
                    if needed and not named
                ]
                yield f"{name}=#{number}", (*given, value, *rest), {}
    if not known:
        yield "", (), {}


# ---- the calls --------------------------------------------------------------------------------------------


undocumented: list[str] = []
"""Calls that raised what no documentation mentions, or left books that are not in order."""


def make_call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    try:
        result = function(*arguments, **keywords)
        if isinstance(result, Future):
            result = result.result(HANG_SECONDS)
        if isinstance(result, Iterator):
            result = next(result, None)
        close = getattr(result, "close", None)
        if close is not None and not isinstance(result, vram.Buffer):
            close()
    except ALLOWED:
        pass


def run(what: str, function: Callable[[], Callable[..., Any]], after: Callable[[], None]) -> None:
    for extreme, arguments, keywords in calls(function()):
        print(f"{what}({extreme})", flush=True)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            make_call(function(), arguments, keywords)
            after()
        except Exception as error:
            undocumented.append(f"{what}({extreme}): {error!r}"[:300])
    faulthandler.cancel_dump_traceback_later()


def main(name: str, kind: str) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kind == "function":
        run(name, lambda: functions()[name], lambda: None)
    else:
        subject = subjects(kind)[name]
        methods = [
            each
            for each in dir(type(subject.get()))
            if not each.startswith("_")
            and callable(getattr(type(subject.get()), each))
            and (name, each) not in LEFT_OUT
        ]
        for each in sorted(methods, key=lambda each: each == "close"):
            run(f"{name}.{each}", partial(lambda method: getattr(subject.get(), method), each), subject.check)
    print("done", flush=True)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    print(*undocumented, sep="\n", file=sys.stderr, flush=True)
    os._exit(bool(undocumented))  # what is left of the objects is not in question here


if __name__ == "__main__":
    main(*sys.argv[1:])
