"""`DriverPool`: the driver's own stream-ordered allocator (cudaMallocAsync) with the methods of `Pool`.

This module adds its properties, its attributes, and sharing it between processes. Allocating, stream order
and synchronise-and-retry are native; everything else comes from `Pool`.
"""

from __future__ import annotations

import difflib
import operator
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from vram import _native
from vram.arguments import require, shown, whole_number
from vram.config import OPTIONS, Config
from vram.core.buffer import Buffer
from vram.core.device import Device
from vram.core.pool import Pool
from vram.errors import ConfigError, DeviceError
from vram.sizes import format_size, parse_size

__all__ = ["DriverPool", "PoolAttributes"]

KINDS = ("device", "pinned", "managed")
"""The kinds of memory of a driver pool."""
FLAGS = ("reuse_follow_event_dependencies", "reuse_allow_opportunistic", "reuse_allow_internal_dependencies")
HIGH_MARKS = ("reserved_mem_high", "used_mem_high")
COUNTED = ("reserved_mem_current", "used_mem_current")
THRESHOLD = "release_threshold"
ATTRIBUTES = (*FLAGS, THRESHOLD, COUNTED[0], HIGH_MARKS[0], COUNTED[1], HIGH_MARKS[1])
"""Every attribute, in CUDA's order and under CUDA's names."""
CUDA_NAMES = {
    spelled: name
    for name in ATTRIBUTES
    for spelled in (
        f"cudaMemPool{'' if name in FLAGS else 'Attr'}{name.title().replace('_', '')}",
        f"CU_MEMPOOL_ATTR_{name.upper()}",
    )
}
"""The same as the runtime and the driver of CUDA spell them; both are accepted."""
SETTINGS = ("kind", "shareable", "max_size", THRESHOLD, *FLAGS)
"""The settings that only a driver pool has."""
OPTIONS_TAKEN = ("limit", "journal", "zero_on_allocate", "zero_on_free", "stacks")
"""The options of `vram.Pool` that apply if the driver places memory."""

_UNLIMITED = 2**64 - 1
_NEEDED = {
    "device": "a driver with memory pools (CUDA 11.2)",
    "pinned": "a driver with pools of host memory (CUDA 12.6 or later)",
    "managed": "a driver with pools of managed memory (CUDA 13.0 or later)",
}
_MAGIC = b"vrampool"
_EXPORTED = struct.Struct("<8sQQ64s")
"""An exported allocation: magic, size, offset, and the driver's description."""


class DriverPool(Pool, _native.DriverPoolCore):
    """The driver's own pool for the memory of one device, with the methods of `Pool`.

    A new pool has properties: `kind` ("device", "pinned" or "managed"), `shareable` ("fd" to export it) and
    `max_size`, which the driver enforces. `DriverPool.default(device)` is the pool that the whole process
    shares. `limit` bounds what is allocated here. If the driver fails while frees wait for a stream, that
    stream is synchronised and the request is retried.
    """

    _title = "vram.DriverPool"

    def __init__(
        self,
        device: str | Device | None = None,
        *,
        kind: str = "device",
        shareable: str | None = None,
        max_size: int | str = 0,
        release_threshold: int | str | None = 0,
        reuse_follow_event_dependencies: bool | None = None,
        reuse_allow_opportunistic: bool | None = None,
        reuse_allow_internal_dependencies: bool | None = None,
        **config: Any,
    ) -> None:
        """Create a new driver pool; attributes that are not given keep the driver's values."""
        if kind not in KINDS:
            raise ConfigError(f"kind cannot be {kind!r}; it is one of {', '.join(KINDS)}.", value=kind)
        if shareable not in (None, "fd"):
            raise ConfigError(
                f'shareable cannot be {shareable!r}; it is None, or "fd" for a file descriptor.',
                value=shareable,
            )
        flags = (
            reuse_follow_event_dependencies,
            reuse_allow_opportunistic,
            reuse_allow_internal_dependencies,
        )
        wanted: dict[str, Any] = {
            name: value for name, value in zip(FLAGS, flags, strict=True) if value is not None
        }
        if release_threshold != 0:
            wanted[THRESHOLD] = release_threshold
        read = {name: _read_attribute(name, value) for name, value in wanted.items()}
        most = parse_size(max_size)
        self._open(device, config, "created", kind=kind, shareable=shareable == "fd", max_size=most)
        try:
            for name, value in read.items():
                self.set_attribute(name, value)
        except DeviceError:
            self.close()
            raise

    @classmethod
    def default(cls, device: str | Device | None = None, **config: Any) -> DriverPool:
        """The device's default pool, which the whole process shares; closing frees only what was made here.

        Its attributes are shared, too: a release threshold set here applies to all.
        """
        pool = cls.__new__(cls)
        pool._open(device, config, "default")
        return pool

    @classmethod
    def from_fd(cls, fd: int, device: str | Device | None = None, **config: Any) -> DriverPool:
        """The pool that another process exported as a file descriptor, which the caller closes.

        Nothing can be allocated from it; `import_buffer` finds the exporter's allocations.
        """
        pool = cls.__new__(cls)
        pool._open(device, config, "imported", fd=whole_number(fd, "fd", most=2**31 - 1))
        return pool

    def _open(
        self, device: str | Device | None, config: dict[str, Any], origin: str, **properties: Any
    ) -> None:
        place = device if isinstance(device, Device) else Device(device)
        settings = _settings(config)
        options = settings.core_options(place.total_memory)
        self._memory: _native.Backend = place.backend
        self._origin, self._properties = origin, properties
        try:
            _native.DriverPoolCore.__init__(self, place, options, origin, **properties)
        except DeviceError as error:
            raise _refusal(place, origin, properties, error) from error
        self._begin(place, settings)

    # ---- what it is -------------------------------------------------------------------------------------

    @property
    def memory(self) -> str:
        """Where its memory is: the name of the device, or "host" where the kind is "pinned"."""
        return "host" if self.kind == "pinned" else self.device.name

    @property
    def kind(self) -> str:
        """One of "device", "pinned", "managed"; "imported" if it came from another process."""
        return "imported" if self._origin == "imported" else str(self._properties.get("kind", "device"))

    @property
    def is_default(self) -> bool:
        """Whether it is the pool that the whole process shares."""
        return self._origin == "default"

    def _limit_name(self) -> str:
        most, limit = self.max_size, self.limit
        return "max_size" if most is not None and (limit is None or most < limit) else "limit"

    @property
    def max_size(self) -> int | None:
        """The most bytes the driver may reserve for it, or None for the driver's own bound."""
        return self._properties.get("max_size") or None

    @property
    def shareable(self) -> str | None:
        """How it can be exported: "fd", or None."""
        return "fd" if self._properties.get("shareable") else None

    @property
    def attributes(self) -> PoolAttributes:
        """The driver's attributes of the pool, by CUDA's names; some can be set."""
        return PoolAttributes(self)

    def _why_no_pages(self) -> str:
        return ""  # unknown: the driver maps its memory itself

    # ---- other processes --------------------------------------------------------------------------------

    def export(self) -> int:
        """A file descriptor by which another process opens this pool (`from_fd`); the caller closes it."""
        if self._origin != "created" or not self.shareable:
            what = {"default": "the default pool", "imported": "an imported pool"}.get(self._origin)
            raise ConfigError(
                f"{what or 'this pool'} cannot be exported; make one with "
                'vram.DriverPool(device, shareable="fd").',
                shareable=self.shareable,
            )
        return self.export_fd()

    def export_buffer(self, buffer: Buffer) -> bytes:
        """What another process needs to open this allocation (`import_buffer`), once it has the pool.

        Synchronise before sending, so that the contents are complete when the other side reads them, and free
        the buffer only after the other side has freed its own.
        """
        if require(buffer, Buffer, "buffer").pool is not self:
            raise ConfigError("the buffer is not one of this pool; export it with its own.", buffer=buffer)
        if not self.shareable:
            raise ConfigError(
                'allocations of this pool cannot be exported; make one with shareable="fd".',
                shareable=self.shareable,
            )
        words, offset = self.export_pointer(buffer.ptr)
        return _EXPORTED.pack(_MAGIC, buffer.size, offset, words)

    def import_buffer(self, exported: bytes, *, stream: Any = None) -> Buffer:
        """A Buffer over an allocation that the exporter of this pool described with `export_buffer`.

        Freeing it only ends the use in this process; do so before the exporter frees its own.
        """
        if self._origin != "imported":
            raise ConfigError("only a pool made by DriverPool.from_fd imports buffers.", origin=self._origin)
        if len(exported) != _EXPORTED.size or not exported.startswith(_MAGIC):
            raise ConfigError(
                f"these {len(exported)} bytes are not what export_buffer() gives ({_EXPORTED.size} bytes).",
                value=exported[:16],
            )
        _, size, offset, words = _EXPORTED.unpack(exported)
        return self.import_pointer(words, offset, size, stream)

    def __repr__(self) -> str:
        if "_futures" not in self.__dict__:
            return f"<{self._title}, not made>"
        name = f"<{self._title} on {self.device.name} ({'default' if self.is_default else self.kind})"
        if self.closed:
            return f"{name}, closed>"
        raw = self.raw_stats()
        held = f"{format_size(raw['live'])} allocated, {format_size(raw['reserved']['current'])} reserved"
        return f"{name}: {held}>"


class PoolAttributes(Mapping[str, "int | bool | None"]):
    """The attributes of a driver pool by CUDA's names, read from the driver each time.

    "cudaMemPoolAttrReleaseThreshold" and "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD" are accepted as well.
    The three `reuse_…` flags and `release_threshold` (a size; None or "unlimited": release nothing) can be
    set; the two `…_high` marks can only be reset to 0. The driver counts the rest.
    """

    def __init__(self, pool: DriverPool) -> None:
        """Created by `DriverPool.attributes`."""
        self._pool = pool

    def __getitem__(self, name: str) -> int | bool | None:
        name = CUDA_NAMES.get(name, name)
        if name not in ATTRIBUTES:
            raise KeyError(name)
        value = self._pool.attribute(name)
        if name in FLAGS:
            return bool(value)
        return None if name == THRESHOLD and value == _UNLIMITED else value

    def __setitem__(self, name: str, value: object) -> None:
        name = CUDA_NAMES.get(name, name)
        self._pool.set_attribute(name, _read_attribute(name, value))

    def __iter__(self) -> Iterator[str]:
        return iter(ATTRIBUTES)

    def __len__(self) -> int:
        return len(ATTRIBUTES)

    def __repr__(self) -> str:
        return f"PoolAttributes({dict(self)})"


# ---- reading ----------------------------------------------------------------------------------------------


def _read_attribute(name: str, value: Any) -> int:
    """The number of an attribute for CUDA; ConfigError says what is allowed."""
    if name in FLAGS:
        if hasattr(value, "__index__") and operator.index(value) in (0, 1):
            return operator.index(value)
        raise ConfigError(f"{name} cannot be {shown(value)}; it is True or False.", value=value)
    if name == THRESHOLD:
        if value is None or (isinstance(value, str) and value.lower() in ("unlimited", "none")):
            return _UNLIMITED
        return parse_size(value)
    if name in HIGH_MARKS:
        if type(value) is int and value == 0:
            return 0
        raise ConfigError(
            f"{name} cannot be set to {value!r}: CUDA lets a high-water mark only be reset, to 0.",
            value=value,
        )
    settable = ", ".join((*FLAGS, THRESHOLD))
    if name in COUNTED:
        raise ConfigError(f"{name} is counted by the driver and cannot be set; {settable} can.", value=value)
    raise ConfigError(
        f"a driver pool has no attribute {name!r}. There are: {', '.join(ATTRIBUTES)}; of these {settable} "
        f"can be set, and {' and '.join(HIGH_MARKS)} reset to 0.",
        valid=list(ATTRIBUTES),
    )


def _settings(config: dict[str, Any]) -> Config:
    for name in config:
        if name not in OPTIONS_TAKEN:
            raise _not_taken(name)
    return Config(config, ("core", "pool"))


def _not_taken(name: str) -> ConfigError:
    valid = [*SETTINGS, *OPTIONS_TAKEN]
    others = [other for other, option in OPTIONS.items() if option.scope == "core" and other not in valid]
    if name in others:
        why = f"{name} has no meaning in a driver pool, where the driver places memory."
    else:
        close = difflib.get_close_matches(name, [*valid, *others], n=1)
        why = f"there is no option {name!r}" + (f"; did you mean {close[0]}?" if close else ".")
    return ConfigError(
        f"{why} A driver pool takes: {', '.join(valid)}. Only vram.Pool takes: {', '.join(others)}.",
        option=name,
        valid=valid,
    )


def _refusal(place: Device, origin: str, properties: Mapping[str, Any], error: DeviceError) -> Exception:
    """The error for a driver that refuses to open a pool."""
    if error.facts.get("call") == "driver_pools":
        return DeviceError(
            f"{place.name} has no driver pools: they need a CUDA device and {_NEEDED['device']}, or a model. "
            "vram.Pool works on every device.",
            device=place.name,
            code="unsupported",
        )
    if error.facts.get("code") not in ("invalid", "unsupported"):
        return error
    if origin == "imported":
        return ConfigError(
            f"descriptor {properties['fd']} is not a pool that another process exported for {place.name}.",
            fd=properties["fd"],
        )
    shared = ' that can be shared (shareable="fd")' if properties.get("shareable") else ""
    version = getattr(place.backend, "driver_version", 0)
    here = f" This driver is of CUDA {version // 1000}.{version % 1000 // 10}." if version else ""
    kind = properties.get("kind", "device")
    return ConfigError(
        f"the driver refuses a pool of {kind} memory{shared}; that takes {_NEEDED[kind]}.{here} "
        f"{error.message}",
        kind=kind,
        **{name: error.facts.get(name) for name in ("call", "code", "native")},
    )
