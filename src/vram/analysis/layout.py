"""The layout of memory at one moment: segments and their pieces, not more than can be drawn.

Blocks and holes that are too small to see are joined with their neighbours into one mixed piece. Front ends
draw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vram.trace import Block, Segment

from .memory import Memory

__all__ = ["LaidOut", "Piece", "lay_out"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a segment at `offset`: one block, or several (`blocks`) and the holes between them.

    `held` are the bytes in use, `requested` the requested ones, `pending` those freed that may still be used.
    `stack`, `stream` and `event` are those of its largest block.
    """

    offset: int
    size: int
    held: int
    requested: int
    pending: int
    blocks: int
    stack: int
    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A segment and its pieces by address; the memory between them is free."""

    segment: Segment
    pieces: tuple[Piece, ...]


def lay_out(memory: Memory, most: int = 20_000) -> tuple[LaidOut, ...]:
    """Every segment with its pieces, joined until there are at most `most`, or one per segment."""
    blocks = sum(len(segment.blocks) for segment in memory.segments)
    fewest = sum(bool(segment.blocks) for segment in memory.segments)
    largest = max((segment.total_size for segment in memory.segments), default=0)
    least = 0 if blocks <= most else max(512, memory.reserved // most)
    while True:
        found = tuple(
            LaidOut(segment, tuple(_pieces(segment, least)) if least else tuple(_single(segment)))
            for segment in memory.segments
        )
        if least >= largest or sum(len(each.pieces) for each in found) <= max(most, fewest):
            return found
        least *= 2


def _single(segment: Segment) -> Iterator[Piece]:
    return (_piece(segment, [block]) for block in segment.blocks)


def _pieces(segment: Segment, least: int) -> Iterator[Piece]:
    """Joins blocks below `least` bytes up to that size, across holes below it."""
    small: list[Block] = []
    for block in segment.blocks:
        if small and not _joins(small, block, least):
            yield _piece(segment, small)
            small = []
        small.append(block)
    if small:
        yield _piece(segment, small)


def _joins(small: list[Block], block: Block, least: int) -> bool:
    start, end = small[0].address, small[-1].address + small[-1].size
    return block.address - end < least and block.address + block.size - start <= least


def _piece(segment: Segment, blocks: Iterable[Block]) -> Piece:
    held = tuple(blocks)
    largest = max(held, key=lambda block: block.size)
    start, end = held[0].address, held[-1].address + held[-1].size
    return Piece(
        offset=start - segment.address,
        size=end - start,
        held=sum(block.size for block in held),
        requested=sum(block.requested_size for block in held),
        pending=sum(block.size for block in held if block.pending),
        blocks=len(held),
        stack=largest.stack,
        stream=largest.stream,
        event=largest.event,
    )
