"""Call every function of vram.h with extreme arguments, generated from its declaration, on a model device.

Usage: extremes.py LIBRARY HEADER CALLS SEED. Prints how many calls ended in which status.
"""

from __future__ import annotations

import collections
import ctypes
import random
import re
import sys

NUMBERS = [0, 1, 7, 512, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
ANY_ADDRESS = ("vram_copy", "vram_fill")  # like memcpy, they take the caller's word for their addresses
Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Mark(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint64), ("cursor", ctypes.c_uint64))


class Extremes:
    def __init__(self, library: ctypes.CDLL, header: str, seed: int) -> None:
        self.library = library
        self.random = random.Random(seed)
        self.made: dict[str, list[int]] = collections.defaultdict(list)
        self.functions = dict(declarations(header))
        self.kept = [Work(lambda argument: None), Callback(lambda *arguments: 0)]

    def call(self, name: str) -> int:
        arguments, outs = [], []
        for kind in self.functions[name]:
            value, out = self.argument(kind)
            arguments.append(value)
            outs.append((kind, out))
        function = getattr(self.library, name)
        function.restype = (
            ctypes.c_char_p if name in ("vram_status_name", "vram_last_error") else ctypes.c_int
        )
        status = function(*arguments)
        if status == 0:
            for kind, out in outs:
                if out is not None:
                    self.made[kind.rstrip("*").strip()].append(out.value or 0)
        return status if isinstance(status, int) else 0

    def argument(self, kind: str) -> tuple[object, object]:
        """A value for a parameter of this type, and where the function puts its result."""
        if kind.endswith("**") or kind in ("vram_stream*", "size_t*", "uint64_t*"):
            out = None if self.random.random() < 0.1 else ctypes.c_void_p(0)
            return (ctypes.byref(out) if out is not None else None), out
        if kind == "vram_mark*":
            return ctypes.byref(Mark()), None
        if kind == "vram_mark":
            return Mark(self.number(), self.number()), None
        if re.match(r"(const )?vram_\w+_(options|stats|info|report)\*", kind):
            return self.structure(), None
        if kind == "const char*":
            names = [b"model:1GiB", b"model:", b"", b"cuda:-1", b"\xff", b"model:" + b"9" * 40, None]
            return self.random.choice(names), None
        if kind.startswith("void (*"):
            return self.random.choice([None, self.kept[0]]), None
        if kind == "vram_oom_callback":
            return self.random.choice([None, self.kept[1]]), None
        return self.handle_or_number(kind), None

    def structure(self) -> object:
        """Of any size that the caller may claim; the memory behind it is large enough for all."""
        memory = (ctypes.c_uint64 * 64)(*(self.number() for _ in range(64)))
        memory[0] = self.random.choice([0, 1, 8, 16, 64, 256, 512])
        return self.random.choice([None, memory, memory, memory])

    def handle_or_number(self, kind: str) -> object:
        known = self.made[kind.rstrip("*").replace("const ", "").strip()]
        if known and self.random.random() < 0.8:
            return ctypes.c_void_p(self.random.choice(known[-8:]))
        if kind == "int32_t" and self.random.random() < 0.9:
            return ctypes.c_int(self.random.randrange(10))
        if kind in ("int", "int32_t", "unsigned char", "vram_status"):
            return ctypes.c_int(self.number() & 0xFFFFFFFF)
        return ctypes.c_void_p(self.number())

    def number(self) -> int:
        return self.random.choice(NUMBERS)


def declarations(header: str) -> list[tuple[str, list[str]]]:
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    found = []
    for name, parameters in re.findall(r"VRAM_API[\w\s\*]*?\b(vram_\w+)\((.*?)\);", code, flags=re.DOTALL):
        parts = [" ".join(part.split()) for part in re.split(r",(?![^(]*\))", parameters)]
        found.append((name, [type_of(part) for part in parts if part != "void"]))
    return found


def type_of(parameter: str) -> str:
    """A parameter's type, without its name."""
    return parameter if "(*" in parameter else re.sub(r"\s*\w+$", "", parameter)


def main(library: str, header: str, calls: int, seed: int) -> None:
    with open(header, encoding="utf-8") as file:
        extremes = Extremes(ctypes.CDLL(library), file.read(), seed)
    device = ctypes.c_void_p()
    assert extremes.library.vram_device_open(b"model:1GiB", ctypes.byref(device)) == 0
    statuses: collections.Counter[tuple[str, int]] = collections.Counter()
    names = [name for name in extremes.functions if name not in ANY_ADDRESS]
    for _ in range(calls):
        extremes.made["vram_device"] = [device.value or 0, *extremes.made["vram_device"][-3:]]
        name = extremes.random.choice(names)
        if name == "vram_device_close" and extremes.random.random() < 0.5:
            continue
        statuses[name, extremes.call(name)] += 1
    for name in names:
        print(name, *sorted({status for called, status in statuses if called == name}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
