"""Random programs over one arena, against an oracle that is a list of what is live, and of what it holds.

On the host every array is filled with its own number and read back: what overlaps, moves or is allocated
too soon shows as a wrong number. On the model the addresses are compared. The high-water mark is computed by
the oracle, as is what may be used and what is over.
"""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import vram
from vram import Arena, Device, InvalidFree, OutOfMemory, Pool

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 24 * MIB
SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(0, 64 * KIB),
    st.sampled_from([MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB, 9 * MIB]),
)
ALIGNMENTS = st.sampled_from([None, None, None, 1, 8, 128, 4096])


class ArenaMachine(RuleBasedStateMachine):
    """The rules, and the oracle; a kind of device says how to make, mark and read what is taken."""

    align: int

    def begin(self, device: str | Device, **options: Any) -> None:
        self.pool = Pool(device, limit=LIMIT)
        self.arena = Arena(self.pool, **options)
        self.number = 0
        # Each scope's pieces, outermost first: (what was allocated, address, size, number).
        self.scopes: list[list[tuple[Any, int, int, int]]] = [[]]
        self.marks: list[tuple[Any, int]] = []  # the scope object, and what was used before it
        self.over: list[Any] = []
        self.offset = self.high = 0

    def take(self, size: int, align: int | None) -> tuple[Any, int]:
        raise NotImplementedError

    def verify(self, piece: Any, number: int) -> None: ...

    def live(self) -> list[tuple[Any, int, int, int]]:
        return [each for scope in self.scopes for each in scope]

    @rule(size=SIZES, align=ALIGNMENTS)
    def allocate(self, size: int, align: int | None) -> None:
        self.number = (self.number + 1) % 251
        try:
            piece, address = self.take(size, align)
        except OutOfMemory:
            # Honest only where the pool could not have had it; chunks are at most the limit in all.
            assert self.arena.capacity + size > LIMIT // 2
            return
        alignment = align or self.align
        assert address % alignment == 0
        self.offset = -(-self.offset // alignment) * alignment + max(size, 1)
        self.high = max(self.high, self.offset)
        self.scopes[-1].append((piece, address, size, self.number))

    @rule()
    def enter(self) -> None:
        scope = self.arena.scope()
        scope.__enter__()
        self.marks.append((scope, self.offset))
        self.scopes.append([])

    @precondition(lambda self: self.marks)
    @rule(levels=st.integers(1, 2))
    def leave(self, levels: int) -> None:
        del self.marks[
            len(self.marks) - min(levels, len(self.marks)) + 1 :
        ]  # these end with the one around them
        scope, self.offset = self.marks.pop()
        scope.__exit__(None, None, None)
        for ended in self.scopes[len(self.marks) + 1 :]:
            self.over += [piece for piece, *_ in ended]
        del self.scopes[len(self.marks) + 1 :]

    @rule()
    def reset(self) -> None:
        while self.marks:
            self.leave(1)
        self.arena.reset()
        self.over += [piece for piece, *_ in self.scopes[0]]
        self.scopes, self.offset = [[]], 0

    @rule()
    def trim(self) -> None:
        self.arena.trim()

    @invariant()
    def nothing_overlaps_or_changed(self) -> None:
        if not hasattr(self, "arena"):
            return
        assert self.arena.check() is None and self.pool.check() is None
        ranges = sorted((address, address + max(size, 1)) for _, address, size, _ in self.live())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        for piece, _, _, number in self.live():
            self.verify(piece, number)

    @invariant()
    def the_account_is_the_oracles(self) -> None:
        if not hasattr(self, "arena"):
            return
        stats = self.arena.stats()
        assert (stats.used, stats.high_water, stats.depth) == (self.offset, self.high, len(self.marks))
        assert self.pool.live_bytes() == stats.capacity <= LIMIT

    @invariant()
    def what_is_over_says_so(self) -> None:
        for piece in getattr(self, "over", [])[-5:]:
            try:
                self.touch(piece)
            except InvalidFree as error:
                assert error.stack
            else:
                raise AssertionError("a use after the end did not raise")

    def touch(self, piece: Any) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()
            self.scopes.clear()
            self.over.clear()
            assert self.pool.live_bytes() == 0
            self.pool.close()


class HostMachine(ArenaMachine):
    align = 64

    @initialize(size=st.sampled_from([None, 1, "3MiB"]))
    def start(self, size: Any) -> None:
        self.begin("host", size=size, checked=True)

    def take(self, size: int, align: int | None) -> tuple[Any, int]:
        if align is None:
            array = self.arena.empty(size, np.uint8)
        else:
            array = np.ndarray(size, np.uint8, self.arena.allocate(size, align=align))  # type: ignore[arg-type]
        address = int(array.__array_interface__["data"][0])
        array[:] = self.number
        return array, address

    def verify(self, piece: Any, number: int) -> None:
        assert (piece == number).all()

    def touch(self, piece: Any) -> None:
        if type(piece) is np.ndarray:  # made here, so not checked; its memory is still there to be read
            assert piece.sum() >= 0
            raise InvalidFree("", stack=(1,))
        _ = piece + 1


class ModelMachine(ArenaMachine):
    align = 256

    @initialize(pages=st.booleans(), size=st.sampled_from([None, 1, "3MiB"]))
    def start(self, pages: bool, size: Any) -> None:
        self.begin(Device.model("1GiB", pages=pages), size=size, checked=True)

    def take(self, size: int, align: int | None) -> tuple[Any, int]:
        piece = self.arena.empty(size, "uint8") if align is None else self.arena.allocate(size, align=align)
        piece.fill(self.number)
        return piece, piece.ptr

    def touch(self, piece: Any) -> None:
        piece.fill(1)


TestHost = HostMachine.TestCase
TestModel = ModelMachine.TestCase
TestHost.settings = TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_the_shape_of_an_array_changes_nothing_of_the_account() -> None:
    with vram.Pool("host") as pool, vram.Arena(pool) as flat, vram.Arena(pool) as shaped:
        for shape in [(3, 5, 7), (1,), (0, 4), ()]:
            count = int(np.prod(shape))
            flat.empty(count, np.int32)
            shaped.empty(shape, np.int32)
            assert flat.used == shaped.used
