"""zichongli5/NorMuon: NorMuon, SingleDeviceNorMuon, and both WithAuxAdam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.common import take_momentum
from libmuon.convert.model import Parameter, Raw, Source, option_keys
from libmuon.convert.sources.keller import matrix_options, read_adam

_MUON = {"lr", "weight_decay", "momentum", "beta2"}
_ADAM = {"lr", "weight_decay", "betas", "eps"}


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    kinds = [option_keys(group) - {"use_muon"} for group in groups]
    return _MUON in kinds and all(kind in (_MUON, _ADAM) for kind in kinds)


def _read(raw: Raw, into: Parameter) -> None:
    if not raw.group.take("use_muon", True):
        read_adam(raw, into)
        return
    into.algorithm = "normuon"
    into.options = {**matrix_options(raw), "muon_beta2": raw.group.number("beta2")}
    take_momentum(raw, into)
    key = "second_momentum_buffer"
    if key not in raw.state:
        return
    statistics = raw.state.take(key)
    if raw.shape is not None and len(raw.shape) == 4:
        into.problems.append(
            f"{key} is of single kernels, while libmuon's rows are those of the flattened weight"
        )
        return
    into.keep("variance_neuron", key, statistics)
    into.notes.append("the second moment's eps is 1e-8 here and 1e-10 there")


SOURCE = Source("normuon", "zichongli5/NorMuon", _matches, _read, sharded=True)
