"""An optimizer that goes on from a converted state dict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from libmuon.optimizer import Muon, StateDict
from libmuon.options import Group


def build_optimizer(
    state_dict: StateDict, params: nn.Module | Iterable[Any], **options: Any
) -> Muon:
    """A `libmuon.Muon` with the groups of a converted state dict, which is loaded into it.

    Args:
        state_dict: what ``convert_state_dict(..., to="libmuon")`` returns.
        params: the model, or (name, parameter) pairs; parameters in the order of the source's
            optimizer where the state dict has no names.
        options: the constructor's, such as `deterministic`.

    Raises:
        ValueError: if the state dict has parameters that are not among those given.
    """
    given = params.named_parameters() if isinstance(params, nn.Module) else params
    entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in given]
    by_key: dict[Any, Any] = {name: entry for name, entry in entries if name is not None}
    by_key |= {index: entry for index, (_, entry) in enumerate(entries)}
    groups = [_group(group, by_key) for group in state_dict["param_groups"]]
    optimizer = Muon(groups, **options)
    optimizer.load_state_dict(state_dict)
    return optimizer


def _group(group: Group, by_key: dict[Any, Any]) -> Group:
    names = group.get("param_names")
    keys = group["params"] if names is None else names
    missing = [key for key in keys if key not in by_key]
    if missing:
        raise ValueError(f"the state dict has parameters that are not among those given: {missing}")
    members = [by_key[key] if names is None else (key, by_key[key]) for key in keys]
    own = {key: value for key, value in group.items() if key != "param_names"}
    return {**own, "params": members}
