"""What the tests on a real GPU share: the device, kernels, and other libraries where they are installed.

Everything is imported when a test first asks for it: where there is no GPU the tests are only collected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from work import Work, intact_pools

from vram import Device, Pool


def library(name: str) -> Any:
    """Another library, whose warnings while it loads are its own; skips where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("cuda:0")


@pytest.fixture(scope="session")
def torch() -> Any:
    return library("torch")


@pytest.fixture(scope="session")
def cupy() -> Any:
    return library("cupy")


@pytest.fixture(scope="session")
def numba_cuda() -> Any:
    found = library("numba.cuda")
    try:
        found.jit(lambda: None)[1, 1]()
    except AttributeError as error:  # it uses what a newer NumPy has removed
        pytest.skip(f"this Numba does not work with this NumPy: {error}")
    return found


@pytest.fixture(scope="session")
def kernels(device: Device) -> Iterator[Work]:
    made = Work(device)
    yield made
    made.close()


@pytest.fixture
def work(kernels: Work) -> Work:
    """The kernels, with counters at zero."""
    kernels.take_counts()
    return kernels


@pytest.fixture
def make_pool(device: Device) -> Iterator[Callable[..., Pool]]:
    """Pools that must be intact after the test, and give everything back."""
    with intact_pools(device, Pool) as make:
        yield make
