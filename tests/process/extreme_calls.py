"""Calls a part of the public surface with every extreme argument; test_extreme_arguments.py runs it.

The surface is walked, not listed: everything in `vram.__all__` and in the public modules, with every public
method, special method and settable property of the classes. One parameter at a time takes each value of
EXTREMES; the others take a usual value. Each call is announced on stdout before it is made, so that the last
line names the call that ended the process. A call returns or raises a documented error; afterwards the pool
must pass its checks and still serve. Files may be written to the working directory of the process only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import importlib
import inspect
import itertools
import os
import re
import resource
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import vram
from vram.predict.program import Ended, Program

HANG_SECONDS = 100
MOST_BYTES = 160 << 30
"""Of memory that the process may write to, most of it never touched: what asks for more is refused."""
INTEGERS = (
    *(0, 1, -1, 2, 4096),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**64 + 1),
    *(-(2**31), -(2**32), -(2**63), -(2**63) - 1, -(2**64)),
    *(10**30, 10**5000),
)
TOO_LARGE = tuple(number for number in INTEGERS if abs(number) >= 2**64)
"""What no fixed-width integer holds: who accepts it as a number either wraps it or never needed a bound."""
TWINS = tuple(
    (number, kind(number))
    for kind, numbers in (
        (np.int64, (0, 1, -1, 2, 4096, 2**31, 2**32, 2**63 - 1, -(2**63))),
        (np.uint64, (1, 4096, 2**63, 2**64 - 1)),
        (np.uint8, (1,)),
    )
    for number in numbers
)
"""Integers of Python and the NumPy scalars that mean the same: both are served or both are refused."""
OTHERS: tuple[Any, ...] = (
    *(True, False, None, ...),
    *(0.0, -0.0, 0.5, 1.0, 1e308, float("inf"), float("-inf"), float("nan"), 1j),
    *(np.int8(-1), np.float32("nan"), np.float64(0.5), np.bool_(True), np.zeros(0), np.zeros(3)),
    *("", "x", "0", "-1", "1e400", "9" * 400, "x" * 100_000, "\0", "\ud800", "1MiB", "99999999TiB"),
    *(b"", b"x", b"x" * 5000),
    *([], (), {}, [None], [-1], [4096], [2**63, 2**63], [2**64], {"x": 1}, {1: 2**64}, {2**63: 2}),
    *(range(2), object(), lambda: None, int),
)
EXTREMES: tuple[Any, ...] = (*INTEGERS, *(twin for _, twin in TWINS), *OTHERS)
_FEW = (0, -1, 2**32, 2**63 - 1, 2**64)
TRIED: tuple[int, ...] = (
    tuple(range(len(EXTREMES)))
    if "VRAM_THOROUGH" in os.environ
    else (
        *(INTEGERS.index(number) for number in _FEW),
        *(len(INTEGERS) + place for place, (number, _) in enumerate(TWINS) if number in _FEW),
        *range(len(EXTREMES) - len(OTHERS), len(EXTREMES), 4),
    )
)
"""The numbers of the values that are tried: all of them in `make test-all`."""

DOCUMENTED = (vram.VramError, TypeError, ValueError, BufferError)
FROM_DEEP_INSIDE = (UnicodeError,)
"""Documented by their base only."""
FILE_PARAMETERS = ("path", "file", "fd", "port", "address")
"""Where the operating system has a say: OSError."""
ADAPTORS = {"cuda_core", "cupy", "dask", "numba", "torch"}
"""Not called: they need another library and a GPU, and that library refuses most of what they refuse."""
PUBLIC_MODULES = tuple(name for name in vram._MODULES if name not in ADAPTORS)
"""Beside `vram` itself."""


LEFT_OUT = {
    "vram.Arena.on_reset": "runs what it is given",
    "vram.Stream.launch": "runs what it is given",
    "vram.Snapshot.of": "takes what the native core returned",
    "vram.Stats": "takes what the native core returned",
    "vram.race.RaceChecker.use": "an inactive checker looks at nothing",
    "vram.Measurement": "takes what the native core returned",
    "vram.predict.Prediction": "takes what a predicted program left",
    "vram.analysis.Table.__getitem__": "asks the Arrow table",
}
"""What is on the surface and not called, with the reason. A class stands for its constructor."""


# ---- the surface ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One thing to call: a function, a constructor, a method, or an attribute to set."""

    owner: str
    """The module, or the class as "vram.Pool"."""
    name: str
    """Of the function or method; "" is the constructor, "limit=" sets an attribute."""

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.name else self.owner


@functools.cache
def public_modules() -> list[types.ModuleType]:
    return [vram, *(importlib.import_module(f"vram.{name}") for name in PUBLIC_MODULES)]


@functools.cache
def public_classes() -> dict[str, type]:
    """Each once, under the first name it is found by."""
    found: dict[str, type] = {}
    for module in public_modules():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and value not in found.values():
                found[f"{module.__name__}.{name}"] = value
    return found


@functools.cache
def public_functions() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for module in public_modules():
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not inspect.isclass(value) and value not in found.values():
                found[f"{module.__name__}.{name}"] = value
    return found


def members(kind: type) -> Iterator[str]:
    """The public methods that a class of ours defines, special ones with arguments, and attributes.

    Whether an attribute can be set only an object tells.
    """
    for name in dir(kind):
        defined_by = next((each for each in kind.__mro__ if name in vars(each)), object)
        if not defined_by.__module__.startswith("vram"):
            continue
        if name.startswith("_"):
            if name in SPECIAL:
                yield name
        elif inspect.isdatadescriptor(inspect.getattr_static(kind, name)):
            if not is_record(kind):
                yield f"{name}="
        elif callable(getattr(kind, name)):
            yield name


def is_record(kind: type | None) -> bool:
    """Whether its objects only hold what the library put there."""
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


SPECIAL = ("__getitem__", "__contains__", "__dlpack__")


@functools.cache
def surface() -> list[Entry]:
    functions = [Entry(*name.rsplit(".", 1)) for name in public_functions()]
    classes = [Entry(name, each) for name, kind in public_classes().items() for each in ("", *members(kind))]
    # What is set for the whole process comes last.
    return sorted(classes + functions, key=lambda entry: str(entry) == "vram.configure")


def reason_to_leave_out(entry: Entry) -> str | None:
    kind = public_classes().get(entry.owner)
    if entry.owner in LEFT_OUT and kind is not None and entry.owner not in SUBJECTS:
        return LEFT_OUT[entry.owner]
    if entry.name == "" and is_record(kind):
        return "a record: holds what it is given"
    return LEFT_OUT.get(str(entry))


# ---- objects to call --------------------------------------------------------------------------------------

numbers = itertools.count()


def new_path() -> str:
    return f"{next(numbers)}.vtrace"


def new_trace() -> vram.trace.Trace:
    path = new_path()
    pool = vram.Pool("host")
    with vram.record(pool, path):
        for number in range(3):
            with vram.step(number):
                pool.allocate(4096 * (number + 1))
    return vram.open(path, trusted=True)


def cached(make: Callable[[], Any]) -> Callable[[Any], Any]:
    made: list[Any] = []

    def get(_: Any) -> Any:
        if not made:
            made.append(make())
        return made[0]

    return get


a_trace = cached(new_trace)


def new_prediction() -> vram.predict.Prediction:
    program = Program(("train.py",), (sys.executable, "train.py"))
    return vram.predict.Prediction(program, vram.predict.find_gpu("t4"), 1, Ended(0, False, 1.0, ()), ".")


def new_search() -> vram.predict.Found:
    return vram.predict.Found("train.py", "batch_size", 1, 8, vram.predict.find_gpu("t4"), None, ())


def new_event(device: vram.Device) -> vram.Event:
    event = vram.Event(device, timing=True)
    event.record()
    return event


def new_graph(device: vram.Device) -> vram.Graph:
    with vram.Stream(device).capture() as graph:
        pass
    return graph


def new_measurement(device: vram.Device) -> vram.Measurement:
    with vram.Pool(device).measure() as measurement:
        pass
    return measurement


def new_metrics(_: Any) -> vram.Metrics:
    import prometheus_client

    return vram.metrics(None, registry=prometheus_client.CollectorRegistry())


def raised(kind: type[vram.VramError]) -> Callable[[Any], Any]:
    return lambda _: kind("message", fact=1)


EVERYWHERE, ANYWHERE = ("host", "model"), ("host",)


SUBJECTS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    # Arrays of ones are written: without a limit they take all the memory of the host.
    "vram.Arena": (EVERYWHERE, lambda device: vram.Arena(vram.Pool(device, limit="64MiB"), "1MiB")),
    "vram.AsyncMemoryPool": (EVERYWHERE, lambda device: vram.AsyncMemoryPool("8MiB", device)),
    "vram.Buffer": (EVERYWHERE, lambda device: vram.Pool(device).allocate(4096)),
    "vram.Device": (EVERYWHERE, lambda device: device),
    "vram.DriverPool": (("model",), lambda device: vram.DriverPool(device, shareable="fd")),
    "vram.Event": (EVERYWHERE, new_event),
    "vram.Graph": (("model",), new_graph),
    "vram.GrowableBuffer": (
        EVERYWHERE,
        lambda device: vram.GrowableBuffer("64MiB", vram.Pool(device), size="2MiB"),
    ),
    "vram.Measurement": (ANYWHERE, new_measurement),
    "vram.MemoryManager": (ANYWHERE, lambda _: vram.MemoryManager()),
    "vram.Metrics": (ANYWHERE, new_metrics),
    "vram.Monitor": (ANYWHERE, lambda _: vram.monitor()),
    # Page-locked memory is real from the start: without a limit this takes all there is.
    "vram.PinnedPool": (("model",), lambda device: vram.PinnedPool(device, limit="64MiB")),
    "vram.Pipeline": (ANYWHERE, lambda device: vram.Pipeline(lambda chunk: chunk, device=device)),
    "vram.Plan": (ANYWHERE, lambda _: vram.plan([(0, 0, 1, 10)])),
    "vram.Pool": (EVERYWHERE, vram.Pool),
    "vram.Recorder": (EVERYWHERE, lambda device: vram.record(vram.Pool(device), new_path())),
    "vram.Scratch": (EVERYWHERE, lambda device: vram.Scratch(pool=vram.Pool(device))),
    "vram.Snapshot": (ANYWHERE, lambda device: vram.Pool(device).snapshot()),
    "vram.Stats": (ANYWHERE, lambda device: vram.Pool(device).stats()),
    "vram.Stream": (EVERYWHERE, vram.Stream),
    "vram.annotate": (ANYWHERE, lambda _: vram.annotate("x")),
    "vram.step": (ANYWHERE, lambda _: vram.step(1)),
    "vram.tag": (ANYWHERE, lambda _: vram.tag("x")),
    "vram.analysis.Difference": (ANYWHERE, cached(lambda: vram.analysis.difference(a_trace(0), a_trace(0)))),
    "vram.analysis.Explanation": (ANYWHERE, cached(lambda: vram.analysis.explain(a_trace(0)))),
    "vram.analysis.Leaks": (ANYWHERE, cached(lambda: vram.analysis.find_leaks(a_trace(0), "step:0,step:2"))),
    "vram.analysis.Memories": (ANYWHERE, cached(lambda: vram.analysis.Memories(a_trace(0)))),
    "vram.analysis.Memory": (ANYWHERE, cached(lambda: vram.analysis.memory_at(a_trace(0), 1))),
    "vram.analysis.Merged": (ANYWHERE, cached(lambda: vram.analysis.merge([a_trace(0)]))),
    "vram.analysis.Table": (ANYWHERE, cached(lambda: vram.analysis.summary(a_trace(0)))),
    "vram.analysis.Moment": (ANYWHERE, cached(lambda: vram.analysis.find_moment(a_trace(0)))),
    "vram.analysis.Group": (
        ANYWHERE,
        cached(lambda: next(iter(vram.analysis.explain(a_trace(0)).holders.values()))[0]),
    ),
    "vram.replay.ReplayReport": (ANYWHERE, cached(lambda: vram.replay.compare(a_trace(0)))),
    "vram.trace.Steps": (ANYWHERE, cached(lambda: vram.trace.find_steps(a_trace(0)))),
    "vram.config.Config": (ANYWHERE, lambda _: vram.config.Config()),
    "vram.predict.Found": (ANYWHERE, lambda _: new_search()),
    "vram.predict.Gpu": (ANYWHERE, lambda _: vram.predict.find_gpu("t4")),
    "vram.predict.Prediction": (ANYWHERE, lambda _: new_prediction()),
    "vram.race.RaceChecker": (ANYWHERE, lambda _: vram.race_check("collect")),
    "vram.trace.Trace": (ANYWHERE, a_trace),
    "vram.trace.TraceWriter": (ANYWHERE, lambda _: vram.trace.TraceWriter(new_path())),
    **{
        f"vram.{kind.__name__}": (ANYWHERE, raised(kind))
        for kind in (
            *(vram.VramError, vram.ConfigError, vram.DeviceError, vram.InvalidFree),
            *(vram.OutOfMemory, vram.RaceError, vram.Suspended, vram.TraceError),
        )
    },
}
"""The kinds of device to make it on, and how, of each class whose methods are called."""


@dataclass
class Subject:
    """An object whose methods are called: another one after each call that was served."""

    make: Callable[[], Any]
    made: Any = None

    def get(self) -> Any:
        if self.made is None:
            self.made = self.make()
        return self.made

    def check(self, outcome: str) -> None:
        """The pool under it is in order, and one whose call was refused still serves."""
        pool = self.made if isinstance(self.made, vram.Pool) else getattr(self.made, "pool", None)
        if isinstance(pool, vram.Pool) and not pool.closed:
            if (found := pool.check()) is not None:
                raise AssertionError(found)
            if outcome != "returned":
                pool.free(pool.malloc(4096))
        if outcome == "returned" and self.made is not None:
            self.drop()

    def drop(self) -> None:
        made, self.made = self.made, None
        if hasattr(made, "close") and not isinstance(made, vram.Monitor):
            with contextlib.suppress(BufferError, vram.VramError):  # views of it, or a graph being captured
                made.close()


# ---- arguments --------------------------------------------------------------------------------------------


def usual_values(device: vram.Device) -> dict[str, Callable[[Any], Any]]:
    """By parameter, or by the entry and parameter: a value made for the object whose method is called."""
    pool = vram.Pool(device)

    def live_pointer(target: Any) -> int:
        if isinstance(target, vram.MemoryManager):
            return int(target.allocate_memory(4096))
        return int((target if isinstance(target, vram.Pool) else pool).malloc(4096))

    return {
        "address": lambda _: "127.0.0.1",
        "array": lambda _: np.zeros(16),
        "batches": lambda _: [np.zeros(16)],
        "between": lambda _: None,
        "block": live_pointer,
        "buffers": lambda _: [(0, 0, 1, 10)],
        "by": lambda _: "stack",
        "callback": lambda _: lambda *_: False,
        "compute": lambda _: abs,
        "count": lambda _: 1,
        "device": lambda _: device,
        "device_or_pool": lambda _: device,
        "error": lambda _: vram.OutOfMemory("message"),
        "event": lambda _: new_event(device),
        "exported": lambda target: target.export_buffer(target.allocate(4096)),
        "fd": lambda _: -1,
        "file": lambda _: new_path(),
        "fill_value": lambda _: 1,
        "first": a_trace,
        "function": lambda _: int,
        "interval": lambda _: 1.0,
        "jobs": lambda _: 1,
        "limit": lambda _: 0,
        "max": lambda _: 64 << 20,
        "max_size": lambda _: 1 << 20,
        "memory": lambda _: pool.allocate(4096),
        "message": lambda _: "x",
        "name": lambda _: "x",
        "number": lambda _: 1,
        "other": lambda _: device,
        "path": lambda _: new_path(),
        "pieces": lambda _: [vram.trace.lifetimes(a_trace(0))],
        "policy": lambda _: "vram",
        "pool": lambda _: vram.Pool(device),
        "port": lambda _: None,
        "program": lambda _: vram.trace.lifetimes(a_trace(0)),
        "ptr": live_pointer,
        "second": a_trace,
        "settings": lambda _: {},
        "shape": lambda _: 16,
        "since": lambda _: new_event(device),
        "size": lambda _: 4096,
        "sizes": lambda _: [4096],
        "source": lambda _: np.zeros(4096, np.uint8),
        "stage": lambda _: "START",
        "stream": lambda _: None,
        "target": lambda _: np.zeros(4096, np.uint8),
        "text": lambda _: "limit:1GiB",
        "time_limit": lambda _: 0.01,
        "trace": a_trace,
        "traces": lambda _: [a_trace(0)],
        "vram.Stream.wait_stream.stream": lambda _: vram.Stream(device),
        "vram.analysis.find_leaks.between": lambda _: "step:0,step:2",
        "vram.Graph.stream": lambda _: vram.Stream(device),
        "vram.PinnedPool.device": lambda _: device,
    }


@dataclass(frozen=True)
class Parameter:
    name: str
    needed: bool
    by_name: bool
    flag: bool = False
    """A truth value: anything means true or false."""


def parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Of a function; nanobind writes its signatures elsewhere. Options stand for **config."""
    try:
        known = inspect.signature(function).parameters.values()
    except ValueError:
        ((text, *_), *_) = function.__nb_signature__  # type: ignore[attr-defined]
        names = re.findall(r"(\w+): [^,()]*?(=)?(?=[,)])", text.replace("/, ", ""))
        return [
            Parameter(name, not default, False, name in FLAGS) for name, default in names if name != "self"
        ]
    found = [
        Parameter(
            each.name,
            each.default is each.empty,
            each.kind is each.KEYWORD_ONLY,
            each.name in FLAGS or "bool" in str(each.annotation) or isinstance(each.default, bool),
        )
        for each in known
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if any(each.kind is each.VAR_KEYWORD and each.name in ("config", "settings", "more") for each in known):
        found += [Parameter(name, False, True) for name in vram.config.OPTIONS]
    if any(each.kind is each.VAR_POSITIONAL for each in known):
        found.append(Parameter("*", True, False))
    return found


FLAGS = ("dropped", "keep", "keeps_stacks=", "wait", "zero")
"""Truth values that no signature shows as such."""


@dataclass
class Calls:
    """The calls of one entry: `function` is found anew for each, on an object that may be another by then."""

    entry: Entry
    function: Callable[[], Callable[..., Any]]
    usual: dict[str, Callable[[Any], Any]]
    target: Callable[[], Any]

    def usual_value(self, parameter: Parameter) -> Any:
        make = self.usual.get(f"{self.entry}.{parameter.name}") or self.usual.get(parameter.name)
        return None if make is None else make(self.target())

    def each(self) -> Iterator[tuple[str, int, tuple[Any, ...], dict[str, Any]]]:
        """(the parameter, the number of its value, arguments, keywords) of each call."""
        known = parameters(self.function())
        if not known:
            yield "", 0, (), {}
        for chosen in known:
            for number in TRIED:
                value = EXTREMES[number]
                if (str(self.entry), chosen.name) in UNCALLED:
                    continue
                given: list[Any] = []
                named: dict[str, Any] = {}
                before = True
                for each in known:
                    before = before and each is not chosen
                    this = each is chosen
                    if not (this or each.needed or (before and not each.by_name and not chosen.by_name)):
                        continue
                    taken = value if this else self.usual_value(each)
                    if each.by_name:
                        named[each.name] = taken
                    else:
                        given.append(taken)
                yield chosen.name, number, tuple(given), named


UNCALLED: dict[tuple[str, str], str] = {
    ("vram.monitor", "web"): "opens a port",
}


# ---- the calls --------------------------------------------------------------------------------------------

wrong: list[str] = []
"""Calls that raised an error without documentation, or left something that is not in order."""


def use(result: Any) -> None:
    """Do what a program would with what a call returned."""
    repr(result)
    if isinstance(result, Future):
        use(result.result(HANG_SECONDS))
    elif isinstance(result, vram.Buffer):
        pass
    elif isinstance(result, Iterator):
        next(result, None)
    elif hasattr(result, "__enter__"):
        with result:
            vram.get_memory_manager().pool("host").allocate(64)
    elif hasattr(result, "close"):
        result.close()


def printable(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**100:
        return "a huge int"
    try:
        return f"{type(value).__name__} {str(value)[:120]!r}"
    except ValueError:
        return type(value).__name__


def outcome(calls: Calls, parameter: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """ "returned", the name of the documented error, or "" where something is wrong."""
    try:
        use(calls.function()(*arguments, **keywords))
        return "returned"
    except FROM_DEEP_INSIDE:
        raise
    except DOCUMENTED as error:
        return type(error).__name__
    except OSError as error:
        if parameter not in FILE_PARAMETERS:
            raise
        return type(error).__name__
    except KeyError:
        if calls.entry.name != "__getitem__" and str(calls.entry) != "vram.trace.Steps.range":
            raise
        return "KeyError"
    except ImportError as error:
        if not str(error).startswith("vram's adaptor"):
            raise
        return "ImportError"


def run(calls: Calls, check: Callable[[str], None]) -> None:
    outcomes: dict[tuple[str, int], str] = {}
    for parameter, number, arguments, keywords in calls.each():
        what = f"{calls.entry}({parameter}={shown(EXTREMES[number])})"
        print(printable(what), flush=True)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        written_before = len(written)
        try:
            outcomes[parameter, number] = outcome(calls, parameter, arguments, keywords)
            check(outcomes[parameter, number])
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{what}: {type(error).__name__} {shown(error)} at {place.filename}:{place.lineno}")
        wrong.extend(f"{what}: opens {path}" for path in written[written_before:])
    faulthandler.cancel_dump_traceback_later()
    flags = {each.name for each in parameters(calls.function()) if each.flag}
    wrong.extend(judge(calls.entry, flags, outcomes))


def judge(entry: Entry, flags: set[str], outcomes: dict[tuple[str, int], str]) -> Iterator[str]:
    """What the outcomes of one entry say together."""
    place = {id(value): number for number, value in enumerate(EXTREMES)}
    for parameter in dict.fromkeys(name for name, _ in outcomes):
        for value, twin in TWINS:
            if place[id(twin)] not in TRIED:
                continue
            plain = outcomes.get((parameter, INTEGERS.index(value)))
            other = outcomes.get((parameter, place[id(twin)]))
            if plain != other and parameter not in ("", "dtype", *BUFFERS):
                yield f"{entry}({parameter}={shown(value)}): {plain}, but {shown(twin)}: {other}"
        for value in TOO_LARGE:
            if outcomes.get((parameter, INTEGERS.index(value))) == "returned":
                known = {parameter, str(entry), f"{entry}.{parameter}"} & UNBOUNDED.keys()
                if not known and parameter not in flags:
                    yield f"{entry}({parameter}={shown(value)}): served"


BUFFERS = ("array", "batches", "memory", "source", "target")
"""Parameters that take memory, which NumPy's scalars are and Python's integers are not."""
UNBOUNDED: dict[str, str] = {
    "message": "text of an error, of any kind",
    "vram.race.reads.memory": "keeps what it is given",
    "vram.format_size.size": "writes any number",
    "vram.Buffer.__dlpack__.copy": "only True means a copy",
    "vram.config.Config.is_set": "a lookup",
    "vram.config.Config.origin": "a lookup",
    "vram.analysis.Memory.largest_free": "a lookup",
    "vram.config.split_settings.source": "text of an error, of any kind",
    "total": "looked at for a share only",
    "capacity": "looked at for a share only",
    "expand_factor": "a float",
    "factor": "a float",
    "lag_us": "a float",
    "pressure": "a float",
    "time_limit": "a float",
    "vram.from_dlpack.stream": "for the source to look at",
    **{f"vram.{pool}.keeps_stacks=": "a truth value" for pool in ("Pool", "PinnedPool", "DriverPool")},
}
"""What has no bound to go beyond, with the reason. A truth value has none either."""


def setter(subject: Subject, name: str) -> Callable[[], Callable[..., Any]]:
    def set_value(value: Any) -> Any:
        target = subject.get()
        setattr(target, name, value)
        return target if hasattr(target, "__enter__") and not hasattr(target, "close") else None

    return lambda: set_value


def settable(subject: Subject, name: str) -> bool:
    target = subject.make()
    try:
        value = getattr(target, name)
        setattr(target, name, value)
    except (AttributeError, vram.VramError):
        return False
    return True


def part_of(entry: Entry) -> str:
    """What one process calls: a class of `vram`, its functions, or all of another public module."""
    if entry.owner in public_classes() and entry.owner.count(".") == 1:
        return entry.owner
    modules = [module.__name__ for module in public_modules()]
    return max((name for name in modules if f"{entry.owner}.".startswith(f"{name}.")), key=len)


@functools.cache
def called() -> list[Entry]:
    return [entry for entry in surface() if reason_to_leave_out(entry) is None]


def parts() -> list[tuple[str, str]]:
    """Each part, with each kind of device that it is called on."""
    names = dict.fromkeys(part_of(entry) for entry in called())
    return [(name, kind) for name in names for kind in SUBJECTS.get(name, (ANYWHERE,))[0]]


# ---- files ------------------------------------------------------------------------------------------------

written: list[str] = []


def watch_files(folder: Path) -> None:
    """Note every file opened for writing that is not in the folder, and descriptors taken for a path."""

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, _, flags = arguments
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if isinstance(path, int):
            written.append(f"descriptor {path}")
            return
        place = Path(os.path.abspath(os.fsdecode(path)))
        if folder not in (place, *place.parents) and place.parts[1] not in ("dev", "proc"):
            written.append(str(place))

    sys.addaudithook(look)


def calls_of(entry: Entry, subject: Subject, usual: dict[str, Callable[[Any], Any]]) -> Calls | None:
    """None for an attribute that cannot be set."""
    if entry.owner not in public_classes():
        return Calls(entry, lambda: public_functions()[str(entry)], usual, lambda: None)
    if entry.name == "":
        return Calls(entry, lambda: public_classes()[entry.owner], usual, lambda: None)
    if not entry.name.endswith("="):
        return Calls(entry, lambda: getattr(subject.get(), entry.name), usual, subject.get)
    if not settable(subject, entry.name[:-1]):
        return None
    return Calls(entry, setter(subject, entry.name[:-1]), usual, subject.get)


def call_part(part: str, kind: str) -> None:
    device = vram.Device("host") if kind == "host" else vram.Device.model("64GiB")
    usual = usual_values(device)
    entries = [entry for entry in called() if part_of(entry) == part]
    for owner, group in itertools.groupby(entries, key=lambda entry: entry.owner):
        make = SUBJECTS.get(owner, ((), lambda _: None))[1]
        subject = Subject(functools.partial(make, device))
        for entry in sorted(group, key=lambda entry: entry.name == "close"):
            if (calls := calls_of(entry, subject, usual)) is not None:
                run(calls, subject.check)
        subject.drop()


def main(*named: str) -> int:
    """Each argument is a part and the kind of its device, as in "vram.Pool:host"."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch_files(Path.cwd())
    sys.unraisablehook = lambda raised: wrong.append(f"unraisable: {raised.exc_value!r}")
    threading.excepthook = lambda raised: wrong.append(f"a thread ended: {raised.exc_value!r}")
    for each in named:
        call_part(*each.split(":"))
    print("done", flush=True)
    print(*(printable(each) for each in wrong), sep="\n", file=sys.stderr, flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
