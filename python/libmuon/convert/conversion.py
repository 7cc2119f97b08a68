"""`convert_state_dict`: read, name, divide, write, and say what became of everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from libmuon import checks
from libmuon.convert import blocks, regroup
from libmuon.convert.detect import detect
from libmuon.convert.files import find_state_dict, is_state_dict, merged
from libmuon.convert.formats import coded_keys, is_packed
from libmuon.convert.model import (
    ConversionError,
    Entry,
    Fields,
    Parameter,
    Raw,
    Report,
    Shape,
    Source,
)
from libmuon.convert.names import Names, named, renamed
from libmuon.convert.switch import MUON_OPTIONS, choose, to_muon
from libmuon.convert.to_torch import convert_momentum, torch_dict
from libmuon.convert.write import libmuon_dict
from libmuon.optimizer import StateDict
from libmuon.options import is_elementwise

_target = checks.choice("libmuon", "torch")
_form = checks.choice("keep", "ema", "heavy_ball")


def convert_state_dict(
    state_dict: StateDict | Sequence[StateDict],
    *,
    source: str | None = None,
    to: str = "libmuon",
    names: Names = None,
    shapes: Mapping[str, Any] | None = None,
    key: str | None = None,
    rename: Sequence[str] = (),
    split: Sequence[str] = (),
    fuse: Sequence[str] = (),
    like: StateDict | None = None,
    matrices: str | Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    momentum_form: str = "keep",
    allow_partial: bool = False,
) -> tuple[StateDict, Report]:
    """Makes another optimizer's state dict one of `libmuon.Muon` or of ``torch.optim.Muon``.

    Args:
        state_dict: The state dict, or a checkpoint that holds one; or a list of those of all
            ranks, where each rank keeps the momentum of its own parameters.
        source: Whose it is (see `SOURCES`); None tells by its keys.
        to: "libmuon": groups continue the source's own trajectory, in its momentum form. "torch":
            a state dict for ``torch.optim.Muon``, with those for ``torch.optim.AdamW`` and ``Adam``
            under its keys "adamw" and "adam".
        names: A name for each parameter in the optimizer's order, or a model's state dict, whose
            shapes are then checked. Not needed where the groups have `param_names`.
        shapes: A model's state dict beside a list of names.
        key: Where in a checkpoint the optimizer is, such as "optimizer_states.0".
        rename: Rules ``OLD=NEW`` (``*`` is any text) or ``re:PATTERN=REPLACEMENT``.
        split: Rules ``WHOLE=PART[:ROWS],PART[:ROWS]``, applied after `rename`.
        fuse: Rules ``WHOLE=PART,PART``, applied after `split`.
        like: A state dict of the optimizer that will take the result: parameters are divided into
            its groups, in its order, by name.
        matrices: Which of AdamW's parameters switch to Muon where the whole file is AdamW's:
            "auto" (the default: by name and shape), "none", or globs over names.
        overrides: Group options in place of what was read, for all matrices.
        momentum_form: "keep", or the form ("ema", "heavy_ball") that momenta are converted to.
        allow_partial: Leave out what cannot be converted, instead of an error.

    Returns:
        The new state dict and the report. Tensors that need no conversion are shared.

    Raises:
        ConversionError: (a ValueError) if the input is not understood, or if something cannot be
            converted and `allow_partial` is False; its `report` says what.
        TypeError, ValueError: for arguments of wrong types or values.
    """
    _target("to", to)
    _form("momentum_form", momentum_form)
    merged_dict, places = _single(state_dict, key)
    groups = list(merged_dict["param_groups"])
    parameters, reader, remarks = _read(merged_dict, groups, source, names, shapes)
    version = reader.version(groups)
    report = Report(f"{reader.title}{f' {version}' if version else ''}", to)
    report.notes += [*places, *remarks]
    renamed(parameters, rename)
    parameters = blocks.split(parameters, split)
    parameters = blocks.fuse(parameters, fuse, as_blocks=to == "libmuon")
    if reader.name in ("adamw", "adam") and like is None:
        for parameter in choose(parameters, "auto" if matrices is None else matrices):
            to_muon(parameter, "muon", dict(MUON_OPTIONS))
    elif matrices is not None:
        raise ConversionError(
            "matrices is for files of AdamW alone, without `like`; this one is of " + reader.title
        )
    _override(parameters, overrides or {}, momentum_form)
    if to == "torch":
        if like is not None:
            raise ConversionError("`like` divides the parameters of libmuon's groups, not torch's")
        result, divided, left = torch_dict(parameters, report)
    else:
        divided, left = _divided(parameters, like)
        result = libmuon_dict(divided, report)
    _fill(report, divided, left)
    if not report.complete and not allow_partial:
        raise ConversionError(
            "some of the file cannot be converted (allow_partial leaves it out):\n"
            + "\n".join(_problems(report)),
            report,
        )
    return result, report


def _single(given: StateDict | Sequence[StateDict], key: str | None) -> tuple[StateDict, list[str]]:
    """One state dict, and where it was found."""
    several = [given] if isinstance(given, Mapping) else list(given)
    if not several:
        raise ConversionError("no state dict was given")
    found = [find_state_dict(checkpoint, key) for checkpoint in several]
    place = found[0][0]
    remarks = [f"the optimizer's state dict stands at {place!r}"] if place else []
    if len(found) > 1:
        remarks.append(f"state of {len(found)} ranks is put together")
    return merged([entry for _, entry in found]), remarks


def _read(
    state_dict: StateDict,
    groups: Sequence[Mapping[str, Any]],
    source: str | None,
    names: Names,
    shapes: Mapping[str, Any] | None,
) -> tuple[list[Parameter], Source, list[str]]:
    _check_ids(groups, state_dict["state"])
    states = list(state_dict["state"].values())
    reader = detect(groups, states, source)
    parameters: list[Parameter] = []
    entries: list[Mapping[str, Any]] = []
    known = state_dict.get("param_shapes")  # libmuon's own file says them
    for index, group in enumerate(groups):
        for position, param_id in enumerate(group["params"]):
            entry = state_dict["state"].get(param_id, {})
            entries.append(entry)
            shape = _shape(entry) if known is None else known[len(parameters)]
            parameters.append(Parameter(index, position, len(parameters), shape=shape))
    remarks = named(parameters, groups, names, shapes)
    from_model = shapes is not None or isinstance(names, Mapping)
    for parameter, entry in zip(parameters, entries, strict=True):
        _read_one(reader, parameter, groups[parameter.group], entry, from_model)
    _check_ranks(reader, parameters)
    return parameters, reader, remarks


def _check_ids(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
    ids = [param_id for group in groups for param_id in group.get("params", ())]
    if len(set(ids)) != len(ids):
        raise ConversionError("the file's groups name a parameter twice")
    if unknown := state.keys() - set(ids):
        raise ConversionError(
            f"the file has state of parameters in no group: {sorted(map(str, unknown))}"
        )


def _shape(entry: Mapping[str, Any]) -> Shape | None:
    """A parameter's shape by its state: that of the largest tensor."""
    if any(is_packed(entry[key]) for key in coded_keys(entry)):
        return None  # of an odd or an even number of columns
    tensors = [value for value in entry.values() if isinstance(value, Tensor) and value.dim()]
    if tensors:
        return tuple(max(tensors, key=Tensor.numel).shape)
    has_moments = any(isinstance(entry.get(k), Tensor) for k in ("momentum_buffer", "exp_avg"))
    return () if has_moments else None


def _read_one(
    reader: Source,
    parameter: Parameter,
    group: Mapping[str, Any],
    entry: Mapping[str, Any],
    from_model: bool,
) -> None:
    raw = Raw(
        Fields(group, f"group {parameter.group}"),
        Fields(entry, f"the state of {parameter.label}"),
        parameter.shape,
        from_model,
    )
    try:
        reader.read(raw, parameter)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ConversionError(
            f"group {parameter.group} is not as {reader.title} writes it, or is of another "
            f"version: {error}"
        ) from None
    for key in raw.state.rest:
        parameter.problems.append(f"{key} of its state is not known to {reader.title}'s reader")
    own = {"params", "param_names"}
    kept = {key: value for key, value in raw.group.rest.items() if key not in own}
    parameter.metadata = {**kept, **parameter.metadata}


def _check_ranks(reader: Source, parameters: Sequence[Parameter]) -> None:
    """Without all ranks' files, momenta of some parameters would restart at zero unnoticed."""
    if not reader.sharded or not any(parameter.state for parameter in parameters):
        return
    for parameter in parameters:
        if not parameter.state and not is_elementwise(parameter.algorithm):
            parameter.problems.append(
                "has no momentum in the file: on several ranks each has its own parameters' "
                "momenta only; give all ranks' files"
            )


def _override(
    parameters: Iterable[Parameter], overrides: Mapping[str, Any], momentum_form: str
) -> None:
    for parameter in parameters:
        if is_elementwise(parameter.algorithm):
            continue
        parameter.options |= overrides
        if momentum_form != "keep":
            old = parameter.options.get("momentum_form", "ema")
            momentum = float(parameter.options.get("momentum", 0.95))
            convert_momentum(parameter, old, momentum_form, momentum)
            parameter.options["momentum_form"] = momentum_form


def _divided(
    parameters: Sequence[Parameter], like: StateDict | None
) -> tuple[list[list[Parameter]], list[Parameter]]:
    if like is None:
        return regroup.divided(parameters), []
    if not is_state_dict(like):
        raise ConversionError("`like` should be an optimizer's state dict, with its names")
    divided, left = regroup.divided_like(parameters, like)
    for parameter in left:
        parameter.problems.append("has no place in `like`")
    return divided, left


def _fill(
    report: Report, divided: Sequence[Sequence[Parameter]], left: Sequence[Parameter]
) -> None:
    for index, members in enumerate(divided):
        report.entries += [_entry(parameter, index) for parameter in members]
    report.entries += [_entry(parameter, None) for parameter in left]


def _entry(parameter: Parameter, group: int | None) -> Entry:
    return Entry(
        parameter.label,
        parameter.shape,
        group,
        parameter.algorithm,
        tuple(parameter.moved),
        tuple(dict.fromkeys(parameter.notes)),
        tuple(dict.fromkeys(parameter.problems)),
    )


def _problems(report: Report) -> Iterable[str]:
    yield from report.problems
    for entry in report.entries:
        for problem in entry.problems:
            yield f"  {entry.name}: {problem}"
