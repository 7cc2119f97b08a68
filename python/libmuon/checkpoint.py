"""What `Muon.load_state_dict` makes of a state dict, before anything of the optimizer changes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from libmuon.options import RUN_OPTIONS, Group, named_parameters, normalize_group
from libmuon.shapes import check_parameters
from libmuon.spec import Slot, spec_text, state_dtype, state_slots

StateDict = dict[str, Any]


def resolve(groups: list[Group], defaults: Group, state_dict: StateDict) -> StateDict:
    """A checked state dict whose state is keyed by the parameters themselves.

    `torch.optim.Optimizer.load_state_dict` casts the state of parameter ids to the parameter's
    dtype, which would round a float32 momentum of bfloat16 weights; state under any other key it
    takes over as it is. So the state is brought into its final form here: a copy, on the
    parameter's device, in the dtype that this optimizer would have created.

    Raises:
        ValueError: if groups, keys or shapes do not match; the text names the parameter.
    """
    saved_groups = state_dict["param_groups"]
    _check_sizes(groups, saved_groups)
    merged = [_merged(*pair, defaults) for pair in zip(groups, saved_groups, strict=True)]
    live = [
        {**new, "params": old["params"], "param_names": old.get("param_names")}
        for old, new in zip(groups, merged, strict=True)
    ]
    check_parameters(live)
    saved_ids = [param_id for group in saved_groups for param_id in group["params"]]
    saved_state = dict(state_dict["state"])
    state: dict[Any, Any] = {}
    for param_id, (group, name, param) in zip(saved_ids, named_parameters(live), strict=True):
        entry = saved_state.pop(param_id, None)
        if entry:
            state[param] = _loaded_entry(group, name, param, entry)
    state.update(deepcopy(saved_state))
    return {**state_dict, "state": state, "param_groups": merged}


def _check_sizes(groups: list[Group], saved_groups: list[Group]) -> None:
    if len(groups) != len(saved_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{len(saved_groups)} instead of {len(groups)}"
        )
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: group {index} has {len(saved['params'])} parameters instead "
                f"of {len(group['params'])}"
            )


def _merged(group: Group, saved: Group, defaults: Group) -> Group:
    """The saved options, with this run's own and whatever the file does not have filled in."""
    own = {key: value for key, value in group.items() if key not in saved or key in RUN_OPTIONS}
    merged = normalize_group({**saved, **own}, defaults)
    if merged["algorithm"] != group["algorithm"]:
        names = group.get("param_names") or []
        raise ValueError(
            f"loaded state dict has algorithm {merged['algorithm']!r} for a group that this "
            f"optimizer trains with {group['algorithm']!r}: {', '.join(names) or 'unnamed'}; "
            "build the optimizer with the groups of the run that was saved"
        )
    return merged


def _loaded_entry(
    group: Group, name: str, param: Tensor, entry: Mapping[str, Any]
) -> dict[str, Tensor]:
    slots = {slot.name: slot for slot in state_slots(spec_text(group), param, name)}
    if entry.keys() != slots.keys():
        raise ValueError(
            f"loaded state dict has state {sorted(entry)} for {name}, expected {sorted(slots)} "
            f"(algorithm {group['algorithm']!r})"
        )
    return {
        key: _loaded_tensor(slot, name, param, state_dtype(group, param), entry[key])
        for key, slot in slots.items()
    }


def _loaded_tensor(slot: Slot, name: str, param: Tensor, dtype: torch.dtype, value: Any) -> Tensor:
    if not isinstance(value, Tensor | int | float):  # step counts may be plain numbers
        raise ValueError(
            f"loaded state dict has a {type(value).__name__} as {slot.name} of {name}, "
            "expected a tensor"
        )
    saved = torch.as_tensor(value)
    target = slot.create(param, dtype)
    if saved.shape != target.shape or saved.is_complex() != target.is_complex():
        raise ValueError(
            f"loaded state dict has {slot.name} of shape {tuple(saved.shape)} and {saved.dtype} "
            f"for {name}, expected {tuple(target.shape)} and {target.dtype}"
        )
    return target.copy_(saved)
