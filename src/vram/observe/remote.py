"""Recording a process from outside, for `vram attach`: sends `remote_agent` there and reads its answers.

`vram.system.inject` brings code into a process. The folder of a recording, its end and its files are here.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vram.core.closing import Closing
from vram.errors import ConfigError, DeviceError
from vram.observe.recording import beside
from vram.system.inject import OtherProcess, inject, withdraw

__all__ = ["RemoteRecording", "Written"]

LOOK_SECONDS = 0.05
"""How often the answer is looked for."""
AGENT = Path(__file__).with_name("remote_agent.py")


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
        self._folder = _new_folder(self.output, self._process.user)
        self._code = self._folder / "agent.py"
        try:
            self._code.write_text(self._agent(seconds), encoding="utf-8")
            inject(self._process, self._code)
        except BaseException:
            self.close()
            raise

    def _agent(self, seconds: float | None) -> str:
        request = {
            "folder": str(self._folder),
            "pid": self.pid,
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
        try:
            said: dict[str, Any] = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            said = {}
        self._begun |= bool(said)
        if said.get("state") == "failed":
            raise DeviceError(said["error"])
        if ended and said.get("state") != "done":
            return self._left_behind()
        return said

    def _left_behind(self) -> dict[str, Any]:
        """What a process that was killed had recorded: the files of vram's pools are complete up to then."""
        left = sorted(path for path in self._folder.glob("*.vtrace") if path.stat().st_size)
        if not left:
            raise DeviceError(f"process {self.pid} ended before anything was written")
        note = f"process {self.pid} ended; the recording has what it did until then"
        files = [{"file": path.name, "of": "a pool", "name": path.stem, "bytes": 0} for path in left]
        return {"state": "done", "files": files, "notes": [note]}

    def stop(self) -> None:
        """End the recording early; the process then writes the file."""
        (self._folder / "stop").touch()

    def finish(self) -> list[Written]:
        """Wait until the process has written its files, and move them to their places, the largest first."""
        while (said := self.state()).get("state") != "done":
            time.sleep(LOOK_SECONDS)
        self.notes = said["notes"]
        files = sorted(said["files"], key=lambda file: -file["bytes"])
        written: list[Written] = []
        for file in files:
            path = _free_name(self.output, file["name"], [each.path for each in written])
            _move(self._folder / Path(file["file"]).name, path)
            written.append(Written(path, file["of"], file["bytes"]))
        return written

    def close(self) -> None:
        """Leave the process alone and remove temporary files. A recording under way ends without a file."""
        if self._begun or self._process.has_ended():
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            withdraw(self._code)


# ---- files ------------------------------------------------------------------------------------------------


def _new_folder(output: Path, user: int) -> Path:
    """Make a folder that the process can use: beside the output, or elsewhere for another user's process."""
    own = user == os.geteuid()
    try:
        folder = Path(tempfile.mkdtemp(prefix=".vram-attach-", dir=output.parent if own else None))
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    if not own:
        os.chown(folder, user, -1)
    return folder


def _free_name(output: Path, name: str, taken: list[Path]) -> Path:
    """Where a file goes: the first to the output, others to names beside it, which no other has."""
    if not taken:
        return output
    path, number = beside(output, name), 1
    while path in taken:
        number += 1
        path = beside(output, f"{name}-{number}")
    return path


def _move(source: Path, target: Path) -> None:
    """Move a file that a process wrote, which may be another user's: it must be a file and no link."""
    if not stat.S_ISREG(source.lstat().st_mode):
        raise DeviceError(f"the process did not write a file, so {target} was not written")
    try:
        shutil.move(source, target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
