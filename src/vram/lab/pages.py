"""What mapped pages make possible: growing in place, and mapping one page at two addresses."""

from __future__ import annotations

from vram.core.pool import Pool
from vram.core.stream import Stream
from vram.lifetimes.growable import GrowableBuffer

from .experiment import MIB, Bench, Judgement, Observation, Quantity, experiment

PAGE = 32 * MIB


# ---- growing ----------------------------------------------------------------------------------------------


def _judge_growth(seen: Observation) -> Judgement:
    if seen["wrong_words"]:
        return "does not hold", f"{seen['wrong_words']:.0f} words were lost while growing."
    ratio = seen["copy_ms"] / seen["in_place_ms"]
    text = (
        f"Growing from {seen['from_mib']:.0f} to {seen['to_mib']:.0f} MiB takes {seen['in_place_ms']:.2f} ms "
        f"in place and {seen['copy_ms']:.2f} ms by allocating, copying and freeing ({ratio:.1f} times), "
        f"which needs {seen['copy_peak_mib']:.0f} MiB at once. Both write zeros to the new part."
    )
    if ratio >= 1.5:
        return "holds", text
    return ("does not hold" if ratio < 1 else "depends"), text


@experiment(
    "grow-in-place",
    "Growing a buffer in place, by mapping pages behind it, is cheaper than copying it.",
    judge=_judge_growth,
    needs_pages=True,
)
def grow_in_place(bench: Bench) -> Observation:
    """A growing key-value cache or list of results needs neither a copy nor memory for two copies."""
    before = (1024 if bench.on_gpu and not bench.quick else 128) * MIB
    more = before // 4
    checked = min(bench.checked_bytes, before)
    with bench.streams(1) as (stream,):
        with (
            Pool(bench.device) as pool,
            GrowableBuffer(before + more, pool, stream=stream, size=before, ahead=0) as buffer,
        ):
            bench.kernels.fill(buffer.ptr, checked, seed=1, stream=stream)
            stream.synchronize()
            in_place_ms = bench.timed(lambda: _grow_in_place(bench, buffer, stream, more))
            bench.kernels.fill(buffer.ptr + before, checked, seed=2, stream=stream)
            wrong = bench.kernels.check(buffer.ptr, checked, seed=1, stream=stream).count()
            wrong += bench.kernels.check(buffer.ptr + before, checked, seed=2, stream=stream).count()
        copy_ms, lost = _grow_by_copy(bench, stream, before, before + more, checked)
    return Observation(
        {
            "from_mib": Quantity(before // MIB, "MiB"),
            "to_mib": Quantity((before + more) // MIB, "MiB"),
            "in_place_ms": Quantity(in_place_ms, "ms"),
            "copy_ms": Quantity(copy_ms, "ms"),
            "copy_peak_mib": Quantity((2 * before + more) // MIB, "MiB"),
            "wrong_words": Quantity(wrong + lost, "words"),
        }
    )


def _grow_in_place(bench: Bench, buffer: GrowableBuffer, stream: Stream, more: int) -> None:
    end = buffer.ptr + buffer.size
    buffer.grow(more)
    bench.backend.fill(end, 0, more, stream.handle)
    stream.synchronize()


def _grow_by_copy(bench: Bench, stream: Stream, before: int, after: int, checked: int) -> tuple[float, int]:
    backend = bench.backend
    old = backend.reserve(before)
    backend.fill(old, 0, before, stream.handle)
    bench.kernels.fill(old, checked, seed=1, stream=stream)
    stream.synchronize()
    new = 0

    def grow() -> None:
        nonlocal new
        new = backend.reserve(after)
        backend.copy(new, old, before, stream.handle)
        backend.fill(new + before, 0, after - before, stream.handle)
        stream.synchronize()
        backend.release(old, before)

    spent = bench.timed(grow)
    lost = bench.kernels.check(new, checked, seed=1, stream=stream).count()
    backend.release(new, after)
    return spent, lost


# ---- two addresses ----------------------------------------------------------------------------------------


def _judge_two_addresses(seen: Observation) -> Judgement:
    wrong = seen["wrong_words_second"] + seen["wrong_words_first"]
    of = f"{wrong:.0f} of {2 * seen['words']:.0f} words read through the other address are wrong"
    if wrong == 0:
        return "holds", f"After writing through either address, {of}."
    return ("does not hold" if wrong >= 2 * seen["words"] else "depends"), f"After either write, {of}."


@experiment(
    "two-addresses",
    "One physical page mapped at two addresses shows the same data at both.",
    judge=_judge_two_addresses,
    needs_pages=True,
)
def two_addresses(bench: Bench) -> Observation:
    """A pool can then keep old mappings and map their pages at new addresses, without a copy."""
    backend, size = bench.backend, min(bench.checked_bytes, PAGE)
    space = backend.space_reserve(2 * PAGE)
    page = backend.page_create(PAGE)
    first, second = space, space + PAGE
    for address in (first, second):
        backend.map(address, PAGE, page)
        backend.set_access(address, PAGE)
    wrong = []
    with bench.streams(1) as (stream,):
        for seed, (one, other) in enumerate(((first, second), (second, first))):
            bench.kernels.fill(one, size, seed=seed, stream=stream)
            wrong.append(bench.kernels.check(other, size, seed=seed, stream=stream).count())
    for address in (first, second):
        backend.unmap(address, PAGE)
    backend.page_release(page, PAGE)
    backend.space_release(space, 2 * PAGE)
    return Observation(
        {
            "words": Quantity(size // 4, "words"),
            "wrong_words_second": Quantity(wrong[0], "words"),
            "wrong_words_first": Quantity(wrong[1], "words"),
        }
    )
