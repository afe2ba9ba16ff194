"""Language modelling: a three-layer LSTM (cuDNN) in float32, truncated back-propagation, tied embedding."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH = 33278, 1024, 128

options = arguments(batch_size=64, steps=10)
embed = nn.Embedding(WORDS, WIDTH)
lstm = nn.LSTM(WIDTH, WIDTH, num_layers=3, dropout=0.3)
head = nn.Linear(WIDTH, WORDS)
head.weight = embed.weight
model = nn.ModuleList([embed, lstm, head]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = None
for _ in count(options.steps):
    tokens = torch.randint(WORDS, (LENGTH + 1, options.batch_size)).cuda()
    if state is not None:
        state = tuple(part.detach() for part in state)
    output, state = lstm(F.dropout(embed(tokens[:-1]), 0.3), state)
    loss = F.cross_entropy(head(output).flatten(0, 1), tokens[1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
