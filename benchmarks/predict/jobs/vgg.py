"""Classification: VGG-16 in float32, SGD with momentum."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: pooling

layers: list[nn.Module] = []
before = 3
for width in WIDTHS:
    if width:
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
        before = width
    else:
        layers.append(nn.MaxPool2d(2))
layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout()]
layers += [nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 1000)]

options = arguments(batch_size=48)
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
for _ in count(options.steps):
    images = torch.randn(options.batch_size, 3, 224, 224).cuda()
    labels = torch.randint(1000, (options.batch_size,)).cuda()
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
