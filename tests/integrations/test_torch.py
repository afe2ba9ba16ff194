"""PyTorch on vram, on a real GPU. Each test is a program of its own, since install() must come first.

The same promises, as far as they go without PyTorch, are in test_torch_stand_in.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch_programs import INSTALL, TIMEOUT, WITHOUT, output, run, told

import vram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fork,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

MIB = 1 << 20


PINNED = """
    def pinned(what):  # PyTorch 2.9 has other names
        stats = torch.cuda.host_memory_stats()
        new = "active_requests.current" in stats
        blocks, reserved = ("active_requests", "allocated_bytes") if new else ("allocation", "reserved_bytes")
        names = {"blocks": f"{blocks}.current", "reserved": f"{reserved}.current", "peak": f"{reserved}.peak"}
        return stats[names[what]]
"""


# ---- the work itself --------------------------------------------------------------------------------------

TRAINING = """
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 10)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        x = torch.randn(64 + step % 5, 256, device="cuda")
        loss = torch.nn.functional.cross_entropy(model(x), torch.arange(len(x), device="cuda") % 10)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
"""


def test_training_gives_the_numbers_of_the_default_allocator() -> None:
    assert output(INSTALL, TRAINING) == output(WITHOUT, TRAINING)


def test_the_peaks_of_pytorch_and_of_measurements_are_apart() -> None:
    assert "done" in output(
        INSTALL,
        """
        MIB = 1 << 20

        def use(mib):
            torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

        torch.cuda.reset_peak_memory_stats()
        use(64)
        pool = vram.get_memory_manager().pool("cuda:0")
        with pool.measure() as measured:
            use(8)
        assert 8 * MIB <= measured.peak < 64 * MIB, measured
        assert torch.cuda.max_memory_allocated() >= 64 * MIB
        with pool.measure() as measured:
            use(32)
            torch.cuda.reset_peak_memory_stats()
            use(4)
        assert 32 * MIB <= measured.peak < 64 * MIB, measured
        assert 4 * MIB <= torch.cuda.max_memory_allocated() < 32 * MIB
        print("done")
        """,
    )


def test_a_settled_loop_makes_no_driver_call() -> None:
    calls = told(
        INSTALL,
        TRAINING,
        """
        import json
        def step():
            loss = model(torch.randn(64, 256, device="cuda")).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        for _ in range(5):
            step()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(50):
            step()
        print(json.dumps([before, torch.cuda.memory_stats()["num_device_alloc"]]))
        """,
    )
    assert calls[0] == calls[1]


@pytest.mark.real_gpu
def test_memory_used_on_another_stream_is_kept_until_it_is_done() -> None:
    wrong = told(
        INSTALL,
        """
        import json
        side = torch.cuda.Stream()
        def corrupted(record):
            results = []
            for number in range(100):
                x = torch.full((1 << 20,), float(number), device="cuda")
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(300_000)
                    results.append(torch.stack([x.amin(), x.amax()]))
                if record:
                    x.record_stream(side)
                del x
                torch.full((1 << 20,), -1.0, device="cuda")
            torch.cuda.synchronize()
            return sum(pair.tolist() != [number, number] for number, pair in enumerate(results))
        print(json.dumps({"recorded": corrupted(True), "not recorded": corrupted(False)}))
        """,
    )
    assert wrong["recorded"] == 0
    assert wrong["not recorded"] > 0, "the race this test is about did not happen"


def test_backward_on_many_threads() -> None:
    output(
        INSTALL,
        """
        import threading
        errors = []
        def train(seed):
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for number in range(30):
                        weight = torch.full((257, 300), float(seed), device="cuda", requires_grad=True)
                        (weight * number).sum().backward()
                        assert weight.grad.eq(number).all().item()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not errors, errors
        assert torch.cuda.memory_allocated() < 64 << 20
        """,
    )


@pytest.mark.real_gpu
def test_batches_of_a_data_loader_in_pinned_memory() -> None:
    output(
        INSTALL,
        """
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(4096.0).reshape(512, 8))
        total = torch.zeros((), device="cuda")
        for (batch,) in DataLoader(data, batch_size=32, num_workers=2, pin_memory=True):
            assert batch.is_pinned()
            total += batch.to("cuda", non_blocking=True).sum()
        assert total.item() == 4096 * 4095 / 2
        """,
    )


def test_pinned_memory_is_as_long_as_what_it_holds() -> None:
    used = told(
        INSTALL,
        PINNED,
        """
        import json
        torch.cuda.init()
        sizes = [int(factor * 2**power) for power in range(20, 26) for factor in (1.01, 1.05, 1.5, 1.9)]
        held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        assert all(tensor.is_pinned() for tensor in held)
        assert pinned("blocks") == len(sizes)
        most = pinned("reserved")
        del held
        torch._C._host_emptyCache()
        assert pinned("reserved") == 0 and pinned("peak") == most, torch.cuda.host_memory_stats()
        print(json.dumps([sum(sizes), most]))
        """,
    )
    assert used[0] <= used[1] <= 1.02 * used[0]


def test_pinned_memory_waits_for_the_copies_that_use_it() -> None:
    output(
        INSTALL,
        PINNED,
        """
        streams = [torch.cuda.Stream() for _ in range(4)]
        for stream in streams * 8:
            source = torch.ones(1 << 20).pin_memory()
            with torch.cuda.stream(stream):
                target = source.to("cuda", non_blocking=True)
            del source
        torch.cuda.synchronize()
        assert pinned("blocks") == 0, torch.cuda.host_memory_stats()
        """,
    )


def test_pinned_memory_of_a_graph_serves_it_again_only_without_copies() -> None:
    output(
        INSTALL,
        PINNED,
        """
        pool, graphs = torch.cuda.graph_pool_handle(), [torch.cuda.CUDAGraph() for _ in range(2)]
        def block():
            return torch.empty(8, pin_memory=True)
        with torch.cuda.graph(graphs[0], pool=pool, capture_error_mode="thread_local"):
            first = block()
            address = first.data_ptr()
            del first
            copied = block()
            assert copied.data_ptr() == address, "a free block was not used again"
            target = torch.empty(8, device="cuda")
            target.copy_(copied, non_blocking=True)
            del copied
            other = block()
            assert other.data_ptr() != address, "the graph copies from this block"
            left = other.data_ptr()
            del other
        with torch.cuda.graph(graphs[1], pool=pool, capture_error_mode="thread_local"):
            assert block().data_ptr() == left
        del graphs
        assert pinned("blocks") == 0
        """,
    )


@pytest.mark.real_gpu
def test_nothing_at_all_and_views() -> None:
    output(
        INSTALL,
        """
        empty = [torch.empty(0, device="cuda") for _ in range(3)]
        assert torch.cat([*empty, torch.ones(2, device="cuda")]).tolist() == [1, 1]
        part = torch.arange(1000, device="cuda")[100:200]
        part.record_stream(torch.cuda.Stream())
        empty[0].record_stream(torch.cuda.Stream())
        address = torch.cuda.caching_allocator_alloc(1 << 20)
        torch.cuda.caching_allocator_delete(address)
        assert part.sum().item() == sum(range(100, 200))
        """,
    )


# ---- running out ------------------------------------------------------------------------------------------


def test_out_of_memory_is_torchs_error_with_our_report() -> None:
    output(
        """
        import vram.torch
        vram.torch.install(limit="2GiB")
        import torch
        kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "3 GiB" in str(error) and "cuda:0" in str(error) and "limit" in str(error), error
        else:
            raise AssertionError("3 GiB were had of 2")
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        torch.ones(10, device="cuda").sum().item()
        """,
    )


def test_the_fraction_of_a_process_is_kept() -> None:
    output(
        INSTALL,
        """
        torch.cuda.set_per_process_memory_fraction(0.01)
        assert abs(torch.cuda.get_per_process_memory_fraction() - 0.01) < 1e-6
        share = int(torch.cuda.mem_get_info()[1] * 0.01)
        try:
            torch.empty(share + (4 << 20), dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError
        kept = torch.empty(share // 2, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() <= share
        """,
    )


# ---- what torch tells of it -------------------------------------------------------------------------------


def test_statistics_have_the_keys_of_this_torch() -> None:
    keys = """
        import json
        torch.ones(1, device="cuda")
        print(json.dumps(sorted(torch.cuda.memory_stats())))
    """
    assert told(INSTALL, keys) == told(WITHOUT, keys)


def test_the_numbers_of_torch_cuda() -> None:
    output(
        INSTALL,
        """
        assert torch.cuda.memory_allocated() == 0
        x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 100 << 20
        assert 100 << 20 <= torch.cuda.memory_reserved() <= 128 << 20
        del x
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 100 << 20 <= torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        assert "Allocated memory" in torch.cuda.memory_summary()
        assert torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"] == 0
        assert torch.cuda.memory.get_allocator_backend() == "vram"
        assert torch.accelerator.memory_stats()["allocated_bytes.all.peak"] == 0
        """,
    )


def test_a_memory_pool_has_segments_of_its_own() -> None:
    output(
        INSTALL,
        """
        outside = torch.empty(1 << 20, device="cuda")
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            inside = torch.empty(1 << 20, device="cuda")
            assert pool.use_count() == 2
        assert pool.use_count() == 1
        inner = pool.snapshot()
        assert [block["address"] for block in inner[0]["blocks"] if block["state"] == "active_allocated"] == [
            inside.data_ptr()
        ]
        assert outside.data_ptr() not in [segment["address"] for segment in inner]
        reserved = torch.cuda.memory_reserved()
        del inside, pool
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= reserved - inner[0]["total_size"]
        """,
    )


def test_out_of_memory_begins_with_the_words_of_pytorch() -> None:
    output(
        INSTALL,
        """
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            first, _, rest = str(error).partition("\\n")
            words = "CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total"
            assert first.startswith(words), first
            assert "What would help" in rest, rest
        else:
            raise AssertionError("nothing was raised")
        """,
    )


def test_a_dumped_snapshot_opens_and_torchs_own_tools_read_it(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    output(
        INSTALL,
        """
        import sys
        torch.cuda.memory._record_memory_history(max_entries=100000, stacks="python")
        def step():
            return torch.empty(7 << 20, dtype=torch.uint8, device="cuda")
        kept = step()
        gone = step()
        del gone
        torch.cuda.memory._dump_snapshot(sys.argv[1])
        snapshot = torch.cuda.memory._snapshot()
        from torch.cuda import _memory_viz
        assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)
        assert _memory_viz.trace_plot(snapshot, device=None)
        assert torch.cuda.memory_snapshot() == snapshot["segments"]
        torch.cuda.memory._record_memory_history(enabled=None)
        assert torch.cuda.memory._snapshot()["device_traces"][0] == []
        """,
        arguments=(str(path),),
    )
    trace = vram.open(path)
    large = [index for index, size in enumerate(trace.size) if size == 7 * MIB]
    names = [vram.trace.Action(trace.action[index]).name for index in large]
    assert names == ["ALLOC", "ALLOC", "FREE_REQUESTED", "FREE_COMPLETED"]
    assert "step" in [frame.name for frame in trace.frames_of(trace.stack[large[0]])]
    live = [block.size for part in trace.segments for block in part.blocks if block.state == 1]
    assert live == [7 * MIB]


def test_stacks_of_live_memory_are_kept_when_the_history_ends() -> None:
    """CUDA-graph trees name the memory that nobody tracks, such as a workspace, after they have recorded."""
    output(
        INSTALL,
        """
        def stack_of(tensor):
            for segment in torch.cuda.memory_snapshot():
                address = segment["address"]
                for block in segment["blocks"]:
                    if address == tensor.data_ptr():
                        return [frame["name"] for frame in block.get("frames", [])]
                    address += block["size"]

        def make():
            return torch.empty(9 << 20, dtype=torch.uint8, device="cuda")

        x = torch.ones(400, 400, device="cuda")
        shared = torch.cuda.graph_pool_handle()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.memory._record_memory_history(stacks="python")
        first, second = make(), make()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch._C._cuda_beginAllocateCurrentThreadToPool(0, shared)
            y = x @ x
            torch._C._cuda_endAllocateToPool(0, shared)
        torch.cuda.memory._record_memory_history(None)
        assert "make" in stack_of(first) and "make" in stack_of(second)
        assert not torch._C._cuda_checkPoolLiveAllocations(0, shared, {y.data_ptr()})
        place = first.data_ptr()
        del first
        first = torch.empty(9 << 20, dtype=torch.uint8, device="cuda")
        assert first.data_ptr() == place and not stack_of(first)
        assert "make" in stack_of(second)
        """,
    )


def test_settings_of_pytorchs_allocator_are_accepted_without_a_word() -> None:
    ended = run(
        INSTALL,
        """
        import warnings
        warnings.simplefilter("ignore", FutureWarning)  # the function is deprecated
        torch.cuda.init()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        x = torch.ones(1 << 20, device="cuda")
        torch.cuda.memory._snapshot()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        """,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_setting_that_rounds_sizes_up() -> None:
    output(
        INSTALL,
        """
        torch.cuda.init()

        def taken(size):
            before = torch.cuda.memory_stats()
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            after = torch.cuda.memory_stats()
            keys = ("allocated_bytes.all.current", "requested_bytes.all.current")
            return tuple(after[key] - before[key] for key in keys)

        MIB = 1 << 20
        kept = []
        assert taken(84 * MIB) == (84 * MIB, 84 * MIB)
        torch.cuda.memory._set_allocator_settings("roundup_power2_divisions:4")
        assert taken(84 * MIB) == (96 * MIB, 84 * MIB)
        assert taken(64 * MIB) == (64 * MIB, 64 * MIB)
        assert taken(1000) == (1024, 1000)  # steps are at least 512 bytes
        torch.cuda.memory._set_allocator_settings("roundup_power2_divisions:[64:8,128:2,>:1]")
        assert taken(84 * MIB) == (88 * MIB, 84 * MIB)
        assert taken(300 * MIB) == (300 * MIB, 300 * MIB)
        torch.cuda.memory._set_allocator_settings("")
        assert taken(84 * MIB) == (84 * MIB, 84 * MIB)
        kept.clear()
        assert torch.cuda.memory_allocated() == 0 == torch.cuda.memory_stats()["requested_bytes.all.current"]
        """,
    )


def test_no_peak_is_above_the_peak_of_what_contains_it() -> None:
    output(
        INSTALL,
        """
        for size, count in ((500_000, 200), (100 << 20, 1)):
            tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
            tensors.clear()
        stats = torch.cuda.memory_stats()
        peaks = [stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "active", "reserved")]
        assert peaks == sorted(peaks) and peaks[0] >= 100 << 20, peaks
        """,
    )


def test_events_outside_of_a_compiled_region_say_so() -> None:
    output(
        INSTALL,
        """
        torch.cuda.memory._record_memory_history(context=None)
        x = torch.empty(1000, device="cuda")
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        assert entries and {entry["compile_context"] for entry in entries} == {"N/A"}, entries
        """,
    )


# ---- graphs -----------------------------------------------------------------------------------------------


def test_a_graphs_memory_is_its_own_until_it_is_reset() -> None:
    output(
        INSTALL,
        """
        import gc
        x = torch.ones(4 << 20, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            z = y + 1
            del y  # its memory is the graph's still
        for value in range(5):
            junk = [torch.full((4 << 20,), -5.0, device="cuda") for _ in range(8)]
            x.fill_(value)
            graph.replay()
            assert z.eq(2 * value + 1).all().item(), value
            assert all(each.eq(-5).all().item() for each in junk), value
            del junk
        del z
        graph.reset()
        del graph
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= before + 4096  # torch keeps the state of its random numbers
        assert torch.cuda.memory_reserved() <= before + (4 << 20), torch.cuda.memory_summary()
        """,
    )


def test_a_block_is_reused_in_a_capture_once_its_uses_are_joined() -> None:
    output(
        INSTALL,
        """
        one, two, three = (torch.cuda.Stream() for _ in range(3))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            graph.capture_begin()
            sink = torch.empty(8, device="cuda")
            used = torch.empty(8, device="cuda")
            address = used.data_ptr()
            for stream in (two, three):
                stream.wait_stream(one)
                with torch.cuda.stream(stream):
                    torch.add(used, 1.0)
                used.record_stream(stream)
            del used
            unjoined = torch.empty(8, device="cuda")
            one.wait_stream(two)
            sink.fill_(1.0)
            half_joined = torch.empty(8, device="cuda")
            one.wait_stream(three)
            sink.fill_(2.0)
            joined = torch.empty(8, device="cuda")
            graph.capture_end()
        assert address not in (unjoined.data_ptr(), half_joined.data_ptr())
        assert joined.data_ptr() == address
        """,
    )


def test_two_graphs_share_a_pool() -> None:
    output(
        INSTALL,
        """
        x = torch.ones(1 << 20, device="cuda")
        one, two = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(one):
            y = x + 1
        with torch.cuda.graph(two, pool=one.pool()):
            z = y * 10
        junk = [torch.full((1 << 20,), -5.0, device="cuda") for _ in range(8)]
        for value in (3, 8):
            x.fill_(value)
            one.replay()
            two.replay()
            assert z.eq(10 * (value + 1)).all().item()
        one.reset()
        more = [torch.full((1 << 20,), -7.0, device="cuda") for _ in range(8)]
        two.replay()
        assert all(each.eq(-7).all().item() for each in more)
        assert all(each.eq(-5).all().item() for each in junk)
        """,
    )


@pytest.mark.real_gpu
def test_graphed_callables_train_as_the_plain_ones_do() -> None:
    output(
        INSTALL,
        """
        torch.manual_seed(3)
        plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
        sample = torch.randn(32, 64, device="cuda")
        import copy
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(plain), (sample,))
        for _ in range(3):
            x = torch.randn(32, 64, device="cuda")
            for model in (plain, graphed):
                model.zero_grad(set_to_none=True)
                model(x).square().mean().backward()
            for one, two in zip(plain.parameters(), graphed.parameters()):
                torch.testing.assert_close(one.grad, two.grad)
        """,
    )


@pytest.mark.real_gpu
def test_compiled_functions_record_graphs() -> None:
    output(
        INSTALL,
        """
        @torch.compile(mode="reduce-overhead")
        def work(x, y):
            return torch.nn.functional.gelu(x @ y).sum(dim=0)
        for number in range(6):
            x, y = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
            found = work(x, y).clone()
            wanted = torch.nn.functional.gelu(x @ y).sum(dim=0)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        """,
    )


# ---- beginnings and ends ----------------------------------------------------------------------------------


def test_tools_that_follow_the_memory_are_told() -> None:
    output(
        INSTALL,
        """
        import torch.cuda._gpu_trace as follow
        torch._C._activate_gpu_trace()
        seen = []
        follow.register_callback_for_memory_allocation(lambda address: seen.append(("allocated", address)))
        follow.register_callback_for_memory_deallocation(lambda address: seen.append(("freed", address)))
        tensor = torch.empty(1000, device="cuda")
        address = tensor.data_ptr()
        del tensor
        assert seen == [("allocated", address), ("freed", address)], seen
        """,
    )


# ---- other processes --------------------------------------------------------------------------------------

SHARING = """
    import sys
    import torch
    import torch.multiprocessing as mp
    import vram.torch

    def use(tensors, answers):
        for tensor in iter(tensors.get, None):
            answers.put((tensor.numel(), float(tensor.flatten()[0]), float(tensor.flatten()[-1])))
            tensor.add_(1)
            torch.cuda.synchronize()
            answers.put("changed")
            del tensor

    def crash(tensors, answers):
        tensor = tensors.get()
        answers.put(tensor.numel())
        import os
        os._exit(3)

    def start(function):
        tensors, answers = mp.SimpleQueue(), mp.SimpleQueue()
        process = mp.Process(target=function, args=(tensors, answers))
        process.start()
        return process, tensors, answers
"""


def shared(tmp_path: Path, program: str) -> str:
    """The output of a program with child processes, which import its file."""
    path = tmp_path / "program.py"
    main = textwrap.indent(textwrap.dedent(program), "    ")
    path.write_text(
        f"{textwrap.dedent(SHARING)}\nif __name__ == '__main__':\n    vram.torch.install()\n"
        f"    mp.set_start_method('spawn')\n{main}"
    )
    ended = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_are_started_use_vram_too(tmp_path: Path, method: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import sys
            import torch
            import torch.multiprocessing as mp
            import vram.torch

            def child(answers, generation):
                torch.ones(1000, device="cuda")
                limit = vram.get_memory_manager().pool("cuda:0").limit
                answers.put((generation, vram.torch.installed(), torch.cuda.get_allocator_backend(), limit))
                if generation < 2:
                    process = mp.get_context({method!r}).Process(target=child, args=(answers, generation + 1))
                    process.start()
                    process.join()
                    assert process.exitcode == 0, process.exitcode

            if __name__ == "__main__":
                vram.torch.install(limit="3GiB")
                context = mp.get_context({method!r})
                answers = context.SimpleQueue()
                process = context.Process(target=child, args=(answers, 1))
                process.start()
                assert answers.get() == (1, True, "vram", 3 << 30)
                assert answers.get() == (2, True, "vram", 3 << 30)
                process.join()
                assert process.exitcode == 0, process.exitcode
            """
        )
    )
    ended = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_processes_of_a_program_started_by_vram_run_use_vram_too(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch.multiprocessing as mp

            def child(rank):
                import vram.torch
                assert vram.torch.installed()

            if __name__ == "__main__":
                mp.spawn(child, nprocs=2)
            """
        )
    )
    ended = subprocess.run(
        [sys.executable, "-m", "vram", "run", "--torch", str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_a_process_that_cannot_use_vram_starts_nevertheless(tmp_path: Path) -> None:
    """The file of the program uses CUDA when it is imported, which the new process does first."""
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch.multiprocessing as mp
            import vram.torch

            def child():
                assert not vram.torch.installed()
                print("started")

            if __name__ == "__main__":
                vram.torch.install()
                process = mp.get_context("spawn").Process(target=child)
                process.start()
                process.join()
                assert process.exitcode == 0, process.exitcode
            else:
                import torch
                torch.ones(1, device="cuda")
            """
        )
    )
    ended = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "started" in ended.stdout
    assert "PyTorch's own allocator" in ended.stderr


@pytest.mark.real_gpu
def test_tensors_are_shared_with_another_process(tmp_path: Path) -> None:
    shared(
        tmp_path,
        """
        process, tensors, answers = start(use)
        for elements in (1, 1000, 3 << 20, 40 << 20):
            for _ in range(3):
                tensor = torch.full((elements,), 7.0, device="cuda")
                torch.cuda.synchronize()
                tensors.put(tensor)
                assert answers.get() == (elements, 7.0, 7.0)
                assert answers.get() == "changed"
                assert tensor[0].item() == 8.0 and tensor[-1].item() == 8.0
        tensors.put(None)
        process.join()
        assert process.exitcode == 0
        """,
    )


def test_memory_is_released_when_another_process_has_used_it(tmp_path: Path) -> None:
    shared(
        tmp_path,
        """
        for function, code in ((use, 0), (crash, 3), (use, 0)):
            process, tensors, answers = start(function)
            tensor = torch.empty(10 << 20, device="cuda")
            tensors.put(tensor)
            answers.get()
            if function is use:
                answers.get()
                tensors.put(None)
            process.join()
            assert process.exitcode == code, process.exitcode
            del tensor
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        # PyTorch keeps what a process had that did not come to say that it is done.
        assert torch.cuda.memory_allocated() == 40 << 20, torch.cuda.memory_allocated()
        assert torch.cuda.memory_reserved() == 40 << 20, torch.cuda.memory_reserved()
        """,
    )


def test_install_after_the_first_use_says_what_to_do() -> None:
    output(
        "import torch",
        """
        import vram, vram.torch
        torch.ones(1, device="cuda")
        try:
            vram.torch.install()
        except vram.DeviceError as error:
            assert "vram run --torch" in str(error)
        else:
            raise AssertionError
        """,
    )


def test_the_end_with_live_tensors_is_quiet() -> None:
    ended = run(
        INSTALL,
        """
        import threading
        tensors = [torch.ones(size, device="cuda", requires_grad=True) for size in (0, 1, 1 << 20, 1 << 24)]
        torch.live = sum(tensor.sum() for tensor in tensors)
        torch.live.backward()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            busy = tensors[2] * 2
        tensors[2].record_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = tensors[3].detach() + 1
        cycle = [torch.ones(1 << 20, device="cuda")]
        cycle.append(cycle)
        """,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_mem_pool_takes_its_segments_from_vram() -> None:
    output(
        "import torch",
        """
        import vram, vram.torch
        outside = torch.ones(1 << 20, device="cuda")
        scoped = vram.torch.mem_pool()
        pool = vram.get_memory_manager().pool("cuda:0")
        with torch.cuda.use_mem_pool(scoped):
            inside = torch.full((32 << 20,), 3, dtype=torch.uint8, device="cuda")
        assert pool.stats().allocated >= 32 << 20
        assert torch.cuda.memory_allocated() >= 36 << 20
        held = pool.stats().allocated
        torch.ones(64 << 20, device="cuda")
        assert pool.stats().allocated == held
        del inside, scoped
        torch.cuda.empty_cache()
        assert pool.stats().allocated == 0
        """,
    )


@pytest.mark.real_gpu
def test_kernels_write_into_a_mem_pool_of_vram() -> None:
    output(
        "import torch",
        """
        import vram.torch
        with torch.cuda.use_mem_pool(vram.torch.mem_pool()):
            inside = torch.full((32 << 20,), 3, dtype=torch.uint8, device="cuda")
        assert inside.sum().item() == 3 * (32 << 20)
        """,
    )


def test_tags_and_marks_inside_compiled_functions_do_not_stop_the_compiler(tmp_path: Path) -> None:
    graphs, operators, allocated = told(
        INSTALL,
        """
        import json, sys
        import vram
        from torch._dynamo.testing import CompileCounter
        counter = CompileCounter()
        @vram.tag("whole")
        def function(x):
            with vram.step(1), vram.annotate("first"), vram.tag("part"):
                y = x.sin()
            return y.cos()
        compiled = torch.compile(function, backend=counter, fullgraph=True)
        pool = vram.get_memory_manager().pool("cuda:0")
        with vram.record(pool, sys.argv[1]), vram.tag("outside"):
            result = compiled(torch.ones(1 << 20, device="cuda"))
        tags = {block.tag for block in pool.snapshot().allocations() if block.address == result.data_ptr()}
        print(json.dumps([counter.frame_count, counter.op_count, list(tags)]))
        """,
        arguments=(str(tmp_path / "job.vtrace"),),
    )
    assert (graphs, operators) == (1, 2)
    assert allocated == ["outside"]


def test_a_script_is_run_on_vram_without_a_change(tmp_path: Path) -> None:
    pytest.importorskip("rich_click")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        + textwrap.dedent(TRAINING)
        + "print(torch.cuda.memory_stats()['num_device_alloc'] > 0)\n"
        "import vram; print(vram.get_memory_manager().pool('cuda:0').stats().allocations > 100)\n"
    )
    start = ["vram", "run", "--torch", str(script)]
    torchrun = ["torch.distributed.run", "--nproc-per-node=1", "-m"]
    for command in (start, [*torchrun, *start]):
        ended = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert ended.stdout.splitlines()[-2:] == ["True", "True"]
