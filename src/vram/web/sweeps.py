"""A sweep that the page requested: runs in a thread, reports progress, and is kept for later requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeAlias

from vram.errors import ConfigError
from vram.replay import POLICY_KINDS, grid, sweep
from vram.trace import Trace, peak_allocated
from vram.trace.lifetimes import intended

__all__ = ["POLICIES", "Sweep", "sweep_answer"]

Run: TypeAlias = Callable[[tuple[str, ...], Callable[[int, int], None]], dict[str, Any]]
"""Returns the answer of a sweep over some policies, and reports how many settings of how many are done."""
POLICIES = ("torch", "torch-expandable", "cuda-async", "vram")
"""The default policies of the page."""


def sweep_answer(trace: Trace, policies: tuple[str, ...] = POLICIES, progress: Any = None) -> dict[str, Any]:
    """Return the ranked table of a sweep over `trace`, as plain data."""
    program = intended(trace)
    ranked = sweep(program, policies=policies, jobs=2, progress=progress)
    return {
        "peak_allocated": peak_allocated(program),
        "policies": list(policies),
        "ranked": [asdict(each) for each in ranked],
    }


class Sweep:
    """One sweep. Any thread may read its `state()`: done, count, and finally the answer or the error."""

    def __init__(self, run: Run, policies: tuple[str, ...]) -> None:
        """Start the sweep, which `run` does."""
        unknown = [each for each in policies if each not in POLICY_KINDS]
        if unknown or not policies:
            raise ConfigError(
                f"unknown allocator {', '.join(unknown)!r}; valid: {', '.join(POLICY_KINDS)}"
                if unknown
                else f"select at least one allocator: {', '.join(POLICY_KINDS)}"
            )
        self._sweep = run
        self.policies = policies
        self._changed = threading.Condition()
        self._state: dict[str, Any] = {"done": 0, "count": len(grid(policies))}
        self._thread = threading.Thread(target=self._run, name="vram-sweep", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Return whether there is an answer or an error."""
        return "answer" in self._state or "error" in self._state

    def state(self, seen: dict[str, Any] | None = None, timeout: float = 0.0) -> dict[str, Any]:
        """Return the state; wait up to `timeout` seconds until it differs from `seen`."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != seen, timeout)
            return dict(self._state)

    def _run(self) -> None:
        try:
            self._tell(answer=self._sweep(self.policies, self._progress))
        except Exception as error:  # waiting pages must get every error
            self._tell(error=str(error))

    def _progress(self, done: int, count: int) -> None:
        self._tell(done=done, count=count)

    def _tell(self, **more: Any) -> None:
        with self._changed:
            self._state = {**self._state, **more}
            self._changed.notify_all()
