"""Training of a model of timm by name, channels_last and bfloat16 autocast."""

from __future__ import annotations

import sys

import timm
import torch
from job import arguments, count
from torch.nn import functional as F

name = sys.argv.pop(1)
options = arguments(batch_size=64)
model = timm.create_model(name).cuda().to(memory_format=torch.channels_last).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in count(options.steps):
    images = torch.randn(options.batch_size, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (options.batch_size,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
