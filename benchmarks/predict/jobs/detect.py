"""Detection: boxes are matched on the GPU and losses taken of boolean selections, so values decide shapes."""

from __future__ import annotations

from itertools import pairwise

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

SIDE, STRIDE, CLASSES = 512, 16, 20


def overlaps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    corner = torch.maximum(a[:, None, :2], b[None, :, :2])
    shared = (torch.minimum(a[:, None, 2:], b[None, :, 2:]) - corner).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (a, b)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)


options = arguments(batch_size=16)
widths = (3, 64, 128, 256, 512)
layers: list[nn.Module] = []
for a, b in pairwise(widths):
    layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.1, True)]
    layers += [nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.1, True)]
model = nn.Sequential(*layers, nn.Conv2d(512, 3 * (5 + CLASSES), 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
grid = (
    torch.cartesian_prod(torch.arange(SIDE // STRIDE), torch.arange(SIDE // STRIDE)).flip(-1) * STRIDE
    + STRIDE // 2
)
sizes = torch.tensor([48.0, 112.0, 224.0])
centres = grid.repeat_interleave(3, dim=0).float()
halves = sizes.repeat(len(grid))[:, None] / 2
anchors = torch.cat([centres - halves, centres + halves], dim=1).cuda()
for _ in count(options.steps):
    images = torch.rand(options.batch_size, 3, SIDE, SIDE).cuda()
    output = model(images).permute(0, 2, 3, 1).reshape(options.batch_size, len(anchors), 5 + CLASSES)
    loss = output.new_zeros(())
    for found in output:
        number = int(torch.randint(1, 12, ()))
        corners = torch.rand(number, 2) * SIDE * 0.7
        boxes = torch.cat([corners, corners + 32 + torch.rand(number, 2) * 200], dim=1).cuda()
        labels = torch.randint(CLASSES, (number,)).cuda()
        best, which = overlaps(anchors, boxes).max(dim=1)
        positive = best > 0.4
        loss = loss + F.smooth_l1_loss(found[positive, :4], (boxes[which] - anchors)[positive] / 64)
        loss = loss + F.cross_entropy(found[positive, 5:], labels[which[positive]], reduction="sum")
        hard = F.softplus(found[~positive, 4]).topk(64).values
        loss = loss + hard.mean() + F.softplus(-found[positive, 4]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
