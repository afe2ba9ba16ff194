"""A tour of vram on the default device, in a few seconds: allocate, order by streams, measure, run out, find
leaks, and replay a recorded training job. `make demo` runs it.
"""

from __future__ import annotations

from pathlib import Path

import vram
from vram.replay import replay

TRACE = Path(__file__).resolve().parents[1] / "traces" / "gpt2_train.pickle.xz"
# What PyTorch 2.11 reserved for this job on an H200, against 12 964 MiB that it held (traces/README.md).
PYTORCH_DEFAULT, PYTORCH_EXPANDABLE = 14578 / 12964, 13870 / 12964


def main() -> None:
    print(f"vram {vram.__version__} on {', '.join(repr(device) for device in vram.devices())}")
    with vram.Pool() as pool:
        allocate(pool)
        order(pool)
        measure(pool)
        leak(pool)
    run_out()
    replay_a_job()


def title(text: str) -> None:
    print(f"\n== {text}")


def allocate(pool: vram.Pool) -> None:
    title("Allocate: a Buffer is memory; dropping it frees it")
    buffer = pool.allocate("4MiB", tag="greeting")
    buffer.copy_from(b"hello" + bytes(buffer.size - 5))
    print(f"{buffer.size} bytes at {buffer.ptr:#x}, tagged {buffer.tag!r}")
    if buffer.device.kind == "host":
        print(f"read through the buffer protocol, no copy: {bytes(memoryview(buffer)[:5])!r}")
    del buffer
    print(pool)


def order(pool: vram.Pool) -> None:
    title("Order: memory used on another stream comes back only after that use")
    with vram.Stream() as compute, vram.Stream() as copy:
        buffer = pool.allocate("8MiB", stream=compute)
        buffer.fill(7, stream=compute)
        copy.wait_stream(compute)
        target = pool.allocate("8MiB", stream=copy)
        target.copy_from(buffer, stream=copy)  # a use on `copy`, which the pool notes
        address = buffer.ptr
        buffer.free()  # the host does not wait, and the copy still reads it
        print(f"pending after the free: {vram.format_size(pool.stats().pending)}")
        copy.synchronize()
        result = bytearray(target.size)
        target.copy_to(result, stream=copy)
        print(f"the copy saw {result[0]}, {result[-1]}; the block was at {address:#x}")


def measure(pool: vram.Pool) -> None:
    title("Measure: one stretch of a program by itself")
    pool.warmup({"256KiB": 8})
    with pool.measure() as step, vram.tag("step"):
        for _ in range(1000):
            activations = [pool.allocate("256KiB") for _ in range(8)]
            del activations
    print(
        f"{step.allocations} allocations, {step.frees} frees, peak {vram.format_size(step.peak)}, "
        f"{step.hit_rate:.1%} from the stream's cache"
    )


def leak(pool: vram.Pool) -> None:
    title("Leaks: what outlived a mark, by tag and size")
    mark = pool.mark()
    with vram.tag("kv-cache"):
        kept = [pool.allocate("64KiB") for _ in range(3)]
    for found in pool.leaks(since=mark):
        print(found)
    del kept
    print(f"after dropping them: {len(pool.leaks(since=mark))} leaks")


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
        print(f"with a callback that frees the weights: {pool.allocate('500MiB').size} bytes served")
        handle.remove()


def replay_a_job() -> None:
    title("Replay: a recorded GPT-2 training job through this pool")
    trace = vram.open(TRACE)
    result = replay(trace)
    print(f"{trace.events} events; peak held {vram.format_size(result.peak_allocated)}")
    print(f"waste, peak reserved over peak held: vram {result.ratio:.4f}")
    print(f"  PyTorch, measured: {PYTORCH_DEFAULT:.4f}; with expandable segments: {PYTORCH_EXPANDABLE:.4f}")


if __name__ == "__main__":
    main()
