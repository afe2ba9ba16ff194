"""Solving equations: a Fourier neural operator (rfft2, complex weights, irfft2) in float32."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


class Spectral(nn.Module):
    """Multiplies the low frequencies by complex weights."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.low = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width**2)
        self.high = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width**2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        result = torch.zeros_like(spectrum)
        result[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.low)
        result[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(result, s=x.shape[-2:])


class Operator(nn.Module):
    """Four spectral layers, each beside a 1 × 1 convolution."""

    def __init__(self, width: int = 64, modes: int = 24) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.spectral = nn.ModuleList(Spectral(width, modes) for _ in range(4))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))
        self.project = nn.Sequential(nn.Conv2d(width, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)


options = arguments(batch_size=16)
model = Operator().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in count(options.steps):
    side = (256, 241, 192)[step % 3]
    fields = torch.randn(options.batch_size, 3, side, side, device="cuda")
    wanted = torch.randn(options.batch_size, 1, side, side, device="cuda")
    made = model(fields)
    loss = ((made - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
