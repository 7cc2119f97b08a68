"""State dicts of libmuon.Muon and of torch.optim.Muon."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from libmuon import state_file
from libmuon.convert.formats import coded_keys
from libmuon.convert.model import ConversionError, Parameter, Report, Shape, listed
from libmuon.optimizer import Muon, StateDict
from libmuon.options import Group, normalize_group
from libmuon.spec import Slot, spec_text, state_slots
from libmuon.state_text import SavedParameter


def save(state_dict: StateDict, path: str | os.PathLike[str], report: Report) -> None:
    """Writes a state dict, as a state file if the name ends so, else with torch.save.

    What torch.save writes, `torch.load(path, weights_only=True)` reads. The file is whole or not
    there: it gets its name when all of it is written.

    Raises:
        ConversionError: for a state file, if the shape of a parameter is not known.
    """
    if is_state_file(path):
        _save_state_file(state_dict, path, report)
        return
    unfinished = f"{os.fspath(path)}.unfinished"
    try:
        torch.save(state_dict, unfinished)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def is_state_file(path: str | os.PathLike[str]) -> bool:
    """Whether `save` writes a file for `libmuon.load_state`."""
    return os.fsdecode(path).endswith(state_file.SUFFIX)


def _save_state_file(state_dict: StateDict, path: str | os.PathLike[str], report: Report) -> None:
    entries = iter([entry for entry in report.entries if entry.group is not None])
    groups, state = state_dict["param_groups"], state_dict["state"]
    params: list[list[SavedParameter]] = []
    for group in groups:
        members = group["params"]
        names = group.get("param_names") or [None] * len(members)
        params.append([])
        for param_id, name in zip(members, names, strict=True):
            entry = next(entries)
            if entry.shape is None:
                raise ConversionError(
                    f"the shape of {entry.name!r}, which a state file says, is not known: give a "
                    "model's state dict as the names",
                    report,
                )
            dtype = _dtype(state.get(param_id, {}))
            params[-1].append(SavedParameter(name, tuple(entry.shape), dtype))
    state_file.write_state_file(path, groups, params, state)


def _dtype(entry: dict[str, Tensor]) -> str:
    """The parameter's dtype as far as its state tells; a load does not depend on it."""
    coded = coded_keys(entry)
    for key, value in entry.items():
        if key not in coded and key in ("momentum_buffer", "exp_avg"):
            return str(value.dtype).removeprefix("torch.")
    return "float32"


@cache
def default_options() -> Group:
    """Every option with the default of `libmuon.Muon`."""
    return Muon([torch.zeros(1, 1, requires_grad=True)]).defaults


def complete_group(members: Sequence[Parameter]) -> Group:
    """All options of the group that `members` make, checked, in libmuon's names.

    Raises:
        ConversionError: if a value, or a key of the file that is no option, is refused.
    """
    # What `like` has and the file has not brings no options of the file's.
    first = next((parameter for parameter in members if parameter.group >= 0), members[0])
    given = {**first.metadata, **first.options, "algorithm": first.algorithm}
    try:
        return normalize_group(given, default_options())
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ConversionError(f"the options of {first.label!r} are refused: {error}") from None


def libmuon_dict(divided: Sequence[Sequence[Parameter]], report: Report) -> StateDict:
    """The state dict that `libmuon.Muon.load_state_dict` takes."""
    groups: list[Group] = []
    state: dict[int, dict[str, Tensor]] = {}
    count = 0
    for members in divided:
        group = complete_group(members)
        has_names = all(parameter.name for parameter in members)
        # Without names, ids are places in the source's order: `build_optimizer` goes by them.
        ids = [count + i if has_names else p.index for i, p in enumerate(members)]
        for param_id, parameter in zip(ids, members, strict=True):
            if parameter.state:
                state[param_id] = _fitted(group, parameter)
        if has_names:
            group["param_names"] = [parameter.name for parameter in members]
        group["params"] = ids
        count += len(members)
        groups.append(group)
        report.groups.append(describe(group, members))
    return {"state": state, "param_groups": groups}


# Values that do what the default None does.
_SAME = {"adjust_lr_fn": ("original",), "norm_factor": (1.0,)}


def describe(group: Group, members: Sequence[Parameter]) -> str:
    """A group in one line: its algorithm, what differs from libmuon's defaults, its members."""
    usual = normalize_group({"algorithm": group["algorithm"]}, default_options())
    skipped = ("algorithm", "params", "param_names", "lr", "weight_decay")
    own = {
        k: v
        for k, v in group.items()
        if k not in skipped and v not in (usual.get(k), *_SAME.get(k, ()))
    }
    texts = [f"{key}={group[key]!r}" for key in ("lr", "weight_decay") if key in group]
    texts += [f"{key}={_short(value)}" for key, value in own.items()]
    names = listed([parameter.label for parameter in members])
    return f"{group['algorithm']}: {', '.join(texts)}  [{len(members)}: {names}]"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _fitted(group: Group, parameter: Parameter) -> dict[str, Tensor]:
    """The state in the shapes that the group needs; slots that the file lacks are zero."""
    if coded_keys(parameter.state):
        return dict(parameter.state)  # bit for bit; what loads it checks it
    shape = parameter.shape
    if shape is None:  # the state of its own has given one, unless it is 0-d
        shape = max((tuple(v.shape) for v in parameter.state.values()), key=len)
    # Only bfloat16 parameters have a remainder or a count of roundings.
    rounds = group["master"] is not None or group["stochastic_rounding"]
    dtype = torch.bfloat16 if rounds else torch.float32
    meta = torch.empty(shape, dtype=dtype, device="meta")
    try:
        slots = state_slots(spec_text(group), meta, parameter.label)
    except (ValueError, RuntimeError) as error:
        parameter.problems.append(str(error).splitlines()[0])
        return {}
    fitted: dict[str, Tensor] = {}
    for slot in slots:
        value = parameter.state.get(slot.name)
        if value is None:
            parameter.notes.append(f"{slot.name} starts at zero")
            value = torch.zeros(_slot_shape(slot, shape))
        fitted[slot.name] = _reshaped(slot, value, shape, parameter)
    for key in parameter.state.keys() - fitted.keys():
        parameter.problems.append(f"{key} has no place in {parameter.algorithm!r}")
    return fitted


def _slot_shape(slot: Slot, shape: Shape) -> Shape:
    return shape if slot.kind == "param" else slot.sizes


def _reshaped(slot: Slot, value: Tensor, shape: Shape, parameter: Parameter) -> Tensor:
    """A state that was saved in flattened or folded shape, in the parameter's own."""
    wanted = _slot_shape(slot, shape)
    if tuple(value.shape) == wanted:
        return value
    if value.numel() != torch.Size(wanted).numel():
        parameter.problems.append(f"{slot.name} has shape {tuple(value.shape)}, expected {wanted}")
        return torch.zeros(wanted)
    if slot.kind == "param":
        rows = value.shape[0] if value.dim() else 0
        if rows != shape[0] and value.shape[-2:] != torch.Size(shape[-2:]):
            parameter.problems.append(
                f"{slot.name} has shape {tuple(value.shape)}, the parameter {shape}"
            )
            return torch.zeros(wanted)
    parameter.moved.append(f"{slot.name} reshaped from {tuple(value.shape)}")
    return value.reshape(wanted)
