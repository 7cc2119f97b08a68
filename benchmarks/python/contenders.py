"""The optimizers that the benchmarks compare, each behind the same two calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import libmuon
import torch
from torch import Tensor

LR, WEIGHT_DECAY, MOMENTUM = 1e-3, 0.1, 0.95
COEFFICIENTS, STEPS, EPS = (3.4445, -4.775, 2.0315), 5, 1e-7


def newton_schulz(x: Tensor) -> Tensor:
    """The plain standard form, in the dtype of ``x``."""
    tall = x.size(0) > x.size(1)
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class PlainLoop:
    """Muon as one would write it in torch: one matrix at a time, float32."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.momenta = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        for p, b in zip(self.params, self.momenta, strict=True):
            assert p.grad is not None
            b.lerp_(p.grad, 1 - MOMENTUM)
            update = newton_schulz(p.grad.lerp(b, MOMENTUM))
            p.mul_(1 - LR * WEIGHT_DECAY)
            p.add_(update, alpha=-LR * max(1.0, p.size(0) / p.size(1)) ** 0.5)


@dataclass(frozen=True)
class Contender:
    """A name and how to build a stepper over parameters."""

    name: str
    build: Callable[[list[Tensor]], object]
    is_muon: bool = True


def contenders() -> list[Contender]:
    """libmuon first, then its peers on a CPU."""
    options = {"lr": LR, "weight_decay": WEIGHT_DECAY}
    return [
        Contender("libmuon.Muon", lambda params: libmuon.Muon(params, **options)),
        Contender("torch.optim.Muon", lambda params: torch.optim.Muon(params, **options)),
        Contender("plain float32 loop", PlainLoop),
        Contender(
            "torch.optim.AdamW fused",
            lambda params: torch.optim.AdamW(params, fused=True, **options),
            is_muon=False,
        ),
    ]
