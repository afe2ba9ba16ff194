"""Training of a T5 of transformers (encoder and decoder, relative positions) with Adafactor."""

from __future__ import annotations

import torch
from job import arguments, count
from transformers import T5Config, T5ForConditionalGeneration

options = arguments(batch_size=16)
model = T5ForConditionalGeneration(
    T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
).cuda()
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
for step in count(options.steps):
    source = torch.randint(32000, (options.batch_size, (256, 192)[step % 2])).cuda()
    target = torch.randint(32000, (options.batch_size, 128)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=source, labels=target).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
