"""Which name and shape each parameter of a state dict has."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from libmuon.convert.model import ConversionError, Parameter, Shape, listed

# What a module's state dict holds beside its parameters.
_BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")

Names = Sequence[str] | Mapping[str, Any] | None


def named(
    parameters: Sequence[Parameter],
    groups: Sequence[Mapping[str, Any]],
    names: Names,
    shapes: Mapping[str, Any] | None,
) -> list[str]:
    """Sets name, and shape where a model is given, of every parameter.

    Args:
        parameters: in the file's order; a shape is that of the state.
        groups: the file's groups, which may hold `param_names`.
        names: a name for each parameter in the optimizer's order; or a model's state dict (or a
            mapping from name to shape).
        shapes: such a mapping, beside names in the optimizer's order.

    Returns:
        Remarks for the report.

    Raises:
        ConversionError: if counts, shapes or names do not fit.
    """
    if isinstance(names, Mapping):
        names, shapes = None, names
    own = _own_names(groups)
    if own is not None:
        _set_names(parameters, own)
        if names is not None and list(names) != own:
            raise ConversionError(
                "the file has names of its own, which differ from those given: "
                f"{_difference(own, list(names))}; use rename to change them"
            )
        remark = "names are the file's own"
    elif names is not None:
        _set_names(parameters, list(names))
        remark = "names are those given, in the optimizer's order"
    elif shapes is not None:
        return _match_model(parameters, len(groups), _shapes(shapes, once=True))
    else:
        return ["nobody names the parameters: they are in the file's order"]
    if shapes is None:
        return [remark]
    _set_shapes(parameters, _shapes(shapes, once=False))
    return [f"{remark}, shapes the model's"]


def _own_names(groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """`param_names`, or ids that are names (torch.distributed.checkpoint.state_dict)."""
    found: list[str] = []
    for group in groups:
        names = group.get("param_names", group["params"])
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            return None
        found += names
    return found


def _difference(own: list[str], given: list[str]) -> str:
    if len(own) != len(given):
        return f"{len(own)} and {len(given)} names"
    first = next(i for i, pair in enumerate(zip(own, given, strict=True)) if pair[0] != pair[1])
    return f"{own[first]!r} and {given[first]!r} at position {first}"


def _set_names(parameters: Sequence[Parameter], names: list[str]) -> None:
    if len(names) != len(parameters):
        raise ConversionError(
            f"{len(names)} names for {len(parameters)} parameters; the names should be those of "
            "the parameters that the optimizer was built with, in its order"
        )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConversionError(f"names that occur twice: {listed(twice)}")
    for parameter, name in zip(parameters, names, strict=True):
        parameter.name = name


def _shapes(model: Mapping[str, Any], once: bool) -> dict[str, Shape]:
    """Names and shapes of what may be parameters; with `once`, a shared one by its first name."""
    shapes: dict[str, Shape] = {}
    seen: set[Any] = set()
    for name, value in model.items():
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.shape)
            is_shared = value.numel() > 0 and not value.is_meta and key in seen
            seen.add(key)
            if (
                (once and is_shared)
                or _BUFFERS.search(name)
                or not (value.is_floating_point() or value.is_complex())
            ):
                continue
            shapes[name] = tuple(value.shape)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            shapes[name] = tuple(value)
    return shapes


def _set_shapes(parameters: Sequence[Parameter], shapes: Mapping[str, Shape]) -> None:
    for parameter in parameters:
        shape = shapes.get(parameter.name or "")
        if shape is None:
            raise ConversionError(
                f"the model has no parameter {parameter.label!r}; it has: {listed(list(shapes), 8)}"
            )
        _set_shape(parameter, shape)


def _set_shape(parameter: Parameter, shape: Shape) -> None:
    if parameter.shape is not None and parameter.shape not in _stored_as(shape):
        raise ConversionError(
            f"the model's {parameter.label!r} has shape {shape}, its state {parameter.shape}"
        )
    parameter.shape = shape


def _stored_as(shape: Shape) -> list[Shape]:
    """The shapes in which a parameter's state may stand: its own, flattened, or folded."""
    if len(shape) < 3:
        return [shape]
    return [
        shape,
        (shape[0], math.prod(shape[1:])),
        (math.prod(shape[:-2]), *shape[-2:]),
    ]


def _match_model(
    parameters: Sequence[Parameter], group_count: int, shapes: Mapping[str, Shape]
) -> list[str]:
    """Names by shape: equal shapes follow the model's order, which a group keeps.

    Where parameters of one shape are in several groups, the order says nothing, and the caller has
    to.
    """
    unknown = [p for p in parameters if p.shape is None]
    if unknown:
        if group_count > 1 or len(shapes) != len(parameters):
            raise ConversionError(
                f"{len(unknown)} of {len(parameters)} parameters have no state, so their shapes "
                "say nothing about their names: give a list of names in the optimizer's order"
            )
        for parameter, (name, shape) in zip(parameters, shapes.items(), strict=True):
            parameter.name = name
            _set_shape(parameter, shape)
        return ["names are the model's, in its order"]
    present = {p.shape for p in parameters if p.shape is not None}
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        stored = next((s for s in _stored_as(shape) if s in present), None)
        if stored is not None:
            by_shape.setdefault(stored, []).append(name)
    for shape in sorted(present, key=str):
        members = [p for p in parameters if p.shape == shape]
        candidates = by_shape.get(shape, [])
        if len(members) != len(candidates):
            raise ConversionError(
                f"the file has {len(members)} parameters of shape {shape}, the model "
                f"{len(candidates)}: {listed(candidates)}; give a list of names in the optimizer's "
                "order"
            )
        if len({p.group for p in members}) > 1:
            raise ConversionError(
                f"parameters of shape {shape} are in several groups, so it cannot be told which is "
                f"which: {listed(candidates)}; give a list of names in the optimizer's order"
            )
        for parameter, name in zip(members, candidates, strict=True):
            parameter.name = name
            parameter.shape = shapes[name]
    return ["names are the model's, by shape; equal shapes are taken in the model's order"]


def renamed(parameters: Sequence[Parameter], rules: Sequence[str]) -> None:
    """Applies rules ``OLD=NEW``, or ``re:PATTERN=REPLACEMENT``, one after the other.

    ``*`` of an OLD stands for any text, which takes the place of the ``*`` of NEW.

    Raises:
        ConversionError: if a rule is no rule, fits no name, or makes two names one.
    """
    for rule in rules:
        pattern, replacement = _compiled(rule)
        before = [parameter.name for parameter in parameters]
        if None in before:
            raise ConversionError(f"rename {rule!r} needs names, which the file does not have")
        count = 0
        for parameter in parameters:
            match = pattern.fullmatch(parameter.name or "")
            if match:
                parameter.name = match.expand(replacement)
                count += 1
        if not count:
            raise ConversionError(
                f"rename {rule!r} fits none of: {listed([str(n) for n in before])}"
            )
        names = [str(parameter.name) for parameter in parameters]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConversionError(f"rename {rule!r} makes names equal: {listed(twice)}")


def _compiled(rule: str) -> tuple[re.Pattern[str], str]:
    is_regex = rule.startswith("re:")
    old, separator, new = rule.removeprefix("re:").rpartition("=")
    if not separator or not old:
        raise ConversionError(f"rename {rule!r} should be OLD=NEW or re:PATTERN=REPLACEMENT")
    if is_regex:
        try:
            return re.compile(old), new
        except re.error as error:
            raise ConversionError(f"rename {rule!r} is no regular expression: {error}") from None
    if old.count("*") < new.count("*"):
        raise ConversionError(f"rename {rule!r} has more * on the right than on the left")
    pattern = "(.*)".join(map(re.escape, old.split("*")))
    parts = [part.replace("\\", "\\\\") for part in new.split("*")]
    starred = [f"\\g<{index}>{part}" for index, part in enumerate(parts[1:], 1)]
    return re.compile(pattern), parts[0] + "".join(starred)
