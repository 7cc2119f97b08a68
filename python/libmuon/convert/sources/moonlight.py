"""MoonshotAI/Moonlight: the Muon of examples/toy_train.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import keller_iteration, take_moments, take_momentum
from libmuon.convert.model import Parameter, Raw, Source, option_keys

_OPTIONS = {"lr", "wd", "momentum", "nesterov", "ns_steps", "adamw_betas", "adamw_eps"}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return all(option_keys(group) == _OPTIONS for group in groups)


def _read(raw: Raw, into: Parameter) -> None:
    group = raw.group
    lr, decay, momentum = (group.number(key) for key in ("lr", "wd", "momentum"))
    nesterov, steps = group.take("nesterov"), group.take("ns_steps")
    betas, eps = group.take("adamw_betas"), group.number("adamw_eps")
    # Routing stands in every parameter's state, from the constructor on.
    if raw.state.take("use_muon"):
        into.options = {
            "lr": lr,
            "weight_decay": decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "momentum_form": "heavy_ball",
            "adjust_lr_fn": "match_rms_adamw",
            **keller_iteration(steps),
        }
        take_momentum(raw, into)
        return
    into.algorithm = "adamw"
    into.options = {"lr": lr, "weight_decay": decay, "betas": tuple(betas), "eps": eps}
    into.notes.append(
        "Adam's eps is added after the bias correction here and before it there: the same once "
        "1 - beta2^step is near 1"
    )
    take_moments(raw, into, "moment1", "moment2")


SOURCE = Source("moonlight", "MoonshotAI/Moonlight", _matches, _read)
