"""qkan: QKANMuon, of one rank or of several (one file a rank)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.compat.qkan import QKANMuon
from libmuon.convert.common import keller_iteration, take_moments, take_momentum
from libmuon.convert.model import Parameter, Raw, Shape, Source, option_keys

_OPTIONS = {
    "lr",
    "adamw_lr",
    "momentum",
    "nesterov",
    "ns_steps",
    "weight_decay",
    "match_adamw_rms",
    "adamw_betas",
    "adamw_eps",
}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return all(option_keys(group) >= _OPTIONS for group in groups)


def _read(raw: Raw, into: Parameter) -> None:
    group = raw.group
    values = {key: group.take(key) for key in _OPTIONS}
    decay = float(values["weight_decay"])
    if _is_matrix(raw, into):
        match_rms = _matches_rms(raw, into, bool(values["match_adamw_rms"]))
        into.options = {
            "lr": float(values["lr"]),
            "weight_decay": decay,
            "momentum": float(values["momentum"]),
            "nesterov": values["nesterov"],
            "momentum_form": "heavy_ball",
            "adjust_lr_fn": "match_rms_adamw" if match_rms else "original",
            **keller_iteration(values["ns_steps"]),
        }
        take_momentum(raw, into)
        return
    into.algorithm = "adamw"
    into.options = {
        "lr": float(values["adamw_lr"]),
        "weight_decay": decay,
        "betas": tuple(values["adamw_betas"]),
        "eps": float(values["adamw_eps"]),
    }
    # qkan's schedulers move `lr` alone; a scheduler on the new group starts at its own lr.
    if "initial_lr" in group:
        group.take("initial_lr")
        into.metadata["initial_lr"] = into.options["lr"]
    take_moments(raw, into)


def _is_matrix(raw: Raw, into: Parameter) -> bool:
    """The state says where qkan has routed a parameter; without one, its rule is asked."""
    if "momentum_buffer" in raw.state or "exp_avg" in raw.state:
        return "momentum_buffer" in raw.state
    if raw.shape is not None and into.name is not None:
        return QKANMuon.is_muon_param(into.name, raw.shape)
    into.problems.append(
        "without state, name and shape it cannot be told whether Muon or AdamW trains it: give "
        "every rank's file, and a model's state dict as the names"
    )
    return False


def _matches_rms(raw: Raw, into: Parameter, wanted: bool) -> bool:
    """Which factor qkan applies: the one that it has frozen in the state."""
    scale = raw.state.take("scale", None)
    if scale is None or raw.shape is None:
        return wanted
    factors = _factors(raw.shape)
    for match_rms in (wanted, not wanted):
        if math.isclose(scale, factors[match_rms], rel_tol=1e-6):
            into.leave("scale", "follows from the shape")
            return match_rms
    into.problems.append(f"the factor {scale} that qkan has stored is that of another shape")
    return wanted


def _factors(shape: Shape) -> dict[bool, float]:
    rows, cols = shape
    return {True: 0.2 * math.sqrt(max(rows, cols)), False: math.sqrt(max(1.0, rows / cols))}


SOURCE = Source("qkan", "qkan.optim.QKANMuon", _matches, _read, sharded=True)
