"""muonium 0.2.0 beside its preset: same parameters and gradients, 20 float32 steps.

muonium's own iteration is bfloat16 and its kernels need a GPU: here its plain loops run, in float32
and uncompiled. What is left between the two is the rounding of float32 iterations, which differs by
at most some 1e-4 of an update of size lr, and that of the weights: 1e-6 for entries below 1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import muonium
import pytest
import torch
from libmuon.compat import muonium as ours
from muonium.optim.algorithms import base
from muonium.orthogonalize.newton_schulz import ns_loop
from muonium.orthogonalize.polar_express import pe_loop
from torch import Tensor

STEPS = 20
BOUND = 1e-6
# Undecorated: a disabled torch.compile(fullgraph=True) refuses to run.
LOOPS = {
    "newton_schulz": ns_loop._torchdynamo_orig_callable,
    "polar_express": pe_loop._torchdynamo_orig_callable,
}


def zeropower(g: Tensor, steps: int = 5, strategy: str = "newton_schulz") -> Tensor:
    return LOOPS[strategy](g.float(), steps=steps, eps=1e-7)


def foreach_zeropower(gs: list[Tensor], steps: int = 5, strategy: str = "newton_schulz") -> Any:
    return [zeropower(g, steps, strategy) for g in gs]


@pytest.fixture(autouse=True)
def _muonium_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "zeropower", zeropower)
    monkeypatch.setattr(base, "foreach_zeropower", foreach_zeropower)
    with torch._dynamo.config.patch(disable=True):
        yield


def run(module: Any, groups: list[dict[str, Any]], options: dict[str, Any]) -> list[Tensor]:
    """Parameters after 20 steps, of groups whose "params" are initial values."""
    params = [[p.clone().requires_grad_() for p in group["params"]] for group in groups]
    given = [{**group, "params": p} for group, p in zip(groups, params, strict=True)]
    opt = module.Muon(given, **options)
    flat = [p for group in params for p in group]
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for i, p in enumerate(flat):
            # Some gradients are missing now and then, on both sides.
            is_missing = (step + i) % 7 == 6
            grad = torch.randn(p.shape, generator=generator)
            p.grad = None if is_missing else grad
        opt.step()
    return [p.detach() for p in flat]


def draw(seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Groups and constructor options that both packages understand."""
    choose = random.Random(seed)
    torch.manual_seed(seed)

    # Entries below 1: the rounding of a weight after each of 20 steps is part of the bound.
    def weight(*shape: int) -> Tensor:
        return 0.2 * torch.randn(shape)

    def matrix() -> Tensor:
        return weight(choose.randint(1, 40), choose.randint(1, 40))

    groups: list[dict[str, Any]] = [
        {"params": [matrix() for _ in range(3)] + [weight(3, 6, 5)]},
        {"params": [matrix()], "algorithm": "normuon", "muon_beta2": choose.choice([0.9, 0.95])},
        {"params": [weight(4, 3, 2, 2)], "flatten": True, "momentum": 0.8},
        {"params": [weight(7)], "algorithm": "adamw", "lr": 3e-3},
        {"params": [weight(5, 5)], "algorithm": "adam", "amsgrad": True, "wd": 0.02},
    ]
    options = {
        "lr": 1e-3,
        "wd": choose.choice([0.0, 0.1, 0.5]),
        "use_cautious_wd": choose.random() < 0.5,
        "maximize": choose.random() < 0.3,
        "momentum": choose.choice([0.0, 0.9, 0.95]),
        "nesterov": choose.random() < 0.5,
        "ns_steps": choose.choice([1, 3, 5]),
        "orthogonalization_strategy": choose.choice(sorted(LOOPS)),
        "foreach": False,
    }
    return groups, options


@pytest.mark.parametrize("case", range(12))
def test_twenty_steps_agree(case: int, seed: int) -> None:
    groups, options = draw(1000 * seed + case)
    theirs = run(muonium, groups, options)
    mine = run(ours, groups, options | {"decay_lr": "adjusted"})
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max().item() <= BOUND


def test_m9_the_default_decay_is_plain_where_muonium_multiplies_by_the_factor() -> None:
    torch.manual_seed(0)
    groups = [{"params": [torch.randn(36, 4)]}]
    options = {"lr": 1e-3, "wd": 0.5, "use_cautious_wd": False, "momentum": 0.0}
    theirs = run(muonium, groups, options | {"foreach": False})
    mine = run(ours, groups, options)
    undecayed = run(ours, groups, options | {"wd": 0.0})
    # To first order in lr: decay is lr wd a step here, 3 times that in muonium.
    steps_with_grad = sum((step + 0) % 7 != 6 for step in range(STEPS))
    decay = 1e-3 * 0.5 * steps_with_grad * groups[0]["params"][0]
    second_order = decay.abs().max() * 1e-3 * 3 * STEPS * 2
    assert (undecayed[0] - mine[0] - decay).abs().max() <= second_order
    assert (undecayed[0] - theirs[0] - 3 * decay).abs().max() <= 9 * second_order


def test_m28_split_blocks_are_parameters_of_their_own() -> None:
    torch.manual_seed(0)
    whole = 0.2 * torch.randn(12, 5)
    options = {"lr": 1e-3, "wd": 0.0, "foreach": False}
    split = [{"params": [whole], "split_sizes": (3, 9)}]
    (a,), (b,) = run(ours, split, options), run(muonium, split, options)
    assert (a - b).abs().max().item() <= BOUND  # without decay there is no difference
    options["wd"], options["use_cautious_wd"] = 0.5, False
    (a,), (b,) = run(ours, split, options), run(muonium, split, options)
    assert (a - b).abs().max().item() > 100 * BOUND
    blocks = []
    for block in whole.split((3, 9)):
        blocks.append(block.clone().requires_grad_())
    opt = ours.Muon(blocks, lr=1e-3, wd=0.5, use_cautious_wd=False)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        grad = torch.randn(whole.shape, generator=generator)
        for p, g in zip(blocks, grad.split((3, 9)), strict=True):
            p.grad = None if step % 7 == 6 else g.clone()
        opt.step()
    assert (a - torch.cat([p.detach() for p in blocks])).abs().max().item() <= BOUND


@pytest.mark.parametrize("strategy", sorted(LOOPS))
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 8, 5), (1, 7)])
def test_zeropower_agrees_in_float64(shape: tuple[int, ...], strategy: Any) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    want = LOOPS[strategy](x, steps=5, eps=1e-7)
    torch.testing.assert_close(ours.zeropower(x, strategy=strategy), want, rtol=0, atol=1e-12)
