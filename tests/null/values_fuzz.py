"""Random programs on the null GPU and on the CPU: what is read is the same, or is listed as a guess.

Run by test_values.py in a process of its own: values_fuzz.py FOLDER-OF-inside EXAMPLES
"""

from __future__ import annotations

import sys

sys.path.insert(0, sys.argv[1])

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from inside.values import Values

MOST_TENSORS = 12
VALUES = Values(torch)


def guessed():
    return sum(guess.count for guess in VALUES.guesses())


class Diverged(Exception):
    """A guess made the two programs differ in more than values."""


class Machine:
    """The same program on both devices: tensors in pairs."""

    def __init__(self, data):
        self.draw = data.draw
        self.pairs = []
        self.log = []

    def pick(self, *kinds):
        pairs = [p for p in self.pairs if not kinds or p[1].dtype in kinds]
        return pairs[self.draw(st.integers(0, len(pairs) - 1))] if pairs else None

    def same_shape(self, pair):
        pairs = [p for p in self.pairs if p[1].shape == pair[1].shape]
        return pairs[self.draw(st.integers(0, len(pairs) - 1))]

    def run(self, text, *pairs, **names):
        """Evaluate an expression or a statement with a, b, c on both devices."""
        results = []
        self.before = guessed()
        for side in (0, 1):
            scope = {"torch": torch, "d": "cpu" if side else "cuda", **names}
            scope.update(zip("abc", (pair[side] for pair in pairs), strict=False))
            try:
                if "=" in text.split("(")[0]:
                    exec(text, scope)
                    results.append(None)
                else:
                    results.append(eval(text, scope))
            except Exception as error:
                results.append(type(error))
        self.log.append((text, names, [list(p[1].shape) for p in pairs]))
        if guessed() > self.before:  # from here on, anything may differ
            raise Diverged
        device, host = results
        if isinstance(host, type) or isinstance(device, type):
            # What the CPU refuses the device refuses as well, except what only kernels would notice.
            if host != device:
                raise Diverged
            return
        for d, h in zip(*((r if isinstance(r, tuple) else (r,)) for r in results), strict=False):
            if isinstance(h, torch.Tensor):
                self.add(d, h)

    def add(self, device, host):
        assert device.shape == host.shape, ("silently wrong", self.log)
        assert device.dtype == host.dtype, self.log
        if host.numel() <= 300:
            self.pairs.append((device, host))
            del self.pairs[:-MOST_TENSORS]

    def must_be_guessed(self, before):
        assert guessed() > before, ("silently wrong", self.log)

    def read(self, pair):
        before = guessed()
        way = self.draw(st.sampled_from(["tolist", "cpu", "to", "copy_", "item"]))
        device, host = pair
        if way == "item" and host.numel():
            seen, right = device.reshape(-1)[0].item(), host.reshape(-1)[0].item()
        else:
            right = host.tolist()
            if way == "cpu":
                seen = device.cpu().tolist()
            elif way == "to":
                seen, right = device.to("cpu", torch.float64).tolist(), host.to(torch.float64).tolist()
            elif way == "copy_":
                seen = torch.empty_like(host).copy_(device).tolist()
            else:
                seen = device.tolist()
        if repr(seen) != repr(right):  # not a number equals itself
            self.log.append((way, seen, right))
            self.must_be_guessed(before)

    def step(self):
        kind = self.draw(st.sampled_from(KINDS))
        kind(self)


INTS = (torch.int64, torch.int32, torch.uint8)
small = st.integers(-3, 5)


def make(m):
    shape = tuple(m.draw(st.lists(st.integers(0, 4), max_size=3)))
    how = m.draw(st.sampled_from(["data", "arange", "full", "zeros", "eye", "bool", "host", "float", "tril"]))
    if how == "arange":
        m.run("torch.arange(n, device=d)", n=m.draw(st.integers(0, 12)))
    elif how == "full":
        m.run("torch.full(s, v, device=d)", s=shape, v=m.draw(small))
    elif how == "zeros":
        m.run("torch.zeros(s, dtype=torch.int64, device=d)", s=shape)
    elif how == "eye":
        m.run("torch.eye(3, device=d)")
    elif how == "tril":
        m.run("torch.tril(torch.ones(3, 4, device=d, dtype=torch.bool))")
    elif how == "host":
        n = torch.Size(shape).numel()
        v = m.draw(st.lists(small, min_size=n, max_size=n))
        m.run("torch.tensor(v, dtype=torch.int64).reshape(s).to(d)", v=v, s=shape)
    else:
        v = m.draw(st.lists(small, max_size=6))
        dtype = {"data": torch.int64, "bool": torch.bool, "float": torch.float32}[how]
        m.run("torch.tensor(v, device=d, dtype=t)", v=v, t=dtype)


def unknown(m):
    """Floating-point numbers that are too many to follow, and small results of them."""
    text = m.draw(
        st.sampled_from(
            [
                "(torch.ones(80, 80, device=d) @ torch.ones(80, 80, device=d))[0, :4].long()",
                "torch.ones(90, 90, device=d).sum().long()",
                "torch.ones(90, 90, device=d)[1, :5]",
                "torch.ones(90, 90, device=d)[1, :5] > 0",
                "torch.ones(90, 90, device=d).argmax(1)[:6]",
                "torch.ones(5, 90, 90, device=d).sum((1, 2)).isfinite()",
            ]
        )
    )
    m.run(text)


def view(m):
    pair = m.pick()
    text = m.draw(
        st.sampled_from(
            [
                "a[1:]",
                "a[::2]",
                "a.t()",
                "a.transpose(0, -1)",
                "a.reshape(-1)",
                "a.flatten()",
                "a[0]",
                "a[..., :2]",
                "a.unsqueeze(0)",
                "a.squeeze()",
                "a.expand(2, *a.shape)",
                "a.view(-1)",
                "a.diagonal()",
                "a.detach()",
                "a.unbind(0)",
                "a.split(2)",
                "a.chunk(2)",
                "a.narrow(0, 0, 1)",
                "a.data",
                "tuple(a)",
                "a.T",
                "a.contiguous()",
                "a.select(0, -1)",
                "a.unfold(0, 2, 1)",
                "a.view_as(a)",
                "a.permute(*range(a.dim() - 1, -1, -1))",
            ]
        )
    )
    m.run(text, pair)


def compute(m):
    a = m.pick()
    b = m.same_shape(a) if m.draw(st.booleans()) else m.pick()
    text = m.draw(
        st.sampled_from(
            [
                "a + b",
                "a - 1",
                "a * b",
                "a == b",
                "a > 1",
                "a.clamp(0, 3)",
                "~(a > 0)",
                "a.sum()",
                "a.max()",
                "a.any()",
                "a.all()",
                "a.cumsum(0)",
                "torch.cat([a.reshape(-1), b.reshape(-1)])",
                "torch.stack([a, b])",
                "a.clone()",
                "a.long()",
                "a.float()",
                "a.bool()",
                "torch.where(a > 1, a, b)",
                "a.repeat(2)",
                "a.flip(0)",
                "a // 2",
                "a % 3",
                "a.sort(stable=True)",
                "a.unique()",
                "torch.unique(a, return_counts=True, return_inverse=True)",
                "a.nonzero()",
                "torch.where(a > 0)",
                "torch.masked_select(a, a > 0)",
                "a.eq(b).sum(-1)",
                "a.tril()",
                "torch.unique_consecutive(a)",
                "torch.bincount(a.clamp(0, 9))",
                "a.repeat_interleave(2)",
                "torch.repeat_interleave(a, b.clamp(0, 3))",
                "a.new_zeros(3)",
                "torch.ones_like(a)",
                "a.new_full((2,), 7)",
                "torch.nn.functional.one_hot(a.clamp(min=0))",
                "torch.full_like(a, 2)",
                "torch.isin(a, b)",
                "a.abs().max(0)",
                "a.amax(0)",
                "a.argsort(stable=True)",
                "torch.nn.functional.pad(a, (1, 2))",
                "a.roll(1, 0)",
                "a.gather(0, b)",
                "torch.arange(a.numel(), device=d)",
                "torch.tensor(a.tolist(), device=d)",
                "a.double().mean()",
                "a.logical_not()",
                "torch.arange(3, device=d) + a.sum()",
                "a.index_select(0, b.reshape(-1))",
                "a.unique(dim=0)",
                "torch.add(a, b, out=a.clone())",
                "torch.nn.functional.embedding(b, a)",
                "a.to(torch.int32)",
                "a.clone().cpu().to(d)",
                "a.count_nonzero()",
                "torch.searchsorted(a, b)",
                "a.bitwise_and(1)",
                "a.type(torch.int64)",
                "torch.meshgrid(a, b)",
                "torch.combinations(a)",
                "torch.cdist(a, b)",
                "torch.einsum('i,j->ij', a, b)",
                "a.std()",
                "a.scatter(0, b, 1)",
            ]
        )
    )
    m.run(text, a, b)


def index(m):
    a, b = m.pick(), m.pick()
    text = m.draw(
        st.sampled_from(
            [
                "a[b]",
                "a[b > 0]",
                "a[a > 0]",
                "a[b.long()]",
                "a[:b.sum()]",
                "a[b.sum()]",
                "a[a.max():]",
                "a[..., b]",
                "a[b, None]",
                "a[b.bool(), b.bool()]",
                "torch.zeros(b.sum(), device=d)",
                "torch.arange(b.max(), device=d)",
                "a[[0, 0]]",
            ]
        )
    )
    m.run(text, a, b)


def write(m):
    a, b, c = m.pick(), m.pick(), m.pick()
    text = (
        m.draw(
            st.sampled_from(
                [
                    "a[0] = 3",
                    "a[a > 0] = 1",
                    "a[b] = 2",
                    "a[b > 0] = c",
                    "a[1:] = b",
                    "a[:] = b",
                    "a[b] = c",
                    "a[a > 1] = a[a > 1] + 1",
                    "a += 1",
                    "a *= b",
                    "a -= b",
                    "a |= b",
                    "a[b.sum()] = 4",
                    "a[..., 0] = b.sum()",
                    "a[:, 1] = 0",
                ]
            )
        )
        if m.draw(st.booleans())
        else m.draw(
            st.sampled_from(
                [
                    "a.add_(b)",
                    "a.zero_()",
                    "a.fill_(2)",
                    "a.copy_(b)",
                    "a.masked_fill_(b > 0, 4)",
                    "a.mul_(2)",
                    "a.clamp_(0, 2)",
                    "a.data.fill_(1)",
                    "a.t_()",
                    "a.scatter_(0, b, 2)",
                    "a.index_fill_(0, b, 1)",
                    "a.index_add_(0, b, c)",
                    "a.sub_(b.sum())",
                    "a.unsqueeze_(0)",
                    "torch.add(a, b, out=a)",
                    "torch.cumsum(a, 0, out=b)",
                    "a.index_put_((b,), c)",
                    "a.copy_(b.cpu())",
                    "a.masked_scatter_(b > 0, c)",
                    "a.resize_(2)",
                    "a.set_(b)",
                    "torch._foreach_add_([a, b], 1)",
                    "a.logical_not_()",
                    "a.fill_(b.sum())",
                    "a.put_(b, c)",
                    "torch.sum(a, 0, out=b.clone())",
                    "a.neg_()",
                    "a.requires_grad_(False)",
                ]
            )
        )
    )
    m.run(text, a, b, c)


def read(m):
    m.read(m.pick())


KINDS = [make, unknown, view, view, compute, compute, compute, index, write, write, read, read]


def check(data):
    m = Machine(data)
    try:
        make(m)
        make(m)
        inference = data.draw(st.integers(0, 5)) == 0
        with torch.inference_mode(inference):
            if inference:
                m.pairs.clear()
                make(m)
            for _ in range(data.draw(st.integers(3, 25))):
                if not m.pairs:
                    make(m)
                    continue
                m.step()
            for pair in list(m.pairs):
                m.read(pair)
    except Diverged:
        pass


if __name__ == "__main__":
    VALUES.begin()
    # Where the device is used, only the null GPU of the subprocess; deadlines depend on the machine.
    settings(
        max_examples=int(sys.argv[2]),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(given(st.data())(check))()
    print("ok")
