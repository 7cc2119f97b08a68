"""neuralops 1.6.0 beside its preset: same parameters and gradients, 20 float32 steps on a CPU."""

from __future__ import annotations

import importlib.metadata
import random
import warnings

import pytest
import torch
from installed import load
from libmuon.compat import neuralops as ours
from torch import Tensor

STEPS = 20
# Weights stay below 1, so one rounding is 2**-25 at most. Either side rounds 20 decays and updates,
# and theirs the factor 1 - lr decay too: 5 * 20 * 2**-25 = 3e-6 if all erred alike, and a third of
# that as they do not; 200 draws of weights and options came to 7.2e-7. Float32 iterations differ by
# some 1e-6 of an update of size lr, which is lost in it.
BOUND = 1e-6


theirs = load("neuralops", "trainer/optimizers/muon.py")


def weights(choose: random.Random, count: int) -> list[Tensor]:
    return [0.2 * torch.randn(choose.randint(1, 40), choose.randint(1, 40)) for _ in range(count)]


def train(opt: torch.optim.Optimizer, seed: int) -> list[Tensor]:
    flat = [p for group in opt.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        for i, p in enumerate(flat):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = None if (step + i) % 7 == 6 else grad
        opt.step()
    return [p.detach() for p in flat]


def assert_close(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max().item() <= BOUND


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def test_the_package_is_the_pinned_one() -> None:
    assert importlib.metadata.version("neuralops") == "1.6.0"


@pytest.mark.parametrize("case", range(3))
def test_muon_agrees_with_every_default(case: int, seed: int) -> None:
    torch.manual_seed(1000 * seed + case)
    initial = weights(random.Random(1000 * seed + case), 4)
    assert_close(train(ours.Muon(leaves(initial)), case), train(theirs.Muon(leaves(initial)), case))


@pytest.mark.parametrize("case", range(8))
def test_muon_agrees(case: int, seed: int) -> None:
    choose = random.Random(1000 * seed + case)
    torch.manual_seed(1000 * seed + case)
    initial = weights(choose, 4)
    options = {
        "lr": 1e-3,
        "momentum": choose.choice([0.0, 0.9, 0.95]),
        "weight_decay": choose.choice([0.0, 0.01, 0.5]),
        "ns_steps": choose.choice([1, 3, 5, 6]),
    }
    assert_close(
        train(ours.Muon(leaves(initial), **options), case),
        train(theirs.Muon(leaves(initial), **options), case),
    )


@pytest.mark.parametrize("case", range(6))
def test_muon_and_adamw_agree(case: int, seed: int) -> None:
    choose = random.Random(1000 * seed + case)
    torch.manual_seed(1000 * seed + case)
    matrices = weights(choose, 3)
    others = [0.2 * torch.randn(5), 0.2 * torch.randn(3, 2, 2), *weights(choose, 1)]
    decay = choose.choice([0.0, 0.1])
    results = []
    for module in (ours, theirs):
        groups = [
            {"params": leaves(matrices), "optimizer": "muon", "lr": 1e-3, "weight_decay": decay},
            {"params": leaves(others), "optimizer": "adamw", "lr": 1e-3, "betas": (0.8, 0.99)},
        ]
        results.append(train(module.MuonAdamW(groups), case))
    assert_close(*results)


def test_the_factory_agrees_under_its_own_routing() -> None:
    results = []
    for module, options in ((ours, {"routing": "all_2d"}), (theirs, {})):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(9, 8), torch.nn.Linear(8, 6), torch.nn.Conv1d(6, 4, 3)
        )
        torch.nn.init.normal_(model[0].weight, std=0.2)
        results.append(train(module.create_muon_adamw_optimizer(model, lr_muon=1e-3, **options), 0))
    assert_close(*results)


def test_n2_an_unknown_kind_trains_nothing_there_and_is_refused_here() -> None:
    p = torch.ones(2, 2, requires_grad=True)
    p.grad = torch.ones(2, 2)
    theirs.MuonAdamW([{"params": [p], "optimizer": "sgd"}]).step()
    assert torch.equal(p.detach(), torch.ones(2, 2))
    with pytest.raises(ValueError, match="one of 'muon', 'adamw'"):
        ours.MuonAdamW([{"params": [p], "optimizer": "sgd"}])


def test_n1_the_factory_takes_embeddings_for_matrices_there_and_not_here() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8, bias=False))
    on_muon = [
        sum(len(g["params"]) for g in opt.param_groups if g["optimizer"] == "muon")
        for opt in (
            theirs.create_muon_adamw_optimizer(model),
            ours.create_muon_adamw_optimizer(model),
        )
    ]
    assert on_muon == [2, 1]


def test_n6_callers_dicts_are_changed_there_and_not_here() -> None:
    keys = []
    for module in (theirs, ours):
        group = {"params": [torch.ones(2, 2, requires_grad=True)], "optimizer": "muon"}
        module.MuonAdamW([group])
        keys.append(sorted(group))
    assert keys == [
        ["lr", "momentum", "ns_steps", "optimizer", "params", "weight_decay"],
        ["optimizer", "params"],
    ]


def test_n4_a_bfloat16_momentum_saturates_there_and_not_here() -> None:
    settled = []
    for module in (theirs, ours):
        p = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
        with warnings.catch_warnings(action="ignore"):  # ours speaks of bfloat16 weights
            opt = module.Muon([p], lr=0.0)
        for _ in range(400):
            p.grad = torch.ones_like(p)
            opt.step()
        settled.append(opt.state[p]["momentum_buffer"].float().max().item())
    assert settled[0] < 19
    assert settled[1] == pytest.approx(20, rel=1e-5)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 7), (30, 30)])
def test_zeropower_agrees(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    want = theirs.zeropower_via_newtonschulz5(x)
    torch.testing.assert_close(ours.zeropower_via_newtonschulz5(x), want, rtol=0, atol=1e-4)
