"""Parameters that the new model has in pieces, or pieces that it has as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from libmuon.convert.model import ConversionError, Parameter, Shape
from libmuon.options import is_elementwise


def split(parameters: list[Parameter], rules: Sequence[str]) -> list[Parameter]:
    """Cuts parameters by rules ``WHOLE=PART[:ROWS],PART[:ROWS],...``; rows are equal without sizes.

    Raises:
        ConversionError: if a rule is no rule, or names or sizes do not fit.
    """
    for rule in rules:
        whole, parts, sizes = _parsed("split", rule)
        index = _find("split", rule, parameters, whole)
        parameters[index : index + 1] = _cut(rule, parameters[index], parts, sizes)
    _check_names(parameters)
    return parameters


def fuse(parameters: list[Parameter], rules: Sequence[str], as_blocks: bool) -> list[Parameter]:
    """Joins parameters along their rows, by rules ``WHOLE=PART,PART,...``.

    `as_blocks`: matrices stay matrices of their own, as `split_sizes` of the whole.

    Raises:
        ConversionError: if a rule is no rule, or the parts do not fit together.
    """
    for rule in rules:
        whole, names, sizes = _parsed("fuse", rule)
        if sizes is not None:
            raise ConversionError(f"fuse {rule!r} has sizes; the parts bring their own")
        indices = [_find("fuse", rule, parameters, name) for name in names]
        joined = _joined(rule, whole, [parameters[i] for i in indices], as_blocks)
        parameters[min(indices)] = joined
        for index in sorted(set(indices) - {min(indices)}, reverse=True):
            del parameters[index]
    _check_names(parameters)
    return parameters


def _parsed(what: str, rule: str) -> tuple[str, list[str], list[int] | None]:
    whole, separator, right = rule.partition("=")
    items = [item.strip() for item in right.split(",") if item.strip()]
    if not separator or not whole.strip() or len(items) < 2:
        raise ConversionError(f"{what} {rule!r} should be WHOLE=PART,PART,...")
    pairs = [item.rpartition(":") if ":" in item else (item, "", "") for item in items]
    sized = [bool(pair[1]) for pair in pairs]
    if not any(sized):
        return whole.strip(), items, None
    try:
        sizes = [int(size) for _, _, size in pairs]
    except ValueError:
        raise ConversionError(
            f"{what} {rule!r}: give a number of rows to every part or to none"
        ) from None
    return whole.strip(), [name for name, _, _ in pairs], sizes


def _find(what: str, rule: str, parameters: Sequence[Parameter], name: str) -> int:
    for index, parameter in enumerate(parameters):
        if parameter.name == name:
            return index
    raise ConversionError(
        f"{what} {rule!r}: there is no parameter {name!r}"
        + ("" if parameters[0].name else "; the file has no names, give them")
    )


def _check_names(parameters: Sequence[Parameter]) -> None:
    names = [parameter.name for parameter in parameters if parameter.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConversionError(f"names that occur twice after splitting and fusing: {twice}")


def _cut(
    rule: str, whole: Parameter, names: Sequence[str], sizes: list[int] | None
) -> list[Parameter]:
    shape = whole.shape
    if shape is None or not shape:
        raise ConversionError(
            f"split {rule!r}: the shape of {whole.label!r} is not known; give a model's state dict "
            "as the names"
        )
    if sizes is None:
        if shape[0] % len(names):
            raise ConversionError(
                f"split {rule!r}: {shape[0]} rows do not make {len(names)} equal parts; "
                "write PART:ROWS"
            )
        sizes = [shape[0] // len(names)] * len(names)
    if sum(sizes) != shape[0] or min(sizes) < 1:
        raise ConversionError(f"split {rule!r}: {sizes} do not add up to {shape[0]} rows")
    options = dict(whole.options)
    notes, problems = list(whole.notes), list(whole.problems)
    if not is_elementwise(whole.algorithm):
        blocks = options.pop("split_sizes", None)
        heads = options.pop("num_heads", None)
        if blocks is None and heads is None:
            notes.append("was orthogonalised as part of one matrix, and now on its own")
        elif tuple(blocks or [shape[0] // heads] * heads) != tuple(sizes):
            problems.append(f"is cut into {sizes} rows, its matrices were {blocks or heads}")
    pieces = {key: _rows(value, shape, sizes) for key, value in whole.state.items()}
    return [
        Parameter(
            whole.group,
            whole.position,
            whole.index,
            name,
            (size, *shape[1:]),
            whole.algorithm,
            dict(options),
            dict(whole.metadata),
            {key: value[index] for key, value in pieces.items()},
            [f"{text} (rows of {whole.label})" for text in whole.moved],
            list(notes),
            list(problems),
        )
        for index, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]


def _rows(value: Tensor, shape: Shape, sizes: list[int]) -> list[Tensor]:
    """The pieces of one state tensor; a count is the same for all."""
    if value.dim() == 0:
        return [value.clone() for _ in sizes]
    if value.size(0) != shape[0]:
        raise ConversionError(
            f"a state of shape {tuple(value.shape)} cannot be cut along the rows of {shape}"
        )
    return [piece.clone() for piece in torch.split(value, sizes)]


def _joined(rule: str, name: str, parts: Sequence[Parameter], as_blocks: bool) -> Parameter:
    first = parts[0]
    if any(part.shape is None or not part.shape for part in parts):
        raise ConversionError(f"fuse {rule!r}: the parts' shapes are not known")
    shapes = [part.shape or () for part in parts]
    if len({shape[1:] for shape in shapes}) > 1:
        raise ConversionError(f"fuse {rule!r}: shapes do not fit: {shapes}")
    for part in parts[1:]:
        for what in ("algorithm", "options", "metadata"):
            mine, theirs = getattr(first, what), getattr(part, what)
            if mine != theirs:
                raise ConversionError(
                    f"fuse {rule!r}: {first.label!r} and {part.label!r} differ in {what}: "
                    f"{mine} and {theirs}"
                )
        if part.state.keys() != first.state.keys():
            raise ConversionError(
                f"fuse {rule!r}: {first.label!r} has state {sorted(first.state)}, "
                f"{part.label!r} {sorted(part.state)}"
            )
    state = {key: _stacked(rule, key, [part.state[key] for part in parts]) for key in first.state}
    options, notes = dict(first.options), sorted({note for part in parts for note in part.notes})
    if not is_elementwise(first.algorithm):
        if as_blocks:
            if any(options.get(key) is not None for key in ("split_sizes", "num_heads")):
                raise ConversionError(f"fuse {rule!r}: the parts are blocks themselves")
            options["split_sizes"] = tuple(shape[0] for shape in shapes)
        else:
            notes.append("was orthogonalised in parts, and now as one matrix")
    return Parameter(
        first.group,
        first.position,
        first.index,
        name,
        (sum(shape[0] for shape in shapes), *shapes[0][1:]),
        first.algorithm,
        options,
        dict(first.metadata),
        state,
        [f"{text} (of {len(parts)} parts)" for text in first.moved],
        notes,
        [problem for part in parts for problem in part.problems],
    )


def _stacked(rule: str, key: str, values: Sequence[Tensor]) -> Tensor:
    if values[0].dim() == 0:
        if any(not torch.equal(value, values[0]) for value in values):
            raise ConversionError(
                f"fuse {rule!r}: the parts' {key} differ: {list(map(float, values))}"
            )
        return values[0].clone()
    return torch.cat(list(values))
