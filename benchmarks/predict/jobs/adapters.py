"""Fine-tuning: low-rank adapters on a frozen bfloat16 decoder, long and short sequences in turn."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, HIDDEN, HEADS, LAYERS, RANK = 32000, 2048, 5632, 32, 16, 16


class Adapted(nn.Module):
    """A frozen linear layer beside a trained product of two thin ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device="cuda")
        self.frozen.requires_grad_(False)
        self.a = nn.Linear(inputs, RANK, bias=False, device="cuda")
        self.b = nn.Linear(RANK, outputs, bias=False, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.b(self.a(F.dropout(x, 0.05))) * 2


class Layer(nn.Module):
    """A Llama layer whose projections are adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = (nn.RMSNorm(WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.q, self.k, self.v, self.out = (Adapted(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = Adapted(WIDTH, HIDDEN), Adapted(WIDTH, HIDDEN), Adapted(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm_a(x)
        q, k, v = (
            part(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        normed = self.norm_b(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


options = arguments(batch_size=4)
embed = nn.Embedding(WORDS, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
head = nn.Linear(WIDTH, WORDS, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
trained = [parameter for parameter in layers.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
for step in count(options.steps):
    length = (512, 128, 384, 640)[step % 4]
    tokens = torch.randint(WORDS, (options.batch_size, length + 1)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = head(layers(embed(tokens[:, :-1])))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
