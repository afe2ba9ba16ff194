"""Why an allocation failed, in one vocabulary for pools and recordings: what a device's memory is used for,
and which part of it could have served the request.

This is plain arithmetic. `oom` fills an account from a pool, `vram.analysis` from a recording.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

__all__ = [
    "MEANINGS",
    "OUTSIDE",
    "VERDICTS",
    "WASTE",
    "Account",
    "Possible",
    "judge_limits",
    "judge_moment",
    "judge_request",
    "verdict_text",
]

VERDICTS = ("cached", "pending", "fragmentation", "rounding", "foreign", "true-demand")
"""In the order in which they are tried: what is cheapest to release comes first."""
WASTE = VERDICTS[:4]
"""What the allocator itself could have avoided."""

MEANINGS = {
    "true-demand": "in use, as requested by the program",
    "rounding": "in use, added by rounding requests up",
    "pending": "freed, but work on a stream may still use it",
    "fragmentation": "free, but split up by blocks in use",
    "cached": "cached for reuse; none of it is in use",
    "unused": "free on the device, available to the allocator",
    "withheld": "free on the device, but beyond the limit",
    "foreign": "held outside the allocator, by other libraries or processes",
}

OUTSIDE = ("withheld", "foreign")
"""Memory of the device that the allocator could not use."""

MOSTLY = 0.9
"""If at least this share of the reserved memory was requested by the program, the verdict is true demand."""


@dataclass(frozen=True, slots=True)
class Account:
    """Where the bytes of a device are; see MEANINGS. They sum to the device, as far as it is known.

    `limit` bounds what the allocator may reserve; None where only the device does.
    """

    demand: int
    rounding: int = 0
    pending: int = 0
    fragmentation: int = 0
    cached: int = 0
    unused: int = 0
    withheld: int = 0
    foreign: int = 0
    limit: int | None = None

    @property
    def allocated(self) -> int:
        """Bytes of live blocks."""
        return self.demand + self.rounding

    @property
    def reserved(self) -> int:
        """Bytes the allocator holds from the device."""
        return self.allocated + self.pending + self.fragmentation + self.cached

    @property
    def device(self) -> int:
        """All of it."""
        return self.reserved + self.unused + self.withheld + self.foreign

    @property
    def usable(self) -> int:
        """What the allocator could use: without what a limit withholds and what others hold."""
        return self.reserved + self.unused

    def shares(self) -> dict[str, float | None]:
        """Each part as a share of `usable`; None for what is outside of it."""
        usable = max(1, self.usable)
        return {name: None if name in OUTSIDE else size / usable for name, size in self.parts().items()}

    def parts(self) -> dict[str, int]:
        """Bytes by the words of MEANINGS."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "limit"}
        return {"true-demand": values.pop("demand"), **values}


@dataclass(frozen=True, slots=True)
class Possible:
    """A verdict, and for which limits it holds if the limit decides: from `least` to less than `below`."""

    verdict: str
    least: int | None = None
    below: int | None = None


def judge_request(account: Account, asked: int, needed: int | None = None) -> str:
    """The verdict on a request that failed: the first kind of memory whose removal would have let it fit.

    `asked` is the request, `needed` what the allocator would have taken from the device for it. Removed
    memory counts as unused, in one piece. Where no kind suffices alone but what the allocator could have
    spared does together, the largest of these is to blame; if it takes what is foreign too, that is.
    """
    needed = max(asked, needed or 0)
    missing = needed - account.unused
    gains = _gains(account, needed - asked)
    for name, gain in gains.items():
        if gain > 0 and missing <= gain:
            return name
    spared = sum(gains[name] for name in WASTE)
    if missing <= spared:
        return max(WASTE, key=gains.__getitem__)
    return "foreign" if gains["foreign"] and missing <= spared + gains["foreign"] else "true-demand"


def judge_limits(account: Account, asked: int, needed: int, below: int) -> tuple[Possible, ...]:
    """The verdicts on a request that a limit of at least `account.usable` and less than `below` refused."""
    gains = _gains(account, needed - asked)
    helping = [gains[name] for name in WASTE]
    lowest, full = account.usable, account.reserved + needed
    turns = {full - gain for gain in (*helping, sum(helping))}
    found: list[Possible] = []
    for least in sorted({lowest, *(turn for turn in turns if lowest < turn < below)}):
        verdict = judge_request(replace(account, unused=least - account.reserved, limit=least), asked, needed)
        if found and found[-1].verdict == verdict:
            continue
        if found:
            found[-1] = replace(found[-1], below=least)
        found.append(Possible(verdict, least, below))
    return tuple(found)


def verdict_text(verdicts: Iterable[Possible]) -> str:
    """In words: "true-demand", or "true-demand or fragmentation"."""
    return " or ".join(dict.fromkeys(each.verdict for each in verdicts))


def judge_moment(account: Account) -> str:
    """The verdict on a moment at which nothing failed: what the reserved memory mostly is.

    True demand where at least MOSTLY of it is what the program asked for, else the largest of the rest.
    """
    if account.demand >= MOSTLY * account.reserved:
        return "true-demand"
    parts = account.parts()
    return max(WASTE, key=parts.__getitem__)


def _gains(account: Account, rounded_up: int) -> dict[str, int]:
    """What the request would have gained without each kind of memory, in the order they are tried."""
    foreign = account.foreign
    if account.limit is not None:
        # Beyond the limit, a device that is emptier does not help.
        foreign = min(foreign, max(0, account.limit - account.reserved - account.unused))
    return {
        "cached": account.cached,
        "pending": account.pending,
        "fragmentation": account.fragmentation,
        "rounding": account.rounding + rounded_up,
        "foreign": foreign,
    }
