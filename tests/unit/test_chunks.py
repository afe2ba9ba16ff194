"""The size of chunks: the rule against an oracle that tries every size, and what measuring makes of noise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram.pipeline.chunk_size import CLOSE, FEW, LARGE, MOST, SMALL, ChunkSizes, best_size, predicted_ms

Lanes = dict[str, tuple[float, float]]
TOTAL = 8 << 30
UNBOUNDED = 1 << 40


def lanes(**each: tuple[float, float]) -> Lanes:
    """Lanes by (fixed µs, GB/s)."""
    return {name: (fixed / 1e3, 1 / speed / 1e6) for name, (fixed, speed) in each.items()}


lane = st.tuples(st.floats(0, 10, allow_subnormal=False), st.floats(1e-9, 1e-3))


@given(
    st.integers(1, 1 << 36),
    st.integers(1, 1 << 34),
    st.dictionaries(st.sampled_from("abcd"), lane, min_size=1),
)
def test_no_size_inside_the_bounds_is_predicted_to_be_better(total: int, most: int, given: Lanes) -> None:
    chosen = best_size(total, most, given)
    assert SMALL <= chosen <= max(SMALL, min(most, MOST, total))
    sizes = [SMALL << power for power in range(9) if SMALL << power <= max(SMALL, min(most, MOST, total))]
    least = min(predicted_ms(size, total, given) for size in sizes)
    assert predicted_ms(chosen, total, given) <= least * CLOSE * (1 + 1e-12)


@given(st.integers(1, 1 << 36), st.integers(SMALL, MOST), st.dictionaries(st.sampled_from("abc"), lane))
def test_the_prediction_is_a_pipeline_simulated_chunk_by_chunk(total: int, size: int, given: Lanes) -> None:
    chunks = min(200, math.ceil(total / size))
    ends = dict.fromkeys(given, 0.0)
    for _ in range(chunks):
        ready = 0.0
        for name, (fixed, slope) in given.items():
            ready = ends[name] = max(ready, ends[name]) + fixed + slope * size
    simulated = max(ends.values(), default=0.0)
    assert predicted_ms(size, chunks * size, given) == pytest.approx(simulated)


def test_a_fixed_cost_of_computing_is_spread_until_copies_take_as_long() -> None:
    copies = lanes(upload=(10, 50), download=(10, 50))
    quick = best_size(TOTAL, UNBOUNDED, {**copies, **lanes(compute=(10, 100))})
    slow = best_size(TOTAL, UNBOUNDED, {**copies, **lanes(compute=(2000, 100))})
    assert slow > quick
    upload = 0.01 + slow / 50e6
    assert upload >= 0.5 * (2 + slow / 100e6)


def test_without_fixed_costs_filling_and_draining_decide() -> None:
    chosen = best_size(TOTAL, UNBOUNDED, lanes(upload=(0, 50), compute=(0, 50), download=(0, 50)))
    assert 2 * chosen / TOTAL <= 0.01 + 2 * SMALL / TOTAL


def measured(sizes: ChunkSizes, real: Lanes, noise: float = 1.0) -> list[int]:
    """What is given out while chunks finish three behind; the first of each size are far slower."""
    given: list[int] = []
    cold: dict[int, int] = {}
    for step in range(40):
        given.append(sizes.next())
        if step >= 3:
            size = given[step - 3]
            cold[size] = cold.get(size, 0) + 1
            factor = 20.0 if cold[size] <= 3 else noise
            sizes.add(size, {name: factor * (fixed + slope * size) for name, (fixed, slope) in real.items()})
    return given


def test_measuring_finds_the_costs_though_the_first_chunks_are_cold() -> None:
    real = lanes(upload=(20, 50), compute=(30, 60), download=(20, 50), host=(100, 1e6))
    sizes = ChunkSizes(TOTAL, 3, lambda: UNBOUNDED)
    given = measured(sizes, real)
    assert given[:5] == [SMALL] * 5 and given[5] == LARGE
    for name, (fixed, slope) in real.items():
        assert sizes.lanes[name][0] == pytest.approx(fixed, rel=0.01, abs=1e-4)
        assert sizes.lanes[name][1] == pytest.approx(slope, rel=0.01)
    assert sizes.chosen == best_size(TOTAL - 5 * SMALL - 8 * LARGE, UNBOUNDED, real)
    assert given[-1] == sizes.chosen


def test_little_is_not_measured_and_bounds_always_hold() -> None:
    few = ChunkSizes(FEW, 3, lambda: UNBOUNDED)
    assert few.next() == FEW // 8
    assert ChunkSizes(1, 3, lambda: UNBOUNDED).next() == SMALL // 4
    tight = ChunkSizes(TOTAL, 3, lambda: 1000)
    assert {tight.next() for _ in range(20)} == {1000}
    assert ChunkSizes(TOTAL, 3, lambda: 0).next() == 1
    known = ChunkSizes(TOTAL, 3, lambda: UNBOUNDED, chosen=12345)
    assert known.next() == 12345


def test_times_that_make_no_sense_still_give_a_size() -> None:
    for real in ({"compute": (0.0, 0.0)}, {"compute": (1e9, 0.0)}, {}):
        sizes = ChunkSizes(TOTAL, 1, lambda: UNBOUNDED)
        measured(sizes, real)
        assert sizes.chosen is not None and SMALL <= sizes.chosen <= MOST
