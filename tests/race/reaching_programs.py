"""What does a launched function reach? Memory hidden in objects, functions and pointers of all kinds."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import array
import collections
import ctypes
import functools
import itertools
import operator
import types
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from racing import HALF, UNIT, Bench, correct, kernel, racy

from vram.race.checker import reads

# ---- containers -------------------------------------------------------------------------------------------


def both(bench: Bench, first: Any, second: Any) -> None:
    """The same memory on two streams that nothing orders."""
    bench.a.launch(kernel, first)
    bench.b.launch(kernel, second)


@racy("unordered")
def dict_value(e: Bench):
    x = e.take()
    both(e, x, {"x": x})


@racy("unordered")
def dict_key(e: Bench):
    x = e.take()
    both(e, x, {x.ptr: "weights"})


@racy("unordered")
def nested_list(e: Bench):
    x = e.take()
    both(e, x, [[[1, [x]]]])


@racy("unordered")
def list_in_dict_in_tuple(e: Bench):
    x = e.take()
    both(e, x, ({"layers": [None, x.ptr]},))


@racy("unordered")
def set_of_pointers(e: Bench):
    x = e.take()
    both(e, x, {x.ptr, 17})


@racy("unordered")
def deque_of_buffers(e: Bench):
    x = e.take()
    both(e, x, collections.deque([x]))


@racy("unordered")
def default_dict(e: Bench):
    x = e.take()
    found = collections.defaultdict(list)
    found["a"].append(x)
    both(e, x, found)


@racy("unordered")
def chain_map(e: Bench):
    x = e.take()
    both(e, x, collections.ChainMap({}, {"x": x}))


@racy("unordered")
def mapping_proxy(e: Bench):
    x = e.take()
    both(e, x, types.MappingProxyType({"x": x}))


@racy("unordered")
def values_of_a_dict(e: Bench):
    x = e.take()
    both(e, x, {"x": x}.values())


@racy("unordered")
def cycle_of_lists(e: Bench):
    x = e.take()
    ring: list[Any] = []
    ring += [ring, [ring, x]]
    both(e, x, ring)


@racy("unordered")
def very_deep_list(e: Bench):
    x = e.take()
    nest: Any = x
    for _ in range(3000):
        nest = [nest]
    both(e, x, nest)


@racy("unordered")
def among_thousands(e: Bench):
    x = e.take()
    both(e, x, [*range(3000), x])


@correct()
def containers_without_memory(e: Bench):
    x = e.take()
    both(e, x, {"n": [1, 2.0, "three", b"four", None, {5: (6,)}], "size": UNIT})


@correct()
def two_buffers_in_two_containers(e: Bench):
    x, y = e.take(), e.take()
    both(e, {"x": x}, [y])


@correct()
def both_read_from_a_container(e: Bench):
    x = e.take()
    e.a.launch(kernel, reads({"x": [x]}))
    e.b.launch(kernel, reads([x]))


# ---- objects ----------------------------------------------------------------------------------------------


@dataclass
class Layer:
    weight: Any
    bias: Any = None


class Slotted:
    __slots__ = ("memory",)

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class Pair(NamedTuple):
    left: Any
    right: Any


class Model:
    def __init__(self, **memory: Any) -> None:
        self.__dict__.update(memory)

    def step(self) -> None:
        kernel(self.front)

    def other_step(self) -> None:
        kernel(self.back)

    def write_front(self) -> None:
        self.front[:] = 1

    def deep_step(self) -> None:
        self.step()

    @property
    def shown(self) -> Any:
        return self.front

    def show(self) -> None:
        kernel(self.shown)

    def __call__(self) -> None:
        kernel(self.front)

    @classmethod
    def of_class(cls) -> None:
        kernel(cls.shared)  # type: ignore[attr-defined]

    @staticmethod
    def static(memory: Any) -> None:
        kernel(memory)


@racy("unordered")
def attribute(e: Bench):
    x = e.take()
    both(e, x, types.SimpleNamespace(x=x))


@racy("unordered")
def attribute_of_an_attribute(e: Bench):
    x = e.take()
    both(e, x, types.SimpleNamespace(inner=types.SimpleNamespace(pointer=x.ptr)))


@racy("unordered")
def dataclass_field(e: Bench):
    x = e.take()
    both(e, x, Layer(None, x))


@racy("unordered")
def slot(e: Bench):
    x = e.take()
    both(e, x, Slotted(x))


@racy("unordered")
def named_tuple(e: Bench):
    x = e.take()
    both(e, x, Pair(1, x))


@racy("unordered")
def bound_method(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(Model(front=x).step)


@racy("unordered")
def bound_method_of_a_nested_object(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(Model(front=Layer(x)).step)


@racy("unordered")
def method_that_calls_a_method(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(Model(front=x).deep_step)


@racy("unordered")
def method_that_asks_a_property(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(Model(front=x).show)


@racy("unordered")
def callable_object(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(Model(front=x))


@racy("unordered")
def class_method(e: Bench):
    x = e.take()

    class Holder(Model):
        shared = x

    e.a.launch(kernel, x)
    e.b.launch(Holder.of_class)


@racy("unordered", on="host")
def two_methods_that_write(e: Bench):
    model = Model(front=np.asarray(e.take()))
    e.a.launch(model.write_front)
    e.b.launch(model.write_front)


@correct()
def methods_that_use_different_attributes(e: Bench):
    model = Model(front=e.take(), back=e.take())
    e.a.launch(kernel, model.back)
    e.b.launch(model.step)


@correct()
def two_methods_that_read(e: Bench):
    model = Model(front=e.take())
    e.a.launch(model.step)
    e.b.launch(model.step)


@racy("unordered")
def weak_reference(e: Bench):
    x = e.take()
    both(e, x, weakref.ref(x))


@racy("unordered")
def generator_that_holds_memory(e: Bench):
    x = e.take()

    def walk(memory):
        yield memory
        yield memory

    steps = walk(x)
    next(steps)
    e.a.launch(kernel, x)
    e.b.launch(next, steps)


@racy("unordered")
def iterator_over_memory(e: Bench):
    x = e.take()
    both(e, x, iter([x]))


@racy("unordered")
def item_getter_applied_to_memory(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(functools.partial(operator.itemgetter("x"), {"x": x}))


# ---- functions --------------------------------------------------------------------------------------------


@racy("unordered")
def closure(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(lambda: kernel(x))


@racy("unordered")
def dict_in_a_closure(e: Bench):
    state = {"x": e.take()}
    e.a.launch(kernel, state["x"])
    e.b.launch(lambda: kernel(state))


@racy("unordered")
def item_of_a_dict_in_a_closure(e: Bench):
    state = {"x": e.take(), "y": e.take()}
    e.a.launch(kernel, state["x"])
    e.b.launch(lambda: kernel(state["x"]))


@correct()
def another_item_of_a_dict_in_a_closure(e: Bench):
    state = {"x": e.take(), "y": e.take()}
    e.a.launch(kernel, state["x"])
    e.b.launch(lambda: kernel(state["y"]))


@racy("unordered")
def item_chosen_at_run_time(e: Bench):
    state, name = {"x": e.take(), "y": e.take()}, "x"
    e.a.launch(kernel, state["x"])
    e.b.launch(lambda: kernel(state[name]))


@racy("unordered")
def closure_in_a_closure(e: Bench):
    x = e.take()

    def inner():
        kernel(x)

    def outer():
        inner()

    e.a.launch(kernel, x)
    e.b.launch(outer)


@racy("unordered")
def function_made_inside(e: Bench):
    x = e.take()

    def outer():
        def inner():
            kernel(x)

        inner()

    e.a.launch(kernel, x)
    e.b.launch(outer)


@racy("unordered")
def comprehension_over_a_closure(e: Bench):
    layers = [e.take(), e.take()]
    e.a.launch(kernel, layers[1])
    e.b.launch(lambda: [kernel(each) for each in layers])


@racy("unordered")
def list_of_functions(e: Bench):
    x = e.take()
    both(e, x, [lambda: kernel(x)])


@racy("unordered")
def default_argument(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(lambda memory=[x]: kernel(memory))


@racy("unordered")
def keyword_default(e: Bench):
    x = e.take()

    def run(*, memory=x):
        kernel(memory)

    e.a.launch(kernel, x)
    e.b.launch(run)


@correct()
def default_argument_that_is_overridden(e: Bench):
    x, y = e.take(), e.take()
    e.a.launch(kernel, x)
    e.b.launch(lambda memory=x: kernel(memory), y)


@racy("unordered")
def partial_of_a_partial(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(functools.partial(functools.partial(kernel, 1), memory={"x": x}))


@racy("unordered")
def partial_method(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(functools.partial(Model.step, Model(front=x)))


@racy("unordered")
def decorated_function(e: Bench):
    x = e.take()

    def twice(function):
        @functools.wraps(function)
        def run():
            function()
            function()

        return run

    e.a.launch(kernel, x)
    e.b.launch(twice(lambda: kernel(x)))


WEIGHTS: dict[str, Any] = {}
HOLDER = types.SimpleNamespace(memory=None)


def use_global():
    kernel(WEIGHTS["w"])


def use_global_attribute():
    kernel(HOLDER.memory)


def call_what_uses_a_global():
    use_global()


@racy("unordered")
def global_dict(e: Bench):
    WEIGHTS["w"] = x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(use_global)
    e.device.synchronize()
    WEIGHTS.clear()


@racy("unordered")
def global_of_a_called_function(e: Bench):
    WEIGHTS["w"] = x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(call_what_uses_a_global)
    e.device.synchronize()
    WEIGHTS.clear()


@racy("unordered")
def attribute_of_a_global(e: Bench):
    HOLDER.memory = x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(use_global_attribute)
    e.device.synchronize()
    HOLDER.memory = None


@correct()
def global_that_is_not_named(e: Bench):
    WEIGHTS["w"] = x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(use_global_attribute)
    e.device.synchronize()
    WEIGHTS.clear()


@correct()
def two_closures_that_read(e: Bench):
    x = e.take()
    e.a.launch(lambda: kernel(x))
    e.b.launch(lambda: kernel(x))


@correct(on="host")
def two_closures_that_sum(e: Bench):
    x, sums = np.asarray(e.take()), [0, 0]

    def add(i):
        sums[i] = int(x.sum())

    e.a.launch(add, 0)
    e.b.launch(add, 1)


@racy("unordered", on="host")
def two_closures_that_store(e: Bench):
    x = np.asarray(e.take())

    def store():
        x[:] = 1

    e.a.launch(store)
    e.b.launch(store)


@racy("unordered", on="host")
def two_closures_that_add_in_place(e: Bench):
    x = np.asarray(e.take())

    def add():
        y = x
        y += 1

    e.a.launch(add)
    e.b.launch(add)


@racy("unordered", on="host")
def one_closure_stores_and_one_reads(e: Bench):
    x = np.asarray(e.take())

    def store():
        view = x.reshape(2, -1)
        view[0] = 1

    e.a.launch(store)
    e.b.launch(lambda: x.sum())


@racy("unordered", on="host")
def closures_that_store_by_a_helper(e: Bench):
    x = np.asarray(e.take())

    def helper(memory):
        memory[0] = 1

    e.a.launch(lambda: helper(x))
    e.b.launch(lambda: helper(x))


@racy("unordered", on="host")
def closures_that_store_by_a_function_of_numpy(e: Bench):
    x = np.asarray(e.take())
    e.a.launch(lambda: np.copyto(x, 1))
    e.b.launch(lambda: np.add(1, 1, out=x, casting="unsafe"))


@racy("unordered", on="host")
def method_of_an_array(e: Bench):
    x = np.asarray(e.take())
    e.a.launch(x.fill, 1)
    e.b.launch(x.sum)


@correct(on="host")
def methods_of_an_array_that_read(e: Bench):
    x = np.asarray(e.take())
    e.a.launch(x.sum)
    e.b.launch(x.max)


# ---- pointers and arrays ----------------------------------------------------------------------------------


class Pointer(IntEnum):
    NOWHERE = 1


@racy("unordered")
def numpy_pointer(e: Bench):
    x = e.take()
    both(e, x, np.uint64(x.ptr))


@racy("unordered")
def interior_pointer(e: Bench):
    x = e.take()
    both(e, x, x.ptr + HALF + 3)


@racy("unordered")
def void_pointer(e: Bench):
    x = e.take()
    both(e, x, ctypes.c_void_p(x.ptr))


@racy("unordered")
def ctypes_integer(e: Bench):
    x = e.take()
    both(e, x, ctypes.c_uint64(x.ptr))


@racy("unordered")
def typed_pointer(e: Bench):
    x = e.take()
    both(e, x, ctypes.cast(x.ptr, ctypes.POINTER(ctypes.c_float)))


@racy("unordered")
def ctypes_array_over_the_memory(e: Bench):
    x = e.take()
    both(e, x, (ctypes.c_ubyte * 16).from_address(x.ptr + 64))


class Descriptor(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int), ("data", ctypes.c_void_p))


@racy("unordered")
def pointer_in_a_structure(e: Bench):
    x = e.take()
    both(e, x, Descriptor(3, x.ptr))


@racy("unordered")
def ctypes_array_of_pointers(e: Bench):
    x = e.take()
    both(e, x, (ctypes.c_void_p * 2)(None, x.ptr))


@racy("unordered")
def pointer_to_a_structure(e: Bench):
    x = e.take()
    both(e, x, ctypes.pointer(Descriptor(3, x.ptr)))


@racy("unordered")
def numpy_table_of_pointers(e: Bench):
    x = e.take()
    both(e, x, np.array([0, x.ptr], np.uint64))


@racy("unordered")
def array_of_pointers(e: Bench):
    x = e.take()
    both(e, x, array.array("Q", [0, x.ptr]))


@racy("unordered")
def object_array(e: Bench):
    x = e.take()
    both(e, x, np.array([None, x], object))


class Exporter:
    def __init__(self, memory: Any) -> None:
        self.where = str(memory.ptr)  # nothing that a walk over the object could find
        self.size = memory.size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (int(self.where), False), "version": 3}


class ReadOnlyExporter(Exporter):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (int(self.where), True), "version": 3}


class Address:
    def __init__(self, memory: Any) -> None:
        self.where = str(memory.ptr)

    def __index__(self) -> int:
        return int(self.where)


@racy("unordered")
def cuda_array_interface(e: Bench):
    x = e.take()
    both(e, x, Exporter(x))


@correct()
def cuda_array_interfaces_that_only_read(e: Bench):
    x = e.take()
    both(e, ReadOnlyExporter(x), ReadOnlyExporter(x))


@racy("unordered")
def object_that_counts_as_an_integer(e: Bench):
    x = e.take()
    both(e, x, Address(x))


@racy("unordered", on="host")
def dlpack_capsule(e: Bench):
    x = e.take()
    both(e, x, x.__dlpack__())


@racy("unordered", on="host")
def dlpack_holder(e: Bench):
    x = e.take()

    class Holder:
        __slots__ = ()

        def __dlpack__(self, **request: Any) -> Any:
            return x.__dlpack__(**request)

        def __dlpack_device__(self) -> tuple[int, int]:
            return x.__dlpack_device__()

    both(e, x, Holder())


@racy("unordered", on="host")
def memory_view(e: Bench):
    x = e.take()
    both(e, x, memoryview(x))


@racy("unordered", on="host")
def numpy_array(e: Bench):
    x = e.take()
    both(e, x, np.asarray(x).view(np.float32))


@racy("unordered", on="host")
def numpy_array_from_a_pointer(e: Bench):
    x = e.take()
    raw = np.frombuffer((ctypes.c_ubyte * UNIT).from_address(x.ptr), np.uint8)
    both(e, x, raw)


@correct()
def numbers_that_are_no_addresses(e: Bench):
    x = e.take()
    both(e, x, [0, -1, 1 << 70, True, Pointer.NOWHERE, x.ptr - 1, x.ptr + UNIT, np.int32(5), ctypes.c_int(9)])


@correct()
def growable_of_another_stream_in_a_list(e: Bench):
    x, g = e.take(), e.growable()
    both(e, x, [g])


@racy("unordered")
def growable_in_a_list(e: Bench):
    g = e.growable()
    g.view(100, 10).fill(1)
    e.b.launch(kernel, [g])


@racy("unordered")
def map_object(e: Bench):
    x = e.take()
    e.a.launch(kernel, x)
    e.b.launch(list, map(kernel, itertools.chain([x])))
