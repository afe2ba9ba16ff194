"""The allocator and the settings that a recording was made with, in the words of the policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vram.arguments import require
from vram.trace import Trace

from .policies import policy_kind

__all__ = ["Setting", "recorded_setting", "uses_torch"]

MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """An allocator and its options, for `vram.replay.replay`."""

    policy: str
    conf: Mapping[str, str]

    @property
    def environment(self) -> str:
        """Line to paste: environment variables, for RMM a line of Python, empty for PyTorch's defaults."""
        return policy_kind(self.policy).environment(self.conf)


def recorded_setting(trace: Trace) -> Setting | None:
    """What the recorded job ran with; None if the recording does not say, or if no policy is like it.

    Settings of vram's own pools are not read back: they are those of its policy, as far as it has them.
    """
    settings = require(trace, Trace, "trace").settings
    if settings.get("allocator") == "vram":
        return Setting("vram", {})
    if "expandable_segments" not in settings:  # not a snapshot of PyTorch, or one of an old version
        return None
    return Setting("torch-expandable" if settings["expandable_segments"] else "torch", dict(_conf(settings)))


def uses_torch(trace: Trace) -> bool:
    """Whether the recorded job can be one of PyTorch, and not only of pools of vram."""
    if trace.settings.get("allocator") != "vram":
        return True
    on_gpu = str(trace.settings.get("device", "")).startswith("cuda")
    return on_gpu and (not trace.frames or any("/torch/" in f"/{each.filename}" for each in trace.frames))


def _conf(settings: Mapping[str, object]) -> list[tuple[str, str]]:
    """The settings that differ from PyTorch's defaults and have a word in PYTORCH_CUDA_ALLOC_CONF."""
    found = []
    split = settings.get("max_split_size")
    if isinstance(split, int) and split > 0:
        found.append(("max_split_size_mb", str(split // MIB)))
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, float) and threshold > 0:
        found.append(("garbage_collection_threshold", f"{threshold:g}"))
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping) and any(divisions.values()):
        found.append(("roundup_power2_divisions", _divisions(divisions)))
    return found


def _divisions(divisions: Mapping[object, object]) -> str:
    counts = {str(value) for value in divisions.values()}
    if len(counts) == 1:
        return counts.pop()
    return "[" + ",".join(f"{size}:{count}" for size, count in divisions.items()) + "]"
