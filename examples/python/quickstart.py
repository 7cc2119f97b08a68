"""Muon for a whole model: Muon for its matrices, AdamW for the rest, one learning rate."""

import libmuon
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = libmuon.Muon(model, lr=3e-3)
print(optimizer.describe())

x = torch.randn(256, 16)
for _ in range(200):
    loss = nn.functional.mse_loss(model(x), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
