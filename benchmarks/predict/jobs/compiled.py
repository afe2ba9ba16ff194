"""Language modelling: a transformer under torch.compile, bfloat16 autocast."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH = 32000, 768, 512


class Block(nn.Module):
    """A layer with rotary positions left out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm_a(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        normed = self.norm_b(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


options = arguments(batch_size=32)
model = nn.Sequential(
    nn.Embedding(WORDS, WIDTH),
    *(Block(WIDTH, 12) for _ in range(4)),
    nn.RMSNorm(WIDTH),
    nn.Linear(WIDTH, WORDS),
).cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in count(options.steps):
    tokens = torch.randint(WORDS, (options.batch_size, LENGTH + 1)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
