"""torch.optim.AdamW and torch.optim.Adam: continued as they are, or a start for Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import adam_options, drop_run_options, take_moments
from libmuon.convert.model import Parameter, Raw, Source, state_keys

_OPTIONS = {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}
_FOREIGN = {"momentum_decay", "use_muon", "optimizer", "algorithm", "momentum", "mu"}
_STATE = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return state_keys(states) <= _STATE and all(
        group.keys() >= _OPTIONS and group.keys().isdisjoint(_FOREIGN) for group in groups
    )


def _matches_decoupled(decoupled: bool) -> Any:
    """older torch does not say which of the two it was: then both match."""

    def matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
        return _matches(groups, states) and all(
            group.get("decoupled_weight_decay", decoupled) == decoupled for group in groups
        )

    return matches


def _reader(algorithm: str) -> Any:
    def read(raw: Raw, into: Parameter) -> None:
        into.algorithm = algorithm
        into.options = adam_options(raw.group)
        into.options["amsgrad"] = raw.group.take("amsgrad", False)
        into.options["maximize"] = raw.group.take("maximize", False)
        raw.group.take("decoupled_weight_decay", None)
        drop_run_options(raw.group)
        take_moments(raw, into)

    return read


ADAMW = Source("adamw", "torch.optim.AdamW", _matches_decoupled(True), _reader("adamw"))
ADAM = Source("adam", "torch.optim.Adam", _matches_decoupled(False), _reader("adam"))
