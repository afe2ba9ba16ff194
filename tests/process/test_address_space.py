"""A process whose address space is limited gets pools that fit, or an error; it never dies of one."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import vram

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    for pages in (True, False, True, False):
        pool = vram.Pool("host", pages=pages)
        buffer = pool.allocate("8MiB")
        assert pool.check() is None
        buffer.fill(1)
except MemoryError as error:
    print("refused", error)
else:
    print("served")
"""


@pytest.mark.slow
@pytest.mark.parametrize("gib", [1, 2, 4, 8, 16, 64])
def test_pools_fit_the_address_space(gib: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(gib << 30)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("served" if gib >= 2 else ("served", "refused"))
