"""What the presets accept as parameters, and what they say of anything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from libmuon.options import Group


def refuse_unordered(params: Any) -> None:
    """A TypeError, in torch's words, for a set: state dicts go by position."""
    if isinstance(params, set | frozenset):
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but the ordering of "
            "tensors in sets will change between runs. Please use a list instead."
        )


def given_groups(params: Any, instead_of_module: str) -> list[Group]:
    """The groups that a constructor was given; parameters without a group are one.

    Raises:
        TypeError: for a set, a single tensor or dict, a module (the text goes on with
            ``instead_of_module``), anything that is not iterable, and groups among parameters.
        ValueError: for nothing at all.
    """
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params should be parameters or groups but is a {type(params).__name__}; "
            f"{instead_of_module}"
        )
    refuse_unordered(params)
    if isinstance(params, Tensor | Mapping | str) or not isinstance(params, Iterable):
        hint = "; put it into a list" if isinstance(params, Tensor | Mapping) else ""
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, "
            f"but got {torch.typename(params)}{hint}"
        )
    given = list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    is_group = [isinstance(entry, dict) for entry in given]
    if not any(is_group):
        return [{"params": given}]
    if not all(is_group):
        index = is_group.index(False)
        raise TypeError(
            f"param_group must be a dict, but got {type(given[index])} (entry {index} of params); "
            "give parameters or groups, not both"
        )
    return given


def require_params(group: Mapping[str, Any]) -> Any:
    """The ``"params"`` of a group as its caller wrote it."""
    if "params" not in group:
        raise ValueError(f"a parameter group needs 'params', but has: {list(group)}")
    return group["params"]


def named_members(params: Any) -> list[tuple[str, Tensor]]:
    """(name, parameter) of a group's ``"params"``, with an empty name where there is none.

    Raises:
        TypeError: for what is no ordered collection of tensors or (name, tensor) pairs.
    """
    if isinstance(params, Tensor):
        return [("", params)]
    refuse_unordered(params)
    if isinstance(params, nn.Module | str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(
            "'params' of a parameter group should be tensors or (name, tensor) pairs but is: "
            f"{torch.typename(params)}"
        )
    return [_named_member(index, entry) for index, entry in enumerate(params)]


def _named_member(index: int, entry: Any) -> tuple[str, Tensor]:
    name, param = entry if isinstance(entry, tuple) and len(entry) == 2 else ("", entry)
    if not isinstance(name, str) or not isinstance(param, Tensor):
        raise TypeError(
            "optimizer can only optimize Tensors, but one of the params is "
            f"{torch.typename(entry)}: entry {index} of 'params' should be a tensor or a "
            "(name, tensor) pair"
        )
    return name, param
