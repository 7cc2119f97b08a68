"""microsoft/dion: its Muon and NorMuon, with the AdamW beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import LAST_TWO, take_moments, take_momentum
from libmuon.convert.model import Parameter, Raw, Source
from libmuon.options import Group

_OPTIONS = {"lr", "mu", "beta1", "beta2", "weight_decay", "algorithm", "epsilon"}
_FACTORS = {"spectral_norm": "spectral_unclamped", "rms_norm": "match_rms_adamw", None: "unscaled"}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return all(group.keys() >= _OPTIONS for group in groups)


def _read(raw: Raw, into: Parameter) -> None:
    group = raw.group
    algorithm = group.take("algorithm")
    common = {"lr": group.number("lr"), "weight_decay": group.number("weight_decay")}
    momentum, epsilon = group.number("mu"), group.number("epsilon")
    betas = (group.number("beta1"), group.number("beta2"))
    cautious = group.take("cautious_wd", False)
    steps = group.number("step", 0)
    beta2 = group.number("muon_beta2", 0.95)
    layout = _layout(raw, into)
    nesterov, factor = group.take("nesterov", False), group.take("adjust_lr", "spectral_norm")
    if algorithm == "adamw":
        into.algorithm = "adamw"
        into.options = {**common, "betas": betas, "eps": epsilon}
        if cautious and common["weight_decay"]:
            into.problems.append("cautious_wd of an AdamW group: libmuon's AdamW decays everywhere")
        count = raw.state.take("step_dev", None)
        take_moments(raw, into, "momentum", "variance", steps if count is None else count)
        return
    if algorithm not in ("muon", "normuon"):
        into.problems.append(
            f"algorithm {algorithm!r} is not available in libmuon; it would start anew as AdamW"
        )
        into.algorithm, into.options = "adamw", {**common, "betas": betas, "eps": epsilon}
        for key in raw.state.rest:
            raw.state.take(key)
            into.leave(key, f"of {algorithm}")
        return
    into.algorithm = algorithm
    into.options = {
        **common,
        **layout,
        "momentum": momentum,
        "nesterov": nesterov,
        "momentum_form": "heavy_ball",
        "cautious": cautious,
        "adjust_lr_fn": _FACTORS[factor],
        "ns_coefficients": "polar_express",
        "ns_steps": 5,
        "normalization": "add",
        "norm_factor": 1.02,
        "eps": epsilon,
    }
    into.notes.append(
        "which polynomial dion used is not in the file: its default, Polar Express, is assumed; "
        "use_polar_express=False is: set ns_coefficients=you and norm_factor=1"
    )
    take_momentum(raw, into, "momentum")
    if algorithm == "normuon":
        into.options["muon_beta2"] = beta2
        _take_variance(raw, into)


def _layout(raw: Raw, into: Parameter) -> Group:
    heads, sizes = raw.group.take("num_heads", None), raw.group.take("split_sizes", None)
    flatten = raw.group.take("flatten", False)
    layout: Group = {}
    if heads is not None and heads > 1:
        layout["num_heads"] = heads
    if sizes is not None:
        layout["split_sizes"] = tuple(sizes)
    if raw.is_stack:
        layout |= {"flatten": True} if flatten else LAST_TWO
    return layout


def _take_variance(raw: Raw, into: Parameter) -> None:
    key = "variance_neuron"
    if key not in raw.state:
        return
    statistics = raw.state.take(key)
    if into.options.get("flatten"):
        into.problems.append(
            f"{key} is of single kernels, while libmuon's rows are those of the flattened weight"
        )
    elif _has_scaled_blocks(raw, into.options):
        into.problems.append(
            f"{key} of split blocks: whether dion scaled them depends on its version (#113)"
        )
    else:
        into.keep(key, key, statistics)


def _has_scaled_blocks(raw: Raw, options: Group) -> bool:
    """Whether blocks have another shape factor than the whole matrix."""
    sizes, kind = options.get("split_sizes"), options["adjust_lr_fn"]
    if sizes is None or raw.shape is None or kind == "unscaled":
        return False
    rows, cols = raw.shape

    def factor(count: int) -> float:
        return math.sqrt(max(count, cols) if kind == "match_rms_adamw" else count)

    return any(factor(size) != factor(rows) for size in sizes)


SOURCE = Source("dion", "microsoft/dion", _matches, _read)
