"""Every public call in the child of a fork whose parent was busy: a value or a documented error.

Never a hang, a crash, or an effect on the parent.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import assert_quiet, run_program

from effort import THOROUGH

pytestmark = [pytest.mark.fork, pytest.mark.slow]

BUSY = """
    import faulthandler, os, random, sys, threading, traceback
    from pathlib import Path
    sys.path.insert(0, {here!r})
    import contextlib, importlib, pkgutil
    import numpy as np
    import vram
    # Python cannot import a module in the child that another thread was just importing, so all are there.
    # Another library may be missing, or not load beside the others that are installed.
    for module in pkgutil.walk_packages(vram.__path__, "vram.", onerror=lambda _: None):
        with contextlib.suppress(Exception):
            module.name.endswith("__main__") or importlib.import_module(module.name)
    from surface import DOCUMENTED, MIB, World, calls
    from vram.observe.monitor import attach

    WATCHDOG = 60  # seconds for one call in a child
    world = World(Path({folder!r}), monitor=True)
    ending = threading.Event()

    def churn(pool, stream):
        held = []
        while not ending.is_set():
            for size in (100, 4096, 300_000, 3 * MIB):
                held.append(pool.allocate(size, stream=stream, tag="busy"))
            held[-1].record_stream(None)
            held.clear()

    def look():
        while not ending.is_set():
            world.pool.stats(), world.pool.snapshot(), world.pool.journal(), world.pool.trim()

    def launch():
        with vram.Stream("host") as stream:
            while not ending.is_set():
                stream.launch(abs, -1)
                stream.record_event().synchronize()
                vram.Stream("host").close()

    def hold():
        arena = vram.Arena(world.pool)
        while not ending.is_set():
            world.growable.resize("8MiB"), world.growable.resize("2MiB")
            arena.empty(1000), arena.reset()
            world.pool.allocate_async(4096).result()
            world.recorder.flush()

    def request():
        manager, model = world.manager, world.model
        while not ending.is_set():
            manager.free_memory(manager.allocate_memory(4096, device=model), device=model)
            world.driver_pool.allocate(4096), world.pinned_pool.allocate(4096)
            list(world.pipeline.map([np.zeros(10)]))

    churns = [lambda stream=stream: churn(world.pool, stream) for stream in (None, world.stream)]
    threads = [
        threading.Thread(target=work, daemon=True) for work in (*churns, look, launch, hold, request)
    ]
    for thread in threads:
        thread.start()

    def try_all(seed, kinds):
        dice = random.Random(seed)
        every = {{name: call for kind in kinds for name, call in calls(world, kind).items()}}
        names = list(every)
        dice.shuffle(names)
        for name in names:
            faulthandler.dump_traceback_later(WATCHDOG, exit=True)  # of this call
            try:
                os.write(3, f"{{name}}\\n".encode())
                every[name]()
            except DOCUMENTED:
                pass
            faulthandler.cancel_dump_traceback_later()

    def child(seed, kinds):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(write, 3)
            code = 1
            try:
                try_all(seed, kinds)
                code = 0
            except BaseException:
                traceback.print_exc()
            faulthandler.dump_traceback_later(WATCHDOG, exit=True)  # of its end
            if seed % 2 or code:
                os._exit(code)
            sys.exit(0)  # with everything that happens at an exit
        os.close(write)
        with os.fdopen(read) as told:
            names = told.read().split()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == 0, f"fork {{seed}} ended with {{code}} in {{names[-1]}}"

    world.buffer.fill(7)
    world.stream.synchronize()
"""

AFTER = """
    ending.set()
    for thread in threads:
        thread.join()
    world.stream.synchronize()
    assert set(bytes(world.buffer)) == {7}, "the child wrote into the parent's memory"
    assert not world.pool.closed and not world.stream.closed and not world.growable.closed
    for pool in (world.pool, world.driver_pool, world.pinned_pool):
        assert pool.check() is None
    world.pool.free(world.address)
    world.manager.free_memory(world.managed, device=world.model)
    assert world.growable.resize("4MiB") and world.arena.empty(10).shape == (10,)
    with attach(os.getpid()) as client:
        assert client.status()["pid"] == os.getpid()
    world.recorder.close()
    trace = vram.open(world.recorded, trusted=True)
    assert not trace.truncated and trace.dropped == 0
    world.monitor.close()
"""

GROUPS = {
    "pools": ("Pool", "PinnedPool", "DriverPool", "AsyncMemoryPool"),
    "holders": ("Arena", "GrowableBuffer", "Scratch", "Buffer"),
    "devices": ("Device", "Stream", "Event", "Pipeline"),
    "watchers": ("MemoryManager", "Recorder", "Monitor"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_every_call_in_the_child_of_a_busy_parent_ends(group: str, tmp_path: Path) -> None:
    forks = f"""
    for seed in range({6 if THOROUGH else 1}):
        child(seed, {GROUPS[group]!r})
    """
    busy = BUSY.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    assert_quiet(run_program(busy, forks, AFTER))


MODEL = """
    import faulthandler, os, random, sys, threading
    import vram

    MIB = 1 << 20
    device = vram.Device.model("1GiB")
    backend, pool, stream = device._core.backend, vram.Pool(device), vram.Stream(device)
    event, buffer = stream.record_event(), pool.allocate(MIB, stream=stream)
    ending = threading.Event()

    def churn():
        while not ending.is_set():
            pool.allocate(3 * MIB).fill(1)
            backend.advance(10.0), backend.counts(), backend.clear_executed()
            vram.Event(device).record(stream)

    threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()

    # Every name of the device that is a call, with what it takes.
    ARGUMENTS = {
        "reserve": (MIB,), "release": (0, MIB), "space_reserve": (MIB,), "space_release": (0, MIB),
        "page_create": (2 * MIB,), "page_release": (1, 2 * MIB), "map": (0, 2 * MIB, 1),
        "set_access": (0, 2 * MIB), "unmap": (0, 2 * MIB), "stream_destroy": (1,), "stream_adopt": (1,),
        "stream_disown": (1,), "stream_synchronize": (0,), "stream_query": (0,), "stream_wait": (0, 1),
        "event_destroy": (1,), "event_record": (1, 0), "event_query": (1,), "event_synchronize": (1,),
        "elapsed_ms": (1, 1), "copy": (0, 0, 0, 0), "copy_now": (0, 0, 0, 0), "fill": (0, 0, 0, 0),
        "launch": (0, int), "capture_of": (1,), "capture_begin": (1,), "capture_end": (1,),
        "graph_launch": (1, 0), "graph_destroy": (1,), "advance": (1.0,), "set_time": (1.0,),
        "set_lag": (1.0,), "set_manual": (True,), "step": (0,), "work": (0, 1), "fail": ("map",),
        "calls": ("map",), "foreign_destroy": (1,), "open_plain": (backend,),
        "stream_wait_peer": (0, backend, 1), "copy_across": (0, 0, backend, 0, 0, 0),
        "link": (backend, 1.0, True), "opened": (0, 0, 1),
    }
    VALUES = {"canonical", "lasting", "can_access", "waits_for"}  # are what they are

    def refused(call, *arguments):
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            call(*arguments)
        except vram.DeviceError:
            return True
        finally:
            faulthandler.cancel_dump_traceback_later()
        return False

    def child():
        names = [name for name in dir(type(backend))
                 if not name.startswith("_") and callable(getattr(backend, name)) and name not in VALUES]
        assert set(ARGUMENTS) <= set(names), set(ARGUMENTS) - set(names)
        let = [name for name in names if not refused(getattr(backend, name), *ARGUMENTS.get(name, ()))]
        own = (device.synchronize, stream.synchronize, stream.query, event.query, event.synchronize,
               lambda: vram.Stream(device), lambda: vram.Pool(device).allocate(MIB), buffer.record_stream,
               lambda: pool.allocate(MIB), lambda: buffer.fill(1), lambda: stream.launch(int), pool.trim)
        let += [call for call in own[:7] + own[8:] if not refused(call)]
        assert not let, let

    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child()
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ending.set()
    for thread in threads:
        thread.join()
    assert pool.check() is None
"""


def test_a_model_of_a_device_refuses_every_call_in_the_child() -> None:
    assert_quiet(run_program(MODEL))


def test_every_class_is_tried() -> None:
    from surface import CLASSES

    assert sorted(CLASSES) == sorted(kind for group in GROUPS.values() for kind in group)
