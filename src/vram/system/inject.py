"""Run a piece of Python inside another Python process: by `sys.remote_exec`, or with the help of gdb.

The main thread of the process starts the code in a new thread, at a point where its interpreter may run other
code. What the code does, and how it answers, is left to the caller.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from vram.errors import DeviceError

from .exchange import Exchange, Identity

__all__ = ["OtherProcess", "inject", "withdraw"]

GDB_SECONDS = 60.0
"""How long gdb may take to queue the code. It usually takes less than a second."""
INTERRUPT_SECONDS = 10.0
"""How long gdb may take to restore and leave the process when it is interrupted."""
PAGE_BYTES = 4096
"""The string that the process runs is written to a page of its own."""
INSTEAD = "Or restart the program with vram run --record FILE"
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
CODE_FILE = "agent.py"
"""The code, in the folder that both processes use."""
START_FILE = "start.py"
"""The script for `sys.remote_exec`, in the same folder."""


class OtherProcess:
    """A Python process of this machine, by its number. Raises DeviceError if there is no such process."""

    def __init__(self, pid: int) -> None:
        """Check what can be checked without stopping the process."""
        self.pid = pid
        if pid <= 0 or not _exists(pid):
            raise DeviceError(
                f"there is no process {pid} here. If it runs in a container, run vram attach in that "
                "container, with the PID that ps shows there"
            )
        self._started = _start_time(pid)
        if self.has_ended():
            raise DeviceError(f"process {pid} has ended")
        self.identity = Identity.of(pid)
        if sys.platform == "linux":
            self._require_access()
            self._require_python()

    def has_ended(self) -> bool:
        """Whether the process has ended, even if its parent has not noticed or its number is used again."""
        started = _start_time(self.pid)
        return started is None or started != self._started or not _exists(self.pid)

    def _require_access(self) -> None:
        user = self.identity.user
        if os.geteuid() not in (0, user):
            raise DeviceError(
                f"process {self.pid} belongs to {_user_name(user)}; run vram attach as that user or as root"
            )
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{self.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
                raise DeviceError(
                    f"process {self.pid} runs in another container; run vram attach there, for example with "
                    "docker exec, with the PID that ps shows there"
                )

    def _require_python(self) -> None:
        try:
            mapped = Path(f"/proc/{self.pid}/maps").read_text(errors="replace")
        except OSError:
            return  # gdb says why
        if not re.search(r"/(lib)?python[^/\n]*$", mapped, re.MULTILINE):
            name = Path(f"/proc/{self.pid}/comm").read_text(errors="replace").strip()
            raise DeviceError(
                f"process {self.pid} ({name}) is not a Python process. If it started one, attach to that "
                f"one: ps --ppid {self.pid}"
            )


def inject(process: OtherProcess, folder: Exchange, code: str) -> None:
    """Have `process` run `code` in a new thread, once its main thread runs Python code again.

    The code finds an address in its variable `page`, if it is not 0: that of a page that it should unmap.
    Returns before the code runs. If its file is removed before, nothing runs. Raises DeviceError.
    """
    folder.write_code(CODE_FILE, code)
    why = _inject_by_python(process, folder)
    if why is not None:
        _inject_by_gdb(process, folder.code_path / CODE_FILE, why)


def withdraw(folder: Exchange) -> None:
    """Make sure that code which has not begun to run never does, and that its folder goes away.

    The script for `sys.remote_exec` stays until the process has run it, because the process would complain
    about a missing one.
    """
    if (folder.code_path / START_FILE).exists():
        folder.write_code(START_FILE, f"__import__('shutil').rmtree({str(folder.path)!r}, True)\n")
        folder.remove_code(CODE_FILE)
    else:
        folder.remove_code_folder()
        folder.remove_folder()


# ---- the code that the main thread runs -------------------------------------------------------------------


def _bootstrap(code: Path, page: str) -> str:
    """Return statements that start the code in a thread.

    They run in the namespace of `__main__`, so they assign nothing and use no name that a program may have
    replaced. They must not raise.
    """
    builtins = "__import__('builtins')"
    names = f"{{'__name__':'vram_attach','page':{page}}}"
    read = f"{builtins}.bytes.fromhex('{_reader(code).encode().hex()}')"
    start = f"__import__('_thread').start_new_thread({builtins}.exec,({read},{names}))"
    return f"try:\n {start}\nexcept {builtins}.BaseException:\n pass\n"


def _reader(code: Path) -> str:
    """Return statements that run the file, or nothing if it was removed, in a namespace of their own."""
    path = os.fsencode(code)
    return (
        f"try:\n with open({path!r},'rb') as file: code=file.read()\nexcept OSError: pass\nelse: exec(code)"
    )


# ---- by Python --------------------------------------------------------------------------------------------


def _inject_by_python(process: OtherProcess, folder: Exchange) -> str | None:
    """Use Python's own way. Returns None, or why it does not work here."""
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        return "sys.remote_exec needs Python 3.14 or later on both sides"
    folder.write_code(START_FILE, _bootstrap(folder.code_path / CODE_FILE, "0"))
    try:
        remote_exec(process.pid, str(folder.code_path / START_FILE))
    except (RuntimeError, OSError) as error:  # another version of Python, forbidden, or not supported
        folder.remove_code(START_FILE)
        return f"sys.remote_exec failed: {error}"
    return None


# ---- by gdb -----------------------------------------------------------------------------------------------

SETTINGS = (
    "set auto-solib-add off",  # symbols of PyTorch's libraries would take half a minute to read
    "set auto-load no",
    "set debuginfod enabled off",
    "set confirm off",
)
"""What gdb must know before it attaches. A version that lacks one of them goes on."""
COMMANDS = r"""
set language c
set unwindonsignal on
handle all nostop noprint pass
attach {pid}
if ! $_isvoid($mxcsr)
set var $mxcsr = $mxcsr ^ 1
set var $mxcsr = $mxcsr ^ 1
end
sharedlibrary libpython
sharedlibrary libc[.-]
sharedlibrary musl
set $queue = (int (*)(void *, void *)) Py_AddPendingCall
set $run = (void *) PyRun_SimpleString
set $map = (unsigned long (*)(void *, unsigned long, int, int, int, long)) mmap
set $page = $map(0, {page_bytes}, 3, 0x22, -1, 0)
eval "set {{char[{size}]}} $page = \"{text}\"", $page
printf "vram-queued %d\n", $queue($run, (void *) $page)
"""
"""Before anything is called, a flag of an x86 CPU is set and restored: a gdb that cannot restore registers
must not begin, because the process would not survive. mmap is called for private memory that can be read and
written. The text has a %016lx for its address."""
QUEUED = "vram-queued 0"


def _inject_by_gdb(process: OtherProcess, code: Path, why: str) -> None:
    gdb = shutil.which("gdb")
    if sys.platform != "linux":
        raise DeviceError(f"cannot attach to process {process.pid} on this system: {why}. {INSTEAD}")
    if gdb is None:
        raise DeviceError(
            f"cannot attach to process {process.pid} without gdb ({why}). Install it, for example with "
            f"apt-get install gdb. {INSTEAD}"
        )
    command = [gdb, "-nx", "-batch", "--readnever", *_early(SETTINGS), "-x", "/dev/stdin"]
    said = _run_gdb(command, _gdb_commands(process.pid, code))
    if QUEUED not in said:
        raise DeviceError(_why_gdb_failed(process, said))


def _early(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in ("-iex", setting)]


def _gdb_commands(pid: int, code: Path) -> str:
    text = _bootstrap(code, "0x%016lx")
    size = len(text % 0) + 1
    if size > PAGE_BYTES:
        raise DeviceError(
            f"the path {code.parent} is too long; write the file to a directory with a shorter one"
        )
    quoted = text.replace("\n", r"\\n")  # unquoted by `eval`, then by the C string
    return COMMANDS.format(pid=pid, page_bytes=PAGE_BYTES, size=size, text=quoted)


def _run_gdb(command: list[str], commands: str) -> str:
    """Run gdb and return all it printed.

    gdb may run as root, and its commands may start programs, so they are in a file without a name: nobody
    else can change it. gdb has a session of its own: Ctrl-C must not reach it while the process is in a call
    that it made.
    """
    environ = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    with tempfile.TemporaryFile() as script:
        script.write(commands.encode())
        script.seek(0)
        gdb = subprocess.Popen(
            command,
            stdin=script,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    with gdb:
        try:
            said, _ = gdb.communicate(timeout=GDB_SECONDS)
        except (KeyboardInterrupt, subprocess.TimeoutExpired) as error:
            said = _interrupt(gdb)
            if isinstance(error, KeyboardInterrupt):
                raise
            said += f"\ngdb did not finish within {GDB_SECONDS:.0f} seconds".encode()
    return said.decode(errors="replace")


def _interrupt(gdb: subprocess.Popen[bytes]) -> bytes:
    """Have gdb restore the process and leave it. Only a gdb that cannot stop the process is killed."""
    gdb.send_signal(signal.SIGINT)
    try:
        return gdb.communicate(timeout=INTERRUPT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        gdb.kill()
        return gdb.communicate()[0]


def _why_gdb_failed(process: OtherProcess, said: str) -> str:
    pid = process.pid
    if process.has_ended():
        return f"process {pid} ended before gdb could attach to it"
    if "Operation not permitted" in said or "Permission denied" in said:
        return f"gdb is not allowed to attach to process {pid}: {_why_forbidden(process)} {INSTEAD}"
    if "extended state" in said:
        return (
            f"gdb cannot restore the registers of a process on this CPU, so it did nothing to process {pid}. "
            f"Versions before 14 cannot if the CPU has AMX; install a later one. {INSTEAD}"
        )
    if "No symbol" in said:
        return f"process {pid} does not run CPython, or its symbols were removed. {INSTEAD}"
    lines = [line for line in said.strip().splitlines() if not line.startswith("[")]
    return f"gdb failed to attach to process {pid}: {(lines or ['it printed nothing'])[-1]}. {INSTEAD}"


def _why_forbidden(process: OtherProcess) -> str:
    """Say what forbids it and what to do, as far as the system tells."""
    status = ""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
    tracer = re.search(r"^TracerPid:\s*([1-9]\d*)", status, re.MULTILINE)
    if tracer:
        return (
            f"process {tracer[1]}, a debugger or another vram attach, is attached to it. Wait until it ends."
        )
    scope = ""
    with contextlib.suppress(OSError):
        scope = PTRACE_SCOPE.read_text().strip()
    if scope == "3":
        return "kernel.yama.ptrace_scope is 3, which forbids it until the machine is restarted."
    if scope in ("1", "2"):
        return (
            f"kernel.yama.ptrace_scope is {scope}. Run vram attach as root, or allow it: "
            "sudo sysctl kernel.yama.ptrace_scope=0."
        )
    return (
        "run vram attach as root or as the same user; in a container, start the container with "
        "--cap-add=SYS_PTRACE."
    )


# ---- what the system says ---------------------------------------------------------------------------------


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _start_time(pid: int) -> str | None:
    """Return what tells the process from a later one with the same number; None if it has ended."""
    if not os.path.isdir("/proc/self"):
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def _user_name(user: int) -> str:
    import pwd  # Linux alone asks, and Windows has no such module

    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"
