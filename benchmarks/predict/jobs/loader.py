"""Classification: a ResNet-18 fed by a DataLoader with workers and pinned memory; an evaluation after it."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Noise with labels."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        dice = torch.Generator().manual_seed(index)
        return torch.randn(3, 224, 224, generator=dice), index % 1000


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.b, self.norm_b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = None
        if stride > 1:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_b(self.b(F.relu(self.norm_a(self.a(x)), inplace=True)))
        return F.relu(y + (self.short(x) if self.short else x), inplace=True)


def main() -> None:
    options = arguments(batch_size=128)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    for a, b, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(a, b, stride), Block(b, b, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rest = options.batch_size // 2  # the last batch of the epoch is a half one
    data = Images((options.steps - 1) * options.batch_size + rest)
    batches = iter(
        DataLoader(data, options.batch_size, num_workers=2, pin_memory=True, persistent_workers=True)
    )
    for _ in count(options.steps):
        images, labels = next(batches)
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = 0
        for images, labels in DataLoader(Images(2 * options.batch_size), options.batch_size, pin_memory=True):
            right += (model(images.cuda()).argmax(-1) == labels.cuda()).sum().item()


if __name__ == "__main__":
    main()
