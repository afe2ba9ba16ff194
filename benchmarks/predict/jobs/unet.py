"""Segmentation of medical images: a U-Net in channels_last under bfloat16 autocast, AdamW."""

from __future__ import annotations

from itertools import pairwise

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


def pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Four levels down and up again, joined at each level."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 1024)) -> None:
        super().__init__()
        self.down = nn.ModuleList(pair(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        backwards = widths[::-1]
        steps = list(pairwise(backwards))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in steps)
        self.join = nn.ModuleList(pair(a, b) for a, b in steps)
        self.head = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, level in enumerate(self.down):
            x = level(x if number == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for up, join, left in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([left, up(x)], dim=1))
        return self.head(x)


options = arguments(batch_size=8)
model = UNet().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in count(options.steps):
    images = torch.randn(options.batch_size, 3, 384, 384, device="cuda").to(memory_format=torch.channels_last)
    masks = torch.randint(4, (options.batch_size, 384, 384), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
