"""`Graph`: work captured from a stream once and launched many times. Made by `Stream.capture()`.

Memory allocated on a stream while it is captured belongs to the graph: the pool hands it to nobody else until
the graph is gone, whoever captures, this module or another library.
"""

from __future__ import annotations

import contextlib
from typing import Any

from vram import _native, device
from vram.arguments import require
from vram.device import Device, Stream, stream_handle
from vram.errors import DeviceError, VramError

__all__ = ["Graph"]


class Graph:
    """What was queued on a stream inside `with stream.capture() as graph:`; `launch()` runs it.

    Inside the block nothing runs, and the stream can be neither synchronised nor queried. `close()`, or
    garbage collection, destroys the graph; launches under way still finish, and then its memory is free.
    """

    def __init__(self, stream: Stream) -> None:
        """Make a graph that is to be captured on `stream`; use `Stream.capture()`."""
        backend = require(stream, Stream, "stream").device.backend
        if not isinstance(backend, (_native.CudaBackend, _native.ModelBackend)):
            raise DeviceError(
                f"work on {stream.device.name} cannot be captured into a graph; CUDA devices and models can",
                device=stream.device.name,
                code="unsupported",
            )
        if stream.handle == 0:
            raise DeviceError(
                "the default stream cannot be captured into a graph; capture a vram.Stream of your own",
                device=stream.device.name,
                code="unsupported",
            )
        self._backend = backend
        self._stream = stream
        self._open: list[int] = []  # close() pops it: one step, so it happens once

    @property
    def device(self) -> Device:
        """The device whose work it holds."""
        return self._stream.device

    @property
    def ready(self) -> bool:
        """Whether it can be launched: captured, and not closed."""
        return bool(self._open)

    def __enter__(self) -> Graph:
        if self._open:
            raise DeviceError("the graph is captured already; capture another one", code="invalid")
        self._backend.capture_begin(self._stream.handle)
        if device.observer is not None:
            device.observer.on_capture(self, self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if device.observer is not None:
            device.observer.on_captured(self, self._stream)
        try:
            self._open.append(self._backend.capture_end(self._stream.handle))
        except VramError:
            if kind is None:  # else what went wrong inside says why
                raise
        if kind is not None:
            self.close()

    def launch(self, stream: Any = None) -> None:
        """Queue everything captured on `stream` (by default the one it was captured on)."""
        if not self._open:
            raise DeviceError("the graph is not captured yet, or was closed", code="closed")
        handle = self._stream.handle if stream is None else stream_handle(stream, self.device)
        if device.observer is not None:
            device.observer.on_graph(self, handle)
        self._backend.graph_launch(self._open[0], handle)

    def close(self) -> None:
        """Destroy the graph. Closing again does nothing."""
        with contextlib.suppress(IndexError):
            self._backend.graph_destroy(self._open.pop())

    def __del__(self) -> None:
        # In the child of a fork the backend refuses, and there is nothing to give back.
        with contextlib.suppress(VramError, AttributeError):
            self.close()

    def __repr__(self) -> str:
        state = "ready" if self._open else "not ready"
        return f"<vram.Graph of {self.device.name}, {state}>"
