"""Segmentation in float32: dilated convolutions in parallel, a transposed one, bilinear upsampling."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


def unit(inputs: int, outputs: int, size: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (size // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding, dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Segmenter(nn.Module):
    """A backbone, a pyramid of dilations, and a decoder that joins the early features."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.early = nn.Sequential(unit(3, 64, 7, 2), unit(64, 64), unit(64, 128, stride=2), unit(128, 128))
        self.late = nn.Sequential(
            unit(128, 256, stride=2), unit(256, 256), unit(256, 512, dilation=2), unit(512, 512, dilation=4)
        )
        self.pyramid = nn.ModuleList([unit(512, 128, 1), *(unit(512, 128, dilation=d) for d in (6, 12, 18))])
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(512, 128, 1), nn.ReLU())
        self.join = unit(640, 256, 1)
        self.grow = nn.ConvTranspose2d(256, 128, 4, stride=2, padding=1)
        self.head = nn.Sequential(unit(256, 256), nn.Dropout(0.1), nn.Conv2d(256, classes, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-2:]
        early = self.early(x)
        x = self.late(early)
        pooled = F.interpolate(self.pool(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        x = self.join(torch.cat([*(branch(x) for branch in self.pyramid), pooled], dim=1))
        x = self.head(torch.cat([self.grow(x), early], dim=1))
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


options = arguments(batch_size=8)
model = Segmenter(21).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=options.steps)
for _ in count(options.steps):
    images = torch.randn(options.batch_size, 3, 512, 512, device="cuda")
    masks = torch.randint(21, (options.batch_size, 512, 512), device="cuda")
    loss = F.cross_entropy(model(images), masks, ignore_index=255)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
