"""Prints every allocation of a training step and of a generation, for test_values.py.

Run as values_allocations.py FOLDER-OF-inside RESULT FOLLOWED: with FOLLOWED = 1, values are followed.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        x = x + (q @ k.transpose(1, 2)).masked_fill(mask, float("-inf")).softmax(-1) @ v
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, words=500, width=64):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], device=ids.device, dtype=torch.bool), 1)
        x = self.embedding(ids) + torch.arange(ids.shape[1], device=ids.device)[None, :, None]
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, mask, use_reentrant=False)
        return self.head(self.norm(x))


def train():
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(3):
        ids = torch.randint(0, 500, (4, 32 + step), device="cuda")
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        # Not under autocast, which frees its copies of weights in the order of their addresses.
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss.item()
    return model


@torch.no_grad()
def generate(model):
    ids = torch.randint(0, 500, (3, 8), device="cuda")
    going = torch.ones(3, dtype=torch.long, device="cuda")
    for _ in range(6):
        logits = model.eval()(ids)[:, -1] / 0.7
        top = torch.topk(logits, 20)[0]
        logits = logits.masked_fill(logits < top[:, -1:], float("-inf"))
        token = torch.multinomial(logits.softmax(-1), 1)[:, 0] * going
        ids = torch.cat([ids, token[:, None]], -1)
        going = going.mul((token != 499).long())
        str(going)
        going.max().item()
    return ids.cpu()


def main():
    if sys.argv[3] == "1":
        sys.path.insert(0, sys.argv[1])
        from inside.values import Values

        Values(torch).begin()
    torch.zeros(1, device="cuda")
    torch.cuda.memory._record_memory_history(context=None)
    generate(train())
    (trace,) = torch.cuda.memory._snapshot()["device_traces"]
    with open(sys.argv[2], "w") as file:
        json.dump([(event["action"], event["size"]) for event in trace], file)


if __name__ == "__main__":
    main()
