"""How PyTorch's allocator computes the sizes of blocks and segments, for reading its recordings.

Events have requested sizes; blocks are larger. The recording says which block served a request; `vram.replay`
answers what another setting would have done.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LARGE_PAGE", "SMALL_LIMIT", "SMALL_PAGE", "Rules", "segment_bytes", "whole_pages"]

GRANULE = 512
SMALL_LIMIT = 1 << 20
"""Requests up to this use small segments; a remainder up to this is not split off a large block."""
SMALL_PAGE = 2 << 20
LARGE_PAGE = 20 << 20
"""The sizes of small segments and of large ones for several requests; of pages if expandable."""
LARGE_REQUEST = 10 << 20


def segment_bytes(size: int) -> int:
    """What is reserved from the device if no free block serves `size`."""
    if size <= SMALL_LIMIT:
        return SMALL_PAGE
    if size < LARGE_REQUEST:
        return LARGE_PAGE
    return whole_pages(size)


def whole_pages(size: int) -> int:
    """`size`, rounded up to whole small pages."""
    return -(-size // SMALL_PAGE) * SMALL_PAGE


class Rules:
    """The rules under the settings of one recording."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Read the settings that change sizes: divisions of powers of two, and a bound on splitting."""
        divisions = settings.get("roundup_power2_divisions")
        self._divisions = _by_power(divisions) if isinstance(divisions, Mapping) else ()
        bound = settings.get("max_split_size")
        self.max_split = bound if isinstance(bound, int) and bound > 0 else None

    def rounded(self, size: int) -> int:
        """The bytes of a block that was split off for a request of `size`."""
        divisions = self._divisions_for(size)
        if divisions > 1 and size > GRANULE * divisions:
            step = max(1, (1 << (size.bit_length() - 1)) // divisions)
            return -(-size // step) * step
        return max(GRANULE, -(-size // GRANULE) * GRANULE)

    def keeps_rest(self, rounded: int, rest: int) -> bool:
        """Whether a block of a large segment keeps the remainder of the free block it was taken from."""
        return rest <= SMALL_LIMIT or (self.max_split is not None and rounded >= self.max_split)

    def _divisions_for(self, size: int) -> int:
        if not self._divisions or size <= 0:
            return 0
        return self._divisions[min(max(size.bit_length() - 21, 0), len(self._divisions) - 1)]


def _by_power(divisions: Mapping[object, object]) -> tuple[int, ...]:
    """The divisions for 1 MiB, 2 MiB, 4 MiB, …; empty if none are set."""
    values = [value if isinstance(value, int) else 0 for value in divisions.values()]
    return tuple(values) if any(values) else ()
