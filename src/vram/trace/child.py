"""The process that reads an untrusted file, started by `sandbox`: lowers its limits, reads, answers.

`limits` has what it may use, `formats` interprets the bytes.

What it sends:    one line of JSON, then the bytes of the columns in the order of COLUMNS
    {"error": [message, facts]}
    {"notes": {...as in `notes`...}, "events": count}
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import BinaryIO

from vram.errors import TraceError

from .files import BoundedReader
from .formats import Parts, read_parts
from .limits import TOO_MUCH_MEMORY, enter_limits, while_reading
from .model import COLUMNS

__all__ = ["serve"]


def serve(request: str) -> None:
    """Read standard input, answer on standard output, and exit without freeing what was read."""
    sys.modules["numpy"] = None  # type: ignore[assignment]  # pyarrow loads three times faster without
    options = json.loads(request)
    output = os.fdopen(1, "wb", closefd=False)
    enter_limits(lambda count: None)
    try:
        with io.FileIO(0, closefd=False) as file:
            reader = BoundedReader(file, options["max_bytes"], while_reading())
            _send(read_parts(reader, options["device"]), output)
    except MemoryError:
        _send_error(TraceError(TOO_MUCH_MEMORY, place="file"), output)
    except TraceError as error:
        _send_error(error, output)
    output.flush()
    os._exit(0)


def _send_error(error: TraceError, output: BinaryIO) -> None:
    output.write(json.dumps({"error": [error.message, error.facts]}).encode() + b"\n")


def _send(parts: Parts, output: BinaryIO) -> None:
    notes, columns = parts
    header = {"notes": notes, "events": len(columns["action"])}
    output.write(json.dumps(header).encode() + b"\n")
    for name in COLUMNS:
        output.write(columns[name])
