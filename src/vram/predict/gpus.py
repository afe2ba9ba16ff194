"""Profiles of GPUs: the properties that decide how much memory a program needs on them, by name.

`memory` is what CUDA reports as the total, which is less than the size in the name; drivers differ by up to
1 %. Profiles that are not `measured` come from published properties and reports of users.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from vram.arguments import require, whole_number
from vram.errors import ConfigError
from vram.sizes import format_size, parse_size

__all__ = ["DEFAULT_GPU", "GPUS", "Gpu", "Gpus", "find_gpu", "gpus", "read_gpu"]

MIB = 1 << 20
GIB = 1 << 30
DRIVER = 13000
"""The CUDA version of the null GPU's driver: 13.0."""
MOST_DEVICES = 64
DEFAULT_GPU = "h200"


@dataclass(frozen=True)
class Architecture:
    """What all GPUs of a compute capability have per multiprocessor."""

    shared_bytes: int
    threads: int
    blocks: int


ARCHITECTURES = {
    (7, 0): Architecture(98304, 2048, 32),
    (7, 5): Architecture(65536, 1024, 16),
    (8, 0): Architecture(167936, 2048, 32),
    (8, 6): Architecture(102400, 1536, 16),
    (8, 9): Architecture(102400, 1536, 24),
    (9, 0): Architecture(233472, 2048, 32),
    (10, 0): Architecture(233472, 2048, 32),
    (12, 0): Architecture(102400, 1536, 24),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU. Sizes are bytes, clocks kHz.

    `key` is the name on the command line and `name` the one that CUDA reports. `overhead` is what the context
    and its modules take besides the memory that a program allocates. `measured` is set if memory and overhead
    were measured on the GPU itself.
    """

    key: str
    name: str
    memory: int
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int
    overhead: int = 512 * MIB
    measured: bool = False

    @property
    def architecture(self) -> Architecture:
        """What a multiprocessor has."""
        return ARCHITECTURES[self.capability]

    def with_memory(self, memory: int | str) -> Gpu:
        """The same GPU with another amount of memory."""
        size = parse_size(memory)
        if size <= self.overhead:
            raise ConfigError(
                f"a GPU needs more memory than the {format_size(self.overhead)} of its context; "
                f"not {format_size(size)}",
                value=memory,
            )
        return replace(self, memory=size)

    def setting(self, devices: int = 1) -> str:
        """The value of VRAM_NULL_GPU for `devices` GPUs of this kind."""
        facts = {
            "name": self.name,
            "memory": self.memory,
            "overhead": self.overhead,
            "devices": check_devices(devices),
            "major": self.capability[0],
            "minor": self.capability[1],
            "multiprocessors": self.multiprocessors,
            "l2_bytes": self.l2_bytes,
            "shared_bytes": self.architecture.shared_bytes,
            "threads": self.architecture.threads,
            "blocks": self.architecture.blocks,
            "clock_khz": self.clock_khz,
            "memory_clock_khz": self.memory_clock_khz,
            "bus_bits": self.bus_bits,
            "driver": DRIVER,
        }
        return ";".join(f"{key}={value}" for key, value in facts.items())


def _gpu(
    key: str,
    name: str,
    gib: float,
    capability: tuple[int, int],
    multiprocessors: int,
    l2_mib: float,
    clock_mhz: int,
    memory_clock_mhz: int,
    bus_bits: int,
) -> Gpu:
    """A profile from published properties."""
    return Gpu(
        key,
        f"NVIDIA {name}",
        int(gib * 1024) * MIB,
        capability,
        multiprocessors,
        int(l2_mib * MIB),
        clock_mhz * 1000,
        memory_clock_mhz * 1000,
        bus_bits,
    )


GPUS = (
    # Data centre
    _gpu("b200", "B200", 178.35, (10, 0), 148, 126.5, 1965, 3996, 8192),
    Gpu(
        "h200",
        "NVIDIA H200",
        150109880320,
        (9, 0),
        132,
        62914560,
        1980000,
        3201000,
        6016,
        overhead=767 * MIB,
        measured=True,
    ),
    _gpu("h100", "H100 80GB HBM3", 79.11, (9, 0), 132, 50, 1980, 2619, 5120),
    _gpu("h100-pcie", "H100 PCIe", 79.11, (9, 0), 114, 50, 1755, 1593, 5120),
    _gpu("h100-nvl", "H100 NVL", 93.12, (9, 0), 132, 60, 1785, 2619, 6016),
    _gpu("a100-80gb", "A100-SXM4-80GB", 79.15, (8, 0), 108, 40, 1410, 1593, 5120),
    _gpu("a100-40gb", "A100-SXM4-40GB", 39.39, (8, 0), 108, 40, 1410, 1215, 5120),
    _gpu("a40", "A40", 44.34, (8, 6), 84, 6, 1740, 7251, 384),
    _gpu("a30", "A30", 23.50, (8, 0), 56, 24, 1440, 1215, 3072),
    _gpu("a10", "A10", 22.06, (8, 6), 72, 6, 1695, 6251, 384),
    _gpu("a10g", "A10G", 22.06, (8, 6), 80, 6, 1710, 6251, 384),
    _gpu("l40s", "L40S", 44.39, (8, 9), 142, 96, 2520, 9001, 384),
    _gpu("l4", "L4", 22.03, (8, 9), 58, 48, 2040, 6251, 192),
    _gpu("v100-32gb", "Tesla V100-SXM2-32GB", 31.73, (7, 0), 80, 6, 1530, 877, 4096),
    _gpu("v100-16gb", "Tesla V100-SXM2-16GB", 15.77, (7, 0), 80, 6, 1530, 877, 4096),
    _gpu("t4", "Tesla T4", 14.56, (7, 5), 40, 4, 1590, 5001, 256),
    # Workstations
    _gpu("rtx-pro-6000", "RTX PRO 6000 Blackwell", 94.97, (12, 0), 188, 128, 2617, 14001, 512),
    _gpu("rtx-6000-ada", "RTX 6000 Ada Generation", 47.37, (8, 9), 142, 96, 2505, 10001, 384),
    _gpu("rtx-a6000", "RTX A6000", 47.40, (8, 6), 84, 6, 1800, 8001, 384),
    # Consumers
    _gpu("rtx-5090", "GeForce RTX 5090", 31.36, (12, 0), 170, 96, 2407, 14001, 512),
    _gpu("rtx-5080", "GeForce RTX 5080", 15.46, (12, 0), 84, 64, 2617, 15001, 256),
    _gpu("rtx-4090", "GeForce RTX 4090", 23.52, (8, 9), 128, 72, 2520, 10501, 384),
    _gpu("rtx-4080", "GeForce RTX 4080", 15.57, (8, 9), 76, 64, 2505, 11201, 256),
    _gpu("rtx-4070", "GeForce RTX 4070", 11.60, (8, 9), 46, 36, 2475, 10501, 192),
    _gpu("rtx-4060-ti", "GeForce RTX 4060 Ti", 15.57, (8, 9), 34, 32, 2535, 9001, 128),
    _gpu("rtx-4060", "GeForce RTX 4060", 7.63, (8, 9), 24, 24, 2460, 8501, 128),
    _gpu("rtx-3090", "GeForce RTX 3090", 23.56, (8, 6), 82, 6, 1695, 9751, 384),
    _gpu("rtx-3080", "GeForce RTX 3080", 9.64, (8, 6), 68, 5, 1710, 9501, 320),
    _gpu("rtx-3070", "GeForce RTX 3070", 7.66, (8, 6), 46, 4, 1725, 7001, 256),
    _gpu("rtx-3060", "GeForce RTX 3060", 11.63, (8, 6), 28, 3, 1777, 7501, 192),
    _gpu("rtx-2080-ti", "GeForce RTX 2080 Ti", 10.57, (7, 5), 68, 5.5, 1545, 7000, 352),
)
"""Every profile: data centre, workstations, consumers."""

_NOISE = re.compile(r"^(nvidia|tesla|geforce|quadro)+")


class Gpus(tuple[Gpu, ...]):
    """GPUs: a tuple that a notebook shows as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Gpus: {_list(self)}>"

    def _repr_html_(self) -> str:
        from .html import gpus_html

        return gpus_html(self)


def gpus() -> Gpus:
    """Every GPU that `vram.predict` knows by name."""
    return Gpus(GPUS)


def find_gpu(name: str) -> Gpu:
    """The GPU of a name as people write it: "h200", "A100-80GB", "rtx4090", "NVIDIA GeForce RTX 4090".

    An unknown or ambiguous name raises a ConfigError that lists the nearest.
    """
    wanted = _plain(require(name, str, "the name of a GPU"))
    exact = [gpu for gpu in GPUS if wanted in _names(gpu)]
    begun = [gpu for gpu in GPUS if any(each.startswith(wanted) for each in _names(gpu))]
    found = exact or begun
    if len(found) == 1:
        return found[0]
    if found and wanted:
        raise ConfigError(f"{name!r} is one of {_list(found)}; name one of them", value=name)
    near = difflib.get_close_matches(wanted, [each for gpu in GPUS for each in _names(gpu)], n=6, cutoff=0.5)
    nearest = [gpu for gpu in GPUS if _names(gpu) & set(near)] or GPUS
    what = "the nearest are" if near else "there are"
    raise ConfigError(
        f"no GPU is named {name!r}; {what} {_list(nearest)}. vram predict --memory 24GiB predicts for "
        "any amount of memory",
        value=name,
    )


def read_gpu(name: str | None, memory: int | str | None = None) -> tuple[Gpu, int]:
    """The GPU and the number of them: of "h200" or "h200:8", with another `memory` if it is given."""
    wanted = DEFAULT_GPU if name is None else require(name, str, "the name of a GPU")
    key, colon, count = wanted.partition(":")
    gpu = find_gpu(key)
    if colon and not count.isdecimal():
        raise ConfigError(f"{name!r} is not a GPU; write h200, or h200:8 for eight of them", value=name)
    devices = check_devices(int(count)) if colon else 1
    return (gpu if memory is None else gpu.with_memory(memory)), devices


def check_devices(devices: int) -> int:
    """`devices`, or a ConfigError if there cannot be that many."""
    return whole_number(devices, "the number of GPUs", least=1, most=MOST_DEVICES)


def _plain(name: str) -> str:
    return _NOISE.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


def _names(gpu: Gpu) -> set[str]:
    """What a GPU is called, without spaces and signs, with and without "RTX"."""
    names = {_plain(gpu.key), _plain(gpu.name)}
    return names | {each.removeprefix("rtx") for each in names}


def _list(found: tuple[Gpu, ...] | list[Gpu]) -> str:
    return ", ".join(gpu.key for gpu in found)
