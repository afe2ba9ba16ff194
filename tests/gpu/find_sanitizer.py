"""Prints the path of a compute-sanitizer that works on the device here; else says why not, and fails."""

from __future__ import annotations

import glob
import shutil
import subprocess
import sys
import sysconfig

PROBE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
context, address, device = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
for result in (
    driver.cuInit(0),
    driver.cuDeviceGet(ctypes.byref(device), 0),
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    driver.cuCtxSetCurrent(context),
    driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20)),
    driver.cuMemsetD8_v2(address, ctypes.c_ubyte(1), ctypes.c_size_t(1 << 20)),
):
    assert result == 0, f"the driver answers {result}"
"""


def candidates() -> list[str]:
    packages = sysconfig.get_path("purelib")
    places = [
        shutil.which("compute-sanitizer"),
        *sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True),
        *glob.glob(f"{packages}/nvidia/**/compute-sanitizer", recursive=True),
        *glob.glob(f"{packages}/cuda_*/**/compute-sanitizer", recursive=True),
    ]
    return [place for place in dict.fromkeys(places) if place]


def complaint(tool: str) -> str | None:
    """What it says of a program that does nothing wrong; None where it works."""
    command = [tool, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-c", PROBE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode == 0:
        return None
    return (
        " / ".join((ended.stdout + ended.stderr).split("\n")[-6:]).strip(" /") or f"exit {ended.returncode}"
    )


def main() -> int:
    found = candidates()
    complaints = {}
    for tool in found:
        complaints[tool] = complaint(tool)
        if complaints[tool] is None:
            print(tool)
            return 0
    if not found:
        print("compute-sanitizer was not found; this part is left out (it comes with the CUDA toolkit).")
    for tool, why in complaints.items():
        print(f"{tool} does not work on this device, so this part is left out: {why}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
