"""The report of what an optimizer does with every parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from libmuon.options import Group, is_elementwise, named_parameters
from libmuon.spec import spec_text

_HEADER = ("name", "shape", "matrices", "algorithm", "why", "lr", "lr*wd", "factor")


def shape_factors(group: Group, param: Tensor, name: str) -> list[float]:
    """The factor on `lr` of each matrix shape in a parameter; 1 for elementwise algorithms."""
    if is_elementwise(group["algorithm"]):
        return [1.0]
    factors: list[float] = torch.ops.muon.shape_factors(spec_text(group), list(param.shape), name)
    return factors


def effective_lrs(group: Group, param: Tensor, name: str) -> list[float]:
    """The product lr * lr_multiplier * shape factor of each matrix shape in a parameter."""
    lr = float(group["lr"]) * group["lr_multiplier"]
    return [lr * factor for factor in shape_factors(group, param, name)]


def describe_groups(groups: Sequence[Group]) -> str:
    """A table with one line a parameter, and one of totals for each algorithm."""
    rows: list[tuple[str, ...]] = [_HEADER]
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for index, group in enumerate(groups):
        reasons = group.get("reasons") or []
        for position, (_, name, param) in enumerate(named_parameters([group], start=index)):
            why = reasons[position] if position < len(reasons) else group.get("reason", "")
            rows.append(_row(group, name, param, str(why)))
            kind = group["algorithm"] if param.requires_grad else "frozen"
            totals[kind][0] += 1
            totals[kind][1] += param.numel()
    return "\n".join([*_aligned(rows), "", *_totals(totals)])


def _row(group: Group, name: str, param: Tensor, why: str) -> tuple[str, ...]:
    factors = shape_factors(group, param, name)
    lrs = effective_lrs(group, param, name)
    wd = float(group["weight_decay"])
    decays = [(lr if group["decay_lr"] == "adjusted" else float(group["lr"])) * wd for lr in lrs]
    return (
        name,
        "x".join(map(str, param.shape)) or "scalar",
        _matrices(group, param, name),
        group["algorithm"] if param.requires_grad else f"{group['algorithm']} (frozen)",
        why,
        _numbers(lrs),
        _numbers(decays),
        _numbers(factors),
    )


def _matrices(group: Group, param: Tensor, name: str) -> str:
    if is_elementwise(group["algorithm"]):
        return "-"
    flat = torch.ops.muon.matrix_shapes(spec_text(group), list(param.shape), name)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for batch, rows, cols in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        counts[rows, cols] += batch
    return " + ".join(
        f"{rows}x{cols}" if count == 1 else f"{count} of {rows}x{cols}"
        for (rows, cols), count in counts.items()
    )


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _totals(totals: dict[str, list[int]]) -> list[str]:
    return [
        f"{kind}: {count} parameter{'s' * (count != 1)}, {numel:,} elements"
        for kind, (count, numel) in totals.items()
    ]
