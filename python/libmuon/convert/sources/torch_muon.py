"""torch.optim.Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import drop_run_options, take_momentum
from libmuon.convert.model import Parameter, Raw, Source

_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps")


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        {*_OPTIONS, "adjust_lr_fn"} <= group.keys()
        and group.keys().isdisjoint({"safety_factor", "momentum_form"})
        for group in groups
    )


def _read(raw: Raw, into: Parameter) -> None:
    into.options = {key: raw.group.take(key) for key in (*_OPTIONS, "adjust_lr_fn")}
    drop_run_options(raw.group)
    take_momentum(raw, into)


SOURCE = Source("torch", "torch.optim.Muon", _matches, _read)
