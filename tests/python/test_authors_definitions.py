"""Variants of Muon against plain transcriptions of what their authors define, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libmuon
import pytest
import torch
from reference import exact_orthogonalize
from torch import Tensor

KELLER = [(3.4445, -4.775, 2.0315)] * 5
LR, DECAY, MU = 0.03, 0.2, 0.9
SHAPES = ((6, 4), (4, 9), (5, 5))
Rule = Callable[[Tensor, Tensor, dict[str, Tensor]], None]


def keller_momentum(g: Tensor, state: dict[str, Tensor]) -> Tensor:
    """KellerJordan's: an average, and the Nesterov point on it."""
    b = state.setdefault("b", torch.zeros_like(g))
    b.lerp_(g, 1 - MU)
    return g.lerp(b, MU)


def heavy_ball(g: Tensor, state: dict[str, Tensor]) -> Tensor:
    b = state.setdefault("b", torch.zeros_like(g))
    b.mul_(MU).add_(g)
    return g + MU * b


def moonlight(p: Tensor, g: Tensor, state: dict[str, Tensor]) -> None:
    """Moonlight (arXiv 2502.16982): update RMS 0.2 for every shape, decoupled decay."""
    u = exact_orthogonalize(heavy_ball(g, state), KELLER, "add")
    p.mul_(1 - LR * DECAY).sub_(LR * 0.2 * max(p.shape) ** 0.5 * u)


def normuon(p: Tensor, g: Tensor, state: dict[str, Tensor]) -> None:
    """NorMuon (arXiv 2510.05491): row-wise second moment, Frobenius norm kept."""
    u = exact_orthogonalize(keller_momentum(g, state), KELLER, "add")
    norm = u.norm()
    v = state.setdefault("v", torch.zeros_like(u[:, :1]))
    v.lerp_(u.square().mean(-1, keepdim=True), 1 - 0.95)
    u = u / (v.sqrt() + 1e-10)
    u = u * norm / (u.norm() + 1e-10)
    p.mul_(1 - LR * DECAY).sub_(LR * max(1.0, p.size(0) / p.size(1)) ** 0.5 * u)


def cautious(p: Tensor, g: Tensor, state: dict[str, Tensor]) -> None:
    """Cautious weight decay (arXiv 2510.12402): only where the update goes the decay's way."""
    u = exact_orthogonalize(keller_momentum(g, state), KELLER)
    decay = torch.where(u * p > 0, p, torch.zeros_like(p))
    p.sub_(LR * DECAY * decay + LR * max(1.0, p.size(0) / p.size(1)) ** 0.5 * u)


def polar_express(p: Tensor, g: Tensor, state: dict[str, Tensor]) -> None:
    """Polar Express (arXiv 2505.16932): the norm times 1.01, five of its polynomials."""
    rows = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ]
    # The paper's safety factor: no step but the eighth may meet a singular value above its bound.
    rows = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in rows]
    u = exact_orthogonalize(keller_momentum(g, state), rows, "add", 1.01)
    p.mul_(1 - LR * DECAY).sub_(LR * max(1.0, p.size(0) / p.size(1)) ** 0.5 * u)


@pytest.mark.parametrize(
    ("rule", "options", "tolerance"),
    [
        (
            moonlight,
            {
                "adjust_lr_fn": "match_rms_adamw",
                "momentum_form": "heavy_ball",
                "normalization": "add",
            },
            1e-11,
        ),
        # The eps of the second moment is 1e-8 here: a relative 1e-8 / sqrt(v), v about 1 / cols.
        (normuon, {"algorithm": "normuon", "normalization": "add"}, 1e-6),
        (cautious, {"cautious": True}, 1e-11),
        (
            polar_express,
            {"ns_coefficients": "polar_express_paper", "ns_steps": 5},
            1e-11,
        ),
    ],
)
def test_five_steps_equal_the_definition(
    rule: Rule, options: dict[str, Any], tolerance: float
) -> None:
    params = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in SHAPES]
    want = [p.detach().clone() for p in params]
    states: list[dict[str, Tensor]] = [{} for _ in params]
    opt = libmuon.Muon(params, lr=LR, weight_decay=DECAY, momentum=MU, **options)
    for _ in range(5):
        for p, w, state in zip(params, want, states, strict=True):
            p.grad = torch.randn_like(p)
            rule(w, p.grad, state)
        opt.step()
    for p, w in zip(params, want, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=tolerance, atol=tolerance)
