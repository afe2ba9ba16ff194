"""Pipelines whose function is PyTorch's, on the host; on a GPU tests/gpu has the same."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vram import PinnedPool, Pipeline, Pool

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("default")  # PyTorch's warnings are its own


@pytest.fixture
def options() -> Iterator[dict[str, Any]]:
    with Pool("host") as pool, PinnedPool("host", segment_size="2MiB") as pinned:
        yield {"pool": pool, "pinned": pinned, "like": "torch"}
        gc.collect()
        assert pool.stats().live == pinned.stats().live == 0


@pytest.mark.parametrize("dtype", ["u1", "?", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "<c8"])
def test_types_go_there_and_back(options: dict[str, Any], dtype: str) -> None:
    data = (np.arange(10_000) % 2).astype(dtype).reshape(2500, 4)
    with Pipeline(lambda x: (x, x[:, ::2], x.t()), **options) as pipe:
        for one, two, three in pipe.map([data, data[:0], data]):
            rows = len(one)
            assert one.dtype == two.dtype == data.dtype
            assert np.array_equal(one, data[:rows])
            assert np.array_equal(two, data[:rows, ::2]) and np.array_equal(three, data[:rows].T)
        del one, two, three


def test_tensors_are_taken_and_gradients_left_behind(options: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    with Pipeline(lambda b: (b[0] @ weight, b[1]), "1KiB", depth=2, **options) as pipe:
        x, y = pipe.run((torch.arange(3000.0).reshape(1000, 3), torch.arange(1000)))
        assert np.array_equal(x[:, 0], np.arange(3000.0, dtype=np.float32).reshape(1000, 3).sum(axis=1))
        assert np.array_equal(y, np.arange(1000))


def test_what_numpy_cannot_name_is_told(options: dict[str, Any]) -> None:
    if "ml_dtypes" not in sys.modules:  # which teaches NumPy the type
        with Pipeline(lambda x: x.bfloat16(), **options) as pipe, pytest.raises(TypeError, match="bfloat16"):
            list(pipe.map([np.zeros(3, np.float32)]))
    with Pipeline(lambda x: x, **options) as pipe:
        for wrong in (np.zeros(3, ">i4"), np.zeros(3, "M8[s]")):
            with pytest.raises(TypeError, match="no dtype for"):
                list(pipe.map([wrong]))


def test_an_error_in_pytorch_comes_in_its_place(options: dict[str, Any]) -> None:
    with Pipeline(lambda x: x.view(3, -1), **options) as pipe:
        got = []
        with pytest.raises(RuntimeError, match="shape"):
            for out in pipe.map([np.zeros(9), np.zeros(6), np.zeros(7), np.zeros(9)]):
                got.append(out.shape)
        out = None
        assert got == [(3, 3), (3, 2)]
        assert pipe.pool.stats().live == 0
