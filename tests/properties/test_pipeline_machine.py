"""Whatever the chunks, depth, staging and memory: every element once and in order, or an error in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vram import OutOfMemory, PinnedPool, Pipeline, Pool

lengths = st.lists(st.one_of(st.integers(0, 40), st.integers(1000, 60_000)), max_size=12)
dtypes = st.sampled_from(["u1", "<i2", "<f4", "<i8", "<c16"])
kinds = st.sampled_from(["new", "in place", "argument", "narrow", "none", "pair"])
LIMIT = 2 << 20


class Broken(Exception):
    pass


def computed(kind: str, x: Any) -> Any:
    """What each kind of function makes of a batch, on the host or on the device."""
    if kind == "in place":
        x += 1
        return x
    if kind == "pair":
        return {"one": x + 1, "half": (x[::2], len(x))}
    made = {"new": lambda: x + 1, "argument": lambda: x, "narrow": lambda: x[:3].real.astype("f4")}
    return made[kind]() if kind in made else None


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and one.shape == two.shape and bool((one == two).all())
    return bool(one == two)


@settings(max_examples=60, deadline=None)
@given(lengths, dtypes, kinds, st.integers(1, 5), st.booleans(), st.data())
def test_batches_come_out_as_compute_made_them(
    sizes: list[int], dtype: str, kind: str, depth: int, staging: bool, data: st.DataObject
) -> None:
    batches = [(np.arange(size) * 7 + size).astype(dtype) for size in sizes]
    wrong = data.draw(st.one_of(st.none(), st.integers(0, len(sizes))), "wrong")
    keep = data.draw(st.booleans(), "keep")
    calls = 0

    def compute(x: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 == wrong:
            raise Broken
        return computed(kind, x)

    expected = [computed(kind, batch.copy()) for batch in batches[:wrong]]
    got: list[Any] = []
    with (
        Pool("host") as pool,
        PinnedPool("host", segment_size="2MiB") as pinned,
        Pipeline(compute, depth=depth, pool=pool, pinned=pinned, staging=staging) as pipe,
    ):
        count = 0
        try:
            for out in pipe.map(batches):
                assert same(out, expected[count])
                got += [out] if keep else []
                count += 1
            out = None
            assert wrong is None or wrong >= len(batches)
        except Broken:
            out = None
            assert count == wrong
        assert count == len(expected)
        assert all(map(same, got, expected)), "results did not change after they were returned"
        got.clear()
        assert pool.stats().live == pinned.stats().live == 0
        assert pool.check() is None and pinned.check() is None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40_000),
    st.integers(500, 200_000),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([1, 3, 1000]),
    st.booleans(),
)
def test_an_array_comes_back_whole(
    size: int, chunk: int, depth: int, staging: bool, columns: int, aside: bool
) -> None:
    rows = size // columns
    whole = np.arange(rows * columns * (2 if aside else 1), dtype=np.int32)
    array = whole.reshape(rows, -1)[:, :columns] if aside and rows else whole.reshape(-1, columns)
    seen: list[Any] = []

    def compute(x: Any) -> Any:
        seen.append(x.copy())
        return x.sum(axis=1, dtype=np.int64)

    with (
        Pool("host") as pool,
        PinnedPool("host", segment_size="2MiB") as pinned,
        Pipeline(compute, chunk, depth, pool=pool, pinned=pinned, staging=staging) as pipe,
    ):
        out = pipe.run(array)
        assert np.array_equal(out, array.sum(axis=1, dtype=np.int64))
        assert np.array_equal(np.concatenate([np.empty((0, array.shape[1]), np.int32), *seen]), array)
        most = max(1, chunk // max(1, array[:1].nbytes)) if rows else 1
        assert all(len(each) == most for each in seen[:-1]) and all(len(each) <= most for each in seen[-1:])
        assert pool.stats().live == pinned.stats().live == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, LIMIT + LIMIT // 4), min_size=1, max_size=8), st.integers(1, 6), st.booleans())
def test_memory_that_is_short_slows_down_or_is_told_but_loses_nothing(
    sizes: list[int], depth: int, pages: bool
) -> None:
    batches = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    got: list[int] = []
    with Pool("host", limit=LIMIT, pages=pages) as pool, PinnedPool("host", segment_size="2MiB") as pinned:
        with Pipeline(lambda x: (int(x[0]), len(x)), depth=depth, pool=pool, pinned=pinned) as pipe:
            fits = next((place for place, size in enumerate(sizes) if size > LIMIT), len(sizes))
            if fits < len(sizes):
                with pytest.raises(OutOfMemory):
                    got.extend(number for number, _ in pipe.map(batches))
            else:
                got.extend(number for number, _ in pipe.map(batches))
        assert got == list(range(fits))
        assert pool.stats().peak_reserved <= LIMIT and pool.stats().live == 0
