"""The functions below torch.cuda, all of which refuse under a plugged allocator."""

from __future__ import annotations

from typing import Any, NoReturn


def _refuse(*_arguments: Any) -> NoReturn:
    raise RuntimeError("CUDAPluggableAllocator does not yet support this")


def _cuda_memoryStats(device: int) -> NoReturn:
    """Statistics of a device."""
    _refuse()


_cuda_resetPeakMemoryStats = _cuda_resetAccumulatedMemoryStats = _cuda_getMemoryFraction = _refuse
_cuda_memorySnapshot = _cuda_record_memory_history = _cuda_record_memory_history_legacy = _refuse
_cuda_isHistoryEnabled = _refuse

observers: list[Any] = []


def _cuda_attach_out_of_memory_observer(observer: Any) -> None:
    """Refused only under a plug."""
    observers.append(observer)
