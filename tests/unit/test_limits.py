"""Work on files of unknown origin in processes with limits: what these may do, and what their death means."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from made_jobs import MIB, Job

from vram.errors import TraceError
from vram.trace import limits
from vram.trace.convert import FORMATS
from vram.web.child import _told
from vram.web.files import Recordings, _error

pytestmark = [
    pytest.mark.fork,
    pytest.mark.skipif(sys.platform != "linux", reason="there are no limits to set"),
]
Command = Callable[..., tuple[int, str, str]]
Work = Callable[..., Any]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    job = Job()
    job.alloc(3 * MIB)
    return job.save(tmp_path / "job.pickle")


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch, job_file: Path, vram_command: Command) -> Callable[[Work], Any]:
    """Run `vram explain` on a file; the function does the work."""

    def run(work: Work) -> tuple[int, str, str]:
        monkeypatch.setattr("vram.cli.explain.explain", work)
        return vram_command("explain", str(job_file))

    return run


# ---- what the process may do -------------------------------------------------------------------------------


def opened_for_writing(path: Path) -> None:
    with path.open("ab"):
        pass


ATTEMPTS: dict[str, Callable[[Path], Any]] = {
    "an internet socket": lambda path: socket.socket(),
    "a local socket": lambda path: socket.socket(socket.AF_UNIX),
    "a pair of sockets": lambda path: socket.socketpair(),
    "another program": lambda path: subprocess.run(["true"]),
    "a signal": lambda path: os.kill(os.getppid(), 0),
    "a file to write": opened_for_writing,
    "removal": lambda path: path.unlink(),
    "renaming": lambda path: path.rename(path.with_name("other")),
    "a folder": lambda path: path.with_name("folder").mkdir(),
    "cutting": lambda path: os.truncate(path, 0),
    "permissions": lambda path: path.chmod(0o777),
}


@pytest.mark.skipif(os.uname().machine not in limits._REFUSED, reason="the calls of this machine are unknown")
def test_network_programs_processes_and_files_are_refused(job_file: Path, working: Any) -> None:
    before = job_file.read_bytes()

    def attempt(*asked: Any, **more: Any) -> Any:
        refused = []
        for name, act in ATTEMPTS.items():
            try:
                act(job_file)
            except PermissionError:
                refused.append(name)
        raise TraceError(json.dumps(refused))

    code, _, err = working(attempt)
    assert (code, json.loads(err.removeprefix("vram: "))) == (2, list(ATTEMPTS))
    assert job_file.read_bytes() == before


def test_libraries_that_are_loaded_use_one_thread(working: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread for each of many processors, NumPy does not fit into what a small file may use."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "64")

    def answer(*asked: Any, **more: Any) -> Any:
        raise TraceError(os.environ["OPENBLAS_NUM_THREADS"])

    assert working(answer)[2] == "vram: 1\n"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "64"


def test_the_command_itself_keeps_its_rights(job_file: Path, vram_command: Command) -> None:
    assert vram_command("summary", str(job_file))[0] == 0
    assert not limits.in_force()
    socket.socket().close()


# ---- what its death means ----------------------------------------------------------------------------------


def endless(*asked: Any, **more: Any) -> Any:
    while True:
        pass


def insatiable(*asked: Any, **more: Any) -> Any:
    held = []
    while True:
        held.append(bytearray(MIB))


def recursive(*asked: Any, **more: Any) -> Any:
    return recursive(*asked, **more)


def die_of(number: int) -> None:
    """Without the stacks that pytest would print: they would look like a failure."""
    faulthandler.disable()
    signal.raise_signal(number)


DEATHS: dict[str, tuple[Work, str]] = {
    "a crash": (lambda *asked, **more: die_of(signal.SIGSEGV), "died of signal 11"),
    "an abort": (lambda *asked, **more: die_of(signal.SIGABRT), "died of signal 6"),
    "an exit": (lambda *asked, **more: os._exit(0), "ended with status 0"),
    "time": (endless, "more processor time than a recording of its size needs"),
    "memory": (insatiable, "more memory than a recording of its size needs"),
    "no memory left": (lambda *asked, **more: bytearray(1 << 60), "more memory than a recording"),
    "an error of vram": (recursive, "RecursionError"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_the_death_of_the_process_is_one_error(
    death: str, monkeypatch: pytest.MonkeyPatch, working: Any
) -> None:
    monkeypatch.setattr(limits, "WORK_FLOOR_SECONDS", 0)
    monkeypatch.setattr(limits, "WORK_FLOOR_BYTES", 64 * MIB)
    work, said = DEATHS[death]
    code, out, err = working(work)
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("vram: ") and "job.pickle: " in last and said in last and "hostile" in last


SHELL = {
    "a full disk": (
        "vram summary job.pickle > /dev/full",
        2,
        "vram: cannot write the output: No space left on device",
    ),
    "a limit of a file": (
        "ulimit -f 0; vram convert job.pickle --to perfetto -o out.json",
        2,
        "out.json: File too large",
    ),
    "no standard output": (
        "vram convert job.pickle --to folded -o out.folded >&- && test -s out.folded",
        0,
        "",
    ),
    "no standard error": (
        "vram convert job.pickle --to folded -o out.folded 2>&- && test -s out.folded",
        0,
        "",
    ),
    "nothing is said of children": ("trap '' CHLD; vram convert job.pickle --to folded -o out.folded", 0, ""),
}


@pytest.mark.parametrize("case", SHELL)
def test_a_command_does_not_blame_the_file_for_what_is_around_it(case: str, job_file: Path) -> None:
    command, status, said = SHELL[case]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=job_file.parent,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, "hostile" in ended.stderr) == (status, False), ended.stderr
    assert ended.stderr.strip().endswith(said) and "Traceback" not in ended.stderr


def test_an_output_appears_complete_or_not_at_all(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, vram_command: Command
) -> None:
    target = job_file.with_name("out.folded")
    target.write_text("before")

    def dies(trace: Any, file: Any) -> None:
        file.write(b"half")
        die_of(signal.SIGSEGV)

    with monkeypatch.context() as patch:
        patch.setitem(
            FORMATS,
            "folded",
            type("", (), {"suffix": ".folded", "write": staticmethod(dies)}),
        )
        assert vram_command("convert", str(job_file), "--to", "folded", "-o", str(target))[0] == 2
    assert target.read_text() == "before"
    assert vram_command("convert", str(job_file), "--to", "folded", "-o", str(target))[0] == 0
    assert target.read_text() != "before"
    assert {each.name for each in job_file.parent.iterdir()} == {"job.pickle", "out.folded"}


# ---- the page ----------------------------------------------------------------------------------------------


@pytest.fixture
def recordings(job_file: Path) -> Iterator[Recordings]:
    found = Recordings([job_file, job_file])
    yield found
    found.close()


def process_of(recordings: Recordings, number: int) -> int:
    return recordings._processes[number]._child.pid


def test_the_death_of_a_process_is_an_error_of_its_queries_only(recordings: Recordings) -> None:
    recordings.open(0)
    recordings.open(1)
    first = process_of(recordings, 0)
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(recordings.answer, "about", {"file": "0"})
        while not recordings._processes[0].busy:
            pass
        os.kill(first, signal.SIGKILL)
        with pytest.raises(TraceError, match=r"job\.pickle: .*was killed"):
            waiting.result()
    assert json.loads(recordings.answer("events", {"file": "1", "first": "0"}))["events"]
    assert json.loads(recordings.answer("events", {"file": "0", "first": "0"}))["events"]
    assert process_of(recordings, 0) != first


def test_a_process_of_the_page_has_limits_and_ends_with_it(recordings: Recordings) -> None:
    recordings.open(0)
    pid = process_of(recordings, 0)
    state = Path(f"/proc/{pid}/status").read_text()
    assert "Seccomp:\t2" in state and "NoNewPrivs:\t1" in state
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    recordings.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_takes_too_much_memory_is_ended(recordings: Recordings) -> None:
    recordings.open(0)
    process = recordings._processes[0]
    process._watch.allow(-process._watch._most)
    os.kill(process._child.pid, signal.SIGSTOP)
    with pytest.raises(TraceError, match="more memory than a recording of its size needs"):
        recordings.answer("about", {"file": "0"})


def test_a_process_without_a_server_ends(job_file: Path) -> None:
    """Even if it is working: it notices that its input has ended."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom vram.web.files import Recordings\n"
        "found = Recordings([Path(sys.argv[1])])\nfound.open(0)\n"
        "print(found._processes[0]._child.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    server = subprocess.run([sys.executable, "-c", code, str(job_file)], stdout=subprocess.PIPE)
    pid = int(server.stdout)
    assert server.returncode == -signal.SIGKILL
    gone = threading.Event()
    while not gone.is_set():  # the test ends when the process does
        try:
            state = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            gone.set()
        else:
            if state.rpartition(")")[2].split()[0] in "ZX":
                gone.set()


def test_processes_without_queries_are_few(job_file: Path) -> None:
    recordings = Recordings([job_file] * 6)
    try:
        for number in range(6):
            recordings.open(number)
        assert list(recordings._processes) == [2, 3, 4, 5]
        assert recordings.answer("about", {"file": "0"})
    finally:
        recordings.close()


def test_errors_keep_their_class_across_the_processes() -> None:
    for error in (TraceError("bad"), ZeroDivisionError("no such luck")):
        found = _error(*_told(error))
        assert (type(found), str(found)) == (type(error), str(error))
    assert "recording of its size" in str(_error(*_told(MemoryError())))
