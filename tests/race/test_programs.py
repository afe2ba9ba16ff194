"""race_check against many small programs: every race is found, and correct programs get no report."""

from __future__ import annotations

import flow_programs  # noqa: F401
import lifetime_programs  # noqa: F401
import more_programs  # noqa: F401
import naming_programs  # noqa: F401
import order_programs  # noqa: F401
import pattern_programs  # noqa: F401
import pytest
import range_programs  # noqa: F401
import reaching_programs  # noqa: F401
from racing import PROGRAMS, Bench, Program

import vram

CASES = [(program, device) for program in PROGRAMS for device in program.devices]


@pytest.mark.parametrize(("program", "device"), CASES, ids=[f"{p.name}-{d}" for p, d in CASES])
def test_a_program_gets_its_verdict(program: Program, device: str) -> None:
    made = vram.Device("host") if device == "host" else vram.Device.model("4GiB", lag_us=10.0)
    bench = Bench(made)
    with vram.race_check("collect") as checker:
        program.run(bench)
        made.synchronize()
    found = {str(race.kind) for race in checker.races}
    assert found == program.kinds, "\n\n".join(map(str, checker.races))


def test_there_are_enough_of_both_kinds() -> None:
    racy = [program for program in PROGRAMS if program.kinds]
    assert len(racy) >= 60 and len(PROGRAMS) - len(racy) >= 60
