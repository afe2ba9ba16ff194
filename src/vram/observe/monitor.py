"""`vram.monitor()` lets other processes of the same user observe this one over a Unix socket; and the client.

The socket is in a directory that only its user can enter, and both ends ask the kernel for the other's
identity. `vram.observe.status` collects what is sent; front ends (`vram top`, the web page) attach here.

The protocol is lines of JSON. The process greets with `{"answer": {"protocol": 1, "pid": 7}}`, or sends
`{"error": "why not"}` and closes. Then it answers `{"ask": "status", "top": 20}` with `{"answer": {...}}` or
an error. Questions are "status" (arguments `top` and `history`), "snapshot" (argument `pool`) and "info". A
connection takes any number of questions, one at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vram.arguments import real_number, shown, whole_number
from vram.core.closing import Closing
from vram.core.locks import new_event, new_lock
from vram.errors import ConfigError, DeviceError, VramError
from vram.system.descriptors import disown
from vram.system.runtime import runtime_directories, runtime_directory, unsafe

if TYPE_CHECKING:
    from vram.observe.status import Observatory

__all__ = ["Client", "Monitor", "Process", "attach", "monitor", "processes"]

PROTOCOL = 1
SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.01, 86400.0
"""Seconds between two samples."""
MOST_CLIENTS = 16
"""The most connections at a time; further ones get an error and are closed."""
MOST_ASKED = 4096
"""The most bytes of a question."""
MOST_ANSWERED = 256 << 20
"""The most bytes of an answer that a client reads."""
MOST_BLOCKS = 200_000
"""The most live blocks of a pool for a snapshot."""
WRITE_SECONDS = 10.0
"""How long a client may take to read an answer."""
LINK_SECONDS = 30.0
"""How long a client waits for an answer, by default."""
LONGEST_PATH = 107
"""The most bytes in the name of a Unix socket."""

Answer: TypeAlias = dict[str, Any]
_log = logging.getLogger("vram")


# ---- the observed process ---------------------------------------------------------------------------------


def monitor(*, web: bool = False, stacks: str | None = None, interval: float = 1.0) -> Monitor:
    """Make this process observable to `vram top` and other tools of the same user, until it ends.

    Opens a Unix socket that only this user can reach, and no port. The counters of all pools are sampled
    every `interval` seconds, so a client that attaches later sees the last minutes, too. With
    `stacks="python"` all pools keep the Python stack of each allocation, so holders have a line of code and
    not only a tag. `web` also serves the page of `vram serve` for this process. A second call returns the
    same Monitor and adds what it asks for. `close()` or the end of a `with` block ends it.
    """
    global _monitor
    if stacks not in ("python", None):
        raise ConfigError(f'stacks is "python" or None, not {shown(stacks)}', value=stacks)
    interval = _checked_interval(interval)
    with _lock:
        if _monitor is None or _monitor.closed:
            _monitor = Monitor(interval)
        found = _monitor
    if stacks is not None:
        found.keep_stacks()
    if web:
        found.serve_web()
    return found


def _checked_interval(interval: float) -> float:
    return real_number(interval, "interval, in seconds,", least=SHORTEST_INTERVAL, most=LONGEST_INTERVAL)


class Monitor(Closing):
    """Makes this process observable, created by `vram.monitor`. Any thread may use it."""

    def __init__(self, interval: float = 1.0) -> None:
        """Open the socket and start to sample; see `vram.monitor`."""
        from vram.observe.status import Observatory

        self.observatory: Observatory = Observatory()
        self.interval = _checked_interval(interval)
        self.page: Any = None
        self._end_stacks: Callable[[], object] | None = None
        self._ending = new_event()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._clients_lock = new_lock()
        self._listener, self.path = _listen(runtime_directory())
        self._wake, self._woken = socket.socketpair()
        self.observatory.sample()
        self._thread = threading.Thread(target=self._run, name="vram-monitor", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._ending.is_set()

    def status(self, top: int = 20, history: int = 600) -> Answer:
        """The current status of this process; see `vram.observe.status.Observatory.status`."""
        return self.observatory.status(whole_number(top, "top"), whole_number(history, "history"))

    def snapshot(self, pool: int) -> Answer:
        """Every block of a pool, by its number in the status, in the form of `Snapshot.to_dict()`."""
        from vram.core.observer import open_pools

        found = next((each for each in open_pools() if each.number == pool), None)
        if found is None:
            raise ConfigError(
                f"there is no open pool {shown(pool)} here; the status has their numbers", value=pool
            )
        if found.stats().live > MOST_BLOCKS:
            raise ConfigError(
                f"pool {pool} has {found.stats().live} live blocks, and a snapshot is given of at most "
                f"{MOST_BLOCKS}; record it instead",
                value=pool,
            )
        blocks: Answer = found.snapshot().to_dict()
        return blocks

    def keep_stacks(self) -> None:
        """Have every pool keep stacks from now on, including new ones."""
        from vram.core.observer import keep_stacks

        with _lock:
            if self._end_stacks is None:
                self._end_stacks = keep_stacks()

    def serve_web(self) -> Any:
        """Serve the web page for this process, once. The returned object has its `url`."""
        from vram.web import Page

        with _lock:
            if self.page is None:
                self.page = Page(live=self.status).start()
            return self.page

    # ---- the threads --------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Sample at a steady pace and accept clients meanwhile."""
        events = select.poll()
        events.register(self._listener, select.POLLIN)
        events.register(self._woken, select.POLLIN)
        due = time.monotonic() + self.interval
        while not self.closed:
            try:
                ready = events.poll(max(0.0, due - time.monotonic()) * 1000)
                if any(descriptor == self._listener.fileno() for descriptor, _ in ready):
                    self._welcome()
                if time.monotonic() >= due:
                    due = time.monotonic() + self.interval
                    self.observatory.sample()
            except Exception:  # observers must not break the program
                _log.exception("the monitor at %s failed, and continues", self.path)
                self._ending.wait(self.interval)

    def _welcome(self) -> None:
        link, _ = self._listener.accept()
        link.settimeout(WRITE_SECONDS)
        with self._clients_lock:
            full = len(self._clients) >= MOST_CLIENTS
            if not full and _peer(link)[1] == os.geteuid():
                thread = threading.Thread(target=self._serve, args=(link,), name="vram-client", daemon=True)
                self._clients[link] = thread
                thread.start()
                return
        why = f"{MOST_CLIENTS} others are looking already" if full else "another user's process is not told"
        with contextlib.suppress(OSError):
            link.sendall(_line({"error": why}))
        link.close()

    def _serve(self, link: socket.socket) -> None:
        """Answer one client until it disconnects or sends an incomplete line."""
        try:
            with link, link.makefile("rb") as lines:
                link.sendall(_line({"answer": {"protocol": PROTOCOL, "pid": os.getpid()}}))
                link.settimeout(None)
                while not self.closed and (asked := lines.readline(MOST_ASKED + 1)):
                    answer = self._answer(asked)
                    link.settimeout(WRITE_SECONDS)
                    link.sendall(_line(answer))
                    link.settimeout(None)
                    if not asked.endswith(b"\n"):
                        break
        except OSError:
            pass  # it disconnected
        finally:
            with self._clients_lock:
                self._clients.pop(link, None)

    def _answer(self, asked: bytes) -> Answer:
        try:
            return {"answer": self._ask(_question(asked))}
        except VramError as error:
            return {"error": str(error)}
        except Exception as error:  # observers must not break the program
            _log.exception("a question to the monitor failed")
            return {"error": f"{type(error).__name__}: {error}"}

    def _ask(self, question: Answer) -> Answer:
        what = question.get("ask")
        if what == "status":
            return self.status(_whole(question, "top", 20), _whole(question, "history", 600))
        if what == "snapshot":
            return self.snapshot(_whole(question, "pool", 0))
        if what == "info":
            return self.info()
        raise ConfigError(f"there is no question {what!r}; ask for status, snapshot or info")

    def info(self) -> Answer:
        """The output of `vram info` and `vram doctor` for this process."""
        from vram.system.doctor import examine
        from vram.system.machine import info

        return {**info(), "findings": [finding.to_dict() for finding in examine()]}

    # ---- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the socket and disconnect all clients. Closing again does nothing."""
        with _lock:
            if self.closed:
                return
            self._ending.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self.page is not None:
            self.page.close()
        if self._end_stacks is not None:
            self._end_stacks()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        with self._clients_lock:
            clients = dict(self._clients)
        for link in clients:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *clients.values()):
            if thread is not threading.current_thread():
                thread.join(WRITE_SECONDS)
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Close the descriptors of this process."""
        for each in (self._listener, self._wake, self._woken, *self._clients):
            with contextlib.suppress(OSError):
                each.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"vram top {os.getpid()} shows it"
        return f"<vram.Monitor at {str(self.path)!r}: {state}>"


_monitor: Monitor | None = None
_lock = new_lock()


def _close_at_exit() -> None:
    if _monitor is not None:
        _monitor.close()


def _after_fork_in_child() -> None:
    """The socket and its threads belong to the parent; the child closes its copies of the descriptors."""
    global _monitor
    if _monitor is not None:
        _monitor._ending.set()
        disown(each.fileno() for each in (_monitor._listener, *_monitor._clients))
        _monitor._close_sockets()
    _monitor = None


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- lines ------------------------------------------------------------------------------------------------


def _line(answer: Answer) -> bytes:
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _question(asked: bytes) -> Answer:
    try:
        question = json.loads(asked) if asked.endswith(b"\n") else None
    except (ValueError, RecursionError):
        question = None
    if not isinstance(question, dict):
        raise ConfigError(
            f'a question is a line of JSON such as {{"ask": "status"}}, of at most {MOST_ASKED} bytes'
        )
    return question


def _whole(question: Answer, name: str, otherwise: int) -> int:
    value = question.get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ConfigError(f"{name} is a whole number of at least 0, not {value!r}")
    return value


# ---- sockets ----------------------------------------------------------------------------------------------


def _listen(directory: Path) -> tuple[socket.socket, Path]:
    """A socket named after this process. A name that is in use, as by another container, is not taken."""
    for attempt in range(100):
        path = directory / (f"{os.getpid()}.sock" if not attempt else f"{os.getpid()}-{attempt}.sock")
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise ConfigError(
                f"{path} is too long for a Unix socket; set VRAM_RUNTIME_DIR to a shorter directory"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_if_dead(path)
            listener.bind(os.fspath(path))
            path.chmod(0o600)
            listener.listen(MOST_CLIENTS)
            return listener, path
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"the monitor's socket {path} cannot be made: {error}") from error
    raise ConfigError(f"{directory} has a hundred sockets of process {os.getpid()} already")


def _remove_if_dead(path: Path) -> bool:
    """Remove a socket without a listener: its process ended without closing it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                path.unlink()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            return False
    return False


_CREDENTIALS = struct.Struct("3i")


def _peer(link: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, according to the kernel."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


# ---- the client -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this user that called `vram.monitor()`."""

    pid: int
    path: Path


def processes() -> list[Process]:
    """Monitored processes of this user, including this one. Sockets without a process are removed."""
    return [each for each in _named() if not _remove_if_dead(each.path)]


def _named(pid: int | None = None) -> list[Process]:
    """Every socket, or those of one process, with or without a listener."""
    found = []
    for directory in runtime_directories():
        for path in directory.glob("*.sock") if not unsafe(directory) else ():
            number = path.stem.partition("-")[0]
            if number.isdecimal() and pid in (None, int(number)):
                found.append(Process(int(number), path))
    return sorted(found, key=lambda each: (each.pid, each.path))


def attach(pid: int | None = None, *, timeout: float = LINK_SECONDS) -> Client:
    """Attach to a monitored process of this user, by its number or because it is the only one.

    Raises DeviceError if there is none, or if there are several and `pid` is not given.
    """
    found = processes() if pid is None else _named(pid)
    if len(found) > 1 and pid is None:
        listed = ", ".join(str(each.pid) for each in found)
        raise DeviceError(f"several processes are monitored; name one of them: {listed}", code="missing")
    for each in found:
        if pid is None or len(found) == 1 or not _remove_if_dead(each.path):
            return Client(each, timeout=timeout)
    raise DeviceError(_nobody(pid), code="missing", pid=pid)


def _nobody(pid: int | None) -> str:
    advice = "call vram.monitor() in it, or start it with vram run --monitor"
    if pid is None:
        return f"no process of yours is monitored; {advice}"
    others = ", ".join(str(each.pid) for each in processes()) or "none"
    return f"process {pid} is not monitored, or not yours; {advice}. Monitored now: {others}"


class Client(Closing):
    """A connection to a monitored process. One thread at a time may use it."""

    def __init__(self, process: Process, *, timeout: float = LINK_SECONDS) -> None:
        """Connect, and verify that the other end belongs to this user; see `attach`."""
        self.process = process
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link.settimeout(timeout)
        try:
            self._link.connect(os.fspath(process.path))
            _, user = _peer(self._link)
        except OSError as error:
            self._link.close()
            raise DeviceError(f"process {process.pid} does not answer: {error}", code="closed") from error
        if user != os.geteuid():
            self._link.close()
            raise DeviceError(f"{process.path} is served by user {user}, not by you", code="missing")
        self._lines = self._link.makefile("rb")
        try:
            self._read()  # the greeting
        except DeviceError:
            self.close()
            raise

    def status(self, top: int = 20, history: int = 600) -> Answer:
        """What the process holds now; see `vram.observe.status.Observatory.status`."""
        return self._ask({"ask": "status", "top": top, "history": history})

    def snapshot(self, pool: int) -> Answer:
        """Every block of one of its pools, in the form of `Snapshot.to_dict()`."""
        return self._ask({"ask": "snapshot", "pool": pool})

    def info(self) -> Answer:
        """Its devices, versions, features and settings, and problems with them."""
        return self._ask({"ask": "info"})

    def _ask(self, question: Answer) -> Answer:
        with contextlib.suppress(BrokenPipeError):  # reading says why
            self._link.sendall(_line(question))
        return self._read()

    def _read(self) -> Answer:
        try:
            line = self._lines.readline(MOST_ANSWERED + 1)
        except ConnectionResetError:
            line = b""
        except OSError as error:
            raise DeviceError(
                f"process {self.process.pid} does not answer: {error}", code="closed"
            ) from error
        if not line.endswith(b"\n"):
            raise DeviceError(
                f"process {self.process.pid} has ended, or its monitor was closed", code="closed"
            )
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise DeviceError(
                f"process {self.process.pid} answers what is not JSON", code="failed"
            ) from error
        if not isinstance(answer, dict) or not isinstance(answer.get("answer"), dict):
            why = answer.get("error") if isinstance(answer, dict) else answer
            raise DeviceError(f"process {self.process.pid} refuses: {why}", code="failed")
        found: Answer = answer["answer"]
        return found

    def close(self) -> None:
        """Disconnect. Closing again does nothing."""
        self._lines.close()
        self._link.close()
