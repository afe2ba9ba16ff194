"""Small PyTorch programs and what race_check must say of each. Run as a script, it prints the verdicts.

Arguments: the allocator ("vram" or "torch"), or "sanitizer" for the verdicts of PyTorch's own; and, if only
some are to be run, their names.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import vram

if __name__ == "__main__" and sys.argv[1] == "vram":
    import vram.torch

    vram.torch.install()

import torch

N = 1 << 14


@dataclass
class Bench:
    """The default stream and three others, which nothing orders."""

    main: Any
    a: Any
    b: Any
    c: Any


@dataclass(frozen=True)
class Program:
    name: str
    run: Callable[[Bench], object]
    kinds: tuple[str, ...]
    fix: str | None


PROGRAMS: list[Program] = []


def racy(*kinds: str, fix: str | None = None) -> Callable[[Any], Any]:
    """Races of these kinds are to be reported, and of no other kind; one of them has this fix."""

    def add(body: Any) -> Any:
        PROGRAMS.append(Program(body.__name__, body, kinds, fix))
        return body

    return add


def correct(body: Any) -> Any:
    """Nothing is to be reported."""
    return racy()(body)


def with_each(*operators: dict[str, Any]) -> Callable[[Any], Any]:
    """Make a program of each of these operators. Between this and the body is its verdict."""

    def replace(body: Any) -> Any:
        general = PROGRAMS.pop()
        assert general.run is body
        for each in operators:
            for name, operator in each.items():
                run = functools.partial(body, operator=operator)
                PROGRAMS.append(dataclasses.replace(general, name=f"{name}_{general.name}", run=run))
        return body

    return replace


def ones(n: int = N) -> Any:
    return torch.ones(n, device="cuda")


def checker() -> Any:
    return vram.race.checker._active


# ---- memory that is freed and allocated again --------------------------------------------------------------


def read_on_b(e: Bench) -> Any:
    """Memory of stream a that stream b reads, after waiting for its contents."""
    with torch.cuda.stream(e.a):
        x = torch.full((N,), 1.0, device="cuda")
        x *= 2
        written = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(e.b):
        torch.cuda.current_stream().wait_event(written)
        e.kept = x * 3  # type: ignore[attr-defined]
    return x


def allocate_on_a(e: Bench) -> None:
    with torch.cuda.stream(e.a):
        torch.full((N,), 31.0, device="cuda")


@racy("free", fix="x.record_stream(e.b)")
def freed_while_another_stream_reads(e: Bench):
    x = read_on_b(e)
    del x
    allocate_on_a(e)


@correct
def freed_after_record_stream(e: Bench):
    x = read_on_b(e)
    x.record_stream(e.b)
    del x
    allocate_on_a(e)


@correct
def freed_after_a_stream_wait(e: Bench):
    x = read_on_b(e)
    e.a.wait_stream(e.b)
    del x
    allocate_on_a(e)


@correct
def stream_waits_after_the_free_but_before_it_allocates(e: Bench):
    x = read_on_b(e)
    del x
    e.a.wait_stream(e.b)
    allocate_on_a(e)


@racy("free")
def stream_waits_after_it_allocated(e: Bench):
    x = read_on_b(e)
    del x
    allocate_on_a(e)
    e.a.wait_stream(e.b)


@correct
def host_waits_before_the_free(e: Bench):
    x = read_on_b(e)
    e.b.synchronize()
    del x
    allocate_on_a(e)


@correct
def never_allocated_again(e: Bench):
    x = read_on_b(e)
    del x


@racy("free")
def recorded_for_the_wrong_stream(e: Bench):
    x = read_on_b(e)
    x.record_stream(e.c)
    del x
    allocate_on_a(e)


@correct
def recorded_through_a_view(e: Bench):
    x = read_on_b(e)
    x[100:200].record_stream(e.b)
    del x
    allocate_on_a(e)


@racy("free")
def freed_by_the_end_of_a_function(e: Bench):
    def work():
        read_on_b(e)

    work()
    allocate_on_a(e)


@racy("free")
def freed_by_assigning_the_name_again(e: Bench):
    x = read_on_b(e)
    with torch.cuda.stream(e.a):
        x = torch.zeros(8, device="cuda")
        x = torch.zeros(N, device="cuda")  # noqa: F841


@racy("free")
def freed_in_a_loop(e: Bench):
    for _ in range(3):
        with torch.cuda.stream(e.a):
            x = ones()
        e.b.wait_stream(e.a)
        with torch.cuda.stream(e.b):
            x.sum()


@correct
def the_allocating_stream_waits_in_a_loop(e: Bench):
    for _ in range(3):
        e.a.wait_stream(e.b)
        with torch.cuda.stream(e.a):
            x = ones()
        e.b.wait_stream(e.a)
        with torch.cuda.stream(e.b):
            x.sum()
        del x


@racy("unordered")
def empty_memory_that_was_used_before(e: Bench):
    with torch.cuda.stream(e.a):
        x = ones()
        x.add_(1)
        address = x.data_ptr()
        del x
        y = torch.empty(N, device="cuda")
    assert y.data_ptr() == address
    with torch.cuda.stream(e.b):
        y.fill_(3)


@correct
def empty_memory_that_was_never_used(e: Bench):
    y = torch.empty(N, device="cuda")
    with torch.cuda.stream(e.b):
        y.fill_(3)
    e.main.wait_stream(e.b)


# ---- reads and writes --------------------------------------------------------------------------------------


@racy("unordered", fix="side.wait_stream(torch.cuda.default_stream())")
def read_without_waiting(e: Bench):
    side = e.a
    x = ones()
    with torch.cuda.stream(side):
        x.sum()
    e.main.wait_stream(side)


@correct
def read_after_waiting(e: Bench):
    x = ones()
    e.a.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(e.a):
        x.sum()
    e.main.wait_stream(e.a)


@racy("unordered")
def waits_in_the_wrong_direction(e: Bench):
    x = ones()
    torch.cuda.current_stream().wait_stream(e.a)
    with torch.cuda.stream(e.a):
        x.sum()
    e.main.wait_stream(e.a)


@correct
def two_streams_read(e: Bench):
    x = ones()
    for side in (e.a, e.b):
        side.wait_stream(e.main)
        with torch.cuda.stream(side):
            x.sum()
    e.main.wait_stream(e.a)
    e.main.wait_stream(e.b)


@racy("unordered")
def written_while_another_stream_reads(e: Bench):
    x = ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        y = x * 2
    x.add_(1)
    e.main.wait_stream(e.a)
    del y


@racy("unordered")
def two_streams_write(e: Bench):
    x = ones()
    e.a.wait_stream(e.main)
    e.b.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x.add_(1)
    with torch.cuda.stream(e.b):
        x.mul_(2)
    torch.cuda.synchronize()


@racy("unordered")
def written_through_a_view(e: Bench):
    x = ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x.view(-1, 2)[0].zero_()
    x.sum()
    torch.cuda.synchronize()


@racy("unordered")
def written_through_detach(e: Bench):
    x = torch.ones(N, device="cuda", requires_grad=True)
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x.detach().zero_()
    (x * 2).sum()
    torch.cuda.synchronize()


@racy("unordered")
def written_through_data(e: Bench):
    x = torch.ones(N, device="cuda", requires_grad=True)
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x.data.mul_(2)
    x.sum()
    torch.cuda.synchronize()


@correct
def different_rows(e: Bench):
    x = torch.zeros(16, 64, device="cuda")
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x[:8].add_(1)
    x[8:].add_(1)
    e.main.wait_stream(e.a)


@correct
def different_columns(e: Bench):
    x = torch.zeros(16, 64, device="cuda")
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x[:, ::2].add_(1)
    x[:, 1::2].add_(1)
    e.main.wait_stream(e.a)


@racy("unordered")
def columns_that_overlap(e: Bench):
    x = torch.zeros(16, 64, device="cuda")
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x[:, :33].add_(1)
    x[:, 32:].add_(1)
    torch.cuda.synchronize()


@racy("unordered")
def written_as_out(e: Bench):
    x, y = ones(), ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        torch.mul(x, 2, out=y)
    y.sum()
    torch.cuda.synchronize()


@correct
def written_as_out_after_waiting(e: Bench):
    x, y = ones(), ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        torch.mul(x, 2, out=y)
    e.main.wait_stream(e.a)
    y.sum()


@racy("unordered")
def one_of_a_list_is_written(e: Bench):
    parts = [ones(), ones(), ones()]
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        torch._foreach_add_(parts, 1.0)
    parts[2].sum()
    torch.cuda.synchronize()


@correct
def lists_are_read(e: Bench):
    parts = [ones(), ones(), ones()]
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        made = torch._foreach_add(parts, 1.0)
        torch.cat(parts)
    torch._foreach_mul(parts, 2.0)
    e.main.wait_stream(e.a)
    del made


@racy("unordered")
def one_of_a_concatenation_is_not_ready(e: Bench):
    x = ones()
    with torch.cuda.stream(e.a):
        y = ones()
    torch.cat([x, y])
    torch.cuda.synchronize()


@racy("unordered")
def copied_into(e: Bench):
    x, y = ones(), ones()
    with torch.cuda.stream(e.a):
        y.copy_(x)
    torch.cuda.synchronize()


@racy("unordered")
def scattered_into(e: Bench):
    x, index = ones(), torch.zeros(4, dtype=torch.long, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        x.scatter_(0, index, 5.0)
    x.sum()
    torch.cuda.synchronize()


@racy("unordered")
def assigned_by_index(e: Bench):
    x = ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        x[3:7] = 2
    x.sum()
    torch.cuda.synchronize()


@correct
def only_shapes_are_used(e: Bench):
    with torch.cuda.stream(e.a):
        x = torch.ones(64, 64, device="cuda")
    y = x.view(-1).reshape(32, -1).t().unsqueeze(0).expand(4, -1, -1).detach()
    made = [torch.empty_like(x), torch.zeros_like(x), x.new_zeros(4), x.new_empty(4), torch.ones_like(y)]
    assert x.shape == (64, 64) and x.is_contiguous() and len(x.split(8)) == 8 and x.T.size(0) == 64
    x.resize_(32, 32)
    x.unsqueeze_(0)
    e.main.wait_stream(e.a)
    del made


@racy("unordered")
def a_tensor_grows(e: Bench):
    with torch.cuda.stream(e.a):
        x = ones()
    x.resize_(4 * N)
    torch.cuda.synchronize()


@racy("unordered")
def a_result_of_zeros_like(e: Bench):
    x = ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        y = torch.zeros_like(x)
    y.sum()
    torch.cuda.synchronize()


@racy("unordered")
def a_copy_in_inference_mode(e: Bench):
    with torch.inference_mode():
        with torch.cuda.stream(e.a):
            x = torch.ones(64, 64, device="cuda")
            y = x.t().contiguous()
        torch.cuda.synchronize()
        with torch.cuda.stream(e.a):
            x.add_(1)
        y = x.t().reshape(-1)  # noqa: F841
    torch.cuda.synchronize()


@correct
def views_in_inference_mode(e: Bench):
    with torch.inference_mode():
        with torch.cuda.stream(e.a):
            x = torch.ones(64, 64, device="cuda")
        x.contiguous().reshape(-1).flatten()
        x.to("cuda")
    e.main.wait_stream(e.a)


@correct
def another_storage_for_a_tensor(e: Bench):
    x = ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        y = torch.empty(0, device="cuda").set_(x)
    x.sum()
    e.main.wait_stream(e.a)
    y.zero_()


@racy("unordered")
def written_through_another_storage(e: Bench):
    x = ones()
    with torch.cuda.stream(e.a):
        torch.empty(0, device="cuda").set_(x.untyped_storage()).zero_()
    torch.cuda.synchronize()


@racy("unordered")
def a_sparse_tensor(e: Bench):
    index = torch.tensor([[0, 1], [1, 0]], device="cuda")
    x = torch.sparse_coo_tensor(index, torch.ones(2, device="cuda"), (4, 4))
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        x._values().mul_(2)
    torch.sparse.mm(x, torch.ones(4, 4, device="cuda"))
    torch.cuda.synchronize()


@correct
def nothing_on_the_gpu(e: Bench):
    x = torch.ones(64)
    with torch.cuda.stream(e.a):
        x.add_(1)
        torch.ones(64, device="meta").add_(1)
    x.sum()


# ---- events and waits --------------------------------------------------------------------------------------


@correct
def an_event_orders(e: Bench):
    x, done = ones(), torch.cuda.Event()
    done.record()
    done.wait(e.a)
    with torch.cuda.stream(e.a):
        x.add_(1)
    e.main.wait_event(e.a.record_event())
    x.sum()


@racy("unordered")
def an_event_recorded_too_early(e: Bench):
    x, done = ones(), torch.cuda.Event()
    done.record()
    x.add_(1)
    e.a.wait_event(done)
    with torch.cuda.stream(e.a):
        x.sum()
    torch.cuda.synchronize()


@correct
def an_event_recorded_again(e: Bench):
    x, done = ones(), torch.cuda.Event()
    done.record()
    x.add_(1)
    done.record()
    e.a.wait_event(done)
    with torch.cuda.stream(e.a):
        x.sum()
    torch.cuda.synchronize()


@racy("unordered")
def an_event_recorded_again_on_another_stream(e: Bench):
    x, done = ones(), torch.cuda.Event()
    done.record()
    done.record(e.b)
    e.a.wait_event(done)
    with torch.cuda.stream(e.a):
        x.sum()
    torch.cuda.synchronize()


@racy("unordered")
def an_event_never_recorded(e: Bench):
    x = ones()
    e.a.wait_event(torch.cuda.Event())
    with torch.cuda.stream(e.a):
        x.sum()
    torch.cuda.synchronize()


@correct
def an_event_waited_for_by_two(e: Bench):
    x = ones()
    done = e.main.record_event()
    for side in (e.a, e.b):
        side.wait_event(done)
        with torch.cuda.stream(side):
            x.sum()
    torch.cuda.synchronize()


@racy("unordered")
def an_event_that_another_replaced(e: Bench):
    x = ones()
    done = e.main.record_event()
    del done
    e.a.wait_event(e.b.record_event())
    with torch.cuda.stream(e.a):
        x.sum()
    torch.cuda.synchronize()


@correct
def ordered_through_a_third_stream(e: Bench):
    x = ones()
    e.c.wait_stream(e.main)
    e.a.wait_stream(e.c)
    with torch.cuda.stream(e.a):
        x.add_(1)
    torch.cuda.synchronize()


@correct
def the_device_is_waited_for(e: Bench):
    x = ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        x.add_(1)
    torch.cuda.synchronize()
    x.add_(1)


@racy("unordered")
def the_device_was_waited_for_too_early(e: Bench):
    x = ones()
    torch.cuda.synchronize()
    x.add_(1)
    with torch.cuda.stream(e.a):
        x.sum()
    torch.cuda.synchronize()


@correct
def a_stream_is_waited_for(e: Bench):
    x = ones()
    e.main.synchronize()
    with torch.cuda.stream(e.a):
        x.add_(1)
    e.a.synchronize()
    with torch.cuda.stream(e.b):
        x.add_(1)
    e.b.synchronize()


@racy("unordered")
def another_stream_is_waited_for(e: Bench):
    x = ones()
    e.b.synchronize()
    with torch.cuda.stream(e.a):
        x.add_(1)
    torch.cuda.synchronize()


@correct
def an_event_is_waited_for(e: Bench):
    x = ones()
    e.main.record_event().synchronize()
    with torch.cuda.stream(e.a):
        x.add_(1)
    torch.cuda.synchronize()


@racy("unordered")
def an_event_is_waited_for_and_then_more_is_queued(e: Bench):
    x = ones()
    done = e.main.record_event()
    x.add_(1)
    done.synchronize()
    with torch.cuda.stream(e.a):
        x.add_(1)
    torch.cuda.synchronize()


@correct
def an_event_is_asked_for(e: Bench):
    x = ones()
    done = e.main.record_event()
    while not done.query():
        pass
    with torch.cuda.stream(e.a):
        x.add_(1)
    while not e.a.query():
        pass
    x.add_(1)


@correct
def a_number_is_read_by_the_host(e: Bench):
    x = ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x.sum().item()
    x.add_(1)


@correct
def the_host_gets_a_copy(e: Bench):
    x = ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x.cpu()
    x.add_(1)


@racy("unordered")
def the_host_gets_a_copy_later(e: Bench):
    x, host = ones(), torch.empty(N, pin_memory=True)
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        host.copy_(x, non_blocking=True)
    x.add_(1)
    torch.cuda.synchronize()


# ---- operators that wait inside ----------------------------------------------------------------------------


def assigned(x: Any, place: Any, value: Any) -> None:
    x[place] = value


def square(x: Any) -> Any:
    return x.view(128, 128)


WAIT_FIRST: dict[str, Callable[[Any], Any]] = {
    "assigning_by_index": lambda x: assigned(x, torch.arange(4, device="cuda"), 0),
    "assigning_to_a_mask": lambda x: assigned(x, x > 0, ones(1)),
    "index_put": lambda x: x.index_put_((x > 0,), ones(1)),
    "indexing_by_a_mask": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "nonzero": lambda x: torch.nonzero(x),
    "where_with_a_number": lambda x: torch.where(x > 0, x, torch.tensor(2.0)),
    "bincount": lambda x: torch.bincount(x.long(), weights=x),
    "histc": lambda x: torch.histc(x),
    "to_sparse": lambda x: x.to_sparse(),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x.view(-1, 4, 4)[0]),
    "copying_from_the_host_into_columns": lambda x: square(x)[:, ::2].copy_(torch.ones(128, 64)),
    "copying_columns_from_the_host": lambda x: square(x)[:, ::2].copy_(torch.ones(128, 128)[:, ::2]),
}
WAIT_LAST: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x[3].item(),
    "equal": lambda x: torch.equal(x, x + 1),
    "copying_to_the_host": lambda x: x.cpu(),
    "copying_columns_to_the_host": lambda x: square(x)[:, ::2].cpu(),
    "copying_from_the_host": lambda x: x.copy_(torch.ones(N)),
    "converting_from_the_host": lambda x: square(x).copy_(torch.ones(128, 128, dtype=torch.int).t()),
    "copying_from_the_host_with_another_layout": lambda x: square(x).t().copy_(torch.ones(128, 128).t()),
    "moving_from_the_host": lambda x: torch.ones(N).to("cuda"),
    "moving_from_the_host_with_another_layout": lambda x: torch.ones(128, 128).t().to("cuda"),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "eigh": lambda x: torch.linalg.eigh(square(x)),
    "svd": lambda x: torch.linalg.svd(square(x)),
    "inv": lambda x: torch.linalg.inv(square(x).tril()),
}


@with_each(WAIT_FIRST)
@racy("unordered")
def is_not_waited_for(e: Bench, operator: Any):
    x = ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        operator(x)
    x.add_(1)
    torch.cuda.synchronize()


@with_each(WAIT_FIRST)
@racy("free")
def is_not_waited_for_before_the_free(e: Bench, operator: Any):
    x = ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        operator(x)
    del x
    ones()
    torch.cuda.synchronize()


@with_each(WAIT_FIRST)
@correct
def is_waited_for(e: Bench, operator: Any):
    x = ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        operator(x)
    e.main.wait_stream(e.a)
    x.add_(1)
    del x
    ones()


WITHOUT_BLOCKING: dict[str, Callable[[Any, Any], Any]] = {
    "moving_from_the_host": lambda x, host: host.to("cuda", non_blocking=True),
    "copying_columns_to_the_host": lambda x, host: host[:8192].copy_(x[::2], non_blocking=True),
}


@with_each(WITHOUT_BLOCKING)
@racy("unordered")
def waits_only_while_it_allocates(e: Bench, operator: Any):
    from torch.cuda import _gpu_trace

    x, host = ones(), torch.ones(N).pin_memory()
    torch.cuda.synchronize()
    allocations = _gpu_trace.MemoryAllocationCallbacks.callback_list
    allocations.append(lambda address: e.a.synchronize())
    with torch.cuda.stream(e.a):
        made = operator(x, host)
    allocations.pop()
    x.add_(1)
    made.add_(1)
    torch.cuda.synchronize()


@with_each(WAIT_LAST)
@correct
def has_waited_for_itself(e: Bench, operator: Any):
    x = ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        made = operator(x)
    for tensor in made if isinstance(made, tuple) else [made]:
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    x.add_(1)
    del x
    ones()


# ---- training ----------------------------------------------------------------------------------------------


def model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()


@correct
def training_on_one_stream(e: Bench):
    net = model()
    for optimizer in (
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(net.parameters(), foreach=True),
        torch.optim.Adam(net.parameters(), fused=True),
    ):
        for _ in range(3):
            net(torch.randn(16, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@correct
def training_on_a_side_stream(e: Bench):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        e.a.wait_stream(e.main)
        with torch.cuda.stream(e.a):
            loss = net(torch.randn(16, 64, device="cuda")).square().mean()
        e.main.wait_stream(e.a)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss


@correct
def the_backward_pass_runs_where_the_forward_pass_did(e: Bench):
    w = torch.ones(64, 64, device="cuda", requires_grad=True)
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        loss = (w @ w).relu().sum()
    loss.backward()
    w.grad.sum()
    torch.cuda.synchronize()


@correct
def a_model_in_two_parts(e: Bench):
    one, two = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(64, 64).cuda()
    for _ in range(3):
        x = torch.randn(8, 64, device="cuda")
        e.a.wait_stream(e.main)
        with torch.cuda.stream(e.a):
            hidden = one(x)
        x.record_stream(e.a)
        e.main.wait_stream(e.a)
        hidden.record_stream(e.main)
        two(hidden).sum().backward()
        del hidden, x


@racy("unordered")
def the_optimizer_does_not_wait(e: Bench):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(16, 64, device="cuda")).sum().backward()
    with torch.cuda.stream(e.a):
        optimizer.step()
    torch.cuda.synchronize()


@racy("unordered")
def the_weights_change_during_the_forward_pass(e: Bench):
    net = model()
    x = torch.randn(16, 64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a), torch.no_grad():
        for p in net.parameters():
            p.mul_(0.9)
    net(x)
    torch.cuda.synchronize()


@racy("unordered")
def running_statistics(e: Bench):
    norm, x = torch.nn.BatchNorm1d(64).cuda(), torch.randn(16, 64, device="cuda")
    torch.cuda.synchronize()
    with torch.no_grad():
        for side in (e.a, e.b):
            with torch.cuda.stream(side):
                torch.nn.functional.batch_norm(x, norm.running_mean, norm.running_var, training=True)
    torch.cuda.synchronize()


@correct
def running_statistics_are_only_read(e: Bench):
    norm, x = torch.nn.BatchNorm1d(64).cuda().eval(), torch.randn(16, 64, device="cuda")
    torch.cuda.synchronize()
    for side in (e.a, e.b):
        with torch.cuda.stream(side):
            norm(x)
    torch.cuda.synchronize()


@correct
def checkpointed_layers(e: Bench):
    net, x = model(), torch.randn(16, 64, device="cuda", requires_grad=True)
    torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum().backward()


@racy("unordered")
def gradients_are_reduced_too_early(e: Bench):
    net = model()
    net(torch.randn(16, 64, device="cuda")).sum().backward()
    with torch.cuda.stream(e.a):
        torch.cat([p.grad.view(-1) for p in net.parameters()])
    torch.cuda.synchronize()


@correct
def gradients_are_reduced_in_hooks(e: Bench):
    net = model()
    buckets = []

    def reduce(p: Any) -> None:
        e.a.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(e.a):
            buckets.append(p.grad.clone())
        p.grad.record_stream(e.a)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(reduce)
    net(torch.randn(16, 64, device="cuda")).sum().backward()
    e.main.wait_stream(e.a)
    for p, bucket in zip(net.parameters(), buckets[::-1], strict=True):
        p.grad.copy_(bucket.view_as(p.grad)) if bucket.numel() == p.grad.numel() else None


# ---- loading data ------------------------------------------------------------------------------------------


def batches(count: int = 4) -> Any:
    return (torch.ones(N).pin_memory() for _ in range(count))


@correct
def prefetching(e: Bench):
    for host in batches():
        with torch.cuda.stream(e.a):
            batch = host.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(e.a)
        batch.record_stream(torch.cuda.current_stream())
        (batch * 2).sum()


@racy("unordered")
def prefetching_without_waiting(e: Bench):
    for host in batches(1):
        with torch.cuda.stream(e.a):
            batch = host.to("cuda", non_blocking=True)
        (batch * 2).sum()
    torch.cuda.synchronize()


@racy("free", fix="batch.record_stream(torch.cuda.default_stream())")
def prefetching_without_record_stream(e: Bench):
    for host in batches(3):
        with torch.cuda.stream(e.a):
            batch = host.to("cuda", non_blocking=True)
        torch.cuda.default_stream().wait_stream(e.a)
        (batch * 2).sum()


@correct
def two_buffers_in_turn(e: Bench):
    buffers = [torch.empty(N, device="cuda") for _ in range(2)]
    free = [torch.cuda.Event() for _ in buffers]
    for i, host in enumerate(batches(6)):
        with torch.cuda.stream(e.a):
            e.a.wait_event(free[i % 2])
            buffers[i % 2].copy_(host, non_blocking=True)
        e.main.wait_stream(e.a)
        buffers[i % 2].sum()
        free[i % 2].record()
    torch.cuda.synchronize()


@racy("unordered")
def a_buffer_is_filled_too_early(e: Bench):
    buffers = [torch.empty(N, device="cuda") for _ in range(2)]
    for i, host in enumerate(batches(6)):
        with torch.cuda.stream(e.a):
            buffers[i % 2].copy_(host, non_blocking=True)
        e.main.wait_stream(e.a)
        buffers[i % 2].sum()
    torch.cuda.synchronize()


# ---- threads -----------------------------------------------------------------------------------------------


def on_thread(work: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed, failed


@racy("unordered")
def another_thread_does_not_wait(e: Bench):
    x = ones()

    def work() -> None:
        with torch.cuda.stream(e.a):
            x.sum()

    on_thread(work)
    torch.cuda.synchronize()


@correct
def another_thread_waits(e: Bench):
    x = ones()
    done = e.main.record_event()

    def work() -> None:
        e.a.wait_event(done)
        with torch.cuda.stream(e.a):
            x.add_(1)

    on_thread(work)
    e.main.wait_stream(e.a)
    x.sum()


@racy("unordered")
def another_thread_uses_the_default_stream(e: Bench):
    with torch.cuda.stream(e.a):
        x = ones()
    on_thread(x.sum)
    torch.cuda.synchronize()


@racy("unordered")
def a_class_of_threads(e: Bench):
    x = ones()

    class Worker(threading.Thread):
        def run(self) -> None:
            torch.cuda.set_stream(e.a)
            x.add_(1)

    worker = Worker()
    worker.start()
    worker.join()
    torch.cuda.synchronize()


POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()


@racy("unordered")
def a_thread_that_was_there_before(e: Bench):
    x = ones()

    def work() -> None:
        with torch.cuda.stream(e.a):
            x.add_(1)

    POOL.submit(work).result()
    torch.cuda.synchronize()


# ---- graphs ------------------------------------------------------------------------------------------------


def captured(e: Bench) -> Any:
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    return graph, x, y


@correct
def a_graph_on_one_stream(e: Bench):
    graph, x, y = captured(e)
    for _ in range(3):
        x.add_(1)
        graph.replay()
        y.sum()


@correct
def a_graph_of_random_numbers(e: Bench):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.rand(N, device="cuda")
    for side in (e.a, e.b, e.main):
        with torch.cuda.stream(side):
            graph.replay()
        side.synchronize()
    x.sum()


@racy("unordered")
def a_graph_reads_too_early(e: Bench):
    graph, x, _y = captured(e)
    x.add_(1)
    with torch.cuda.stream(e.a):
        graph.replay()
    torch.cuda.synchronize()


@racy("unordered")
def the_result_of_a_graph_is_read_too_early(e: Bench):
    graph, _x, y = captured(e)
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        graph.replay()
    y.sum()
    torch.cuda.synchronize()


@correct
def a_graph_on_a_side_stream(e: Bench):
    graph, x, y = captured(e)
    for _ in range(3):
        x.add_(1)
        e.a.wait_stream(e.main)
        with torch.cuda.stream(e.a):
            graph.replay()
        e.main.wait_stream(e.a)
        y.sum()


# ---- other objects -----------------------------------------------------------------------------------------


@correct
def the_default_streams_of_threads_and_the_default_stream_wait_for_each_other(e: Bench):
    own = torch.cuda.ExternalStream(2)
    x = ones()
    with torch.cuda.stream(own):
        x.add_(1)
    x.add_(1)


@racy("unordered")
def a_subclass_of_tensor(e: Bench):
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(ones(), ones())
    with torch.cuda.stream(e.a):
        x + 1
    torch.cuda.synchronize()


@correct
def a_subclass_of_tensor_after_waiting(e: Bench):
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(ones(), ones())
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x + 1
    torch.cuda.synchronize()


@correct
def fake_tensors(e: Bench):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(64, device="cuda")
        with torch.cuda.stream(e.a):
            x.add_(1)
        x.sum()


@racy("unordered")
def another_mode_is_active(e: Bench):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        x = torch.ones(64, 64, device="cuda")
        with torch.cuda.stream(e.a):
            x @ x
    torch.cuda.synchronize()


@racy("unordered")
def a_kernel_that_is_declared(e: Bench):
    x = torch.empty(N, device="cuda")
    checker().use(x, e.a)
    x.add_(1)
    torch.cuda.synchronize()


@correct
def a_kernel_that_is_declared_and_waited_for(e: Bench):
    x = torch.empty(N, device="cuda")
    x.fill_(1)
    e.a.wait_stream(e.main)
    checker().use([x], e.a)
    e.main.wait_stream(e.a)
    x.add_(1)


@racy("free")
def a_kernel_that_is_declared_uses_freed_memory(e: Bench):
    x = ones()
    e.a.wait_stream(e.main)
    checker().use(x, e.a, writes=False)
    del x
    ones()


# ---- more of each kind -------------------------------------------------------------------------------------


@correct
def a_recurrent_network(e: Bench):
    net, x = torch.nn.LSTM(16, 32, 2).cuda(), torch.randn(5, 4, 16, device="cuda")
    for _ in range(2):
        net(x)[0].sum().backward()


@correct
def sparse_gradients(e: Bench):
    table = torch.nn.Embedding(100, 16, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(2):
        table(torch.randint(0, 100, (8,), device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@correct
def mixed_precision(e: Bench):
    net = model()
    optimizer, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(torch.randn(16, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@correct
def a_convolution_with_another_layout(e: Bench):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).cuda()
    net = net.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    net(x).sum().backward()


@racy("unordered")
def another_layout_is_read_too_early(e: Bench):
    with torch.cuda.stream(e.a):
        x = torch.randn(2, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    x.contiguous()
    torch.cuda.synchronize()


@correct
def moving_averages_on_a_side_stream(e: Bench):
    net, average = model(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        e.a.wait_stream(e.main)
        with torch.cuda.stream(e.a), torch.no_grad():
            for p, q in zip(net.parameters(), average.parameters(), strict=True):
                q.lerp_(p, 0.1)
        e.main.wait_stream(e.a)


@racy("unordered")
def moving_averages_without_waiting(e: Bench):
    net, average = model(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        e.a.wait_stream(e.main)
        with torch.cuda.stream(e.a), torch.no_grad():
            for p, q in zip(net.parameters(), average.parameters(), strict=True):
                q.lerp_(p, 0.1)
    torch.cuda.synchronize()


@correct
def no_stream_is_entered(e: Bench):
    x = ones()
    with torch.cuda.stream(None):
        x.add_(1)


@racy("unordered")
def streams_are_entered_inside_each_other(e: Bench):
    with torch.cuda.stream(e.a):
        x = ones()
        with torch.cuda.stream(e.b):
            y = ones()
        x.add_(1)
        y.add_(1)
    torch.cuda.synchronize()


@racy("unordered")
def a_conversion_reads(e: Bench):
    x = ones()
    with torch.cuda.stream(e.a):
        x.to(torch.float16)
    torch.cuda.synchronize()


@racy("unordered")
def a_deep_copy_reads(e: Bench):
    with torch.cuda.stream(e.a):
        x = ones()
    copy.deepcopy(x)
    torch.cuda.synchronize()


@racy("unordered")
def written_through_its_storage(e: Bench):
    x = ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        x.untyped_storage().fill_(0)
    x.sum()
    torch.cuda.synchronize()


@racy("unordered")
def written_through_dlpack(e: Bench):
    x = ones()
    y = torch.from_dlpack(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        y.add_(1)
    x.sum()
    torch.cuda.synchronize()


@correct
def time_between_events(e: Bench):
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    x = ones()
    last.record()
    last.synchronize()
    first.elapsed_time(last)
    with torch.cuda.stream(e.a):
        x.add_(1)
    e.a.synchronize()


@racy("unordered")
def one_of_two_results_given_as_out(e: Bench):
    x = ones()
    values, places = torch.empty(3, device="cuda"), torch.empty(3, dtype=torch.long, device="cuda")
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        torch.topk(x, 3, out=(values, places))
    places.sum()
    torch.cuda.synchronize()


@correct
def parts_are_written_by_different_streams(e: Bench):
    x = ones()
    torch.cuda.synchronize()
    for side, part in zip((e.a, e.b, e.c), torch.split(x, N // 4), strict=False):
        with torch.cuda.stream(side):
            part.add_(1)
    torch.cuda.synchronize()
    x.sum()


@racy("unordered")
def an_expanded_tensor_is_read(e: Bench):
    x = torch.ones(1, 64, device="cuda")
    y = x.expand(16, 64)
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        x.add_(1)
    y.sum()
    torch.cuda.synchronize()


@racy("unordered")
def the_real_part_is_written(e: Bench):
    x = torch.ones(64, dtype=torch.complex64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        torch.view_as_real(x).mul_(2)
    x.abs()
    torch.cuda.synchronize()


@racy("unordered")
def lists_are_copied(e: Bench):
    xs, ys = [ones(), ones()], [ones(), ones()]
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        torch._foreach_copy_(ys, xs)
    ys[1].sum()
    torch.cuda.synchronize()


@racy("unordered")
def masked_assignment(e: Bench):
    x, mask = ones(), torch.ones(N, dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(e.a):
        x[mask] = 0
    x.sum()
    torch.cuda.synchronize()


@correct
def an_operator_that_fails(e: Bench):
    x = ones()
    for _ in range(2):
        try:
            x.add_(torch.ones(3, device="cuda"))
        except RuntimeError:
            x.add_(1)


@racy("free")
def freed_by_another_thread(e: Bench):
    with torch.cuda.stream(e.a):
        given = [ones()]
    e.b.wait_stream(e.a)

    def work() -> None:
        with torch.cuda.stream(e.b):
            given.pop().sum()

    on_thread(work)
    allocate_on_a(e)


@correct
def recorded_by_another_thread(e: Bench):
    with torch.cuda.stream(e.a):
        given = [ones()]
    e.b.wait_stream(e.a)

    def work() -> None:
        x = given.pop()
        with torch.cuda.stream(e.b):
            x.sum()
        x.record_stream(e.b)

    on_thread(work)
    allocate_on_a(e)


@correct
def threads_with_tensors_of_their_own(e: Bench):
    def work(side: Any) -> None:
        with torch.cuda.stream(side):
            for _ in range(5):
                x = ones()
                x.add_(1)
                (x * 2).sum()

    threads = [threading.Thread(target=work, args=(side,)) for side in (e.a, e.b, e.c)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@racy("free")
def freed_by_the_garbage_collector(e: Bench):
    ring: list[Any] = [read_on_b(e)]
    ring.append(ring)
    del ring
    gc.collect()
    allocate_on_a(e)


@racy("free")
def a_copy_to_the_host_is_not_waited_for(e: Bench):
    host = torch.empty(N, pin_memory=True)
    x = ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        host.copy_(x, non_blocking=True)
    del x
    ones()


@correct
def a_copy_to_the_host_is_recorded(e: Bench):
    host = torch.empty(N, pin_memory=True)
    x = ones()
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        host.copy_(x, non_blocking=True)
    x.record_stream(e.a)
    del x
    ones()
    e.a.synchronize()


@correct
def the_cache_is_emptied(e: Bench):
    with torch.cuda.stream(e.a):
        x = ones(1 << 22)
        x.add_(1)
    del x
    torch.cuda.empty_cache()
    with torch.cuda.stream(e.b):
        ones(1 << 22).add_(1)


@correct
def memory_of_a_pool(e: Bench):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = ones()
    x.add_(1)
    e.a.wait_stream(e.main)
    with torch.cuda.stream(e.a):
        x.sum()
    x.record_stream(e.a)


@correct
def a_capture_with_two_streams(e: Bench):
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        e.a.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(e.a):
            y = x * 2
        z = x * 3
        torch.cuda.current_stream().wait_stream(e.a)
        y.add_(z)
    graph.replay()
    y.sum()


@racy("unordered")
def waits_in_a_capture_order_nothing_else(e: Bench):
    x, y, graph = ones(), ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        e.a.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(e.a):
            x * 2
        torch.cuda.current_stream().wait_stream(e.a)
    y.add_(1)
    with torch.cuda.stream(e.a):
        y.sum()
    torch.cuda.synchronize()


@correct
def a_graphed_module(e: Bench):
    net = torch.cuda.make_graphed_callables(model(), (torch.randn(16, 64, device="cuda"),))
    for _ in range(2):
        net(torch.randn(16, 64, device="cuda")).sum().backward()


@correct
def streams_of_any_device(e: Bench):
    x, side = ones(), torch.Stream(device="cuda")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    done = side.record_event()
    done.synchronize()
    x.add_(1)


@racy("unordered")
def streams_of_any_device_without_waiting(e: Bench):
    x, side = ones(), torch.Stream(device="cuda")
    with side:
        x.add_(1)
    torch.accelerator.synchronize()


@correct
def second_derivatives(e: Bench):
    x = torch.randn(4, device="cuda")
    torch.func.hessian(lambda v: v.sin().sum())(x)
    torch.func.jvp(lambda v: v * torch.zeros_like(v), (x,), (x,))


@correct
def functions_for_the_compiler(e: Bench):
    torch._dynamo.reset()
    x = torch.randn(4, 8, device="cuda")
    torch.compile(lambda v: (v * 2).sin(), backend="aot_eager", fullgraph=True)(x)
    w = torch.randn(8, device="cuda", requires_grad=True)
    torch.cond(x.sum() > 0, lambda v: v * w, lambda v: v - w, (x,)).backward(x)
    assert w.grad is not None


@racy("unordered")
def a_branch_reads_too_early(e: Bench):
    torch._dynamo.reset()
    x, y = ones(), ones()
    torch.cuda.synchronize()
    y.add_(1)
    with torch.cuda.stream(e.a):
        e.kept = torch.cond(x.sum() > 0, lambda v: v + y, lambda v: v - y, (x,))  # type: ignore[attr-defined]


@racy("unordered")
def a_function_that_was_compiled_reads_too_early(e: Bench):
    torch._dynamo.reset()
    double = torch.compile(lambda v: v * 2, backend="aot_eager", fullgraph=True)
    x = ones()
    with torch.cuda.stream(e.a):
        e.kept = double(x)  # type: ignore[attr-defined]


@correct
def functions_of_functions(e: Bench):
    w = torch.randn(8, 8, device="cuda")
    torch.func.vmap(torch.func.grad(lambda v: (w @ v).sum()))(torch.randn(4, 8, device="cuda"))


@correct
def a_backward_function_that_uses_a_stream(e: Bench):
    class Side(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            here = torch.cuda.current_stream()
            e.a.wait_stream(here)
            with torch.cuda.stream(e.a):
                result = grad * 2
            grad.record_stream(e.a)
            here.wait_stream(e.a)
            result.record_stream(here)
            return result

    x = torch.ones(64, device="cuda", requires_grad=True)
    for _ in range(3):
        Side.apply(x * 3).sum().backward()
    x.grad.sum()


@correct
def several_streams_in_one_backward_pass(e: Bench):
    w = torch.ones(64, 64, device="cuda", requires_grad=True)
    for _ in range(3):
        parts = []
        for side in (e.a, e.b):
            side.wait_stream(e.main)
            with torch.cuda.stream(side):
                parts.append((w @ w).relu().sum())
        for side in (e.a, e.b):
            e.main.wait_stream(side)
        (parts[0] + parts[1]).backward()
        w.grad = None
        del parts


# ---- the verdicts ------------------------------------------------------------------------------------------


def bench() -> Bench:
    torch.cuda.synchronize()
    gc.freeze()  # only what the program leaves is collected
    return Bench(torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3)))


def verdict(program: Program) -> dict[str, Any]:
    streams = bench()
    with vram.race_check("collect") as checker:
        program.run(streams)
        gc.collect()
    return {
        "expected": sorted(program.kinds),
        "fix": program.fix,
        "kinds": sorted({str(race.kind) for race in checker.races}),
        "fixes": sorted({race.fix for race in checker.races}),
        "text": "\n\n".join(map(str, checker.races)),
    }


def second_opinion(program: Program) -> dict[str, Any]:
    """Return what PyTorch's own sanitizer finds, which knows uses without order, but no frees."""
    from torch.cuda import _gpu_trace, _sanitizer

    callbacks = [each.callback_list for each in vars(_gpu_trace).values() if hasattr(each, "callback_list")]
    before = [[*each] for each in callbacks]
    found: list[Any] = []
    streams, mode = bench(), _sanitizer.CUDASanitizerDispatchMode()
    judge = mode.event_handler._handle_kernel_launch
    # It would raise at the first error.
    mode.event_handler._handle_kernel_launch = lambda *launch: found.extend(judge(*launch)) or []
    failed = None
    try:
        with vram.race_check("collect"), mode:  # some programs tell the check what it cannot see
            program.run(streams)
    except Exception as error:
        failed = repr(error)
    finally:
        for each, kept in zip(callbacks, before, strict=True):
            each[:] = kept
    return {"expected": sorted(program.kinds), "found": [str(each) for each in found], "failed": failed}


def main() -> None:
    judge, chosen = second_opinion if sys.argv[1] == "sanitizer" else verdict, sys.argv[2:]
    print(json.dumps({each.name: judge(each) for each in PROGRAMS if not chosen or each.name in chosen}))


if __name__ == "__main__":
    main()
