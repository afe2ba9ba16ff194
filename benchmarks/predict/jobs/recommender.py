"""Recommendation: sparse embedding bags with SparseAdam, crossed features, a deep tower with Adam."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

TABLES, ROWS, WIDTH, EACH = 12, 400_000, 64, 20

options = arguments(batch_size=8192)
tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES)).cuda()
users = nn.Embedding(1_000_000, WIDTH, sparse=True).cuda()
bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, WIDTH), nn.ReLU()).cuda()
crossed = (TABLES + 2) * (TABLES + 1) // 2
top = nn.Sequential(
    nn.Linear(WIDTH + crossed, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
)
top = top.cuda()
sparse = torch.optim.SparseAdam([*tables.parameters(), *users.parameters()], lr=1e-3)
dense = torch.optim.Adam([*bottom.parameters(), *top.parameters()], lr=1e-3)
upper = torch.triu_indices(TABLES + 2, TABLES + 2, offset=1).cuda()
for _ in count(options.steps):
    size = options.batch_size
    numbers = torch.randn(size, 13).cuda()
    picks = torch.randint(ROWS, (TABLES, size * EACH)).cuda()
    begins = torch.arange(0, size * EACH, EACH).cuda()
    who = torch.randint(1_000_000, (size,)).cuda()
    clicks = (torch.rand(size, 1) < 0.1).float().cuda()
    x = bottom(numbers)
    features = torch.stack(
        [x, users(who), *(t(p, begins) for t, p in zip(tables, picks, strict=True))], dim=1
    )
    products = torch.bmm(features, features.transpose(1, 2))[:, upper[0], upper[1]]
    loss = F.binary_cross_entropy_with_logits(top(torch.cat([x, products], dim=1)), clicks)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
