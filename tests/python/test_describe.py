"""The report of what an optimizer does with every parameter."""

from __future__ import annotations

import libmuon
from torch import nn


def test_b2_c3_description_says_who_why_and_how_fast():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 10))
    groups = [
        {
            "params": [("conv", model[0].weight)],
            "flatten": True,
            "lr": 0.5,
            "lr_multiplier": 0.5,
            "weight_decay": 0.1,
            "reasons": ["weight of Conv2d"],
        },
        {"params": [("fc", model[2].weight)], "split_sizes": (5, 3, 2), "lr": 1.0},
        {
            "params": [("bias", model[0].bias), ("frozen", model[2].bias)],
            "algorithm": "adamw",
            "lr": 0.25,
            "weight_decay": 0.5,
        },
    ]
    model[2].bias.requires_grad_(False)
    lines = libmuon.Muon(groups).describe().splitlines()
    header, conv, fc, bias = lines[0], lines[2], lines[3], lines[4]
    assert header.split() == [
        "name", "shape", "matrices", "algorithm", "why", "lr", "lr*wd", "factor"
    ]  # fmt: skip
    assert conv.split() == ["conv", "8x3x3x3", "8x27", "muon", "weight", "of", "Conv2d", "0.25",
                            "0.05", "1"]  # fmt: skip
    assert "5x8 + 3x8 + 2x8" in fc
    assert bias.split() == ["bias", "8", "-", "adamw", "0.25", "0.125", "1"]
    assert "muon: 2 parameters, 296 elements" in lines
    assert "adamw: 1 parameter, 8 elements" in lines
    assert "frozen: 1 parameter, 10 elements" in lines
