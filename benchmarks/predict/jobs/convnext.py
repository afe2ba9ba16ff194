"""Classification: a ConvNeXt (depthwise 7 × 7, LayerNorm, GELU) under bfloat16 autocast, two image sizes."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


class Norm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise convolution, then a two-layer perceptron over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.down(F.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)
layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=4), Norm(widths[0])]
for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
    if number:
        layers += [Norm(widths[number - 1]), nn.Conv2d(widths[number - 1], width, 2, stride=2)]
    layers += [Block(width) for _ in range(depth)]
layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)]

options = arguments(batch_size=64)
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
for step in count(options.steps):
    side = 224 if step % 2 == 0 else 192
    images = torch.randn(options.batch_size, 3, side, side, device="cuda")
    labels = torch.randint(1000, (options.batch_size,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
