"""Generation: a DCGAN of 64 × 64 images with two Adam optimizers, float32."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

options = arguments(batch_size=512)
generator = nn.Sequential(
    nn.ConvTranspose2d(128, 1024, 4, 1, 0, bias=False),
    *(
        layer
        for a, b in ((1024, 512), (512, 256), (256, 128))
        for layer in (nn.BatchNorm2d(a), nn.ReLU(True), nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False))
    ),
    nn.BatchNorm2d(128),
    nn.ReLU(True),
    nn.ConvTranspose2d(128, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).cuda()
discriminator = nn.Sequential(
    nn.Conv2d(3, 128, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    *(
        layer
        for a, b in ((128, 256), (256, 512), (512, 1024))
        for layer in (
            nn.Conv2d(a, b, 4, 2, 1, bias=False),
            nn.BatchNorm2d(b),
            nn.LeakyReLU(0.2, inplace=True),
        )
    ),
    nn.Conv2d(1024, 1, 4, 1, 0, bias=False),
    nn.Flatten(),
).cuda()
rule = {"lr": 2e-4, "betas": (0.5, 0.999)}
makes = torch.optim.Adam(generator.parameters(), **rule)
judges = torch.optim.Adam(discriminator.parameters(), **rule)
real = torch.ones(options.batch_size, 1, device="cuda")
fake = torch.zeros(options.batch_size, 1, device="cuda")
for _ in count(options.steps):
    images = torch.randn(options.batch_size, 3, 64, 64).cuda()
    judges.zero_grad()
    F.binary_cross_entropy_with_logits(discriminator(images), real).backward()
    made = generator(torch.randn(options.batch_size, 128, 1, 1, device="cuda"))
    F.binary_cross_entropy_with_logits(discriminator(made.detach()), fake).backward()
    judges.step()
    makes.zero_grad()
    F.binary_cross_entropy_with_logits(discriminator(made), real).backward()
    makes.step()
