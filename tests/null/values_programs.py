"""Small programs that read values from the device, for test_values.py, which compares with the CPU.

Run as values_programs.py FOLDER-OF-inside RESULT: writes a JSON object with, for each program, what it read
on both devices and what was guessed.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import traceback

import torch
import torch.nn.functional as F
from torch import nn

EXACT, GUESSED = {}, {}


def exact(program):
    """What the program reads is the same on both devices, and nothing is guessed."""
    EXACT[program.__name__] = program
    return program


def guessed(program):
    """The program checks itself that it takes its normal path; what it reads is listed as guesses."""
    GUESSED[program.__name__] = program
    return program


def unknown(*shape, device):
    """Floating-point numbers that nobody knows."""
    return torch.ones(100, 100, device=device).mm(torch.ones(100, 100, device=device)).sum().expand(shape) + 0


# ---- reading ----------------------------------------------------------------------------------------------


@exact
def copies_from_the_host(d):
    a = torch.tensor([3, 1, 2], device=d)
    b = torch.tensor([4, 5]).to(d)
    c = torch.empty(2, dtype=torch.int64, device=d)
    c.copy_(torch.tensor([7, 8]))
    e = torch.as_tensor([1.5, 2.5], device=d)
    f = torch.tensor(9) if d == "cpu" else torch.tensor(9).cuda()
    return [a.tolist(), b.tolist(), c.tolist(), e.tolist(), f.item()]


@exact
def every_way_to_read(d):
    a, z = torch.tensor(5, device=d), torch.tensor(0.0, device=d)
    into = torch.zeros(3)
    into.copy_(torch.tensor([1, 2, 3], device=d))
    return [
        a.item(),
        int(a),
        float(a),
        bool(a),
        bool(z),
        list(range(a)),
        [10, 20, 30, 40, 50, 60][a],
        a.tolist(),
        a.cpu().item(),
        a.to("cpu").item(),
        a.cpu().numpy().item(),
        torch.equal(a, a + 0),
        torch.allclose(z, z),
        torch.is_nonzero(a),
        f"{a}",
        3 in torch.tensor([1, 3], device=d),
        into.tolist(),
        a == 5 and "yes",
        "yes" if a > 4 else "no",
        [int(x) for x in torch.arange(3, device=d)],
        a.detach().cpu().numpy().tolist(),
        f"{torch.tensor(1.25, device=d):.2f}",
        complex(a).real,
        max(torch.tensor([2, 9], device=d)).item(),
    ]


@exact
def printing(d):
    texts = [
        repr(torch.tensor([1, 2], device=d)),
        str(torch.tensor(1.5, device=d)),
        repr(torch.tensor([1], dtype=torch.int32, device=d)),
    ]
    return [text.replace(", device='cuda:0'", "") for text in texts]


@exact
def factories(d):
    o = {"device": d}
    return [
        torch.zeros(2, 2, **o).tolist(),
        torch.ones(3, dtype=torch.int32, **o).tolist(),
        torch.full((2,), 7, **o).tolist(),
        torch.arange(2, 11, 3, **o).tolist(),
        torch.linspace(0, 1, 3, **o).tolist(),
        torch.eye(2, **o).tolist(),
        torch.tril(torch.ones(3, 3, **o)).tolist(),
        torch.triu_indices(3, 3, **o).tolist(),
        torch.zeros_like(torch.ones(2, **o)).tolist(),
        torch.ones(2, **o).new_full((2,), 3).tolist(),
        torch.full_like(torch.zeros(2, **o), 4).tolist(),
        torch.ones(1, **o).new_tensor([5]).tolist(),
        torch.scalar_tensor(3, **o).item(),
        torch.tensor([torch.tensor(4, **o), torch.tensor(5, **o)], **o).tolist(),
        torch.full((2,), torch.tensor(6, **o), **o).tolist(),
        torch.zeros(torch.tensor(2, **o), **o).tolist(),
        torch.empty(2, dtype=torch.int64, **o).fill_(8).tolist(),
        torch.empty(2, **o).zero_().tolist(),
        torch.asarray([1, 2], **o).tolist(),
    ]


@exact
def a_default_device(d):
    with torch.device(d):
        return [torch.arange(3).tolist(), torch.tensor([1, 2]).sum().item(), torch.zeros(2).tolist()]


@exact
def deep_copies_and_parameters(d):
    p = nn.Parameter(torch.tensor([1.0, 2.0], device=d))
    q = copy.deepcopy(p)
    with torch.no_grad():
        p.add_(1)
    return [p.tolist(), q.tolist(), nn.Parameter(torch.ones(2, device=d)).data.tolist()]


@exact
def buffers_of_a_module(d):
    m = nn.Module()
    m.register_buffer("steps", torch.tensor(3))
    m.to(d)
    m.steps += 1
    return [m.steps.item(), m.state_dict()["steps"].item()]


# ---- views and writes -------------------------------------------------------------------------------------


@exact
def writes_through_views(d):
    a = torch.zeros(3, 4, dtype=torch.int64, device=d)
    a[1] = 5
    a.t()[2] += 1
    a[:, 0].fill_(9)
    a.view(-1)[-1] = 7
    a.data[0, 1] = 3
    row = a[2]
    a.mul_(2)
    return [a.tolist(), row.tolist(), a.diagonal().tolist()]


@exact
def index_writes(d):
    a = torch.zeros(6, dtype=torch.int64, device=d)
    i = torch.tensor([4, 1], device=d)
    a[i] = torch.tensor([2, 3], device=d)
    a[a == 3] = 8
    a[a > 1] = a[a > 1] + 10
    a.index_add_(0, i, i)
    a.scatter_(0, torch.tensor([0], device=d), 6)
    a[i[0]] = 1
    a[: i[1]] = 4
    return [a.tolist(), a[i].tolist(), a[i[1]].item(), a[i[1] : i[0]].tolist()]


@exact
def results_given_as_out(d):
    a, b = torch.arange(3, device=d), torch.empty(3, dtype=torch.int64, device=d)
    torch.add(a, 1, out=b)
    c = torch.zeros(2, 3, dtype=torch.int64, device=d)
    torch.mul(a, 2, out=c[1])
    return [b.tolist(), c.tolist()]


@exact
def inference_mode(d):
    with torch.inference_mode():
        a = torch.arange(5, device=d)
        a += 1
        a[0] = 7
    return [a.tolist(), a.sum().item()]


@exact
def other_streams(d):
    if d == "cpu":
        return [[1, 2], 3]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a = torch.tensor([1, 2]).pin_memory().to(d, non_blocking=True)
    a.record_stream(torch.cuda.current_stream())
    return [a.tolist(), a.sum().item()]


@exact
def requires_grad(d):
    a = torch.tensor([1.0, 2.0], device=d, requires_grad=True)
    b = (a * 2).sum()
    return [b.item(), b.detach().item()]


# ---- sizes ------------------------------------------------------------------------------------------------


@exact
def selections(d):
    a = torch.tensor([[0, 3, 0], [5, 0, 6]], device=d)
    m = a > 0
    b = torch.arange(6, device=d).view(2, 3)
    return [
        a.nonzero().tolist(),
        torch.nonzero(a, as_tuple=True)[1].tolist(),
        [t.tolist() for t in torch.where(m)],
        a[m].tolist(),
        torch.masked_select(b, m).tolist(),
        torch.argwhere(m).tolist(),
        b[:, m[0]].tolist(),
        b[m.any(1)].tolist(),
        torch.masked_select(b, m[0]).tolist(),
        b[m[:, 1], :2].tolist(),
        m.sum().item(),
        b[m.nonzero(as_tuple=True)].tolist(),
        b[torch.tensor([True, False], device=d), :][..., 1].tolist(),
    ]


@exact
def selections_of_unknown_contents(d):
    """How many rows there are is known even if what is in them is not."""
    x = unknown(4, 100, device=d)
    m = torch.tensor([True, False, True, True], device=d)
    x[m] = x[m] * 2
    return [
        list(x[m].shape),
        list(torch.masked_select(x, m[:, None]).shape),
        list(x[m.nonzero().squeeze(1)].shape),
    ]


@exact
def gradients_of_selections(d):
    """The backward pass counts the mask again."""
    x = torch.ones(4, 3, device=d, requires_grad=True)
    m = torch.tensor([True, False, True, True], device=d)
    y = x[m] * 2
    z = torch.zeros(4, 3, device=d)
    z[m] = y
    z.sum().backward()
    return [list(y.shape), list(x.grad.shape)]


@exact
def two_masks(d):
    a = torch.arange(16, device=d).view(4, 4)
    m, n = torch.tensor([1, 0, 1, 0], device=d).bool(), torch.tensor([0, 1, 1, 0], device=d).bool()
    return [a[m, n].tolist(), a[m][:, n].tolist()]


@exact
def uniques(d):
    a = torch.tensor([3, 1, 3, 2, 2], device=d)
    u, i, c = torch.unique(a, return_inverse=True, return_counts=True)
    b = torch.tensor([[1, 2], [1, 2], [0, 1]], device=d)
    flags = a > 2
    return [
        u.tolist(),
        i.tolist(),
        c.tolist(),
        a.unique().numel(),
        [t.tolist() for t in torch.unique_consecutive(a, return_counts=True)],
        torch.unique(b, dim=0).tolist(),
        torch.unique(flags).tolist(),
        (a > 9).unique().tolist(),
        (a > 0).unique().tolist(),
        b.unique(dim=1).tolist(),
    ]


@exact
def sparse_tensors_with_repeated_indices(d):
    indices = torch.tensor([[0, 2, 2, 1, 2], [1, 0, 0, 1, 3]], device=d)
    merged = torch.sparse_coo_tensor(indices, torch.ones(5, 2, device=d), (3, 4, 2)).coalesce()
    return [merged._nnz(), list(merged.values().shape), list(merged.coalesce().indices().shape)]


@exact
def counts(d):
    a = torch.tensor([0, 2, 2, 1], device=d)
    return [
        torch.bincount(a).tolist(),
        torch.bincount(a, minlength=6).tolist(),
        F.one_hot(a).tolist(),
        F.one_hot(a, 4).tolist(),
        torch.repeat_interleave(torch.arange(4, device=d), a).tolist(),
        torch.repeat_interleave(a).tolist(),
        a.repeat_interleave(2).tolist(),
        torch.repeat_interleave(torch.arange(4, device=d), a, output_size=5).tolist(),
        torch.combinations(a).tolist(),
        torch.repeat_interleave(torch.ones(2, 4, device=d), a, dim=1).shape[1],
    ]


@exact
def sizes_given_as_tensors(d):
    n = torch.tensor(3, device=d)
    a = torch.arange(12, device=d)
    return [
        a.narrow(0, n, 2).tolist(),
        a[n:].shape[0],
        a[:n].tolist(),
        torch.arange(n, device=d).tolist(),
        a.view(n, -1).shape[1],
        F.pad(a, (0, n)).shape[0],
        a.split([3, 4, 5])[1].tolist(),
        a[n].item(),
        torch.zeros(n, 2, device=d).shape[0],
        a.split(n.item())[1].tolist(),
    ]


@exact
def packed_sequences(d):
    lengths = torch.tensor([3, 1, 4], device=d)
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    total, longest = int(ends[-1]), lengths.max().item()
    mask = torch.arange(longest, device=d)[None] < lengths[:, None]
    packed = torch.zeros(3, longest, 8, device=d)[mask]
    padded = torch.zeros(3, longest, 8, device=d)
    padded[mask] = packed
    positions = torch.arange(total, device=d) - ends[:-1].repeat_interleave(lengths)
    return [ends.tolist(), longest, list(packed.shape), positions.tolist(), mask.nonzero()[:, 1].tolist()]


@exact
def padding_masks(d):
    ids = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]], device=d)
    mask = (ids != 0).long()
    last = mask.sum(-1) - 1
    return [
        ids.gather(1, last[:, None]).tolist(),
        bool(mask.all()),
        mask.cumsum(-1).tolist(),
        ids[mask.bool()].tolist(),
        ids.flip(1).argmax(1).tolist(),
    ]


@exact
def a_confusion_matrix(d):
    y, p = torch.tensor([0, 1, 2, 1], device=d), torch.tensor([0, 2, 2, 1], device=d)
    matrix = torch.bincount(y * 3 + p, minlength=9).view(3, 3)
    accuracy = (y == p).float().mean()
    return [
        matrix.tolist(),
        accuracy.item(),
        (matrix.diag() / matrix.sum(1)).tolist(),
        (y == p).sum().item() / len(y),
    ]


@exact
def search_in_sorted(d):
    a = torch.tensor([1, 3, 5], device=d)
    return [
        torch.searchsorted(a, torch.tensor([0, 3, 9], device=d)).tolist(),
        torch.isin(a, torch.tensor([5], device=d)).tolist(),
        a.topk(2)[1].tolist(),
        a.sort(descending=True)[0].tolist(),
    ]


@exact
def a_block_table(d):
    """A cache in pages, as in a server: free pages on the device."""
    free = torch.ones(8, dtype=torch.bool, device=d)
    table = torch.full((2, 3), -1, dtype=torch.int64, device=d)
    for request, pages in ((0, 3), (1, 2)):
        got = free.nonzero().flatten()[:pages]
        table[request, :pages] = got
        free[got] = False
    free[table[0]] = True
    return [table.tolist(), free.tolist(), free.sum().item()]


@exact
def greedy_search_with_known_scores(d):
    ids = torch.tensor([[1], [2]], device=d)
    going = torch.ones(2, dtype=torch.long, device=d)
    scores = torch.tensor([[0, 0, 1.0, 0], [0, 0, 0, 1.0]], device=d)
    steps = 0
    while True:
        token = scores.roll(steps, -1).argmax(-1) * going
        ids = torch.cat([ids, token[:, None]], -1)
        going = going.mul((token != 0).long())
        steps += 1
        if going.max() == 0 or ids.shape[1] > 20:
            return [ids.tolist(), steps]


@exact
def steps_of_an_optimizer(d):
    p = nn.Parameter(torch.ones(2, device=d))
    step = torch.zeros((), device=d)
    torch._foreach_add_([step], 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([p], lr=0.1), lambda n: 1 / (n + 1))
    return [step.item(), schedule.get_last_lr()]


@exact
def threads(d):
    read = []

    def work():
        read.append(torch.tensor([1, 2, 3], device=d).sum().item())

    several = [threading.Thread(target=work) for _ in range(3)]
    [each.start() for each in several]
    [each.join() for each in several]
    return read


@exact
def hooks_of_a_backward_pass(d):
    seen, count = [], torch.zeros((), dtype=torch.int64, device=d)
    w = torch.ones(4, device=d, requires_grad=True)

    def hook(gradient):
        count.add_(1)
        seen.append(count.item())

    w.register_hook(hook)
    (w * 2).sum().backward()
    torch.autograd.grad((w * 2).sum(), w)
    return seen


@exact
def checkpointing(d):
    lengths = torch.tensor([2, 0, 1], device=d)
    seen = []

    def layer(x):
        seen.append(x[lengths > 0].shape[0])
        return x[lengths > 0] * 2

    x = torch.ones(3, 4, device=d, requires_grad=True)
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    return seen


@exact
def the_program_s_random_numbers(d):
    """Those of the CPU are not disturbed by what is computed for the device."""
    torch.manual_seed(7)
    a = torch.rand(5, device=d)
    torch.randperm(5, device=d)
    F.dropout(torch.ones(5, device=d))
    torch.multinomial(torch.ones(4, device=d), 2)
    del a
    if d == "cpu":
        torch.manual_seed(7)
    return [torch.rand(3).tolist(), torch.randint(0, 9, (4,)).tolist()]


@exact
def an_autograd_function(d):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.n = int(x.sum())
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = torch.ones(3, device=d, requires_grad=True)
    y = Double.apply(x)
    y.sum().backward()
    return [y.tolist(), y.shape[0]]


@exact
def vmap_and_subclasses(d):
    class Mine(torch.Tensor):
        pass

    a = torch.arange(3, device=d)
    torch.func.vmap(lambda x: x * 2)(a)
    a.as_subclass(Mine).add(1)
    return [a.tolist()]


# ---- transforms, modes, tracers and compilers -------------------------------------------------------------


@exact
def transforms(d):
    mask = torch.tensor([True, False, True], device=d)

    def total(x):
        weights = torch.ones(3, device=d) + torch.zeros_like(x) + torch.arange(3, device=d)
        return (x * weights)[mask].sum()

    def written(row):
        copy = torch.zeros_like(row)
        copy[1] = row[0]
        return copy.fill_(2).zero_().copy_(row)

    x = torch.ones(3, device=d)
    model = nn.Linear(3, 2, device=d)
    weights = dict(model.named_parameters())

    def loss(weights, row, label):
        out = torch.func.functional_call(model, weights, (row[None],))
        return F.cross_entropy(out, label[None])

    rows, labels = torch.ones(4, 3, device=d), torch.zeros(4, dtype=torch.int64, device=d)
    per_row = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, rows, labels)
    return [
        torch.func.grad(total)(x).shape,
        torch.vmap(written)(rows).shape,
        torch.vmap(lambda i: x[i])(torch.tensor([2, 0], device=d)).shape,
        torch.func.hessian(lambda x: (x**3).sum())(x).shape,
        torch.func.jacfwd(lambda x: x * x.new_ones(3))(x).shape,
        torch.func.functionalize(lambda x: torch.zeros(3, device=d).add_(x))(x).shape,
        [each.shape for each in per_row.values()],
        mask.tolist(),
    ]


@exact
def modes_and_tracers_see_only_the_program(d):
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    numbers = torch.tensor([1, 2, 3], device=d)
    with Seeing():
        (numbers + 1).add_(2)
        torch.arange(3, device=d)
        read = numbers.sum().item()

    def compute(x):
        return (x + 1) * 2 + torch.arange(3, device=d)

    traced = torch.jit.trace(compute, numbers, check_trace=False)
    return [
        seen,
        read,
        [node.name for node in make_fx(compute)(numbers).graph.nodes],
        [node.kind() for node in traced.graph.nodes() if node.kind() != "prim::Constant"],
        traced(numbers).tolist() if d == "cpu" else [4, 7, 10],
    ]


@exact
def modes_around_compiled_functions_end(d):
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    double = torch.compile(lambda x: x * 2, backend="aot_eager")
    before = torch._C._len_torch_function_stack()
    with torch.device(d):
        double(torch.ones(3, device=d))
    with Mode():
        double(torch.ones(3, device=d))
    known = torch.tensor([1, 2], device=d) + 1
    return [torch.ones(1).device.type, torch._C._len_torch_function_stack() - before, known.tolist()]


@exact
def compiled_backward_passes(d):
    model = nn.Linear(4, 4, device=d)

    @torch.compile(backend="aot_eager")
    def train(x):
        model(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        train(torch.ones(2, 4, device=d))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        model(torch.ones(2, 4, device=d)).sum().backward()
    return model.weight.grad.shape


@exact
def arguments_by_name(d):
    a = torch.zeros(4, dtype=torch.int64, device=d)
    a.index_put_((torch.tensor([1, 2], device=d),), values=torch.tensor([5, 6], device=d))
    a.index_put_(indices=(torch.tensor([0], device=d),), values=torch.tensor([4], device=d))
    torch.index_put_(input=a, indices=(torch.tensor([3], device=d),), values=torch.tensor([7], device=d))
    counts = torch.tensor([1, 2], device=d)
    return [
        a.tolist(),
        torch.repeat_interleave(repeats=counts).tolist(),
        F.one_hot(tensor=counts).tolist(),
        torch.equal(input=a, other=a),
        torch.fill_(input=torch.ones(2, device=d), value=7).shape,
        a.sum().new_zeros(2).tolist(),
        torch.ones_like(a.sum()).item(),
    ]


class _Annotated(torch.Tensor):
    """A subclass without functions of its own, as those of torchvision."""


class _Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        row = torch.tensor([1.0, 2.0, 2.0]).as_subclass(_Annotated)
        assert not row.isnan().any()
        return [row.max().item(), row.argmax().item(), len(row.unique())]


@exact
def subclasses_in_a_worker_of_a_data_loader(d):
    torch.ones(1, device=d)
    loader = torch.utils.data.DataLoader(_Rows(), num_workers=1, multiprocessing_context="fork")
    return [[each.item() for each in row] for row in loader]


# ---- guesses ----------------------------------------------------------------------------------------------


@guessed
def a_loss(d):
    loss = unknown(device=d)
    assert loss.item() == 0
    assert not torch.isnan(loss)
    assert torch.isfinite(loss).all()
    assert not (torch.isinf(loss).any() or torch.isnan(loss).any())


@guessed
def a_guess_in_a_loop(d):
    for _ in range(3):
        total = unknown(device=d)
        total.item()


@guessed
def large_gradients_are_finite(d):
    g = unknown(1100, 1000, device=d)
    assert torch.isfinite(g).all()
    assert not torch.isnan(g).any()
    assert not g.isinf().any()


@guessed
def a_gradient_scaler(d):
    net = nn.Linear(100, 100).to(d)
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for _ in range(4):
        loss = net(unknown(100, 100, device=d)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(steps) == 4
    assert scaler.get_scale() == 32


@guessed
def writes_that_nobody_knows(d):
    a = torch.zeros(3, dtype=torch.int64, device=d)
    a.add_(unknown(3, device=d).long())
    assert a.tolist() == [0, 0, 0]


@guessed
def gradients_accumulated_by_the_engine(d):
    w = torch.ones(3, device=d, requires_grad=True)
    w.grad = torch.zeros(3, device=d)
    (w * 2).sum().backward()
    w.grad.tolist()


@guessed
def a_sparse_gradient(d):
    table = nn.Embedding(1000, 8, sparse=True).to(d)
    table(torch.randint(1000, (400,)).to(d)).sum().backward()
    assert table.weight.grad._nnz() == 400
    assert table.weight.grad.coalesce()._nnz() == 330  # so many rows 400 random indices hit


@guessed
def a_mixture_of_experts(d):
    tokens, experts, k = 400, 8, 2
    chosen = unknown(tokens, experts, device=d).softmax(-1).topk(k).indices
    sizes = [int((chosen == e).sum()) for e in range(experts)]
    assert sum(sizes) == tokens * k
    assert min(sizes) > 50, sizes  # balanced, more or less
    found = [torch.where((chosen == e).any(-1))[0].shape[0] for e in range(experts)]
    assert found == sizes  # no token chooses an expert twice
    counts = F.one_hot(chosen, experts).sum((0, 1))
    assert counts.tolist() == sizes
    order = chosen.flatten().argsort()
    assert order.unique().numel() == tokens * k
    x = unknown(tokens, 16, device=d)
    assert [part.shape[0] for part in x.repeat_interleave(k, 0)[order].split(counts.tolist())] == sizes


@guessed
def the_same_experts_when_computed_again(d):
    router, seen = nn.Linear(64, 4).to(d), []

    def layer(x):
        chosen = router(x).topk(1).indices.flatten()
        x = x * 1
        for e in range(4):
            rows = (chosen == e).nonzero().flatten()
            seen.append(rows.numel())
            x = x.index_add(0, rows, x[rows] * 2)
        return x

    x = unknown(100, 64, device=d).requires_grad_()
    for reentrant in (False, True):
        seen.clear()
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert seen[:4] == seen[4:], seen


@guessed
def random_masks(d):
    kept = (torch.rand(100, 200, device=d) < 0.15).nonzero().shape[0]
    assert 2400 < kept < 3600, kept
    order = torch.rand(8, 196, device=d).argsort(1)
    assert order[0].unique().numel() == 196
    lengths = torch.randint(5, 9, (50,), device=d)
    assert 5 <= lengths.min().item() <= lengths.max().item() < 9
    assert sorted(torch.randperm(20, device=d).tolist()) == list(range(20))


@guessed
def sampling(d):
    token = torch.multinomial(unknown(2, 1000, device=d).softmax(-1), 1)
    assert 0 <= token.min().item() <= token.max().item() < 1000
    going = torch.ones(2, dtype=torch.bool, device=d)
    for n in range(10):
        token = unknown(2, 30000, device=d).argmax(-1)
        going = going & (token != 3)
        if not going.any():
            raise AssertionError(f"stopped after {n}")


@guessed
def a_condition_that_decides(d):
    """The search ends when the known side says so, and not before."""
    steps = 0
    for n in range(10):
        possible = (unknown(2, device=d) > 3).any()
        reached = torch.tensor(n >= 6, device=d)
        if not (possible & ~reached):
            break
        steps += 1
    assert steps == 6, steps


@guessed
def masks_that_nobody_knows(d):
    x = unknown(50, 4, device=d)
    keep = x[:, 0] > 0.5
    assert x[keep].shape == (50, 4)
    assert x[x > 0].shape == (200,)
    y = unknown(7, 4, device=d)
    x[keep] = y  # as many as there are values


@guessed
def uninitialized_memory(d):
    torch.empty(3, dtype=torch.int64, device=d).tolist()


@guessed
def uniques_that_nobody_knows(d):
    assert unknown(30, device=d).unique().shape == (30,)


@guessed
def distributions(d):
    chosen = torch.distributions.Categorical(logits=unknown(5, 10, device=d)).sample()
    assert chosen.shape == (5,)
    normal = torch.distributions.Normal(unknown(3, device=d), torch.ones(3, device=d))
    normal.log_prob(normal.sample())
    assert int(chosen.max()) < 10


@guessed
def graphs(d):
    """What a graph computes happens when it is replayed."""
    count = torch.zeros((), dtype=torch.int64, device=d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count.add_(1)
    graph.replay()
    count.item()


@guessed
def collectives(d):
    """Every rank holds what this one holds."""
    dist = torch.distributed
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
    try:
        count = torch.tensor([1, 2], device=d)
        dist.all_reduce(count)
        assert count.tolist() == [2, 4]
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        assert count.tolist() == [2, 4]
        parts = [torch.zeros_like(count) for _ in range(2)]
        dist.all_gather(parts, count)
        assert [part.tolist() for part in parts] == [[2, 4], [2, 4]]
        gathered = torch.empty(4, dtype=torch.int64, device=d)
        dist.all_gather_into_tensor(gathered, count)
        assert gathered.tolist() == [2, 4, 2, 4]
        objects = [None, None]
        dist.all_gather_object(objects, {"rows": 7})
        assert objects == [{"rows": 7}] * 2
        known = torch.tensor([5], device=d)
        dist.reduce_scatter_tensor(known, count)
        assert known.item() == 0
        dist.all_to_all(output_tensor_list=[known, known], input_tensor_list=[known, known])
        dist.reduce(tensor=known, dst=0)
    finally:
        dist.destroy_process_group()


def _run(program, device):
    try:
        return program(device)
    except Exception:
        return traceback.format_exc()


def _remaining(values):
    """Shadows and bytes after programs in which known tensors were made, written to and freed."""
    values.begin()
    selections("cuda")
    writes_through_views("cuda")
    a_mixture_of_experts("cuda")
    values.end()
    return [len(values.shadows), values.shadows.bytes]


def main():
    sys.path.insert(0, sys.argv[1])
    from inside.values import Values

    results = {}
    for name, program in {**EXACT, **GUESSED}.items():
        values = Values(torch)
        values.begin()
        device = _run(program, "cuda")
        values.end()
        host = _run(program, "cpu") if name in EXACT else None
        results[name] = {
            "device": repr(device),
            "host": repr(host),
            "guesses": [vars(guess) for guess in values.guesses()],
        }
    results["no_shadow_remains"] = {"device": repr(_remaining(Values(torch)))}
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
