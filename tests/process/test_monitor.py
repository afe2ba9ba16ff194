"""A process that lets others look: who may, what they are told, and what is left when it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from programs import assert_quiet, run_program
from waiting import PATIENCE

import vram
from vram.observe import monitor as monitoring
from vram.observe.monitor import attach, processes
from vram.observe.status import Observatory
from vram.system.runtime import runtime_directories


@pytest.fixture
def watched() -> Iterator[vram.Monitor]:
    with vram.monitor(interval=0.05) as found:
        yield found


@contextlib.contextmanager
def other_process(*lines: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `lines`, says that it is ready, and waits to be told to end."""
    program = textwrap.dedent("\n".join(textwrap.dedent(part) for part in lines))
    program += "\nprint('ready', flush=True)\ninput()\n"
    started = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdin is not None and started.stdout is not None
    try:
        assert started.stdout.readline() == "ready\n"
        yield started
    finally:
        if started.poll() is None:
            with contextlib.suppress(OSError):
                started.stdin.write("\n")
                started.stdin.flush()
        started.wait(PATIENCE)
        started.stdin.close()
        started.stdout.close()


HOLDS = """
    import vram
    pool = vram.Pool(vram.Device.model("1GiB"))
    stream = vram.Stream(pool.device)
    with vram.tag("weights"):
        kept = [pool.allocate("8MiB", stream=stream) for _ in range(4)]
    vram.monitor()
"""


# ---- what is told -----------------------------------------------------------------------------------------


def test_another_process_is_told_what_this_one_holds() -> None:
    with other_process(HOLDS) as other, attach(other.pid) as client:
        told = client.status()
    assert told["pid"] == other.pid
    (pool,) = told["pools"]
    assert (pool["allocated"], pool["live"], pool["memory"]) == (32 << 20, 4, pool["device"])
    assert [(each["tag"], each["bytes"], each["count"]) for each in told["tags"]] == [
        ("weights", 32 << 20, 4)
    ]
    assert any(stream["live"] == 32 << 20 for stream in told["streams"])
    (device,) = told["devices"]
    assert device["total"] == 1 << 30
    assert device["pools"] == pool["reserved"]
    parts = ("pools", "libraries", "processes", "unknown", "free")
    assert sum(device[part] for part in parts) == device["total"]


def test_holders_have_the_line_where_stacks_are_kept() -> None:
    with vram.Pool(vram.Device.model("1GiB")) as pool, vram.monitor(stacks="python") as watched:
        kept = pool.allocate("1MiB", tag="here")
        (holder,) = [each for each in watched.status()["holders"] if each["tag"] == "here"]
        assert holder["stack"][0][0] == __file__
        assert "test_holders_have" in holder["stack"][0][2]
        del kept
    assert not pool.keeps_stacks


def test_a_pool_made_later_keeps_stacks_too(watched: vram.Monitor) -> None:
    watched.keep_stacks()
    with vram.Pool(vram.Device.model("1GiB")) as pool:
        assert pool.keeps_stacks


def test_samples_make_a_history_with_rates() -> None:
    watched = vram.monitor(interval=60)
    with watched, vram.Pool(vram.Device.model("1GiB")) as pool:
        watched.observatory.sample()
        for _ in range(100):
            pool.free(pool.malloc(4096))
        kept = pool.allocate("1MiB")
        watched.observatory.sample()
        told = watched.status(history=1)
        assert len(told["history"]) == 1
        moment, allocated, reserved, pending, rate = told["history"][0]
        assert allocated >= 1 << 20 and reserved >= allocated + pending
        assert told["pools"][-1]["pending"] == 0
        assert rate > 0 and told["pools"][-1]["rate"] > 0 and moment <= told["time"]
        del kept


def test_more_holders_than_asked_for_are_counted(watched: vram.Monitor) -> None:
    with vram.Pool(vram.Device.model("1GiB")) as pool:
        before = Observatory().status(top=1000)  # other pools of this process may hold memory
        kept = [pool.allocate(4096, tag=f"tag {number}") for number in range(7)]
        told = watched.status(top=3)
        for what in ("holders", "tags"):
            assert len(told[what]) == 3
            assert told["left_out"][what] == len(before[what]) + 7 - 3
        del kept


def test_a_snapshot_has_the_blocks(watched: vram.Monitor) -> None:
    with vram.Pool(vram.Device.model("1GiB")) as pool, attach(os.getpid()) as client:
        kept = pool.allocate("3MiB", tag="seen")
        told = client.snapshot(pool.number)
        assert told == json.loads(json.dumps(pool.snapshot().to_dict()))
        with pytest.raises(vram.DeviceError, match="no open pool"):
            client.snapshot(pool.number + 1)
        del kept


def test_one_monitor_a_process(watched: vram.Monitor) -> None:
    assert vram.monitor() is watched
    watched.close()
    again = vram.monitor()
    assert again is not watched
    again.close()
    again.close()


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf")])
def test_an_interval_that_makes_no_sense_is_refused(interval: float) -> None:
    with pytest.raises(vram.ConfigError, match="interval"):
        vram.monitor(interval=interval)
    with pytest.raises(vram.ConfigError, match="stacks"):
        vram.monitor(stacks="c")


# ---- who may look -----------------------------------------------------------------------------------------


def test_the_socket_is_the_users_alone(watched: vram.Monitor, runtime: Path) -> None:
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert watched.path.parent == runtime
    assert stat.S_IMODE(watched.path.stat().st_mode) == 0o600


def test_another_users_process_is_told_nothing(
    watched: vram.Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = os.geteuid() + 1
    with socket.socket(socket.AF_UNIX) as link:
        # What the kernel would say of a stranger that got so far, as root could let it.
        monkeypatch.setattr(monitoring, "_peer", lambda _link: (1, stranger))
        link.connect(str(watched.path))
        link.settimeout(PATIENCE)
        assert "another user" in json.loads(link.makefile("rb").readline())["error"]


def test_a_strangers_socket_is_not_asked(watched: vram.Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    real = monitoring._peer
    seen: list[Any] = []

    def lies_to_the_client(link: socket.socket) -> tuple[int, int]:
        seen.append(link)
        pid, user = real(link)
        return pid, user + (threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(monitoring, "_peer", lies_to_the_client)
    with pytest.raises(vram.DeviceError, match="not by you"):
        attach(os.getpid())
    assert seen


@pytest.mark.parametrize("how", ["others may enter", "a file", "a link"])
def test_an_unsafe_directory_is_refused(how: str, runtime: Path, tmp_path: Path) -> None:
    if how == "others may enter":
        runtime.mkdir(mode=0o755)
        runtime.chmod(0o755)
    elif how == "a file":
        runtime.write_text("")
    else:
        runtime.symlink_to(tmp_path)
    with pytest.raises(vram.ConfigError, match="not a safe directory"):
        vram.monitor()
    assert processes() == []


def test_a_name_too_long_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("VRAM_RUNTIME_DIR", str(long))
    with pytest.raises(vram.ConfigError, match="too long"):
        vram.monitor()


def test_where_sockets_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = tmp_path / f"vram-{os.geteuid()}"
    assert runtime_directories() == [Path(os.environ["VRAM_RUNTIME_DIR"])], "and nowhere else"
    monkeypatch.delenv("VRAM_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert runtime_directories() == [shared]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directories() == [tmp_path / "vram", shared]


def test_processes_with_another_directory_are_not_seen(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    with other_process(HOLDS) as other:
        assert [each.pid for each in processes()] == [other.pid]
        monkeypatch.setenv("VRAM_RUNTIME_DIR", f"{runtime}2")
        assert processes() == []
        with pytest.raises(vram.DeviceError, match="not monitored"):
            attach(other.pid)


# ---- hostile and careless clients -------------------------------------------------------------------------


@contextlib.contextmanager
def plain_link(watched: vram.Monitor) -> Iterator[tuple[socket.socket, BinaryIO]]:
    """A connection that was greeted."""
    with socket.socket(socket.AF_UNIX) as link, link.makefile("rb") as lines:
        link.settimeout(PATIENCE)
        link.connect(str(watched.path))
        assert json.loads(lines.readline()) == {"answer": {"protocol": 1, "pid": os.getpid()}}
        yield link, lines


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"not JSON\n",
        b"[]\n",
        b"null\n",
        b'"status"\n',
        b"\xff\xfe\n",
        b'{"ask": "everything"}\n',
        b'{"ask": ["status"]}\n',
        b'{"ask": "status", "top": -1}\n',
        b'{"ask": "status", "top": true}\n',
        b'{"ask": "status", "top": 1e99}\n',
        b'{"ask": "status", "history": "all"}\n',
        b'{"ask": "snapshot", "pool": 99999}\n',
        b"[" * 4000 + b"\n",
    ],
)
def test_nonsense_is_answered_in_words_and_the_next_question_is_served(
    watched: vram.Monitor, line: bytes
) -> None:
    with plain_link(watched) as (link, lines):
        link.sendall(line)
        assert set(json.loads(lines.readline())) == {"error"}
        link.sendall(b'{"ask": "status"}\n')
        assert set(json.loads(lines.readline())) == {"answer"}


def test_a_question_without_end_is_cut_off(watched: vram.Monitor) -> None:
    with plain_link(watched) as (link, lines):
        link.sendall(b"x" * (monitoring.MOST_ASKED + 1))
        assert "error" in json.loads(lines.readline())
        assert lines.readline() == b""


def test_no_more_clients_than_are_served(watched: vram.Monitor) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(monitoring.MOST_CLIENTS):
            client = stack.enter_context(attach(os.getpid()))
            client.status(top=0)
        with pytest.raises(vram.DeviceError, match="looking already"):
            attach(os.getpid())


def test_clients_that_wait_or_leave_do_not_hold_up_others(watched: vram.Monitor) -> None:
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as deaf:
        silent.connect(str(watched.path))
        deaf.connect(str(watched.path))
        deaf.sendall(b'{"ask": "status"}\n' * 200)  # and never reads
        with attach(os.getpid()) as client:
            assert client.status()["pid"] == os.getpid()


def test_a_server_that_talks_nonsense_is_an_error(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    for reply, words in ((b"garbage\n", "not JSON"), (b"[1]\n", "refuses"), (b"", "has ended")):
        with socket.socket(socket.AF_UNIX) as listener:
            path = runtime / "1.sock"
            listener.bind(str(path))
            listener.listen()

            def serve(listener: socket.socket = listener, reply: bytes = reply) -> None:
                link, _ = listener.accept()
                with link:
                    link.sendall(reply)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(vram.DeviceError, match=words):
                monitoring.Client(monitoring.Process(1, path))
            thread.join()
            path.unlink()


# ---- beginnings and ends ----------------------------------------------------------------------------------


def test_the_end_of_a_process_takes_its_socket_away(runtime: Path) -> None:
    with other_process(HOLDS) as other:
        (found,) = processes()
        assert found.pid == other.pid
    assert other.returncode == 0
    assert list(runtime.iterdir()) == []


@pytest.mark.fork
def test_a_killed_process_leaves_nothing_that_stays(runtime: Path) -> None:
    with other_process(HOLDS) as other:
        client = attach(other.pid)
        other.send_signal(signal.SIGKILL)
        other.wait(PATIENCE)
    with client, pytest.raises(vram.DeviceError, match="ended"):
        client.status()
    assert len(list(runtime.iterdir())) == 1
    assert processes() == []
    assert list(runtime.iterdir()) == []


def test_a_name_left_behind_is_taken_over(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    left = runtime / f"{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    with vram.monitor() as watched:
        assert watched.path == left
        with attach(os.getpid()) as client:
            assert client.status()["pid"] == os.getpid()


def test_a_name_that_answers_is_left_alone(runtime: Path) -> None:
    """Two containers that share a directory may each have a process of this number."""
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(runtime / f"{os.getpid()}.sock"))
        alive.listen()
        with vram.monitor() as watched:
            assert watched.path == runtime / f"{os.getpid()}-1.sock"
            assert [each.pid for each in processes()] == [os.getpid()] * 2


def test_nobody_or_several_to_attach_to(runtime: Path) -> None:
    with pytest.raises(vram.DeviceError, match=r"vram\.monitor\(\)"):
        attach()
    with pytest.raises(vram.DeviceError, match="process 1 is not monitored"):
        attach(1)
    with other_process(HOLDS) as one:
        with attach() as client:
            assert client.status()["pid"] == one.pid
        with other_process(HOLDS), pytest.raises(vram.DeviceError, match=str(one.pid)):
            attach()


@pytest.mark.fork
def test_a_fork_is_not_monitored_and_leaves_the_parent_so() -> None:
    ended = run_program(
        """
        import os, vram
        from vram.observe.monitor import attach, processes
        pool = vram.Pool("host")
        parent = vram.monitor()
        client = attach(os.getpid())
        client.status()
        child = os.fork()
        if not child:
            assert parent.closed
            parent.close()
            assert [each.pid for each in processes()] == [os.getppid()]
            with attach(os.getppid()) as parents:
                assert parents.status()["pid"] == os.getppid()
            with vram.monitor(), attach(os.getpid()) as own:
                assert own.status()["pools"] == []
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert parent.path.exists() and client.status()["pid"] == os.getpid()
        client.close()
        """
    )
    assert_quiet(ended)


@pytest.mark.fork
def test_a_child_that_outlives_the_parent_keeps_nobody_waiting() -> None:
    ended = run_program(
        """
        import os, signal, vram
        from vram.observe.monitor import attach
        ready, said = os.pipe()
        held, hold = os.pipe()
        parent = os.fork()
        if not parent:
            os.close(hold)
            vram.monitor()
            os.write(said, b"1"), os.read(held, 1)
            if not os.fork():
                os.write(said, b"2"), os.read(held, 2), os._exit(0)
            os.read(held, 3)
        os.read(ready, 1)
        client = attach(parent)
        client.status()
        os.write(hold, b"1"), os.read(ready, 1)
        os.kill(parent, signal.SIGKILL), os.waitpid(parent, 0)
        try:
            client.status()
        except vram.DeviceError as error:
            assert "has ended" in str(error), error
        else:
            raise AssertionError("the child answers")
        client.close(), os.close(hold)
        """
    )
    assert_quiet(ended)


@pytest.mark.fork
def test_an_exit_in_the_middle_of_everything_is_quiet(runtime: Path) -> None:
    ended = run_program(
        """
        import contextlib, os, threading, vram
        from vram.observe.monitor import attach
        pool = vram.Pool("host")
        vram.monitor(interval=0.01, stacks="python")
        def look():
            with contextlib.suppress(vram.DeviceError), attach(os.getpid()) as client:
                while True:
                    client.status()
                    looked.set()
        def work():
            while True:
                pool.free(pool.malloc(4096))
        looked = threading.Event()
        for target in (look, look, work):
            threading.Thread(target=target, daemon=True).start()
        looked.wait()
        """
    )
    assert_quiet(ended)
    assert list(runtime.iterdir()) == []


def test_pools_that_come_and_go_while_others_look(watched: vram.Monitor) -> None:
    ending = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            with attach(os.getpid()) as client:
                while not ending.is_set():
                    for device in client.status()["devices"]:
                        parts = ("pools", "libraries", "processes", "unknown", "free")
                        assert sum(device[part] for part in parts) == device["total"]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with vram.Pool(vram.Device.model("1GiB")) as pool:
            kept = [pool.allocate("1MiB") for _ in range(3)]
            del kept
    ending.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_page_of_a_monitored_process_tells_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    pytest.importorskip("starlette", reason="starlette is not installed")
    from vram.web import assets

    made = {"index.html": assets.Asset(b"<html></html>", "text/html")}
    monkeypatch.setattr("vram.web.server.built_page", lambda: made)
    with vram.monitor(web=True) as watched:
        page = watched.page
        assert vram.monitor(web=True).page is page
        link = http.client.HTTPConnection("127.0.0.1", page.port, timeout=120)
        link.request("GET", "/api/live", headers={"x-vram-token": page.token})
        answer = link.getresponse()
        assert answer.status == 200
        line = next(line for line in answer if line.startswith(b"data:"))
        assert json.loads(line.partition(b":")[2])["status"]["pid"] == os.getpid()
        answer.close()
        link.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", page.port), timeout=5)
