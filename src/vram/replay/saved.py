"""Replays a training program of PyTorch while its saved tensors leave to the host, as they do when it runs.

The decisions are those of `vram.core.saved`. A recording does not say what was saved, or when it was used:

- What a module allocated, and the backward pass found, counts as saved as soon as it was allocated.
- It counts as used when the last allocation before its free took place, or at the end of the backward pass if
  the program held it until the next step.
- What optimizers allocated counts as their states, and what was there before the first forward pass as
  parameters.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vram.core.saved import LEAST_BYTES, Look, SavedPolicy
from vram.trace import ALLOCATE, AT_ONCE, FREE, Lifetimes
from vram.trace.roles import Role

__all__ = ["Copied", "replay_saved"]

_NONE = array("q")


@dataclass(slots=True)
class Copied:
    """Bytes of saved tensors: copied so far, in host memory now, and at most."""

    out: int = 0
    back: int = 0
    there: int = 0
    most: int = 0


def replay_saved(
    replayer: Any, program: Lifetimes, capacity: int, ask: Callable[[], None]
) -> list[Copied] | None:
    """Run a program whose steps and roles are known; what was copied when each step began, and at the end.

    None: memory ran out.

    `replayer` is new and has the policy vram, on a device of `capacity` bytes.
    """
    try:
        return _Run(program, _Feed(replayer, program, ask), capacity).run()
    except _OutOfMemory:
        return None


# ---- what a recording tells --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that is saved: the row that allocates it, and whether the program holds it as well."""

    row: int
    held: bool


class _Program:
    """What a recording tells of a program, as far as it concerns spilling."""

    def __init__(self, program: Lifetimes) -> None:
        self.saved: dict[int, _Tensor] = {}  # by the row that allocates it
        self.used: defaultdict[int, list[_Tensor]] = defaultdict(list)  # by row
        self.begun = Counter(bisect_left(program.event, step) for step in program.steps)  # steps, by row
        del self.begun[len(program)]  # nothing follows
        self.steered: dict[int, tuple[list[int], list[int]]] = {}  # live states and parameters at these rows
        self._rows: dict[int, tuple[int, int]] = {}  # row, and `_backward` then, of what may be saved
        self._backward = 0  # allocations of backward passes so far
        self._last = 0  # the row of the last allocation; of those of backward passes only:
        self._last_backward = 0
        self._states: set[int] = set()  # live
        self._parameters: set[int] = set()
        self._forward = False  # there was a forward pass
        self._read(program)

    def _read(self, program: Lifetimes) -> None:
        for row, (op, number, size) in enumerate(zip(program.op, program.id, program.size, strict=True)):
            if row in self.begun:
                self._end_step(row)
            if op == ALLOCATE:
                self._allocate(row, number, size, program.role[number])
            else:
                self._free(number)
        self._end_step(len(program))

    def _allocate(self, row: int, number: int, size: int, role: int) -> None:
        self._last = row
        if role == Role.BACKWARD:
            self._backward += 1
            self._last_backward = row
        elif role == Role.FORWARD:
            self._forward = True
            if size >= LEAST_BYTES:
                self._rows[number] = row, self._backward
        elif role == Role.OPTIMIZER:
            self._states.add(number)
        elif not self._forward:
            self._parameters.add(number)

    def _free(self, number: int) -> None:
        self._states.discard(number)
        self._parameters.discard(number)
        self._note(number, self._last, held=False)

    def _end_step(self, row: int) -> None:
        for number in tuple(self._rows):
            self._note(number, self._last_backward, held=True)
        self.steered[row] = [*self._states], [*self._parameters]

    def _note(self, number: int, used: int, *, held: bool) -> None:
        """Note a tensor if a backward pass began after it was allocated."""
        row, before = self._rows.pop(number, (0, self._backward))
        if self._backward > before:
            self.saved[row] = tensor = _Tensor(row, held)
            self.used[used].append(tensor)


# ---- running it --------------------------------------------------------------------------------------------


class _OutOfMemory(Exception):
    """The replay has ended."""


class _Feed:
    """Hands the rows of a program to a replayer, and others between them."""

    def __init__(self, replayer: Any, program: Lifetimes, ask: Callable[[], None]) -> None:
        self.replayer = replayer
        self._program = program
        self._ask = ask
        self._row = 0  # the first one that was not handed over

    @property
    def time_us(self) -> int:
        """Now."""
        return self._program.time_us[max(0, self._row - 1)]

    def until(self, end: int) -> None:
        """Run the program's rows before `end`."""
        begin, self._row = self._row, end
        if begin == end:
            return
        program, rows = self._program, slice(begin, end)
        past, last = program.event[begin - 1] if begin else None, program.event[end - 1]
        self._run(
            program.op[rows],
            program.id[rows],
            program.size[rows],
            program.stream[rows],
            program.time_us[rows],
            program.event[rows],
            program.completed_event[rows],
            _between(program.emptied, past, last),
            _between(program.steps, past, last),
        )

    def insert(self, op: int, row: int) -> None:
        """Run an operation on the allocation of this row, now."""
        program, now, what = self._program, slice(self._row - 1, self._row), slice(row, row + 1)
        self._run(
            array("B", [op]),
            program.id[what],
            program.size[what],
            program.stream[what],
            program.time_us[now],
            program.event[now],
            array("q", [AT_ONCE]),
            _NONE,
            _NONE,
        )

    def _run(self, *columns: array[int]) -> None:
        if not self.replayer.run(*columns, self._ask):
            raise _OutOfMemory


def _between(events: array[int], past: int | None, last: int) -> array[int]:
    """The events after `past`, up to the last."""
    return events[0 if past is None else bisect_left(events, past + 1) : bisect_left(events, last + 1)]


class _Memory:
    """The replayed pool as `SavedPolicy` sees it."""

    def __init__(self, feed: _Feed, capacity: int) -> None:
        self._feed = feed
        self._capacity = capacity
        self.lacking = 0  # bytes that were lacking, for which pages had to move

    def begin_step(self) -> int:
        self.bring_back(0)
        return self._capacity

    def look(self) -> Look:
        return self._look(restart_peak=False)

    def look_at_peak(self) -> Look:
        return self._look(restart_peak=True)

    def _look(self, *, restart_peak: bool) -> Look:
        *sizes, lacking = self._feed.replayer.look(restart_peak)
        self.lacking += lacking
        return Look(*sizes)

    def bring_back(self, most: int) -> int:
        return int(self._feed.replayer.bring_back(most, self._feed.time_us))


class _Entry:
    """A saved tensor. If the program holds it until the next step, it stays: no memory would become free."""

    def __init__(self, run: _Run, tensor: _Tensor, size: int) -> None:
        self.bytes = size
        self.before = 0
        self.left = self.returned = self.used = False
        self._run = run
        self._tensor = tensor

    @property
    def stays(self) -> bool:
        return self.left or self._tensor.held

    def leave(self) -> bool:
        if not self._run.feed.replayer.take_host_bytes(self.bytes):
            return False
        self.left = True
        self._run.feed.insert(FREE, self._tensor.row)
        copied = self._run.copied
        copied.out += self.bytes
        copied.there += self.bytes
        copied.most = max(copied.most, copied.there)
        return True

    def get_room(self) -> bool:
        self.returned = True
        self._run.feed.insert(ALLOCATE, self._tensor.row)
        self._run.copied.back += self.bytes
        self._run.policy.ahead += self.bytes
        return True

    def use(self) -> None:
        self._run.policy.use(self, away=self.left)
        if self.left:
            if not self.returned:
                self.get_room()
            self._run.policy.ahead -= self.bytes
            self._run.copied.there -= self.bytes
            self._run.feed.replayer.give_host_bytes(self.bytes)
        self.used = True

    def reference(self) -> _Entry | None:
        return None if self.used else self


class _Run:
    """One replay. The policy decides from the first shortage on, as in a running program."""

    def __init__(self, program: Lifetimes, feed: _Feed, capacity: int) -> None:
        self.feed = feed
        self.copied = Copied()
        self._sizes = program.size
        self._end = len(program)
        self._program = _Program(program)
        self.memory = _Memory(feed, capacity)
        self.policy: SavedPolicy[_Entry] = SavedPolicy(self.memory)
        self._entries: dict[_Tensor, _Entry] = {}  # until they are used
        self._short = False  # pages have had to move
        self._forward = False  # a tensor was saved, and none was used since

    def run(self) -> list[Copied]:
        """Run all rows."""
        program, copied = self._program, []
        for row in sorted({*program.begun, *program.saved, *program.used}):
            self.feed.until(row)
            self._notice(in_forward=self._forward and row in program.saved)
            for _ in range(program.begun[row]):
                copied.append(replace(self.copied))
                self.feed.replayer.steer(*program.steered[row])
            self._forward = row in program.saved or (self._forward and row not in program.used)
            for tensor in program.used.get(row, ()):
                if tensor in self._entries:
                    self._entries.pop(tensor).use()
            if row in program.saved and self._short:
                self.feed.until(row + 1)
                self._save(program.saved[row])
        self.feed.until(self._end)
        return [*copied, self.copied]

    def _notice(self, *, in_forward: bool) -> None:
        """Tell the policy if pages had to move. The first time, a running program begins to use it."""
        memory = self.memory
        memory.look()
        if memory.lacking and not self._short:
            self._short, self.policy = True, SavedPolicy(memory, whole=not in_forward)
        elif memory.lacking:
            if self.policy.idle:
                self.policy.wake(whole=not in_forward)
            self.policy.shortage(memory.lacking, saving=bool(self._entries))
        memory.lacking = 0

    def _save(self, tensor: _Tensor) -> None:
        policy = self.policy
        if policy.idle:
            return
        if not self._entries:
            if not policy.begin_step():
                return
            policy.forget()
        entry = self._entries[tensor] = _Entry(self, tensor, self._sizes[tensor.row])
        policy.save(entry, entry.reference)
        policy.let_leave()
