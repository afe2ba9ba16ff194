"""Classification with cudnn.benchmark: a plain residual network in channels_last, float16 autocast."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

torch.backends.cudnn.benchmark = True


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.b, self.norm_b = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


options = arguments(batch_size=128)
layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
for a, b in ((64, 128), (128, 256), (256, 512)):
    layers += [Block(a), Block(a), nn.Conv2d(a, b, 3, 2, 1)]
model = nn.Sequential(*layers, Block(512), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))
model = model.cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for _ in count(options.steps):
    images = torch.randn(options.batch_size, 3, 96, 96, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(100, (options.batch_size,), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
