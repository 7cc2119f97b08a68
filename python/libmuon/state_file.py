"""An optimizer's state and options in one file, the same from Python and from C++.

The format is in ``include/muon/state_file.h``, the file itself in ``src/state/file.h``.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from libmuon.optimizer import Muon, StateDict
from libmuon.options import Group, errors_about, is_builtin, is_elementwise, normalize_group
from libmuon.spec import REMAINDER, scale_key
from libmuon.state_text import (
    SavedGroup,
    SavedParameter,
    declared,
    decode,
    encode,
    is_unicode,
    saved_group,
)

Path = str | os.PathLike[str]
States = Sequence[Sequence[Mapping[str, Tensor]]]

FORMAT = "libmuon state"
VERSION = "1"
SUFFIX = ".safetensors"
_SHOWN = 8
_CODES = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}


def save_state(optimizer: Muon, path: Path) -> None:
    """Writes state and options to a file that `load_state` and C++'s ``muon::load_state`` read.

    Whatever happens meanwhile, `path` holds the former file or the new one, whole. The file is
    safetensors with checksums; it holds no code. State that no step has created yet is created.
    How the run stores and computes (`state_dtype`, `batch_size`, `form` and their like) is left
    out. Metadata of groups is kept where it is a number, text, bool or None; a warning names the
    rest. The parameters themselves belong to the model's own checkpoint.

    Args:
        optimizer: may have names for its parameters (``model.named_parameters()``, or the model
            itself), by which a load then finds them.
        path: the file.

    Raises:
        ValueError: for parameters of one name, or what the format cannot hold.
        RuntimeError: with the system's reason if the file cannot be written.
    """
    if not isinstance(optimizer, Muon):
        raise TypeError(f"expected a libmuon.Muon but got: {type(optimizer).__name__}")
    params = [
        [
            SavedParameter(name, tuple(param.shape), str(param.dtype).removeprefix("torch."))
            for name, param in zip(_names(group), group["params"], strict=True)
        ]
        for group in optimizer.param_groups
    ]
    state_dict = optimizer.state_dict()
    groups = []
    for index, group in enumerate(state_dict["param_groups"]):
        with errors_about(f"parameter group {index}"):
            groups.append(normalize_group(group, optimizer.defaults))
    write_state_file(path, groups, params, state_dict["state"])


def write_state_file(
    path: Path,
    groups: Sequence[Group],
    params: Sequence[list[SavedParameter]],
    state: Mapping[Any, Mapping[str, Any]],
) -> None:
    """Writes complete groups, their parameters, and the state by the ids of the groups."""
    labels = _labels(params)
    saved: list[SavedGroup] = []
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, None] = {}
    known = set()
    for index, (group, members) in enumerate(zip(groups, params, strict=True)):
        new, left = saved_group(group, members)
        saved.append(new)
        left_out |= dict.fromkeys(left)
        for label, param_id in zip(labels[index], group["params"], strict=True):
            known.add(param_id)
            for key, value in state.get(param_id, {}).items():
                if not isinstance(value, Tensor):
                    raise TypeError(
                        f"{key} in the state of {label} is a {type(value).__name__}, no tensor"
                    )
                tensors[f"{label}/{key}"] = value
    left_out |= dict.fromkeys(str(key) for key in state if key not in known)
    if left_out:
        warnings.warn(
            f"{os.fspath(path)} leaves out what such a file cannot hold, all but finite numbers, "
            f"texts, bools and None: {', '.join(left_out)}",
            stacklevel=3,
        )
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    metadata = {"format": FORMAT, "version": VERSION, "groups": encode(saved, size)}
    text = os.fsdecode(path)
    torch.ops.muon.write_state_file(text, list(tensors), list(tensors.values()), metadata)


def _names(group: Group) -> Sequence[str | None]:
    names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
    for name in names:
        if name is not None and not (isinstance(name, str) and is_unicode(name)):
            raise ValueError(f"a parameter's name should be a Unicode text but is: {name!r}")
    return names


def _labels(params: Sequence[Sequence[SavedParameter]]) -> list[list[str]]:
    """What tensors are called after: names, and GROUP.INDEX where there are none."""
    labels = [
        [f"{index}.{i}" if param.name is None else param.name for i, param in enumerate(members)]
        for index, members in enumerate(params)
    ]
    seen: set[str] = set()
    for label in (label for members in labels for label in members):
        if label in seen:
            raise ValueError(f"two parameters are called {label[:200]!r}")
        seen.add(label)
    return labels


class StateFile(NamedTuple):
    """What a file holds; ``states[i][j]`` is the state of parameter j of group i."""

    version: str
    groups: list[SavedGroup]
    states: list[list[dict[str, Tensor]]]

    def state_dict(self) -> StateDict:
        """The same as a state dict, with the options of the run that the state itself tells.

        Beside ``state`` and ``param_groups`` it has ``param_shapes`` in the order of the groups,
        ``format`` and ``version``.
        """
        state: dict[int, dict[str, Tensor]] = {}
        groups: list[Group] = []
        count = 0
        for group, entries in zip(self.groups, self.states, strict=True):
            ids = list(range(count, count + len(entries)))
            count += len(entries)
            state |= {i: entry for i, entry in zip(ids, entries, strict=True) if entry}
            names = [param.name for param in group.params]
            own = group.options_and_extra() | _storage(group.algorithm, entries) | {"params": ids}
            if None not in names:
                own["param_names"] = names
            groups.append({key: _tuples(value) for key, value in own.items() if key != "params"})
            groups[-1]["params"] = ids
        shapes = [param.shape for group in self.groups for param in group.params]
        return {
            "state": state,
            "param_groups": groups,
            "param_shapes": shapes,
            "format": FORMAT,
            "version": self.version,
        }


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _storage(algorithm: str, entries: Sequence[Mapping[str, Tensor]]) -> Group:
    """The options of the run that a group's state tells."""
    options: Group = {}
    counts_roundings = is_builtin(algorithm) and not is_elementwise(algorithm)
    for entry in entries:
        for key, value in entry.items():
            if scale_key(key) in entry and value.dtype in _CODES:
                options["state_dtype"] = _CODES[value.dtype]
        if REMAINDER in entry:
            options["master"] = "split"
        if counts_roundings and "step" in entry:
            options["stochastic_rounding"] = True
    return options


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        reason = str(error)[:2000]
        quoted = json.dumps(os.fsdecode(path), ensure_ascii=False)
        raise ValueError(f"muon: cannot load state file {quoted}: {reason}") from None


def read_state_file(path: Path) -> StateFile:
    """Reads and checks a file; the values of the options are not checked.

    Raises:
        ValueError: saying what is wrong with it.
    """
    names, tensors, metadata = torch.ops.muon.read_state_file(os.fsdecode(path), True)
    with _errors_of(path):
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"it is no state of libmuon's: its format is {metadata.get('format', '')[:200]!r}, "
                f"not {FORMAT!r}"
            )
        version = metadata.get("version", "")
        if version != VERSION:
            raise ValueError(
                f"its version is {version[:200]!r}, and this libmuon reads version {VERSION!r}"
            )
        if "groups" not in metadata:
            raise ValueError("it has no groups")
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        groups = decode(metadata["groups"], size)
        states = _sorted(groups, dict(zip(names, tensors, strict=True)))
    return StateFile(version, groups, states)


def _sorted(
    groups: Sequence[SavedGroup], tensors: Mapping[str, Tensor]
) -> list[list[dict[str, Tensor]]]:
    labels = _labels([group.params for group in groups])
    states: list[list[dict[str, Tensor]]] = [[{} for _ in members] for members in labels]
    places = {
        label: entry
        for members, entries in zip(labels, states, strict=True)
        for label, entry in zip(members, entries, strict=True)
    }
    for name, tensor in tensors.items():
        label, slash, key = name.rpartition("/")
        if not slash or label not in places:
            raise ValueError(f"tensor {name[:200]!r} belongs to none of its parameters")
        places[label][key] = tensor
    return states


def load_state(optimizer: Muon, path: Path) -> None:
    """Loads a file of `save_state` or of C++'s ``muon::save_state``, as a whole or not at all.

    Parameters are found by name, wherever they stand in the groups, and by their place if the file
    or the optimizer has no names. Each group takes the options that the file has for its
    parameters; options of this run stay, and state gets the dtype and format that this run would
    have created. A learning rate, decay or momentum that is a tensor here stays one. The hooks of
    ``load_state_dict`` run as in any load.

    Raises:
        ValueError: naming what is wrong, and the parameter: a damaged file, another version,
            parameters that are missing on either side, other shapes, algorithms or state keys, a
            group whose parameters have different options in the file.
    """
    if not isinstance(optimizer, Muon):
        raise TypeError(f"expected a libmuon.Muon but got: {type(optimizer).__name__}")
    saved = read_state_file(path)
    with _errors_of(path):
        state_dict = _fitted(optimizer, saved)
    with errors_about(f"state file {os.fspath(path)}"):
        optimizer.load_state_dict(state_dict)


Place = tuple[int, int]


def _fitted(optimizer: Muon, saved: StateFile) -> StateDict:
    """The file as a state dict of this optimizer's groups."""
    state: dict[int, dict[str, Tensor]] = {}
    groups: list[Group] = []
    count = 0
    for index, places in enumerate(_places(optimizer.param_groups, saved.groups)):
        live = optimizer.param_groups[index]
        _check_members(index, live, places, saved.groups)
        group = _options(index, live, places, saved.groups, optimizer.defaults)
        group["params"] = list(range(count, count + len(places)))
        count += len(places)
        for param_id, (g, i) in zip(group["params"], places, strict=True):
            if saved.states[g][i]:
                state[param_id] = saved.states[g][i]
        groups.append(group)
    return {"state": state, "param_groups": groups}


def _places(live: Sequence[Group], saved: Sequence[SavedGroup]) -> list[list[Place]]:
    """For every group and parameter here, where it stands in the file."""
    by_name = all(group.get("param_names") or not group["params"] for group in live) and all(
        param.name is not None for group in saved for param in group.params
    )
    there = {
        (param.name if by_name else f"{g}.{i}"): (g, i)
        for g, group in enumerate(saved)
        for i, param in enumerate(group.params)
    }
    here = [
        [name if by_name else f"{g}.{i}" for i, name in enumerate(_names(group))]
        for g, group in enumerate(live)
    ]
    flat = [str(key) for keys in here for key in keys]
    twice = [key for key, count in Counter(flat).items() if count > 1]
    if twice:
        raise ValueError(f"several parameters of this optimizer are called {_listed(twice)}")
    missing = [key for key in flat if key not in there]
    unused = [str(key) for key in there.keys() - set(flat)]
    if missing or unused:
        parts = [f"it does not have {_listed(missing)}"] if missing else []
        parts += [f"this optimizer does not have {_listed(sorted(unused))}"] if unused else []
        way = (
            "'python -m libmuon convert' renames and regroups the parameters of a file"
            if by_name
            else "these are places, GROUP.INDEX, as not all parameters have names on both sides"
        )
        raise ValueError(
            f"{', and '.join(parts)}; build the optimizer with the parameters of the run that was "
            f"saved ({way})"
        )
    return [[there[key] for key in keys] for keys in here]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    shown = ", ".join(name[:200] for name in names[:_SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")


def _label(group: Group, index: int, position: int) -> str:
    names = group.get("param_names")
    return str(names[position]) if names else f"parameter {position} of group {index}"


def _check_members(
    index: int, live: Group, places: Sequence[Place], saved: Sequence[SavedGroup]
) -> None:
    for position, (param, (g, i)) in enumerate(zip(live["params"], places, strict=True)):
        label, shape = _label(live, index, position), saved[g].params[i].shape
        if tuple(param.shape) != shape:
            raise ValueError(f"it has {label} of shape {shape}, expected {tuple(param.shape)}")
        if saved[g].algorithm != live["algorithm"]:
            raise ValueError(
                f"it has algorithm {saved[g].algorithm[:200]!r} for {label}, which this optimizer "
                f"trains with {live['algorithm']!r}; build it with the groups of the run that was "
                "saved"
            )


def _options(
    index: int,
    live: Group,
    places: Sequence[Place],
    saved: Sequence[SavedGroup],
    defaults: Group,
) -> Group:
    """The group that a state dict would have; a group without parameters stays as it is."""
    if not places:
        return {key: value for key, value in live.items() if key != "params"}
    first = saved[places[0][0]]
    extra = first.extra
    for position, (g, _) in enumerate(places):
        _check_equal(index, live, position, first, saved[g])
        extra = {
            key: value
            for key, value in extra.items()
            if key in saved[g].extra and value == saved[g].extra[key]
        }
    with errors_about(f"group {places[0][0]} of the file"):
        group = declared(first)._replace(extra=extra).options_and_extra()
        normalize_group(group, defaults)
    for key, value in group.items():
        tensor = live.get(key)
        if isinstance(tensor, Tensor) and isinstance(value, int | float):
            number = torch.full(tensor.shape, value, dtype=torch.float64)
            group[key] = number.to(device=tensor.device, dtype=tensor.dtype)
    if "param_names" in live:
        group["param_names"] = live["param_names"]
    return group


def _check_equal(
    index: int, live: Group, position: int, first: SavedGroup, other: SavedGroup
) -> None:
    if first is other:
        return
    a, b = ({**g.options, **g.own, "algorithm": g.algorithm} for g in (first, other))
    differing = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
    if differing:
        raise ValueError(
            f"group {index} has {_label(live, index, 0)} and {_label(live, index, position)}, for "
            f"which the file has different {', '.join(differing)}; divide the parameters as the "
            "run that was saved did"
        )
