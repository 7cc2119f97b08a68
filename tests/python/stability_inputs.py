"""Fifteen kinds of matrices that iterations in low precision find hard.

The worst are coherent: repeated rows and all-positive products of low rank, where rounding errors
line up. Small matrices are harder than large ones for some forms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _spectrum(n: int, m: int, sigma: Tensor) -> Tensor:
    """Prescribed singular values, padded with zeros, between random orthogonal factors."""
    k = len(sigma)
    u, _ = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(m, k, dtype=torch.float64))
    return (u * sigma) @ v.mT


def _log(first: float, last: float, count: int) -> Tensor:
    return torch.logspace(first, last, count, dtype=torch.float64)


def _normal(n: int, m: int) -> Tensor:
    return torch.randn(n, m, dtype=torch.float64)


def _heavy_tail(n: int, m: int) -> Tensor:
    """Student's t with 1.2 degrees of freedom: normal over the root of chi-squared over 1.2."""
    gamma = torch._standard_gamma(torch.full((n, m), 0.6, dtype=torch.float64))
    return _normal(n, m) / (2 * gamma / 1.2).sqrt()


def _repeated_rows(n: int, m: int) -> Tensor:
    return _normal(4, m).repeat(n // 4, 1)


def _noise(n: int, m: int) -> Tensor:
    return 1e-3 * _normal(n, m)


def _relu_rank_8(n: int, m: int) -> Tensor:
    return _normal(n, 8) @ _normal(8, m).relu()


def _positive_rank_64(n: int, m: int) -> Tensor:
    return (_normal(n, 64).abs() + 1) @ (_normal(64, m) + 1).relu()


INPUTS: dict[str, Callable[[int, int], Tensor]] = {
    "gaussian": _normal,
    "heavy_tail": _heavy_tail,
    "row_scales": lambda n, m: _normal(n, m) * (3 * _normal(n, 1)).exp(),
    "linear": lambda n, m: _spectrum(n, m, torch.linspace(0, 0.5, n, dtype=torch.float64)),
    "log_3": lambda n, m: _spectrum(n, m, _log(0, -3, n)),
    "log_7": lambda n, m: _spectrum(n, m, _log(0, -7, n)),
    "half_zero": lambda n, m: _spectrum(n, m, _log(0, -2, n // 2)),
    "rank_10": lambda n, m: _spectrum(n, m, _log(0, -1, 10)),
    "two_spikes": lambda n, m: _spectrum(n, m, torch.cat([_log(0, -0.5, 2), _log(-4, -7, n - 2)])),
    "repeated_rows": _repeated_rows,
    "repeated_rows_noise": lambda n, m: _repeated_rows(n, m) + _noise(n, m),
    "duplicated_rows": lambda n, m: _normal(n // 2, m).repeat_interleave(2, 0),
    "ones_noise": lambda n, m: 1 + _noise(n, m),
    "relu_rank_8": _relu_rank_8,
    "positive_rank_64": _positive_rank_64,
}


def stability_input(name: str, n: int, m: int) -> Tensor:
    """The input in float64, divided by its Frobenius norm."""
    x = INPUTS[name](n, m)
    return x / torch.linalg.matrix_norm(x)
