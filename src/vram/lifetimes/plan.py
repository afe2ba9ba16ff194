"""Static memory planning: a fixed offset for each buffer of a set with known lifetimes.

Converts recordings, rows, columns and CSV into lifetimes, and returns the result of the native planner.
`trace` reads recordings; the front ends print tables.
"""

from __future__ import annotations

import csv
import importlib
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from vram.arguments import whole_number
from vram.errors import ConfigError, DeviceError, TraceError
from vram.sizes import format_size, parse_size
from vram.trace import ALLOCATE, AT_ONCE, Lifetimes, Trace, lifetimes

__all__ = ["Plan", "Row", "plan", "read_csv"]

SEARCH_SECONDS = 9.0
"""Default time limit if a capacity must be met."""
SECONDS, MORE_SECONDS, MANY_BUFFERS = 0.8, 4.0, 20_000
"""Default time limits for minimizing memory, for few and for many buffers."""
MAX_BYTES = 2**62
"""The total size of all buffers must stay below this."""
COLUMNS = ("lower", "upper", "size")
HEADER = ["id", *COLUMNS]

Row = tuple[Hashable, int, int, int]


@dataclass(frozen=True, repr=False)
class Plan:
    """The offset of each buffer. All sizes are bytes; `offsets` is keyed by the ids of the buffers.

    - `peak`: the memory the plan needs; `lower_bound`: the maximum that is live at one time, a lower bound
      for every plan; both count sizes rounded up to `align`; `ratio` is `peak / lower_bound`
    - `method`: how it was found; `proven`: no smaller plan exists (with a `capacity`: none that fits)
    - `feasible`: whether `peak` is within `capacity`; True without a capacity
    """

    ids: tuple[Hashable, ...]
    lower: array[int]
    upper: array[int]
    size: array[int]
    offset: array[int]
    align: int
    capacity: int | None
    peak: int
    lower_bound: int
    method: str
    proven: bool
    seconds: float

    @property
    def offsets(self) -> dict[Hashable, int]:
        """The offset of each buffer."""
        return dict(zip(self.ids, self.offset, strict=True))

    @property
    def ratio(self) -> float:
        """Peak ÷ lower bound; 1.0 is optimal."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

    @property
    def feasible(self) -> bool:
        """Whether the plan fits the requested capacity."""
        return self.capacity is None or self.peak <= self.capacity

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return (
            f"<Plan of {len(self)} buffers: {format_size(self.peak)}, {self.ratio:.4f} of the lower bound, "
            f"by {self.method or 'nothing to do'}>"
        )

    def _repr_html_(self) -> str:
        from vram.core.html import plan_html

        return plan_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data; the format is part of the command line's contract."""
        names = ("peak", "lower_bound", "ratio", "seconds", "method", "feasible", "proven")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raise AssertionError if two buffers overlap while both are live, or if one exceeds the peak."""
        changes = sorted(
            (moment, starts, index)
            for index in range(len(self))
            if self.size[index]
            for moment, starts in ((self.lower[index], True), (self.upper[index], False))
        )
        live: list[tuple[int, int]] = []  # offset and index, sorted
        for _, starts, index in changes:
            offset, top = self.offset[index], self.offset[index] + self.size[index]
            place = bisect_left(live, (offset, index))
            if not starts:
                live.pop(place)
                continue
            if offset % self.align or top > self.peak:
                raise AssertionError(f"buffer {self.ids[index]!r} at {offset} is outside the plan")
            for other in (each for _, each in live[max(place - 1, 0) : place + 1]):
                if self.offset[other] < top and offset < self.offset[other] + self.size[other]:
                    raise AssertionError(f"buffers {self.ids[index]!r} and {self.ids[other]!r} overlap")
            live.insert(place, (offset, index))

    def picture(self, width: int = 960, height: int = 540) -> str:
        """Return the layout as SVG: time to the right, offsets upwards, one rectangle per buffer."""
        width, height = (
            whole_number(length, name, least=1, most=MOST_PIXELS)
            for length, name in ((width, "width"), (height, "height"))
        )
        begin = min(self.lower, default=0)
        across = width / max(max(self.upper, default=1) - begin, 1)
        up = height / max(self.peak, 1)
        shapes = [
            f'<rect x="{(lower - begin) * across:.2f}" y="{height - (offset + size) * up:.2f}" '
            f'width="{(upper - lower) * across:.2f}" height="{size * up:.2f}" '
            f'fill="hsl({index * 137 % 360},55%,65%)"><title>{escape(str(identity))}: {format_size(size)} '
            f"at {offset}, from {lower} to {upper}</title></rect>"
            for index, (identity, lower, upper, size, offset) in enumerate(
                zip(self.ids, self.lower, self.upper, self.size, self.offset, strict=True)
            )
        ]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" stroke="#333" '
            f'stroke-width="0.3">\n<title>{len(self)} buffers in {format_size(self.peak)}</title>\n'
            + "\n".join(shapes)
            + "\n</svg>\n"
        )


MOST_PIXELS = 1 << 20
"""Maximum width and height of the image."""


def plan(
    buffers: Trace | Lifetimes | Mapping[str, Sequence[Any]] | Iterable[Row],
    *,
    align: int | str = 512,
    capacity: int | str | None = None,
    time_limit: float | None = None,
    between: range | None = None,
    seed: int = 0,
) -> Plan:
    """Find offsets for `buffers` that use as little memory as the time limit allows.

    `buffers` are rows of (id, lower, upper, size), each live from `lower` to `upper`, excluding `upper`; or
    columns with these names (`id` is optional); or a trace. `between` selects events of a trace: everything
    live in them is planned for as long as it is live there. Planning ends when the peak reaches the lower
    bound or `capacity`, or after `time_limit` seconds (default: about one, a few for many buffers, and nine
    with a capacity). The same input and `seed` give the same plan, unless the time limit ends the search.
    """
    start = time.perf_counter()
    ids, lower, upper, size = _columns(buffers, between)
    step, limit = parse_size(align), None if capacity is None else parse_size(capacity)
    _check(ids, lower, upper, size, step, time_limit)
    if time_limit is None:
        time_limit = _default_limit(len(ids), limit)
    answer = _native_plan()(lower, upper, size, step, limit or 0, time_limit, seed)
    offset = array("Q")
    offset.frombytes(answer["offsets"])
    return Plan(
        ids=ids,
        lower=lower,
        upper=upper,
        size=size,
        offset=offset,
        align=step,
        capacity=limit,
        peak=answer["peak"],
        lower_bound=answer["lower_bound"],
        method=answer["method"],
        proven=answer["proven"],
        seconds=time.perf_counter() - start,
    )


def read_csv(path: str | os.PathLike[str]) -> list[Row]:
    """Return the rows of a CSV whose first line names id, lower, upper and size."""
    file = os.fsdecode(path)
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            reader = csv.reader(lines)
            header = [name.strip().lower() for name in next(reader, [])]
            if not set(HEADER) <= set(header):
                raise TraceError(f"{file}: the first line must name {','.join(HEADER)}", place="line 1")
            places = [header.index(name) for name in HEADER]
            return [_row(file, reader.line_num, places, cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"failed to read {file}: {error}") from error


def _row(file: str, line: int, places: list[int], cells: list[str]) -> Row:
    try:
        identity, lower, upper, size = (cells[place].strip() for place in places)
        return identity, int(lower), int(upper), int(size)
    except (IndexError, ValueError):
        raise TraceError(
            f"{file}: line {line} is not an id followed by three integers", place=f"line {line}"
        ) from None


def _columns(
    buffers: Trace | Lifetimes | Mapping[str, Sequence[Any]] | Iterable[Row], between: range | None
) -> tuple[tuple[Hashable, ...], array[int], array[int], array[int]]:
    if isinstance(buffers, Trace):
        buffers = lifetimes(buffers)
    if isinstance(buffers, Lifetimes):
        rows: Iterable[Row] = _live_in(buffers, between)
    elif between is not None:
        raise ConfigError("between= is valid only for a trace")
    elif isinstance(buffers, Mapping):
        rows = _rows_of(buffers)
    else:
        rows = buffers
    ids: list[Hashable] = []
    lower, upper, size = array("q"), array("q"), array("Q")
    for row in rows:
        try:
            identity, begin, end, bytes_ = row
            lower.append(begin)
            upper.append(end)
            size.append(bytes_)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{row!r} is not a buffer; give (id, lower, upper, size)") from error
        ids.append(identity)
    return tuple(ids), lower, upper, size


def _rows_of(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise ConfigError(
            f"column {missing[0]!r} is missing; lower, upper and size are required, id is optional"
        )
    lower, upper, size = (columns[name] for name in COLUMNS)
    ids = columns.get("id", range(len(lower)))
    if len({len(ids), len(lower), len(upper), len(size)}) != 1:
        raise ConfigError(
            f"columns differ in length: {len(ids)}, {len(lower)}, {len(upper)} and {len(size)} entries"
        )
    return [
        (identity, int(begin), int(end), int(bytes_))
        for identity, begin, end, bytes_ in zip(ids, lower, upper, size, strict=True)
    ]


def _live_in(program: Lifetimes, between: range | None) -> list[Row]:
    """Time is counted in operations. A buffer that another stream delayed is live until it became free."""
    first, last = 0, len(program)
    if between is not None:
        first, last = (bisect_left(program.event, event) for event in (between.start, between.stop))
    sizes, begins = [0] * program.allocations, [0] * program.allocations
    ends = [len(program)] * program.allocations
    rows = zip(program.op, program.id, program.size, program.completed_event, strict=True)
    for position, (op, identity, bytes_, completed) in enumerate(rows):
        if op == ALLOCATE:
            sizes[identity], begins[identity] = bytes_, position
        elif completed == AT_ONCE:
            ends[identity] = position
        else:
            ends[identity] = max(position, bisect_left(program.event, completed))
    return [
        (identity, max(begin, first), min(end, last), bytes_)
        for identity, (begin, end, bytes_) in enumerate(zip(begins, ends, sizes, strict=True))
        if max(begin, first) < min(end, last)
    ]


def _check(
    ids: tuple[Hashable, ...],
    lower: array[int],
    upper: array[int],
    size: array[int],
    align: int,
    time_limit: float | None,
) -> None:
    if align < 1:
        raise ConfigError(f"align is {align}; it must be at least 1")
    if time_limit is not None and not time_limit >= 0:
        raise ConfigError(f"time_limit is {time_limit}; it must be 0 seconds or more")
    for identity, begin, end in zip(ids, lower, upper, strict=True):
        if begin >= end:
            raise ConfigError(f"buffer {identity!r} is live from {begin} to {end}; the end must be larger")
    if sum(size) + align * len(size) >= MAX_BYTES:
        raise ConfigError(f"the buffers have {sum(size)} bytes in total; a plan supports less than 4 EiB")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{len(ids)} buffers have only {len(set(ids))} different ids; ids must be unique")


def _default_limit(buffers: int, capacity: int | None) -> float:
    if capacity is not None:
        return SEARCH_SECONDS
    return MORE_SECONDS if buffers > MANY_BUFFERS else SECONDS


def _native_plan() -> Callable[..., Mapping[str, Any]]:
    try:
        native = importlib.import_module("vram._native")
    except ImportError as error:
        raise DeviceError(
            f"planning needs the native core, which is not built here ({error}). Linux on x86_64 and aarch64 "
            "has it: install vram with pip, or build it with `pip install .` in the source tree",
            call="import",
        ) from error
    function: Callable[..., Mapping[str, Any]] = native.plan
    return function
