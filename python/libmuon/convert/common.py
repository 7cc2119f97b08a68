"""What several optimizers have in common, as a reader of their state says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libmuon.convert.model import Fields, Parameter, Raw, as_step
from libmuon.options import Group

QUINTIC = (3.4445, -4.775, 2.0315)
# Schedules of timm and pytorch_optimizer that libmuon has under no name of its own.
SCHEDULES: Mapping[str, Any] = {
    "original": QUINTIC,
    "quintic": "you",
    # Polar Express with another cushion than the paper's table, safety factor 1.01.
    "polar_express": (
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064835, -2.893047735332586, 0.5252849256975648),
        (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
        (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
        (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
        (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
        (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
    ),
    # The same, safety factor 1.02.
    "polar_express_safer": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.0429299351667245, -2.808917465908704, 0.5000178451051299),
        (3.8916678022926563, -2.7724841532176825, 0.5060648178503389),
        (3.285753657755658, -2.3681294933425394, 0.46449024233003117),
        (2.3005307116270983, -1.6111665557258408, 0.3833374427545273),
        (1.8631210546382593, -1.2042160621002727, 0.3421879560523383),
        (1.8382572152247512, -1.1779263289537742, 0.3396513038637379),
        (1.8749999923301852, -1.2499999836060613, 0.374999991275876),
    ),
}

LAST_TWO: Group = {"rows": (-2,), "cols": (-1,)}


def keller_iteration(ns_steps: int = 5) -> Group:
    """KellerJordan's Newton-Schulz iteration, which most others have taken over."""
    return {
        "ns_coefficients": QUINTIC,
        "ns_steps": ns_steps,
        "normalization": "add",
        "norm_factor": 1.0,
        "eps": 1e-7,
    }


def take_momentum(raw: Raw, into: Parameter, key: str = "momentum_buffer") -> None:
    """The momentum, where the parameter has had a gradient."""
    if key in raw.state:
        into.keep("momentum_buffer", key, raw.state.take(key))


def take_moments(
    raw: Raw,
    into: Parameter,
    first: str = "exp_avg",
    second: str = "exp_avg_sq",
    step: Any = None,
) -> None:
    """Adam's moments and step count; `step` is for sources that count once a group."""
    if first not in raw.state:
        if "step" in raw.state:
            into.leave("step", "no moments")
            raw.state.take("step")
        return
    into.keep("exp_avg", first, raw.state.take(first))
    into.keep("exp_avg_sq", second, raw.state.take(second))
    if "max_exp_avg_sq" in raw.state:
        into.keep("max_exp_avg_sq", "max_exp_avg_sq", raw.state.take("max_exp_avg_sq"))
    into.keep("step", "step", as_step(raw.state.take("step") if step is None else step))


def adam_options(group: Fields, decay: str = "weight_decay") -> Group:
    """lr, decay, betas and eps of an Adam group in torch's names."""
    return {
        "lr": group.number("lr"),
        "weight_decay": group.number(decay),
        "betas": tuple(map(float, group.take("betas"))),
        "eps": group.number("eps"),
    }


def drop_run_options(group: Fields, *keys: str) -> None:
    """Takes options that say how a run computes, not what."""
    for key in ("foreach", "fused", "capturable", "differentiable", *keys):
        group.take(key, None)
