"""pytorch_optimizer 3.8 and later: its Muon with AdamW groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import (
    SCHEDULES,
    adam_options,
    drop_run_options,
    take_moments,
    take_momentum,
)
from libmuon.convert.model import Parameter, Raw, Source

_MUON = {"momentum", "nesterov", "ns_steps", "use_adjusted_lr"}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        {"use_muon", "weight_decouple"} <= group.keys()
        and (group.keys() >= _MUON if group["use_muon"] else "betas" in group)
        and group.keys().isdisjoint({"beta2", "update_scale"})
        for group in groups
    )


def _version(groups: Sequence[Mapping[str, Any]]) -> str:
    return "4.1 or newer" if any("ns_method" in group for group in groups) else "3.8 to 4.0"


def _read(raw: Raw, into: Parameter) -> None:
    group = raw.group
    steps = group.number("step", 0)
    decoupled, cautious = group.take("weight_decouple"), group.take("cautious", False)
    # 4.1, which has brought ns_method, has also turned the meaning of use_adjusted_lr round.
    says_moonlight = "ns_method" in group
    drop_run_options(group, "ns_method", "ns_reset_steps")
    into.notes.append("maximize is not in pytorch_optimizer's files: it is taken to be off")
    if cautious:
        into.problems.append("cautious masks whole updates there, and here only the decay")
    if not group.take("use_muon"):
        into.algorithm = "adamw" if decoupled else "adam"
        into.options = adam_options(group)
        take_moments(raw, into, step=steps)
        return
    if not decoupled and group.get("weight_decay"):
        into.problems.append("weight_decouple=False: libmuon's matrices have decoupled decay only")
    coefficients = group.take("ns_coeffs", [SCHEDULES["original"]])
    into.options = {
        "lr": group.number("lr"),
        "weight_decay": group.number("weight_decay"),
        "momentum": group.number("momentum"),
        "nesterov": group.take("nesterov"),
        "ns_coefficients": (
            tuple(coefficients[0])
            if len(coefficients) == 1
            else tuple(tuple(row) for row in coefficients)
        ),
        "ns_steps": group.take("ns_steps"),
        "adjust_lr_fn": (
            "match_rms_adamw" if group.take("use_adjusted_lr") == says_moonlight else "original"
        ),
        "normalization": "clamp",
        "norm_factor": 1.0,
        "eps": 1e-7,
    }
    if raw.is_stack:
        into.options["flatten"] = True
    take_momentum(raw, into)


SOURCE = Source("pytorch_optimizer", "pytorch_optimizer.Muon", _matches, _read, _version)
