"""The allocators that a trace can be replayed through: their settings, and how a user would set them.

Settings have each allocator's own names and are checked here; the algorithms are native
(native/replay/policies).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vram.config import parse_pool_options, split_settings
from vram.errors import ConfigError
from vram.sizes import parse_size

__all__ = ["POLICY_KINDS", "PolicyKind", "policy_kind"]

MIB = 1 << 20
DIVISION_INTERVALS = 16
"""PyTorch rounds sizes from 1 MiB to 32 GiB by powers of two: [1, 2), [2, 4), … MiB."""


@dataclass(frozen=True)
class PolicyKind:
    """One allocator. `settings` maps each option to its name in the native core and the reader of its value.

    `environment` writes settings as the line to paste before the job; empty if none is needed.
    """

    name: str
    settings: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = field(default_factory=dict)
    environment: Callable[[Mapping[str, object]], str] = lambda conf: ""

    def read(self, conf: Mapping[str, object], capacity: int) -> dict[str, object]:
        """Settings for the native core; ConfigError names what is wrong and what is valid."""
        if self.name == "vram":
            return parse_pool_options(conf, capacity=capacity)
        return dict(self._read(key, value) for key, value in conf.items())

    def _read(self, key: str, value: object) -> tuple[str, object]:
        if key not in self.settings:
            valid = sorted(self.settings)
            takes = f"it takes {', '.join(valid)}" if valid else "it has none"
            raise ConfigError(f"policy {self.name} has no setting {key!r}; {takes}", option=key, valid=valid)
        native, reader = self.settings[key]
        return native, reader(key, value)


def _wrong(key: str, value: object, takes: str) -> ConfigError:
    return ConfigError(f"{key} cannot be {value!r}; it takes {takes}", option=key, value=value)


def _number(key: str, value: object, takes: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise _wrong(key, value, takes) from None


def _mib(least: int) -> Callable[[str, Any], int]:
    def read(key: str, value: Any) -> int:
        takes = f"whole MiB of at least {least}"
        number = _number(key, value, takes)
        if not (number.is_integer() and least <= number < 1 << 40):
            raise _wrong(key, value, takes)
        return int(number) * MIB

    return read


def _share(key: str, value: Any) -> float:
    takes = "a number above 0 and at most 1"
    number = _number(key, value, takes)
    if not 0 < number <= 1:
        raise _wrong(key, value, takes)
    return number


def _divisions(key: str, value: Any) -> list[int]:
    """One power of two for all sizes, or pairs such as [256:1,512:2,>:4], the sizes in MiB.

    As in PyTorch, the first pair also applies to everything below it, and `>` to the rest.
    """
    text = str(value).strip()
    if not text.startswith("["):
        return [_division(key, text)] * DIVISION_INTERVALS
    divisions = [0] * DIVISION_INTERVALS
    behind = 0  # the interval after that of the last pair
    for size, count in split_settings(text[1:].removesuffix("]")).items():
        if size == ">":
            first, end = behind, DIVISION_INTERVALS
        else:
            end = min(_power_of_two(key, size).bit_length(), DIVISION_INTERVALS)
            first, behind = 0 if behind == 0 else end - 1, end
        divisions[first:end] = [_division(key, count)] * (end - first)
    return divisions


def _division(key: str, text: str) -> int:
    return 0 if text == "0" else _power_of_two(key, text)


def _power_of_two(key: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text).bit_count() != 1:
        raise _wrong(key, text, "powers of two: one, or pairs such as [256:1,512:2,>:4] with sizes in MiB")
    return int(text)


def _pytorch(first: str = "") -> Callable[[Mapping[str, object]], str]:
    """PyTorch reads one variable; its defaults need none."""

    def write(conf: Mapping[str, object]) -> str:
        pairs = [first] if first else []
        pairs += [f"{key}:{value}" for key, value in conf.items()]
        return f"PYTORCH_CUDA_ALLOC_CONF={','.join(pairs)}" if pairs else ""

    return write


def _flag(key: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise _wrong(key, value, "true or false")
    return text == "true"


def _bytes(key: str, value: Any) -> int:
    return parse_size(value)


def _tensorflow(conf: Mapping[str, object]) -> str:
    growth = str(conf.get("allow_growth", "true")).lower()
    collect = str(conf.get("garbage_collection", "false")).lower()
    line = f"TF_FORCE_GPU_ALLOW_GROWTH={growth}"
    return line + (" TF_ENABLE_GPU_GARBAGE_COLLECTION=true" if collect == "true" else "")


def _rmm(resource: str) -> Callable[[Mapping[str, object]], str]:
    """RMM reads no environment variables: this is a line of Python instead."""

    def write(conf: Mapping[str, object]) -> str:
        settings = "".join(f", {key}={parse_size(str(value))}" for key, value in conf.items())
        return f"rmm.mr.set_current_device_resource(rmm.mr.{resource}(rmm.mr.CudaMemoryResource(){settings}))"

    return write


def _vram(conf: Mapping[str, object]) -> str:
    """The job runs on vram, so the line includes the command."""
    settings = ",".join(f"{key}:{value}" for key, value in conf.items())
    return f"VRAM_CONF={settings} vram run --torch" if settings else "vram run --torch"


_TORCH_SETTINGS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "max_split_size_mb": ("max_split_size", _mib(20)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mib(20)),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "large_segment_size_mb": ("large_segment", _mib(2)),
    "per_process_memory_fraction": ("per_process_memory_fraction", _share),
}

POLICY_KINDS: dict[str, PolicyKind] = {
    kind.name: kind
    for kind in (
        PolicyKind("torch", _TORCH_SETTINGS, _pytorch()),
        PolicyKind("torch-expandable", _TORCH_SETTINGS, _pytorch("expandable_segments:True")),
        PolicyKind("cuda-async", environment=_pytorch("backend:cudaMallocAsync")),
        PolicyKind(
            "bfc",
            {"allow_growth": ("allow_growth", _flag), "garbage_collection": ("garbage_collection", _flag)},
            _tensorflow,
        ),
        PolicyKind(
            "rmm-pool",
            {
                "initial_pool_size": ("initial_pool_size", _bytes),
                "maximum_pool_size": ("maximum_pool_size", _bytes),
            },
            _rmm("PoolMemoryResource"),
        ),
        PolicyKind("rmm-arena", environment=_rmm("ArenaMemoryResource")),
        PolicyKind("vram", environment=_vram),
    )
}
"""Every allocator by name."""


def policy_kind(name: str) -> PolicyKind:
    """The allocator of that name; ConfigError lists the known ones."""
    try:
        return POLICY_KINDS[name]
    except KeyError:
        raise ConfigError(f"no policy {name!r}; there is {', '.join(sorted(POLICY_KINDS))}") from None
