"""Classification: a MobileNetV3-like network (depthwise, squeeze-and-excite, SiLU, BN) with float16 and a
GradScaler, channels_last, RMSprop, and an exponential average of the weights."""

from __future__ import annotations

import copy

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


def unit(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(inplace=True),
    )


class Excite(nn.Module):
    """Scales channels by what their averages say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """Widen, convolve each channel, narrow."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__()
        wide = 6 * inputs
        self.body = nn.Sequential(
            unit(inputs, wide, 1),
            unit(wide, wide, size, stride, groups=wide),
            Excite(wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.skips else self.body(x)


STAGES = ((24, 2, 3, 2), (40, 3, 5, 2), (80, 3, 3, 2), (112, 3, 5, 1), (192, 4, 5, 2), (320, 1, 3, 1))
layers: list[nn.Module] = [unit(3, 16, 3, 2)]
before = 16
for width, depth, size, stride in STAGES:
    for number in range(depth):
        layers.append(Inverted(before, width, size, stride if number == 0 else 1))
        before = width
layers += [
    unit(before, 1280, 1),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(1280, 1000),
]

options = arguments(batch_size=96)
model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
average = copy.deepcopy(model).eval()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.9, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for _ in count(options.steps):
    images = torch.randn(options.batch_size, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (options.batch_size,), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.01)
