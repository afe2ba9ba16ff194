"""The process that reads a file and answers the page's queries about it, started by `files`.

Queries run in threads, so that a long one does not hold up others. The process ends when its input does.

Asked:       {"number": of the query, "question": name, "given": {...}, "paths": {file: path}}, one in a line
Answered:    number kind JSON, one in a line
    n answer    {...}
    n progress  [done, count]
    n error     [class, message, traceback if it is unexpected]
    0 failure   likewise: the file cannot be read, and the process ends
    0 reading   [bytes read, bytes of the file]
    0 opened    null
    0 memory    bytes that the process may take besides
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from typing import Any

from vram.errors import TraceError, VramError
from vram.trace.limits import TOO_MUCH_MEMORY, allow_work, enter_limits
from vram.trace.sandbox import HOSTILE

from .recordings import Opened, Recording, answer

__all__ = ["serve"]


def serve(request: str) -> None:
    """Read the file, answer queries from standard input on standard output, and exit."""
    options = json.loads(request)
    answers = _Answers()
    enter_limits(lambda count: answers.send(0, "memory", count))
    opened = Opened(options["device"])
    try:
        opened.read(options["file"], options["path"], lambda *read: answers.send(0, "reading", read))
    except BaseException as error:
        answers.send(0, "failure", _told(error))
        os._exit(0)
    answers.send(0, "opened", None)
    for line in sys.stdin.buffer:
        threading.Thread(target=_answer, args=(opened, answers, json.loads(line))).start()
    os._exit(0)


class _Answers:
    """Standard output, for whole lines of several threads. What libraries print there is discarded."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def send(self, number: int, kind: str, content: Any) -> None:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
        with self._lock:
            self._file.write(f"{number} {kind} {text}\n".encode())
            self._file.flush()


def _answer(opened: Opened, answers: _Answers, asked: dict[str, Any]) -> None:
    number = asked["number"]
    try:
        allow_work(0)
        recordings = {int(file): opened.read(int(file), path) for file, path in asked["paths"].items()}
        answers.send(number, "answer", _found(recordings, answers, asked))
    except BaseException as error:
        answers.send(number, "error", _told(error))


def _found(recordings: dict[int, Recording], answers: _Answers, asked: dict[str, Any]) -> Any:
    question, given = asked["question"], asked["given"]
    if question == "open":
        return None
    if question == "sweep":
        from .sweeps import sweep_answer

        trace = recordings[int(given["file"])].trace
        policies = tuple(given["policies"].split(","))
        return sweep_answer(trace, policies, lambda *done: answers.send(asked["number"], "progress", done))
    return answer(recordings, question, given)


def _told(error: BaseException) -> list[str]:
    if isinstance(error, MemoryError) and not isinstance(error, VramError):
        error = TraceError(f"{TOO_MUCH_MEMORY}; {HOSTILE}")
    expected = isinstance(error, VramError)
    return [type(error).__name__, str(error), "" if expected else traceback.format_exc()]
