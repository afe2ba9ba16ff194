"""What a launched function can reach: the one place that finds memory in arguments, objects and functions.

Arguments are searched completely and count as written unless they are marked. From the closure, globals and
object of a function, only what its code uses is searched (`paths`); it counts as read unless the code stores
to it. No code of the program runs except array interfaces and conversions to integers.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import (
    BuiltinMethodType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

from vram import _native
from vram.core.buffer import Buffer
from vram.core.device import Device
from vram.core.dlpack import View, described
from vram.core.stream import Event, Reads, Stream
from vram.lifetimes.growable import DeviceArray, GrowableBuffer
from vram.race.call_sites import is_the_users
from vram.race.paths import (
    Attribute,
    Called,
    Item,
    Made,
    Named,
    Path,
    Paths,
    Super,
    Viewed,
    evaluate,
    paths_of,
    paths_when,
)
from vram.race.regions import Region, array_region

__all__ = ["Found", "Owner", "memory_in", "memory_of"]

MOST_OBJECTS = 20_000
"""Maximum number of objects, and of integers, that are examined for one launch, nearest first."""
MOST_POINTERS = 1024
"""Maximum length of an integer array that is searched for addresses."""
LEAST_ADDRESS = 1 << 16
"""Smaller integers are not addresses."""
PERHAPS, SURELY = 1, 2
"""Whether memory is written; 0 if not."""
NOT, ITSELF, WHOLE = 0, 1, 2
"""What the program names in the launch: nothing, the object itself, or also its contents."""


class Owner(NamedTuple):
    """A Buffer or growable buffer that was found: where its allocation is, and whether it was freed."""

    pool: Any
    block: int
    size: int
    stream: int
    gone: bool


@dataclass(slots=True)
class Found:
    """Memory that may be used. `owner` is None for addresses, which may not belong to a pool.

    `named`: the program names it in the launch; it was not found inside an object that a function refers to.
    `holds`: what was found keeps the Buffer alive. `unsure`: it is read and perhaps also written.
    """

    region: Region
    writes: bool
    named: bool
    holds: bool = False
    owner: Owner | None = None
    unsure: bool = False


def memory_in(work: Any, arguments: tuple[Any, ...], ours: Callable[[int], bool]) -> list[Found]:
    """Return what `work` can reach with these arguments. `ours` tells whether a pool has an address."""
    search = _Search(ours)
    search.launched(work, arguments)
    return search.result()


def memory_of(value: Any, writes: bool, ours: Callable[[int], bool]) -> list[Found]:
    """Return the memory that a value represents or contains."""
    search = _Search(ours)
    search.add(value, SURELY if writes else 0, WHOLE)
    return search.result()


# ---- the search -------------------------------------------------------------------------------------------


class _Look(NamedTuple):
    """An object to examine."""

    value: Any
    writes: int
    named: int


class _Call(NamedTuple):
    """A call to examine; the last `counted` arguments are already covered by the launch.

    `bound` are arguments of a partial call. `launched`: the stream runs it; it is not a call inside.
    """

    function: Any
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = MappingProxyType({})
    counted: int = 0
    bound: tuple[Any, ...] = ()
    launched: bool = False

    def without_partial(self) -> _Call:
        """The same call of the function inside."""
        function, arguments, keywords, bound = self.function, self.arguments, self.keywords, self.bound
        while isinstance(function, functools.partial):
            bound = (*function.args, *function.keywords.values(), *bound)
            arguments, keywords = (*function.args, *arguments), {**function.keywords, **keywords}
            function = function.func
        if isinstance(function, MethodType):
            arguments, function = (function.__self__, *arguments), function.__func__
        elif not isinstance(function, FunctionType):
            method = inspect.getattr_static(type(function), "__call__", None)
            if isinstance(method, FunctionType):
                function, arguments = method, (function, *arguments)
        return self._replace(function=function, arguments=arguments, keywords=keywords, bound=bound)

    @property
    def uncounted(self) -> tuple[Any, ...]:
        return (*self.arguments[: len(self.arguments) - self.counted], *self.keywords.values())


class _Search:
    """Searches objects breadth first, each once for reading and once for writing."""

    def __init__(self, ours: Callable[[int], bool]) -> None:
        self._ours = ours
        self._open: deque[_Look | _Call] = deque()
        self._seen: dict[int, tuple[int, int]] = {}
        self._kept: list[Any] = []  # keeps ids unique during the search
        self._called: set[tuple[int, int]] = set()
        self._classes: set[type] = set()
        self._pointers_left = MOST_OBJECTS
        self._found: dict[tuple[Region, Owner | None], Found] = {}

    def add(self, value: Any, writes: int, named: int) -> None:
        kind = type(value)
        if kind is int:
            if LEAST_ADDRESS <= value < 1 << 64 and self._pointers_left > 0:
                self._pointers_left -= 1
                if self._ours(value):
                    self._touch(Region(value, value + 1, open=True), writes, named)
        elif kind not in _LEAVES:
            self._open.append(_Look(value, writes, named))

    def _add_inside(self, values: Iterable[Any], writes: int, named: int) -> None:
        for value in values:
            self.add(value, writes, WHOLE if named == WHOLE else NOT)

    def result(self) -> list[Found]:
        while self._open and len(self._kept) < MOST_OBJECTS:
            task = self._open.popleft()
            if isinstance(task, _Call):
                self._call(task)
            else:
                self._look_once(task)
        return list(self._found.values())

    def _look_once(self, look: _Look) -> None:
        writes, named = self._seen.get(id(look.value), (None, NOT))
        if writes is None or look.writes > writes or look.named > named:
            self._seen[id(look.value)] = (max(look.writes, writes or 0), max(look.named, named))
            self._kept.append(look.value)
            with suppress(Exception):  # objects of the program may raise anything
                self._look(look)

    def _touch(
        self,
        region: Region | None,
        writes: int,
        named: int,
        *,
        holds: bool = False,
        owner: Owner | None = None,
    ) -> None:
        if region is None:
            return
        known = self._found.get((region, owner))
        if known is None:
            self._found[region, owner] = Found(
                region, writes == SURELY, bool(named), holds, owner, unsure=writes == PERHAPS
            )
        else:
            known.writes |= writes == SURELY
            known.unsure = not known.writes and (known.unsure or writes == PERHAPS)
            known.named |= bool(named)
            known.holds &= holds

    # ---- values

    def _look(self, look: _Look) -> None:
        value, writes, named = look
        for kinds, handle in _KINDS:
            if isinstance(value, kinds):
                handle(self, value, writes, named)
                return
        if type(value).__module__.startswith("vram."):
            return  # it moves memory for the program and orders it itself
        if not self._array(value, writes, named) and not self._number(value, writes, named):
            self._inside(value, writes, named)

    def _ignore(self, value: Any, writes: int, named: int) -> None:
        """Search no further: it is not memory and refers to everything."""

    def _reads(self, value: Reads, writes: int, named: int) -> None:
        self.add(value.value, False, named)

    def _integer(self, value: int, writes: int, named: int) -> None:
        self.add(int(value), writes, named)

    def _buffer(self, value: Buffer, writes: int, named: int) -> None:
        gone = bool(value.freed or value.pool.closed)
        base = value.base
        block, size = (
            (base.ptr, base.capacity) if isinstance(base, GrowableBuffer) else (value.ptr, value.size)
        )
        owner = Owner(value.pool, block, size, value.stream, gone)
        self._touch(_bytes(value.ptr, value.size), writes, named, holds=True, owner=owner)

    def _window(self, value: _Window, writes: int, named: int) -> None:
        buffer, places = value
        owner = Owner(buffer.pool, buffer.ptr, buffer.size, buffer.stream, bool(buffer.freed))
        if isinstance(buffer.base, GrowableBuffer) or owner.gone:
            self.add(buffer, writes, named)
        else:
            region = array_region(places.start, 1, (len(places),), (places.step,))
            self._touch(region, writes, named, holds=True, owner=owner)

    def _growable(self, value: GrowableBuffer, writes: int, named: int) -> None:
        owner = Owner(value.pool, value.ptr, value.capacity, value.stream, value.closed)
        self._touch(_bytes(value.ptr, value.size), writes, named, holds=True, owner=owner)

    def _device_array(self, value: DeviceArray, writes: int, named: int) -> None:
        self.add(value.buffer, writes, named)

    def _view(self, value: View, writes: int, named: int) -> None:
        item = int(value.typestr[2:])
        region = array_region(value.ptr, item, value.shape, [stride * item for stride in value.strides])
        self._touch(region, 0 if value.readonly else writes, named, holds=True)

    def _weak(self, value: weakref.ref[Any], writes: int, named: int) -> None:
        self.add(value(), writes, named)

    def _inside(self, value: Any, writes: int, named: int) -> None:
        """Examine what an object of an unknown type refers to, as the garbage collector sees it."""
        if type(value) is _BYREF:
            self.add(value._obj, writes, named)
        if type(value).__name__ == "PyCapsule":
            with suppress(Exception):  # not from DLPack, or consumed
                self._tensor(value, writes, named)
        self._add_inside(gc.get_referents(value), writes, named)
        self._class(type(value), writes, named)
        if not type(value).__flags__ & _HEAP_TYPE:  # a type of a library may hold a bare address
            with suppress(Exception):
                self._integer(value.ptr, writes, named)

    def _class(self, value: type, writes: int, named: int) -> None:
        """Examine what a class of the program holds for all its objects."""
        for each in value.__mro__:
            module = sys.modules.get(each.__module__)
            if each not in self._classes and is_the_users(getattr(module, "__file__", None) or "<frozen >"):
                self._classes.add(each)
                held = (held for held in vars(each).values() if not hasattr(type(held), "__get__"))
                self._add_inside(held, writes, named)

    # ---- arrays

    def _array(self, value: Any, writes: int, named: int) -> bool:
        """Find our memory in arrays of any library, through the protocols they offer."""
        return (
            self._interface(value, writes, named)
            or self._exported(value, writes, named)
            or self._torch(value, writes, named)
            or self._dlpack(value, writes, named)
        )

    def _interface(self, value: Any, writes: int, named: int) -> bool:
        found = False
        for protocol in ("__array_interface__", "__cuda_array_interface__"):
            if hasattr(type(value), protocol) or protocol in getattr(value, "__dict__", ()):
                with suppress(Exception):  # such properties may raise anything
                    facts = getattr(value, protocol)
                    address, read_only = facts["data"]
                    item = _item_size(facts["typestr"])
                    region = array_region(int(address), item, facts["shape"], facts.get("strides"))
                    self._touch(region, 0 if read_only else writes, named, holds=_holds(value))
                    found = True
                    if protocol == "__array_interface__":
                        self._contents(value, facts["typestr"], int(address), writes, named)
        return found

    def _contents(self, value: Any, typestr: str, address: int, writes: int, named: int) -> None:
        """Examine arrays of objects and arrays of addresses."""
        if value.size > MOST_POINTERS or self._ours(address):
            return
        if value.dtype.names:
            self._add_inside((value[name] for name in value.dtype.names), writes, named)
        elif typestr[1] == "O":
            self._add_inside(value.flat, writes, named)
        elif typestr[1:] in ("u8", "i8"):
            self._add_inside(value.ravel().tolist(), writes, named)

    def _exported(self, value: Any, writes: int, named: int) -> bool:
        """Examine the buffer protocol: memoryviews, array.array, bytearrays and so on."""
        if isinstance(value, _CTYPES) or not _check_buffer(value):
            return False
        held = value.obj if type(value) is memoryview and not _released(value) else None
        view = _PyBuffer()
        if _get_buffer(value, ctypes.byref(view), _STRIDED_FORMAT) != 0:
            return True  # a released view, or one that raises
        try:
            shape = view.shape[: view.ndim] if view.ndim else ()
            strides = view.strides[: view.ndim] if view.ndim and view.strides else None
            region = array_region(view.buf or 0, view.itemsize, shape, strides)
            kind, count = (view.format or b"B")[-1:], view.len // 8
            self._touch(region, 0 if view.readonly else writes, named, holds=isinstance(held, Buffer))
            if (
                view.itemsize == 8
                and kind in b"QqLlNnP"
                and count <= MOST_POINTERS
                and not self._ours(view.buf or 0)
            ):
                self._add_inside(memoryview(value).tolist(), writes, named)
        finally:
            _release_buffer(ctypes.byref(view))
        return True

    def _torch(self, value: Any, writes: int, named: int) -> bool:
        if not type(value).__module__.startswith("torch") or not hasattr(type(value), "data_ptr"):
            return False
        with suppress(Exception):
            item = value.element_size()
            strides = [stride * item for stride in value.stride()]
            self._touch(array_region(value.data_ptr(), item, tuple(value.shape), strides), writes, named)
        return True

    def _dlpack(self, value: Any, writes: int, named: int) -> bool:
        """Export only host memory: elsewhere an export orders streams."""
        if not hasattr(type(value), "__dlpack__") or not hasattr(type(value), "__dlpack_device__"):
            return False
        with suppress(Exception):
            if int(value.__dlpack_device__()[0]) == 1:
                self._tensor(value.__dlpack__(), writes, named)
                return True
        return False

    def _tensor(self, capsule: Any, writes: int, named: int) -> None:
        address, item, shape, strides, readonly = described(capsule)
        self._touch(array_region(address, item, shape, strides), 0 if readonly else writes, named)

    def _number(self, value: Any, writes: int, named: int) -> bool:
        """Examine NumPy's integers and other objects that convert to an integer."""
        if not hasattr(type(value), "__index__"):
            return False
        with suppress(Exception):
            self.add(operator.index(value), writes, named)
            return True
        return False

    # ---- ctypes

    def _ctypes(self, value: Any, writes: int, named: int) -> None:
        address, size = ctypes.addressof(value), ctypes.sizeof(value)
        if self._ours(address):
            self._touch(_bytes(address, size), writes, named)
        else:
            self._ctypes_contents(value, address, writes, named)
        self._add_inside(gc.get_referents(value), writes, named)

    def _ctypes_contents(self, value: Any, address: int, writes: int, named: int) -> None:
        """Read its addresses as plain numbers; follow only memory of ctypes itself."""
        if isinstance(value, ctypes.Array):
            kind, count = value._type_, min(len(value), MOST_POINTERS)
            places = [(address + i * ctypes.sizeof(kind), kind) for i in range(count)]
        elif isinstance(value, (ctypes.Structure, ctypes.Union)):
            places = [
                (address + getattr(type(value), name).offset, kind) for name, kind in _fields(type(value))
            ]
        else:
            places = [(address, type(value))]
        for place, kind in places:
            if not issubclass(kind, (ctypes._SimpleCData, ctypes._Pointer)):
                self.add(kind.from_address(place), writes, named)
            elif ctypes.sizeof(kind) == _POINTER_BYTES:
                target = ctypes.c_size_t.from_address(place).value
                self.add(target, writes, named)
                if (
                    isinstance(value, ctypes._Pointer)
                    and target
                    and value._objects
                    and not self._ours(target)
                ):
                    self.add(value.contents, writes, named)

    # ---- functions

    def launched(self, work: Any, arguments: tuple[Any, ...]) -> None:
        """Examine a launch. `work` may be a partial call of the function with plain values."""
        function, plain = work, ()
        if arguments:
            count = len(work.args) - len(arguments)
            plain = work.args[count:]
            function = (
                functools.partial(work.func, *work.args[:count], **work.keywords) if count else work.func
            )
        if not self._known(function, plain):
            for value in arguments:
                self.add(value, SURELY, WHOLE)
        self._open.append(_Call(function, plain, counted=len(plain), launched=True))

    def _known(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        """Handle functions of ctypes, which tell how many bytes they access."""
        kinds = next((kinds for known, kinds in _RANGES if function is known), ())
        if not kinds or len(arguments) != len(kinds) + 1:
            return False
        try:
            size = operator.index(arguments[-1])
            places = [(_address(each), writes) for each, writes in zip(arguments, kinds, strict=False)]
        except TypeError:
            return False
        for address, writes in places:
            if writes is not None:
                self._touch(_bytes(address, size), SURELY if writes else 0, WHOLE)
        return True

    def _callable(self, value: Any, writes: int, named: int) -> None:
        self._open.append(_Call(value))

    def _builtin(self, value: Any, writes: int, named: int) -> None:
        owner = value.__self__
        if not isinstance(owner, ModuleType):
            self.add(owner, SURELY if _writes_owner(value.__name__) else 0, named or ITSELF)

    def _call(self, call: _Call) -> None:
        """Examine what a function refers to when it is called this way."""
        call = call.without_partial()
        function = call.function
        if isinstance(function, FunctionType) and is_the_users(function.__code__.co_filename):
            self._function(call)
            return
        if isinstance(function, FunctionType):  # a library's function may wrap one of the program's
            self._add_inside((function.__closure__ or ()), False, NOT)
        else:
            self.add(function, False, ITSELF)
        for value in call.uncounted:
            self.add(value, SURELY if call.launched else 0, ITSELF)

    def _function(self, call: _Call) -> None:
        function, arguments = call.function, call.arguments
        signature = (id(function), id(arguments[0]) if arguments else 0)
        if signature in self._called:
            return
        self._called.add(signature)
        self._kept += [function, *arguments[:1]]
        scope = _Scope(function, arguments, call.keywords, call.counted)
        paths = paths_when(function.__code__, scope.decide)
        if call.launched and paths.empty:  # it stands for work that Python does not show
            for value in call.uncounted:
                self.add(value, SURELY, ITSELF)
        for value in call.bound:
            self.add(value, False, ITSELF)
        changed = paths.changed | self._changed_by_calls(paths, scope)
        given = self._given_to_unknown(paths, scope)
        for path in paths.used | changed | given:
            self._follow(scope, path, SURELY if path in changed else PERHAPS if path in given else 0)
        for path in paths.assigned:
            # An item of a list is replaced, which writes to no memory.
            container = [] if path.made else scope.values(Path(path.root, path.steps[:-1]), False)
            if not any(isinstance(each, _CONTAINERS) for each in container):
                self._follow(scope, path, SURELY)
        for inner in paths.calls:
            for callee in inner.callees:
                self._follow(scope, callee, False)

    def _follow(self, scope: _Scope, path: Path, writes: int) -> None:
        if path.root.name in scope.counted and path.root.kind == "parameter":
            return
        for value in scope.values(path, writes):
            if isinstance(value, _Bound):
                self._open.append(_Call(value.function, (value.owner,)))
            else:
                self.add(value, writes, ITSELF)

    def _given_to_unknown(self, paths: Paths, scope: _Scope) -> frozenset[Path]:
        """Return the arguments of functions of which nothing is known, as those of an extension module."""
        given: set[Path] = set()
        for call in paths.calls:
            if any(_is_unknown(value) for callee in call.callees for value in scope.values(callee, False)):
                given.update(*call.arguments, *(passed for _, passed in call.named))
        return frozenset(given)

    def _changed_by_calls(self, paths: Paths, scope: _Scope) -> frozenset[Path]:
        """Return which arguments the called functions change."""
        changed: set[Path] = set()
        for call in paths.calls:
            changed |= _changed_by_name(call)
            for callee in call.callees:
                for value in scope.values(callee, False):
                    changed |= _changed_by_function(value, call)
                    inputs = getattr(
                        value, "nin", None
                    )  # of NumPy's functions of elements; then come outputs
                    if isinstance(inputs, int):
                        changed |= frozenset().union(*call.arguments[inputs:])
        return frozenset(changed)


def _is_unknown(function: Any) -> bool:
    """Return whether a function may write to what it is given, without its name or its code showing it."""
    if isinstance(function, _FOREIGN):
        return not any(function is known for known, _ in _RANGES)
    if isinstance(function, (_Bound, MethodType)) or function is None:
        return False
    if isinstance(function, FunctionType) and is_the_users(function.__code__.co_filename):
        return False
    named = function if isinstance(function, (FunctionType, type, *_BUILTIN)) else type(function)
    owner = getattr(function, "__self__", None) if isinstance(function, _BUILTIN) else None
    if owner is not None and not isinstance(owner, ModuleType):
        named = type(owner)
    module = str(getattr(named, "__module__", None) or "").partition(".")[0]
    return module not in _KNOWN_MODULES and not _is_of_the_program(named)


def _is_of_the_program(kind: Any) -> bool:
    """Return whether the program defines it; what its code does is examined by itself."""
    module = sys.modules.get(str(getattr(kind, "__module__", "")))
    return is_the_users(getattr(module, "__file__", None) or "<frozen >") if module is not None else True


def _changed_by_name(call: Called) -> frozenset[Path]:
    """Return what a call changes according to its name: known methods and functions, and `out=`."""
    changed = frozenset().union(*(given for name, given in call.named if name == "out"))
    for callee in call.callees:
        last = callee.steps[-1] if callee.steps else Attribute(callee.root.name)
        name = last.name if isinstance(last, Attribute) else ""
        if callee.steps and _writes_owner(name):
            changed |= {Path(callee.root, callee.steps[:-1])}
        if name in _WRITES_FIRST:
            changed |= frozenset().union(*call.arguments[: 2 if name == "pack_into" else 1])
    return changed


def _writes_owner(method: str) -> bool:
    """Decide by the name; PyTorch's in-place methods end with an underscore."""
    return method in _WRITES_OWNER or (method.endswith("_") and not method.endswith("__"))


def _changed_by_function(value: Any, call: Called) -> frozenset[Path]:
    """Return which arguments of a call a function of the program changes."""
    offset = int(isinstance(value, (_Bound, MethodType)))
    function = value.function if isinstance(value, _Bound) else getattr(value, "__func__", value)
    if not isinstance(function, FunctionType):
        return frozenset()
    code = function.__code__
    inside = paths_of(code)
    paths = (inside.changed | inside.assigned).union(*map(_changed_by_name, inside.calls))
    names = {path.root.name for path in paths if path.root.kind == "parameter"}
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & _REST else ""
    given = [
        (code.co_varnames[i] if i < code.co_argcount else rest, passed)
        for i, passed in enumerate(call.arguments, offset)
    ]
    return frozenset().union(*(passed for name, passed in (*given, *call.named) if name in names))


# ---- resolving paths --------------------------------------------------------------------------------------


class _Bound(NamedTuple):
    """A method and the object it is called on."""

    function: Any
    owner: Any


class _Scope:
    """What the names in a function refer to when it is called this way."""

    def __init__(
        self, function: FunctionType, arguments: tuple[Any, ...], keywords: Mapping[str, Any], counted: int
    ) -> None:
        code = function.__code__
        names, count = code.co_varnames, code.co_argcount
        most = count + code.co_kwonlyargcount
        given = dict(zip(names[:count], arguments, strict=False))
        given.update({name: value for name, value in keywords.items() if name in names[:most]})
        defaults = function.__defaults__ or ()
        missing = dict(zip(names[count - len(defaults) : count], defaults, strict=True))
        self._parameters = {**missing, **(function.__kwdefaults__ or {}), **given}
        if code.co_flags & _REST:
            self._parameters[names[most]] = arguments[count:]
        self.counted = frozenset(names[len(arguments) - counted : min(len(arguments), count)])
        self._function = function
        self._free = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))

    def root(self, path: Path) -> Any:
        """Return the root of a path. Raises KeyError or ValueError if there is none."""
        kind, name = path.root
        if kind == "parameter":
            return self._parameters[name]
        if kind == "free":
            return self._free[name].cell_contents
        return self._function.__globals__[name]

    def decide(self, condition: Any) -> bool | None:
        """Whether a condition holds, if it depends on nothing but values passed to the function."""
        with suppress(Exception):
            found = evaluate(condition, self._passed)
            return bool(found) if isinstance(found, (int, str, type(None))) else None
        return None

    def _passed(self, path: Path) -> Any:
        if path.steps or path.root.kind != "parameter":
            raise LookupError("may change before the function runs")
        return self._find(path)

    def values(self, path: Path, writes: int) -> Iterator[Any]:
        """Yield the object of a path, or the last one on the way that can be determined."""
        with suppress(KeyError, ValueError):
            value = self.root(path)
            for i, step in enumerate(path.steps):
                if isinstance(step, Made):
                    break
                last = value
                try:
                    value = self._step(value, step)
                except _Unknown:
                    if (
                        isinstance(step, Attribute)
                        and isinstance(value, _CONTAINERS)
                        and step.name in _MUTATES
                    ):
                        return  # its contents are not examined
                    break
                following = path.steps[i + 1 : i + 2]
                if isinstance(value, _Bound) and following:
                    # The result of a Python method is examined in the method.
                    yield from (value, last) if writes else (value,)
                    return
                if isinstance(value, property) and isinstance(value.fget, FunctionType):
                    made = _Bound(value.fget, last)
                    yield from (made, last) if writes else (made,)
                    return
            yield value.owner if isinstance(value, _SuperOf) else value

    def _step(self, value: Any, step: Attribute | Item | Named | Super | Viewed) -> Any:
        if isinstance(step, Viewed):
            plain = isinstance(value, Buffer) and value.typestr == "|u1" and len(value.shape) == 1
            return _Window(value, range(value.ptr, value.ptr + value.size)) if plain else value
        if isinstance(step, Super):
            return _SuperOf(value, self._free["__class__"].cell_contents)
        if isinstance(step, Attribute):
            return _attribute(value, step.name)
        if isinstance(step, Named):
            with suppress(LookupError):
                return _attribute(value, str(evaluate(step.key, self._find)))
            raise _Unknown
        if not isinstance(value, (*_INDEXED, _Window)) and not hasattr(type(value), "__array_interface__"):
            raise _Unknown
        try:
            key = evaluate(step.key, self._find)
            if isinstance(value, _Window):
                return _Window(value.buffer, value.bytes[_as_slices(key)])
            return value[_as_slices(key) if not isinstance(value, _INDEXED[:-1]) else key]
        except Exception:
            raise _Unknown from None

    def _find(self, path: Path) -> Any:
        found = list(self.values(path, False))
        if len(found) != 1 or not isinstance(found[0], (int, str, type(None))):
            raise LookupError("not a plain value")
        return found[0]


class _Window(NamedTuple):
    """Some bytes of a Buffer."""

    buffer: Buffer
    bytes: range


class _SuperOf(NamedTuple):
    """The result of `super()`: an object, and the class whose bases are searched."""

    owner: Any
    above: type


class _Unknown(Exception):
    """A step of a path cannot be resolved without running code of the program."""


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute, found without running code: a value, a property, or a bound function."""
    if isinstance(value, ModuleType):
        if name in value.__dict__:
            return value.__dict__[name]
        raise _Unknown
    if name in _FACTS and (isinstance(value, Buffer) or hasattr(type(value), "__array_interface__")):
        return None  # not its contents
    try:
        if isinstance(value, _SuperOf):
            classes = type(value.owner).__mro__
            bases = classes[classes.index(value.above) + 1 :]
            value, found = value.owner, next(vars(each)[name] for each in bases if name in vars(each))
        else:
            found = inspect.getattr_static(value, name)
    except (AttributeError, TypeError, ValueError, StopIteration):
        raise _Unknown from None
    if isinstance(found, FunctionType):
        return (
            found
            if isinstance(value, type) or name in getattr(value, "__dict__", ())
            else _Bound(found, value)
        )
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return _Bound(found.__func__, value if isinstance(value, type) else type(value))
    if isinstance(found, MemberDescriptorType) or type(found).__name__ == "_tuplegetter":
        with suppress(AttributeError):
            return getattr(value, name)
        raise _Unknown
    if isinstance(found, property):
        return found
    if hasattr(type(found), "__get__"):
        raise _Unknown  # a descriptor of a library: its owner counts
    return found


# ---- types ------------------------------------------------------------------------------------------------

_LEAVES = frozenset(
    (type(None), bool, float, complex, str, bytes, range, slice, type(...), type(NotImplemented), CodeType)
)
_FOREIGN: Any = ctypes._CFuncPtr  # type: ignore[attr-defined]
_BUILTIN = (BuiltinMethodType, MethodWrapperType)
_KNOWN_MODULES = frozenset((*sys.stdlib_module_names, "numpy", "torch", "vram"))
"""Functions that write to their arguments are listed here, or their names show it."""
_HEAP_TYPE = 1 << 9
_REST = 4  # a flag of code with *arguments
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_CONTAINERS = (dict, list, set, deque)
_INDEXED = (dict, list, tuple, deque, memoryview)
_MUTATES = frozenset(
    ("append", "appendleft", "add", "extend", "insert", "clear", "remove", "discard", "update", "setdefault")
)
_FACTS = frozenset(
    [
        *("size", "nbytes", "itemsize", "shape", "strides", "ndim", "dtype", "typestr", "flags"),
        *("stream", "device", "pool", "tag", "freed", "suspended", "views"),
    ]
)
_CTYPES = (ctypes._SimpleCData, ctypes._Pointer, ctypes.Array, ctypes.Structure, ctypes.Union)

# Methods that write to their object, and functions that write to their first argument.
_WRITES_OWNER = frozenset(
    (
        "fill",
        "copy_from",
        "sort",
        "put",
        "itemset",
        "partition",
        "byteswap",
        "setfield",
        "resize",
        "__setitem__",
    )
)
_WRITES_FIRST = frozenset(
    [
        *("copyto", "memset", "memmove", "put", "place", "putmask", "put_along_axis", "fill_diagonal"),
        *("shuffle", "at", "copy_to", "readinto", "readinto1", "recv_into", "recvfrom_into", "pack_into"),
        *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor", "imatmul"),
    ]
)
_RANGES: tuple[tuple[Any, tuple[bool | None, ...]], ...] = (
    (ctypes.memset, (True, None)),
    (ctypes.memmove, (True, False)),
    (ctypes.string_at, (False,)),
)

_KINDS: tuple[tuple[Any, Callable[[_Search, Any, int, int], None]], ...] = (
    (Reads, _Search._reads),
    (Buffer, _Search._buffer),
    (_Window, _Search._window),
    ((list, tuple, dict, set, frozenset), _Search._inside),
    (int, _Search._integer),
    (GrowableBuffer, _Search._growable),
    (DeviceArray, _Search._device_array),
    (View, _Search._view),
    ((FunctionType, MethodType, functools.partial), _Search._callable),
    ((BuiltinMethodType, MethodWrapperType), _Search._builtin),
    (_CTYPES, _Search._ctypes),
    (weakref.ref, _Search._weak),
    (type, _Search._class),
    (
        (ModuleType, FrameType, Device, Stream, Event, _native.PoolCore, _native.ArenaCore),
        _Search._ignore,
    ),
)


def _as_slices(key: Any) -> Any:
    """Convert a key so that it gives a view where an index would give a copy of an element."""
    if isinstance(key, tuple):
        return tuple(map(_as_slices, key))
    if type(key) is range:
        low, high = min(key[0], key[-1]), max(key[0], key[-1])
        return slice(low, high + 1, abs(key.step))
    return slice(key, key + 1 or None) if type(key) is int else key


def _bytes(address: int, size: int) -> Region | None:
    return Region(address, address + size) if size > 0 else None


def _item_size(typestr: str) -> int:
    size = int(typestr[2:] or _POINTER_BYTES)  # objects have no size
    return 4 * size if typestr[1] == "U" else size


def _holds(value: Any) -> bool:
    """Return whether an array keeps a Buffer alive: NumPy arrays do through their base."""
    for _ in range(MOST_POINTERS):
        if isinstance(value, Buffer):
            return True
        value = (
            value.obj if type(value) is memoryview and not _released(value) else getattr(value, "base", None)
        )
        if value is None:
            return False
    return False


def _released(view: memoryview) -> bool:
    try:
        view.obj  # noqa: B018
    except ValueError:
        return True
    return False


def _address(pointer: Any) -> int:
    if isinstance(pointer, ctypes._Pointer):
        return ctypes.c_uint64.from_address(ctypes.addressof(pointer)).value
    if isinstance(pointer, ctypes.c_void_p):
        return pointer.value or 0
    return operator.index(pointer)


def _fields(kind: type) -> Iterator[tuple[str, Any]]:
    for each in reversed(kind.__mro__):
        for field in each.__dict__.get("_fields_", ()):
            if len(field) == 2:  # otherwise a bit field
                yield field[0], field[1]


# ---- the buffer protocol ----------------------------------------------------------------------------------


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_STRIDED_FORMAT = 0x18 | 0x04
_BYREF: Any = type(ctypes.byref(ctypes.c_int()))
_python = ctypes.PyDLL(None)
_check_buffer = _python.PyObject_CheckBuffer
_check_buffer.argtypes, _check_buffer.restype = [ctypes.py_object], ctypes.c_int
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = [ctypes.c_void_p], None
_native_get_buffer = _python.PyObject_GetBuffer
_native_get_buffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]


def _get_buffer(value: Any, view: Any, flags: int) -> int:
    try:
        return int(_native_get_buffer(value, view, flags))
    except Exception:  # raised by the exporter
        return -1
