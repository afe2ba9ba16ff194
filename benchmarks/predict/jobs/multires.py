"""Inference at many resolutions: a feature pyramid in float16 and channels_last, one image size a step."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


def unit(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(True),
    )


class Pyramid(nn.Module):
    """Four stages; each one's output is added to the upsampled one above it."""

    def __init__(self) -> None:
        super().__init__()
        widths = (96, 192, 384, 768)
        self.stem = unit(3, 48, 6, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(unit(a, b, 3, 2), unit(b, b // 2, 1), unit(b // 2, b), unit(b, b))
            for a, b in zip((48, *widths[:-1]), widths, strict=True)
        )
        self.side = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in widths)
        self.heads = nn.ModuleList(nn.Conv2d(256, 85 * 3, 3, padding=1) for _ in widths)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x, levels = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        above, results = None, []
        for level, side, head in zip(levels[::-1], self.side[::-1], self.heads[::-1], strict=True):
            y = side(level)
            if above is not None:
                y = y + F.interpolate(above, size=y.shape[-2:], mode="nearest")
            above = y
            results.append(head(y))
        return results


options = arguments(batch_size=16, steps=10)
dice = torch.Generator().manual_seed(11)
model = Pyramid().cuda().half().eval().to(memory_format=torch.channels_last)
with torch.inference_mode():
    for _ in count(options.steps):
        high, wide = (32 * int(torch.randint(10, 34, (), generator=dice)) for _ in range(2))
        images = torch.randint(0, 256, (options.batch_size, 3, high, wide), device="cuda", dtype=torch.uint8)
        images = images.to(torch.half, memory_format=torch.channels_last) / 255
        found = model(images)
        scores = torch.cat([level.flatten(2).transpose(1, 2)[..., :4] for level in found], dim=1)
        scores.amax(-1).topk(300).values.cpu()
