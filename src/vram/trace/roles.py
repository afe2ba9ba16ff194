"""Which part of a training step of PyTorch made an allocation, judging by its stack."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum

from .allocations import Allocations
from .model import BEFORE, Frame, Trace

__all__ = ["Role", "find_roles"]


class Role(IntEnum):
    """The part of a step. Of these, only what FORWARD made may be saved for the backward pass.

    FORWARD is what a module makes. OTHER is everything else, such as data, a loss outside of modules, what is
    inside a checkpoint and computed again, and what was there before the recording began.
    """

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


def find_roles(trace: Trace, made: Allocations) -> array[int]:
    """The role of each allocation. Empty if no stack has a module of PyTorch."""
    parts = [_part_of(frame) for frame in trace.frames]
    roles = [_role(parts[frame] for frame in stack) for stack in trace.stacks]
    if Role.FORWARD not in roles:
        return array("B")
    return array("B", [Role.OTHER if at == BEFORE else roles[trace.stack[at]] for at in made.start])


def _part_of(frame: Frame) -> str:
    """What a frame of PyTorch does: "" if that tells nothing."""
    place = frame.filename.replace("\\", "/")
    name = frame.name.rpartition(".")[2]  # some recordings have qualified names
    if place.endswith("torch/nn/modules/module.py") and name == "_call_impl":
        return "module"
    if place.endswith("torch/utils/checkpoint.py"):
        return "checkpoint"
    if place.endswith("torch/autograd/function.py"):
        return "function"
    if frame.begins_backward:
        return "backward"
    return "optimizer" if "torch/optim/" in place else ""


def _role(parts: Iterable[str]) -> Role:
    """The role of a stack, innermost part first."""
    role, empty = Role.OTHER, True
    for part in parts:
        empty = False
        if part == "checkpoint":
            return Role.OTHER
        if part == "backward":
            return Role.BACKWARD
        if part == "optimizer":  # which may call the modules itself
            return role if role == Role.FORWARD else Role.OPTIMIZER
        if part == "module":
            role = Role.FORWARD
        elif part == "function" and role == Role.OTHER:  # in a thread of the backward pass, unless …
            role = Role.BACKWARD
    # Backward passes run in threads of their own, where only functions of the program have stacks.
    return Role.BACKWARD if empty else role
