"""Facts about this process: its rank, its error, where it is, and what it asks of the null GPU."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

__all__ = ["asker", "error", "frames", "peaks", "place", "rank", "refusals", "static_runtimes", "unknown"]

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES = ("site-packages", "dist-packages", f"lib{os.sep}python", "torchinductor")
"""Parts of the names of files that are not the program's own."""
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with the rank of a process; the innermost launcher first."""
STATIC_RUNTIME = b"libcudart_static_"
"""What a library contains that was linked with the static CUDA runtime."""
REPLACED = (f"{os.sep}nvidia{os.sep}", f"{os.sep}torch{os.sep}lib{os.sep}")
"""Folders of libraries that the null GPU replaces, or that use its runtime."""


def rank() -> int | None:
    """The rank of this process, where a launcher numbers them."""
    found = (os.environ.get(name, "") for name in RANKS)
    return next((int(text) for text in found if text.isdecimal()), None)


def error() -> dict[str, Any] | None:
    """The exception that ended the program; Python keeps it for debuggers."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return None
    return {
        "type": type(error).__name__,
        "message": str(error)[:2000],
        "place": place(_traceback(error.__traceback__)),
        "out_of_memory": isinstance(error, MemoryError) or "out of memory" in str(error).lower(),
    }


def frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """The calls of a stack, innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def asker() -> str | None:
    """The line of the program that led here, in a thread without a Python stack that of the main thread.

    No frame is bound to a name here. A frame that refers to itself keeps what its callers hold, such as the
    tensors of a step that failed, until the collector runs.
    """
    main = threading.main_thread().ident or 0
    return place(frames(sys._getframe())) or place(frames(sys._current_frames().get(main)))


def _traceback(found: TracebackType | None) -> list[tuple[str, int, str]]:
    calls = []
    while found is not None:
        calls.append((found.tb_frame.f_code.co_filename, found.tb_lineno, found.tb_frame.f_code.co_name))
        found = found.tb_next
    return calls[::-1]


def place(calls: Iterable[tuple[str, int, str]]) -> str | None:
    """The innermost line of the program itself: not of an installed library, and not of Python."""
    for filename, line, name in calls:
        if not filename.startswith(("<", HERE)) and not any(part in filename for part in LIBRARIES):
            return f"{filename}:{line} {name}"
    return None


def peaks() -> list[int]:
    """The most that this process used of each null GPU, with the context; empty without null GPUs."""
    return _of_each_gpu("vram_null_gpu_peak")


def refusals() -> list[int]:
    """The bytes of the last request that each null GPU refused, 0 if it refused none."""
    return _of_each_gpu("vram_null_gpu_refused")


def _of_each_gpu(name: str) -> list[int]:
    ask = getattr(ctypes.CDLL(None), name, None)
    if ask is None:
        return []
    ask.restype = ctypes.c_int64
    return list(itertools.takewhile(lambda number: number >= 0, map(ask, itertools.count())))


def unknown() -> list[str]:
    """The names of functions that the program called and the null GPU does not know."""
    try:
        ask = ctypes.CDLL(None).vram_null_gpu_unknown
    except AttributeError:
        return []
    needed = ask(None, 0)
    text = ctypes.create_string_buffer(max(needed, 0) + 1)
    ask(text, len(text))
    return sorted(filter(None, text.value.decode("utf-8", "replace").split("\n")))


def static_runtimes() -> list[str]:
    """The loaded libraries that contain the CUDA runtime themselves, so that it cannot be replaced."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line}
    return sorted(path for path in paths if not any(part in path for part in REPLACED) and _contains(path))


def _contains(path: str) -> bool:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            return contents.find(STATIC_RUNTIME) >= 0
    except (OSError, ValueError):  # a file that is gone, or empty
        return False
