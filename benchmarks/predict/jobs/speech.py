"""Speech recognition: 2-D convolutions, a bidirectional GRU over packed sequences, CTC loss."""

from __future__ import annotations

import torch
from job import arguments, count
from torch import nn
from torch.nn import functional as F

options = arguments(batch_size=32)
front = nn.Sequential(
    nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)),
    nn.BatchNorm2d(32),
    nn.Hardtanh(0, 20, inplace=True),
    nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)),
    nn.BatchNorm2d(32),
    nn.Hardtanh(0, 20, inplace=True),
)
gru = nn.GRU(32 * 41, 512, num_layers=4, bidirectional=True, batch_first=True)
head = nn.Linear(1024, 29)
model = nn.ModuleList([front, gru, head]).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for _ in count(options.steps):
    lengths = torch.randint(400, 1000, (options.batch_size,)).sort(descending=True).values
    sounds = torch.randn(options.batch_size, 1, 161, int(lengths[0]), device="cuda")
    x = front(sounds).flatten(1, 2).transpose(1, 2)
    lengths = (lengths + 1) // 2
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    x, _ = nn.utils.rnn.pad_packed_sequence(gru(packed)[0], batch_first=True)
    logits = F.log_softmax(head(x), dim=-1).transpose(0, 1)
    sizes = torch.randint(20, 80, (options.batch_size,))
    targets = torch.randint(1, 29, (int(sizes.sum()),)).cuda()
    loss = F.ctc_loss(logits, targets, lengths, sizes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
