"""The page as one file that needs no server: it contains the answers as data.

A report contains the whole run at one level of detail and a few moments: the peak, the out-of-memory event
and the ends of some steps. `recordings` computes the answers, as for the served page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vram.analysis.allocations import SPLITS
from vram.analysis.groups import TREES
from vram.analysis.places import redacted
from vram.analysis.timeline import AXES
from vram.errors import ConfigError
from vram.replay.run import can_replay
from vram.trace import Trace, find_steps

from .assets import index_html
from .recordings import SMALLEST_SHARE, Answer, Recording
from .sweeps import sweep_answer

__all__ = ["render_report", "write_report"]

COLUMNS = 1500
MOST_BANDS = 1500
MOST_STEPS = 6
"""Number of steps whose end is a moment of the report, chosen at regular intervals."""
MOST_STACKS = 20_000


def write_report(
    trace: Trace,
    path: Path,
    *,
    redact: bool = False,
    sweep: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `trace` as a standalone page to `path`; with `redact`, without paths of this machine.

    With `sweep`, the page contains the table of what other allocators would need, if the native core is
    built; `progress` reports on it.
    """
    page = render_report(trace, redact=redact, sweep=sweep, progress=progress)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"failed to write {path}: {error.strerror}") from error


def render_report(
    trace: Trace,
    *,
    redact: bool = False,
    sweep: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Return the page with its data, as text."""
    trace = redacted(trace) if redact else trace
    bare, script, styles = index_html()
    script = script.replace("</script", "<\\/script")
    recording = Recording(trace)
    data = _answers(recording)
    sweep = sweep and bool(trace.events) and can_replay()
    data["sweep"] = sweep_answer(trace, progress=progress) if sweep else None
    # The data contains names from an untrusted file, so it must not be able to end its element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="content-security-policy" content="{policy}">'
        f"<style>{styles}</style>"
        f'<script type="application/json" id="vram-data">{text}</script>'
    )
    title = f"<title>{html.escape(Path(trace.source).name)} · vram</title>"
    made = bare.replace("<title>vram</title>", title).replace("</head>", f"{head}</head>")
    return made.replace("</body>", f'<script type="module">{script}</script></body>')


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _answers(recording: Recording) -> Answer:
    """Return every answer that the page may need, by query; see Embedded in web/src/source.ts."""
    about = recording.about()
    axes = [axis for axis in AXES if axis == "event" or about["timed"]]
    moments = {event: recording.moment(event) for event in _moments(recording, about)}
    found: dict[str, Any] = {
        "start": {"files": [{"file": 0, "name": Path(about["source"]).name, "bytes": 0}], "live": False},
        "about": {**about, "source": Path(about["source"]).name},
        "levels": {
            f"{axis}/{by or ''}": recording.level(axis, 0, 2**62, COLUMNS, by)
            for axis in axes
            for by in (None, *SPLITS)
        },
        "bands": {axis: recording.bands(axis, 0, 2**62, MOST_BANDS) for axis in axes},
        "moments": moments,
        "holders": {f"{event}/{by}": _tree(recording, event, by) for event in moments for by in TREES},
        "why": {event: recording.why(event) for event in moments},
    }
    found["stacks"] = recording.stacks(_stacks(found))["stacks"]
    return found


def _moments(recording: Recording, about: Answer) -> list[int]:
    steps = find_steps(recording.trace)
    ends = [max(events.stop - 1, 0) for _, events in steps.stretches() if len(events)]
    spaced = ends[:: -(-len(ends) // MOST_STEPS)] if ends else []
    return sorted({about["peak"], about["start"], *spaced})


def _tree(recording: Recording, event: int, by: str) -> Answer:
    found = recording.holders(event, by)
    return {"compared": False, "tree": found.to_json(int(SMALLEST_SHARE * found.bytes))}


def _stacks(found: Answer) -> list[int]:
    """Return the stacks that the report refers to."""
    named = {band["stack"] for bands in found["bands"].values() for band in bands["bands"]}
    for moment in found["moments"].values():
        named.update(piece[6] for segment in moment["segments"] for piece in segment["pieces"])
        if moment["what"]:
            named.add(moment["what"]["stack"])
    for answer in found["holders"].values():
        named.update(_stacks_of(answer["tree"]))
    return sorted(named)[:MOST_STACKS]


def _stacks_of(tree: Answer) -> set[int]:
    return set(tree["stacks"]).union(*map(_stacks_of, tree["children"]))
