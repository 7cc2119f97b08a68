"""KellerJordan/Muon: Muon, SingleDeviceMuon, and both WithAuxAdam."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import (
    LAST_TWO,
    adam_options,
    keller_iteration,
    take_moments,
    take_momentum,
)
from libmuon.convert.model import Parameter, Raw, Source, option_keys
from libmuon.options import Group

_MUON = {"lr", "weight_decay", "momentum"}
_ADAM = {"lr", "weight_decay", "betas", "eps"}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    if all(option_keys(group) == _MUON for group in groups):
        return True
    return all(
        option_keys(group) - {"use_muon"} == (_MUON if group["use_muon"] else _ADAM)
        if "use_muon" in group
        else False
        for group in groups
    )


def _read(raw: Raw, into: Parameter) -> None:
    if not raw.group.take("use_muon", True):
        read_adam(raw, into)
        return
    into.options = matrix_options(raw)
    take_momentum(raw, into)


def read_adam(raw: Raw, into: Parameter) -> None:
    """The auxiliary Adam, whose decay is AdamW's."""
    into.algorithm = "adamw"
    into.options = adam_options(raw.group)
    take_moments(raw, into)


def matrix_options(raw: Raw) -> Group:
    """A Muon group's options, for a parameter of `raw`'s shape."""
    options: Group = {
        "lr": raw.group.number("lr"),
        "weight_decay": raw.group.number("weight_decay"),
        "momentum": raw.group.number("momentum"),
        "nesterov": True,
        "adjust_lr_fn": "original",
        **keller_iteration(),
    }
    if raw.shape is not None and len(raw.shape) == 4:
        # Kernels are flattened for the iteration; the factor is that of their last two dims.
        factor = math.sqrt(max(1.0, raw.shape[-2] / raw.shape[-1]))
        options |= {"flatten": True, "adjust_lr_fn": "unscaled", "lr_multiplier": factor}
    elif raw.is_stack:
        options |= LAST_TWO
    return options


SOURCE = Source("keller", "KellerJordan/Muon", _matches, _read, sharded=True)
