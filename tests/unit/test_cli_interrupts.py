"""Ctrl-C ends whatever takes long, and a command that it ends says so by its exit code."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_jobs import Job

import vram
from vram.replay import replay
from vram.replay.executors import check_cancelled, run_all

HOURS = 10_000.0


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """A signal comes in a moment; where the work does not end by it, the test never does."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        yield
    timer.join()


def hard_rows() -> list[tuple[int, int, int, int]]:
    """No plan of these is known that reaches the lower bound, so planning goes on until it is told to end."""
    chosen = random.Random(7)
    begins = [chosen.randrange(300) for _ in range(3000)]
    return [(i, at, at + chosen.randrange(1, 10), chosen.randrange(1, 10**6)) for i, at in enumerate(begins)]


def test_planning_is_interrupted() -> None:
    with interrupted():
        vram.plan(hard_rows(), align=1, time_limit=HOURS)


def test_a_replay_asks_whether_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    def ask() -> None:
        raise Enough

    monkeypatch.setattr("vram.replay.run.check_cancelled", ask)
    job = Job()
    job.alloc(1000)
    with pytest.raises(Enough):
        replay(job.trace())


def test_a_replay_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler runs between two rows, not after the last."""
    monkeypatch.setattr("vram.replay.run.check_cancelled", lambda: signal.raise_signal(signal.SIGINT))
    job = Job()
    job.alloc(1000)
    with pytest.raises(KeyboardInterrupt):
        replay(job.trace())


def test_a_sweep_gives_up_what_runs_and_what_waits() -> None:
    begun, ended = [], []

    def work(program: Any, task: int) -> None:
        begun.append(task)
        try:
            while True:  # as long as the replay is wanted
                check_cancelled()
        finally:
            ended.append(task)

    with interrupted():
        run_all(work, [None], [(0, task) for task in range(8)], jobs=2)
    assert sorted(begun) == sorted(ended) and len(begun) <= 4


def test_an_interrupted_command_exits_with_130(
    vram_command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text("id,lower,upper,size\n" + "".join(f"{a},{b},{c},{d}\n" for a, b, c, d in hard_rows()))
    told, tell = os.pipe()

    def plan(*arguments: Any, **options: Any) -> vram.Plan:
        os.write(tell, b"begun")
        return vram.plan(*arguments, **options)

    def interrupt() -> None:
        os.read(told, 5)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("vram.cli.plan.plan", plan)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    code, out, err = vram_command("plan", str(path), "--time-limit", str(HOURS))
    interrupter.join()
    assert (code, out, err) == (130, "", "vram: interrupted\n")
    os.close(tell)
    assert os.read(told, 1) == b""  # the child that planned has ended, too
    os.close(told)
