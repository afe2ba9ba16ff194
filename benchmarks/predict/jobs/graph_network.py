"""Graphs: message passing with gather and index_add, and a multiplication by a sparse CSR matrix."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

WIDTH = 128


class Layer(nn.Module):
    """Sends messages along edges and adds them at the receivers."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.update, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor) -> torch.Tensor:
        messages = self.message(torch.cat([x[sender], x[receiver]], dim=-1))
        sums = torch.zeros_like(x).index_add_(0, receiver, messages)
        return self.norm(x + self.update(torch.cat([x, sums], dim=-1)))


options = arguments(batch_size=32)  # graphs; each has 1000 to 3000 nodes and eight edges a node
dice = torch.Generator().manual_seed(41)
layers = nn.ModuleList(Layer() for _ in range(4))
enter, leave = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 1)
model = nn.ModuleList([enter, layers, leave]).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in count(options.steps):
    sizes = torch.randint(1000, 3000, (options.batch_size,), generator=dice)
    nodes = int(sizes.sum())
    sender, receiver = torch.randint(nodes, (2, 8 * nodes), generator=dice).cuda()
    owner = torch.repeat_interleave(torch.arange(options.batch_size), sizes).cuda()
    x = enter(torch.randn(nodes, 16, device="cuda"))
    begins = torch.arange(0, 8 * nodes + 1, 8).cuda()
    with torch.no_grad():
        matrix = torch.sparse_csr_tensor(begins, sender, torch.ones(8 * nodes, device="cuda"), (nodes, nodes))
        neighbours = matrix @ x
    x = x + neighbours / 8
    for layer in layers:
        x = layer(x, sender, receiver)
    pooled = torch.zeros(options.batch_size, WIDTH, device="cuda").index_add(0, owner, x)
    loss = F.mse_loss(
        leave(pooled / sizes[:, None].cuda()), torch.randn(options.batch_size, 1, device="cuda")
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
