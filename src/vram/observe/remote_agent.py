"""What `vram attach` runs inside another process; `vram.observe.remote` sends it this file as text.

It uses the standard library and what the process has imported already, in any version of Python from 3.8 on.
It answers through files in a folder: `state.json` says how far it is, a file `stop` ends a recording early.
Whatever happens, the process must go on as if nothing had been there: no error may leave this file, and a
history that was switched on here is switched off again.
"""

from __future__ import annotations

import _thread
import atexit
import inspect
import json
import os
import pickle
import shutil
import sys
import time
from typing import Any

POLL_SECONDS = 0.1
"""How often the end of a recording is looked for."""
EXIT_SECONDS = 60.0
"""How long a process that ends during a recording waits for the file to be written."""
TORCH_ENTRIES = 200_000
"""Events that PyTorch keeps. When there are more, the oldest are lost."""


class Refused(Exception):
    """There is nothing to record, or it cannot be recorded. The message is for the user."""


def start(request: dict[str, Any], page: int) -> None:
    """Serve the request in a thread that Python knows; a plain one would leave a trace in `threading`.

    Nothing is done in a process that has become that of another user, to whom the folder does not belong.
    """
    if hasattr(os, "getresuid") and set(os.getresuid()) != {request["user"]}:
        return
    threading = sys.modules.get("threading")
    if threading is None:  # then there is neither PyTorch nor vram, and the answer is short
        serve(request, page)
    else:
        threading.Thread(target=serve, args=(request, page), name="vram-attach", daemon=True).start()


def serve(request: dict[str, Any], page: int) -> None:
    """Record, answer and clean up."""
    folder = request["folder"]
    mark = f"_vram_attached_{os.getpid()}"
    try:
        unmap(page)
        if vars(sys).setdefault(mark, folder) != folder:
            raise Refused(f"another vram attach is recording process {request['pid']}; wait until it ends")
        try:
            answer(folder, {"state": "done", **record(request)})
        finally:
            vars(sys).pop(mark, None)
    except Refused as error:
        answer(folder, {"state": "failed", "error": str(error)})
    except BaseException as error:
        why = f"process {request['pid']} was not recorded: {type(error).__name__}: {error}"
        answer(folder, {"state": "failed", "error": why})
    finally:
        if is_gone(request):
            shutil.rmtree(folder, ignore_errors=True)


def unmap(page: int) -> None:
    """Release the page of the string that started this, if the process has what it takes."""
    ctypes = sys.modules.get("ctypes")
    if page and ctypes is not None:
        ctypes.CDLL(None).munmap(ctypes.c_void_p(page), ctypes.c_size_t(4096))


def answer(folder: str, state: dict[str, Any]) -> None:
    """Write the state. There may be nobody left to read it."""
    path = os.path.join(folder, "state.json")
    try:
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(path + ".new", path)
    except OSError:
        pass


def is_gone(request: dict[str, Any]) -> bool:
    """Whether the `vram attach` that asked has ended or lost interest."""
    if not os.path.isdir(request["folder"]):
        return True
    try:
        os.kill(request["asked_by"], 0)
    except PermissionError:
        return False
    except OSError:
        return True
    return False


# ---- recording --------------------------------------------------------------------------------------------


def record(request: dict[str, Any]) -> dict[str, Any]:
    """Record for as long as was asked, and write the files; returns what the answer says of them."""
    seconds, folder = request["seconds"], request["folder"]
    sources = find_sources(request["pid"])
    try:
        for source in sources:
            source.begin(folder, seconds is not None)
        if seconds is not None:
            wait(request, sources)
        answer(folder, {"state": "writing"})
        if is_gone(request):
            return {}
        files = [file for source in sources for file in source.write(folder)]
    finally:
        for source in sources:
            source.end()
    notes = [note for source in sources for note in source.notes]
    if not files:
        raise Refused(f"nothing was recorded of process {request['pid']}: {'; '.join(notes)}")
    return {"files": files, "notes": notes}


def wait(request: dict[str, Any], sources: list[Any]) -> None:
    """Wait until the time is over, somebody stops the recording, or the process ends."""
    threading = sys.modules["threading"]
    ending, me = threading.Event(), threading.current_thread()

    def end() -> None:
        ending.set()
        me.join(EXIT_SECONDS)

    atexit.register(end)
    try:
        begin = time.monotonic()
        while not ending.wait(POLL_SECONDS):
            passed = time.monotonic() - begin
            events = sum(source.events() for source in sources)
            answer(request["folder"], {"state": "recording", "seconds": passed, "events": events})
            stopped = os.path.exists(os.path.join(request["folder"], "stop"))
            if passed >= request["seconds"] or stopped or is_gone(request):
                break
    finally:
        atexit.unregister(end)


def find_sources(pid: int) -> list[Any]:
    """What this process has that can be recorded. Raises Refused, with the reason, if there is nothing."""
    torch, observer = sys.modules.get("torch"), sys.modules.get("vram.core.observer")
    sources: list[Any] = []
    if observer is not None and observer.open_pools():
        sources.append(Pools(observer))
    if torch is not None and torch_allocates(torch):
        sources.append(Torch(torch))
    if sources:
        return sources
    if torch is not None:
        why = "has imported PyTorch, but has not used CUDA yet"
    elif "vram" in sys.modules:
        why = "has imported vram, but has no open pool"
    else:
        why = "has imported neither PyTorch nor vram"
    raise Refused(f"nothing to record: process {pid} {why}")


def torch_allocates(torch: Any) -> bool:
    """Whether PyTorch has GPU memory from its own allocator, and not from vram's pools."""
    ours = sys.modules.get("vram.torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda is not None and cuda.is_initialized() and not (ours is not None and ours.installed()))


def read_history(torch: Any) -> dict[str, Any]:
    """PyTorch's snapshot, read without importing `torch._inductor`, which PyTorch would do to resolve stacks.

    The import takes seconds. In another thread than the program's, it makes imports of the program fail that
    overlap with it.
    """
    lazily = vars(torch).get("__getattr__")
    reader = _thread.get_ident()

    def get(name: str) -> Any:
        if name == "_inductor" and _thread.get_ident() == reader:
            raise AttributeError(name)
        return lazily(name)

    if lazily is not None:
        torch.__getattr__ = get
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    finally:
        if lazily is not None:
            torch.__getattr__ = lazily
    return snapshot


class Torch:
    """PyTorch's own allocator, through the snapshots and the history that PyTorch offers."""

    def __init__(self, torch: Any) -> None:
        self.notes: list[str] = []
        self._torch = torch
        self._memory = torch.cuda.memory
        self._started = False
        self._allocations = 0

    def begin(self, _folder: str, timed: bool) -> None:
        """Switch the history on, unless the program has done so for itself."""
        if not timed:
            return
        self._allocations = self._count()
        if self._keeps_history():
            self.notes.append(
                "the program keeps PyTorch's history itself, with its own settings; it stays on"
            )
            return
        wanted = {"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": TORCH_ENTRIES}
        switch = self._memory._record_memory_history
        taken = inspect.signature(switch).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in taken):
            wanted = {each.name: wanted[each.name] for each in taken if each.name in wanted}
        self._started = True
        switch(**wanted)

    def _keeps_history(self) -> bool:
        asked = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        return bool(any(read_history(self._torch).get("device_traces", ())) if asked is None else asked())

    def _count(self) -> int:
        """Allocations so far, on all devices."""
        devices = range(self._torch.cuda.device_count())
        counted = (self._torch.cuda.memory_stats(each).get("allocation.all.allocated", 0) for each in devices)
        return int(sum(counted))

    def events(self) -> int:
        """Allocations since the beginning."""
        return self._count() - self._allocations

    def write(self, folder: str) -> list[dict[str, Any]]:
        """Write a snapshot with the history, as PyTorch does."""
        snapshot = read_history(self._torch)
        with open(os.path.join(folder, "torch.pickle"), "wb") as file:
            pickle.dump(snapshot, file)
        reserved = sum(segment.get("total_size", 0) for segment in snapshot.get("segments", ()))
        events = max(map(len, snapshot.get("device_traces", ())), default=0)
        if self._started and events >= TORCH_ENTRIES:
            self.notes.append(
                f"PyTorch kept only the last {TORCH_ENTRIES} events of a device; use a shorter --for for all"
            )
        return [{"file": "torch.pickle", "of": "PyTorch", "name": "torch", "bytes": reserved}]

    def end(self) -> None:
        """Switch off what was switched on."""
        if self._started:
            self._started = False
            self._memory._record_memory_history(enabled=None)


class Pools:
    """The pools of vram, through its recorder, which writes what is held first."""

    def __init__(self, observer: Any) -> None:
        self.notes: list[str] = []
        self._observer = observer
        self._folder = ""
        self._recorders: list[Any] = []
        self._end_following: Any = None

    def begin(self, folder: str, timed: bool) -> None:
        """Record the pools there are, and those that the program creates meanwhile."""
        self._folder = folder
        if timed:
            self._end_following = self._observer.follow_pools(self._follow)
        else:
            for pool in self._observer.open_pools():
                self._follow(pool)

    def _follow(self, pool: Any) -> None:
        """Called in the program's own threads: an error must not reach them."""
        from vram.observe.recorder import Recorder

        try:
            path = os.path.join(self._folder, f"pool-{pool.number}.vtrace")
            self._recorders.append(Recorder(pool, path))
        except Exception as error:
            self.notes.append(f"the pool on {pool.device.name} cannot be recorded: {error}")

    def events(self) -> int:
        """Events written so far."""
        return int(sum(recorder.events for recorder in self._recorders))

    def write(self, _folder: str) -> list[dict[str, Any]]:
        """End the recordings."""
        return [self._written(recorder) for recorder in self._recorders]

    def _written(self, recorder: Any) -> dict[str, Any]:
        pool = recorder.pool
        reserved = 0 if pool.closed else pool.stats().reserved
        recorder.close()
        name = pool.device.name
        return {"file": recorder.path.name, "of": f"a pool on {name}", "name": name, "bytes": reserved}

    def end(self) -> None:
        """End what has not ended."""
        if self._end_following is not None:
            self._end_following()
        for recorder in self._recorders:
            try:
                recorder.close()
            except Exception as error:
                self.notes.append(str(error))
