"""How a parameter group crosses into the core: a spec text, a row of numbers, state slots.

The contract is in ``include/muon/step.h``: `parse_group_spec`, `Hyper`, `state_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from libmuon.checks import STATE_FORMATS
from libmuon.options import Group, is_builtin, is_elementwise, own_options

# What shapes the plan; `spec_text` is a function of these alone.
SPEC_OPTIONS = (
    "algorithm",
    "rows",
    "cols",
    "flatten",
    "batch_dims",
    "complex_dim",
    "split_sizes",
    "num_heads",
    "split_dim",
    "adjust_lr_fn",
    "ns_coefficients",
    "ns_steps",
    "normalization",
    "norm_factor",
    "compute_dtype",
    "form",
    "batch_size",
    "foreach",
    "nonfinite",
    "amsgrad",
    "state_dtype",
    "stochastic_rounding",
    "master",
    "offload",
)
# What is read at every step; the first ones may be tensors.
_TENSOR_OPTIONS = ("lr", "weight_decay", "momentum")
_PLAIN_OPTIONS = (
    "eps",
    "lr_multiplier",
    "betas",
    "muon_beta2",
    "nesterov",
    "maximize",
    "cautious",
    "momentum_form",
    "decay_lr",
)
HYPER_OPTIONS = _TENSOR_OPTIONS + _PLAIN_OPTIONS
# The columns of `muon::Hyper`, as what they are read.
HYPER_COLUMNS: tuple[tuple[str, type], ...] = (
    *((name, float) for name in ("lr", "weight_decay", "momentum", "eps", "lr_multiplier")),
    *((name, float) for name in ("beta1", "beta2", "muon_beta2")),
    *((name, bool) for name in ("nesterov", "maximize", "cautious")),
    *((name, bool) for name in ("heavy_ball", "decay_adjusted")),
)


def spec_text(group: Group) -> str:
    """The group's structural options as `muon::parse_group_spec` reads them."""
    algorithm = group["algorithm"]
    items: dict[str, Any] = {"algorithm": algorithm, "nonfinite": group["nonfinite"]}
    items |= _storage(group)
    if is_elementwise(algorithm):
        items["amsgrad"] = group.get("amsgrad", False)
        items["decoupled"] = algorithm != "adam"
        return _joined(items)
    for name in ("rows", "cols", "batch_dims", "split_sizes", "num_heads"):
        if group[name] is not None:
            items[name] = group[name]
    items |= {
        "flatten": group["flatten"],
        "complex_dim": group["complex_dim"] is not None,
        "split_dim": group["split_dim"],
        "adjust_lr": group["adjust_lr_fn"] or "original",
        **_schedule(group["ns_coefficients"]),
        "steps": group["ns_steps"],
        "compute_dtype": group["compute_dtype"],
        "form": group["form"],
        "batch_size": 1 if group["foreach"] is False else group["batch_size"] or 0,
    }
    for name in ("normalization", "norm_factor"):
        if group[name] is not None:
            items[name] = group[name]
    return _joined(items)


def _storage(group: Group) -> dict[str, Any]:
    items: dict[str, Any] = {}
    if group.get("state_dtype") in STATE_FORMATS:
        items["state_format"] = group["state_dtype"]
    if group.get("stochastic_rounding"):
        items["stochastic_rounding"] = True
    if group.get("master") == "split":
        items["split_master"] = True
    if group.get("offload"):
        items["offload"] = True
    return items


def _schedule(ns_coefficients: str | tuple[Any, ...]) -> dict[str, Any]:
    if isinstance(ns_coefficients, str):
        return {"schedule": ns_coefficients}
    triples = ns_coefficients if isinstance(ns_coefficients[0], tuple) else (ns_coefficients,)
    return {"coefficients": [float(value) for triple in triples for value in triple]}


def _joined(items: dict[str, Any]) -> str:
    return ";".join(f"{key}={_text(value)}" for key, value in items.items())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return repr(value) if isinstance(value, float) else str(value)


def hyper_names(group: Group) -> tuple[str, ...]:
    """The options of a group that are read at every step: `HYPER_OPTIONS`, its algorithm's own."""
    algorithm = group["algorithm"]
    own = () if is_builtin(algorithm) else tuple(own_options(algorithm))
    return HYPER_OPTIONS + own


def hyper_values(group: Group) -> tuple[Any, ...]:
    """The values of `hyper_names` as they are now, tensors read."""
    tensors = [v.item() if isinstance(v, Tensor) else v for v in map(group.get, _TENSOR_OPTIONS)]
    algorithm = group["algorithm"]
    # A class that was registered anew may have options that its groups do not have yet.
    own = {} if is_builtin(algorithm) else own_options(algorithm)
    own_values = (group.get(name, default) for name, default in own.items())
    return (*tensors, *map(group.get, _PLAIN_OPTIONS), *own_values)


def hyper_rows(groups: Sequence[Sequence[Any]]) -> list[list[float]]:
    """The hyperparameter tensor from every group's `hyper_values`, one row a group."""
    width = max(map(len, groups), default=0) - len(HYPER_OPTIONS)
    return [
        hyper_row(values[: len(HYPER_OPTIONS)])
        + [float(value) for value in values[len(HYPER_OPTIONS) :]]
        + [0.0] * (width - (len(values) - len(HYPER_OPTIONS)))
        for values in groups
    ]


def hyper_row(values: Sequence[Any]) -> list[float]:
    """The columns of `muon::Hyper` from the values of `HYPER_OPTIONS`."""
    *numbers, betas, muon_beta2, nesterov, maximize, cautious, form, decay_lr = values
    return [
        *numbers,
        *(betas or (0.9, 0.95)),
        0.95 if muon_beta2 is None else muon_beta2,
        float(nesterov),
        float(maximize),
        float(cautious),
        float(form == "heavy_ball"),
        float(decay_lr == "adjusted"),
    ]


class Slot(NamedTuple):
    """One state tensor of one parameter.

    Attributes:
        name: its key in the state dict.
        kind: "param" (the parameter's shape and strides, dtype by `state_dtype`), "statistic"
            (float32 or wider), "step" (0-d float32 on the CPU) or the name of a fixed dtype.
        sizes: its shape.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]

    def create(self, param: Tensor, dtype: torch.dtype, offload: bool = False) -> Tensor:
        """The slot's initial value, zero; in host memory with `offload`, pinned beside a GPU."""
        if self.kind == "step":
            return torch.zeros((), dtype=torch.float32)
        device = torch.device("cpu") if offload else param.device
        pin = offload and param.is_cuda
        if self.kind == "param":
            return torch.zeros_like(
                param,
                dtype=dtype,
                device=device,
                pin_memory=pin,
                memory_format=torch.preserve_format,
            )
        if self.kind == "statistic":
            dtype = torch.promote_types(torch.float32, param.dtype.to_real())
        else:
            dtype = getattr(torch, self.kind)
        return torch.zeros(self.sizes, dtype=dtype, device=device, pin_memory=pin)

    def placed(self, tensor: Tensor, param: Tensor, offload: bool) -> Tensor:
        """The tensor itself where it lives where `create` would put it, else a copy there."""
        device = torch.device("cpu") if offload or self.kind == "step" else param.device
        if tensor.device == device:
            return tensor
        pin = offload and param.is_cuda and self.kind != "step"
        return torch.empty_like(tensor, device=device, pin_memory=pin).copy_(tensor)


REMAINDER = "param_remainder"
"""The key of the 16 bits that ``master="split"`` keeps."""


def scale_key(key: str) -> str:
    """The key of the scales of a state's codes."""
    return key + "_scale"


def state_slots(spec: str, param: Tensor, name: str) -> list[Slot]:
    """The state that a spec keeps for a parameter, in the core's order."""
    slots = []
    for text in torch.ops.muon.state_layout(spec, list(param.shape), param.dtype, name):
        key, kind, sizes = text.split(" ")
        shape = () if sizes == "-" else tuple(map(int, sizes.split(",")))
        slots.append(Slot(key, kind, shape))
    return slots


_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def state_dtype(group: Group, param: Tensor) -> torch.dtype:
    """The dtype of a parameter's momentum or moments: `state_dtype`, else the gradient's."""
    choice = group["state_dtype"]
    if choice is None or choice in STATE_FORMATS:
        return (param if param.grad is None else param.grad).dtype
    dtype: torch.dtype = getattr(torch, choice)
    return _COMPLEX.get(dtype, torch.complex64) if param.is_complex() else dtype
