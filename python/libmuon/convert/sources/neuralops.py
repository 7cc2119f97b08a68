"""neuralops: Muon and MuonAdamW of neuralops.trainer.optimizers.muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import adam_options, keller_iteration, take_moments, take_momentum
from libmuon.convert.model import Parameter, Raw, Source, option_keys

_MUON = {"lr", "momentum", "weight_decay", "ns_steps"}
_ADAMW = {"lr", "betas", "eps", "weight_decay"}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    if all(option_keys(group) == _MUON for group in groups):
        return True
    return all(
        option_keys(group) >= {"muon": _MUON, "adamw": _ADAMW}.get(str(group["optimizer"]), set())
        if "optimizer" in group
        else False
        for group in groups
    )


def _read(raw: Raw, into: Parameter) -> None:
    kind = raw.group.take("optimizer", "muon")
    if kind == "muon":
        into.options = {
            "lr": raw.group.number("lr"),
            "weight_decay": raw.group.number("weight_decay"),
            "momentum": raw.group.number("momentum"),
            "nesterov": False,
            "momentum_form": "heavy_ball",
            "adjust_lr_fn": "original",
            **keller_iteration(raw.group.take("ns_steps")),
        }
        take_momentum(raw, into)
        return
    into.algorithm = "adamw"
    if kind != "adamw":
        into.problems.append(
            f"neuralops leaves groups with optimizer={kind!r} untrained; 'muon' and 'adamw' exist"
        )
        return
    into.options = adam_options(raw.group)
    take_moments(raw, into)


SOURCE = Source("neuralops", "neuralops", _matches, _read)
