"""Language modelling: four accumulated micro-batches, checkpointed layers, bfloat16 weights."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LENGTH, MICRO = 50257, 1280, 1024, 4

options = arguments(batch_size=16, steps=6)
layers = nn.ModuleList(
    nn.TransformerEncoderLayer(WIDTH, 20, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
    for _ in range(16)
)
embed, norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
model = nn.ModuleList([embed, layers, norm]).to(device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device="cuda", dtype=torch.bfloat16)
for _ in count(options.steps):
    tokens = torch.randint(WORDS, (options.batch_size, LENGTH + 1)).cuda()
    for part in tokens.chunk(MICRO):
        x = embed(part[:, :-1])
        for layer in layers:
            x = checkpoint(layer, x, mask, is_causal=True, use_reentrant=False)
        logits = F.linear(norm(x), embed.weight)
        (F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / MICRO).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
