"""A whole training step captured in a CUDA graph (a private pool) and replayed."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

options = arguments(batch_size=32)
WORDS, WIDTH, LENGTH = 16000, 768, 256
layer = nn.TransformerEncoderLayer(WIDTH, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(WORDS, WIDTH),
    nn.TransformerEncoder(layer, 8, enable_nested_tensor=False),
    nn.Linear(WIDTH, WORDS),
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
inputs = torch.zeros(options.batch_size, LENGTH, dtype=torch.long, device="cuda")
targets = torch.zeros_like(inputs)


def step() -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in count(options.steps):
    tokens = torch.randint(WORDS, (options.batch_size, LENGTH + 1)).cuda()
    inputs.copy_(tokens[:, :-1])
    targets.copy_(tokens[:, 1:])
    graph.replay()
