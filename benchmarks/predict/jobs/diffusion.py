"""Diffusion: a U-Net with GroupNorm and self-attention, float16 with a GradScaler, averaged weights."""

from __future__ import annotations

import math

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions between which the time is added."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.a = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.b = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.a(F.silu(self.norm_a(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.short(x) + self.b(F.dropout(F.silu(self.norm_b(y)), 0.1, self.training))


class Attention(nn.Module):
    """Every pixel looks at every other."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, high, wide = x.shape
        q, k, v = (
            y.view(batch, self.heads, width // self.heads, high * wide).transpose(2, 3)
            for y in self.qkv(self.norm(x)).chunk(3, dim=1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(batch, width, high, wide)
        return x + self.out(y)


class Denoiser(nn.Module):
    """Three levels, attention at the two lower ones."""

    def __init__(self, base: int = 128) -> None:
        super().__init__()
        widths, time = (base, 2 * base, 4 * base), 4 * base
        self.base = base
        self.time = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, base, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        before = base
        for number, width in enumerate(widths):
            look = Attention(width) if number else nn.Identity()
            self.down.append(nn.ModuleList([Residual(before, width, time), look]))
            self.shrink.append(nn.Conv2d(width, width, 3, 2, 1) if number < 2 else nn.Identity())
            before = width
        self.middle = Residual(before, before, time)
        self.up = nn.ModuleList()
        for number, width in reversed(list(enumerate(widths))):
            look = Attention(width) if number else nn.Identity()
            self.up.append(nn.ModuleList([Residual(before + width, width, time), look]))
            before = width
        self.head = nn.Sequential(nn.GroupNorm(32, base), nn.SiLU(), nn.Conv2d(base, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(self.base // 2, device=x.device) / (self.base // 2))
        angles = when[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x, kept = self.stem(x), []
        for (residual, look), shrink in zip(self.down, self.shrink, strict=True):
            x = look(residual(x, time))
            kept.append(x)
            x = shrink(x)
        x = self.middle(x, time)
        for residual, look in self.up:
            left = kept.pop()
            if x.shape[-1] != left.shape[-1]:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = look(residual(torch.cat([x, left], dim=1), time))
        return self.head(x)


options = arguments(batch_size=32)
model = Denoiser().cuda()
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
scaler = torch.amp.GradScaler("cuda")
noise_level = torch.linspace(1e-4, 0.02, 1000, device="cuda").neg().add(1).cumprod(0)
for _ in count(options.steps):
    images = torch.randn(options.batch_size, 3, 64, 64, device="cuda")
    when = torch.randint(1000, (options.batch_size,), device="cuda")
    noise = torch.randn_like(images)
    level = noise_level[when][:, None, None, None]
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.mse_loss(model(level.sqrt() * images + (1 - level).sqrt() * noise, when), noise)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    average.update_parameters(model)
model.eval()
with torch.inference_mode():
    x = torch.randn(options.batch_size, 3, 64, 64, device="cuda")
    for when in range(3):
        x = x - 0.1 * model(x, torch.full((len(x),), when, device="cuda"))
