"""Masked language modelling: nn.TransformerEncoder with padding, float16 and a GradScaler."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

WORDS, LENGTH, WIDTH = 30522, 256, 768

options = arguments(batch_size=32)
embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
position = nn.Embedding(LENGTH, WIDTH)
layer = nn.TransformerEncoderLayer(WIDTH, 12, 3072, activation="gelu", batch_first=True)
encoder = nn.TransformerEncoder(layer, 12)
head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
model = nn.ModuleList([embed, position, encoder, head]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in count(options.steps):
    tokens = torch.randint(1, WORDS, (options.batch_size, LENGTH))
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (options.batch_size, 1))
    padding = torch.arange(LENGTH) >= lengths
    hidden = (torch.rand(tokens.shape) < 0.15) & ~padding
    targets = tokens.masked_fill(~hidden, -100).cuda(non_blocking=True)
    tokens = tokens.masked_fill(padding, 0).masked_fill(hidden, 103).cuda(non_blocking=True)
    padding = padding.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16):
        x = embed(tokens) + position(torch.arange(LENGTH, device="cuda"))
        logits = head(encoder(x, src_key_padding_mask=padding))
        loss = F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
