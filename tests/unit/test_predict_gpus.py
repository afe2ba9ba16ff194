"""Profiles of GPUs: found by the names that people write, and complete."""

from __future__ import annotations

import pytest

from vram.errors import ConfigError
from vram.predict.gpus import ARCHITECTURES, DEFAULT_GPU, GPUS, find_gpu, gpus, read_gpu

GIB = 1 << 30


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("A100-80GB", "a100-80gb"),
        ("a100 40gb", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("rtx4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("h100", "h100"),
        ("h100-nvl", "h100-nvl"),
        ("l4", "l4"),
        ("Tesla T4", "t4"),
        ("a10", "a10"),
        ("a6000", "rtx-a6000"),
        ("rtx 6000 ada", "rtx-6000-ada"),
        ("3060", "rtx-3060"),
        ("4060", "rtx-4060"),
    ],
)
def test_names_are_forgiving(written: str, key: str) -> None:
    assert find_gpu(written).key == key


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.key)
def test_every_gpu_is_found_by_its_own_names(gpu: object) -> None:
    assert find_gpu(gpu.key) is gpu and find_gpu(gpu.name) is gpu  # type: ignore[attr-defined]


def test_an_ambiguous_name_lists_what_it_may_be() -> None:
    with pytest.raises(ConfigError, match="a100-80gb, a100-40gb"):
        find_gpu("a100")


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"rtx-4090.*vram predict --memory 24GiB") as raised:
        find_gpu("rtx4091")
    assert "h200" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"there are b200, h200"):
        find_gpu("???")


def test_properties_are_plausible() -> None:
    assert len(gpus()) >= 25 and len({gpu.key for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert gpu.capability in ARCHITECTURES
        assert 4 * GIB < gpu.memory < 512 * GIB and 0 < gpu.overhead < GIB
        assert 10 < gpu.multiprocessors < 256 and gpu.bus_bits % 32 == 0
    assert [gpu.key for gpu in GPUS if gpu.measured] == ["h200"]


def test_the_setting_has_what_the_null_gpu_reads() -> None:
    facts = dict(part.split("=") for part in find_gpu("h200").setting(2).split(";"))
    assert facts["name"] == "NVIDIA H200" and facts["memory"] == "150109880320"
    assert (facts["devices"], facts["major"], facts["minor"]) == ("2", "9", "0")
    assert facts["shared_bytes"] == "233472" and facts["threads"] == "2048"
    assert {"overhead", "l2_bytes", "blocks", "clock_khz", "memory_clock_khz", "bus_bits", "driver"} <= {
        *facts
    }


def test_a_number_and_another_memory() -> None:
    gpu, devices = read_gpu("a100-80gb:8", "24GiB")
    assert (gpu.key, gpu.memory, devices) == ("a100-80gb", 24 * GIB, 8)
    assert read_gpu(None) == (find_gpu(DEFAULT_GPU), 1)


@pytest.mark.parametrize("wrong", ["h200:", "h200:x", "h200:0", "h200:1000"])
def test_a_wrong_number_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        read_gpu(wrong)


def test_a_memory_below_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="context"):
        read_gpu("h200", "100MiB")
