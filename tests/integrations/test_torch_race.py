"""race_check with PyTorch: many small programs get their verdict, and nothing stays behind."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch_programs import INSTALL, TIMEOUT, WITHOUT, output, told

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fork,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

TESTS = Path(__file__).parent.parent
PROGRAMS = TESTS / "race" / "tensor_programs.py"
GUIDE = TESTS.parent / "docs" / "guide" / "races.md"
ALLOCATORS = {"vram": INSTALL, "torch": WITHOUT}


def verdicts(judge: str) -> Any:
    """The verdicts of all programs, from one process: importing PyTorch takes longest."""
    command = [sys.executable, "-W", "ignore", str(PROGRAMS), judge]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_program_gets_its_verdict(allocator: str) -> None:
    found = verdicts(allocator)
    wrong = {
        name: each
        for name, each in found.items()
        if each["kinds"] != each["expected"] or (each["fix"] is not None and each["fix"] not in each["fixes"])
    }
    assert not wrong, wrong
    racy = sum(bool(each["expected"]) for each in found.values())
    assert racy >= 40 and len(found) - racy >= 40


MISTAKEN = {
    "counts an operator as queued after the waits inside it": [
        "*_has_waited_for_itself",
        "the_host_gets_a_copy",
    ],
    "counts memory that is only allocated, resized or shared as written": [
        "empty_memory_that_was_never_used",
        "two_buffers_in_turn",
        "only_shapes_are_used",
        "another_storage_for_a_tensor",
        "fake_tensors",
    ],
    "knows tensors by the address of their first element": [
        "assigned_by_index",
        "columns_that_overlap",
        "a_tensor_grows",
    ],
    "does not know what an operator writes besides its arguments and new results": [
        "a_result_of_zeros_like",
        "running_statistics",
    ],
    "sees neither inference mode nor subclasses, other threads and other kernels": [
        "a_copy_in_inference_mode",
        "a_subclass_of_tensor",
        "another_thread_*",
        "a_class_of_threads",
        "a_thread_that_was_there_before",
        "a_kernel_that_is_declared",
    ],
    "takes a capture for work on the stream, and sees no replays": [
        "a_graph_on_*",
        "a_graph_of_random_numbers",
        "a_capture_with_two_streams",
        "a_graphed_module",
    ],
    "does not know query() and the default streams of threads": [
        "an_event_is_asked_for",
        "the_default_streams_of_threads_*",
    ],
}
"""Why PyTorch's sanitizer differs, and for which programs."""


def test_the_sanitizer_of_pytorch_agrees() -> None:
    judged = {name: each for name, each in verdicts("sanitizer").items() if each["failed"] is None}
    unordered = {name for name, each in judged.items() if "unordered" in each["expected"]}
    differ = unordered ^ {name for name, each in judged.items() if each["found"]}
    patterns = [pattern for patterns in MISTAKEN.values() for pattern in patterns]
    explained = [fnmatch.filter(differ, pattern) for pattern in patterns]
    assert not differ.difference(*explained), differ.difference(*explained)
    assert all(explained), "a pattern explains nothing"
    assert len(judged) - len(differ) >= 100


# ---- the program of the guide ------------------------------------------------------------------------------


def guide_program(tmp_path: Path) -> Path:
    """The program that the guide shows, and what it says of it."""
    (text,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
        if "s1, s2 = torch" in block
    ]
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_guide_shows_what_its_program_prints(tmp_path: Path, allocator: str) -> None:
    path = guide_program(tmp_path)
    command = ["-m", "vram", "run", "--torch", str(path)] if allocator == "vram" else [str(path)]
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    printed = ended.stdout
    shown = re.search(r"```\n(4096 bytes at .*?)```", GUIDE.read_text(), re.S)
    assert shown is not None
    assert comparable(printed.replace(str(path), "program.py")) == comparable(shown[1])


def comparable(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x…", text).strip()


def test_the_corrected_programs_of_the_guide_raise_nothing(tmp_path: Path) -> None:
    text = guide_program(tmp_path).read_text()
    for fix in ("x.record_stream(s2)", "s1.wait_stream(s2)"):
        corrected = re.sub(r"^( *)del x", rf"\1{fix}\n\1del x", text, flags=re.M)
        assert corrected != text
        assert "bytes at" not in output(corrected)


# ---- raising -----------------------------------------------------------------------------------------------

STREAMS = """
    import json, threading
    import vram
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
"""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_an_operator_that_completes_a_race_is_not_performed(allocator: str) -> None:
    found = told(
        ALLOCATORS[allocator],
        STREAMS,
        """
        x = torch.ones(1024, device="cuda")
        with vram.race_check():
            x.add_(1)
            try:
                with torch.cuda.stream(s1):
                    x.mul_(3)
            except vram.RaceError as error:
                kind, version = error.race.kind, x._version
            s1.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s1):
                x.mul_(3)
        print(json.dumps([kind, version, x._version]))
        """,
    )
    assert found == ["unordered", 1, 2]


def test_a_race_in_the_backward_pass_reaches_the_caller() -> None:
    found = told(
        WITHOUT,
        STREAMS,
        """
        class Racy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                with torch.cuda.stream(s1):
                    return grad * 2

        with vram.race_check("raise") as checker:
            x = torch.ones(64, device="cuda", requires_grad=True)
            loss = Racy.apply(x).sum()
            try:
                loss.backward()
            except vram.RaceError as error:
                kind = error.race.kind
        print(json.dumps(kind))
        """,
    )
    assert found == "unordered"


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_memory_from_before_the_check_has_its_stream(allocator: str) -> None:
    found = told(
        ALLOCATORS[allocator],
        STREAMS,
        """
        def tensors():
            with torch.cuda.stream(s1):
                return torch.ones(1024, device="cuda")
        x, y = tensors(), tensors()
        torch.cuda.synchronize()
        with vram.race_check("collect") as checker:
            with torch.cuda.stream(s1):
                x.add_(1)
            with torch.cuda.stream(s2):
                y.add_(1)
            del x, y
            tensors()
        print(json.dumps([[race.kind, race.used_on == s2.cuda_stream] for race in checker.races]))
        """,
    )
    assert found == [["free", True]]


# ---- nothing stays behind ----------------------------------------------------------------------------------

STATE = """
    import ctypes, os
    from torch.cuda import _gpu_trace
    from torch.utils import _python_dispatch

    def state():
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        return [
            [str(vars(owner).get(name)) for owner, name in (
                (torch.cuda.StreamContext, "__enter__"),
                (torch.cuda.Stream, "query"), (torch.cuda.Event, "query"),
                (torch.cuda.CUDAGraph, "capture_begin"), (torch.cuda.CUDAGraph, "capture_end"),
                (torch.cuda.CUDAGraph, "replay"), (threading.Thread, "start"), (torch, "compile"),
            )],
            [len(each.callback_list) for name, each in vars(_gpu_trace).items() if "Callbacks" in name],
            ctypes.c_bool.in_dll(library, "_ZN3c104impl8GPUTrace9haveStateE").value,
            [type(each).__name__ for each in _python_dispatch._get_current_dispatch_mode_stack()],
            _python_dispatch.is_in_torch_dispatch_mode(),
            _python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=False),
        ]
"""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_nothing_stays_behind(allocator: str) -> None:
    before, during, *after = told(
        ALLOCATORS[allocator],
        STREAMS,
        STATE,
        """
        states = [state()]
        with vram.race_check() as checker:
            states.append(state())
            torch.ones(8, device="cuda").sum()
        states.append(state())
        try:
            with vram.race_check():
                x = torch.ones(8, device="cuda")
                with torch.cuda.stream(s1):
                    x.sum()
        except vram.RaceError:
            states.append(state())
        checker = vram.race_check("collect").start()
        checker.stop()
        checker.stop()
        states.append(state())
        print(json.dumps(states))
        """,
    )
    assert during != before
    assert after == [before] * 3


def test_modes_of_the_program_may_begin_and_end_in_any_order() -> None:
    found = told(
        WITHOUT,
        STREAMS,
        STATE,
        """
        from torch.utils._python_dispatch import TorchDispatchMode
        class Counting(TorchDispatchMode):
            names = ()
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.names = {*self.names, func.overloadpacket.__name__}
                return func(*args, **(kwargs or {}))

        torch.ones(8, device="cuda").add_(1)
        before = state()
        checker = vram.race_check("collect")
        with Counting() as outer:
            checker.start()
            with Counting() as inner:
                x = torch.ones(8, device="cuda")
                checker.stop()
                x.sin_()
            x.cos_()
        checker.start()
        with Counting() as last:
            checker.stop()
            x.tan_()
        x.exp_()
        names = {"sin_", "cos_", "tan_", "exp_"}
        seen = [sorted(names & each.names) for each in (outer, inner, last)]
        print(json.dumps([seen, [before, state()]]))
        """,
    )
    seen, (before, after) = found
    assert seen == [["cos_", "sin_"], ["sin_"], ["tan_"]]
    assert after == before


def test_an_exception_survives_that_memory_is_freed_meanwhile() -> None:
    """Only with vram's allocator: in the callbacks of PyTorch's own, the exception is lost."""
    assert "done" in output(
        INSTALL,
        """
        import vram
        with vram.race_check():
            for _ in range(20):
                try:
                    print(torch.ones(4, device="cuda") * 2, {}["missing"])  # the temporary is freed
                except KeyError as error:
                    assert error.args == ("missing",)
                else:
                    raise AssertionError
        print("done")
        """,
    )


def test_another_thread_goes_on_after_the_check() -> None:
    found = told(
        WITHOUT,
        STREAMS,
        """
        go, first = threading.Event(), threading.Event()
        x = torch.ones(1024, device="cuda")
        torch.cuda.synchronize()
        def work():
            with torch.cuda.stream(s1):
                x.add_(1)
                first.set()
                go.wait()
                x.add_(1)
        with vram.race_check("collect") as checker:
            thread = threading.Thread(target=work)
            thread.start()
            first.wait()
            x.sum()
        go.set()
        thread.join()
        print(json.dumps([len(checker.races), x._version, "run" in vars(thread)]))
        """,
    )
    assert found == [1, 2, False]


def test_functions_are_compiled_before_and_after_a_check_but_not_during_it() -> None:
    found = told(
        WITHOUT,
        STREAMS,
        """
        compiled = []
        def backend(graph, inputs):
            compiled.append(len(inputs))
            return graph.forward
        compile = torch.compile(backend=backend, dynamic=False)
        old, new = compile(lambda x: x * 2), compile(lambda x: x * 3)
        one, two = torch.ones(1, device="cuda"), torch.ones(2, device="cuda")
        old(one)
        counts = [len(compiled)]
        with vram.race_check():
            old(one), old(two), new(one)
            counts.append(len(compiled))
        old(one)
        counts.append(len(compiled))
        old(two), new(one)
        counts.append(len(compiled))
        print(json.dumps(counts))
        """,
    )
    assert found == [1, 1, 1, 3]


# ---- memory of the checker itself --------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_long_run_keeps_no_more_facts(allocator: str) -> None:
    counts = told(
        ALLOCATORS[allocator],
        STREAMS,
        """
        import collections, gc
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        shared = torch.ones(4096, device="cuda")

        def step(i):
            with torch.cuda.stream(s1):
                batch = torch.randn(1 + 10 * (i % 5), 64, device="cuda")
            torch.cuda.current_stream().wait_stream(s1)
            if i % 2:
                batch.record_stream(torch.cuda.current_stream())
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.cuda.stream(s2):
                shared[i % 10 * 100:1500].add_(1)  # races with the next step
            shared.sum()

        def facts():
            checker.races.clear()
            gc.collect()
            kinds = (type(each) for each in gc.get_objects())
            ours = (kind for kind in kinds if str(kind.__module__).startswith("vram.race"))
            return collections.Counter(kind.__name__ for kind in ours)

        with vram.race_check("collect") as checker:
            for i in range(30):
                step(i)
            first = facts()
            for i in range(60):
                step(i)
            last = facts()
        print(json.dumps([first, last]))
        """,
    )
    first, last = ({name: count for name, count in each.items() if name != "StreamKey"} for each in counts)
    assert {"Use", "Site", "Allocation"} <= set(first)
    assert all(count <= 1.1 * first.get(name, 0) for name, count in last.items()), (first, last)
