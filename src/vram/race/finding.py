"""`Race`: a finding of the checker, and its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from vram.race.call_sites import Site

__all__ = ["Kind", "Race"]

Kind: TypeAlias = Literal["free", "unordered", "use after free"]


@dataclass(slots=True)
class Race:
    """Two operations on the same memory that are not ordered.

    `kind` is "free" (`use` may still run when the memory released by `free` is allocated again; `reuse` is
    where that happened, if it did), "unordered" (`earlier` and `use` overlap, and one of them writes) or "use
    after free". `stream` is the handle of the stream that should have waited, `used_on` that of the other.
    """

    kind: Kind
    device: str
    address: int
    size: int
    stream: int
    used_on: int
    use: Site
    missing: str
    fix: str
    fix_place: str
    alternative: str | None = None
    allocation: Site | None = None
    free: Site | None = None
    earlier: Site | None = None
    reuse: Site | None = None

    def __str__(self) -> str:
        gone = self.free.what if self.free else "freed"
        headline = _HEADLINES[self.kind].format(use=self.use, gone=gone)
        lines = [f"{self.size} bytes at {self.address:#x} on {self.device} {headline}"]
        lines.append(str(self.allocation) if self.allocation else "  allocated before the check started")
        sites = {"free": (self.use, self.free, self.reuse), "unordered": (self.earlier, self.use)}
        lines += [str(site) for site in sites.get(self.kind, (self.free, self.reuse, self.use)) if site]
        lines.append(f"  missing: {self.missing}")
        lines.append(f"  fix: {self.fix}  ({self.fix_place})")
        if self.alternative:
            lines.append(f"   or: {self.alternative}")
        return "\n".join(lines)


_HEADLINES: dict[Kind, str] = {
    "free": "are {gone} while work on {use.stream_name} may still use them",
    "unordered": "are used on {use.stream_name} without ordering after an earlier use",
    "use after free": "are used on {use.stream_name} after they were {gone}",
}
