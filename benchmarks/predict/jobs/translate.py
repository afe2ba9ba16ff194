"""Translation: nn.Transformer with padding masks and varying lengths, label smoothing; greedy decoding."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH = 37000, 512

options = arguments(batch_size=64, steps=10)
dice = torch.Generator().manual_seed(31)
embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
body = nn.Transformer(WIDTH, 8, 6, 6, 2048, 0.1, batch_first=True)
model = nn.ModuleList([embed, body]).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) ** -0.5, step * 4000**-1.5)
)


def sentences() -> torch.Tensor:
    longest = int(torch.randint(24, 128, (), generator=dice))
    tokens = torch.randint(1, WORDS, (options.batch_size, longest), generator=dice)
    lengths = torch.randint(longest // 2, longest + 1, (options.batch_size, 1), generator=dice)
    return tokens.masked_fill(torch.arange(longest) >= lengths, 0)


for _ in count(options.steps):
    model.train()
    source, target = sentences().cuda(), sentences().cuda()
    given, wanted = target[:, :-1], target[:, 1:]
    causal = nn.Transformer.generate_square_subsequent_mask(given.shape[1], device="cuda")
    output = body(
        embed(source),
        embed(given),
        tgt_mask=causal,
        src_key_padding_mask=source == 0,
        tgt_key_padding_mask=given == 0,
        memory_key_padding_mask=source == 0,
    )
    logits = F.linear(output, embed.weight)
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
model.eval()
with torch.no_grad():
    memory = body.encoder(embed(source))
    made = torch.ones(options.batch_size, 1, dtype=torch.long, device="cuda")
    for _ in range(12):
        logits = F.linear(body.decoder(embed(made), memory)[:, -1], embed.weight)
        made = torch.cat([made, logits.argmax(-1, keepdim=True)], dim=1)
