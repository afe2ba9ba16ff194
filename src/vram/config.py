"""All options in one table, and the order of sources: keyword, VRAM_CONF, single variables, default.

This module parses and checks values; error messages list the valid ones. The pool and the manager implement
the options.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from vram.arguments import real_number, require, shown, whole_number
from vram.errors import ConfigError
from vram.sizes import format_size, parse_size

__all__ = [
    *("OPTIONS", "Config", "Option", "limit_bytes", "parse_pool_options", "spill_bytes", "split_settings"),
]

Scope: TypeAlias = Literal["core", "pool", "manager"]
"""Where an option applies: "core" options go to the native pool (and replay), "pool" options stay in Python,
"manager" options belong to `vram.configure` and the process-wide manager."""

MIB = 1 << 20
MAX_COUNT = 2**32 - 1
MAX_JOURNAL = 2**24
"""Maximum number of events in the journal of each stream: 1 GiB."""
PAGE_SIZES = (2 * MIB, 8 * MIB, 32 * MIB)
UNLIMITED = -1
AUTO = "auto"
AUTO_SHARE = 2
"""`spill="auto"` takes at most one in this many bytes of the free host memory."""
LOCAL_PROCESSES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""Variables in which launchers tell a process how many of its kind share the host."""
KEPT_FREE = 1 / 64
"""The share of the memory that spilling keeps free at the peak of a step of PyTorch, for rounding and
fragments."""
NO_THRESHOLD = 2**64 - 1
"""What `Pool.config()` returns as the release threshold if there is none."""
DEFAULT_WARMUP = ((4 << 10, 50), (64 << 10, 20), (1 * MIB, 10))
"""What VRAM_WARMUP=1 prepares if no sizes are given: (bytes, blocks)."""


# ---- parsers: from what the user wrote to a value; ValueError or TypeError if it is invalid --------------


def _size(value: Any) -> int:
    return parse_size(value)


def _bool(value: Any) -> bool:
    if isinstance(value, str):
        value = {"true": 1, "yes": 1, "on": 1, "1": 1, "false": 0, "no": 0, "off": 0, "0": 0}[value.lower()]
    if value not in (0, 1):
        raise ValueError
    return bool(value)


def _count(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = int(value) if isinstance(value, str) else operator.index(value)
    if not 0 <= number <= MAX_COUNT:
        raise ValueError
    return number


def _journal(value: Any) -> int:
    number = _count(value)
    if number > MAX_JOURNAL:
        raise ValueError
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    number = float(value) if isinstance(value, str) else value
    return real_number(number, "the number", least=-sys.float_info.max, most=sys.float_info.max)


def _share(value: Any) -> float:
    number = _number(value)
    if not 0 <= number <= 1:
        raise ValueError
    return number


def _factor(value: Any) -> float:
    number = _number(value)
    if number < 1:
        raise ValueError
    return number


def _choice(*names: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return read


def _limit(value: Any) -> int | float:
    """Parse bytes as an int (0: no limit), or a fraction of the device as a float in (0, 1]."""
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return 0
    share = _written_share(value)
    if share is None:
        return parse_size(value)
    if not 0 < share <= 1:
        raise ValueError
    return share


def _written_share(value: Any) -> float | None:
    """Return the number for 0.9 or "0.9"; None for what means bytes: 1, 2e9, "1", "1.5GiB"."""
    if isinstance(value, float):
        return value if value <= 1 else None
    if isinstance(value, str) and "." in value and value.replace(".", "", 1).isdecimal():
        return float(value)
    return None


def _release_threshold(value: Any) -> int:
    if value is None or value == UNLIMITED or (isinstance(value, str) and value.lower() in ("none", "-1")):
        return UNLIMITED
    return parse_size(value)


def _spill(value: Any) -> int | str:
    """Parse bytes of host memory (0: none), or "auto"."""
    word = value.lower() if isinstance(value, str) else value
    if word in (None, "none"):
        return 0
    if word == AUTO:
        return AUTO
    if _written_share(value):  # as in limit=0.5; it would be less than a byte
        raise ValueError
    return parse_size(value)


def _page(value: Any) -> int:
    size = parse_size(value)
    if size not in PAGE_SIZES:
        raise ValueError
    return size


def _stacks(value: Any) -> str:
    return _choice("none", "python")("none" if value is None else value)


def _strategy(value: Any) -> str:
    return _choice("best_fit", "good_fit")(value)


def _warmup(value: Any) -> tuple[tuple[int, int], ...]:
    """Parse (bytes, blocks) from pairs, a dict or a string "4KiB:50,64KiB:20", optionally in []."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = split_settings(value.strip().removeprefix("[").removesuffix("]"))
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((parse_size(size), _count(count)) for size, count in pairs)


def _cache_sizes(value: Any) -> dict[str, int]:
    known: dict[str, Callable[[Any], int]] = {"stream_local": _count, "global": _global_cache}
    if not isinstance(value, Mapping) or not set(value) <= set(known):
        raise TypeError
    return {name: known[name](count) for name, count in value.items()}


def _global_cache(value: Any) -> int:
    """Parse the bytes of unused memory to keep; a bare number counts pages of the smallest size."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _count(value) * PAGE_SIZES[0]
    return _release_threshold(value)


# ---- the table --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One setting: how to parse it, its default, the values it accepts, and what it does."""

    name: str
    scope: Scope
    read: Callable[[Any], Any]
    default: object
    takes: str
    doc: str
    live: bool = True
    """Whether it can change while a pool is in use."""


_BOOL = "true or false"
_SIZE = 'bytes, as an int or a string such as "512MiB"'
_COUNT = f"an integer from 0 to {MAX_COUNT}"
_SHARE = "a number from 0 to 1"

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("limit", "core", _limit, 0,
               'bytes, a string such as "20GiB", a fraction of the device above 0 and at most 1.0, or none',
               "maximum memory to reserve from the device"),
        Option("cross_stream", "core", _choice("ready", "wait", "never"), "ready", "ready, wait or never",
               "when memory freed on one stream may be reused by another"),
        Option("pages", "core", _bool, True, _BOOL, "map pages if the device supports it", live=False),
        Option("best_fit", "core", _bool, True, _BOOL,
               "in plain segments, use the best-fitting block instead of the first that fits"),
        Option("segment_size", "core", _size, 0, _SIZE, "minimum size of one allocation from the device"),
        Option("max_page", "core", _page, 32 * MIB, "2MiB, 8MiB or 32MiB", "largest page to create"),
        Option("stream_cache", "core", _count, 4096, _COUNT, "maximum blocks in the cache of each stream"),
        Option("release_threshold", "core", _release_threshold, UNLIMITED, _SIZE + ", or none",
               "release unused memory above this: with every free, when the host waits, once a second"),
        Option("journal", "core", _journal, 0, f"an integer from 0 to {MAX_JOURNAL}",
               "number of events to keep for each stream", live=False),
        Option("zero_on_allocate", "core", _bool, False, _BOOL, "fill new allocations with zeros"),
        Option("zero_on_free", "core", _bool, False, _BOOL, "fill freed memory with zeros"),
        Option("spill", "core", _spill, 0, _SIZE + ", auto (a safe share of the free host memory) or none",
               "maximum host memory to move cold memory to when the device is full"),
        Option("stacks", "pool", _stacks, "none", "none or python",
               "record the Python stack of every allocation, for leaks()", live=False),
        Option("enable_warmup", "manager", _bool, None, _BOOL,
               "fill the caches of new pools with blocks; on by default if warmup_sizes is set"),
        Option("warmup_sizes", "manager", _warmup, (), "pairs of size and count, such as [4KiB:50,1MiB:10]",
               "blocks to prepare"),
        Option("enable_stats", "manager", _bool, False, _BOOL,
               "keep a journal, for allocation traces and patterns"),
        Option("allocation_strategy", "manager", _strategy, "best_fit", "best_fit or good_fit",
               "alias for best_fit:true or best_fit:false"),
        Option("cache_sizes", "manager", _cache_sizes, {}, "a dict with stream_local and global",
               "alias for stream_cache (blocks) and release_threshold (2 MiB pages, or a size)"),
        Option("coalescing_threshold", "manager", _share, 0.3, _SHARE,
               "merge cached blocks in pools whose fragmentation is above this"),
        Option("adaptive", "manager", _bool, False, _BOOL,
               "once a second: release unused memory under pressure, else expand the caches"),
        Option("pressure_high", "manager", _share, 0.8, _SHARE,
               "release unused memory when live memory is above this fraction"),
        Option("pressure_low", "manager", _share, 0.3, _SHARE,
               "expand the caches when live memory is below this fraction"),
        Option("expand_factor", "manager", _factor, 1.5, "a number of at least 1", "factor of expansion"),
        Option("adapt_every", "manager", _count, 256, _COUNT,
               "operations of the manager between two more checks"),
    )
}  # fmt: skip
"""All options by name."""

VARIABLES = {
    "VRAM_SEGMENT_SIZE": "segment_size",
    "VRAM_CACHE_SIZE": "stream_cache",
    "VRAM_WARMUP": "enable_warmup",
    "VRAM_STATS": "enable_stats",
}
"""Environment variables that set one option each. VRAM_WARMUP also accepts the sizes themselves."""

ALIASES = ("allocation_strategy", "cache_sizes")
"""Options that are aliases; a `Config` stores the options they stand for."""

OTHER_NAMES = {"idle_limit": "release_threshold"}
"""Earlier names of options, which are accepted as well."""

EVERYWHERE: tuple[Scope, ...] = ("core", "pool", "manager")


def read_options(
    settings: Mapping[str, object], scopes: Iterable[Scope] = EVERYWHERE, *, source: str = ""
) -> dict[str, Any]:
    """Return `settings` with every value parsed; ConfigError names the problem and the valid values."""
    named = require(settings, Mapping, "settings")  # type: ignore[type-abstract]
    read: dict[str, Any] = {}
    for given, value in named.items():
        name: Any = OTHER_NAMES.get(given, given)
        if name in read:
            raise ConfigError(
                f"{_prefix(source)}{name} is given twice: {given} is another name for it", option=name
            )
        read[name] = _read(_option(name, scopes, source), value, source)
    return read


def _option(name: str, scopes: Iterable[Scope], source: str) -> Option:
    scopes = tuple(scopes)
    option = OPTIONS.get(name)
    if option is not None and option.scope in scopes:
        return option
    valid = sorted(known for known, other in OPTIONS.items() if other.scope in scopes)
    raise ConfigError(
        f"{_prefix(source)}{_why_unknown(name, option, valid)} Valid options: {', '.join(valid)}.",
        option=name,
        valid=valid,
    )


def _why_unknown(name: str, option: Option | None, valid: list[str]) -> str:
    if option is not None and option.scope == "manager":
        return f"{name} is an option of the memory manager; set it with vram.configure."
    if option is not None:
        return f"{name} is an option of vram.Pool and does not apply here."
    close = difflib.get_close_matches(str(name), valid, n=1)
    return f"unknown option {shown(name)}" + (f"; did you mean {close[0]}?" if close else ".")


def _read(option: Option, value: object, source: str) -> Any:
    try:
        return option.read(value)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigError(
            f"{_prefix(source)}{option.name} cannot be {shown(value)}; valid: {option.takes} ({option.doc}).",
            option=option.name,
            value=value,
        ) from error


def _prefix(source: str) -> str:
    return f"{source}: " if source else ""


def split_settings(text: str, source: str = "") -> dict[str, str]:
    """Split `key:value,key:[a:1,b:2]` into a dict of strings, with the grammar of PYTORCH_ALLOC_CONF."""
    settings: dict[str, str] = {}
    require(text, str, "settings")
    for entry in filter(None, (part.strip() for part in _split_outside_brackets(text))):
        key, colon, value = (part.strip() for part in entry.partition(":"))
        if not (key and colon and value):
            raise ConfigError(
                f"{_prefix(source)}{shown(entry)} is not key:value; write key:value,key:value", value=text
            )
        settings[key] = value
    return settings


def _split_outside_brackets(text: str) -> Iterator[str]:
    start = depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def limit_bytes(limit: float, total: int | None) -> int:
    """Return a limit in bytes, 0 for none. A fraction refers to the `total` bytes of the device."""
    if hasattr(limit, "__index__"):
        return whole_number(limit, "limit")
    if not total:
        raise ConfigError(
            f"limit cannot be {limit}: a fraction needs a device with a known capacity; use bytes instead",
            option="limit",
            value=limit,
        )
    return max(1, int(limit * total))


def spill_bytes(spill: int | str, promised: int = 0) -> int:
    """Return the bytes of host memory that a pool may spill to.

    With "auto", it shares the host with other processes of the same job, and leaves to other pools what was
    `promised` to them.
    """
    promised = whole_number(promised, "promised")
    if spill != AUTO:
        return whole_number(spill, "spill")
    return max(0, free_host_memory() // _local_processes() - promised) // AUTO_SHARE


def _local_processes() -> int:
    counts = (os.environ.get(name, "") for name in LOCAL_PROCESSES)
    return max(1, next((int(count) for count in counts if re.fullmatch("[0-9]{1,6}", count)), 1))


def free_host_memory() -> int:
    """Return the bytes of memory that the system says are available, within the limit of a container."""
    free = [0]
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as lines:
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with (
        contextlib.suppress(OSError, ValueError),
        open("/sys/fs/cgroup/memory.max") as limit,
        open("/sys/fs/cgroup/memory.current") as used,
    ):
        free.append(max(0, int(limit.read()) - int(used.read())))
    return min(free)


def parse_pool_options(
    settings: Mapping[str, object], *, capacity: int | None = None, promised: int = 0
) -> dict[str, object]:
    """Return pool settings as the native core takes them. Only given ones are included, so none is reset.

    `capacity` is the size of the device in bytes, for a limit given as a fraction of it; `promised` is host
    memory that other pools may spill to.
    """
    options: dict[str, object] = read_options(settings, ("core",))
    promised = whole_number(promised, "promised")
    if "limit" in options:
        options["limit"] = limit_bytes(options["limit"], capacity)  # type: ignore[arg-type]
    if "spill" in options:
        options["spill"] = spill_bytes(options["spill"], promised)  # type: ignore[arg-type]
    return options


class Config(Mapping[str, Any]):
    """The effective settings: keyword arguments, then VRAM_CONF, then single variables, then defaults.

    Setting one option never resets another. The environment is read once, when the object is created.
    """

    def __init__(
        self,
        given: Mapping[str, object] | None = None,
        scopes: Iterable[Scope] = EVERYWHERE,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Parse and check everything; raise ConfigError if something is wrong."""
        environ = os.environ if environ is None else require(environ, Mapping, "environ")  # type: ignore[type-abstract]
        self._scopes = tuple(scopes)
        self._environment, self._variables = _from_environment(environ)
        self._given: dict[str, Any] = {}
        self.set({} if given is None else given)

    def set(self, settings: Mapping[str, object]) -> dict[str, Any]:
        """Set options and return the parsed values. If one is wrong, nothing changes."""
        read = _without_aliases(read_options(settings, self._scopes))
        self._given.update(read)
        return read

    def core_options(self, total: int, promised: int = 0) -> dict[str, object]:
        """Return every option of the native pool, for a device of `total` bytes.

        `promised` is host memory that other pools may spill to.
        """
        options = {name: self[name] for name, option in OPTIONS.items() if option.scope == "core"}
        limit, spill = limit_bytes(options["limit"], total), spill_bytes(options["spill"], promised)
        return {**options, "limit": limit, "spill": spill}

    def is_set(self, name: str) -> bool:
        """Return whether the option was set explicitly."""
        return name in self._given or name in self._environment

    def origin(self, name: str) -> str:
        """Return the source of the value: "keyword", the name of an environment variable, or "default"."""
        return "keyword" if name in self._given else self._variables.get(name, "default")

    def __getitem__(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        if name in self._environment:
            return self._environment[name]
        return OPTIONS[name].default

    def __iter__(self) -> Iterator[str]:
        names = (name for name, option in OPTIONS.items() if option.scope in self._scopes)
        return (name for name in names if name not in ALIASES)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        chosen = {name: self[name] for name in self if self.is_set(name)}
        return f"Config({', '.join(f'{name}={_shown(value)}' for name, value in chosen.items())})"


def _shown(value: object) -> str:
    return format_size(value).replace(" ", "") if type(value) is int and value >= MIB else repr(value)


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options set by the environment, and the variable that sets each."""
    settings: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for variable, name in VARIABLES.items():
        if text := environ.get(variable, "").strip():
            if variable == "VRAM_WARMUP" and ":" in text:
                read = read_options({"warmup_sizes": text, "enable_warmup": True}, source=variable)
            else:
                read = {name: _read(OPTIONS[name], text, variable)}
            settings.update(read)
            variables.update(dict.fromkeys(read, variable))
    conf = read_options(split_settings(environ.get("VRAM_CONF", ""), "VRAM_CONF"), source="VRAM_CONF")
    plain = _without_aliases(conf)
    return {**settings, **plain}, {**variables, **dict.fromkeys(plain, "VRAM_CONF")}


def _without_aliases(options: dict[str, Any]) -> dict[str, Any]:
    """Replace aliases by the options they stand for."""
    plain = dict(options)
    strategy, caches = plain.pop("allocation_strategy", None), plain.pop("cache_sizes", {})
    if strategy is not None:
        plain.setdefault("best_fit", strategy == "best_fit")
    for part, name in (("stream_local", "stream_cache"), ("global", "release_threshold")):
        if part in caches:
            plain.setdefault(name, caches[part])
    return plain
