"""muonium 0.2 and 0.1 (as dtensor-muon)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from libmuon.compat.muonium import split_lr_scales
from libmuon.convert.common import (
    LAST_TWO,
    adam_options,
    drop_run_options,
    take_moments,
    take_momentum,
)
from libmuon.convert.model import Parameter, Raw, Source
from libmuon.options import Group, own_options

# ns_coefficients and the factor on the norm.
_STRATEGIES = {"newton_schulz": ("muon", 1.0), "polar_express": ("polar_express", 1.02)}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        {"use_muon", "wd", "lr"} <= group.keys()
        and ("momentum" in group if group["use_muon"] else "betas" in group)
        for group in groups
    )


def _version(groups: Sequence[Mapping[str, Any]]) -> str:
    # 0.1 had one algorithm and therefore no key for it.
    return "0.2" if all("algorithm" in group for group in groups) else "0.1"


def _read(raw: Raw, into: Parameter) -> None:
    if raw.group.take("use_muon"):
        _read_matrix(raw, into)
    else:
        _read_adam(raw, into)


def _read_matrix(raw: Raw, into: Parameter) -> None:
    group = raw.group
    into.algorithm = group.take("algorithm", "muon")
    coefficients, norm_factor = _STRATEGIES[
        group.take("orthogonalization_strategy", "polar_express")
    ]
    into.options = {
        "lr": group.number("lr"),
        "weight_decay": group.number("wd"),
        "momentum": group.number("momentum"),
        "nesterov": group.take("nesterov", True),
        "maximize": group.take("maximize", False),
        "cautious": group.take("use_cautious_wd", True),
        "momentum_form": "heavy_ball",
        "decay_lr": "adjusted",
        "adjust_lr_fn": "original",
        "ns_coefficients": coefficients,
        "ns_steps": group.take("ns_steps", 5),
        "normalization": "add",
        "norm_factor": norm_factor,
        "eps": 1e-7,
        "state_dtype": "float32",
        **_layout(raw, into),
    }
    drop_run_options(group)
    _set_block_decay(raw, into)
    _take_own_options(raw, into)
    take_momentum(raw, into)
    if into.options.get("flatten") and not raw.from_model:
        into.notes.append(
            "muonium stores flattened momenta: if the parameter has more than two dims, give a "
            "model's state dict as the names"
        )
    for key, why in (("step", "no update reads it"), ("lr_ratio", "follows from the shape")):
        if key in raw.state:
            raw.state.take(key)
            into.leave(key, why)
    if "variance_neuron" in raw.state:
        _take_variance(raw, into)


def _layout(raw: Raw, into: Parameter) -> Group:
    flatten, sizes = raw.group.take("flatten", False), raw.group.take("split_sizes", None)
    if sizes is not None:
        return {"split_sizes": tuple(sizes)}
    if flatten:
        return {"flatten": True}
    return dict(LAST_TWO) if raw.is_stack else {}


def _take_own_options(raw: Raw, into: Parameter) -> None:
    """An algorithm's own options; all of muonium's registered ones stand in the group."""
    try:
        own = own_options(into.algorithm)
    except (ValueError, RuntimeError):
        into.problems.append(
            f"algorithm {into.algorithm!r} is not registered; register it before converting "
            "(libmuon.register_algorithm)"
        )
        into.algorithm = "muon"
        return
    for key, default in own.items():
        into.options[key] = raw.group.take(key, default)


def _take_variance(raw: Raw, into: Parameter) -> None:
    statistics = raw.state.take("variance_neuron")
    sizes = into.options.get("split_sizes")
    if sizes is None or raw.shape is None:
        into.keep("variance_neuron", "variance_neuron", statistics)
        return
    # muonium takes them of blocks that are scaled already, libmuon of the bare ones.
    scales = split_lr_scales(sizes, *raw.shape)
    blocks = [b / s**2 for b, s in zip(torch.split(statistics, sizes), scales, strict=True)]
    into.keep("variance_neuron", "variance_neuron / block scale^2", torch.cat(blocks))


def _set_block_decay(raw: Raw, into: Parameter) -> None:
    """muonium decays all blocks by the whole matrix's factor, which then goes into the decay."""
    if "split_sizes" in into.options and raw.shape is not None:
        rows, cols = raw.shape
        into.options["weight_decay"] *= math.sqrt(max(1.0, rows / cols))
        into.options["decay_lr"] = "lr"


def _read_adam(raw: Raw, into: Parameter) -> None:
    group = raw.group
    named = group.take("algorithm", "adamw")
    decoupled = group.take("decoupled_weight_decay", False)
    into.algorithm = "adamw" if decoupled else "adam"
    if named == "adamw" and not decoupled:
        into.notes.append("the file has decoupled_weight_decay off: it continues as coupled Adam")
    into.options = adam_options(group, "wd")
    into.options["amsgrad"] = group.take("amsgrad", False)
    into.options["maximize"] = group.take("maximize", False)
    drop_run_options(group, "has_complex")
    take_moments(raw, into)


SOURCE = Source("muonium", "muonium", _matches, _read, _version)
