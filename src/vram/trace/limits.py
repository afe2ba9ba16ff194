"""What a process may use while it works on a file of unknown origin. The process lowers its own limits.

    reading     memory and processor time in proportion to the bytes read; they rise as bytes arrive
    working     the same in proportion to the recording's entries; `sandbox` watches the memory from outside
    never       the network, other programs, other processes, files opened for writing, a core dump

Where the system has no such limits (Windows, in part macOS), the bounds of `formats` remain.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = [
    "TOO_MUCH_MEMORY",
    "TOO_MUCH_TIME",
    "WORK_FLOOR_BYTES",
    "allow_work",
    "enter_limits",
    "in_force",
    "while_reading",
]

try:
    import resource as _resource

    resource: Any = _resource
except ImportError:
    resource = None

# A snapshot takes about 7 bytes of memory for each of its own, and a second for every 20 MB.
READING_FLOOR_BYTES = 512 << 20
READING_FACTOR = 16
READING_FLOOR_SECONDS = 3
TOLD_BYTES = 4 << 20
BYTES_A_SECOND = 2_000_000

# Sweeps and reports of recorded jobs take 400 bytes of memory and up to 0.2 ms for each event.
WORK_FLOOR_BYTES = 1 << 30
BYTES_AN_ENTRY = 4 << 10
WORK_FLOOR_SECONDS = 60
SECONDS_AN_ENTRY = 0.002
MOST_SECONDS = 1 << 31

TOO_MUCH_MEMORY = "it takes more memory than a recording of its size needs"
TOO_MUCH_TIME = "it takes more processor time than a recording of its size needs"

# Numerical libraries start a thread for each processor, and each thread reserves addresses.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_tell: Callable[[int], None] | None = None
_working = False
_entries = 0


def in_force() -> bool:
    """Whether this process has lowered its limits, so that it may read files itself."""
    return _tell is not None


def enter_limits(tell: Callable[[int], None], *, with_parent: bool = False) -> None:
    """Lower the limits for good. `tell` is called with the bytes of memory that each part of a file adds.

    Call it before the process has other threads. `with_parent`: the process ends when its parent does.
    """
    global _tell
    _tell = tell
    os.environ.update(ONE_THREAD)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if the machine runs out of memory, this process ends first
    if resource is not None:
        _set_limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        _forbid(with_parent)


def while_reading() -> Callable[[int], None]:
    """Allow what an empty file needs. The result allows what `count` bytes of a file need."""
    held, used, told = _address_bytes(), _used_seconds(), 0

    def allow(count: int) -> None:
        nonlocal told
        if _tell is not None and count - told >= TOLD_BYTES:
            _tell(READING_FACTOR * (count - told))
            told = count
        if resource is None:
            return
        if not _working:  # a replay reserves far more addresses than it uses
            _set_limit(resource.RLIMIT_AS, held + READING_FLOOR_BYTES + READING_FACTOR * count)
        _allow_seconds(used + READING_FLOOR_SECONDS + count // BYTES_A_SECOND)

    allow(0)
    return allow


def allow_work(entries: int, seconds: float = 0.0) -> None:
    """Allow from now on what work on so many more entries needs, and `seconds` of the processor besides."""
    global _working, _entries
    if _tell is None:
        return
    _working = True
    _entries += entries
    _tell(BYTES_AN_ENTRY * entries)
    if resource is not None:
        _set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
        _allow_seconds(_used_seconds() + WORK_FLOOR_SECONDS + SECONDS_AN_ENTRY * _entries + seconds)


def _allow_seconds(seconds: float) -> None:
    """Never lowers what work may use that began earlier."""
    soft = resource.getrlimit(resource.RLIMIT_CPU)[0]
    if not _working or soft == resource.RLIM_INFINITY or soft < seconds:
        _set_limit(resource.RLIMIT_CPU, int(min(seconds, MOST_SECONDS)) + 1)


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = hard if value == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (value, hard))
    except (OSError, ValueError):
        if sys.platform != "darwin":  # which does not limit addresses
            raise


def _address_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _used_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system


# ---- calls that are refused --------------------------------------------------------------------------------

# By machine: the number of the architecture in linux/audit.h, the calls that are refused, for each call that
# opens a file the place of its flags, and tgkill, which a process may use on itself (abort).
_REFUSED = {
    "x86_64": (
        0xC000003E,
        {
            "network": (41, 42, 43, 44, 46, 49, 50, 53, 288, 307, 425),  # socket to sendmmsg, io_uring_setup
            "programs": (59, 322),  # execve, execveat
            "processes": (62, 101, 129, 200, 297, 310, 311, 424, 434, 438, 440),  # kill, ptrace to pidfd_*
            "files": (
                *(76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133, 161, 165, 188, 189),
                *(190, 235, 258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 316, 437, 452),
            ),  # truncate to fchmodat2
        },
        {2: 1, 257: 2},  # open, openat
        234,
    ),
    "aarch64": (
        0xC00000B7,
        {
            "network": (198, 199, 200, 201, 202, 203, 206, 211, 242, 269, 425),
            "programs": (221, 281),
            "processes": (117, 129, 130, 138, 240, 270, 271, 424, 434, 438, 440),
            "files": (5, 6, 7, 33, 34, 35, 36, 37, 38, 40, 45, 46, 51, 52, 53, 54, 55, 88, 276, 437, 452),
        },
        {56: 2},
        131,
    ),
}
_X32_CALLS = 0x40000000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 13  # EACCES
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # of seccomp_data
_SET_DEATH_SIGNAL, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 22, 38  # of prctl
_SECCOMP_FILTER = 2
_SIGKILL = 9


def _forbid(with_parent: bool) -> None:
    """Have the kernel refuse the calls of _REFUSED. A kernel that cannot goes on without."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if with_parent:
        prctl(_SET_DEATH_SIGNAL, _SIGKILL, 0, 0, 0)
    known = _REFUSED.get(os.uname().machine)
    if known is None or sys.maxsize < 1 << 32:
        return
    rows = _filter(*known)
    code = b"".join(
        operation.to_bytes(2, sys.byteorder) + bytes([yes, no]) + value.to_bytes(4, sys.byteorder)
        for operation, yes, no, value in rows
    )
    held = ctypes.create_string_buffer(code, len(code))
    program = (ctypes.c_uint64 * 2)(len(rows), ctypes.addressof(held))  # struct sock_fprog
    prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    prctl(_SET_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(program), 0, 0)


def _filter(
    architecture: int, refused: dict[str, tuple[int, ...]], opens: dict[int, int], signals: int
) -> list[tuple[int, int, int, int]]:
    """The instructions: operation, how many to skip if it holds and if not, value."""
    rows = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE),  # a call of a 32-bit program
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in sorted({number for numbers in refused.values() for number in numbers}):
        rows += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for number, place in opens.items():
        rows += [
            (_IF_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place),
            (_IF_ANY_BIT, 0, 1, _WRITES),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        ]
    return [
        *rows,
        (_IF_EQUAL, 0, 3, signals),
        (_LOAD, 0, 0, _ARGUMENTS_AT),
        (_IF_EQUAL, 1, 0, os.getpid()),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
