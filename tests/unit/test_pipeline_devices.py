"""Pipelines over several devices: results pass from one to the next while all of them work."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vram
from vram import Buffer, ConfigError, Device, DeviceError, OutOfMemory, Pipeline, Pool

MIB = 1 << 20


def kernel(pipe: Callable[[], Pipeline]) -> Callable[[Buffer], Buffer]:
    """A function of a Buffer that takes the device's lag."""

    def compute(x: Buffer) -> Buffer:
        x.fill(1, stream=pipe().stream)
        return x

    return compute


class Chain:
    """A pipeline whose functions run on models that are linked in a chain, and its pools."""

    def __init__(self, stages: int = 2, **links: Any) -> None:
        self.devices = Device.models(stages, "1GiB", **links)
        self.pools = [Pool(device) for device in self.devices]
        self.pipe = Pipeline([kernel(lambda: self.pipe)] * stages, pool=self.pools)

    def check(self) -> None:
        for device, pool in zip(self.devices, self.pools, strict=True):
            assert pool.stats().live == 0
            assert pool.check() is None
            assert device.backend.check() is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("access", [True, False], ids=["peers", "staged"])
@pytest.mark.parametrize("stages", [2, 3])
def test_results_pass_from_device_to_device(stages: int, access: bool) -> None:
    seen: list[list[str]] = []

    def note(x: Buffer) -> Buffer:
        seen.append([x.device.name, chain.pipe.stream.device.name])
        return x

    chain = Chain(stages, peer_access=access)
    chain.pipe = Pipeline([note] * stages, pool=chain.pools)
    out = list(chain.pipe.map(np.zeros(size, np.uint8) for size in (100, 5 * MIB, 1)))
    assert [array.nbytes for array in out] == [100, 5 * MIB, 1]
    assert seen == [[device.name] * 2 for _ in range(3) for device in chain.devices]
    report = chain.pipe.report()
    assert report.sums_bytes["peer copy"] == 100 + 5 * MIB + 1
    assert report.lanes[:5] == ("stage in", "upload", "compute", "peer copy", "compute 2")
    assert "peer copy" in str(report) and "compute 2" in report._repr_html_()
    assert {lane["lane"] for lane in report.to_dict()["lanes"]} >= {"peer copy", "compute 2", "download"}
    chain.check()


def test_upload_compute_peer_copy_and_download_run_at_once() -> None:
    """Each of the five lanes takes 1 ms for a chunk; 40 chunks take little more than 40 ms."""
    chain = Chain(2, link_gb_per_s=10.0, host_gb_per_s=10.0, lag_us=1000.0)
    chain.pipe = Pipeline([kernel(lambda: chain.pipe)] * 2, depth=6, pool=chain.pools)
    list(chain.pipe.map(np.zeros(10_000_000, np.uint8) for _ in range(40)))
    report = chain.pipe.report()
    assert report.fraction_of_ideal > 0.85, str(report)
    spans = {
        lane: [(span.begin_ms, span.end_ms) for span in report.spans if span.lane == lane]
        for lane in ("upload", "compute", "peer copy", "compute 2", "download")
    }
    moments = np.linspace(10, 30, 101)
    busy = [sum(any(begin <= at < end for begin, end in each) for each in spans.values()) for at in moments]
    assert max(busy) == 5 and np.median(busy) >= 4
    chain.check()


def test_run_writes_the_rows_to_out() -> None:
    chain = Chain()
    out = np.zeros(5000, np.uint8)
    chain.pipe = Pipeline([lambda x: x, lambda x: x], "1KiB", pool=chain.pools)
    assert chain.pipe.run(np.ones(5000, np.uint8), out=out) is out
    assert chain.pipe.report().chunks == 5
    chain.check()


def test_values_that_are_no_arrays_pass_unchanged() -> None:
    chain = Chain()
    chain.pipe = Pipeline([lambda x: {"x": x, "n": 1}, lambda d: (d["x"], d["n"] + 1)], pool=chain.pools)
    ((array, number),) = chain.pipe.map([np.zeros(64, np.uint8)])
    assert (array.nbytes, number) == (64, 2)
    chain.pipe = Pipeline([lambda x: None, lambda nothing: 3], pool=chain.pools)
    assert list(chain.pipe.map([np.zeros(64, np.uint8)] * 2)) == [3, 3]
    chain.check()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_either_function_is_raised_in_its_place(failing: int) -> None:
    calls = itertools.count()

    def fails(x: Any) -> Any:
        if next(calls) == 3:
            raise ValueError("three")
        return x

    chain = Chain()
    functions: list[Any] = [lambda x: x, lambda x: x]
    functions[failing] = fails
    chain.pipe = Pipeline(functions, pool=chain.pools)
    seen: list[Any] = []
    with pytest.raises(ValueError, match="three"):
        seen.extend(chain.pipe.map(np.zeros(100, np.uint8) for _ in range(6)))
    assert len(seen) == 3
    seen.clear()
    chain.check()


def test_memory_that_is_short_on_the_second_device() -> None:
    devices = Device.models(2, "1GiB")
    with Pool(devices[0]) as one, Pool(devices[1], limit="8MiB") as two:
        pipe = Pipeline([lambda x: x, lambda x: x], pool=[one, two], depth=4)
        assert len(list(pipe.map([np.zeros(4 * MIB, np.uint8)] * 8))) == 8
        with pytest.raises(OutOfMemory):
            list(pipe.map([np.zeros(16 * MIB, np.uint8)]))
        assert one.stats().live == two.stats().live == 0


@pytest.mark.parametrize("side", [0, 1])
def test_each_call_fails_in_turn(side: int) -> None:
    nth, failures = 0, 0
    while True:
        nth += 7  # one in seven: there are hundreds
        chain = Chain()
        backend: Any = chain.devices[side].backend
        before = backend.total_calls()
        backend.fail_any(nth, "failed", 700)
        try:
            list(chain.pipe.map([np.zeros(5000, np.uint8)] * 3))
        except DeviceError as error:
            failures += 1
            assert error.native == 700
        made = backend.total_calls() - before
        backend.clear_failures()
        assert len(list(chain.pipe.map([np.zeros(5000, np.uint8)] * 2))) == 2
        chain.check()
        if made < nth:
            break
    assert failures > 3


def test_functions_and_devices_must_match() -> None:
    one, two = Device.models(2, "1GiB")
    alone = Device.model("1GiB")
    for functions, devices, why in (
        ([abs, abs], [one], "as many devices"),
        ([abs], [one, two], "as many devices"),
        ([abs, abs], None, "as many devices"),
        ([], [], "as many devices"),
        ([abs, abs], [one, one], "cannot pass results"),
        ([abs, abs], [one, alone], "cannot pass results"),
        ([abs, abs], [one, "host"], "cannot pass results"),
    ):
        with pytest.raises(ConfigError, match=why):
            Pipeline(functions, device=devices)
    with pytest.raises(TypeError, match="function of a batch"):
        Pipeline([abs, 3], device=[one, two])  # type: ignore[list-item]
    with vram.Pool(one) as pool, pytest.raises(ConfigError, match="as many devices"):
        Pipeline([abs, abs], pool=pool)
