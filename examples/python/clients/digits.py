"""scikit-learn's digits: 1797 pictures of 8 x 8, split in the same way for everyone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

TRAIN = 1400


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures in [-1, 1], [n, 8, 8], and labels: those to train on, then those to test on."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(pictures[order].reshape(-1, 8, 8) / 8 - 1).float()
    y = torch.from_numpy(labels[order]).long()
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


def export(path: Path) -> None:
    """Writes what examples/cpp/digits.cpp reads: a picture is 64 bytes (0 to 16) and its label."""
    x, y, x_test, y_test = load()
    pixels = ((torch.cat([x, x_test]) + 1) * 8).round().flatten(1)
    rows = torch.cat([pixels, torch.cat([y, y_test]).unsqueeze(1)], dim=1)
    path.write_bytes(rows.to(torch.uint8).numpy().tobytes())
