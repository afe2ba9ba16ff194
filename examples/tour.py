"""A tour of vram on the default device, in less than a minute: allocation, stream order, a race and its fix,
measurements, leaks, an arena, an out-of-memory error explained, and a recorded job that ran out of memory.
`make demo` and `vram demo` run it; no GPU is needed.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import vram
from vram.race.checker import reads
from vram.replay import sweep

RAN_OUT, WENT_WELL = "oom_llama_varlen_ckpt_13400.pickle.xz", "llama_varlen_ckpt.pickle.xz"
"""One job with PyTorch 2.11 on an H200, limited to 13 400 MiB and unlimited (traces/README.md)."""


def main() -> None:
    print(f"vram {vram.__version__} on {', '.join(repr(device) for device in vram.devices())}")
    with vram.Pool() as pool:
        allocate(pool)
        order(pool)
        race()
        measure(pool)
        leak(pool)
        iterate(pool)
    run_out()
    explain_a_job()
    what_if()
    look_further()


def title(text: str) -> None:
    print(f"\n== {text}")


def allocate(pool: vram.Pool) -> None:
    title("Allocate: a Buffer owns memory; dropping it frees the memory")
    buffer = pool.allocate("4MiB", tag="greeting")
    buffer.copy_from(b"hello" + bytes(buffer.size - 5))
    print(f"{buffer.size} bytes at {buffer.ptr:#x}, tagged {buffer.tag!r}")
    if buffer.device.kind == "host":
        print(f"read through the buffer protocol, without a copy: {bytes(memoryview(buffer)[:5])!r}")
    del buffer
    print(pool)


def order(pool: vram.Pool) -> None:
    title("Order: memory used on another stream is reused only after that use")
    with vram.Stream() as compute, vram.Stream() as copy:
        buffer = pool.allocate("8MiB", stream=compute)
        buffer.fill(7, stream=compute)
        copy.wait_stream(compute)
        target = pool.allocate("8MiB", stream=copy)
        target.copy_from(buffer, stream=copy)  # a use on `copy`, which the pool records
        address = buffer.ptr
        buffer.free()  # the host does not wait, and the copy still reads the memory
        print(f"pending after the free: {vram.format_size(pool.stats().pending)}")
        copy.synchronize()
        result = bytearray(target.size)
        target.copy_to(result, stream=copy)
        print(f"the copy saw {result[0]}, {result[-1]}; the block was at {address:#x}")


def race() -> None:
    title("A race: memory is freed while another stream still reads it; the bug and its fix (on the host)")
    for cure in (False, True):
        with vram.race_check("collect") as checker:
            seen = read_late(cure)
        verdict = "right" if seen == 2 else "WRONG: the memory was already reused"
        print(f"{'with' if cure else 'without'} record_stream the other stream reads {seen}, {verdict}")
        for found in checker.races[:1]:
            print(f"vram.race_check found it at {found.free.place}; fix: {found.fix}")


def read_late(cure: bool) -> int:
    """Return what a slow reader sees; a gate delays it, so that the bug shows every time."""
    gate, seen = threading.Event(), bytearray()

    def read(address: int) -> None:
        gate.wait(30)
        seen[:] = ctypes.string_at(address, 1)

    with vram.Pool("host") as pool, vram.Stream("host") as compute, vram.Stream("host") as copy:
        x = pool.allocate(1024, stream=compute)
        x.fill(2)
        copy.wait_stream(compute)
        copy.launch(read, reads(x.ptr))
        if cure:
            x.record_stream(copy)  # the memory is not reused before `copy` is done
        x.free()
        y = pool.allocate(1024, stream=compute)
        y.fill(31)
        compute.synchronize()
        gate.set()
        copy.synchronize()
    return seen[0]


def measure(pool: vram.Pool) -> None:
    title("Measure: the memory of one part of a program")
    pool.warmup({"256KiB": 8})
    with pool.measure() as step, vram.tag("step"):
        for _ in range(1000):
            activations = [pool.allocate("256KiB") for _ in range(8)]
            del activations
    print(
        f"{step.allocations} allocations, {step.frees} frees, peak {vram.format_size(step.peak)}, "
        f"{step.stream_cache_hit_rate:.1%} from the stream's cache"
    )


def leak(pool: vram.Pool) -> None:
    title("Leaks: what was not freed since a mark, by tag and size")
    mark = pool.mark()
    with vram.tag("kv-cache"):
        kept = [pool.allocate("64KiB") for _ in range(3)]
    for found in pool.leaks(since=mark):
        print(found)
    del kept
    print(f"after dropping them: {len(pool.leaks(since=mark))} leaks")


def iterate(pool: vram.Pool) -> None:
    title("Arena: allocations with one lifetime move a cursor and are released at once")
    with vram.Arena(pool) as arena:
        for _ in range(100):
            for size in (1 << 20, 300_000, 4_096):
                arena.allocate(size)
            arena.reset()
        asked, held = arena.stats().requests, vram.format_size(arena.capacity)
        print(f"100 iterations of 3 allocations made {asked} request(s) to the pool and hold {held}")


def run_out() -> None:
    title("Out of memory, explained (on a model of a 1 GiB device)")
    with vram.Pool(vram.Device.model("1GiB")) as pool:
        with vram.tag("weights"):
            weights = pool.allocate("600MiB")
        try:
            pool.allocate("500MiB")
        except vram.OutOfMemory as error:
            print(error)
        handle = pool.on_oom(lambda: weights.free() or True)  # e.g. move them to the host
        print(f"with a callback that frees the weights: {pool.allocate('500MiB').size} bytes allocated")
        handle.remove()


def recording(name: str) -> Path:
    """Find a recording next to this file if it is installed, else in the repository."""
    here = Path(__file__).resolve()
    beside = here.with_name(name)
    return beside if beside.exists() else here.parents[1] / "traces" / name


def explain_a_job() -> None:
    title(
        "A real job: a Llama with batches of random size ran out of memory with 13 400 MiB on an H200. Why?"
    )
    explained = vram.analysis.explain(vram.open(recording(RAN_OUT)))
    print(explained.text)
    for remedy in explained.remedies[:2]:
        print(f"- {remedy.what}{f' ({remedy.setting})' if remedy.setting else ''}")


def what_if() -> None:
    title("What if? The job with other allocators and settings: the smallest device on which it completes")
    ranked = sweep(vram.open(recording(WENT_WELL)), policies=("torch", "torch-expandable", "vram"), jobs=2)
    best = {each.policy: each for each in reversed(ranked)}
    plain = next(each for each in ranked if each.policy == "torch" and not each.conf)
    for each in sorted([*best.values(), plain], key=lambda each: each.rank):
        needs = vram.format_size(each.smallest_capacity or 0)
        setting = each.environment or "defaults"
        print(f"{each.rank:>3} of {len(ranked)}  {each.policy:17}{needs:>10}  {setting}")


def look_further() -> None:
    title("Next steps")
    print("vram explain FILE          why a job ran out: PyTorch snapshots, RMM logs, vram recordings")
    print("vram serve FILE            the same in the browser, by time and address; vram report: as a file")
    print("vram replay --sweep FILE   compare other allocators and settings")
    print("vram run --torch train.py  run a program with PyTorch on vram; --record and --on-oom write traces")
    print("vram top                   what a running process holds, after it called vram.monitor()")
    print("vram doctor                find problems in the setup of this machine")


if __name__ == "__main__":
    main()
