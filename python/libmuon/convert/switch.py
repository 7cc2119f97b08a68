"""From AdamW to Muon in the middle of a run."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from libmuon.convert.model import ConversionError, Parameter, listed
from libmuon.options import Group, is_elementwise
from libmuon.roles import MAX_ASPECT, MIN_SIDE, vocabulary_name

# What AdamW's lr and decay mean to Muon: an update of AdamW's size for every shape.
MUON_OPTIONS: Group = {"adjust_lr_fn": "match_rms_adamw"}


def choose(parameters: Sequence[Parameter], matrices: str | Sequence[str]) -> list[Parameter]:
    """The parameters that Muon takes over from AdamW.

    Args:
        parameters: all of the file.
        matrices: "auto", by name and shape as `libmuon.group_parameters`; "none"; or globs over
            whole names.

    Raises:
        ConversionError: if names or shapes are missing, a glob fits nothing, or what it fits is no
            matrix.
    """
    if matrices == "none":
        return []
    adam = [p for p in parameters if is_elementwise(p.algorithm)]
    if matrices == "auto":
        unnamed = [p.label for p in adam if p.name is None]
        if unnamed:
            raise ConversionError(
                "AdamW's parameters have no names, so embeddings and heads cannot be told from "
                f"other matrices ({listed(unnamed)}): give names, or say which are matrices "
                "(matrices='none' leaves all to AdamW)"
            )
        return [p for p in adam if _is_matrix(p)]
    globs = [matrices] if isinstance(matrices, str) else list(matrices)
    for glob in globs:
        if not any(fnmatch.fnmatchcase(p.name or "", glob) for p in adam):
            raise ConversionError(f"matrices {glob!r} fits no parameter that AdamW trains")
    chosen = [p for p in adam if any(fnmatch.fnmatchcase(p.name or "", glob) for glob in globs)]
    for parameter in chosen:
        if parameter.shape is None or len(parameter.shape) != 2:
            raise ConversionError(
                f"{parameter.label!r} of shape {parameter.shape} is no matrix by itself; to choose "
                "which dims are rows and columns, give `like`, a state dict of the new optimizer"
            )
    return chosen


def _is_matrix(parameter: Parameter) -> bool:
    shape = parameter.shape
    return (
        shape is not None
        and len(shape) == 2
        and min(shape) >= MIN_SIDE
        and max(shape) <= MAX_ASPECT * min(shape)
        and vocabulary_name(parameter.name or "") is None
    )


def to_muon(parameter: Parameter, algorithm: str, options: Group) -> None:
    """Makes AdamW's state a momentum; `options` are the new group's, over AdamW's lr and decay."""
    was = parameter.algorithm
    carried = {"lr", "weight_decay", "maximize"}
    kept: Group = {k: v for k, v in parameter.options.items() if k in carried}
    parameter.options = {**kept, "momentum_form": "ema", **options}
    parameter.algorithm = algorithm
    state, parameter.state = parameter.state, {}
    parameter.moved = []
    if "exp_avg" in state:
        parameter.keep("momentum_buffer", "exp_avg", state["exp_avg"])
        unused = [key for key in ("exp_avg_sq", "max_exp_avg_sq", "step") if key in state]
        why = "Muon has no second moment and no bias correction"
        parameter.leave(", ".join(unused), why)
    parameter.notes.append(
        f"switches from {was} to {algorithm}: exp_avg is a weighted mean of gradients, as an "
        "EMA momentum is, with beta1 in place of the momentum behind it"
    )
