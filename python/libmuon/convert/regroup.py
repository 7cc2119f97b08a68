"""The groups of the new optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libmuon.convert.model import ConversionError, Parameter, listed
from libmuon.convert.switch import to_muon
from libmuon.options import Group, group_checks, is_elementwise


def divided(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The file's groups, cut where parameters of one have different options."""
    groups: dict[Any, list[Parameter]] = {}
    for parameter in parameters:
        key = (parameter.group, *_comparable(parameter))
        groups.setdefault(key, []).append(parameter)
    # In the order of the file's groups, whatever was fused or split in between.
    return sorted(groups.values(), key=lambda members: members[0].group)


def _comparable(parameter: Parameter) -> tuple[str, str, str]:
    options, metadata = sorted(parameter.options.items()), sorted(parameter.metadata.items())
    return parameter.algorithm, repr(options), repr(metadata)


def divided_like(
    parameters: Sequence[Parameter], template: Mapping[str, Any]
) -> tuple[list[list[Parameter]], list[Parameter]]:
    """Parameters in the groups and the order of `template`, a state dict with names.

    What AdamW has trained and the template gives to a matrix algorithm switches to it.

    Returns:
        Members of each group, and the parameters that it does not have.

    Raises:
        ConversionError: if names are missing, or parameters of one group disagree.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    if None in by_name:
        raise ConversionError("dividing parameters as `like` does needs their names; give them")
    members = []
    for index, group in enumerate(template["param_groups"]):
        members.append(list(_members(index, group, by_name)))
    left = [by_name[name] for name in by_name]
    return members, left


def _members(
    index: int, group: Mapping[str, Any], by_name: dict[str | None, Parameter]
) -> Iterator[Parameter]:
    names = group.get("param_names")
    if not names and group["params"]:
        raise ConversionError(
            f"group {index} of `like` has no names; build that optimizer with named parameters"
        )
    found: list[Parameter] = []
    for position, name in enumerate(names or ()):
        parameter = by_name.pop(name, None)
        if parameter is None:
            parameter = Parameter(-1, position, -1, name, None, group["algorithm"])
            parameter.options = _own(group)
            parameter.problems.append("is not in the file")
        else:
            _adapt(parameter, group)
            found.append(parameter)
        yield parameter
    for parameter in found[1:]:
        differing = {
            key
            for key in found[0].options.keys() | parameter.options.keys()
            if found[0].options.get(key) != parameter.options.get(key)
        }
        if differing:
            raise ConversionError(
                f"group {index} of `like` has {found[0].label!r} and {parameter.label!r}, which "
                f"the file trains with different {listed(sorted(differing))}; they need groups of "
                "their own"
            )


def _adapt(parameter: Parameter, group: Mapping[str, Any]) -> None:
    wanted = group["algorithm"]
    if wanted == parameter.algorithm:
        return
    if is_elementwise(parameter.algorithm) and not is_elementwise(wanted):
        own = _own(group)
        options = {key: own[key] for key in own if key not in ("lr", "weight_decay", "maximize")}
        to_muon(parameter, wanted, options)
        return
    parameter.problems.append(
        f"is trained by {parameter.algorithm!r} in the file and by {wanted!r} in `like`"
    )
    parameter.algorithm, parameter.options, parameter.state = wanted, _own(group), {}


def _own(group: Mapping[str, Any]) -> Group:
    known = group_checks(group["algorithm"])
    return {key: value for key, value in group.items() if key in known and key != "algorithm"}
