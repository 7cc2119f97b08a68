"""The functional core: typed wrappers over ``torch.ops.muon``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from libmuon.optimizer import Coefficients, Dims, Muon
from libmuon.options import Group, check_defaults, is_elementwise, normalize_group
from libmuon.spec import HYPER_OPTIONS, hyper_row, hyper_values, spec_text

_TRIPLE = (3.4445, -4.775, 2.0315)
_EPS = HYPER_OPTIONS.index("eps")


def schedules() -> dict[str, tuple[tuple[float, float, float], ...]]:
    """The named schedules.

    Returns:
        For each name the triple (a, b, c) of every step of X <- aX + (bA + cA^2)X with A = XX^H.
    """
    result = {}
    for name in torch.ops.muon.schedule_names():
        flat = iter(torch.ops.muon.schedule_coefficients(f"schedule={name}"))
        result[name] = tuple(zip(flat, flat, flat, strict=True))
    return result


def orthogonalize(
    tensor: Tensor,
    ns_coefficients: Coefficients = _TRIPLE,
    ns_steps: int | None = None,
    eps: float = 1e-7,
    *,
    normalization: str | None = None,
    norm_factor: float | None = None,
    compute_dtype: str | torch.dtype = "auto",
    form: str = "auto",
    rows: Dims | None = None,
    cols: Dims | None = None,
    flatten: bool = False,
    batch_dims: int | None = None,
    complex_dim: int | None = None,
    split_sizes: Sequence[int] | None = None,
    num_heads: int | None = None,
    split_dim: int = 0,
) -> Tensor:
    """Newton-Schulz orthogonalisation of the matrices in a tensor, without gradients.

    The result has the singular vectors of each matrix and singular values near 1: p(s / |X|_F) for
    the polynomial p of the schedule. The default triple maps them into about [0.7, 1.2]; a 1 x n
    matrix becomes 0.6964 times its unit vector. Zero stays zero.

    Args:
        tensor: matrices [..., rows, cols], or any shape that the layout options turn into matrices;
            real or complex, any strides.
        ns_coefficients: a triple, one triple a step, or a schedule's name.
        ns_steps: number of iterations; None is the schedule's own length, 5 for a single triple.
        eps: lower bound of the norm; 0 makes the result independent of the input's scale.
        normalization: "clamp" or "add"; None is the schedule's.
        norm_factor: factor on the norm; None is the schedule's.
        compute_dtype: "auto" or the dtype whose error bound the result meets.
        form: how the iteration is carried out; "auto" chooses.
        rows: dims that make the rows, other dims than rows and columns being a batch.
        cols: dims that make the columns.
        flatten: rows = dim 0, columns = all other dims.
        batch_dims: the first so many dims are a batch.
        complex_dim: index of the last dim (or -1) if it holds real and imaginary parts.
        split_sizes: sizes of blocks that are matrices of their own.
        num_heads: that many equal blocks instead.
        split_dim: 0 for blocks of rows, 1 for blocks of columns.

    Returns:
        A new tensor of the same shape and dtype.
    """
    options: dict[str, Any] = {
        "ns_coefficients": ns_coefficients,
        "ns_steps": ns_steps,
        "eps": eps,
        "normalization": normalization,
        "norm_factor": norm_factor,
        "compute_dtype": compute_dtype,
        "form": form,
        "rows": rows,
        "cols": cols,
        "flatten": flatten,
        "batch_dims": batch_dims,
        "complex_dim": complex_dim,
        "split_sizes": split_sizes,
        "num_heads": num_heads,
        "split_dim": split_dim,
    }
    if tensor.ndim > 2 and not (flatten or (rows, cols, batch_dims) != (None, None, None)):
        options["batch_dims"] = tensor.ndim - 2 - (complex_dim is not None)
    spec, (row,) = _constants(options)
    with torch.no_grad():
        result: Tensor = torch.ops.muon.orthogonalize(tensor, spec, row[_EPS])
    return result


def step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float | Tensor = 1e-3,
    weight_decay: float | Tensor = 0.1,
    momentum: float | Tensor = 0.95,
    nesterov: bool = True,
    ns_coefficients: Coefficients = _TRIPLE,
    eps: float = 1e-7,
    ns_steps: int | None = None,
    adjust_lr_fn: str | None = None,
    **options: Any,
) -> None:
    """One Muon step over lists of tensors, in place; the caller keeps the momentum buffers.

    Args:
        params: what to update.
        grads: their gradients; parameters without one (None) stay as they are.
        momentum_buffers: as the parameters, zero before the first step.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: factor of the momentum.
        nesterov: whether the update looks ahead.
        ns_coefficients: a triple, one triple a step, or a schedule's name.
        eps: lower bound of the norm.
        ns_steps: number of iterations.
        adjust_lr_fn: factor on `lr` by the matrix's shape.
        **options: any other option of a group of `libmuon.Muon` that concerns its matrices.
    """
    named = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": ns_coefficients,
        "eps": eps,
        "ns_steps": ns_steps,
        "adjust_lr_fn": adjust_lr_fn,
    }
    spec, rows = _constants({**named, **options})
    hyper = torch.tensor(rows, dtype=torch.float64)
    with torch.no_grad():
        torch.ops.muon.muon_(list(params), list(grads), list(momentum_buffers), hyper, spec)


def _constants(given: Mapping[str, Any]) -> tuple[str, list[list[float]]]:
    """The spec text and the rows of numbers of a group with the given options."""
    group = normalize_group(given, _defaults())
    if is_elementwise(group["algorithm"]):
        raise ValueError(f"algorithm should be one for matrices but is: {group['algorithm']!r}")
    return spec_text(group), [hyper_row(hyper_values({"lr": 1.0, **group}))]


# What torch.compiler.assume_constant_result sets, without the seconds that its import takes:
# torch.compile calls the function while it traces and keeps the result.
_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _defaults() -> Group:
    signature = inspect.signature(Muon.__init__)
    return check_defaults({name: p.default for name, p in signature.parameters.items()})
