"""What a checkpoint file holds: ``python -m libmuon inspect``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from libmuon.convert.detect import candidates
from libmuon.convert.files import find_state_dict, model_names, read_file
from libmuon.convert.formats import coded_keys, decoded, is_packed
from libmuon.convert.model import ConversionError, table
from libmuon.convert.write import default_options
from libmuon.optimizer import StateDict
from libmuon.options import Group
from libmuon.spec import scale_key

_HEAD = ("parameter", "state", "shape", "dtype", "bytes", "format", "norm", "non-finite")


def inspect_file(path: str | os.PathLike[str], key: str | None = None) -> str:
    """A description of an optimizer's or a model's state dict in a file.

    It says whose file it is, then each group's options, then for every tensor its shape, dtype,
    bytes, format, the norm of its finite entries and how many are not finite, then totals.

    Args:
        path: what torch.save or `libmuon.save_state` has written.
        key: where in it the state dict is.

    Raises:
        ConversionError: (a ValueError) if the file cannot be read, or holds neither.
    """
    content = read_file(path)
    try:
        place, state_dict = find_state_dict(content, key)
    except ConversionError as error:
        try:
            model = model_names(content)
        except ConversionError:
            raise error from None
        rows = [_Row("", name, value, _format(value), value) for name, value in model.items()]
        return "\n".join(["contents  a model's state dict", "", *_tensors(rows)])
    lines = [f"contents  {_title(state_dict)}"]
    if "param_shapes" in state_dict:
        lines.append(f"format    {state_dict['format']}, version {state_dict['version']}")
    if place:
        lines.append(f"found at  {place}")
    lines += ["", *_groups(state_dict), "", *_tensors(list(_state(state_dict)))]
    return "\n".join(lines)


def _title(state_dict: StateDict) -> str:
    groups, states = state_dict["param_groups"], list(state_dict["state"].values())
    found = candidates(groups, states)
    titles = [f"{source.title} {source.version(groups)}".strip() for source in found]
    return f"optimizer state of {' or '.join(titles) or 'an optimizer that is not known'}"


def _groups(state_dict: StateDict) -> Iterator[str]:
    for index, group in enumerate(state_dict["param_groups"]):
        yield f"group {index}: {len(group['params'])} parameters"
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield f"  {key}={_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor({value.item():g})" if value.numel() == 1 else f"tensor{tuple(value.shape)}"
    return repr(value)


class _Row(NamedTuple):
    """One piece of state; `plain` is what codes stand for."""

    parameter: str
    key: str
    value: Any
    format: str = ""
    plain: Tensor | None = None


def _state(state_dict: StateDict) -> Iterator[_Row]:
    for index, group in enumerate(state_dict["param_groups"]):
        names = group.get("param_names")
        for position, param_id in enumerate(group["params"]):
            name = names[position] if names else f"{position} of group {index}"
            entry: Mapping[str, Any] = state_dict["state"].get(param_id, {})
            if not entry:
                yield _Row(name, "none", None)
            coded = coded_keys(entry)
            scales = {scale_key(key) for key in coded}
            for key, value in entry.items():
                if key in coded:
                    plain = _plain(group, key, entry, name)
                    yield _Row(name, key, value, f"{group.get('state_dtype')} codes", plain)
                else:
                    format_ = "scales" if key in scales else _format(value)
                    yield _Row(name, key, value, format_, value)


def _plain(group: Group, key: str, entry: Mapping[str, Any], name: str) -> Tensor | None:
    """What codes stand for; None where the file does not say enough."""
    codes = entry[key]
    try:
        sizes = list(codes.shape)
        if is_packed(codes):  # an odd last column was filled up with zeros
            sizes[-1] *= 2
        return decoded({**default_options(), **group}, key, entry, tuple(sizes), name)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError):
        return None


def _format(value: Any) -> str:
    if not isinstance(value, Tensor):
        return ""
    return "plain" if value.is_floating_point() or value.is_complex() else "integers"


def _tensors(entries: list[_Row]) -> list[str]:
    """The table and its totals."""
    rows: list[tuple[str, ...]] = [_HEAD]
    total, elements, bad, count = 0, 0, 0, 0
    for row in entries:
        value = row.value
        if not isinstance(value, Tensor):
            shown = "" if value is None else repr(value)
            kind = type(value).__name__ if shown else ""
            rows.append((row.parameter, row.key, "", kind, "", "", shown, ""))
            continue
        size = value.numel() * value.element_size()
        wrong = 0 if row.plain is None else _count_nonfinite(row.plain)
        total, elements, bad = total + size, elements + value.numel(), bad + wrong
        count += 1
        rows.append(
            (
                row.parameter,
                row.key,
                str(tuple(value.shape)),
                str(value.dtype).removeprefix("torch."),
                str(size),
                row.format,
                "?" if row.plain is None else f"{_norm(row.plain):.6g}",
                "?" if row.plain is None else str(wrong),
            )
        )
    totals = f"{count} tensors, {elements} elements, {total} bytes, {bad} non-finite"
    return [*table(rows), "", f"total  {totals}"]


def _count_nonfinite(value: Tensor) -> int:
    if not (value.is_floating_point() or value.is_complex()):
        return 0
    return int(value.numel() - torch.isfinite(value).sum().item())


def _norm(value: Tensor) -> float:
    """In float64, of the finite entries."""
    wide = torch.view_as_real(value.to(torch.complex128)) if value.is_complex() else value.double()
    finite = torch.where(torch.isfinite(wide), wide, 0.0)
    return float(torch.linalg.vector_norm(finite).item())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="a checkpoint, or a libmuon state file")
    parser.add_argument("--key", help="where in it the state dict is, such as optimizer_states.0")


def run(arguments: argparse.Namespace) -> int:
    """Prints the description; returns the exit status."""
    try:
        print(inspect_file(arguments.file, arguments.key))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
