"""What `vram run --record` records in an unchanged program: the pools of vram's manager, and PyTorch's own
allocator from the moment the program first uses CUDA.

The recordings are those of `vram.observe.recorder` and `vram.torch.watch`; nothing here writes to files.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram.core.manager import get_memory_manager
from vram.core.observer import marks
from vram.errors import DeviceError, VramError
from vram.observe.recorder import record_pools
from vram.predict.inside.imports import after_import

if TYPE_CHECKING:
    from vram.torch.watch import Watch

__all__ = ["ProgramRecording"]


class ProgramRecording:
    """The recordings of this process, which end when it ends."""

    def __init__(self, path: str) -> None:
        """Begin; PyTorch is not imported before the program does so."""
        self._path = path
        self._pools = record_pools(get_memory_manager(), path)
        self._torch: Any = None
        self._watch: Watch | None = None
        self._failure: str | None = None
        self._begun: list[str] = []  # steps and phases that are open when the program first uses CUDA
        self._end_marks = marks.add(self._mark)
        after_import("torch", self._torch_imported)

    def _mark(self, stage: str, name: str) -> None:
        if stage == "START":
            self._begun.append(name)
        elif name in self._begun:
            self._begun.remove(name)

    def _torch_imported(self, torch: Any) -> None:
        self._torch = torch
        torch.cuda._lazy_call(self._cuda_started)

    def _cuda_started(self) -> None:
        """Called by PyTorch before its first allocation. An error here must not end the program."""
        import vram.torch
        from vram.torch.watch import Watch

        if vram.torch.installed():  # its memory is that of vram's pools
            return
        try:
            self._watch = Watch(self._torch, self._path)
            self._end_marks()
            for name in self._begun:
                self._watch.mark("START", name)
        except Exception as error:
            self._failure = str(error)  # the error itself would keep what the calling functions hold

    def wait(self) -> None:
        """Wait for the threads that Python waits for at the end of a program, and write what they did."""
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        for recording in self._recordings():
            try:
                recording.flush()
            except (VramError, OSError) as error:  # the end of the process logs it
                self._failure = str(error)

    def close(self) -> None:
        """End the recordings."""
        self._pools.close()
        if self._watch is not None:
            self._watch.close()

    @property
    def events(self) -> int:
        """Events recorded so far."""
        return sum(recording.events for recording in self._recordings())

    def files(self) -> list[tuple[Path, str]]:
        """The files that were written, and the devices whose memory they have."""
        found = [(each.path, each.pool.device.name) for each in self._pools.recorders]
        return found + ([] if self._watch is None else self._watch.files())

    def why_empty(self) -> str:
        """Why nothing was recorded, and what to do."""
        torch = self._torch
        if self._failure is not None:
            return f"PyTorch could not be recorded: {self._failure}"
        if torch is None:
            return "the program used neither PyTorch nor a pool of vram.get_memory_manager()"
        why = "" if torch.cuda.is_initialized() else _no_gpu(torch)
        return why or (
            "the program imported PyTorch, but allocated no GPU memory in this process. If child processes "
            'do, call vram.torch.watch("FILE") in them'
        )

    def _recordings(self) -> list[Any]:
        return [*self._pools.recorders, *([] if self._watch is None else [self._watch])]


def _no_gpu(torch: Any) -> str:
    """Why there was none, if there was none."""
    from vram.torch.gpu import require_gpu

    try:
        require_gpu(torch)
    except DeviceError as error:
        return f"{error} To run the program without one, use --null-gpu h200."
    return ""
