"""The state dicts of tests/fixtures, and runs that go on from what they are converted to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from libmuon.convert import build_optimizer
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parent.parent / "fixtures"

# What each fixture needs to be told; nothing tells which polynomial dion has used.
SAYS: dict[str, dict[str, Any]] = {
    "torch_muon": {},
    "torch_adamw": {"matrices": "none"},
    "keller": {},
    "keller_ranks": {},
    "normuon": {},
    "moonlight": {},
    "dion": {},
    "dion_normuon": {"overrides": {"ns_coefficients": "you", "norm_factor": 1.0}},
    "timm": {},
    "pytorch_optimizer": {},
    "pytorch_optimizer_40": {},
    "muonium": {},
    "muonium_01": {},
    "neuralops": {},
    "neuralops_muon": {},
    "qkan": {},
    "qkan_ranks": {},
}


def load(name: str) -> dict[str, Any]:
    """A fixture; its `names` are in the optimizer's order."""
    if not FOLDER.exists():
        pytest.skip("needs the repository's fixtures")
    return torch.load(FOLDER / f"{name}.pt", weights_only=True)


def arguments(name: str, fixture: Mapping[str, Any]) -> dict[str, Any]:
    """What `convert_state_dict` is given for a fixture beside its state dicts."""
    has_names = "param_names" in fixture["state_dicts"][0]["param_groups"][0]
    names = {} if has_names else {"names": fixture["names"]}
    return {**names, "shapes": fixture["weights"], **SAYS[name]}


def go_on(
    fixture: Mapping[str, Any], state_dict: dict[str, Any], **options: Any
) -> dict[str, Tensor]:
    """Differences to the source's own weights after the fixture's three steps, by name."""
    params = {name: nn.Parameter(p.clone()) for name, p in fixture["weights"].items()}
    optimizer = build_optimizer(state_dict, params.items(), **options)
    for gradients in fixture["gradients"]:
        for name, p in params.items():
            p.grad = gradients[name].clone()
        optimizer.step()
    return {name: p.detach() - fixture["after"][name] for name, p in params.items()}


def same(a: Any, b: Any) -> bool:
    """Whether two state dicts are equal, tensors bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        bits = [t.reshape(-1).view(torch.uint8) for t in (a, b)]  # torch compares no float8
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def largest(differences: Mapping[str, Tensor]) -> float:
    """The largest difference; NaN if there is one, which Python's max would lose."""
    return torch.stack([difference.abs().max() for difference in differences.values()]).max().item()
