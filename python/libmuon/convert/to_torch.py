"""What torch.optim.Muon can go on with, and what it cannot express."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from libmuon.convert.common import QUINTIC
from libmuon.convert.formats import coded_keys, decoded
from libmuon.convert.model import Parameter, Report, Shape, listed
from libmuon.convert.regroup import divided
from libmuon.convert.write import complete_group
from libmuon.optimizer import StateDict
from libmuon.options import Group, is_elementwise
from libmuon.spec import REMAINDER, scale_key

_TITLES = {"muon": "torch.optim.Muon", "adamw": "torch.optim.AdamW", "adam": "torch.optim.Adam"}
_MUON = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
)
_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
_STATE = {
    False: {"momentum_buffer"},
    True: {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"},
}
_FACTORS = (None, "original", "match_rms_adamw", "spectral_unclamped")


def torch_dict(
    parameters: Sequence[Parameter], report: Report
) -> tuple[StateDict, list[list[Parameter]], list[Parameter]]:
    """A state dict for torch.optim.Muon; those for torch.optim.AdamW and Adam stand in it.

    They are under the keys "adamw" and "adam", where such parameters exist.

    Returns:
        The state dict, the members of its groups, and the parameters that it cannot hold.
    """
    of_kind: dict[str, list[Parameter]] = {kind: [] for kind in _TITLES}
    left: list[Parameter] = []
    for parameter in parameters:
        _decode(parameter)
        if is_elementwise(parameter.algorithm):
            of_kind[parameter.algorithm].append(parameter)
        elif parameter.shape is not None and len(parameter.shape) != 2:
            text = f"torch.optim.Muon takes 2D parameters only, not {parameter.shape}"
            parameter.problems.append(text)
            left.append(parameter)
        else:
            _express(parameter)
            of_kind["muon"].append(parameter)
    groups = {kind: divided(members) for kind, members in of_kind.items()}
    dicts = {kind: _dict(kind, members, report) for kind, members in groups.items()}
    result = dicts["muon"]
    result |= {kind: dicts[kind] for kind in ("adamw", "adam") if groups[kind]}
    if groups["muon"]:
        report.notes.append("torch.optim.Muon iterates in bfloat16")
    return result, [members for kind in _TITLES for members in groups[kind]], left


def _dict(kind: str, groups: Sequence[Sequence[Parameter]], report: Report) -> StateDict:
    written: list[Group] = []
    state: dict[int, dict[str, Tensor]] = {}
    count = 0
    for members in groups:
        options = complete_group(members)
        keys = _MUON if kind == "muon" else _ADAM
        own = {key: options[key] for key in keys}
        group: Group = {**members[0].metadata, **own}
        if kind != "muon":
            group |= {"foreach": None, "fused": None, "capturable": False}
            group |= {"differentiable": False, "decoupled_weight_decay": kind == "adamw"}
        if all(parameter.name for parameter in members):
            group["param_names"] = [parameter.name for parameter in members]
        group["params"] = list(range(count, count + len(members)))
        for param_id, parameter in zip(group["params"], members, strict=True):
            if parameter.state:
                state[param_id] = dict(parameter.state)
        count += len(members)
        written.append(group)
        shown = ", ".join(f"{key}={value!r}" for key, value in own.items())
        names = listed([parameter.label for parameter in members])
        report.groups.append(f"{_TITLES[kind]}: {shown}  [{len(members)}: {names}]")
    return {"state": state, "param_groups": written}


def _decode(parameter: Parameter) -> None:
    """Plain numbers in place of codes, and nothing that only libmuon reads."""
    coded = coded_keys(parameter.state)
    if coded and parameter.shape is None:
        parameter.problems.append(
            "its state is packed codes of an unknown shape: give a model's state dict as the names"
        )
        parameter.state = {}
    options = complete_group([parameter]) if coded else {}
    for key in coded_keys(parameter.state):
        state = parameter.state
        state[key] = decoded(options, key, state, parameter.shape or (), parameter.label)
        del state[scale_key(key)]
        parameter.moved.append(f"{key} decoded from {options['state_dtype']}")
    for key in parameter.state.keys() - _STATE[is_elementwise(parameter.algorithm)]:
        del parameter.state[key]
        if key == REMAINDER:
            parameter.problems.append("torch's optimizers cannot keep the bits of master='split'")
        else:
            parameter.leave(key, "no optimizer of torch has it")


def _express(parameter: Parameter) -> None:
    """The parameter's options and state in torch's terms, and problems where it has none."""
    options = complete_group([parameter])
    problems = parameter.problems
    if parameter.algorithm != "muon":
        problems.append(f"torch.optim.Muon has no {parameter.algorithm!r}")
    for key in ("split_sizes", "num_heads", "complex_dim"):
        if options[key] is not None:
            problems.append(f"torch.optim.Muon has no {key}={options[key]!r}")
    for key in ("maximize", "cautious"):
        if options[key]:
            problems.append(f"torch.optim.Muon has no {key}=True")
    if (options["rows"], options["cols"]) not in ((None, None), ((0,), (1,)), ((-2,), (-1,))):
        problems.append("torch.optim.Muon has no rows and cols")
    if options["normalization"] == "add":
        parameter.notes.append("eps is added to the norm there, torch takes it as a lower bound")
    coefficients = _coefficients(options, problems)
    _set_ema(parameter, options)
    lr, decay, factor = _rates(parameter, options)
    if "initial_lr" in parameter.metadata:
        scale = lr / options["lr"] if options["lr"] else 1.0
        parameter.metadata["initial_lr"] = float(parameter.metadata["initial_lr"]) * scale
    parameter.algorithm = "muon"
    parameter.options = {
        "lr": lr,
        "weight_decay": decay,
        "momentum": options["momentum"],
        "nesterov": options["nesterov"],
        "ns_coefficients": coefficients,
        "ns_steps": options["ns_steps"],
        "eps": options["eps"],
        "adjust_lr_fn": factor,
    }


def _coefficients(options: Group, problems: list[str]) -> tuple[float, ...]:
    """One triple, normalised as torch does; else a problem."""
    given, steps = options["ns_coefficients"], options["ns_steps"]
    spec = given if isinstance(given, str) else None
    if spec is not None:
        flat = torch.ops.muon.schedule_coefficients(f"schedule={spec}")
        rows = [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)]
    else:
        rows = list(given) if isinstance(given[0], tuple) else [tuple(given)]
    if len(set(rows[:steps])) > 1:
        problems.append(f"torch.optim.Muon has one triple of coefficients, not {spec or 'a list'}")
        rows = [QUINTIC]  # one row of several, repeated, would diverge
    default_factor = 1.0 if spec in (None, "muon", "you") else math.nan
    factor = default_factor if options["norm_factor"] is None else options["norm_factor"]
    if factor != 1.0:
        problems.append("torch.optim.Muon has no factor on the norm")
    return tuple(rows[0])


def _set_ema(parameter: Parameter, options: Group) -> None:
    """Heavy-ball momentum times (1 - momentum)."""
    if options["momentum_form"] == "ema":
        return
    convert_momentum(parameter, "heavy_ball", "ema", float(options["momentum"]))


def convert_momentum(parameter: Parameter, old: str, new: str, momentum: float) -> None:
    """Rescales the buffer between b = m b + g and b = m b + (1 - m) g.

    The two buffers are proportional as long as m has never changed.
    """
    if old == new:
        return
    if momentum >= 1.0:
        parameter.problems.append(f"a {old} momentum of 1 has no {new} form")
        return
    factor = 1.0 - momentum if new == "ema" else 1.0 / (1.0 - momentum)
    key = "momentum_buffer"
    if key in coded_keys(parameter.state):
        key = scale_key(key)
    if key in parameter.state:
        parameter.state[key] = parameter.state[key] * factor
        parameter.moved.append(f"{key} * {factor:.6g} ({old} -> {new})")
    parameter.notes.append(
        f"{old} -> {new} by the factor {factor:.6g} is exact only if the momentum has always been "
        f"{momentum:g}"
    )


def _rates(parameter: Parameter, options: Group) -> tuple[float, float, Any]:
    """lr, weight_decay and adjust_lr_fn with the same product lr * factor, and lr * decay."""
    lr, decay = float(options["lr"]), float(options["weight_decay"])
    kind, multiplier = options["adjust_lr_fn"], float(options["lr_multiplier"])
    adjusted = options["decay_lr"] == "adjusted" and decay != 0.0
    if kind in _FACTORS and multiplier == 1.0 and not adjusted:
        if kind == "spectral_unclamped":
            parameter.notes.append("adjust_lr_fn='spectral_unclamped' needs torch 2.15")
        return lr, decay, kind
    shape = parameter.shape
    if shape is None or len(shape) != 2:
        parameter.problems.append("without its shape the learning rate cannot be adapted")
        return lr, decay, None if kind not in _FACTORS else kind
    own = _factor(kind, shape) * multiplier
    target = kind if kind in _FACTORS else "original"
    new_lr = lr * own / _factor(target, shape)
    rate_of_decay = lr * own * decay if adjusted else lr * decay
    new_decay = rate_of_decay / new_lr if new_lr else decay
    if (new_lr, new_decay) != (lr, decay):
        parameter.notes.append(
            f"lr {lr:g} -> {new_lr:g} and weight_decay {decay:g} -> {new_decay:g}, so that update "
            "and decay stay what they were"
        )
    return new_lr, new_decay, target


def _factor(kind: str | None, shape: Shape) -> float:
    rows, cols = shape
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if kind == "spectral_unclamped":
        return math.sqrt(rows / cols)
    return 1.0 if kind == "unscaled" else math.sqrt(max(1.0, rows / cols))
