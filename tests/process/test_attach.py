"""`vram attach`: what is recorded of a process that was not prepared for it, and that the process goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attaching import (
    UNHARMED,
    WORK,
    assert_clean,
    attach,
    attached,
    cannot_restore_registers,
    require_gdb,
    target,
)
from waiting import PATIENCE, wait_until

import vram
from vram.observe.remote import RemoteRecording
from vram.system import inject

pytestmark = [
    pytest.mark.fork,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="gdb is used on Linux alone"),
]

POOL = """
    import vram
    pool = vram.Pool("host")
    with vram.tag("weights"):
        kept = [pool.allocate("3MiB") for _ in range(4)]

    def step():
        pool.allocate("1MiB").free()

    def more():
        return {"recorder": repr(pool._recorder), "stacks": pool.keeps_stacks}
"""
QUIET = {"recorder": "None", "stacks": False}
NO_MEMORY = """
    def step():
        pass

    def more():
        return None
"""


# ---- what is recorded -------------------------------------------------------------------------------------


def test_what_a_pool_holds_is_written_and_the_process_goes_on(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, POOL, WORK) as other:
        ended = attach(other.pid, "-o", "now.vtrace", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert other.end() == {**UNHARMED, "more": QUIET}
    assert "now.vtrace: a pool on host" in ended.stdout
    trace = vram.open(tmp_path / "now.vtrace")
    held = [trace.size[event] for event in range(trace.events) if trace.tags[trace.tag[event]] == "weights"]
    assert held == [3 << 20] * 4
    assert_clean(tmp_path)
    for words in (["explain"], ["summary"]):
        subprocess.run([sys.executable, "-m", "vram", *words, str(tmp_path / "now.vtrace")], check=True)


def test_allocations_are_recorded_with_stacks_for_a_while(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, POOL, WORK) as other:
        ended = attach(other.pid, "-o", "run.vtrace", "--for", "500ms", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert other.end() == {**UNHARMED, "more": QUIET}
    trace = vram.open(tmp_path / "run.vtrace")
    stacks = [trace.frames_of(trace.stack[event]) for event in range(trace.events)]
    assert any(stack and stack[0].name == "step" for stack in stacks)
    assert_clean(tmp_path)


def test_pools_have_files_beside_each_other(tmp_path: Path) -> None:
    require_gdb()
    more_pools = 'large = vram.Pool("model:1GiB")\nbuffer = large.allocate("512MiB")\n'
    with target(tmp_path, POOL, more_pools, WORK) as other:
        ended = attach(other.pid, "-o", "now.vtrace", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        other.end()
    assert vram.open(tmp_path / "now.vtrace").settings["device"].startswith("model")  # the largest
    assert vram.open(tmp_path / "now.host.vtrace").settings["device"] == "host"


def test_ctrl_c_ends_the_recording_early_and_writes_it(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, POOL, WORK) as other:
        with attached(other.pid, cwd=tmp_path) as recording:
            recording.send_signal(signal.SIGINT)
            out, err = recording.communicate(timeout=PATIENCE)
            assert recording.returncode == 0, err
        assert "run.vtrace: a pool on host" in out
        assert other.end() == {**UNHARMED, "more": QUIET}
    assert vram.open(tmp_path / "run.vtrace").segments
    assert_clean(tmp_path)


# ---- processes that end -----------------------------------------------------------------------------------


def test_a_program_that_ends_meanwhile_writes_the_recording_first(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, POOL, WORK) as other, attached(other.pid, cwd=tmp_path) as recording:
        other.end()
        _, err = recording.communicate(timeout=PATIENCE)
        assert recording.returncode == 0, err
    assert vram.open(tmp_path / "run.vtrace").segments
    assert_clean(tmp_path)


def has_events(file: Path) -> bool:
    try:
        return vram.open(file).events > 0
    except vram.TraceError:  # its header is not complete yet
        return False


def test_what_a_killed_program_did_until_then_is_kept(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, POOL, WORK) as other, attached(other.pid, cwd=tmp_path) as recording:
        wait_until(lambda: any(map(has_events, tmp_path.glob(".vram*/*.vtrace"))))
        other.process.kill()
        _, err = recording.communicate(timeout=PATIENCE)
        assert recording.returncode == 0, err
    assert f"process {other.pid} ended" in err
    assert vram.open(tmp_path / "run.vtrace").events
    assert_clean(tmp_path)


def test_a_killed_vram_attach_leaves_nothing_in_the_program(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, POOL, WORK) as other:
        with attached(other.pid, cwd=tmp_path) as recording:
            recording.kill()
        assert_clean(tmp_path)
        assert other.end() == {**UNHARMED, "more": QUIET}


# ---- what cannot be recorded ------------------------------------------------------------------------------


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, POOL, WORK) as other, attached(other.pid, cwd=tmp_path):
        ended = attach(other.pid, "-o", "second.vtrace", cwd=tmp_path)
    assert ended.returncode == 2 and f"another vram attach is recording process {other.pid}" in ended.stderr
    assert not (tmp_path / "second.vtrace").exists()


@pytest.mark.parametrize(
    ("imports", "why"),
    [
        ("", "has imported neither PyTorch nor vram"),
        ("import vram", "has imported vram, but has no open pool"),
        (
            """
            import sys, threading, types
            torch = sys.modules["torch"] = types.ModuleType("torch")
            torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)
            """,
            "has not used CUDA yet",
        ),
        (
            """
            import vram
            pool = vram.Pool("host")
            recorder = vram.record(pool, "own.vtrace")
            """,
            "the pool on host cannot be recorded: the pool is being recorded to own.vtrace",
        ),
    ],
    ids=["nothing", "no pool", "no CUDA", "recorded already"],
)
def test_nothing_to_record_is_an_error_with_the_reason(tmp_path: Path, imports: str, why: str) -> None:
    require_gdb()
    with target(tmp_path, imports, NO_MEMORY, WORK) as other:
        ended = attach(other.pid, "-o", "now.vtrace", cwd=tmp_path)
        assert ended.returncode == 2, ended.stdout
        assert f"process {other.pid}" in ended.stderr and why in ended.stderr
        report = other.end()
        assert report["left"] == report["marks"] == [] and "vram-attach" not in report["threads"]
    assert not (tmp_path / "now.vtrace").exists()
    assert_clean(tmp_path)


def test_a_main_thread_in_a_long_call_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """What was asked for is withdrawn: nothing happens when the call ends."""
    require_gdb()
    blocked = 'print("ready", flush=True)\ninput()\n'
    with target(tmp_path, POOL, blocked, WORK) as other:
        ended = attach(other.pid, "-o", "now.vtrace", "--timeout", "300ms", cwd=tmp_path)
        assert ended.returncode == 2
        assert f"the main thread of process {other.pid} ran no Python code for 0.3 s" in ended.stderr
        assert_clean(tmp_path)
        assert other.process.stdin is not None and other.process.stdout is not None
        other.process.stdin.write("\n")
        other.process.stdin.flush()
        assert other.process.stdout.readline() == "ready\n"
        assert other.end() == {**UNHARMED, "more": QUIET}
    assert not (tmp_path / "now.vtrace").exists()


@pytest.mark.parametrize("pid", [0, -1, 999_999_999, 1 << 70])
def test_a_process_that_is_not_there(pid: int, tmp_path: Path) -> None:
    with pytest.raises(vram.DeviceError, match=f"no process {pid} here.*container"):
        RemoteRecording(pid, tmp_path / "now.vtrace")


def test_a_process_that_is_not_python(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            wait_until(lambda: b"sleep" in Path(f"/proc/{other.pid}/cmdline").read_bytes())
            with pytest.raises(vram.DeviceError, match=r"\(sleep\) is not a Python process"):
                RemoteRecording(other.pid, tmp_path / "now.vtrace")
        finally:
            other.kill()


def test_a_process_that_has_ended_and_was_not_waited_for(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        wait_until(lambda: inject._start_time(other.pid) is None)
        with pytest.raises(vram.DeviceError, match="has ended"):
            RemoteRecording(other.pid, tmp_path / "now.vtrace")


def test_another_users_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(
        vram.DeviceError, match=r"belongs to user .*; run vram attach as that user or as root"
    ):
        RemoteRecording(os.getpid(), tmp_path / "now.vtrace")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(vram.ConfigError, match=r"cannot write .*/nowhere/now\.vtrace"):
        RemoteRecording(os.getpid(), tmp_path / "nowhere" / "now.vtrace")


# ---- without gdb ------------------------------------------------------------------------------------------


@pytest.fixture
def no_remote_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "remote_exec", raising=False)


def fake_gdb(folder: Path, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "gdb").write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / "gdb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.usefixtures("no_remote_exec")
def test_a_missing_gdb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(vram.DeviceError, match=r"without gdb .*apt-get install gdb.*vram run --record"):
        RemoteRecording(os.getpid(), tmp_path / "now.vtrace")
    assert_clean(tmp_path)


@pytest.mark.usefixtures("no_remote_exec")
@pytest.mark.parametrize(
    ("scope", "advice"),
    [
        ("1", r"ptrace_scope is 1\. Run vram attach as root, or allow it: sudo sysctl kernel"),
        ("3", "ptrace_scope is 3, which forbids it"),
        ("0", "--cap-add=SYS_PTRACE"),
        (None, "--cap-add=SYS_PTRACE"),
    ],
)
def test_a_gdb_that_is_not_allowed_to_says_what_to_change(
    scope: str | None, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gdb(tmp_path, "ptrace: Operation not permitted.", monkeypatch)
    monkeypatch.setattr(inject, "PTRACE_SCOPE", tmp_path / "ptrace_scope")
    if scope is not None:
        (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    with pytest.raises(vram.DeviceError, match=advice):
        RemoteRecording(os.getpid(), tmp_path / "now.vtrace")
    assert_clean(tmp_path)


@pytest.mark.usefixtures("no_remote_exec")
@pytest.mark.parametrize(
    ("says", "error"),
    [
        ('No symbol "Py_AddPendingCall" in current context.', "does not run CPython"),
        (
            "Some other trouble.\n[Inferior 1 detached]",
            "gdb failed to attach to process .*: Some other trouble",
        ),
        ("vram-queued -1", "gdb failed"),
        ("", "it printed nothing"),
    ],
)
def test_a_gdb_that_fails_is_quoted(
    says: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gdb(tmp_path, says, monkeypatch)
    with pytest.raises(vram.DeviceError, match=error):
        RemoteRecording(os.getpid(), tmp_path / "now.vtrace")


def test_a_gdb_that_cannot_restore_registers_does_nothing(tmp_path: Path) -> None:
    if not cannot_restore_registers():
        pytest.skip("this gdb can restore the registers of this CPU, or is not usable")
    with target(tmp_path, POOL, WORK) as other:
        ended = attach(other.pid, "-o", "now.vtrace", cwd=tmp_path)
        assert ended.returncode == 2
        assert "install a later one" in ended.stderr
        assert other.end() == {**UNHARMED, "more": QUIET}


def test_gdb_restores_a_process_in_which_a_call_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_gdb()
    monkeypatch.setattr(inject, "GDB_SECONDS", 3.0)
    commands = inject.COMMANDS.replace("$queue($run, (void *) $page)", "((int (*)(void)) pause)()")
    assert commands != inject.COMMANDS
    monkeypatch.setattr(inject, "COMMANDS", commands)
    with target(tmp_path, POOL, WORK) as other:
        with pytest.raises(vram.DeviceError, match="gdb did not finish within 3 seconds"):
            RemoteRecording(other.pid, tmp_path / "now.vtrace")
        assert other.end() == {**UNHARMED, "more": QUIET}


# ---- by sys.remote_exec, of Python 3.14 -------------------------------------------------------------------


def test_remote_exec_is_used_where_python_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remote_exec(pid: int, script: str) -> None:
        assert pid == os.getpid()
        exec(Path(script).read_text(), {})

    monkeypatch.setattr(sys, "remote_exec", remote_exec, raising=False)
    with vram.Pool("host") as pool:
        kept = pool.allocate("5MiB", tag="kept")
        with RemoteRecording(os.getpid(), tmp_path / "now.vtrace") as recording:
            recording.wait_for_start(PATIENCE)
            written = recording.finish()
        kept.free()
    assert "kept" in {tag for file in written for tag in vram.open(file.path).tags}
    assert_clean(tmp_path)


def test_a_script_that_has_not_run_yet_removes_its_folder_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts: list[str] = []
    monkeypatch.setattr(sys, "remote_exec", lambda _pid, script: scripts.append(script), raising=False)
    with contextlib.suppress(vram.DeviceError), RemoteRecording(os.getpid(), tmp_path / "a") as recording:
        recording.wait_for_start(0.0)
    exec(Path(scripts[0]).read_text(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("another version"), PermissionError("not allowed")])
def test_gdb_is_used_where_remote_exec_fails(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_gdb()

    def remote_exec(_pid: int, _script: str) -> None:
        raise error

    monkeypatch.setattr(sys, "remote_exec", remote_exec, raising=False)
    with target(tmp_path, POOL, WORK) as other:
        with RemoteRecording(other.pid, tmp_path / "now.vtrace") as recording:
            recording.wait_for_start(PATIENCE)
            recording.finish()
        other.end()
    assert vram.open(tmp_path / "now.vtrace").events
