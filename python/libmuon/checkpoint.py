"""What `Muon.load_state_dict` makes of a state dict, before anything of the optimizer changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from libmuon.options import RUN_OPTIONS, Group, named_parameters, normalize_group
from libmuon.shapes import check_parameters
from libmuon.spec import REMAINDER, Slot, scale_key, spec_text, state_dtype, state_slots

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
            state[param] = loaded_entry(group, name, param, entry)
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


def loaded_entry(
    group: Group, name: str, param: Tensor, entry: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state that this run would have created, filled from what another run may have kept."""
    spec = spec_text(group)
    slots = {slot.name: slot for slot in state_slots(spec, param, name)}
    kept = {key for key in entry if scale_key(key) in entry or scale_key(key) in slots}
    required = slots.keys() - {scale_key(key) for key in kept} - _begins_as_zero(group, slots)
    # Another run's remainder and count of roundings may go.
    unknown = entry.keys() - slots.keys() - {scale_key(key) for key in kept} - {REMAINDER, "step"}
    if unknown or not required <= entry.keys():
        raise ValueError(
            f"loaded state dict has state {sorted(entry)} for {name}, expected {sorted(slots)} "
            f"(algorithm {group['algorithm']!r})"
        )
    values = {key: _tensor(key, name, value) for key, value in entry.items()}
    loaded: dict[str, Tensor] = {}
    for key, slot in slots.items():
        if key in loaded:
            continue
        target = slot.create(param, state_dtype(group, param), group["offload"])
        if scale_key(key) in slots:
            scales = slots[scale_key(key)].create(param, torch.float32, group["offload"])
            loaded |= _loaded_codes(key, name, param, spec, values, (target, scales))
        elif key in kept:
            plain = _decoded(key, name, param, spec, values)
            loaded[key] = target.copy_(plain)
        elif key in values:
            loaded[key] = _filled(slot.name, name, target, values[key])
        else:
            loaded[key] = target
    return loaded


def adapted_entry(
    group: Group, name: str, param: Tensor, entry: dict[str, Any], former: Sequence[Slot]
) -> dict[str, Any]:
    """The state after a group has changed: in the new format where only the format has changed."""
    try:
        return loaded_entry(group, name, param, {k: v for k, v in entry.items() if v is not None})
    except ValueError:  # another algorithm, or a replaced tensor of another shape: begin anew
        slots = state_slots(spec_text(group), param, name)
        stale = {slot.name for slot in former if slot not in slots}
        return {key: value for key, value in entry.items() if key not in stale}


def _begins_as_zero(group: Group, slots: Mapping[str, Slot]) -> set[str]:
    """What a run that did not round, or split, in this way has not kept."""
    from_rounding = {"step"} if group["stochastic_rounding"] else set()
    return {key for key in (from_rounding | {REMAINDER}) if key in slots}


def _loaded_codes(
    key: str,
    name: str,
    param: Tensor,
    spec: str,
    values: Mapping[str, Tensor],
    targets: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """Codes and scales: those of the file bit by bit, or made of what it has."""
    codes, scales = targets
    given = values[key]
    if scale_key(key) in values and given.dtype == codes.dtype:
        _filled(key, name, codes, given)
        _filled(scale_key(key), name, scales, values[scale_key(key)])
    else:
        plain = _decoded(key, name, param, spec, values)
        for target, made in zip(
            targets, torch.ops.muon.encode_state(plain, spec, name), strict=True
        ):
            target.copy_(made)
    return {key: codes, scale_key(key): scales}


def _decoded(key: str, name: str, param: Tensor, spec: str, values: Mapping[str, Tensor]) -> Tensor:
    """A momentum or moment as plain numbers, in whichever format it was kept."""
    if scale_key(key) not in values:
        expected = torch.empty_like(param, device="meta")
        _check_fits(key, name, expected, values[key])
        return values[key]
    plain: Tensor = torch.ops.muon.decode_state(
        values[key], values[scale_key(key)], spec, list(param.shape), param.is_complex(), name
    )
    return plain


def _tensor(key: str, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor | int | float):  # step counts may be plain numbers
        raise ValueError(
            f"loaded state dict has a {type(value).__name__} as {key} of {name}, expected a tensor"
        )
    return torch.as_tensor(value)


def _filled(key: str, name: str, target: Tensor, saved: Tensor) -> Tensor:
    _check_fits(key, name, target, saved)
    return target.copy_(saved)


def _check_fits(key: str, name: str, target: Tensor, saved: Tensor) -> None:
    is_code = not _is_plain(target)
    if not (is_code or key == "step" or _is_plain(saved)):
        raise ValueError(
            f"loaded state dict has {saved.dtype} codes as {key} of {name}, but no {scale_key(key)}"
        )
    if (
        saved.shape != target.shape
        or saved.is_complex() != target.is_complex()
        or (is_code and saved.dtype != target.dtype)
    ):
        raise ValueError(
            f"loaded state dict has {key} of shape {tuple(saved.shape)} and {saved.dtype} "
            f"for {name}, expected {tuple(target.shape)} and {target.dtype}"
        )


def _is_plain(saved: Tensor) -> bool:
    """Whether entries are numbers, not codes."""
    return saved.is_complex() or (saved.is_floating_point() and saved.element_size() > 1)
