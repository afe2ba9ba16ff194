"""The bytes of a trace file, decompressed on demand and within limits.

Detects the compression by the first bytes, not by the name. The readers of each format interpret the bytes.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from vram.errors import TraceError

__all__ = ["DEFAULT_MAX_BYTES", "BoundedReader", "open_regular_file"]

DEFAULT_MAX_BYTES = 2 << 30
"""Maximum size of a recording and of what it unpacks to, unless the caller sets another."""
CHUNK_BYTES = 256 << 10

# Recordings compress 20 to 40 times; a file that expands far more was made to exhaust memory.
MAX_EXPANSION = 100
UNQUESTIONED_BYTES = 64 << 20

ZSTD_MODULES = ("compression.zstd", "backports.zstd", "zstandard")


def open_regular_file(path: str | os.PathLike[str], max_bytes: int) -> io.FileIO:
    """Open `path`; refuses anything but a regular file (a pipe would block) and files above `max_bytes`."""
    try:
        # O_NONBLOCK so that opening a pipe returns; it has no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise TraceError(f"cannot open {Path(path)}: {error.strerror}", place="file") from error
    status = os.fstat(descriptor)
    try:
        if stat.S_ISDIR(status.st_mode):
            raise TraceError(f"{Path(path)} is a directory; name a recording in it", place="file")
        if not stat.S_ISREG(status.st_mode):
            raise TraceError(
                f"{Path(path)} is not a regular file; save the recording to one first", place="file"
            )
        if status.st_size > max_bytes:
            raise TraceError(
                f"{Path(path)} has {status.st_size} bytes, more than the {max_bytes} allowed; "
                "pass a larger max_bytes if you trust it",
                place="file",
                limit=max_bytes,
            )
    except TraceError:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor)


def _open_zstd(file: BinaryIO) -> Any:
    for name in ZSTD_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if name == "zstandard":
            return module.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return module.ZstdFile(file)
    raise TraceError(
        "the file is compressed with zstd, and no zstd module is installed; "
        'install one (pip install "vram[trace]") or decompress the file first (zstd -d)',
        place="compression",
    )


_OPENERS: tuple[tuple[bytes, Callable[[BinaryIO], Any]], ...] = (
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file, mode="rb")),
    (b"BZh", bz2.BZ2File),
    (b"\x28\xb5\x2f\xfd", _open_zstd),
)


class BoundedReader(io.RawIOBase):
    """The decompressed bytes of `file`, at most `max_bytes`; calls `on_progress(count)` after every chunk.

    Compressed files expand to at most `max_expansion` times their size.

    Invariant: `count` bytes were unpacked, `count <= max_bytes`.
    """

    def __init__(
        self,
        file: io.FileIO,
        max_bytes: int,
        on_progress: Callable[[int], None] | None = None,
        *,
        max_expansion: int | None = MAX_EXPANSION,
    ) -> None:
        super().__init__()
        self.count = 0
        self.stored_bytes = os.fstat(file.fileno()).st_size
        self._max_bytes = max_bytes
        self._max_expansion = max_expansion
        self._on_progress = on_progress
        self._stored = io.BufferedReader(file, CHUNK_BYTES)
        head = self._stored.peek(8)
        opener = next((opener for magic, opener in _OPENERS if head.startswith(magic)), None)
        self.compressed = opener is not None
        self._source: Any = opener(self._stored) if opener else self._stored
        self._ahead = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Close the file, too."""
        if not self.closed and hasattr(self, "_stored"):
            self._stored.close()
        super().close()

    def peek(self, count: int) -> bytes:
        """The first bytes that a read will return; fewer only at the end of the file."""
        while len(self._ahead) < count and (data := self._next(CHUNK_BYTES)):
            self._ahead += data
        return self._ahead[:count]

    def readinto(self, buffer: Any) -> int:
        if self._ahead:
            data, self._ahead = self._ahead[: len(buffer)], self._ahead[len(buffer) :]
        else:
            data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next(self, most: int) -> bytes:
        try:
            data: bytes = self._source.read1(most)
        except (MemoryError, TraceError):
            raise
        except Exception as error:  # each module has its own: LZMAError, zlib.error, EOFError, OSError
            raise TraceError(
                f"the compressed data is damaged or cut off after {self.count} bytes unpacked: {error}",
                place=f"byte {self.count}",
            ) from error
        self.account(len(data), packed=self.compressed)
        return data

    def account(self, arrived: int, *, packed: bool) -> None:
        """Count unpacked bytes against the limits, here or for a reader whose format `packed` them."""
        self.count += arrived
        if self.count > self._max_bytes:
            raise TraceError(
                f"the file unpacks to more than the {self._max_bytes} bytes allowed; "
                "pass a larger max_bytes if you trust it",
                place=f"byte {self._max_bytes}",
                limit=self._max_bytes,
            )
        most = max(UNQUESTIONED_BYTES, (self._max_expansion or 0) * self.stored_bytes)
        if packed and self._max_expansion is not None and self.count > most:
            raise TraceError(
                f"{self.stored_bytes} bytes unpack to more than {self._max_expansion} times as many; this is "
                "hardly a recording. Pass trusted=True if you trust it",
                place=f"byte {self.count}",
            )
        if self._on_progress is not None:
            self._on_progress(self.count)
