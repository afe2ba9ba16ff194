"""Every public call of every object that holds memory or work, with arguments that make sense.

`World` has one object of each class; `calls(world, "Pool")` are its public names as calls without arguments.
A name that is missing in the table below is an error, so that what is added is tried as well.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np

import vram
from vram.errors import VramError

KIB, MIB = 1 << 10, 1 << 20

DOCUMENTED = (VramError, BufferError, CancelledError)
"""What a call may raise: errors of vram, Python's own for memory that cannot be looked at, and that of
a future which close() cancels."""

CLASSES: dict[str, type] = {
    "Pool": vram.Pool,
    "DriverPool": vram.DriverPool,
    "PinnedPool": vram.PinnedPool,
    "AsyncMemoryPool": vram.AsyncMemoryPool,
    "Arena": vram.Arena,
    "GrowableBuffer": vram.GrowableBuffer,
    "Scratch": vram.Scratch,
    "Buffer": vram.Buffer,
    "Stream": vram.Stream,
    "Event": vram.Event,
    "Device": vram.Device,
    "MemoryManager": vram.MemoryManager,
    "Recorder": vram.Recorder,
    "Monitor": vram.Monitor,
    "Pipeline": vram.Pipeline,
}


class World:
    """One of each, on the host; what another object depends on is another one's of the same class."""

    def __init__(self, folder: Path, *, monitor: bool = False) -> None:
        self.device = vram.Device("host")
        self.model = vram.Device.model("1GiB")
        self.stream = vram.Stream("host")
        self.other = vram.Stream("host")
        self.event = self.other.record_event(vram.Event("host", timing=True))
        self.pool = vram.Pool("host", limit="256MiB", journal=64)
        self.buffer = self.pool.allocate(64 * KIB, stream=self.stream)
        self.address = self.pool.malloc(64 * KIB)
        self.driver_pool = vram.DriverPool(self.model)
        self.pinned_pool = vram.PinnedPool("host", segment_size="2MiB")
        self.async_pool = vram.AsyncMemoryPool("8MiB", "host")
        self.arena = vram.Arena(self.pool)
        self.growable = vram.GrowableBuffer("16MiB", self.pool, size="4MiB")
        self.scratch = vram.Scratch(self.other, pool=self.pool)
        self.manager = vram.MemoryManager()
        self.managed = self.manager.allocate_memory(4 * KIB, device=self.model)
        self.recorded = folder / "run.vtrace"
        self.recorder = vram.record(self.pool, self.recorded)
        self.monitor = vram.monitor(interval=0.01) if monitor else None
        self.pipeline = vram.Pipeline(lambda x: x + 1, device="host")
        self.pipeline.run(np.zeros(10))

    def objects(self) -> dict[str, Any]:
        found = {
            "Pool": self.pool, "DriverPool": self.driver_pool, "PinnedPool": self.pinned_pool,
            "AsyncMemoryPool": self.async_pool,
            "Arena": self.arena, "GrowableBuffer": self.growable, "Scratch": self.scratch,
            "Buffer": self.buffer, "Stream": self.stream, "Event": self.event, "Device": self.device,
            "MemoryManager": self.manager, "Recorder": self.recorder, "Monitor": self.monitor,
            "Pipeline": self.pipeline,
        }  # fmt: skip
        return {name: each for name, each in found.items() if each is not None}


LEFT_OUT = {
    "Arena.take_array": "checks nothing: for Arena.empty alone",
    "Monitor.serve_web": "starts a server",
    "Stream.capture": "the host cannot",
}

Arguments = Callable[[World], tuple[Any, ...]]
ARGUMENTS: dict[str, Arguments] = {
    # pools
    "allocate": lambda world: (4 * KIB,),
    "allocate_async": lambda world: (4 * KIB,),
    "allocate_batch": lambda world: ([100, 4 * KIB],),
    "free": lambda world: (world.address,),
    "growable_close": lambda world: (world.address,),
    "growable_info": lambda world: (world.address,),
    "growable_open": lambda world: (4 * MIB, 0),
    "growable_prepare": lambda world: (world.address, MIB),
    "growable_resize": lambda world: (world.address, 2 * MIB, 0, 0, None),
    "info": lambda world: (world.address,),
    "journal_start": lambda world: (16,),
    "malloc": lambda world: (4 * KIB,),
    "malloc_batch": lambda world: ([100, 4 * KIB],),
    "on_high_water": lambda world: (MIB, lambda reserved: None),
    "on_oom": lambda world: (lambda: False,),
    "part_of": lambda world: (world.address, 0, 16, None, world),
    "reconfigure": lambda world: ({"stream_cache": 64},),
    "record_stream": lambda world: (world.address, world.other),
    "release_unused": lambda world: (False,),
    "reserve": lambda world: (MIB,),
    "reserve_async": lambda world: (MIB,),
    "resume_blocks": lambda world: (None,),
    "retire_stream": lambda world: (world.other.handle,),
    "set_limit": lambda world: (512 * MIB,),
    "add_peer": lambda world: (1,),
    "allow_access": lambda world: (world.model,),
    "set_high_water": lambda world: (MIB, None),
    "set_oom_callback": lambda world: (None,),
    "suspend_blocks": lambda world: (None, False, None),
    "set_spill_callback": lambda world: (None,),
    "steer_spill": lambda world: ([], []),
    "steer_spill_allocations": lambda world: ([], []),
    "spill_block": lambda world: (0,),
    "prefetch_block": lambda world: (0,),
    "park_blocks": lambda world: (None,),
    "unpark_blocks": lambda world: (None,),
    "bring_back": lambda world: (MIB,),
    "create_ahead": lambda world: (MIB, MIB),
    "take_host_bytes": lambda world: (0,),
    "usage": lambda world: (True,),
    "give_host_bytes": lambda world: (0,),
    "release_host_bytes": lambda world: (),
    "trim_to": lambda world: (0, False),
    "warmup": lambda world: ({4 * KIB: 2},),
    "attribute": lambda world: ("release_threshold",),
    "DriverPool.default": lambda world: (world.model,),
    "DriverPool.from_fd": lambda world: (-1, world.model),
    "export_buffer": lambda world: (world.buffer,),
    "export_pointer": lambda world: (world.address,),
    "import_buffer": lambda world: (bytes(64),),
    "import_pointer": lambda world: (bytes(64), 0, 4 * KIB),
    "set_attribute": lambda world: ("release_threshold", 0),
    # what holds memory of a pool
    "empty": lambda world: (100,),
    "full": lambda world: (100, 1),
    "ones": lambda world: (100,),
    "zeros": lambda world: (100,),
    "on_reset": lambda world: (int,),
    "call_at_end": lambda world: (int,),
    "is_open": lambda world: world.arena.mark(),
    "rewind": lambda world: world.arena.mark(),
    "reset_memory": lambda world: (False,),
    "Arena.record_stream": lambda world: (world.other,),
    "array": lambda world: (16,),
    "grow": lambda world: (MIB,),
    "prepare": lambda world: (MIB,),
    "resize": lambda world: (6 * MIB,),
    "shrink": lambda world: (MIB,),
    "GrowableBuffer.record_stream": lambda world: (world.other,),
    "get": lambda world: (4 * KIB,),
    "copy_from": lambda world: (bytes(64 * KIB),),
    "copy_to": lambda world: (bytearray(64 * KIB),),
    "fill": lambda world: (1,),
    "Buffer.free": lambda world: (),
    "Buffer.record_stream": lambda world: (world.other,),
    # streams and events
    "Stream.default": lambda world: (world.device,),
    "launch": lambda world: (abs, 1),
    "wait_event": lambda world: (world.event,),
    "wait_stream": lambda world: (world.other,),
    "elapsed_ms": lambda world: (world.event,),
    "Device.model": lambda world: ("1GiB",),
    "Device.models": lambda world: (2, "1GiB"),
    "can_access": lambda world: (world.model,),
    # the manager
    "allocate_memory": lambda world: (4 * KIB,),
    "dump_allocation_trace": lambda world: (io.StringIO(),),
    "drop_pool": lambda world: (world.model,),
    "free_memory": lambda world: (world.managed,),
    "warmup_cache": lambda world: ([4 * KIB],),
    # who looks
    "mark": lambda world: (),
    "Recorder.mark": lambda world: ("START", "here"),
    "note_failure": lambda world: (_failure(),),
    "Monitor.info": lambda world: (),
    "Monitor.snapshot": lambda world: (world.pool.number,),
    "map": lambda world: ([np.zeros(10)],),
    "run": lambda world: (np.zeros(1000),),
}


def _failure() -> vram.OutOfMemory:
    with vram.Pool(vram.Device.model("4MiB")) as pool:
        try:
            pool.allocate("8MiB")
        except vram.OutOfMemory as error:
            return error
    raise AssertionError


def calls(world: World, kind: str) -> dict[str, Callable[[], Any]]:
    """Every public name of the world's object of that class, as a call that returns when all is done."""
    thing = world.objects()[kind]
    found: dict[str, Callable[[], Any]] = {}
    for name in dir(CLASSES[kind]):
        if not name.startswith("_") and f"{kind}.{name}" not in LEFT_OUT:
            found[f"{kind}.{name}"] = _call(world, thing, kind, name)
    return found


def _call(world: World, thing: Any, kind: str, name: str) -> Callable[[], Any]:
    if not callable(getattr(CLASSES[kind], name)):
        return lambda: getattr(thing, name)
    arguments = ARGUMENTS.get(f"{kind}.{name}", ARGUMENTS.get(name))
    if arguments is None:
        assert not _needed(getattr(thing, name)), f"{kind}.{name} has no arguments in {__name__}"
        return lambda: _finish(getattr(thing, name)())
    return lambda: _finish(getattr(thing, name)(*arguments(world)))


def _needed(method: Any) -> list[str]:
    """Arguments that it cannot do without, as far as they are known."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:
        return []
    return [each.name for each in parameters if each.default is each.empty and "VAR" not in each.kind.name]


def _finish(result: Any) -> Any:
    """What is asynchronous is waited for, what is lazy is taken."""
    if hasattr(result, "add_done_callback"):
        return result.result()
    if inspect.isgenerator(result) or hasattr(result, "__next__"):
        return list(result)
    return result
