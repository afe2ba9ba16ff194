"""Which saved tensors leave and when they return: the policy over memory of its own, over recorded training
jobs, and what recordings tell about roles."""

from __future__ import annotations

import importlib
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_jobs import trace_of

from vram.core.saved import LEAST_BYTES, MOST_PATIENCE, RECENT_STEPS, Look, SavedPolicy
from vram.trace import Annotation, Frame, Trace
from vram.trace.lifetimes import lifetimes
from vram.trace.roles import Role

engine = importlib.import_module("vram.replay")
needs_native = pytest.mark.skipif(
    not importlib.import_module("vram.replay.run").can_replay(), reason="the native core is not built"
)

MIB = 1 << 20


# ---- the policy --------------------------------------------------------------------------------------------


class Tensor:
    """A saved tensor of a made program; the oracle of where it is."""

    bytes = 0
    before = 0

    def __init__(self, machine: Machine, size: int) -> None:
        self.bytes = size
        self.machine = machine
        self.stays = False  # or has left
        self.returned = self.used = False

    def leave(self) -> bool:
        assert not self.stays and not self.used
        if self.machine.saved_bytes + self.bytes > self.machine.host_bytes:
            return False
        self.stays = True
        self.machine.live -= self.bytes
        self.machine.saved_bytes += self.bytes
        self.machine.left += self.bytes
        return True

    def get_room(self) -> bool:
        assert self.stays and not self.returned
        self.returned = True
        self.machine.take(self.bytes)
        self.machine.policy.ahead += self.bytes
        return True

    def reference(self) -> Tensor | None:
        return None if self.used else self


class Machine:
    """A device of `capacity` bytes without pages: what is lacking is only counted."""

    def __init__(self, capacity: int, host_bytes: int = 1 << 50) -> None:
        self.capacity, self.host_bytes = capacity, host_bytes
        self.live = self.peak = self.saved_bytes = 0
        self.left = 0  # bytes so far
        self.lacking = 0  # the most of this step
        self.policy: SavedPolicy[Tensor] = SavedPolicy(self)

    def begin_step(self) -> int:
        return self.capacity

    def look(self) -> Look:
        return Look(self.live, self.peak, 0)

    def look_at_peak(self) -> Look:
        seen, self.peak = Look(self.live, self.peak, 0), self.live
        return seen

    def bring_back(self, most: int) -> int:
        raise AssertionError("there are no pages")

    def take(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)
        self.lacking = max(self.lacking, self.live - self.capacity)

    def step(self, sizes: list[int], beyond: int = 0) -> None:
        """Save tensors, use `beyond` more, and use the tensors in reverse, each with as much again."""
        self.lacking = self.left = 0
        tensors = []
        for number, size in enumerate(sizes):
            if number == 0 and not self.policy.idle:
                self.policy.begin_step()
            if number == 0:
                self.policy.forget()
            self.take(size)
            tensor = Tensor(self, size)
            tensors.append(tensor)
            if self.policy.idle:
                continue
            self.policy.save(tensor, tensor.reference)
            self.policy.let_leave()
        self.take(beyond)
        for tensor in reversed(tensors):
            away = tensor.stays
            if not self.policy.idle:
                self.policy.use(tensor, away=away)
            if away:
                if not tensor.returned:
                    tensor.get_room()
                self.policy.ahead -= tensor.bytes
                self.saved_bytes -= tensor.bytes
            self.take(tensor.bytes)
            self.live -= 2 * tensor.bytes
            tensor.used = True
        self.live -= beyond
        assert self.live == self.saved_bytes == self.policy.ahead == 0
        if self.lacking > 0 and self.policy.idle:
            self.policy.wake(whole=True)


def test_nothing_leaves_while_there_is_room() -> None:
    machine = Machine(1000 * MIB)
    for _ in range(5):
        machine.step([10 * MIB] * 50, beyond=300 * MIB)
        assert machine.left == 0


def test_as_much_leaves_as_steps_lack() -> None:
    machine = Machine(700 * MIB)
    for number in range(6):
        machine.step([10 * MIB] * 50, beyond=300 * MIB)  # the peak is 810 MiB, with a tensor that is used
        if number >= 2:
            assert machine.lacking <= 0
            assert 110 * MIB <= machine.left <= 160 * MIB


def test_a_shorter_step_leaves_less() -> None:
    machine = Machine(700 * MIB)
    for _ in range(3):
        machine.step([10 * MIB] * 50, beyond=300 * MIB)
    machine.step([10 * MIB] * 20, beyond=120 * MIB)
    assert machine.left == 0


def test_a_long_step_counts_as_long_as_it_is_recent() -> None:
    machine = Machine(700 * MIB)
    for _ in range(2):
        machine.step([10 * MIB] * 50, beyond=300 * MIB)
    lefts = []
    for _ in range(RECENT_STEPS + 2):
        machine.step([10 * MIB] * 50, beyond=100 * MIB)
        lefts.append(machine.left)
    assert lefts[0] > 0 and lefts[-1] == 0


def test_a_shortage_keeps_more_free_for_a_while() -> None:
    machine = Machine(900 * MIB)
    for _ in range(3):
        machine.step([10 * MIB] * 50, beyond=300 * MIB)
    assert machine.left == 0
    tensor = Tensor(machine, 10 * MIB)
    machine.policy.begin_step()
    machine.policy.save(tensor, tensor.reference)
    machine.policy.shortage(200 * MIB, saving=True)
    machine.policy.shortage(200 * MIB, saving=False)  # when nothing can leave, this would help nobody
    tensor.used = True
    machine.step([10 * MIB] * 50, beyond=300 * MIB)
    assert 100 * MIB <= machine.left <= 200 * MIB
    for _ in range(40):
        machine.step([10 * MIB] * 50, beyond=300 * MIB)
    assert machine.left == 0


def test_it_is_idle_while_nothing_has_to_leave() -> None:
    machine = Machine(700 * MIB)

    def calm_steps() -> int:
        count = 0
        while not machine.policy.idle:
            machine.step([10 * MIB] * 50, beyond=100 * MIB)
            assert count == 0 or machine.lacking <= 0
            count += 1
        return count

    assert calm_steps() == RECENT_STEPS + 1  # the first one is not known when it begins
    machine.step([10 * MIB] * 50, beyond=100 * MIB)
    assert machine.policy.idle and machine.left == 0
    machine.step([10 * MIB] * 50, beyond=300 * MIB)
    assert machine.lacking > 0 and not machine.policy.idle
    for _ in range(RECENT_STEPS):
        machine.step([10 * MIB] * 50, beyond=300 * MIB)
        assert machine.left >= 110 * MIB or machine.lacking > 0
    assert calm_steps() >= 2 * RECENT_STEPS  # that was too early
    for _ in range(9):
        machine.policy.wake(whole=True)
    assert calm_steps() <= MOST_PATIENCE + 2


class StuckMachine(Machine):
    """A device with pages on the host that cannot return, because too little would stay free."""

    tries = 0

    def look(self) -> Look:
        return Look(self.live, self.peak, 2 * MIB)

    def bring_back(self, most: int) -> int:
        self.tries += 1
        return 0


def test_it_is_idle_although_pages_cannot_return() -> None:
    machine = StuckMachine(1000 * MIB)
    for _ in range(2 * RECENT_STEPS):
        if not machine.policy.idle:
            machine.step([10 * MIB] * 50, beyond=100 * MIB)
    assert machine.policy.idle
    assert 1 <= machine.tries <= 3


sizes = st.lists(st.integers(1, 40).map(lambda size: size * LEAST_BYTES), min_size=1, max_size=40)
more = st.integers(0, 500).map(lambda size: size * MIB)
steps = st.lists(st.tuples(sizes, more), min_size=1, max_size=12)


@given(steps, st.integers(1, 1500), st.integers(0, 300))
def test_each_tensor_leaves_and_returns_at_most_once(work: Any, capacity: int, host: int) -> None:
    """`Tensor` checks this; `step` that nothing is left over."""
    machine = Machine(capacity * MIB, host * MIB)
    for step in work:
        machine.step(*step)


# ---- recorded programs -------------------------------------------------------------------------------------

MODULE = Frame("torch/nn/modules/module.py", 1, "Module._call_impl")
OPTIMIZER = Frame("torch/optim/adamw.py", 2, "AdamW.step")
SCRIPT = Frame("train.py", 3, "main")
CHECKPOINT = Frame("torch/utils/checkpoint.py", 4, "checkpoint")
LOSS = Frame("torch/autograd/__init__.py", 5, "backward")
FUNCTION = Frame("torch/autograd/function.py", 6, "Function.apply")
FRAMES = (MODULE, OPTIMIZER, SCRIPT, CHECKPOINT, LOSS, FUNCTION)
STACKS = {
    (): Role.BACKWARD,
    (0, 2): Role.FORWARD,
    (1, 2): Role.OPTIMIZER,
    (2,): Role.OTHER,
    (0, 3, 0, 2): Role.OTHER,
    (4, 2): Role.BACKWARD,
    (2, 5): Role.BACKWARD,
    (2, 5, 0, 2): Role.FORWARD,
    (0, 2, 1, 2): Role.FORWARD,  # the optimizer calls the program to compute the loss
    (0, 3, 4, 2): Role.OTHER,
}
ENOUGH = 272 * MIB
"""What `training` needs: 64 of parameters, 64 of states from the first step on, 144 for each step."""
LACKING = 40 * MIB
NUMBER = {stack: number for number, stack in enumerate(STACKS)}


def training(*, layers: int = 16, size: int = 8 * MIB, keep: int = 64 * MIB, steps: int = 8) -> Trace:
    """Steps that save `layers` tensors; the loss and each gradient need as much as one of them."""
    events: list[tuple[int, ...]] = []
    at = iter(range(1 << 32, 1 << 60, 1 << 32))

    def make(size: int, stack: tuple[int, ...]) -> tuple[int, int]:
        made = next(at), size
        events.append((0, *made, NUMBER[stack]))
        return made

    def drop(made: tuple[int, int]) -> None:
        events.extend([(1, *made), (2, *made)])

    begun = []
    make(keep, (2,))
    for number in range(steps):
        begun.append(len(events))
        saved = [make(size, (0, 2)) for _ in range(layers)]
        loss = make(size, (2,))
        for tensor in reversed(saved):
            gradient = make(size, ())
            drop(tensor)
            drop(gradient)
        drop(loss)
        if number == 0:
            make(keep, (1, 2))
    marks = tuple(Annotation("START", f"step#{number}", first) for number, first in enumerate(begun))
    return trace_of(events, frames=FRAMES, stacks=tuple(STACKS), annotations=marks)


def test_roles_follow_from_stacks() -> None:
    events = [(0, (number + 1) << 32, MIB, number) for number in range(len(STACKS))]
    trace = trace_of(events, frames=FRAMES, stacks=tuple(STACKS))
    assert list(lifetimes(trace).role) == list(STACKS.values())
    plain = tuple(Frame(frame.filename, frame.line, frame.name.rpartition(".")[2]) for frame in FRAMES)
    assert list(lifetimes(replace(trace, frames=plain)).role) == list(STACKS.values())
    assert len(lifetimes(replace(trace, frames=(SCRIPT,) * 6)).role) == 0


@needs_native
def test_in_a_replay_as_much_leaves_as_steps_lack() -> None:
    trace = training()
    result = engine.replay(trace, capacity=ENOUGH - LACKING, spill="1GiB")
    spill = result.spill
    assert result.oom is None and 0 < spill.moved_out - spill.saved <= 3 * LACKING
    assert 4 * LACKING <= spill.saved <= 7 * 2 * LACKING
    assert spill.peak <= 3 * LACKING
    assert spill.held_us >= 2 * spill.saved / 55e3
    assert engine.replay(trace, capacity="1GiB", spill="1GiB").spill.moved_out == 0


@needs_native
def test_in_a_replay_nothing_that_is_computed_again_leaves() -> None:
    trace = training()
    stack = list(trace.stack)
    trace.stack[:] = type(trace.stack)(
        "I", [NUMBER[(0, 3, 0, 2)] if each == NUMBER[(0, 2)] else each for each in stack]
    )
    trace.stack[0] = NUMBER[(0, 2)]  # a module that saves nothing
    spill = engine.replay(trace, capacity=ENOUGH - LACKING, spill="1GiB").spill
    assert spill.saved == 0 and spill.moved_out > 0


@needs_native
def test_only_pools_of_vram_are_steered() -> None:
    made = importlib.import_module("vram._native").Replayer("bfc", {}, 0, 0.0, array("Q"), array("Q"))
    for call in (made.look, lambda: made.bring_back(1, 0), lambda: made.steer([], [])):
        with pytest.raises(ValueError, match="only the policy vram spills"):
            call()


@needs_native
def test_in_a_replay_saved_tensors_have_a_part_of_the_host_memory() -> None:
    replayer = importlib.import_module("vram._native").Replayer(
        "vram", {"spill": 8 * MIB}, 64 * MIB, 0.0, array("Q"), array("Q")
    )
    assert replayer.take_host_bytes(8 * MIB) and not replayer.take_host_bytes(1)
    replayer.give_host_bytes(8 * MIB)
    assert replayer.take_host_bytes(8 * MIB)


@needs_native
def test_a_replay_runs_out_of_memory_where_pages_alone_would() -> None:
    trace = training()
    assert engine.replay(trace, capacity=ENOUGH - LACKING, spill=16 * MIB).oom is not None


@needs_native
@pytest.mark.parametrize("first", [0, 5, 20])
def test_recordings_that_begin_in_the_middle_are_replayed(first: int) -> None:
    trace = training()
    names = ("action", "stream", "address", "size", "time_us", "stack", "tag")
    cut = replace(trace, **{name: getattr(trace, name)[first:] for name in names if getattr(trace, name)})
    result = engine.replay(cut, capacity=ENOUGH - LACKING - 64 * MIB * (first > 0), spill="1GiB")
    assert result.oom is None and result.spill.saved > 0
