"""Recording a process from outside, for `vram attach`: sends `remote_agent` there and reads its answers.

`vram.system.inject` brings code into a process. The folder of a recording, its end and its files are here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vram.core.closing import Closing
from vram.errors import DeviceError
from vram.observe.recording import beside
from vram.system.exchange import Exchange
from vram.system.inject import OtherProcess, inject, withdraw
from vram.trace import DEFAULT_MAX_BYTES

__all__ = ["RemoteRecording", "Written"]

LOOK_SECONDS = 0.05
"""How often the answer is looked for."""
AGENT = Path(__file__).with_name("remote_agent.py")
STATES = ("recording", "writing", "done", "failed")
MOST_FILES = 100
MOST_NAME = 80
"""Maximum number of characters in the name of a device, in names of files."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written: whose memory it has, and how much was reserved at the end; 0 if unknown."""

    path: Path
    of: str
    reserved: int


class RemoteRecording(Closing):
    """A recording of another process, which `vram attach` makes. Only one thread may use it."""

    def __init__(self, pid: int, output: str | os.PathLike[str], seconds: float | None = None) -> None:
        """Ask process `pid` to write what it holds now or, with `seconds`, what it does from now on.

        Returns before the process has begun. Raises DeviceError if the process cannot be asked, and
        ConfigError if `output` cannot be written.
        """
        self.pid = pid
        self.output = Path(output).absolute()
        self.notes: list[str] = []
        self._begun = False
        self._process = OtherProcess(pid)
        self._folder = Exchange(self._process.identity, self.output)
        try:
            inject(self._process, self._folder, self._agent(seconds))
        except BaseException:
            self.close()
            raise

    def _agent(self, seconds: float | None) -> str:
        request = {
            "folder": str(self._folder.path),
            "pid": self.pid,
            "user": self._process.identity.user,
            "seconds": seconds,
            "asked_by": os.getpid(),
        }
        return f"{AGENT.read_text(encoding='utf-8')}\nstart({request!r}, page)\n"

    # ---- while it goes on ---------------------------------------------------------------------------------

    def wait_for_start(self, seconds: float) -> None:
        """Wait until the process has begun. Raises DeviceError if it does not within `seconds`."""
        given_up = time.monotonic() + seconds
        while not self.state():
            if time.monotonic() >= given_up:
                raise DeviceError(
                    f"the main thread of process {self.pid} ran no Python code for {seconds:g} s, so nothing "
                    "was recorded. It may wait in input(), Thread.join() or a lock, or in a long call of a "
                    "library. Try again later, or wait longer with --timeout"
                )
            time.sleep(LOOK_SECONDS)

    def state(self) -> dict[str, Any]:
        """What the process said last: `state` is "recording", "writing" or "done". Empty before it begins.

        Raises DeviceError if it refused or failed, or if it has ended.
        """
        ended = self._process.has_ended()  # looked at first: its last words come before its end
        text = self._folder.read("state.json")
        said = _checked(text, self.pid) if text else {}
        if said and not self._begun:
            self._begun = True
            self._folder.remove_code_folder()
        if said.get("state") == "failed":
            raise DeviceError(said["error"])
        if ended and said.get("state") != "done":
            return self._left_behind()
        return said

    def _left_behind(self) -> dict[str, Any]:
        """What a process that was killed had recorded: the files of vram's pools are complete up to then."""
        left = [Path(name) for name in self._folder.names() if name.endswith(".vtrace")][:MOST_FILES]
        if not left:
            raise DeviceError(f"process {self.pid} ended before anything was written")
        note = f"process {self.pid} ended; the recording has what it did until then"
        files = [{"file": path.name, "of": "a pool", "name": path.stem, "bytes": 0} for path in left]
        return {"state": "done", "files": files, "notes": [note]}

    def stop(self) -> None:
        """End the recording early; the process then writes the file."""
        self._folder.write("stop", "")

    def finish(self) -> list[Written]:
        """Wait until the process has written its files, and move them to their places, the largest first."""
        while (said := self.state()).get("state") != "done":
            time.sleep(LOOK_SECONDS)
        self.notes = said["notes"]
        files = sorted(said["files"], key=lambda file: -file["bytes"])
        written: list[Written] = []
        for file in files:
            path = _free_name(self.output, file["name"], [each.path for each in written])
            self._folder.take(Path(file["file"]).name, path, DEFAULT_MAX_BYTES)
            written.append(Written(path, file["of"], file["bytes"]))
        return written

    def close(self) -> None:
        """Leave the process alone and remove temporary files. A recording under way ends without a file."""
        with self._folder, contextlib.suppress(DeviceError):  # whoever owns the folder may have removed it
            if self._begun or self._process.has_ended():
                self._folder.remove_code_folder()
                self._folder.remove_folder()
            else:
                withdraw(self._folder)


# ---- what the process answers -----------------------------------------------------------------------------


def _checked(text: str, pid: int) -> dict[str, Any]:
    """The state, which the process of another user may have written: anything else is an error."""
    try:
        said = json.loads(text)
        files = [
            {**{key: str(file[key]) for key in ("file", "of", "name")}, "bytes": _number(file["bytes"])}
            for file in said.get("files", ())
        ]
        if said["state"] not in STATES or len(files) > MOST_FILES:
            raise ValueError
        return {
            "state": said["state"],
            "seconds": _number(said.get("seconds", 0.0)),
            "error": str(said.get("error", "")),
            "notes": [str(note) for note in said.get("notes", ())],
            "files": files,
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise DeviceError(f"process {pid} answered something that vram attach does not understand") from None


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or not 0 <= value < 2**63:
        raise ValueError
    return value


# ---- files ------------------------------------------------------------------------------------------------


def _free_name(output: Path, name: str, taken: list[Path]) -> Path:
    """Where a file goes: the first to the output, others to names beside it, which no other has."""
    if not taken:
        return output
    name = re.sub(r"[^\w.:-]", "-", name)[:MOST_NAME]
    path, number = beside(output, name), 1
    while path in taken:
        number += 1
        path = beside(output, f"{name}-{number}")
    return path
