"""The formats in which a Trace can be written, for other tools and for vram."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vram.errors import TraceError

from .arrow import write_parquet
from .flame import write_folded, write_speedscope
from .model import Trace
from .perfetto import write_perfetto
from .torch_export import write_torch

__all__ = ["FORMATS", "Format", "convert", "output_file"]


class Format(NamedTuple):
    """The usual suffix of a format, and the function that writes it."""

    suffix: str
    write: Callable[[Trace, BinaryIO], None]


FORMATS = {
    "folded": Format(".folded", write_folded),
    "parquet": Format(".parquet", write_parquet),
    "perfetto": Format(".perfetto.json", write_perfetto),
    "speedscope": Format(".speedscope.json", write_speedscope),
    "torch": Format(".pickle", write_torch),
}


def convert(trace: Trace, to: str, path: str | os.PathLike[str]) -> None:
    """Write `trace` to `path` in one of `FORMATS`. The file appears when it is complete, or not at all."""
    if to not in FORMATS:
        raise ValueError(f"{to!r} is not a format; there are {', '.join(FORMATS)}")
    with output_file(path) as file:
        FORMATS[to].write(trace, file)


@contextmanager
def output_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file to write. It appears when it is complete, or not at all."""
    target = Path(path)
    replaced = target.is_file() or not target.exists()  # not where it is a device, such as /dev/stdout
    if replaced:
        target = target.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part") if replaced else target
    try:
        with part.open("wb") as file:
            yield file
        if replaced:
            part.replace(target)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror or error}", place="file") from error
    finally:
        if replaced:
            part.unlink(missing_ok=True)
