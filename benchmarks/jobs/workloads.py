"""Real jobs for PyTorch, each a generator of losses: four kinds of training, experts of varying load,
decoding token by token, and prefetching on side streams. Sizes and seeds are fixed: all see the same job.

They know nothing of allocators; run.py measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Job = Callable[[int], Iterator[torch.Tensor]]


class Block(nn.Module):
    """A transformer layer before whose halves the input is normalised."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_a(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_b(x))))


class Decoder(nn.Module):
    """A stack of layers with an embedding below and logits above."""

    def __init__(
        self, layers: int, width: int, heads: int, words: int, *, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _between(dice: torch.Generator, least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, (), generator=dice))


def _train(
    model: nn.Module, batches: Iterator[tuple[Any, ...]], loss: Callable[..., torch.Tensor]
) -> Iterator[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in batches:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            value = loss(*batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield value.detach()


def gpt2(steps: int) -> Iterator[torch.Tensor]:
    """Equal steps of a GPT-2 of 124 million parameters, 8 × 1024 tokens."""
    model = Decoder(12, 768, 12, 50304).cuda()
    dice = _dice(1)
    batches = ((torch.randint(50304, (8, 1025), generator=dice).cuda(),) for _ in range(steps))
    yield from _train(model, batches, model.loss)


def llama(steps: int) -> Iterator[torch.Tensor]:
    """Random lengths and checkpointed layers."""
    model = Decoder(16, 1024, 16, 32000, checkpointed=True).cuda()
    dice = _dice(2)
    batches = (
        (torch.randint(32000, (_between(dice, 2, 6), _between(dice, 200, 2048)), generator=dice).cuda(),)
        for _ in range(steps)
    )
    yield from _train(model, batches, model.loss)


class GroupedBlock(nn.Module):
    """A Llama layer: rotary positions, fewer heads of keys and values than of queries, a gated half."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.norm_a, self.norm_b = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, key_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        normed = self.norm_a(x)
        q, k = (self._turned(self._split(part(normed)), turns) for part in (self.q, self.k))
        attended = F.scaled_dot_product_attention(
            q, k, self._split(self.v(normed)), is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm_b(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def _turned(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x * turns.cos() + turned * turns.sin()).to(x.dtype)


RECORDED_SHAPES = (
    (6, 678),
    (1, 571),
    (1, 2950),
    (1, 603),
    (4, 1169),
    (1, 326),
    (1, 1617),
    (6, 2722),
    (6, 808),
    (1, 949),
)
"""Batch and length of each step of the job that traces/llama_varlen_ckpt.pickle.xz is a recording of."""


class Llama(nn.Module):
    """The model of that job: 12 layers of width 1536, checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 1536)
        self.layers = nn.ModuleList(GroupedBlock(1536, 12, 4, 4096) for _ in range(12))
        self.norm = nn.RMSNorm(1536)
        self.head = nn.Linear(1536, 32000, bias=False)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        positions = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)
        rates = 10000.0 ** (-torch.arange(0, 128, 2, device=x.device) / 128)
        turns = torch.outer(positions, rates).repeat(1, 2)
        for layer in self.layers:
            x = checkpoint(layer, x, turns, use_reentrant=False)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, dims=1).flatten())


def llama_recorded(steps: int) -> Iterator[torch.Tensor]:
    """The like of the recorded job, step by step of the same shapes; needs what that needs: 12 GiB."""
    model = Llama().cuda()
    dice = _dice(7)
    shapes = (RECORDED_SHAPES[step % len(RECORDED_SHAPES)] for step in range(steps))
    batches = ((torch.randint(32000, shape, generator=dice).cuda(),) for shape in shapes)
    yield from _train(model, batches, model.loss)


class Convolutions(nn.Module):
    """A residual network of four stages."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)
        self.stem = nn.Conv2d(3, widths[0], 7, stride=2, padding=3)
        self.stages = nn.ModuleList()
        self.down = nn.ModuleList()
        for number, width in enumerate(widths):
            self.stages.append(
                nn.ModuleList(
                    nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
                    for _ in range(4)
                )
            )
            if number + 1 < len(widths):
                self.down.append(nn.Conv2d(width, widths[number + 1], 3, stride=2, padding=1))
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        for number, stage in enumerate(self.stages):
            for layer in stage:
                x = x + layer(x)
            if number < len(self.down):
                x = self.down[number](x)
        return self.head(x.mean((2, 3)))


def resnet(steps: int) -> Iterator[torch.Tensor]:
    """Images of another size in every step."""
    model = Convolutions().cuda()
    dice, pixels = (
        _dice(3),
        torch.Generator("cuda").manual_seed(3),
    )  # made on the host, images would be the job

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(steps):
            side = 32 * _between(dice, 4, 14)
            images = torch.randn(32, 3, side, side, device="cuda", generator=pixels)
            yield images, torch.randint(1000, (32,), generator=dice).cuda()

    yield from _train(model, batches(), lambda images, labels: F.cross_entropy(model(images).float(), labels))


class Experts(nn.Module):
    """Each token goes to the expert that a fixed router names, so experts get another load every time."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        chosen = self.router(flat).argmax(-1)
        result = torch.zeros_like(flat)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows = (chosen == number).nonzero().squeeze(-1)
            result = result.index_add(0, rows, down(F.gelu(up(flat[rows]))).to(result.dtype))
        return x + result.view_as(x)


def experts(steps: int) -> Iterator[torch.Tensor]:
    """A mixture of eight experts over batches of random length."""
    model = nn.Sequential(*(Experts(768, 8) for _ in range(6))).cuda()
    dice = _dice(4)
    batches = ((torch.randn(8, _between(dice, 128, 1024), 768, generator=dice).cuda(),) for _ in range(steps))
    yield from _train(model, batches, lambda x: model(x).float().pow(2).mean())


def decode(steps: int) -> Iterator[torch.Tensor]:
    """Serving: requests come and go, and each one's keys and values grow by a token a step."""
    dice, device = _dice(5), torch.device("cuda")
    layers, width = 12, 1024
    weights = [torch.randn(width, width, device=device, dtype=torch.bfloat16) / width**0.5 for _ in range(4)]
    caches: list[list[torch.Tensor]] = []
    for _ in range(steps * 40):
        if len(caches) < 24 and _between(dice, 0, 3) == 0:
            length = _between(dice, 16, 1024)
            caches.append(
                [torch.randn(2, length, width, device=device, dtype=torch.bfloat16) for _ in range(layers)]
            )
        if caches and _between(dice, 0, 40) == 0:
            caches.pop(_between(dice, 0, len(caches) - 1))
        total = torch.zeros((), device=device)
        for cache in caches:
            x = torch.ones(1, width, device=device, dtype=torch.bfloat16)
            for number in range(layers):
                key, value = x @ weights[0], x @ weights[1]
                cache[number] = torch.cat([cache[number], torch.stack([key, value])], dim=1)
                scores = torch.softmax((x @ weights[2]) @ cache[number][0].T / width**0.5, dim=-1)
                x = torch.tanh(scores @ cache[number][1] @ weights[3])
            total += x.float().sum()
        yield total


def streams(steps: int) -> Iterator[torch.Tensor]:
    """Batches copied and prepared on two side streams, used on the main one, told by record_stream."""
    model = Decoder(6, 768, 12, 8192).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    dice, main = _dice(6), torch.cuda.current_stream()
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]

    def fetch(number: int) -> torch.Tensor:
        tokens = torch.randint(8192, (_between(dice, 4, 8), 257 + 64 * _between(dice, 0, 8)), generator=dice)
        with torch.cuda.stream(sides[number % 2]):
            noise = torch.randint(8192, tokens.shape, device="cuda", generator=None) * 0
            return tokens.pin_memory().cuda(non_blocking=True) + noise

    ahead = [fetch(number) for number in range(2)]
    for number in range(steps):
        tokens = ahead.pop(0)
        main.wait_stream(sides[number % 2])
        tokens.record_stream(main)
        ahead.append(fetch(number + 2))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def empty(steps: int) -> Iterator[torch.Tensor]:
    """Nothing but `torch.empty` and its end: 20 000 pairs a step, in turn of six sizes."""
    sizes = (128, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    result = torch.zeros((), device="cuda")
    for _ in range(steps):
        for number in range(20_000):
            torch.empty(sizes[number % 6], dtype=torch.uint8, device="cuda")
        yield result


JOBS: dict[str, tuple[Job, int]] = {
    "gpt2": (gpt2, 80),
    "llama": (llama, 30),
    "llama_recorded": (llama_recorded, 10),
    "resnet": (resnet, 100),
    "experts": (experts, 40),
    "decode": (decode, 12),
    "streams": (streams, 150),
    "empty": (empty, 40),
}
"""Each job and how many steps make it representative."""
