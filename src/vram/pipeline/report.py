"""The report of a pipeline: the spans of each lane, their sums, the share of the ideal time, and what limited
the run. Only numbers, texts and drawings; the pipeline measures (`vram.pipeline.pipeline`).
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vram.sizes import format_count, format_size

__all__ = ["LANES", "PipelineReport", "Span", "compute_lane", "lanes_of", "peer_lane"]

LANES = ("stage in", "upload", "compute", "download", "stage out")
"""The steps of a chunk, in order. Staging copies between pageable and pinned memory on the host."""
_HOST_LANES = ("stage in", "stage out")
MOST_SPANS = 20_000
"""Maximum number of spans in a report; of longer runs it keeps the first ones, and the sums of all."""
BUSY = 0.85
"""A lane that is busy for this share of the time limits the run."""
PICTURE_CHUNKS = 16
PICTURE_WIDTH = 72


class Span(NamedTuple):
    """One chunk in one lane: milliseconds since the start of the run, and the bytes moved."""

    chunk: int
    lane: str
    begin_ms: float
    end_ms: float
    size: int


@dataclass
class PipelineReport:
    """The report of one run of a pipeline. Print it, or read its attributes; times are in milliseconds."""

    device: str
    like: str
    depth: int
    chunks: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    smallest_chunk: int = 0
    largest_chunk: int = 0
    total_ms: float = 0.0
    input_ms: float = 0.0
    consumer_ms: float = 0.0
    host_ms: float = 0.0
    sums_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    sums_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LANES, 0))
    spans: list[Span] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    compute_streams: int = 1
    lanes: tuple[str, ...] = LANES

    # ---- filled in by the pipeline ----------------------------------------------------------------------

    def add_chunk(self, size: int, spans: Iterable[Span]) -> None:
        """Count one completed chunk of `size` bytes of input."""
        self.chunks += 1
        self.bytes_in += size
        self.smallest_chunk = size if self.chunks == 1 else min(self.smallest_chunk, size)
        self.largest_chunk = max(self.largest_chunk, size)
        for span in spans:
            self.sums_ms[span.lane] += span.end_ms - span.begin_ms
            self.sums_bytes[span.lane] += span.size
            self.total_ms = max(self.total_ms, span.end_ms)
            self.bytes_out += span.size if span.lane == "download" else 0
            if len(self.spans) < MOST_SPANS:
                self.spans.append(span)

    # ---- derived numbers --------------------------------------------------------------------------------

    @property
    def ideal_ms(self) -> float:
        """The longest of all uploads, all computing and all downloads: the time with perfect overlap.

        With several compute streams, computing counts as if all of them were busy all the time.
        """
        return max(self._lane_ms(lane) for lane in self._device_lanes())

    def _lane_ms(self, lane: str) -> float:
        """The time of a lane; chunks share the time of several compute streams."""
        return self.sums_ms[lane] / (self.compute_streams if lane.startswith("compute") else 1)

    def _device_lanes(self) -> list[str]:
        return [lane for lane in self.lanes if lane not in _HOST_LANES]

    @property
    def fraction_of_ideal(self) -> float:
        """Ideal time divided by actual time, from 0 to 1; 1 for a run without chunks."""
        return min(1.0, self.ideal_ms / self.total_ms) if self.total_ms else 1.0

    @property
    def overlap(self) -> float:
        """The overlapped share of the time that could overlap with the longest lane, from 0 to 1."""
        sums = [self._lane_ms(lane) for lane in self._device_lanes()]
        could = sum(sums) - max(sums)
        return max(0.0, min(1.0, (sum(sums) - self.total_ms) / could)) if could > 0 else 1.0

    @property
    def bandwidths(self) -> dict[str, float]:
        """GB/s of each lane that moved bytes, while it was busy."""
        return {
            lane: self.sums_bytes[lane] / self.sums_ms[lane] / 1e6
            for lane in self.lanes
            if self.sums_bytes[lane] and self.sums_ms[lane] > 0
        }

    @property
    def busy(self) -> dict[str, float]:
        """The share of the time for which each lane was busy, and that the host spent queuing and outside."""
        total = self.total_ms or 1.0
        shares = {lane: self._lane_ms(lane) / total for lane, spent in self.sums_ms.items() if spent}
        host = (("host", self.host_ms), ("input", self.input_ms), ("consumer", self.consumer_ms))
        for name, spent in host:
            if spent / total > 0.01:
                shares[name] = min(1.0, spent / total)
        return shares

    @property
    def limit(self) -> str:
        """What was busy nearly all the time: a lane, "host", "input" or "consumer"; "" if nothing was."""
        busy = self.busy
        most = max(busy, key=busy.__getitem__, default="")
        return most if most and busy[most] >= BUSY else ""

    def explain(self) -> str:
        """Return one sentence: what limits the run and what to do about it."""
        limit = self.limit
        if not self.chunks:
            return "The pipeline processed no data."
        if limit:
            return f"Limited by {limit} ({self.busy[limit]:.0%} of the time): {_REMEDIES[_base(limit)]}"
        if self.chunks <= 2 * self.depth:
            return (
                f"No lane was busy all the time: with {format_count(self.chunks, 'chunk')}, filling and "
                "draining take much of the time. Use smaller chunks."
            )
        return (
            "No lane was busy all the time: chunks wait for each other. Use a greater depth, or larger "
            "chunks if each takes only microseconds."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON; `spans` are the data of a drawing."""
        names = (
            *("device", "like", "depth", "compute_streams"),
            *("chunks", "bytes_in", "bytes_out", "smallest_chunk", "largest_chunk"),
            *("total_ms", "ideal_ms", "fraction_of_ideal", "overlap", "input_ms", "consumer_ms", "host_ms"),
        )
        return {
            **{name: getattr(self, name) for name in names},
            "lanes": [
                {
                    "lane": lane,
                    "ms": self.sums_ms[lane],
                    "bytes": self.sums_bytes[lane],
                    "gb_s": self.bandwidths.get(lane),
                }
                for lane in self._lanes()
            ],
            "busy": self.busy,
            "limit": self.limit,
            "explanation": self.explain(),
            "measured": dict(self.measured),
            "spans": [span._asdict() for span in self.spans],
        }

    # ---- drawings ---------------------------------------------------------------------------------------

    def _lanes(self) -> list[str]:
        used = {span.lane for span in self.spans}  # a step may be too short for the clock
        device = self._device_lanes()
        return [lane for lane in self.lanes if self.sums_ms[lane] or lane in used or lane in device]

    def _shown(self) -> tuple[list[Span], float]:
        """Return the spans that fit into a drawing, and the end of its time."""
        spans = [span for span in self.spans if span.chunk < PICTURE_CHUNKS]
        return spans, max((span.end_ms for span in spans), default=0.0)

    def _picture(self) -> Iterable[tuple[str, str]]:
        """Yield each lane with its line: the last digit of the chunk there, a dot where it is idle."""
        spans, end = self._shown()
        for lane in self._lanes():
            cells = ["·"] * PICTURE_WIDTH
            for span in spans if end else ():
                if span.lane == lane:
                    first = int(span.begin_ms / end * PICTURE_WIDTH)
                    last = max(first + 1, round(span.end_ms / end * PICTURE_WIDTH))
                    for cell in range(min(first, PICTURE_WIDTH - 1), min(last, PICTURE_WIDTH)):
                        cells[cell] = str(span.chunk % 10)
            yield lane, "".join(cells)

    def _lines(self) -> Iterable[tuple[str, str]]:
        """Yield lines of text, each with the name of a style."""
        sizes = format_size(self.largest_chunk)
        if self.smallest_chunk != self.largest_chunk:
            sizes = f"{format_size(self.smallest_chunk)} to {sizes}"
        yield (
            f"{format_count(self.chunks, 'chunk')} of {sizes} on {self.device} ({self.like}, depth "
            f"{self.depth}): {self.total_ms:.2f} ms, {self.fraction_of_ideal:.1%} of the ideal "
            f"{self.ideal_ms:.2f} ms, {self.overlap:.0%} overlapped",
            "bold",
        )
        for lane in self._lanes():
            speed = self.bandwidths.get(lane)
            moved = f"  {format_size(self.sums_bytes[lane]):>10}  {speed:6.1f} GB/s" if speed else ""
            yield f"  {lane:10} {self.sums_ms[lane]:10.2f} ms {self.busy.get(lane, 0.0):5.0%}{moved}", ""
        yield self.explain(), ""
        spans, end = self._shown()
        if spans:
            part = "" if self.chunks <= PICTURE_CHUNKS else f" of the first {PICTURE_CHUNKS} chunks"
            yield f"timeline{part}, 0 to {end:.2f} ms:", ""
            for lane, line in self._picture():
                yield f"  {lane:10} {line}", lane

    def __str__(self) -> str:
        return "\n".join(line for line, _ in self._lines())

    def __rich__(self) -> str:
        """Return the same with colors, for rich consoles."""
        colours = dict(zip(_DRAWN, ("yellow", "blue", "green", "cyan", "magenta", "yellow"), strict=True))
        lines = []
        for line, style in self._lines():
            wanted = colours.get(_base(style), style)
            text = line.replace("[", "\\[")
            lines.append(f"[{wanted}]{text}[/{wanted}]" if wanted else text)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return a small drawing for notebooks."""
        spans, end = self._shown()
        return _svg(self._lanes(), spans, end, str(next(iter(self._lines()))[0]), self.explain())


_REMEDIES = {
    "stage in": "copies into pinned memory run at full speed; pass pinned input (vram.pin or a "
    "PinnedPool), which needs no staging.",
    "upload": "the bus is saturated; send less data (a smaller dtype, compressed) or compute more per byte.",
    "compute": "the device computes all the time; copies are fully hidden.",
    "peer copy": "the link between the devices is saturated; pass less data from one to the next.",
    "download": "the bus is saturated; return less data, or reduce it on the device.",
    "stage out": "copies out of pinned memory run at full speed; pass a pinned out.",
    "host": "queuing the work takes longer than running it; use larger chunks.",
    "input": "batches arrive too slowly; prepare them on other threads.",
    "consumer": "the loop over the results takes longer than computing them.",
}
_DRAWN = ("stage in", "upload", "compute", "peer copy", "download", "stage out")
_COLOURS = dict(zip(_DRAWN, ("#d9a441", "#4c78a8", "#54a24b", "#72b7b2", "#b279a2", "#d9a441"), strict=True))


def lanes_of(stages: int) -> tuple[str, ...]:
    """The lanes of a pipeline with that many functions, each on its own device."""
    first, last = LANES[:3], LANES[3:]
    more = [lane for stage in range(2, stages + 1) for lane in (peer_lane(stage), compute_lane(stage))]
    return (*first, *more, *last)


def compute_lane(stage: int) -> str:
    """The lane of a function, counted from 1."""
    return "compute" if stage == 1 else f"compute {stage}"


def peer_lane(stage: int) -> str:
    """The lane of the copies to the device of a function, counted from 1."""
    return "peer copy" if stage == 2 else f"peer copy {stage - 1}"


def _base(lane: str) -> str:
    return lane.rstrip("0123456789").rstrip()


def _svg(lanes: Sequence[str], spans: Sequence[Span], end: float, title: str, text: str) -> str:
    left, width, height = 80, 720, 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 10}" '
        f'height="{len(lanes) * height + 20}" font-family="sans-serif" font-size="11">'
    ]
    for row, lane in enumerate(lanes):
        parts.append(f'<text x="0" y="{row * height + 15}">{html.escape(lane)}</text>')
    for span in spans if end else ():
        x = left + span.begin_ms / end * width
        wide = max(1.0, (span.end_ms - span.begin_ms) / end * width)
        y = lanes.index(span.lane) * height + 3
        label = f"chunk {span.chunk}, {span.lane}: {span.begin_ms:.3f} to {span.end_ms:.3f} ms"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height - 6}" '
            f'fill="{_COLOURS[_base(span.lane)]}" stroke="white" stroke-width="0.5">'
            f"<title>{html.escape(label)}</title></rect>"
        )
    parts.append(f'<text x="{left}" y="{len(lanes) * height + 15}">0 to {end:.2f} ms</text></svg>')
    return f"<p>{html.escape(title)}</p>{''.join(parts)}<p>{html.escape(text)}</p>"
