"""A sweep that the page asked for: runs in a thread, tells how far it is, and is kept for who asks again."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

from vram.errors import ConfigError
from vram.replay import POLICY_KINDS, grid, sweep
from vram.trace import Trace, lifetimes, peak_allocated

__all__ = ["POLICIES", "Sweep", "sweep_answer"]

POLICIES = ("torch", "torch-expandable", "cuda-async", "vram")
"""What is tried where the page does not say."""


def sweep_answer(trace: Trace, policies: tuple[str, ...] = POLICIES, progress: Any = None) -> dict[str, Any]:
    """The ranked table of a sweep over `trace`, as plain data."""
    program = lifetimes(trace)
    ranked = sweep(program, policies=policies, jobs=2, progress=progress)
    return {
        "peak_allocated": peak_allocated(program),
        "policies": list(policies),
        "ranked": [asdict(each) for each in ranked],
    }


class Sweep:
    """One sweep. Any thread may ask for its `state()`: done, count, in the end the answer or the error."""

    def __init__(self, trace: Trace, policies: tuple[str, ...]) -> None:
        """Start it."""
        unknown = [each for each in policies if each not in POLICY_KINDS]
        if unknown or not policies:
            raise ConfigError(
                f"there is no allocator {', '.join(unknown)!r}; there is {', '.join(POLICY_KINDS)}"
                if unknown
                else f"name allocators to try: {', '.join(POLICY_KINDS)}"
            )
        self._trace = trace
        self.policies = policies
        self._changed = threading.Condition()
        self._state: dict[str, Any] = {"done": 0, "count": len(grid(policies))}
        self._thread = threading.Thread(target=self._run, name="vram-sweep", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether there is an answer or an error."""
        return "answer" in self._state or "error" in self._state

    def state(self, seen: dict[str, Any] | None = None, timeout: float = 0.0) -> dict[str, Any]:
        """What is known; waits up to `timeout` seconds for it to be other than `seen`."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != seen, timeout)
            return dict(self._state)

    def _run(self) -> None:
        try:
            self._tell(answer=sweep_answer(self._trace, self.policies, self._progress))
        except Exception as error:  # whatever it was, whoever waits must hear of it
            self._tell(error=str(error))

    def _progress(self, done: int, count: int) -> None:
        self._tell(done=done, count=count)

    def _tell(self, **more: Any) -> None:
        with self._changed:
            self._state = {**self._state, **more}
            self._changed.notify_all()
