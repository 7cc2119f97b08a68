"""Reading checkpoint files, and finding an optimizer's state dict in them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from libmuon import state_file
from libmuon.convert.model import ConversionError, listed
from libmuon.optimizer import StateDict

_DEPTH = 4


def read_file(path: str | os.PathLike[str]) -> Any:
    """What torch.save has written: tensors, numbers, texts and plain containers, on the CPU.

    Nothing else is unpickled, so that a file cannot run code. A file of `libmuon.save_state` comes
    as a state dict, another safetensors file as names and tensors.

    Raises:
        ConversionError: if the file is damaged, of another kind, or holds other objects.
    """
    if _is_safetensors(path):
        return _read_safetensors(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else ""
        raise ConversionError(
            f"{os.fspath(path)}: not a file of tensors and plain values that torch.save has "
            f"written; nothing else is unpickled ({reason[:200]})"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ConversionError(
            f"{os.fspath(path)}: cannot be read: {str(error).splitlines()[0][:200]}"
        ) from None


def _is_safetensors(path: str | os.PathLike[str]) -> bool:
    """By the name, or by the brace behind the header's length; torch.save's archives are zips."""
    with open(path, "rb") as file:
        head = file.read(9)
    is_json = head[8:] == b"{" and not head.startswith(b"PK")
    return is_json or os.fsdecode(path).endswith(state_file.SUFFIX)


def _read_safetensors(path: str | os.PathLike[str]) -> Any:
    try:
        try:
            return state_file.read_state_file(path).state_dict()
        except ValueError as error:
            text = os.fsdecode(path)
            names, tensors, metadata = torch.ops.muon.read_state_file(text, False)
            if metadata.get("format") == state_file.FORMAT:
                raise error from None
            return dict(zip(names, tensors, strict=True))
    except ValueError as error:
        raise ConversionError(str(error)) from None


def is_state_dict(value: Any) -> bool:
    """Whether a value is an optimizer's state dict."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list | tuple)
        and all(isinstance(entry, Mapping) for entry in value["state"].values())
        and all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
            for group in value["param_groups"]
        )
    )


def find_state_dict(checkpoint: Any, key: str | None = None) -> tuple[str, StateDict]:
    """The optimizer's state dict in a checkpoint, and where it stands.

    Args:
        checkpoint: what `read_file` returns.
        key: where to look, such as ``"optimizer"`` or ``"optimizer_states.0"``.

    Raises:
        ConversionError: if there is none, or several and no key.
    """
    if key is not None:
        found = _at(checkpoint, key)
        if is_state_dict(found):
            return key, found
        inner = list(_state_dicts(found, key, _DEPTH))
        if len(inner) == 1:
            return inner[0]
        raise ConversionError(f"there is no optimizer's state dict at {key!r}: {_kind(found)}")
    places = list(_state_dicts(checkpoint, "", _DEPTH))
    if not places:
        raise ConversionError(
            "no optimizer's state dict (a mapping with 'state' and 'param_groups') in: "
            f"{_kind(checkpoint)}"
        )
    if len(places) > 1:
        keys = [place for place, _ in places]
        raise ConversionError(
            f"several optimizers' state dicts: at {listed(keys, 8)}; say which by its key"
        )
    return places[0]


def _at(value: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise ConversionError(f"there is no {part!r} (of key {key!r}) in: {_kind(value)}")
    return value


def _state_dicts(value: Any, place: str, depth: int) -> Iterator[tuple[str, StateDict]]:
    if is_state_dict(value):
        yield place, value
        return
    if depth == 0:
        return
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list | tuple):
        items = iter(enumerate(value))
    for key, item in items:
        if isinstance(item, Mapping | list | tuple):
            yield from _state_dicts(item, f"{place}.{key}" if place else str(key), depth - 1)


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {listed([str(key) for key in value], 8) or 'no keys'}"
    return f"a {type(value).__name__}"


def merged(state_dicts: Sequence[StateDict]) -> StateDict:
    """One state dict of those of all ranks, each of which has some parameters' state only.

    Raises:
        ConversionError: if their groups differ, or two have different state of one parameter.
    """
    first, *others = state_dicts
    state = dict(first["state"])
    for number, other in enumerate(others, 2):
        if not _equal(first["param_groups"], other["param_groups"]):
            raise ConversionError(f"file {number} has other groups than the first one")
        for key, entry in other["state"].items():
            known = state.setdefault(key, entry)
            if not entry:
                continue
            if known and not _equal(known, entry):
                raise ConversionError(
                    f"file {number} has another state of parameter {key} than a file before it; "
                    "all files should be of the same step"
                )
            state[key] = entry
    return {**first, "state": state}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)


def model_names(value: Any) -> dict[str, Any]:
    """Names and tensors of a model's state dict, which may stand in a checkpoint.

    Raises:
        ConversionError: if there is no mapping from names to tensors, or more than one.
    """
    found = list(_models(value, "", _DEPTH))
    if len(found) != 1:
        places = [place or "the file itself" for place, _ in found]
        raise ConversionError(
            f"expected one model's state dict, found {len(found)}"
            + (f": {listed(places)}" if places else f" in {_kind(value)}")
        )
    return found[0][1]


def _models(value: Any, place: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(value, Mapping) or is_state_dict(value):
        return
    if (
        value
        and all(isinstance(k, str) for k in value)
        and any(isinstance(item, Tensor) for item in value.values())
    ):
        yield place, {k: item for k, item in value.items() if isinstance(item, Tensor)}
        return
    if depth:
        for key, item in value.items():
            yield from _models(item, f"{place}.{key}" if place else str(key), depth - 1)
