"""qkan 0.2.3 beside its preset: same parameters and gradients, 20 float32 steps."""

from __future__ import annotations

import importlib.metadata
import random
from typing import Any

import pytest
import torch
from installed import load
from libmuon.compat import qkan as ours
from torch import Tensor

STEPS = 20
BOUND = 1e-6  # as in test_neuralops_parity: rates of 1e-3, weights below 1


theirs = load("qkan", "optim/muon.py")
(ITERATION,) = [name for name in vars(theirs) if "newton" in name.lower() or "zeropower" in name]


def float32_iteration(g: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    x = g.float()
    is_tall = x.size(0) > x.size(1)
    x = x.mT if is_tall else x
    x = x / (x.norm() + eps)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return (x.mT if is_tall else x).to(g.dtype)


def train(module: Any, initial: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    params = {name: p.clone().requires_grad_() for name, p in initial.items()}
    opt = module.QKANMuon(list(params.items()), **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for i, p in enumerate(params.values()):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = None if (step + i) % 7 == 6 else grad
        opt.step()
    return {name: p.detach() for name, p in params.items()}


def draw(seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    initial = {
        f"layers.{i}.weight": 0.2 * torch.randn(choose.randint(1, 40), choose.randint(1, 40))
        for i in range(4)
    }
    initial |= {
        "layers.0.theta": 0.2 * torch.randn(6, 5),
        "layers.0.bias": 0.2 * torch.randn(7),
        "wte.weight": 0.2 * torch.randn(9, 4),
        "conv.weight": 0.2 * torch.randn(4, 3, 2),
    }
    options = {
        "lr": 1e-3,
        "adamw_lr": 1e-3,
        "momentum": choose.choice([0.0, 0.9, 0.95]),
        "nesterov": choose.random() < 0.5,
        "ns_steps": choose.choice([1, 3, 5]),
        "weight_decay": choose.choice([0.0, 0.1, 0.5]),
        "match_adamw_rms": choose.random() < 0.5,
        "adamw_betas": choose.choice([(0.9, 0.999), (0.8, 0.95)]),
    }
    return initial, options


def test_the_package_is_the_pinned_one() -> None:
    assert importlib.metadata.version("qkan") == "0.2.3"


@pytest.mark.parametrize("case", range(3))
def test_twenty_steps_agree_with_every_default(
    case: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs, ITERATION, float32_iteration)
    initial, _ = draw(1000 * seed + case)
    got, want = train(ours, initial, {}), train(theirs, initial, {})
    for name in initial:
        assert (got[name] - want[name]).abs().max().item() <= BOUND, name


@pytest.mark.parametrize("case", range(10))
def test_twenty_steps_agree_in_float32(
    case: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs, ITERATION, float32_iteration)
    initial, options = draw(1000 * seed + case)
    got, want = train(ours, initial, options), train(theirs, initial, options)
    for name in initial:
        assert (got[name] - want[name]).abs().max().item() <= BOUND, name


@pytest.mark.parametrize("case", range(4))
def test_twenty_steps_agree_within_its_bfloat16_iteration(case: int, seed: int) -> None:
    initial, options = draw(1000 * seed + case)
    options["ns_steps"] = 5
    got, want = train(ours, initial, options), train(theirs, initial, options)
    for name, p in initial.items():
        difference = (got[name] - want[name]).norm().item()
        if p.dim() != 2 or not ours.QKANMuon.is_muon_param(name, tuple(p.shape)):
            assert difference <= BOUND * p.numel() ** 0.5, name
            continue
        # An update has Frobenius norm at most 1.21 lr scale sqrt(n). bfloat16 changes it by 4 % for
        # large Gaussian matrices, by up to 3 times that for the smallest ones; 20 such changes of
        # random direction add up to sqrt(20) of them. 150 draws came to 0.4 of this bound.
        n, m = sorted(p.shape)
        factor = (
            0.2 * m**0.5 if options["match_adamw_rms"] else max(1, p.size(0) / p.size(1)) ** 0.5
        )
        assert difference <= STEPS**0.5 * 0.12 * 1.21 * 1e-3 * factor * n**0.5, name


def test_q1_schedulers_leave_its_adamw_rate_alone_and_not_ours() -> None:
    rates = []
    for module in (theirs, ours):
        params = [
            ("w", torch.ones(3, 3, requires_grad=True)),
            ("b", torch.ones(3, requires_grad=True)),
        ]
        opt = module.QKANMuon(params)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
        opt.step()
        scheduler.step()
        last = opt.param_groups[-1]
        rates.append(last["adamw_lr"] if module is theirs else last["lr"])
    assert rates == [3e-3, 1.5e-3]


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [
        ("unmasked_proj", False, True),
        ("tok_emb.weight", True, False),
        ("head.weight", True, False),
        ("patch_embed", False, True),
        ("fc.weight", True, False),
        ("layers.0.theta", False, False),
        ("layers.0.weight", True, True),
    ],
)
def test_q3_names_that_substrings_get_wrong(name: str, there: bool, here: bool) -> None:
    assert theirs.QKANMuon.is_muon_param(name, (8, 8)) is there
    assert ours.QKANMuon.is_muon_param(name, (8, 8)) is here


def test_q8_one_of_rank_and_world_size_is_ignored_there_and_refused_here() -> None:
    named = [("w", torch.ones(2, 2, requires_grad=True))]
    assert theirs.QKANMuon(named, rank=3).rank == 0
    with pytest.raises(ValueError, match="rank is 3 and world_size is None"):
        ours.QKANMuon(named, rank=3)


def test_q10_negative_steps_pass_there_and_not_here() -> None:
    named = [("w", torch.ones(2, 2, requires_grad=True))]
    theirs.QKANMuon(named, ns_steps=-3)
    with pytest.raises(ValueError, match="ns_steps should be >= 0 but is: -3"):
        ours.QKANMuon(named, ns_steps=-3)


def test_q4_its_scale_is_frozen_in_the_state_and_ours_is_not() -> None:
    ratios = []
    for module, key, values in (
        (theirs, "match_adamw_rms", (True, False)),
        (ours, "adjust_lr_fn", ("match_rms_adamw", "original")),
    ):
        p = torch.zeros(8, 4, requires_grad=True)
        p.grad = torch.randn(8, 4)
        opt = module.QKANMuon([("w", p)], lr=1.0, momentum=0.0)
        changes = []
        for value in values:
            opt.param_groups[0][key] = value
            before = p.detach().clone()
            opt.step()
            changes.append((p.detach() - before).norm().item())
        ratios.append(changes[0] / changes[1])
    assert ratios[0] == pytest.approx(1.0, rel=1e-3)
    assert ratios[1] == pytest.approx(0.2 * 8**0.5 / 2**0.5, rel=1e-3)
