"""Which of the tensors that a framework saves for its backward pass leave to the host, and when they return.

Decisions only: who copies tensors, and what they are, is elsewhere (`vram.torch.spill`). `vram.replay.saved`
takes the same decisions for a recorded program.

A step saves tensors in its forward pass, and uses them in reverse order in its backward pass. As much leaves
as recent steps lacked at their peaks, the earliest first. It returns before it is used, as soon as there is
room until then. Pages that had moved to the host return when a step begins, if saved tensors can make room
for them. If none of this happens for a while, the policy is idle, and tensors are saved as without it, until
pages have to move again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from vram.config import KEPT_FREE

__all__ = ["LEAST_BYTES", "MOST_PATIENCE", "RECENT_STEPS", "Entry", "Look", "Memory", "SavedPolicy"]

LEAST_BYTES: Final = 1 << 20
"""Smaller tensors stay on the device."""
SLACK_STEPS: Final = 16
"""If what recent steps needed is not enough, more is kept free. This surplus decreases by one part in so many
in each step."""
RECENT_STEPS: Final = 8
"""Steps that tell how much the program allocates beyond what it saves. Steps may differ in length."""
READ_BYTES: Final = 32 << 20
"""The memory is looked at after so much was saved, at most."""
PARTS: Final = 16
"""The saved tensors of a step are divided into so many parts, to follow the backward pass."""
MOST_PATIENCE: Final = 64
"""Steps after which pages return, or the policy is idle, at most."""


class Look(NamedTuple):
    """The memory at one moment, in bytes: `spilled` of `live` are on host pages."""

    live: int
    peak_live: int
    spilled: int


class Memory(Protocol):
    """The memory of one device, as the policy sees it."""

    def begin_step(self) -> int:
        """Return the bytes that a step may use.

        Pages return only by `bring_back` until the next step begins.
        """

    def look(self) -> Look:
        """What is in use now."""

    def look_at_peak(self) -> Look:
        """The same, with the peak since the last call of this."""

    def bring_back(self, most: int) -> int:
        """Move at most so many bytes of pages back to the device; return how many."""


class Entry(Protocol):
    """One storage with saved tensors: on the device, on the host, or returned."""

    bytes: int
    before: int
    """Bytes that the step had saved before it; set by the policy."""

    @property
    def stays(self) -> bool:
        """Whether it has left already, or cannot leave."""

    @property
    def returned(self) -> bool:
        """Whether it has memory on the device again."""

    def leave(self) -> bool:
        """Copy it to the host and drop it. False: there is no host memory for it."""

    def get_room(self) -> bool:
        """Get memory to return to, ahead of need. False: there is none now."""


Kind = TypeVar("Kind", bound=Entry)


class SavedPolicy(Generic[Kind]):
    """Decides for the saved tensors of one device. The caller holds a lock.

    For each tensor: `begin_step` if it is the first one of a step, then `save` or `pass_over`, and
    `let_leave`. `use` when the backward pass needs one. Nothing of this while it is idle.
    """

    def __init__(self, memory: Memory, *, whole: bool = False) -> None:
        """Nothing is known of the program yet. `whole`: the first step will be seen from its beginning."""
        self.ahead = 0
        """Bytes that have returned and are not used yet."""
        self.idle = False
        """Whether tensors need not be looked at, until pages have to move again."""
        self._memory = memory
        self._here: deque[Callable[[], Kind | None]] = deque()  # on the device, the earliest first
        self._away: list[Callable[[], Kind | None]] = []  # on the host, the earliest first
        self._steps = _Steps()
        self._whole = whole
        self._pages = _Pages()
        self._step: _Step | None = None  # that was begun last
        self._due = 0  # bytes that leave as soon as they are saved
        self._capacity = 0  # bytes that the program could have when the step began
        self._slack = 0  # bytes that were lacking in spite of what recent steps needed
        self._was_short = False  # in this step
        self._calm = 0  # steps since tensors left, or pages moved or were to return
        self._patience = RECENT_STEPS  # … after which it is idle
        self._seen = 0  # bytes in use at the last look
        self._lacking = 0  # … and how much was lacking; negative: there was room
        self._unread = 0  # bytes saved since
        self._next_read = 0

    @property
    def entries(self) -> int:
        """How many may leave; some may be forgotten."""
        return len(self._here)

    @property
    def _usable(self) -> int:
        """Bytes that a step may use."""
        return self._capacity - self._slack - int(self._capacity * KEPT_FREE)

    def shortage(self, needed: int, *, saving: bool) -> None:
        """Keep more memory free from now on: pages had to move. `saving`: while tensors were saved."""
        self._pages.moved = True
        if saving and self._step is not None and not self._step.over:
            self._slack += needed
            self._was_short = True

    def wake(self, *, whole: bool) -> None:
        """Look at tensors again. `whole`: the next step will be seen from its beginning."""
        self.idle, self._whole = False, whole
        self._patience = min(2 * self._patience, MOST_PATIENCE)

    # -- saving

    def begin_step(self) -> bool:
        """Learn from the last step, and watch the next one. False: it is idle from now on."""
        self._capacity = self._memory.begin_step()
        calm = self._step is not None and self._step.left == 0 and not self._pages.moved
        if self._step is not None and self._step.end(self._memory):
            if not self._was_short:
                self._slack -= self._slack // SLACK_STEPS
            if not self._steps.known:
                self._slack = 0  # it stood for what steps need
            self._step.learn(self._usable, whole=self._whole)
            self._steps.add(self._step)
            self._whole = True
        self._due = self._steps.least_due
        calm &= not self._pages.begin_step(self._memory, self._usable, self._steps.least)
        self._calm = self._calm + 1 if calm else 0
        self.idle = self._calm >= self._patience
        self._step = None if self.idle else _Step(self._memory)
        self._was_short = False
        if self._step is None:
            self._calm = 0
            return False
        self._seen = self._step.begin
        self._unread = self._next_read = 0
        return True

    def forget(self) -> None:
        """Forget what no saved tensor uses anymore."""
        self._here = deque(each for each in self._here if each() is not None)
        self._away = [each for each in self._away if each() is not None]

    def save(self, entry: Kind, reference: Callable[[], Kind | None]) -> None:
        """Note that a tensor was saved whose storage can leave.

        `reference` returns the entry, or None if no saved tensor uses it anymore.
        """
        self._here.append(reference)
        self._unread += entry.bytes
        if self._step is not None:
            entry.before = self._step.saved
            self._step.saved += entry.bytes

    def pass_over(self, bytes: int) -> None:
        """Note that a tensor was saved that cannot leave."""
        self._unread += bytes

    @property
    def must_look(self) -> bool:
        """Whether the next `let_leave` looks at the memory."""
        return self._unread >= self._next_read

    def let_leave(self) -> None:
        """Let tensors leave: those that are due, and more if recent steps needed more than is free."""
        step = self._step
        if step is None:
            return
        if not self.must_look:
            if step.left < self._due:
                self._unread -= self._leave(step, 0)
            return
        now = self._memory.look()
        grown = now.live + step.left - step.begin
        free = self._usable - (now.live - now.spilled) - self._steps.expected(grown)
        left = self._leave(step, -free)
        self._seen = now.live - left
        self._lacking = -free - left
        self._unread = 0
        self._next_read = max(READ_BYTES, -self._lacking // 4)

    def _leave(self, step: _Step, lacking: int) -> int:
        """Let the earliest tensors leave: those that are due, and more while bytes are lacking.

        Returns the bytes that left.
        """
        left = 0
        while self._here:
            reference = self._here.popleft()
            entry = reference()
            if entry is None or entry.stays:
                continue
            wanted = left < lacking or step.left + entry.bytes <= self._due
            if not wanted or not entry.leave():
                self._here.appendleft(reference)
                break
            left += entry.bytes
            step.left += entry.bytes
            self._away.append(reference)
        return left

    # -- using

    def use(self, used: Kind, *, away: bool) -> list[Kind]:
        """Note that the backward pass uses an entry. Returns those that got memory to return to."""
        step = self._step
        if step is None:
            return []
        if not step.backward:
            step.begin_backward(
                last=self._seen + self._unread,
                due=max(0, step.left + self._lacking + self._unread),
                expected=self._steps.growth(step.saved),
            )
        step.over |= away
        step.reach(self._memory, used.before, self.ahead)
        return self._let_return(step, used) if self._away and step.predicted else []

    def _let_return(self, step: _Step, used: Kind) -> list[Kind]:
        """Get memory for tensors as long as there is room for them now, and until they are used."""
        now = step.look(self._memory, self.ahead)
        live = now.live
        found = []
        while self._away:
            entry = self._away[-1]()
            if entry is not None and not entry.returned:
                most = max(live, step.most_until(used.before, entry.before) + self.ahead) + entry.bytes
                if most - now.spilled > self._capacity or not entry.get_room():
                    break
                found.append(entry)
                live += entry.bytes
            self._away.pop()
        return found


class _Step:
    """What one step saves, and what it has in use while its backward pass uses that.

    The saved tensors are divided into parts of equal size, and the backward pass begins with the last part.
    What returned ahead of need does not count as in use.
    """

    def __init__(self, memory: Memory) -> None:
        self.begin = memory.look_at_peak().live
        self.saved = 0  # bytes of tensors that can leave
        self.left = 0  # … of those that have left
        self.backward = False  # it has begun
        self.over = False  # it has used a tensor that had left; so all that stayed have been used
        self.last = 0  # bytes in use when the last tensor was saved
        self.grown = 0  # … or had left by then, beyond the begin
        self.due = 0  # bytes that had to leave
        self.whole = False
        self.needed = 0  # bytes beyond what was in use when the last tensor was saved
        self.least = 0  # bytes that it needs if all tensors leave and return when they are used
        self._growth = [0] * PARTS  # peak in each part, beyond the begin
        self._rest = 0  # peak after the last look
        self._part = PARTS  # that the backward pass is in
        self._expected: list[int] = []  # growth, judging by recent steps

    # -- while it runs

    def begin_backward(self, *, last: int, due: int, expected: list[int]) -> None:
        """The backward pass uses the first tensor."""
        self.backward, self.last, self.due, self._expected = True, last, due, expected

    @property
    def predicted(self) -> bool:
        """Whether recent steps tell how the backward pass goes on."""
        return bool(self._expected)

    def reach(self, memory: Memory, before: int, ahead: int) -> None:
        """The backward pass uses a tensor before which so many bytes were saved."""
        part = self._part_of(before)
        if part < self._part:
            if self._part == PARTS:
                self._part = part  # what the forward pass had in use counts here
            self.look(memory, ahead)
            self._part = part

    def look(self, memory: Memory, ahead: int) -> Look:
        """Note the peak since the last look, `ahead` bytes of which have returned and are not used yet.

        Called before more returns: until then, this becomes less.
        """
        now = memory.look_at_peak()
        self._growth[self._part] = max(self._growth[self._part], now.peak_live - ahead - self.begin)
        return now

    def end(self, memory: Memory) -> bool:
        """End the step. False: it has no backward pass."""
        self._rest = memory.look_at_peak().peak_live
        return self.backward

    def most_until(self, here: int, there: int) -> int:
        """Return what is in use, at most, until the tensor at `there` is used, judging by recent steps."""
        parts = self._expected[self._part_of(there) : self._part_of(here) + 1]
        return self.begin + max(parts, default=0)

    def _part_of(self, before: int) -> int:
        return min(PARTS - 1, before * PARTS // max(1, self.saved))

    # -- what it teaches

    def growth(self, part: int, saved: int) -> int:
        """Return the growth of a step that saves so much, in proportion."""
        return self._growth[part] * min(saved, self.saved) // max(1, self.saved)

    def learn(self, capacity: int, *, whole: bool) -> None:
        """Find out what is needed, of `capacity` bytes. Unless it is whole, it saved tensors before."""
        self.whole = whole
        self.grown = max(self.last + self.left - self.begin, LEAST_BYTES)
        most, self.least = 0, self._rest if whole else 0
        for part in range(PARTS - 1, -1, -1):
            before = part * self.saved // PARTS
            used = self.begin + self._growth[part]
            if whole:
                self.least = max(self.least, used - max(0, before - self.left))
            # Tensors that leave because of a peak must not be used before it.
            if before >= most - capacity:
                most = max(most, used + min(self.left, before))
        self.needed = max(0, most - self.left - self.last)


class _Steps:
    """What recent steps needed."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=RECENT_STEPS)

    @property
    def known(self) -> bool:
        """Whether there was a step."""
        return bool(self._steps)

    @property
    def least_due(self) -> int:
        """Bytes that had to leave in each of them. They may leave at once, while there is time to copy."""
        return min((step.due for step in self._steps), default=0)

    def least(self, count: int) -> int:
        """Bytes that the largest of the last `count` needs if all tensors leave. 0: that is not known."""
        return max((step.least for step in tuple(self._steps)[-count:]), default=0)

    def add(self, step: _Step) -> None:
        """Note a step that has ended."""
        self._steps.append(step)

    def expected(self, grown: int) -> int:
        """Return what a step needs whose memory has grown so much: shorter ones less, in proportion."""
        grown = max(0, grown)
        return max((step.needed * min(grown, step.grown) // step.grown for step in self._steps), default=0)

    def growth(self, saved: int) -> list[int]:
        """Return by part how much memory grows in a step that saves so much. Empty: that is not known."""
        whole = [step for step in self._steps if step.whole]
        return [max(step.growth(part, saved) for step in whole) for part in range(PARTS)] if whole else []


class _Pages:
    """Brings pages back when a step begins, if recent steps would have had room for them.

    Saved tensors are cheaper to have on the host than pages: their copies overlap with computation, while
    kernels wait for each access to a page there, and an optimizer reads its states several times. So pages
    return if a step can do without them, by letting more tensors leave. A page that is read in place in one
    step takes about as long as one that returns and leaves again, so one such step is enough to let pages
    return; if that was too early, twice as many must follow each other.
    """

    def __init__(self) -> None:
        self.moved = False  # to the host, since the step began
        self._waited = 0  # steps since the last return that was too early
        self._patience = 1  # … after which pages may return, if they would have had room in so many
        self._returned = False  # pages, since they moved last
        self._stuck = False  # none could return, since they moved last

    def begin_step(self, memory: Memory, capacity: int, least_of: Callable[[int], int]) -> bool:
        """Let pages return if recent steps could do with `capacity`: `least_of` says what so many needed.

        Returns whether they return, now or later.
        """
        if self.moved and self._returned:
            self._put_off()
        self._stuck &= not self.moved
        self.moved = False
        self._waited += 1
        there = memory.look().spilled
        least = least_of(self._patience)
        most = there - max(0, least - capacity)
        if there == 0 or (most <= 0 and least > 0):
            return False
        if least > 0 and self._waited > self._patience:
            self._returned = memory.bring_back(most) > 0
            self._stuck = not self._returned
            if self._stuck:
                self._put_off()
        return not self._stuck

    def _put_off(self) -> None:
        self._waited, self._returned = 0, False
        self._patience = min(2 * self._patience, MOST_PATIENCE)
