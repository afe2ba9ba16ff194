"""Suspend and resume on a GPU: memory really goes to the driver, and patterns, kernels and graphs survive."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from work import Work, undisturbed, undisturbed_child

import vram
from vram import Device, DeviceError, OutOfMemory, Pool, Stream, Suspended

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MIB, GIB = 1 << 20, 1 << 30
SLACK = 32 * MIB  # the driver may take some for itself meanwhile, as for page-locked memory
MakePool = Callable[..., Pool]
TIMEOUT = 150.0


def written(work: Work, pool: Pool, sizes: list[int], **options: Any) -> dict[Any, int]:
    """Buffers, each full of a pattern of its own."""
    made = {pool.allocate(size, **options): work.new_seed() for size in sizes}
    for buffer, seed in made.items():
        work.fill(buffer.ptr, buffer.size, seed, buffer.stream)
    return made


def differing(work: Work, buffers: dict[Any, int], stream: int = 0) -> int:
    for buffer, seed in buffers.items():
        work.check(buffer.ptr, buffer.size, seed, stream)
    return work.take_counts()[0]


@undisturbed
def test_contents_and_addresses_survive(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool()
    sizes = [4096, 100_000, 3 * MIB, 40 * MIB, 300 * MIB]
    buffers = written(work, pool, sizes)
    other = written(work, pool, [50 * MIB], tag="other")
    addresses = [buffer.ptr for buffer in buffers]
    for _ in range(3):
        free = device.free_memory
        given = pool.suspend()
        assert given >= sum(sizes)
        assert device.free_memory - free >= given - SLACK
        assert pool.stats().reserved == 0
        with pytest.raises(Suspended):
            next(iter(buffers)).fill(0)
        with pytest.raises(Suspended):
            _ = next(iter(buffers)).__cuda_array_interface__
        assert pool.resume() > 0
        assert [buffer.ptr for buffer in buffers] == addresses
        assert differing(work, {**buffers, **other}) == 0


def test_a_tag_goes_while_others_work(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool()
    weights = written(work, pool, [64 * MIB] * 8, tag="weights")
    stream = Stream(device)
    others = written(work, pool, [10 * MIB] * 4, stream=stream)
    pool.suspend("weights")
    serving = written(work, pool, [100 * MIB, 5000, 8 * MIB])
    ended = pool.resume_async("weights")
    more = written(work, pool, [12 * MIB] * 3, stream=stream)
    ended.result(60)
    device.synchronize()
    assert differing(work, {**weights, **others, **serving, **more}) == 0


def test_it_waits_for_kernels_that_use_the_memory(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool()
    one, two = Stream(device), Stream(device)
    buffers = written(work, pool, [32 * MIB], stream=one)
    buffer = next(iter(buffers))
    device.synchronize()
    work.spin(0.2, two.handle)
    buffers[buffer] = work.new_seed()
    work.fill(buffer.ptr, buffer.size, buffers[buffer], two.handle)
    buffer.record_stream(two)
    pool.suspend()
    pool.resume()
    assert differing(work, buffers, one.handle) == 0


@undisturbed
def test_discarded_memory_is_usable_again(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool()
    buffer = pool.allocate(256 * MIB)
    free = device.free_memory
    assert pool.suspend(keep="discard") == 256 * MIB
    assert device.free_memory >= free + 256 * MIB - SLACK
    assert pool.resume() == 256 * MIB
    seed = work.new_seed()
    work.fill(buffer.ptr, buffer.size, seed, 0)
    assert differing(work, {buffer: seed}) == 0


def test_no_room_to_resume(device: Device, work: Work, make_pool: MakePool) -> None:
    pool, rival = make_pool(limit=2 * GIB), make_pool()
    buffers = written(work, pool, [GIB], tag="a")
    pool.suspend()
    filler = pool.allocate(1500 * MIB)
    with pytest.raises(OutOfMemory):
        pool.resume()
    assert next(iter(buffers)).suspended
    filler.free()
    assert rival.stats().reserved == 0
    pool.resume()
    assert differing(work, buffers) == 0


def test_a_captured_graph_replays_after_resume(device: Device, work: Work, make_pool: MakePool) -> None:
    """Its own memory, freed and live, and memory from before it, at the addresses it knows."""
    pool = make_pool()
    stream = Stream(device)
    static, seeds = pool.allocate(20 * MIB), [work.new_seed() for _ in range(3)]
    device.synchronize()
    with stream.capture() as graph:
        inner = pool.allocate(16 * MIB, stream=stream)
        work.fill(inner.ptr, inner.size, seeds[0], stream.handle)
        work.check(inner.ptr, inner.size, seeds[0], stream.handle)
        inner.free()
        result = pool.allocate(24 * MIB, stream=stream)
        work.fill(result.ptr, result.size, seeds[1], stream.handle)
        work.fill(static.ptr, static.size, seeds[2], stream.handle)
    graph.launch()
    for keep in ("host", "discard", "host"):
        pool.suspend(keep=keep)
        assert pool.stats().reserved == 0
        junk = written(work, pool, [8 * MIB] * 6)
        pool.resume()
        graph.launch()
        stream.synchronize()
        assert differing(work, {static: seeds[2], result: seeds[1], **junk}) == 0
        junk.clear()
    graph.close()


def test_plain_segments_say_no(device: Device, make_pool: MakePool) -> None:
    with vram.Pool(device, pages=False) as plain:
        buffer = plain.allocate(4 * MIB)
        with pytest.raises(DeviceError, match="plain segments"):
            plain.suspend()
        assert not buffer.suspended


def test_the_store_is_page_locked_and_kept(work: Work, make_pool: MakePool) -> None:
    pool = make_pool()
    buffers = written(work, pool, [128 * MIB])
    pool.suspend()
    assert pool.store.pinned  # type: ignore[attr-defined]
    reserved = pool.store.stats().reserved
    pool.resume()
    pool.suspend()
    assert pool.store.stats().reserved == reserved
    pool.resume()
    assert differing(work, buffers) == 0
    assert pool.store.trim(wait=True) == reserved


def test_threads_allocate_during_it(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool()
    buffers = written(work, pool, [64 * MIB] * 8, tag="s")
    stop, failures = threading.Event(), []

    def churn() -> None:
        stream = Stream(device)
        try:
            while not stop.is_set():
                held = [pool.allocate(size, stream=stream) for size in (1000, 3 * MIB, 9 * MIB)]
                for buffer in held:
                    buffer.fill(1)
                del held
            stream.synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        pool.suspend("s")
        pool.resume("s")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert differing(work, buffers) == 0


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_the_example() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "suspend.py"
    ended = subprocess.run(
        [sys.executable, str(example), "cuda:0"], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1].endswith("bit-identical")


TORCH = """
    import vram, vram.torch
    vram.torch.install()
    import torch
    device = vram.Device("cuda:0")
    torch.manual_seed(1)
    with vram.tag("train"):
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]).cuda()
        x = torch.randn(64, 2048, device="cuda")
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm), torch.no_grad():
            model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = model(x)
    other = torch.arange(1 << 20, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    expected, weights = y.cpu(), [p.detach().cpu() for p in model.parameters()]
    pointers = [p.data_ptr() for p in model.parameters()]
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("tag", ["'train'", ""])
@undisturbed_child
def test_torch_tensors_and_a_captured_graph(tag: str) -> None:
    check = f"""
        for turn in range(3):
            free = device.free_memory
            given = vram.torch.suspend({tag})
            assert given >= 16 * 2048 * 2048 * 4, given
            assert device.free_memory - free >= given - (32 << 20), (device.free_memory - free, given)
            if {tag!r}:
                assert other.sum().item() == ((1 << 20) - 1) * (1 << 19)
            serve = [torch.full((32 << 20,), 7.0, device="cuda") for _ in range(4)]
            torch.cuda.synchronize()
            vram.torch.resume({tag})
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y.cpu(), expected)
            assert [p.data_ptr() for p in model.parameters()] == pointers
            assert all(torch.equal(p.cpu(), w) for p, w in zip(model.parameters(), weights))
            assert all(each.eq(7).all().item() for each in serve)
            assert other.sum().item() == ((1 << 20) - 1) * (1 << 19)
            del serve
        with torch.no_grad():
            assert torch.allclose(model(x), y, rtol=1e-3, atol=1e-3)
        loss = model(x).sum()
        loss.backward()
        torch.cuda.synchronize()
        print("done")
    """
    program = "\n".join(textwrap.dedent(part) for part in (TORCH, check))
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "done"
