"""What the programs of this folder are written with: a pool, streams, and the verdict each must get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import vram

Made = TypeVar("Made")
UNIT = 4096
HALF = UNIT // 2
MIB = 1 << 20


def kernel(*memory: Any, **named: Any) -> None:
    """Stands for work on the device: it may read and write whatever it is given."""


@dataclass
class Bench:
    """One pool and three streams of one device. Programs make what else they need."""

    device: vram.Device
    pool: vram.Pool = field(init=False)
    a: vram.Stream = field(init=False)
    b: vram.Stream = field(init=False)
    c: vram.Stream = field(init=False)
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = vram.Pool(self.device)
        self.a, self.b, self.c = (vram.Stream(self.device) for _ in range(3))

    def take(self, size: int = UNIT, stream: vram.Stream | None = None) -> vram.Buffer:
        """Memory of stream a, unless another is named; kept to the end, so that only free() frees it."""
        return self._kept(self.pool.allocate(size, stream=stream or self.a))

    def arena(self, **options: Any) -> vram.Arena:
        return self._kept(vram.Arena(self.pool, stream=self.a, **options))

    def growable(self, size: int = 4 * MIB) -> vram.GrowableBuffer:
        return self._kept(vram.GrowableBuffer(64 * MIB, self.pool, size=size, stream=self.a))

    def _kept(self, made: Made) -> Made:
        self.kept.append(made)
        return made


@dataclass(frozen=True)
class Program:
    """A small program and what race_check must say of it: the kinds of race, none for a correct one."""

    run: Callable[[Bench], object]
    kinds: frozenset[str]
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{'racy' if self.kinds else 'correct'}-{self.run.__name__}"


PROGRAMS: list[Program] = []

Body = Callable[[Bench], object]


def _listed(kinds: tuple[str, ...], on: str) -> Callable[[Body], Body]:
    def add(body: Body) -> Body:
        assert body.__name__ not in {program.run.__name__ for program in PROGRAMS}, body.__name__
        PROGRAMS.append(Program(body, frozenset(kinds), tuple(on.split())))
        return body

    return add


def correct(on: str = "host model") -> Callable[[Body], Body]:
    """Nothing is to be reported."""
    return _listed((), on)


def racy(*kinds: str, on: str = "host model") -> Callable[[Body], Body]:
    """Races of these kinds are to be reported, and of no other kind."""
    return _listed(kinds, on)
