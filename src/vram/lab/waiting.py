"""What the host and other streams wait for when memory is allocated and freed, and what a capture refuses."""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from collections.abc import Callable
from ctypes import addressof, c_char
from dataclasses import dataclass
from typing import Any

from vram.core.pool import Pool
from vram.core.stream import Stream
from vram.errors import VramError

from .experiment import MIB, Bench, Judgement, Observation, Quantity, Table, clock_ms, experiment, listed

PAGE = 2 * MIB


# ---- cudaMalloc and cudaFree ------------------------------------------------------------------------------


def _judge_synchronous(seen: Observation) -> Judgement:
    usable, back = seen["usable_at_return"] == 1, seen["given_back_at_return"] == 1
    waits = seen["free_ms"] > seen["kernel_ms"] / 2
    free = f"free {'waits' if waits else 'does not wait'} for the kernel ({seen['free_ms']:.2f} ms)"
    malloc = f"During a {seen['kernel_ms']:.0f} ms kernel, malloc returns after {seen['malloc_ms']:.2f} ms"
    if usable and back:
        return "holds", f"{malloc} with usable memory; {free}, and the memory is released on return."
    if not usable and not back:
        return "does not hold", f"{malloc}, but neither call has taken effect on return."
    return "depends", f"{malloc}; {free}; only {'malloc' if usable else 'free'} has taken effect on return."


@experiment(
    "malloc-synchronous",
    "cudaMalloc and cudaFree take effect immediately on the host, outside the order of any stream.",
    judge=_judge_synchronous,
)
def malloc_synchronous(bench: Bench) -> Observation:
    """Memory from cudaMalloc needs no ordering before use, but a call that waits stalls the host."""
    size = 64 * MIB
    with bench.streams(2) as (busy, other):
        bench.backend.release(bench.backend.reserve(size), size)
        bench.busy(busy)
        start = clock_ms()
        address = bench.backend.reserve(size)
        malloc_ms = clock_ms() - start
        bench.kernels.fill(address, 4 << 10, seed=1, stream=other)
        wrong = bench.kernels.check(address, 4 << 10, seed=1, stream=other).count()
        usable = wrong == 0 and not busy.query()
        busy.synchronize()
        free_before = bench.device.free_memory
        bench.busy(busy)
        free_ms = bench.timed(lambda: bench.backend.release(address, size))
        given_back = bench.device.free_memory - free_before
    return Observation(
        {
            "kernel_ms": Quantity(bench.busy_ms, "ms"),
            "malloc_ms": Quantity(malloc_ms, "ms"),
            "usable_at_return": Quantity(usable, "yes or no"),
            "free_ms": Quantity(free_ms, "ms"),
            "given_back_at_return": Quantity(given_back >= size // 2, "yes or no"),
        }
    )


# ---- who waits --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call to time, its preparation, and how to undo its effect."""

    name: str
    act: Callable[[Any], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[Any, Any], object] = lambda prepared, made: None

    def cost(self, bench: Bench, busy: Stream | None) -> float:
        """Return the milliseconds of the call, while a kernel runs on `busy` or alone."""
        prepared = self.before()
        if busy is not None:
            bench.busy(busy)
        start = clock_ms()
        made = self.act(prepared)
        spent = clock_ms() - start
        bench.device.synchronize()
        self.after(prepared, made)
        return spent


class _Page:
    """One page from creation to use and back: create, map, set_access, unmap, release."""

    def __init__(self, bench: Bench, *steps: str) -> None:
        self._backend = bench.backend
        self._space = self._backend.space_reserve(PAGE)
        self._page = 0
        self._mapped = False
        for step in steps:
            self.do(step)

    def do(self, step: str) -> None:
        getattr(self, step)()

    def create(self) -> None:
        self._page = self._backend.page_create(PAGE)

    def map(self) -> None:
        self._backend.map(self._space, PAGE, self._page)
        self._mapped = True

    def set_access(self) -> None:
        self._backend.set_access(self._space, PAGE)

    def unmap(self) -> None:
        self._backend.unmap(self._space, PAGE)
        self._mapped = False

    def release(self) -> None:
        self._backend.page_release(self._page, PAGE)
        self._page = 0

    def undo(self) -> None:
        """Undo the remaining steps."""
        if self._mapped:
            self.unmap()
        if self._page:
            self.release()
        self._backend.space_release(self._space, PAGE)


PAGE_STEPS = {
    "create": ("cuMemCreate", ()),
    "map": ("cuMemMap", ("create",)),
    "set_access": ("cuMemSetAccess", ("create", "map")),
    "unmap": ("cuMemUnmap", ("create", "map", "set_access")),
    "release": ("cuMemRelease", ("create",)),
}
"""Each step with the driver's name for it, and the steps before it."""


def _page_calls(bench: Bench) -> list[_Call]:
    def call(step: str, name: str, before: tuple[str, ...]) -> _Call:
        return _Call(
            name if bench.on_gpu else f"page {step}",
            lambda page: page.do(step),
            lambda: _Page(bench, *before),
            lambda page, _made: page.undo(),
        )

    return (
        [call(step, name, before) for step, (name, before) in PAGE_STEPS.items()]
        if bench.device.pages
        else []
    )


def _plain_calls(bench: Bench, size: int) -> list[_Call]:
    backend, names = bench.backend, ("cudaMalloc", "cudaFree") if bench.on_gpu else ("reserve", "release")
    return [
        _Call(
            names[0], lambda _: backend.reserve(size), after=lambda _, address: backend.release(address, size)
        ),
        _Call(names[1], lambda address: backend.release(address, size), lambda: backend.reserve(size)),
    ]


def _driver_calls(bench: Bench, size: int, stream: Stream) -> list[_Call]:
    driver, handle = bench.driver, stream.handle
    return [
        _Call(
            "cudaMallocAsync",
            lambda _: driver.malloc_async(size, handle),
            after=lambda _, address: driver.free_async(address, handle),
        ),
        _Call(
            "cudaFreeAsync",
            lambda address: driver.free_async(address, handle),
            lambda: driver.malloc_async(size, handle),
        ),
        _Call(
            "cudaHostAlloc",
            lambda _: driver.pinned_alloc(size),
            after=lambda _, address: driver.pinned_free(address),
        ),
        _Call("cudaFreeHost", driver.pinned_free, lambda: driver.pinned_alloc(size)),
    ]


def _register_calls(bench: Bench, memory: mmap.mmap) -> list[_Call]:
    driver, address, size = bench.driver, addressof(c_char.from_buffer(memory)), len(memory)

    def registered() -> int:
        driver.register(address, size)
        return address

    return [
        _Call(
            "cudaHostRegister",
            lambda _: driver.register(address, size),
            after=lambda _prepared, _made: driver.unregister(address),
        ),
        _Call("cudaHostUnregister", driver.unregister, registered),
    ]


def _judge_who_waits(seen: Observation) -> Judgement:
    rows = seen.rows()
    waiting = [str(row["call"]) for row in rows if row["waits"]]
    at_once = [str(row["call"]) for row in rows if not row["waits"]]
    if not waiting:
        return "does not hold", f"None of {len(rows)} calls waits for the kernel on another stream."
    if not at_once:
        return "holds", f"All {len(rows)} calls wait for the kernel on another stream."
    return "depends", f"{listed(waiting)} wait{'s' * (len(waiting) == 1)}; {listed(at_once)} do not."


@experiment("who-waits", "Allocating and freeing memory waits for running work.", judge=_judge_who_waits)
def who_waits(bench: Bench) -> Observation:
    """A call that waits in the middle of a step stops the host until the device is idle."""
    size = 16 * MIB
    memory = mmap.mmap(-1, size)
    with bench.streams(2) as (busy, other):
        calls = _plain_calls(bench, size)
        if bench.on_gpu:
            calls += [*_driver_calls(bench, size, other), *_register_calls(bench, memory)]
        calls += _page_calls(bench)
        rows: list[tuple[str | float | bool, ...]] = []
        for call in calls:
            alone = min(call.cost(bench, None) for _ in range(2))
            beside = call.cost(bench, busy)
            rows.append((call.name, alone, beside, beside - alone > bench.busy_ms / 2))
    waiting = sum(bool(row[3]) for row in rows)
    return Observation(
        {
            "kernel_ms": Quantity(bench.busy_ms, "ms"),
            "calls": Quantity(len(rows), "calls"),
            "calls_that_wait": Quantity(waiting, "calls"),
        },
        Table(("call", "alone ms", "beside the kernel ms", "waits"), rows),
    )


# ---- other streams ----------------------------------------------------------------------------------------

STALLED, UNDISTURBED = 1.25, 1.10
"""A chain that takes longer by the first factor was stalled; up to the second factor it was undisturbed."""


GROWTH, MOST_MALLOCS = 16 * MIB, 64
"""What is allocated during other work: size of a block, and the maximum number of blocks."""


def _judge_stalls(seen: Observation) -> Judgement:
    ratio = seen["chain_with_malloc_ms"] / seen["chain_alone_ms"]
    both = seen["chain_with_malloc_and_free_ms"] / seen["chain_alone_ms"]
    text = (
        f"A chain of kernels takes {ratio:.2f} times as long during {seen['mallocs']:.0f} mallocs, and "
        f"{both:.2f} times as long during mallocs and frees. A launch takes {seen['launch_us']:.1f} µs, and "
        f"{seen['launch_beside_malloc_us']:.1f} µs while another thread allocates."
    )
    if ratio >= STALLED:
        return "holds", text
    return ("does not hold" if ratio <= UNDISTURBED else "depends"), text


@experiment("malloc-stalls", "cudaMalloc stalls other streams.", judge=_judge_stalls)
def malloc_stalls(bench: Bench) -> Observation:
    """If it did, growth on one stream would delay all others, and growing ahead of time would not help."""
    held: list[int] = []

    def malloc() -> None:
        if len(held) < MOST_MALLOCS:
            held.append(bench.backend.reserve(GROWTH))

    def malloc_all() -> None:
        for _ in range(MOST_MALLOCS):
            malloc()

    def free_all() -> None:
        while held:
            bench.backend.release(held.pop(), GROWTH)

    with bench.streams(1) as (stream,):
        _chain_ms(bench, stream)
        alone = statistics.median(_chain_ms(bench, stream) for _ in range(3))
        with_malloc = _chain_ms(bench, stream, malloc)
        mallocs = len(held)
        free_all()
        with_both = _chain_ms(
            bench, stream, lambda: bench.backend.release(bench.backend.reserve(GROWTH), GROWTH)
        )
        launch_us = _launch_us(bench, stream, beside=lambda: time.sleep(0.01))
        beside_us = _launch_us(bench, stream, beside=malloc_all)
        free_all()
    return Observation(
        {
            "chain_alone_ms": Quantity(alone, "ms"),
            "chain_with_malloc_ms": Quantity(with_malloc, "ms"),
            "chain_with_malloc_and_free_ms": Quantity(with_both, "ms"),
            "mallocs": Quantity(mallocs, "mallocs"),
            "launch_us": Quantity(launch_us, "µs"),
            "launch_beside_malloc_us": Quantity(beside_us, "µs"),
        }
    )


def _chain_ms(bench: Bench, stream: Stream, step: Callable[[], object] | None = None) -> float:
    """Return how long a chain of short kernels takes while the host repeats `step`."""
    kernels, kernel_ms = 100 if bench.quick else 300, 0.1 if bench.on_gpu else 0.5
    start = clock_ms()
    for _ in range(kernels):
        bench.kernels.spin(stream, kernel_ms)
    while step is not None and not stream.query():
        step()
        time.sleep(0.0002)  # on the host, the chain needs Python as well
    stream.synchronize()
    return clock_ms() - start


def _launch_us(bench: Bench, stream: Stream, beside: Callable[[], object]) -> float:
    """Return the median time of a launch in microseconds while another thread runs `beside`."""
    thread = threading.Thread(target=beside)
    thread.start()
    spent: list[float] = []
    while thread.is_alive() or not spent:
        spent.append(bench.timed(lambda: bench.kernels.spin(stream, 0)))
        time.sleep(0)  # lets the other thread run Python
    thread.join()
    stream.synchronize()
    return 1e3 * statistics.median(spent)


# ---- capture ----------------------------------------------------------------------------------------------


def _judge_capture(seen: Observation) -> Judgement:
    rows = seen.rows()
    allowed = [str(row["call"]) for row in rows if row["allowed"]]
    refused = [str(row["call"]) for row in rows if not row["allowed"]]
    if not allowed:
        return "holds", f"All {len(rows)} calls are refused."
    if not refused:
        return "does not hold", f"All {len(rows)} calls are allowed."
    return "depends", f"{listed(refused)} cannot be called during a capture; {listed(allowed)} can."


@experiment(
    "capture", "Memory cannot be allocated inside a CUDA graph capture.", judge=_judge_capture, needs_gpu=True
)
def capture(bench: Bench) -> Observation:
    """A forbidden call fails and also ends the capture, so the graph is lost."""
    driver, size = bench.driver, 2 * MIB
    memory = mmap.mmap(-1, size)
    address = addressof(c_char.from_buffer(memory))
    undo: list[Callable[[], object]] = []
    rows: list[tuple[str | bool, ...]] = []
    with bench.streams(1) as (stream,), Pool(bench.device) as pool:
        pool.allocate(size, stream=stream).free()
        spare = driver.malloc(size)

        def malloc() -> None:
            made = driver.malloc(size)
            undo.append(lambda: driver.free(made))

        def pinned() -> None:
            made = driver.pinned_alloc(size)
            undo.append(lambda: driver.pinned_free(made))

        def register() -> None:
            driver.register(address, size)
            undo.append(lambda: driver.unregister(address))

        def free() -> None:
            nonlocal spare
            driver.free(spare)
            spare = 0

        def asynchronous() -> None:
            driver.free_async(driver.malloc_async(size, stream.handle), stream.handle)

        calls: dict[str, Callable[[], object]] = {
            "cudaMalloc": malloc,
            "cudaFree": free,
            "cudaHostAlloc": pinned,
            "cudaHostRegister": register,
            "cudaMallocAsync": asynchronous,
            "vram.Pool.allocate": lambda: pool.allocate(size, stream=stream).free(),
        }
        for name, call in calls.items():
            rows.append((name, *_captured(bench, stream, call)))
            while undo:
                undo.pop()()
        if spare:
            driver.free(spare)
    allowed = sum(bool(row[1]) for row in rows)
    return Observation(
        {"calls": Quantity(len(rows), "calls"), "calls_allowed": Quantity(allowed, "calls")},
        Table(("call", "allowed", "the driver says"), rows),
    )


def _captured(bench: Bench, stream: Stream, call: Callable[[], object]) -> tuple[bool, str]:
    """Return whether a capture survives the call, and the driver's error if it does not."""
    said = ""
    bench.driver.capture_begin(stream.handle)
    try:
        bench.kernels.spin(stream, 0)
        call()
    except VramError as error:
        said = str(error)
    status = bench.driver.capture_end(stream.handle)
    if status and not said:
        said = bench.driver.error_name(status)
    return not said, said or "ok"
