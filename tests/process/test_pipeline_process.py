"""Pipelines and processes: an exit inside the loop ends without errors, a child of a fork starts afresh."""

from __future__ import annotations

import pytest
from programs import FORK, assert_quiet, run_program

PREAMBLE = """
    import gc, os, time
    import numpy as np
    import vram

    def compute(x):
        time.sleep(0.005)
        return x + 1

    pipe = vram.Pipeline(compute, device="host", staging=True)
    loop = pipe.map(np.zeros(1_000_000) for _ in range(50))
    first = next(loop)
"""


def test_a_process_may_end_in_the_middle_of_a_loop() -> None:
    ended = run_program(PREAMBLE, "second = next(loop)\nprint(second[0])")
    assert_quiet(ended)
    assert ended.stdout == "1.0\n"


@pytest.mark.fork
def test_the_child_of_a_fork_is_told_and_may_make_its_own() -> None:
    program = """
    def body():
        global pipe, loop
        for use in (lambda: next(loop), lambda: list(pipe.map([np.zeros(3)]))):
            refused(use)
        with vram.Pipeline(lambda x: x * 2, device="host", staging=True) as own:
            (out,) = own.map([np.ones(1_000_000)])
            assert (out == 2).all()
        del pipe, loop

    child(body)
    assert sum(float(out[0]) for out in loop) == 49
    """
    assert_quiet(run_program(FORK, PREAMBLE, program))
