"""The kernels where they run without a GPU: the pattern, the host's versions, and who refuses."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import vram
from vram.errors import DeviceError
from vram.lab.kernels import PTX, Kernels, pattern

SIZE = 4096


def test_a_pattern_depends_on_seed_and_place() -> None:
    first, second = pattern(1000, 1), pattern(1000, 2)
    assert len(set(first)) > 990
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 3
    assert pattern(10, 1) == first[:10]


def test_fill_and_check_agree_and_a_planted_error_is_found() -> None:
    kernels = Kernels("host")
    with vram.Pool("host") as pool, vram.Stream("host") as stream:
        memory = pool.allocate(SIZE, stream=stream)
        kernels.fill(memory, seed=7, stream=stream)
        assert kernels.check(memory, seed=7, stream=stream).count() == 0
        assert kernels.check(memory, seed=8, stream=stream).count() == SIZE // 4
        ctypes.memset(memory.ptr + 40, ctypes.string_at(memory.ptr + 40, 1)[0] ^ 0xFF, 1)
        assert kernels.check(memory, seed=7, stream=stream).count() == 1
        assert kernels.check(memory.ptr, 40, seed=7, stream=stream).count() == 0


def test_work_runs_in_the_order_of_its_stream_and_not_before() -> None:
    kernels = Kernels("host")
    with vram.Pool("host") as pool, vram.Stream("host") as stream:
        memory = pool.allocate(SIZE, stream=stream)
        memory.fill(0)
        stream.synchronize()
        gate = threading.Event()
        stream.launch(gate.wait)
        kernels.fill(memory, seed=1, stream=stream)
        late = kernels.check(memory, seed=1, stream=stream)
        assert ctypes.string_at(memory.ptr, SIZE) == bytes(SIZE)
        gate.set()
        assert late.count() == 0


def test_spin_keeps_the_stream_busy_and_the_host_free() -> None:
    kernels = Kernels("host")
    with vram.Stream("host") as stream:
        gate = threading.Event()
        stream.launch(gate.wait)
        kernels.spin(stream, 100)  # returns at once
        gate.set()
        start = time.perf_counter()
        stream.synchronize()
        assert time.perf_counter() - start >= 0.05  # a lower bound: a busy machine only takes longer


@pytest.mark.parametrize("name", ["churn", "where"])
def test_the_host_says_which_kernels_it_has_not(name: str) -> None:
    kernels = Kernels("host")
    with pytest.raises(DeviceError, match=f"kernel {name} runs on cuda devices only, not on host"):
        if name == "churn":
            kernels.churn(4096, 8, rounds=1)
        else:
            kernels.where(None, 1)


def test_a_model_runs_no_kernels() -> None:
    with pytest.raises(DeviceError, match="addresses only and runs no kernels"):
        Kernels(vram.Device.model())


@pytest.mark.parametrize(("address", "size"), [(4096, 6), (4097, 8), (4096, -4)])
def test_memory_that_is_not_whole_words_is_refused(address: int, size: int) -> None:
    with pytest.raises(ValueError, match="whole 4-byte words"):
        Kernels("host").fill(address, size, seed=1)


def test_an_address_needs_a_size() -> None:
    with pytest.raises(TypeError, match="size in bytes"):
        Kernels("host").check(4096, seed=1)


@pytest.mark.parametrize("ms", [-1, float("nan"), 1e9])
def test_an_absurd_time_is_refused(ms: float) -> None:
    with pytest.raises(ValueError, match="choose 0 to 60000"):
        Kernels("host").spin(None, ms)


# ---- the text of the PTX ----------------------------------------------


def entries() -> dict[str, str]:
    return dict(re.findall(r"\.visible \.entry (\w+)\((.*?\n})", PTX, re.DOTALL))


@pytest.mark.parametrize("name", ["vram_spin", "vram_where", "vram_fill", "vram_check", "vram_churn"])
def test_every_register_parameter_and_label_of_a_kernel_is_declared(name: str) -> None:
    body = entries()[name]
    for kind, count in re.findall(r"\.reg \.\w+ %(p|r|rd)<(\d+)>;", body):
        used = {int(number) for number in re.findall(rf"%{kind}(\d+)\b", body)}
        assert used
        assert max(used) < int(count)
    declared = re.findall(r"\.param \.\w+ (\w+)", body)
    assert sorted(re.findall(r"ld\.param\.\w+ %\w+, \[(\w+)\];", body)) == sorted(declared)
    labels = re.findall(r"^([A-Z_]+):$", body, re.MULTILINE)
    assert set(re.findall(r"bra ([A-Z_]+);", body)) == set(labels)
    assert len(labels) == len(set(labels))


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas to compile with")
@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
def test_the_compiler_takes_it(target: str, tmp_path: Path) -> None:
    source = tmp_path / "kernels.ptx"
    source.write_text(PTX)
    command = ["ptxas", f"-arch={target}", "-o", str(tmp_path / "kernels.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


# ---- what it computes, by a small interpreter --------------------------------------------------------------

BITS = {"u32": 32, "b32": 32, "u64": 64, "b64": 64}
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "xor": lambda a, b: a ^ b,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


class Thread:
    """One thread of a kernel: registers by name, memory as a dict of words by address."""

    def __init__(
        self, name: str, parameters: list[int], memory: dict[int, int], special: dict[str, int]
    ) -> None:
        self.memory, self.clock = memory, 0
        body = entries()[name]
        declared = re.findall(r"\.param \.\w+ (\w+)", body)
        self.values = {**special, **dict(zip(declared, parameters, strict=True))}
        self.lines = [line.strip().rstrip(";") for line in body.partition("{")[2].splitlines()]

    def read(self, operand: str) -> int:
        if operand == "%globaltimer":
            self.clock += 100
            return self.clock
        base, plus, offset = operand.strip("[]").partition("+")
        if plus:
            return self.values[base] + int(offset)
        return self.values[base] if base in self.values else int(base, 0)

    def run(self) -> None:
        place = steps = 0
        while (line := self.lines[place]) != "ret":
            steps += 1
            assert steps < 100_000, "the kernel does not end"
            place = self.step(line, place)

    def step(self, line: str, place: int) -> int:
        guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        skipped = guard and not self.values[guard[1:]]
        if not rest or rest.startswith((".reg", "}")) or rest.endswith(":") or skipped:
            return place + 1
        name, _, operands = rest.partition(" ")
        parts = name.split(".")
        if parts[0] == "bra":
            return self.lines.index(f"{operands}:")
        self.execute(parts, [operand.strip() for operand in operands.split(",")])
        return place + 1

    def execute(self, parts: list[str], operands: list[str]) -> None:
        operation, mask = parts[0], (1 << BITS[parts[-1]]) - 1
        target, values = operands[0], [self.read(operand) for operand in operands[1:]]
        if operation == "st":
            self.memory[self.read(target)] = values[0] & mask
        elif operation == "red":
            self.memory[self.read(target)] = self.memory.get(self.read(target), 0) + values[0]
        elif operation == "ld" and parts[1] == "global":
            self.values[target] = self.memory[values[0]]
        elif operation in ("ld", "mov", "cvta"):
            self.values[target] = values[0] & mask
        elif operation == "cvt":
            self.values[target] = values[0] & (1 << BITS[parts[1]]) - 1
        elif operation == "setp":
            self.values[target] = int(COMPARISONS[parts[1]](*values))
        else:
            wide = parts[1] == "wide"
            self.values[target] = ARITHMETIC[operation](*values) & ((1 << 64) - 1 if wide else mask)


def launch(
    name: str, parameters: list[int], memory: dict[int, int], blocks: int = 2, threads: int = 3
) -> None:
    for block in range(blocks):
        for thread in range(threads):
            special = {
                "%tid.x": thread,
                "%ctaid.x": block,
                "%ntid.x": threads,
                "%nctaid.x": blocks,
                "%smid": 7,
            }
            Thread(name, parameters, memory, special).run()


BASE = 1 << 40
WORDS = 20
SEED = 3
MIXED = (SEED * 0x27D4EB2F + 0x165667B1) & 0xFFFFFFFF


def test_the_fill_kernel_writes_the_pattern_and_nothing_else() -> None:
    memory: dict[int, int] = {}
    launch("vram_fill", [BASE, WORDS, MIXED], memory)
    assert memory == {BASE + 4 * index: word for index, word in enumerate(pattern(WORDS, SEED))}


def test_the_check_kernel_counts_wrong_words() -> None:
    errors = 64
    memory = {BASE + 4 * index: word for index, word in enumerate(pattern(WORDS, SEED))} | {errors: 0}
    launch("vram_check", [BASE, WORDS, MIXED, errors], memory)
    assert memory[errors] == 0
    for index in (0, 7, 19):
        memory[BASE + 4 * index] ^= 1
    launch("vram_check", [BASE, WORDS, MIXED, errors], memory)
    assert memory[errors] == 3


def test_the_churn_kernel_computes_on_each_word_once_a_round() -> None:
    memory = {BASE + 4 * index: index for index in range(WORDS)}
    launch("vram_churn", [BASE, WORDS, 3], memory)

    def expected(value: int) -> int:
        for _ in range(3):
            value = (value * 1664525 + 1013904223) & 0xFFFFFFFF
        return value

    assert memory == {BASE + 4 * index: expected(index) for index in range(WORDS)}


def test_the_where_kernel_writes_place_and_times_of_each_block() -> None:
    memory: dict[int, int] = {}
    launch("vram_where", [BASE, 1000], memory)
    assert sorted(memory) == [BASE + 8 * index for index in range(6)]
    for block in (0, 24):
        assert memory[BASE + block] == 7
        assert memory[BASE + block + 16] - memory[BASE + block + 8] == 1000


def test_the_spin_kernel_ends_when_the_time_is_over() -> None:
    thread = Thread("vram_spin", [5000], {}, {})
    thread.run()
    assert thread.clock == 5100
