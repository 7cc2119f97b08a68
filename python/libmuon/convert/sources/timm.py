"""timm: its Muon with the AdamW fallback."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import SCHEDULES, drop_run_options, take_moments, take_momentum
from libmuon.convert.model import Parameter, Raw, Shape, Source
from libmuon.options import Group

_OPTIONS = {"momentum", "nesterov", "ns_steps", "ns_coefficients", "safety_factor", "conv_mode"}
_FACTORS = {
    "original": "original",
    "match_rms_adamw": "match_rms_adamw",
    "rms_to_rms": "spectral_unclamped",
    None: "unscaled",
}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return all(group.keys() >= _OPTIONS for group in groups)


def _version(groups: Sequence[Mapping[str, Any]]) -> str:
    return "" if all("fallback_lr_scale" in group for group in groups) else "1.0.25 or older"


def _read(raw: Raw, into: Parameter) -> None:
    group = raw.group
    lr = group.number("lr")
    values = {key: group.take(key) for key in (*sorted(_OPTIONS), "eps", "adjust_lr_fn", "betas")}
    decay = group.number("weight_decay")
    algo, scale_eps = group.take("algo", "muon"), group.take("scale_eps", False)
    normalize_spatial = group.take("normalize_spatial", True)
    fallback = _fallback_scale(raw, lr)
    drop_run_options(group, "verbose")
    if not _is_matrix(raw, into):
        _read_fallback(raw, into, lr * fallback, decay, values)
        if "initial_lr" in group:
            into.metadata["initial_lr"] = group.number("initial_lr") * fallback
        return
    if algo != "muon":
        into.problems.append(f"algo={algo!r} is not available in libmuon; the momentum is")
        for key in ("step", "exp_avg_sq"):
            if key in raw.state:
                raw.state.take(key)
                into.leave(key, f"of {algo}")
    into.options = {
        "lr": lr,
        "weight_decay": decay,
        "momentum": float(values["momentum"]),
        "nesterov": values["nesterov"],
        "ns_coefficients": _coefficients(values["ns_coefficients"]),
        "ns_steps": values["ns_steps"],
        "adjust_lr_fn": _FACTORS[values["adjust_lr_fn"]],
        "norm_factor": float(values["safety_factor"]),
        "normalization": "add" if scale_eps else "clamp",
        "eps": float(values["eps"]),
    }
    matrix = raw.shape
    if raw.shape is not None and raw.is_stack:
        matrix = _set_layout(into.options, raw.shape, values["conv_mode"], normalize_spatial)
    if scale_eps and matrix is not None:
        into.options["eps"] *= math.sqrt(matrix[1] / matrix[0])
    take_momentum(raw, into)


def _coefficients(value: Any) -> Any:
    if isinstance(value, str):
        return SCHEDULES[value]
    nested = isinstance(value[0], Sequence)
    return tuple(tuple(row) for row in value) if nested else tuple(value)


def _set_layout(options: Group, shape: Shape, mode: str, normalize_spatial: bool) -> Shape:
    """How a kernel is matrices; returns the shape of one."""
    spatial = math.prod(shape[2:])
    if mode == "flatten":
        options["flatten"] = True
        return (shape[0], shape[1] * spatial)
    options |= {"rows": (0,), "cols": (1,)}
    if normalize_spatial:
        options["lr_multiplier"] = spatial**-0.5
    return shape[:2]


def _fallback_scale(raw: Raw, lr: float) -> float:
    """AdamW's learning rate as a multiple of lr; older files have it as `adamw_lr`."""
    own = raw.group.number("adamw_lr", None)
    if "fallback_lr_scale" in raw.group:
        return raw.group.number("fallback_lr_scale")
    base = raw.group.get("initial_lr", lr)
    return own / float(base) if own is not None and base else 1.0


def _is_matrix(raw: Raw, into: Parameter) -> bool:
    """As timm has decided at the parameter's first gradient, else as it would."""
    group_says = not raw.group.take("use_fallback", False) and raw.group.take("use_muon", None)
    if "use_muon" in raw.state:
        into.leave("use_muon", "stands in the group's algorithm")
        return bool(raw.state.take("use_muon"))
    if group_says is not None:
        return bool(group_says)
    if raw.shape is None:
        into.problems.append(
            "without state it cannot be told whether Muon or AdamW trains it: give a model's "
            "state dict as the names"
        )
        return False
    return _is_suitable(raw.shape)


def _is_suitable(shape: Shape) -> bool:
    if len(shape) < 2 or sum(size > 1 for size in shape) < 2 or 1 in shape[:2]:
        return False
    sides = (shape[0], math.prod(shape[1:]))
    return min(sides) >= 4 and max(sides) <= 128 * min(sides)


def _read_fallback(
    raw: Raw, into: Parameter, lr: float, decay: float, values: Mapping[str, Any]
) -> None:
    into.algorithm = "adamw"
    into.options = {
        "lr": lr,
        "weight_decay": decay,
        "betas": tuple(values["betas"]),
        "eps": float(values["eps"]),
    }
    if values["nesterov"]:
        into.problems.append("timm trains it with NAdamW (nesterov=True), libmuon has AdamW")
    take_moments(raw, into)


SOURCE = Source("timm", "timm.optim.Muon", _matches, _read, _version)
