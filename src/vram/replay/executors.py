"""Runs many replays in parallel: in threads of this process, or on a Dask cluster. Results are the same.

Replays do not hold the GIL while they run.
"""

from __future__ import annotations

import importlib
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vram.arguments import shown, whole_number
from vram.errors import ConfigError, VramError

__all__ = ["FAILURES", "check_cancelled", "run_all", "run_within"]

FAILURES = (VramError, ValueError, ArithmeticError, MemoryError)
"""What a replay raises that cannot be run; whoever needs it only as an addition continues without it."""

Task = Any
Outcome = Any
Work = Callable[[Any, Task], Outcome]
Progress = Callable[[int, int], None] | None


def run_all(
    work: Work,
    programs: Sequence[Any],
    tasks: Sequence[tuple[int, Task]],
    *,
    jobs: int = 1,
    executor: str | Any = None,
    progress: Progress = None,
) -> list[Outcome]:
    """`work(programs[place], task)` for each (place, task), in their order. `executor`: see `sweep`."""
    jobs = whole_number(jobs, "jobs", least=1)
    if executor is None:
        return _in_threads(work, programs, tasks, jobs, progress)
    with _client(executor, jobs) as client:
        return _on_cluster(client, work, programs, tasks, progress)


def _in_threads(
    work: Work, programs: Sequence[Any], tasks: Sequence[tuple[int, Task]], jobs: int, progress: Progress
) -> list[Outcome]:
    cancelled = threading.Event()

    def run(program: Any, task: Task) -> Outcome:
        _cancelled.set(cancelled)
        return work(program, task)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, programs[place], task) for place, task in tasks]
        try:
            for done, _ in enumerate(as_completed(futures), 1):
                _tell(progress, done, len(tasks))
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C reaches only this thread
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise


_cancelled: ContextVar[threading.Event | None] = ContextVar("vram_cancelled", default=None)


def check_cancelled() -> None:
    """Raise if the replay that this thread runs was cancelled."""
    cancelled = _cancelled.get()
    if cancelled is not None and cancelled.is_set():
        raise CancelledError


def run_within(seconds: float, work: Callable[[], Outcome]) -> Outcome | None:
    """`work()`, whose replays are abandoned after so many seconds: None then."""
    expired = threading.Event()
    timer = threading.Timer(seconds, expired.set)
    token = _cancelled.set(expired)
    timer.daemon = True
    timer.start()
    try:
        return work()
    except CancelledError:
        return None
    finally:
        timer.cancel()
        _cancelled.reset(token)


def _tell(progress: Progress, done: int, count: int) -> None:
    if progress is not None:
        progress(done, count)


# --- Dask ---------------------------------------------------------------------------------------------------


@contextmanager
def _client(executor: str | Any, jobs: int) -> Iterator[Any]:
    """A client of the cluster that `executor` names, or `executor` itself."""
    if not isinstance(executor, str):
        if not all(callable(getattr(executor, name, None)) for name in ("submit", "gather")):
            raise ConfigError(f"executor takes dask, dask=ADDRESS or a Dask client, not {shown(executor)}")
        yield executor
        return
    kind, _, address = executor.partition("=")
    if kind != "dask":
        raise ConfigError(f"no executor {shown(executor)}; there is dask, or dask=ADDRESS")
    distributed = _distributed()
    if address:
        with distributed.Client(address) as client:
            yield client
        return
    cluster = distributed.LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        yield client


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        raise ConfigError('the executor dask needs distributed; pip install "vram[dask]"') from error


def _on_cluster(
    client: Any, work: Work, programs: Sequence[Any], tasks: Sequence[tuple[int, Task]], progress: Progress
) -> list[Outcome]:
    """Programs are arguments of tasks: if a worker dies, the scheduler can recreate its data and run its
    tasks elsewhere.
    """
    distributed = _distributed()
    shared = [client.submit(_unpack, _pack(program), pure=False) for program in programs]
    futures = [client.submit(work, shared[place], task, pure=False) for place, task in tasks]
    for done, _ in enumerate(distributed.as_completed(futures), 1):
        _tell(progress, done, len(tasks))
    outcomes: list[Outcome] = client.gather(futures)
    return outcomes


def _pack(program: Any) -> bytes:
    return zlib.compress(pickle.dumps(program, protocol=5), 1)


def _unpack(packed: bytes) -> Any:
    return pickle.loads(zlib.decompress(packed))
