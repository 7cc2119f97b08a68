"""Checks of a group's parameters against its options, all offenders in one message."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from libmuon.options import Group, is_elementwise, named_parameters
from libmuon.spec import spec_text

# Devices for which libmuon has loops of its own.
FUSED_DEVICES = ("cpu",)
_PACKAGE = __name__.split(".")[0]


def check_parameters(groups: Sequence[Group], start: int = 0) -> None:
    """Raises where a parameter does not fit its group.

    Args:
        groups: complete groups.
        start: the index of the first of them in the optimizer, for names of unnamed parameters.
    """
    offenders: list[tuple[str, Tensor]] = []
    for group, name, param in named_parameters(groups, start):
        _check_fused(group, name, param)
        _check_rounding(group, name, param)
        if is_elementwise(group["algorithm"]):
            continue
        if not _says_how(group) and _matrix_ndim(group, param) != 2:
            offenders.append((name, param))
        elif not offenders:
            _check_complex_dim(group, name, param)
            torch.ops.muon.matrix_shapes(spec_text(group), list(param.shape), name)
    if offenders:
        raise ValueError(_offenders_text(offenders))


def warn_of_rounding(groups: Sequence[Group]) -> None:
    """Says once, at the line that called into libmuon, that bfloat16 weights lose small steps."""
    plain = [g for g in groups if not (g["stochastic_rounding"] or g["master"])]
    if any(p.dtype == torch.bfloat16 for group in plain for p in group["params"]):
        warnings.warn(
            "bfloat16 parameters are rounded to 8 significant bits after every step: updates below "
            "1/256 of a weight do not move it. Where that matters, master='split' keeps 16 more "
            "bits, stochastic_rounding=True rounds without a bias, or keep float32 parameters and "
            "train under torch.autocast.",
            stacklevel=_level_of_caller() - 1,
        )


def _level_of_caller() -> int:
    """The `stacklevel`, seen from here, of the first frame that is not of this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    return level


def _says_how(group: Group) -> bool:
    dims = (group["rows"], group["cols"], group["batch_dims"])
    return bool(group["flatten"]) or any(choice is not None for choice in dims)


def _matrix_ndim(group: Group, param: Tensor) -> int:
    return param.ndim - (group["complex_dim"] is not None)


def _check_complex_dim(group: Group, name: str, param: Tensor) -> None:
    if group["complex_dim"] not in (None, -1, param.ndim - 1):
        raise ValueError(
            f"complex_dim should be the last dim, -1 or {param.ndim - 1}, but is: "
            f"{group['complex_dim']} ({name} with shape {tuple(param.shape)})"
        )


def _check_fused(group: Group, name: str, param: Tensor) -> None:
    if group["fused"] and not (param.device.type in FUSED_DEVICES and param.is_floating_point()):
        raise RuntimeError(
            "`fused=True` requires all the params to be floating point Tensors of supported "
            f"devices: {list(FUSED_DEVICES)} but {param.dtype} and {param.device.type} ({name}); "
            "fused=None takes what there is"
        )


def _check_rounding(group: Group, name: str, param: Tensor) -> None:
    if group["stochastic_rounding"] and group["master"] is not None:
        raise ValueError(
            "stochastic_rounding and master='split' are two ways to the same end; choose one "
            f"({name})"
        )
    if param.dtype == torch.float16 and (group["stochastic_rounding"] or group["master"]):
        raise NotImplementedError(
            "stochastic_rounding and master='split' are for bfloat16 parameters, but the dtype of "
            f"{name} is: {param.dtype}; keep float32 parameters and train under torch.autocast"
        )


def _offenders_text(offenders: Iterable[tuple[str, Tensor]]) -> str:
    offenders = list(offenders)
    lines = [
        "Muon only supports 2D parameters whereas we found a parameter with size: "
        f"{offenders[0][1].size()}. Of these parameters it cannot tell how they are matrices:"
    ]
    lines += [f"  {name}: {tuple(param.shape)}" for name, param in offenders]
    if any(param.ndim >= 3 for _, param in offenders):
        lines.append(
            "Three or more dimensions: say in the group what a matrix is, with rows=(...) and "
            "cols=(...), flatten=True (rows = dim 0, columns = the rest: convolutions) or "
            "batch_dims=k (the first k dims are a batch: experts, stacked layers)."
        )
    if any(param.ndim < 2 for _, param in offenders):
        lines.append(
            "Biases, norms and scalars: put them into a group with algorithm='adamw' and a "
            "learning rate of its own, or pass the whole nn.Module instead of its parameters."
        )
    return "\n".join(lines)
