"""The kernels where they run without a GPU: the pattern, the host's versions, and who refuses."""

from __future__ import annotations

import ctypes
import re
import time

import pytest

import vram
from vram.errors import DeviceError
from vram.kernels import PTX, Kernels, pattern

SIZE = 4096


def test_a_pattern_depends_on_seed_and_place() -> None:
    first, second = pattern(1000, 1), pattern(1000, 2)
    assert len(set(first)) > 990
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 3
    assert pattern(10, 1) == first[:10]


def test_fill_and_check_agree_and_a_planted_error_is_found() -> None:
    kernels = Kernels("host")
    with vram.Pool("host") as pool, vram.Stream("host") as stream:
        memory = pool.allocate(SIZE, stream=stream)
        kernels.fill(memory, seed=7, stream=stream)
        assert kernels.check(memory, seed=7, stream=stream).count() == 0
        assert kernels.check(memory, seed=8, stream=stream).count() == SIZE // 4
        ctypes.memset(memory.ptr + 40, ctypes.string_at(memory.ptr + 40, 1)[0] ^ 0xFF, 1)
        assert kernels.check(memory, seed=7, stream=stream).count() == 1
        assert kernels.check(memory.ptr, 40, seed=7, stream=stream).count() == 0


def test_work_runs_in_the_order_of_its_stream_and_not_before() -> None:
    kernels = Kernels("host")
    with vram.Pool("host") as pool, vram.Stream("host") as stream:
        memory = pool.allocate(SIZE, stream=stream)
        memory.fill(0)
        stream.synchronize()
        kernels.spin(stream, 100)
        kernels.fill(memory, seed=1, stream=stream)
        late = kernels.check(memory, seed=1, stream=stream)
        assert ctypes.string_at(memory.ptr, SIZE) == bytes(SIZE)
        assert late.count() == 0


def test_spin_keeps_the_stream_busy_and_the_host_free() -> None:
    kernels = Kernels("host")
    with vram.Stream("host") as stream:
        start = time.perf_counter()
        kernels.spin(stream, 100)
        assert not stream.query()
        stream.synchronize()
        assert time.perf_counter() - start >= 0.095


@pytest.mark.parametrize("name", ["churn", "where"])
def test_the_host_says_which_kernels_it_has_not(name: str) -> None:
    kernels = Kernels("host")
    with pytest.raises(DeviceError, match=f"kernel {name} runs on cuda devices only, not on host"):
        if name == "churn":
            kernels.churn(4096, 8, rounds=1)
        else:
            kernels.where(None, 1)


def test_a_model_runs_no_kernels() -> None:
    with pytest.raises(DeviceError, match="addresses only and runs no kernels"):
        Kernels(vram.Device.model())


@pytest.mark.parametrize(("address", "size"), [(4096, 6), (4097, 8), (4096, -4)])
def test_memory_that_is_not_whole_words_is_refused(address: int, size: int) -> None:
    with pytest.raises(ValueError, match="whole 4-byte words"):
        Kernels("host").fill(address, size, seed=1)


def test_an_address_needs_a_size() -> None:
    with pytest.raises(TypeError, match="size in bytes"):
        Kernels("host").check(4096, seed=1)


@pytest.mark.parametrize("ms", [-1, float("nan"), 1e9])
def test_an_absurd_time_is_refused(ms: float) -> None:
    with pytest.raises(ValueError, match="choose 0 to 60000"):
        Kernels("host").spin(None, ms)


# ---- the PTX, as far as text can be judged without a compiler ----------------------------------------------


def entries() -> dict[str, str]:
    return dict(re.findall(r"\.visible \.entry (\w+)\((.*?\n})", PTX, re.DOTALL))


@pytest.mark.parametrize("name", ["vram_spin", "vram_where", "vram_fill", "vram_check", "vram_churn"])
def test_every_register_parameter_and_label_of_a_kernel_is_declared(name: str) -> None:
    body = entries()[name]
    for kind, count in re.findall(r"\.reg \.\w+ %(p|r|rd)<(\d+)>;", body):
        used = {int(number) for number in re.findall(rf"%{kind}(\d+)\b", body)}
        assert used
        assert max(used) < int(count)
    declared = re.findall(r"\.param \.\w+ (\w+)", body)
    assert sorted(re.findall(r"ld\.param\.\w+ %\w+, \[(\w+)\];", body)) == sorted(declared)
    labels = re.findall(r"^([A-Z_]+):$", body, re.MULTILINE)
    assert set(re.findall(r"bra ([A-Z_]+);", body)) == set(labels)
    assert len(labels) == len(set(labels))


def test_the_compiled_pattern_has_the_constants_of_the_python_one() -> None:
    for name in ("vram_fill", "vram_check"):
        factors = [
            int(text, 16) for text in re.findall(r"mul\.lo\.u32 %r\d+, %r\d+, (0x\w+);", entries()[name])
        ]
        assert factors == [0x9E3779B1, 0x85EBCA77]
        assert re.findall(r"shr\.u32 %r\d+, %r\d+, (\d+);", entries()[name]) == ["15", "13"]
