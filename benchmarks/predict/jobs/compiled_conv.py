"""A small residual network compiled with mode="reduce-overhead" (CUDA graph trees), for inference."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.b, self.norm_b = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


options = arguments(batch_size=64)
model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3), Block(64), Block(64), nn.Conv2d(64, 128, 3, 2, 1), Block(128), Block(128)
)
model = model.half().cuda().eval()
compiled = torch.compile(model, mode="reduce-overhead")
with torch.inference_mode():
    for _ in count(options.steps):
        images = torch.randn(options.batch_size, 3, 256, 256, device="cuda", dtype=torch.half)
        compiled(images).mean()
