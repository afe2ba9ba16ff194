"""Bytes of uses: overlaps against every byte written out, and the uses that are kept against all of them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram.race.call_sites import Site
from vram.race.clocks import StreamKey
from vram.race.history import MOST_USES, Use, UseMap
from vram.race.regions import Region, array_region

HERE = Site("used", 0, "", ())


def touched(address: int, item: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> set[int]:
    """Every byte of an array."""
    found = set()
    for index in itertools.product(*map(range, shape)):
        first = address + sum(i * stride for i, stride in zip(index, strides, strict=True))
        found |= set(range(first, first + item))
    return found


@st.composite
def arrays(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    dimensions = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 4)) for _ in range(dimensions))
    strides = tuple(draw(st.integers(-40, 40)) for _ in range(dimensions))
    return draw(st.integers(500, 600)), draw(st.sampled_from([1, 2, 4, 8])), shape, strides


@given(arrays(), arrays())
def test_arrays_overlap_where_they_share_a_byte(one: Any, other: Any) -> None:
    regions = array_region(*one), array_region(*other)
    bytes_of = touched(*one), touched(*other)
    for region, expected in zip(regions, bytes_of, strict=True):
        assert (region is None) == (not expected)
        if region is not None:
            assert (region.start, region.end) == (min(expected), max(expected) + 1)
    if regions[0] is not None and regions[1] is not None:
        shared = bool(bytes_of[0] & bytes_of[1])
        assert regions[0].overlaps(regions[1]) == regions[1].overlaps(regions[0]) == shared


@given(st.data())
def test_slices_of_numpy_overlap_as_numpy_says(data: st.DataObject) -> None:
    whole = np.zeros((6, 8, 5), np.int16)
    parts = [whole[tuple(data.draw(st.slices(length)) for length in whole.shape)] for _ in range(2)]
    facts = [part.__array_interface__ for part in parts]
    regions = [
        array_region(each["data"][0], 2, each["shape"], part.strides)
        for each, part in zip(facts, parts, strict=True)
    ]
    if None not in regions:
        assert regions[0].overlaps(regions[1]) == np.shares_memory(*parts)


def test_large_arrays_with_strides_are_compared_exactly() -> None:
    """The number of elements does not matter."""
    matrix = (10**6, 64), (4096, 1)
    left, right = array_region(0, 1, *matrix), array_region(64, 1, *matrix)
    assert left is not None and right is not None and not left.overlaps(right)
    assert left.overlaps(Region(4096 * 999_999 + 63, 4096 * 999_999 + 64))
    assert not left.overlaps(Region(4096 * 999_999 + 64, 4096 * 999_999 + 65))
    even, odd = array_region(0, 4, (10**9,), (8,)), array_region(4, 4, (10**9,), (8,))
    assert even is not None and odd is not None and not even.overlaps(odd)


def test_pointers_overlap_each_other_only_where_they_are_equal() -> None:
    one, same, other = (Region(start, 100, open=True) for start in (10, 10, 50))
    assert one.overlaps(same) and not one.overlaps(other)
    assert one.overlaps(Region(60, 61)) and not other.overlaps(Region(0, 50))
    assert one.closed().overlaps(other.closed())


def random_region(choose: random.Random) -> Region:
    start = choose.randrange(0, 60)
    kind = choose.randrange(4)
    if kind == 0:
        return Region(start, 64, open=True)
    if kind == 1:
        region = array_region(start, choose.choice([1, 2]), (choose.randint(1, 4),), (choose.randint(1, 6),))
        assert region is not None
        return region
    return Region(start, choose.randint(start + 1, 64))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_decides_as_all_uses_would(seed: int) -> None:
    """For every stream and every tick that may have been waited for: is there a rival that is later?"""
    choose = random.Random(seed)
    keys = [StreamKey(None, handle, 0) for handle in range(3)]
    spans, everything = UseMap(), []
    for tick in range(1, 60):
        use = Use(choose.choice(keys), tick, choose.random() < 0.5, random_region(choose), HERE)
        spans.add(use)
        everything.append(use)
        region, writes = random_region(choose), choose.random() < 0.5
        rivals = [each for each in everything if (writes or each.writes) and each.region.overlaps(region)]
        for key in keys:
            latest = max((each.tick for each in rivals if each.key == key), default=0)
            kept = max((each.tick for each in spans.rivals(region, writes) if each.key == key), default=0)
            assert kept == latest


def test_what_one_stream_covers_again_and_again_is_kept_once() -> None:
    spans, key = UseMap(), StreamKey(None, 1, 0)
    for tick in range(1, 1000):
        start = tick % 7
        spans.add(Use(key, tick, True, Region(start * 8, start * 8 + 8), HERE))
    spans.add(Use(key, 1000, True, Region(0, 64), HERE))
    assert len(list(spans)) == 1 and len(spans._spans) == 1


def test_many_strided_uses_of_one_stream_become_few() -> None:
    spans, key = UseMap(), StreamKey(None, 1, 0)
    for tick in range(1, 1000):
        column = array_region(tick, 1, (100,), (1000,))
        assert column is not None
        spans.add(Use(key, tick, True, column, HERE))
    assert len(list(spans)) <= 2 * MOST_USES
    assert len(spans.rivals(Region(5000, 5001), True)) > 0
