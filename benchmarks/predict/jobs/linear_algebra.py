"""Batched linear algebra: Cholesky, QR, SVD, eigenvalues, least squares, LU and their gradients."""

from __future__ import annotations

import torch
from job import arguments, count

options = arguments(batch_size=512, steps=6)
for step in count(options.steps):
    size = 96 if step % 2 == 0 else 64
    a = torch.randn(options.batch_size, size, size, device="cuda", requires_grad=True)
    b = torch.randn(options.batch_size, size, 16, device="cuda")
    positive = a @ a.mT + size * torch.eye(size, device="cuda")
    lower = torch.linalg.cholesky(positive)
    solved = torch.cholesky_solve(b, lower)
    q, r = torch.linalg.qr(a)
    values = torch.linalg.eigvalsh(positive)
    direct = torch.linalg.solve(positive, b)
    total = (
        solved.sum()
        + q.sum()
        + r.sum()
        + values.sum()
        + direct.sum()
        + torch.linalg.slogdet(positive)[1].sum()
    )
    total.backward()
    with torch.no_grad():
        torch.linalg.svd(a[: options.batch_size // 16], full_matrices=False)
        large = torch.randn(4096, 4096, device="cuda")
        torch.linalg.lstsq(large[:, :2048], large[:, 2048:])
        torch.linalg.svdvals(large[:1024, :1024])
        torch.linalg.inv(large)
        torch.linalg.eigh(large[:1024, :1024] + large[:1024, :1024].T)
