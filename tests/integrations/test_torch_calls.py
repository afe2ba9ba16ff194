"""Calls of torch.cuda that reach the allocator have the same results with vram and with PyTorch's own."""

from __future__ import annotations

import importlib.util

import pytest
from torch_programs import INSTALL, WITHOUT, output, told

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fork,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

FRACTION = """
    import ctypes, json
    GIB = 1 << 30
    total = torch.cuda.mem_get_info()[1]
    results = []
    def attempt(size):
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            results.append("served")
        except torch.OutOfMemoryError as error:
            results.append("allowed;" in str(error))
    kept = []
    # Memory that the allocator does not know of, as another process has.
    pointer = ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(3 * GIB)) == 0
    torch.cuda.set_per_process_memory_fraction(2 * GIB / total)
    results.append(round(torch.cuda.get_per_process_memory_fraction() * total / GIB, 3))
    attempt(GIB)
    attempt(GIB + GIB // 2)  # beyond the fraction
    attempt(GIB // 2)  # within it, although others have more than the fraction
    kept.clear()
    attempt(GIB + GIB // 2)  # what is cached is released for it
    for wrong in (-0.1, 1.1):
        try:
            torch.cuda.set_per_process_memory_fraction(wrong)
        except (ValueError, RuntimeError) as error:
            results.append(type(error).__name__)
    torch.cuda.set_per_process_memory_fraction(1.0)
    attempt(4 * GIB)
    print(json.dumps(results))
"""


def test_a_fraction_counts_only_the_memory_of_this_allocator() -> None:
    ours = told(INSTALL, FRACTION)
    assert ours == told(WITHOUT, FRACTION)
    assert ours[:5] == [2.0, "served", True, "served", "served"]


RAW = """
    import json
    results = []
    address = torch.cuda.caching_allocator_alloc(1 << 20)
    results.append(torch.cuda.memory_allocated())
    torch.cuda.caching_allocator_delete(address)
    results.append(torch.cuda.memory_allocated())
    side = torch.cuda.Stream()
    address = torch.cuda.caching_allocator_alloc(1 << 20, stream=side)
    results.append(torch.cuda.memory_allocated())
    torch.cuda.caching_allocator_delete(address)
    torch.cuda.caching_allocator_enable(False)
    plain = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    results.append(torch.cuda.memory_allocated())
    torch.cuda.caching_allocator_enable(True)
    del plain
    results.append(torch.cuda.memory_allocated())
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    gone = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del gone
    results.append(torch.cuda.memory_reserved() >= 128 << 20)
    torch.cuda.empty_cache()
    results.append(torch.cuda.memory_reserved())
    del kept
    torch.cuda.empty_cache()
    results.append(torch.cuda.memory_reserved())
    print(json.dumps(results))
"""


def test_raw_allocations_and_empty_cache() -> None:
    assert told(INSTALL, RAW) == told(WITHOUT, RAW)


PEERS = """
    import json
    def answer(call):
        try:
            return call()
        except Exception as error:
            return type(error).__name__
    results = [answer(lambda: torch.cuda.can_device_access_peer(0, 0))]
    results.append(answer(lambda: torch.cuda.can_device_access_peer(0, 99)))
    for one in range(torch.cuda.device_count()):
        for other in range(torch.cuda.device_count()):
            results.append(answer(lambda: torch.cuda.can_device_access_peer(one, other)))
            x = torch.ones(1 << 20, device=f"cuda:{one}")
            y = torch.empty(1 << 20, device=f"cuda:{other}")
            y.copy_(x)  # enables peer access where there is any
            results.append(answer(lambda: y.sum().item()))
    print(json.dumps(results))
"""


def test_questions_about_peers() -> None:
    assert told(INSTALL, PEERS) == told(WITHOUT, PEERS)


def test_the_backend_has_a_name() -> None:
    name = "print(torch.cuda.memory.get_allocator_backend())"
    assert (output(INSTALL, name), output(WITHOUT, name)) == ("vram\n", "native\n")
