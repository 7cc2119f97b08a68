"""What libmuon is compared with: definitions in float64, and torch's own bfloat16 iteration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Triple = tuple[float, float, float]


def polynomial(sigma: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """The scalar polynomial of a schedule, one triple a step."""
    for a, b, c in coefficients:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def steepest_slope(coefficients: Sequence[Triple], norm_factor: float = 1.0) -> float:
    """The largest |p'| of a schedule's polynomial, counted from any of its steps on."""
    x = torch.linspace(0, 1 / norm_factor, 2001, dtype=torch.float64)
    slopes = []
    for a, b, c in coefficients:
        slopes.append(a + 3 * b * x**2 + 5 * c * x**4)
        x = a * x + b * x**3 + c * x**5
    product, steepest = torch.ones_like(x), 1.0
    for slope in reversed(slopes):
        product = product * slope
        steepest = max(steepest, product.abs().max().item())
    return steepest


def divisor(norm: Tensor, normalization: str, norm_factor: float, eps: float) -> Tensor:
    """What a matrix of Frobenius norm `norm` is divided by."""
    scaled = norm * norm_factor
    return scaled + eps if normalization == "add" else scaled.clamp(min=eps)


def exact_orthogonalize(
    x: Tensor,
    coefficients: Sequence[Triple],
    normalization: str = "clamp",
    norm_factor: float = 1.0,
    eps: float = 1e-7,
) -> Tensor:
    """U p(S / norm) V^H of the matrices in the last two dims, in float64 or complex128."""
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    d = divisor(torch.linalg.vector_norm(s, dim=-1, keepdim=True), normalization, norm_factor, eps)
    s = torch.where(d > 0, s / d, 0.0)
    return (u * polynomial(s, coefficients).unsqueeze(-2)) @ vh


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`, in double precision."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = torch.linalg.vector_norm(got.to(wide) - expected.to(wide))
    return (difference / torch.linalg.vector_norm(expected.to(wide))).item()


class Spectrum:
    """An eigendecomposition of X X^T, from which the exact result of any schedule is cheap.

    With X = U S V^T and p(s) = s h(s^2): U p(S) V^T = U h(S^2) U^T X. As h is a polynomial, the
    eigenvalues need no relative accuracy near zero.
    """

    def __init__(self, x: Tensor) -> None:
        wide = x.double()
        self._x = wide if x.shape[0] <= x.shape[1] else wide.mT
        self._is_tall = x.shape[0] > x.shape[1]
        self._eigenvalues, self._u = torch.linalg.eigh(self._x @ self._x.mT)
        self._rotated = self._u.mT @ self._x  # U^T X

    def orthogonalized(self, coefficients: Sequence[Triple], norm_factor: float = 1.0) -> Tensor:
        """The exact result for normalisation by norm_factor |X|_F."""
        scale = norm_factor * torch.linalg.vector_norm(self._x)
        square = self._eigenvalues / scale**2
        factor = torch.ones_like(square)  # h of the steps so far; square is s^2 after them
        for a, b, c in coefficients:
            step = a + b * square + c * square**2
            factor, square = factor * step, square * step**2
        result = self._u @ (factor.unsqueeze(1) * self._rotated) / scale
        return result.mT if self._is_tall else result


def torch_bfloat16(x: Tensor, coefficients: Sequence[Triple], norm_factor: float = 1.0) -> Tensor:
    """torch.optim.Muon's iteration for any schedule, its bfloat16 products emulated.

    bfloat16 products are hundreds of times slower than float32 ones on some CPUs; the product of
    two bfloat16 numbers is exact in float32, so only sums are rounded otherwise than there.
    """

    def rounded(y: Tensor) -> Tensor:
        return y.bfloat16().float()

    y = rounded(x.float())
    y = y.mT if y.shape[0] > y.shape[1] else y
    norm = rounded(torch.linalg.vector_norm(y))
    y = rounded(y / rounded(norm * norm_factor))
    for a, b, c in coefficients:
        gram = rounded(y @ y.mT)
        update = rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        y = rounded(torch.addmm(y, update, y, beta=a))
    return y.mT if x.shape[0] > x.shape[1] else y
