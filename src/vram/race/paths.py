"""Which of the names available to a function its bytecode uses.

`paths_of(code)` lists paths such as `self.front`, `state["x"]` or `x[:n]`: those used, those stored to, and
the calls with their arguments. It sees no values and runs nothing: `reach` resolves the paths and follows
the calls. `paths_when(code, decide)` leaves out branches that are known not to run.
"""

from __future__ import annotations

import dis
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "Attribute",
    "Called",
    "Item",
    "Made",
    "Named",
    "Path",
    "Paths",
    "Super",
    "Viewed",
    "evaluate",
    "paths_of",
    "paths_when",
]


class Root(NamedTuple):
    """Where a path begins: "parameter", "free" (a variable of an enclosing function) or "global"."""

    kind: str
    name: str


class Constant(NamedTuple):
    """A value in the code."""

    value: Any


class Computed(NamedTuple):
    """A slice, a tuple or arithmetic; `name` is the operator."""

    name: str
    parts: tuple[Any, ...]


class Attribute(NamedTuple):
    """A step of a path: an attribute of the object so far."""

    name: str


class Item(NamedTuple):
    """A step of a path: an item or a slice of the object so far."""

    key: Any


class Named(NamedTuple):
    """A step of a path: the attribute that `getattr` finds by a computed name."""

    key: Any


class Made(NamedTuple):
    """The last step of a path: an object created from the one so far, by a call or in a loop."""


class Super(NamedTuple):
    """A step of a path: the result of `super()`."""


class Viewed(NamedTuple):
    """A step of a path: an array or memoryview over all bytes of a buffer."""


Step: TypeAlias = Attribute | Item | Made | Named | Super | Viewed


class Path(NamedTuple):
    """A root and the steps from it."""

    root: Root
    steps: tuple[Step, ...] = ()

    @property
    def made(self) -> bool:
        return bool(self.steps) and isinstance(self.steps[-1], Made)

    def then(self, step: Step) -> Path:
        if self.made:
            return self
        return Path(self.root, (*self.steps, step if len(self.steps) < MOST_STEPS else Made()))


class Called(NamedTuple):
    """A call: the possible functions, the positional arguments and the keyword arguments."""

    callees: frozenset[Path]
    arguments: tuple[frozenset[Path], ...]
    named: tuple[tuple[str, frozenset[Path]], ...]


class Paths(NamedTuple):
    """What a function uses, what it changes in place, which items it assigns, and what it calls."""

    used: frozenset[Path]
    changed: frozenset[Path]
    assigned: frozenset[Path]
    calls: tuple[Called, ...]

    @property
    def empty(self) -> bool:
        """The code does nothing: it stands for work that Python does not show."""
        return not (self.used or self.changed or self.assigned or self.calls)


class Value(NamedTuple):
    """A value on the stack: where it comes from, and how it is computed if that is simple."""

    paths: frozenset[Path] = frozenset()
    key: Any = None

    def made(self) -> Value:
        """Return a value created from this one."""
        return Value(frozenset(path.then(Made()) for path in self.paths))


Stack: TypeAlias = list[Value]

MOST_STEPS = 8
"""Maximum number of steps in a path; deeper objects count as part of the last one."""
NOTHING = Value()
NONE: frozenset[Path] = frozenset()
_ARITHMETIC = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "is": operator.is_,
    "is not": operator.is_not,
}
_PLAIN = (int, str, type(None))  # types of values that branches and names may depend on

Decide: TypeAlias = Callable[[Any], bool | None]
"""Whether a condition, given as a key, is true when the function runs; None where that is not known."""


@functools.lru_cache(maxsize=4096)
def paths_of(code: CodeType) -> Paths:
    """The paths of all branches; read from the bytecode once."""
    return _paths(code, lambda key: None)


def paths_when(code: CodeType, decide: Decide) -> Paths:
    """The paths of the branches that may run."""
    return _paths(code, decide) if _branches(code) else paths_of(code)


@functools.lru_cache(maxsize=4096)
def _branches(code: CodeType) -> bool:
    return any("JUMP" in step.opname and "IF" in step.opname for step in dis.get_instructions(code))


def _paths(code: CodeType, decide: Decide) -> Paths:
    reader = _Reader(code, decide)
    try:
        reader.read()
    except Exception:  # bytecode of an unsupported Python version: use every name
        return Paths(frozenset(_everything_named(code)), NONE, NONE, ())
    return Paths(
        frozenset(reader.used), frozenset(reader.changed), frozenset(reader.assigned), tuple(reader.calls)
    )


def evaluate(key: Any, find: Any) -> Any:
    """Return the value of a key; `find` returns that of a path. Raises if it is unknown."""
    if isinstance(key, Constant):
        return key.value
    if isinstance(key, Path):
        return find(key)
    if not isinstance(key, Computed):
        raise LookupError("not a simple key")
    parts = [evaluate(part, find) for part in key.parts]
    if key.name == "slice":
        return _slice_of(parts)
    if key.name == "tuple":
        return tuple(parts)
    if key.name == "string":
        return "".join(format(part) for part in _all_plain(parts))
    if key.name == "range":
        return range(*parts)
    if key.name == "not":
        return not _all_plain(parts)[0]
    if key.name in _COMPARISONS:
        return _COMPARISONS[key.name](*_all_plain(parts))
    return _calculated(key.name, parts)


def _all_plain(parts: list[Any]) -> list[Any]:
    if not all(isinstance(part, _PLAIN) for part in parts):
        raise LookupError("not plain values")
    return parts


def _calculated(name: str, parts: list[Any]) -> Any:
    """Arithmetic of numbers, or of a number and all values that a loop over a range takes."""
    ranges = [i for i, part in enumerate(parts) if type(part) is range]
    if not all(type(part) is range or (type(part) is int and abs(part) < 1 << 64) for part in parts):
        raise LookupError("not a number")
    if not ranges:
        return _ARITHMETIC[name](*parts)
    each, other = parts[ranges[0]], parts[1 - ranges[0]]
    if len(ranges) > 1 or not each or name not in "+-*" or (name == "-" and ranges[0] == 1) or not other:
        raise LookupError("not a range")
    first, last = (_ARITHMETIC[name](end, other) for end in (each[0], each[-1]))
    step = each.step * other if name == "*" else each.step
    return range(first, last + (1 if step > 0 else -1), step)


def _slice_of(parts: list[Any]) -> slice:
    """A slice, or one around all slices that a loop over a range takes."""
    if not any(type(part) is range for part in parts):
        return slice(*parts)
    if len(parts) == 3 and parts[2] not in (None, 1):
        raise LookupError("not a simple slice")
    ends = [min(part[0], part[-1]) if type(part) is range else part for part in parts[:1]]
    ends += [max(part[0], part[-1]) if type(part) is range else part for part in parts[1:2]]
    if not all(end is None or (type(end) is int and end >= 0) for end in ends):
        raise LookupError("not a simple slice")
    return slice(*ends)


def _everything_named(code: CodeType) -> Iterator[Path]:
    for name in code.co_freevars:
        yield Path(Root("free", name))
    for name in code.co_names:
        yield Path(Root("global", name))
    for name in _parameters(code):
        yield Path(Root("parameter", name))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from (path for path in _everything_named(constant) if path.root.kind == "global")


def _parameters(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[: count + bool(code.co_flags & 4) + bool(code.co_flags & 8)]


@dataclass
class _Reader:
    """Reads the instructions once, in order, with a stack of possible origins of each value."""

    code: CodeType
    decide: Decide
    used: set[Path] = field(default_factory=set)
    changed: set[Path] = field(default_factory=set)
    assigned: set[Path] = field(default_factory=set)
    calls: list[Called] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stack: Stack = []
        self._steps = list(dis.get_instructions(self.code))
        self._stores = Counter(name for step in self._steps for name in _stored(step))
        self._stores.update(_parameters(self.code))
        self._stores.update(_stored_inside(self.code))
        self._local: dict[str, Value] = {
            name: self._settled(name, _of(Path(Root("parameter", name)))) for name in _parameters(self.code)
        }
        self._at: dict[int, Stack] = {}  # the stack at the target of a jump
        self._live = {step.argval for step in self._steps if _jumps(step) and step.argval <= step.offset}
        self._live.update(entry.target for entry in dis.Bytecode(self.code).exception_entries)  # type: ignore[attr-defined]
        self._decided = False
        self._names: tuple[str, ...] = ()  # names of keyword arguments of the next call
        self._inner: list[CodeType] = []

    def read(self) -> None:
        reachable = True
        for step in self._steps:
            if step.offset in self._at:
                there = self._at[step.offset]
                self._stack = _merged(self._stack, there) if reachable else list(there)
            elif not reachable and self._decided and step.offset not in self._live:
                continue
            reachable = True
            if _jumps(step):
                reachable = self._jump(step)
            else:
                self._one(step)
            if step.opname in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE") or (
                step.opname.startswith("JUMP_") and "IF" not in step.opname
            ):
                reachable = False
        for inner in self._inner:
            self._read_inner(inner)

    def _read_inner(self, code: CodeType) -> None:
        """Read a nested function as if it were called here."""
        inside = paths_of(code)
        self.used.update(path for each in inside.used for path in self._outside(each))
        self.changed.update(path for each in inside.changed for path in self._outside(each))
        self.assigned.update(path for each in inside.assigned for path in self._outside(each))
        for call in inside.calls:
            self.calls.append(
                Called(
                    self._all_outside(call.callees),
                    tuple(map(self._all_outside, call.arguments)),
                    tuple((name, self._all_outside(paths)) for name, paths in call.named),
                )
            )

    def _all_outside(self, paths: frozenset[Path]) -> frozenset[Path]:
        return frozenset(found for path in paths for found in self._outside(path))

    def _outside(self, path: Path) -> Iterator[Path]:
        """Translate a path of a nested function."""
        kind, name = path.root
        if kind == "global" or (kind == "free" and name in self.code.co_freevars):
            yield path
        elif kind == "free":
            for found in self._local.get(name, NOTHING).paths:
                for step in path.steps:
                    found = found.then(step)
                yield found

    # ---- instructions

    def _jump(self, step: dis.Instruction) -> bool:
        """Returns whether what follows may run as well."""
        name = step.opname
        if name == "FOR_ITER":
            self._at.setdefault(step.argval, list(self._stack))
            top = self._top()
            self._push(Value(top.made().paths, top.key if _is_range(top.key) else None))
            return True
        if "IF" in name and name.startswith("POP_JUMP"):
            condition = self._pop()
            self._use(condition)
            taken = self._is_taken(name, condition)
            if taken is not None:
                self._decided = True
            if taken is not False:
                self._at.setdefault(step.argval, list(self._stack))
            return taken is not True
        if name == "SEND":
            self._use(self._pop())
            self._push(NOTHING)
        self._at.setdefault(step.argval, list(self._stack))
        if name.endswith("_OR_POP"):
            self._use(self._pop())
        return True

    def _is_taken(self, jump: str, condition: Value) -> bool | None:
        if condition.key is None:
            return None
        if jump.endswith("_NONE"):
            found = self.decide(Computed("is", (condition.key, Constant(None))))
            return found if found is None else found != jump.endswith("NOT_NONE")
        found = self.decide(condition.key)
        return found if found is None else found == jump.endswith("_TRUE")

    def _one(self, step: dis.Instruction) -> None:
        handler = getattr(self, f"_do_{step.opname.lower()}", None)
        if handler is not None:
            handler(step)
        elif step.opname.startswith(("LOAD_FAST", "STORE_FAST")):
            self._fast(step)
        elif step.opname.startswith("BUILD_"):
            self._build(step)
        else:
            self._other(step)

    def _other(self, step: dis.Instruction) -> None:
        """Handle other instructions by the number of values they leave."""
        argument = step.arg if step.opcode >= dis.HAVE_ARGUMENT else None
        effect = dis.stack_effect(step.opcode, argument, jump=False)
        if effect > 0:
            self._stack += [NOTHING] * effect
        elif effect < 0:
            for _ in range(-effect):
                self._use(self._pop())
        elif step.opname in _REPLACES_TOP:
            value = self._pop()
            self._use(value)
            self._push(value.made())

    def _fast(self, step: dis.Instruction) -> None:
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        actions = ["STORE" if part.startswith("STORE") else "LOAD" for part in _fast_parts(step.opname)]
        for action, name in zip(actions * (len(names) // len(actions) or 1), names, strict=False):
            if action == "STORE":
                self._store(name)
            else:
                self._push(self._local.get(name, NOTHING))

    def _store(self, name: str) -> None:
        value, known = self._settled(name, self._pop()), self._local.get(name)
        if known is None:
            self._local[name] = value
        elif known != value:
            self._local[name] = Value(known.paths | value.paths)

    def _settled(self, name: str, value: Value) -> Value:
        """What a variable holds: how it is computed only counts if the variable never changes."""
        return value if self._stores[name] == 1 else Value(value.paths)

    def _do_store_deref(self, step: dis.Instruction) -> None:
        self._store(step.argval)

    def _do_store_global(self, step: dis.Instruction) -> None:
        self._use(self._pop())

    _do_store_name = _do_store_global

    def _do_store_attr(self, step: dis.Instruction) -> None:
        self._pop()
        self._use(self._pop())

    def _do_load_deref(self, step: dis.Instruction) -> None:
        name = step.argval
        if name in self.code.co_freevars:
            found = _of(Path(Root("free", name)))
            self._push(Value(found.paths) if self._stores[name] else found)
        else:
            self._push(self._local.get(name, NOTHING))

    _do_load_classderef = _do_load_deref

    def _do_load_global(self, step: dis.Instruction) -> None:
        if dis.stack_effect(step.opcode, step.arg) > 1:
            self._push(NOTHING)
        self._push(_of(Path(Root("global", step.argval))))

    def _do_load_name(self, step: dis.Instruction) -> None:
        self._push(_of(Path(Root("global", step.argval))))

    def _do_load_const(self, step: dis.Instruction) -> None:
        if isinstance(step.argval, CodeType):
            self._inner.append(step.argval)
        self._push(Value(NONE, Constant(step.argval)))

    _do_load_small_int = _do_load_const

    def _do_load_attr(self, step: dis.Instruction) -> None:
        base = self._pop()
        if dis.stack_effect(step.opcode, step.arg) > 0:
            self._push(NOTHING)
        found = frozenset(path.then(Attribute(step.argval)) for path in base.paths)
        self._push(Value(found, next(iter(found)) if len(found) == 1 and base.key is not None else None))

    def _do_load_super_attr(self, step: dis.Instruction) -> None:
        owner, _, _ = self._pop(), self._pop(), self._pop()
        if dis.stack_effect(step.opcode, step.arg) > -2:
            self._push(NOTHING)
        self._push(Value(frozenset(path.then(Super()).then(Attribute(step.argval)) for path in owner.paths)))

    def _do_load_method(self, step: dis.Instruction) -> None:
        base = self._pop()
        self._push(NOTHING)
        self._push(Value(frozenset(path.then(Attribute(step.argval)) for path in base.paths)))

    def _do_push_null(self, step: dis.Instruction) -> None:
        self._push(NOTHING)

    def _do_pop_top(self, step: dis.Instruction) -> None:
        self.used |= {path for path in self._pop().paths if not path.made}  # else it was used when created

    def _do_copy(self, step: dis.Instruction) -> None:
        count = step.arg or 1
        self._push(self._stack[-count] if count <= len(self._stack) else NOTHING)

    def _do_swap(self, step: dis.Instruction) -> None:
        count = step.arg or 1
        self._stack[:0] = [NOTHING] * (count - len(self._stack))
        self._stack[-1], self._stack[-count] = self._stack[-count], self._stack[-1]

    def _do_is_op(self, step: dis.Instruction) -> None:
        self._push(Value(NONE, _computed("is not" if step.arg else "is", self._pops(2))))

    def _do_compare_op(self, step: dis.Instruction) -> None:
        sides = self._pops(2)
        for side in sides:
            self._use(side)
        known = step.argval in _COMPARISONS
        self._push(Value(NONE, _computed(step.argval, sides) if known else None))

    def _do_unary_not(self, step: dis.Instruction) -> None:
        value = self._pop()
        self._use(value)
        self._push(Value(NONE, _computed("not", [value])))

    def _do_to_bool(self, step: dis.Instruction) -> None:
        self._use(self._top())

    def _do_format_value(self, step: dis.Instruction) -> None:
        if (step.arg or 0) & 4:
            self._use(self._pop())
        value = self._pop()
        self._use(value)
        self._push(Value(NONE, _computed("string", [value]) if not step.arg else None))

    def _do_format_simple(self, step: dis.Instruction) -> None:
        value = self._pop()
        self._use(value)
        self._push(Value(NONE, _computed("string", [value])))

    def _do_nop(self, step: dis.Instruction) -> None:
        pass

    _do_resume = _do_precall = _do_cache = _do_nop

    _do_return_value = _do_pop_top

    def _do_make_function(self, step: dis.Instruction) -> None:
        self._pop()  # the code
        flags = step.arg or 0
        for flag in (1, 2, 4, 8):
            if flags & flag:
                self._use(self._pop())
        self._push(NOTHING)

    def _do_set_function_attribute(self, step: dis.Instruction) -> None:
        function = self._pop()
        self._use(self._pop())
        self._push(function)

    # ---- items

    def _do_binary_subscr(self, step: dis.Instruction) -> None:
        key, base = self._pop(), self._pop()
        self._push(self._item(base, key))

    def _do_binary_slice(self, step: dis.Instruction) -> None:
        key = self._slice(2)
        self._push(self._item(self._pop(), key))

    def _do_store_subscr(self, step: dis.Instruction) -> None:
        key, base = self._pop(), self._pop()
        self._assign(base, key)

    def _do_store_slice(self, step: dis.Instruction) -> None:
        key = self._slice(2)
        self._assign(self._pop(), key)

    def _do_delete_subscr(self, step: dis.Instruction) -> None:
        self._pop()
        self._pop()

    def _do_build_slice(self, step: dis.Instruction) -> None:
        self._push(self._slice(step.arg or 2))

    def _slice(self, count: int) -> Value:
        parts = self._pops(count)
        return Value(NONE, _computed("slice", parts))

    def _assign(self, base: Value, key: Value) -> None:
        self._use(key)
        self._use(self._pop())
        self.assigned |= {path.then(Item(key.key)) for path in base.paths}

    def _item(self, base: Value, key: Value) -> Value:
        if key.key is None:
            self._use(key)
            self._use(base)
            return base.made()
        found = frozenset(path.then(Item(key.key)) for path in base.paths)
        return Value(found, next(iter(found)) if len(found) == 1 and base.key is not None else None)

    def _build(self, step: dis.Instruction) -> None:
        count = step.arg or 0
        if step.opname in ("BUILD_MAP",):
            count *= 2
        elif step.opname == "BUILD_CONST_KEY_MAP":
            count += 1
        parts = self._pops(count)
        kind = {"BUILD_TUPLE": "tuple", "BUILD_STRING": "string"}.get(step.opname)
        key = _computed(kind, parts) if kind else None
        self._push(Value(frozenset().union(*(part.paths for part in parts)), key))

    def _do_binary_op(self, step: dis.Instruction) -> None:
        right, left = self._pop(), self._pop()
        operator = step.argrepr
        if operator == "[]":
            self._push(self._item(left, right))
        elif operator.endswith("="):
            self._use(right)
            self.changed |= left.paths
            self._push(Value(left.paths))
        else:
            self._use(left)
            self._use(right)
            simple = operator in _ARITHMETIC
            self._push(Value(NONE, _computed(operator, [left, right]) if simple else None))

    def _do_get_iter(self, step: dis.Instruction) -> None:
        value = self._pop()
        self._use(value)
        self._push(Value(value.made().paths, value.key if _is_range(value.key) else None))

    def _do_unpack_sequence(self, step: dis.Instruction) -> None:
        value = self._pop()
        self._stack += [value.made()] * (step.arg or 0)

    # ---- calls

    def _do_kw_names(self, step: dis.Instruction) -> None:
        names = step.argval
        self._names = names if isinstance(names, tuple) else self.code.co_consts[step.arg or 0]

    def _do_call(self, step: dis.Instruction) -> None:
        names, self._names = self._names, ()
        self._call(step.arg or 0, names)

    def _do_call_kw(self, step: dis.Instruction) -> None:
        names = self._pop().key
        self._call(step.arg or 0, names.value if isinstance(names, Constant) else ())

    def _call(self, count: int, names: tuple[str, ...]) -> None:
        arguments = self._pops(count)
        callees = self._pop().paths | self._pop().paths
        if callees == _SUPER and not count:
            self._push(self._super())
            return
        self._called(
            callees,
            arguments[: count - len(names)],
            dict(zip(names, arguments[count - len(names) :], strict=True)),
        )

    def _do_call_function_ex(self, step: dis.Instruction) -> None:
        rest = [self._pop()] if (step.arg or 0) & 1 else []
        rest.append(self._pop())
        callees = self._pop().paths | (self._pop().paths if self._stack else NONE)
        self._called(callees, rest, {})

    def _super(self) -> Value:
        """Handle `super()` without arguments, which uses the first parameter."""
        first = self._local.get(self.code.co_varnames[0], NOTHING) if self.code.co_argcount else NOTHING
        return Value(frozenset(path.then(Super()) for path in first.paths))

    def _called(self, callees: frozenset[Path], arguments: list[Value], named: dict[str, Value]) -> None:
        if callees == _GETATTR and len(arguments) == 2 and arguments[1].key is not None:
            self._push(Value(frozenset(path.then(Named(arguments[1].key)) for path in arguments[0].paths)))
            return
        self.calls.append(
            Called(
                callees,
                tuple(each.paths for each in arguments),
                tuple((name, value.paths) for name, value in named.items()),
            )
        )
        views = len(arguments) == 1 and not named and any(_name(callee) in _VIEWS for callee in callees)
        for value in (*arguments, *named.values()) if not (views or callees <= _LOOKS) else ():
            self._use(value)
        if views:
            self._push(Value(frozenset(path.then(Viewed()) for path in arguments[0].paths)))
            return
        if callees == _RANGE and not named:
            self._push(Value(NONE, _computed("range", arguments)))
            return
        methods = frozenset(each for each in callees if each.steps and isinstance(each.steps[-1], Attribute))
        self._push(Value(methods.union(*(value.paths for value in (*arguments, *named.values())))).made())

    # ---- the stack

    def _push(self, value: Value) -> None:
        self._stack.append(value)

    def _pop(self) -> Value:
        return self._stack.pop() if self._stack else NOTHING

    def _pops(self, count: int) -> list[Value]:
        return [self._pop() for _ in range(count)][::-1]

    def _top(self) -> Value:
        return self._stack[-1] if self._stack else NOTHING

    def _use(self, value: Value) -> None:
        self.used |= value.paths


_REPLACES_TOP = {"UNARY_NEGATIVE", "UNARY_INVERT", "GET_AWAITABLE", "YIELD_VALUE", "LIST_TO_TUPLE"}


_VIEWS = ("asarray", "memoryview")
_SUPER = frozenset({Path(Root("global", "super"))})
_GETATTR = frozenset({Path(Root("global", "getattr"))})
_RANGE = frozenset({Path(Root("global", "range"))})
_LOOKS = frozenset(  # functions that do not read the contents of their arguments
    Path(Root("global", name)) for name in ("len", "id", "type", "isinstance", "hasattr", "callable", "super")
)


def _name(callee: Path) -> str:
    last = callee.steps[-1] if callee.steps else callee.root
    return last.name if isinstance(last, (Attribute, Root)) else ""


def _merged(one: Stack, other: Stack) -> Stack:
    """Return the possible stack where two branches meet."""
    if len(one) != len(other):
        return one if len(one) > len(other) else list(other)
    return [a if a == b else Value(a.paths | b.paths) for a, b in zip(one, other, strict=True)]


def _of(path: Path) -> Value:
    return Value(frozenset({path}), path)


def _is_range(key: Any) -> bool:
    return isinstance(key, Computed) and key.name == "range"


def _jumps(step: dis.Instruction) -> bool:
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def _stored(step: dis.Instruction) -> Iterator[str]:
    """The variables that an instruction assigns."""
    if step.opname == "STORE_DEREF":
        yield step.argval
    elif "STORE_FAST" in step.opname:
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        parts = _fast_parts(step.opname)
        parts *= len(names) // len(parts) or 1
        yield from (name for part, name in zip(parts, names, strict=False) if part.startswith("STORE"))


def _stored_inside(code: CodeType) -> Iterator[str]:
    """The variables that functions made in this one assign."""
    for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        for step in dis.get_instructions(inner):
            yield from (name for name in _stored(step) if name in inner.co_freevars)
        yield from _stored_inside(inner)


def _computed(name: str, parts: list[Value]) -> Computed | None:
    keys = tuple(part.key for part in parts)
    return None if any(key is None for key in keys) else Computed(name, keys)


def _fast_parts(name: str) -> list[str]:
    """Split a combined instruction: LOAD_FAST_LOAD_FAST, STORE_FAST_LOAD_FAST."""
    return [
        part
        for part in name.replace("_STORE_FAST", " STORE_FAST").replace("_LOAD_FAST", " LOAD_FAST").split()
    ]
