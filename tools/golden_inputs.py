"""Matrices, parameters and gradients of the golden cases.

Every entry is exact in bf16, fp16, fp32 and fp64 (tiny_4x2 not in fp16), so that a case is the
same problem in every precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def eighths(shape: tuple[int, ...], seed: int) -> Tensor:
    """Non-zero multiples of 1/8 in [-2, 2] from a fixed linear congruential generator."""
    values: list[float] = []
    state = seed * 7919 + 17
    while len(values) < math.prod(shape):
        state = (state * 1103515245 + 12345) % 2**31
        k = (state >> 16) % 33 - 16
        if k:
            values.append(k / 8)
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


TALL_PARAM = tensor([[0.5, -0.25], [1, 0.75], [-0.5, 0.125], [0.25, -1]])
TALL_GRADS = [
    tensor([[1, 2], [-1, 0.5], [0.25, -0.75], [0.5, 1.5]]),
    tensor([[-0.5, 1], [0.75, 0.25], [1.25, -0.5], [-1, 2]]),
    tensor([[0.25, -1.5], [1.5, 0.5], [-0.75, 1], [0.5, 0.75]]),
]
TALL, OTHER_TALL = TALL_GRADS[:2]

MATRICES = {
    "square_4x4": eighths((4, 4), 1014),
    "tall_4x2": TALL,
    "tall_6x3": eighths((6, 3), 43),
    "wide_2x4": TALL.mT,
    "wide_3x6": eighths((3, 6), 49),
    "row_1x2": tensor([[3, 4]]),
    "row_1x5": eighths((1, 5), 5),
    "col_5x1": eighths((5, 1), 6),
    "one_1x1": tensor([[-2]]),
    "batch_3x4x2": torch.stack(TALL_GRADS),
    "batch_2x2x3x5": eighths((2, 2, 3, 5), 44),
    "batch_with_zero_matrix": torch.stack([TALL, torch.zeros_like(TALL), OTHER_TALL]),
    "identity_3x3": torch.eye(3, dtype=torch.float64),
    "graded_diagonal_4x4": torch.diag(
        torch.tensor([1, 1 / 4, 1 / 16, 1 / 64], dtype=torch.float64)
    ),
    "rank1_4x3": tensor([[1], [-2], [0.5], [1]]) @ tensor([[1, 2, -1]]),
    "large_16x48": eighths((16, 48), 7),
    "zero_3x2": torch.zeros(3, 2, dtype=torch.float64),
    "tiny_4x2": TALL * 2.0**-25,
    "big_entries_4x2": TALL * 2.0**10,
}

# Parameters of the optimizer cases: shape, seed of the parameter, seeds of its three gradients.
# Seeds were picked so that every momentum is well conditioned.
PARAMS: dict[str, tuple[tuple[int, ...], int, list[int]]] = {
    name: (shape, seed, [1000 + 10 * seed + k for k in (1, 2, 3)])
    for name, shape, seed in [
        ("wide", (3, 5), 91),
        ("square", (4, 4), 67),
        ("row", (1, 4), 8),
        ("col", (4, 1), 190),
        ("experts", (2, 3, 2), 141),
        ("conv", (6, 1, 2, 2), 154),
        ("fused", (6, 3), 184),
    ]
} | {
    name: ((3,), seed, [seed + k for k in (1, 2, 3)])
    for name, seed in [("bias", 500), ("gain", 600)]
}
MATRIX_PARAMS = ("tall", "wide", "square", "row", "col")


def param_and_grads(name: str) -> tuple[Tensor, list[Tensor]]:
    if name == "tall":
        return TALL_PARAM, TALL_GRADS
    shape, seed, grad_seeds = PARAMS[name]
    return eighths(shape, seed) / 2, [eighths(shape, s) for s in grad_seeds]
