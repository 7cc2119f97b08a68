"""Muon in trainers that build their optimizer themselves."""

from __future__ import annotations

import libmuon
import torch
from torch import nn


def small_model():
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8), nn.Linear(8, 11)
    )


def test_h13_trainers_can_ask_for_a_class_or_a_factory():
    model = small_model()
    options = {"lr": 3e-4, "momentum": 0.9}
    by_class = libmuon.Muon(*[model], **options)  # optimizer_cls(kwargs.pop("model"), **kwargs)
    by_factory = libmuon.MuonFactory()(model, **options)
    with_rules = libmuon.MuonFactory()(model, rules=[("1.weight", "adamw")], **options)
    assert repr(by_factory) == repr(by_class)
    assert isinstance(by_factory, torch.optim.Optimizer)
    names = [
        n for g in with_rules.param_groups if g["algorithm"] == "muon" for n in g["param_names"]
    ]
    assert names
    assert "1.weight" not in names
