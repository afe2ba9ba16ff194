"""Video classification: a residual network of 3-D convolutions under bfloat16 autocast."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3 × 3 × 3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm3d(outputs)
        self.b, self.norm_b = nn.Conv3d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm3d(outputs)
        self.short = nn.Conv3d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_a(self.a(x)), inplace=True)
        return F.relu(self.norm_b(self.b(y)) + self.short(x))


options = arguments(batch_size=16)
model = nn.Sequential(
    nn.Conv3d(3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False),
    nn.BatchNorm3d(64),
    nn.ReLU(True),
    Block(64, 64, 1),
    Block(64, 64, 1),
    Block(64, 128, 2),
    Block(128, 128, 1),
    Block(128, 256, 2),
    Block(256, 512, 2),
    nn.AdaptiveAvgPool3d(1),
    nn.Flatten(),
    nn.Linear(512, 400),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in count(options.steps):
    clips = torch.randn(options.batch_size, 3, 16, 112, 112, device="cuda")
    labels = torch.randint(400, (options.batch_size,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(clips), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
