"""What another user, here nobody, can do to a process of root that uses vram."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from attaching import require_gdb
from two_users import NOBODY, as_nobody, needs_root, running_as_nobody
from waiting import PATIENCE, wait_until

import vram
import vram.system.runtime as runtime_module
from vram.observe import remote_agent
from vram.observe.remote import RemoteRecording
from vram.system.exchange import Exchange, Identity
from vram.system.runtime import writable_by_others
from vram.torch import companion

pytestmark = [pytest.mark.fork, needs_root]


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="vram-two-users-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


# ---- code is loaded only from where nobody else can write --------------------------------------------------


def directory(path: Path, mode: int, user: int = 0, group: int = 0) -> Path:
    path.mkdir(parents=True)
    os.chown(path, user, group)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("mode", "user", "group", "safe"),
    [
        (0o755, 0, 0, True),
        (0o775, 0, 0, True),  # the group of this user alone
        (0o1777, 0, 0, True),  # as /tmp
        (0o777, 0, 0, False),
        (0o775, 0, 65534, False),
        (0o1777, 65534, 0, False),
        (0o755, 65534, 0, False),
    ],
)
def test_a_file_is_safe_if_nobody_else_can_replace_a_directory_above_it(
    public: Path, mode: int, user: int, group: int, safe: bool
) -> None:
    above = directory(public / "above", mode, user, group)
    own = directory(above / "vram", 0o700)
    (own / "library.so").write_text("own")
    why = writable_by_others(own / "library.so")
    assert (why == "") == safe, why
    assert safe or str(above) in why
    # The rule says what another user can do.
    replaced = as_nobody(lambda: (above / "vram").rename(above / "moved"))
    assert replaced <= (not safe)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_what_another_user_made_or_can_write_is_not_safe(public: Path, what: str) -> None:
    own = directory(public / "vram", 0o700)
    file = own / "library.so"
    file.write_text("own")
    changed = file if what == "file" else own
    assert writable_by_others(file) == ""
    changed.chmod(0o777)
    assert "can be written by other users (mode 777)" in writable_by_others(file)
    changed.chmod(0o700)
    os.chown(changed, NOBODY.pw_uid, -1)
    assert f"{changed} belongs to user {NOBODY.pw_uid}" in writable_by_others(file)


def test_in_a_user_namespace_the_root_of_the_system_may_own_directories_above(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (public / "users").write_text("0 1000 1\n")
    monkeypatch.setattr(runtime_module, "NAMESPACE_USERS", public / "users")
    above = directory(public / "above", 0o755, NOBODY.pw_uid)
    own = directory(above / "vram", 0o700)
    monkeypatch.setattr(runtime_module, "OVERFLOW_USER", public / "missing")
    assert f"{above} belongs to user" in writable_by_others(own)
    (public / "overflow").write_text(f"{NOBODY.pw_uid}\n")
    monkeypatch.setattr(runtime_module, "OVERFLOW_USER", public / "overflow")
    assert writable_by_others(own) == ""
    assert f"{above} belongs to user" in writable_by_others(above)  # not what is loaded itself


def test_a_link_is_judged_by_where_it_leads(public: Path) -> None:
    theirs = directory(public / "theirs", 0o755, NOBODY.pw_uid)
    (public / "vram").symlink_to(theirs)
    assert "belongs to user" in writable_by_others(public / "vram")


def test_a_library_of_another_user_in_a_shared_cache_is_not_found(
    public: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = directory(public / "cache", 0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    monkeypatch.setattr(companion, "_file_name", lambda *_made_for, cached: "library.so")

    def plant() -> None:
        (shared / "vram").mkdir(mode=0o777)
        (shared / "vram" / "library.so").write_text("theirs")

    assert as_nobody(plant)
    assert companion._existing(None, companion.THROWER) is None
    used = companion.cache_directory()
    assert used != shared / "vram" and used == companion.cache_directory()
    assert writable_by_others(used) == ""
    assert f"belongs to user {NOBODY.pw_uid}. Set XDG_CACHE_HOME" in caplog.text


def test_a_file_of_another_user_in_the_own_cache_is_compiled_again(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the directory was open to others for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(public))
    monkeypatch.setattr(companion, "_file_name", lambda *_made_for, cached: "library.so")
    monkeypatch.setattr(companion, "_command", lambda _torch, _companion: [])
    monkeypatch.setattr(companion, "_compile", lambda _command, target: target.write_text("own"))
    library = companion.cache_directory() / "library.so"
    library.write_text("theirs")
    os.chown(library, NOBODY.pw_uid, -1)
    assert companion._existing(None, companion.THROWER) is None
    assert companion.build_companion(None, companion.THROWER).read_text() == "own"


# ---- who listens -------------------------------------------------------------------------------------------


def test_another_user_cannot_ask_a_monitor(runtime: Path) -> None:
    with vram.monitor() as monitor:
        path = str(monitor.path)

        def ask() -> None:
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(path)

        assert monitor.path.is_socket() and not as_nobody(ask)
        runtime.parent.chmod(0o755)
        runtime.chmod(0o777)
        monitor.path.chmod(0o777)

        def read() -> None:  # whoever gets in is told nothing, because the kernel says who it is
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(path)
                assert b"another user's process is not told" in link.recv(4096)

        assert as_nobody(read)


def test_another_user_sees_no_data_of_a_page_and_not_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    from vram.web import Page, assets

    empty = {"index.html": assets.Asset(b"<html>", "text/html")}
    monkeypatch.setattr("vram.web.server.built_page", lambda: empty)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    with Page([], live=lambda: {"pid": 7}) as page:
        page.open_browser()
        file = url2pathname(urlsplit(opened[0]).path)
        assert Path(file).exists() and not as_nobody(lambda: os.stat(file))

        def asks(path: str, status: int) -> None:
            with socket.create_connection(("127.0.0.1", page.port), timeout=PATIENCE) as link:
                link.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{page.port}\r\n\r\n".encode())
                assert link.recv(4096).startswith(f"HTTP/1.1 {status}".encode())

        asks("/", 200)  # loads what nobody may not be able to import
        assert as_nobody(lambda: asks("/", 200)) and as_nobody(lambda: asks("/api/start", 403))


# ---- vram attach, run by root ------------------------------------------------------------------------------

SECRET = "for root alone"


def idle() -> None:
    while True:
        time.sleep(0.01)


@pytest.fixture
def nobody(temporary: Path) -> Iterator[int]:
    """A Python process of the user nobody."""
    with running_as_nobody(idle) as child:
        wait_until(lambda: Identity.of(child).user == NOBODY.pw_uid)
        yield child


@pytest.fixture
def roots(public: Path) -> Path:
    """A directory that others can enter, with a file that only root can read or write."""
    made = directory(public / "roots", 0o755)
    (made / "secret").touch(mode=0o600)
    (made / "secret").write_text(json.dumps({"state": "failed", "error": SECRET}))
    return made


def is_untouched(roots: Path) -> bool:
    names = [each.name for each in roots.iterdir()]
    return names == ["secret"] and SECRET in (roots / "secret").read_text()


@pytest.fixture
def temporary(public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders for processes of other users are made."""
    made = directory(public / "tmp", 0o1777)
    monkeypatch.setenv("TMPDIR", str(made))
    return made


@pytest.fixture
def exchange(nobody: int, temporary: Path, tmp_path: Path) -> Iterator[Exchange]:
    with Exchange(Identity.of(nobody), tmp_path / "now.vtrace") as made:
        assert made.path.parent == temporary
        yield made


ATTACKED_GDB = f"""#!{sys.executable} -IS
# A debugger before which another user has a turn: to put commands of his own where it reads them.
import os, sys
script = sys.argv[sys.argv.index("-x") + 1]
if os.fork() == 0:
    os.setgroups([]), os.setgid({{group}}), os.setuid({{user}})
    try:
        with open(script + ".other", "w") as file:
            file.write("shell touch {{proof}}\\n")
        os.rename(script + ".other", script)
    finally:
        os._exit(0)
os.wait()
for line in open(script):
    if line.startswith("shell "):
        os.system(line[6:])
print("vram-queued 0")
"""


@pytest.fixture
def attacked_gdb(public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have `vram attach` use it; returns the file that exists if it ran the commands of the other user."""
    monkeypatch.delattr(sys, "remote_exec", raising=False)
    proof = public / "proof"
    (public / "gdb").write_text(ATTACKED_GDB.format(user=NOBODY.pw_uid, group=NOBODY.pw_gid, proof=proof))
    (public / "gdb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{public}:{os.environ['PATH']}")
    return proof


def test_the_user_of_the_process_cannot_change_what_gdb_runs(
    nobody: int, attacked_gdb: Path, tmp_path: Path
) -> None:
    with RemoteRecording(nobody, tmp_path / "now.vtrace"):
        assert not attacked_gdb.exists()


def test_the_code_for_a_process_of_root_is_not_where_others_can_write(
    public: Path, attacked_gdb: Path
) -> None:
    """As in the home directory of another user, where root may stand."""
    theirs = directory(public / "theirs", 0o755, NOBODY.pw_uid)
    with RemoteRecording(os.getpid(), theirs / "now.vtrace") as recording:
        assert theirs not in recording._folder.path.parents
        assert writable_by_others(recording._folder.path) == ""
    assert list(theirs.iterdir()) == []


def test_files_of_another_users_process_are_handled_by_a_process_of_that_user(
    nobody: int, exchange: Exchange
) -> None:
    assert exchange._child is not None
    helper = exchange._child._process.pid
    assert exchange.path.stat().st_uid == NOBODY.pw_uid and exchange.path.stat().st_mode & 0o777 == 0o700
    assert Identity.of(helper) == Identity(NOBODY.pw_uid, NOBODY.pw_gid, ())
    saved = [line.split()[1:] for line in Path(f"/proc/{helper}/status").read_text().splitlines()[8:10]]
    assert {number for line in saved for number in line} <= {str(NOBODY.pw_uid), str(NOBODY.pw_gid)}
    # It has pipes to a process of root, so its own user must not get hold of it.
    assert not as_nobody(lambda: os.listdir(f"/proc/{helper}/fd"))
    assert not as_nobody(lambda: os.close(os.open(f"/proc/{helper}/mem", os.O_RDONLY)))
    exchange.write("file", "text")
    assert exchange.read("file") == "text" and exchange.names() == ["file"]
    assert (exchange.path / "file").stat().st_uid == NOBODY.pw_uid
    exchange.remove_folder()
    assert not exchange.path.exists()


def test_the_code_for_another_users_process_can_be_read_and_not_changed(exchange: Exchange) -> None:
    """The process may begin another program, such as one of root, before it reads the code."""
    exchange.write_code("agent.py", "code")
    code = exchange.code_path / "agent.py"

    def change() -> None:
        code.with_name("other").write_text("theirs")

    def replace() -> None:
        (exchange.path / "other").write_text("theirs")
        (exchange.path / "other").rename(code)

    assert as_nobody(code.read_bytes)
    for attempt in (
        change,
        replace,
        code.unlink,
        exchange.code_path.rmdir,
        lambda: code.write_text("theirs"),
    ):
        assert not as_nobody(attempt)
    assert code.read_text() == "code"
    exchange.remove_code_folder()
    assert not exchange.code_path.exists() and exchange.path.exists()


def test_the_script_for_remote_exec_is_one_that_the_user_can_only_read(
    nobody: int, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts: list[Path] = []
    monkeypatch.setattr(sys, "remote_exec", lambda _pid, name: scripts.append(Path(name)), raising=False)
    with RemoteRecording(nobody, tmp_path / "now.vtrace"):
        (script,) = scripts
        code = script.with_name("agent.py")
        assert as_nobody(script.read_text) and as_nobody(code.read_text)
        assert not as_nobody(script.unlink) and not as_nobody(code.unlink)
    # It had not begun. When it runs the script now, nothing happens, and its folder goes away.
    assert not code.exists()
    text = script.read_text()
    assert as_nobody(lambda: exec(text, {}))
    assert list(temporary.iterdir()) == [script.parent]


def test_the_agent_does_nothing_in_a_process_of_another_user(exchange: Exchange) -> None:
    request = {"folder": str(exchange.path), "pid": os.getpid(), "user": NOBODY.pw_uid, "seconds": None}
    remote_agent.start(request, 0)
    assert exchange.names() == []


@pytest.mark.parametrize("users", [(0, 65534, 65534), (65534, 65534, 0), (65534, 0, 65534)])
def test_a_process_that_may_do_more_than_its_user_is_refused(users: tuple[int, int, int]) -> None:
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresuid(*users)
        os.write(there, b"x")
        idle()
    try:
        assert os.read(here, 1) == b"x"
        with pytest.raises(vram.DeviceError, match=f"process {child} may do more than its user {users[1]}"):
            Identity.of(child)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(here)
        os.close(there)


def test_what_is_no_file_of_the_process_is_not_read(exchange: Exchange, roots: Path, tmp_path: Path) -> None:
    def put(name: str) -> None:
        (exchange.path / "link").symlink_to(roots / name)
        os.mkfifo(exchange.path / "fifo")
        (exchange.path / "folder").mkdir()
        with (exchange.path / "endless").open("wb") as file:
            file.truncate(1 << 40)

    assert as_nobody(lambda: put("secret"))
    target = tmp_path / "now.vtrace"
    for name in ("link", "fifo", "folder", "endless"):
        with pytest.raises(vram.DeviceError, match=f"cannot read .*{name}"):
            exchange.read(name)
        with pytest.raises(vram.DeviceError, match=f"{name}, which the process wrote, cannot be read"):
            exchange.take(name, target, 1 << 30)
        exchange.write(name, "own") if name != "folder" else None
    assert list(tmp_path.iterdir()) == [] and is_untouched(roots)
    assert exchange.read("link") == "own"  # in the place of the link, not where it leads


def test_answers_that_are_not_in_form_are_an_error(nobody: int, attacked_gdb: Path, tmp_path: Path) -> None:
    with RemoteRecording(nobody, tmp_path / "now.vtrace") as recording:
        for state in (
            "[" * 100_000,
            "null",
            "{}",
            '{"state": 1}',
            '{"state": "done", "files": [{}]}',
            '{"state": "recording", "seconds": NaN}',
            '{"state": "recording", "seconds": "1"}',
            '{"state": "done", "files": [{"file": "x", "of": "x", "name": "x", "bytes": 1e400}]}',
            "9" * 100_000,
        ):
            recording._folder.write("state.json", state)
            with pytest.raises(vram.DeviceError, match=f"process {nobody} answered something"):
                recording.state()
        recording._folder.write("state.json", '{"state": "failed", "error": "\\u001b[2Jtext"}')
        with pytest.raises(vram.DeviceError, match="text"):
            recording.state()


def test_names_of_files_lead_nowhere_else(nobody: int, attacked_gdb: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with RemoteRecording(nobody, tmp_path / "here" / "now.vtrace") as recording:
        recording._folder.write("a", "first")
        recording._folder.write("b", "second")
        files = [
            {"file": "a", "of": "a pool", "name": "x", "bytes": 2},
            {"file": "../../b", "of": "a pool", "name": "../../etc/x\0", "bytes": 1},
        ]
        recording._folder.write("state.json", json.dumps({"state": "done", "files": files}))
        written = [each.path for each in recording.finish()]
    assert [each.name for each in written] == ["now.vtrace", "now...-..-etc-x-.vtrace"]
    assert {each.parent for each in written} == {tmp_path / "here"}
    assert [each.read_text() for each in written] == ["first", "second"]
    assert {each.stat().st_uid for each in written} == {0}


# What another user may do to the folder, again and again, while root uses it.
NAMES = ("agent.py", "start.py", "commands.gdb", "stop", "state.json", "pool-1.vtrace")
DONE = {"state": "done", "files": [{"file": "pool-1.vtrace", "of": "", "name": "", "bytes": 1}]}


def swap_everything(temporary: Path, roots: Path) -> None:
    for turn in itertools.count():
        for folder in temporary.iterdir():
            for name in NAMES:
                for planted in (folder / name, folder / f"{name}.new"):
                    with contextlib.suppress(OSError):
                        swap(planted, turn % 4, roots)


def swap(planted: Path, how: int, roots: Path) -> None:
    made = planted.with_name("made")
    made.unlink(missing_ok=True)
    if how == 0:
        os.mkfifo(made)
    elif how == 1:
        made.symlink_to(roots / "secret")
    elif how == 2:
        made.symlink_to(roots / "created")
    else:
        made.write_text(json.dumps(DONE))
    made.rename(planted)


def test_a_program_that_swaps_all_files_meanwhile_gets_nothing_from_root(
    nobody: int, temporary: Path, roots: Path, attacked_gdb: Path, tmp_path: Path
) -> None:
    output = tmp_path / "now.vtrace"
    tried = vram.DeviceError, vram.ConfigError
    with running_as_nobody(lambda: swap_everything(temporary, roots)):
        for _ in range(3):
            with contextlib.suppress(*tried), RemoteRecording(nobody, output) as recording:
                for _ in range(30):
                    for action in (recording.state, recording.stop, recording.finish):
                        with contextlib.suppress(*tried):
                            action()
                            assert not output.exists() or SECRET not in output.read_text()
    assert not attacked_gdb.exists() and is_untouched(roots)
    assert [each.name for each in tmp_path.iterdir()] in ([], ["now.vtrace"])
    assert {each.lstat().st_uid for each in temporary.iterdir()} <= {NOBODY.pw_uid}


def pool_of_nobody() -> None:
    pool = vram.Pool("host")
    kept = pool.allocate("5MiB", tag="kept")
    assert kept
    idle()


def test_root_records_a_process_of_another_user(temporary: Path, tmp_path: Path) -> None:
    require_gdb()
    with vram.Pool("host") as pool, vram.record(pool, tmp_path / "own.vtrace"):
        pool.allocate("5MiB", tag="kept").free()  # loads what nobody may not be able to import
    with running_as_nobody(pool_of_nobody) as child:
        wait_until(lambda: Identity.of(child).user == NOBODY.pw_uid)
        with RemoteRecording(child, tmp_path / "now.vtrace") as recording:
            recording.wait_for_start(PATIENCE)
            (written,) = recording.finish()
            folders = recording._folder.path, recording._folder.code_path
    assert "kept" in vram.open(written.path).tags
    assert written.path.stat().st_uid == 0
    assert {folder.parent for folder in folders} == {temporary} and list(temporary.iterdir()) == []
