"""`vram doctor` and what is new in `vram info`: each mistake is found, and its absence is not."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

import vram
from vram.config import Config
from vram.system.doctor import CHECKS, Scene, examine, look

Command = Callable[..., tuple[int, str, str]]
GPU = {
    "name": "cuda:0",
    "kind": "cuda",
    "total_bytes": 100 << 30,
    "free_bytes": 90 << 30,
    "pages": True,
    "no_pages": "",
}
TRACE = {"name": "trace", "there": False, "for": "recordings", "install": "pip install it"}
FINE = Scene(
    environ={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    devices=[GPU],
    packages={"torch": "2", "jax": "1"},
    plugged={"torch": True},
)


def changed(**facts: Any) -> Scene:
    return dataclasses.replace(FINE, **facts)


def with_variables(**variables: str) -> Scene:
    return changed(environ={**FINE.environ, **variables})


MISTAKES: dict[str, tuple[Scene, str, str, str]] = {
    "a typo in VRAM_CONF": (
        with_variables(VRAM_CONF="limt:1GiB"),
        "wrong",
        "setting is invalid",
        "did you mean limit",
    ),
    "a bad value": (with_variables(VRAM_CACHE_SIZE="many"), "wrong", "setting is invalid", "VRAM_CACHE_SIZE"),
    "an unknown variable": (
        with_variables(VRAM_CONFIG="x"),
        "warning",
        "VRAM_CONFIG",
        "did you mean VRAM_CONF?",
    ),
    "a limit that is none": (with_variables(VRAM_CONF="limit:200GiB"), "warning", "200 GiB", "lower it"),
    "PyTorch's settings": (
        with_variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        "warning",
        "PYTORCH_CUDA_ALLOC_CONF",
        "VRAM_CONF",
    ),
    "PyTorch before vram": (
        changed(plugged={"torch": False}, torch_began=True),
        "hint",
        "already used CUDA",
        "mem_pool",
    ),
    "CuPy before vram": (
        changed(held_before={"cupy": 5 << 20}),
        "warning",
        "cupy holds 5 MiB",
        "vram.cupy.install",
    ),
    "JAX takes all": (changed(environ={}), "hint", "JAX", "PREALLOCATE=false"),
    "another manager for Numba": (
        with_variables(NUMBA_CUDA_MEMORY_MANAGER="rmm"),
        "hint",
        "'rmm'",
        "vram.numba",
    ),
    "no compiler": (changed(no_compiler="none of c++, g++"), "hint", "compiler", "g++"),
    "hidden GPUs": (
        dataclasses.replace(with_variables(CUDA_VISIBLE_DEVICES=""), devices=[]),
        "warning",
        "VISIBLE",
        "unset",
    ),
    "a container without the driver's library": (
        changed(devices=[], container=True, driver_files=("/dev/nvidiactl",), no_cuda="no libcuda"),
        "wrong",
        "no libcuda",
        "--gpus all",
    ),
    "a kernel driver without its library": (
        changed(devices=[], driver_files=("/dev/nvidiactl",), no_cuda="no libcuda"),
        "wrong",
        "no libcuda",
        "libcuda.so.1",
    ),
    "a container without a GPU": (
        changed(devices=[], container=True, no_cuda="no libcuda"),
        "hint",
        "no GPU",
        "--gpus",
    ),
    "a GPU without pages": (
        changed(devices=[{**GPU, "pages": False, "no_pages": "too old"}]),
        "hint",
        "cannot map pages",
        "newer",
    ),
    "a GPU full of others": (
        changed(devices=[{**GPU, "free_bytes": 1 << 30}]),
        "warning",
        "only 1 GiB free",
        "nvidia-smi",
    ),
    "little may be locked": (changed(locked_limit=8 << 20), "hint", "8 MiB", "ulimit"),
    "no place for sockets": (changed(unsafe_runtime="belongs to 7"), "wrong", "monitor", "VRAM_RUNTIME_DIR"),
    "no pyarrow": (changed(features=[TRACE]), "hint", "pyarrow", "pip install it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_with_its_fix(name: str) -> None:
    scene, level, title, fix = MISTAKES[name]
    (finding,) = examine(scene)
    assert finding.level == level
    assert title in finding.title + finding.fix and fix in finding.fix, finding
    assert finding.why


def test_every_check_can_find_something() -> None:
    finders = {check for scene, *_ in MISTAKES.values() for check in CHECKS if list(check(scene))}
    assert finders == set(CHECKS)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert examine(FINE) == []
    full_of_ours = dataclasses.replace(
        FINE, devices=[{**GPU, "free_bytes": 0}], reserved={"cuda:0": 99 << 30}
    )
    assert examine(full_of_ours) == []


def test_the_gravest_comes_first() -> None:
    scene = dataclasses.replace(with_variables(VRAM_CONF="x:1", VRAM_X="1"), locked_limit=0)
    assert [finding.level for finding in examine(scene)] == ["wrong", "warning", "hint"]


def test_this_process_can_be_looked_at() -> None:
    scene = look()
    assert scene.environ == dict(os.environ)
    assert scene.devices[-1]["name"] == "host"
    assert {"numpy"} <= set(scene.packages)


# ---- where a setting came from ----------------------------------------------------------------------------


def test_a_setting_knows_where_it_came_from() -> None:
    environ = {"VRAM_CONF": "cross_stream:wait,limit:1GiB", "VRAM_CACHE_SIZE": "3", "VRAM_WARMUP": "4KiB:2"}
    config = Config({"limit": "2GiB"}, environ=environ)
    origins = {name: config.origin(name) for name in config if config.is_set(name)}
    assert origins == {
        "limit": "keyword",
        "cross_stream": "VRAM_CONF",
        "stream_cache": "VRAM_CACHE_SIZE",
        "warmup_sizes": "VRAM_WARMUP",
        "enable_warmup": "VRAM_WARMUP",
    }
    assert config.origin("pages") == "default"
    conf_wins = Config(environ={"VRAM_CONF": "stream_cache:4", "VRAM_CACHE_SIZE": "3"})
    assert (conf_wins["stream_cache"], conf_wins.origin("stream_cache")) == (4, "VRAM_CONF")


# ---- the commands -----------------------------------------------------------------------------------------


def test_doctor_prints_findings_and_its_code_says_whether_something_is_wrong(
    vram_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_CONF", "limt:1GiB")
    code, out, _ = vram_command("doctor")
    assert code == 1
    assert "wrong: a setting is invalid" in out and "  fix: VRAM_CONF: unknown option 'limt'" in out
    monkeypatch.delenv("VRAM_CONF")
    code, out, _ = vram_command("doctor", "--json")
    found = json.loads(out)
    assert code == int(any(finding["level"] == "wrong" for finding in found))


def test_doctor_and_info_ask_a_running_process(
    vram_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_TYPO", "1")
    with vram.monitor() as watched:
        code, out, _ = vram_command("doctor", str(os.getpid()))
        assert "VRAM_TYPO is set" in out
        code, out, _ = vram_command("info", str(os.getpid()))
        assert code == 0 and str(watched.path) in out
        code, out, _ = vram_command("info", str(os.getpid()), "--json")
        told: dict[str, Any] = json.loads(out)
    assert told["observed"]["monitor"] == str(watched.path)
    assert any(finding["title"].startswith("VRAM_TYPO") for finding in told["findings"])


def test_info_says_what_is_missing_and_where_settings_come_from(
    vram_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vram.system.machine.FEATURES", {"tui": ("no_such_module", "the screen", "pip install it")}
    )
    monkeypatch.setattr("vram.system.machine.current_config", lambda: None)
    monkeypatch.setenv("VRAM_CACHE_SIZE", "5")
    _, out, _ = vram_command("info")
    assert "the screen: missing; pip install it" in out
    assert "5 (set by VRAM_CACHE_SIZE)" in out
    assert "monitor" in out and "off" in out
