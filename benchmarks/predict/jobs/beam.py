"""Serving: prefill, then beam search over a cache of keys and values that grows with every token."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, HEADS, LAYERS, BEAMS = 32000, 2048, 16, 12, 4


class Layer(nn.Module):
    """A layer that appends to its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        q, *new = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm_a(x)).chunk(3, -1)
        )
        first = not cache
        cache[:] = new if first else [torch.cat(pair, dim=2) for pair in zip(cache, new, strict=True)]
        y = F.scaled_dot_product_attention(q, *cache, is_causal=first)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_b(x))))


options = arguments(batch_size=4, steps=6)
embed = nn.Embedding(WORDS, WIDTH)
layers = nn.ModuleList(Layer() for _ in range(LAYERS))
head = nn.Linear(WIDTH, WORDS, bias=False)
model = nn.ModuleList([embed, layers, head]).to(device="cuda", dtype=torch.bfloat16).eval()
dice = torch.Generator().manual_seed(21)
with torch.inference_mode():
    for _ in count(options.steps):
        length = int(torch.randint(64, 1024, (), generator=dice))
        prompt = torch.randint(WORDS, (options.batch_size, length), generator=dice).cuda()
        tokens = prompt.repeat_interleave(BEAMS, dim=0)
        scores = torch.full((options.batch_size, BEAMS), -1e9, device="cuda")
        scores[:, 0] = 0
        caches: list[list[torch.Tensor]] = [[] for _ in layers]
        last, made = tokens, tokens[:, :0]
        for _ in range(16):
            x = embed(last)
            for layer, cache in zip(layers, caches, strict=True):
                x = layer(x, cache)
            odds = F.log_softmax(head(x[:, -1]).float(), dim=-1).view(options.batch_size, BEAMS, WORDS)
            scores, best = (scores[:, :, None] + odds).flatten(1).topk(BEAMS)
            base = torch.arange(options.batch_size, device="cuda")[:, None] * BEAMS
            parents = (base + best // WORDS).flatten()
            last = (best % WORDS).view(-1, 1)
            made = torch.cat([made[parents], last], dim=1)
            for cache in caches:
                cache[:] = [part.index_select(0, parents) for part in cache]
        made.cpu()
