"""The optimizers of neuralops (``neuralops.trainer.optimizers.muon``), as presets over libmuon.

Names, defaults and results are those of neuralops 1.6.0, with these corrections:

- Groups and named parameters are accepted, values are checked, the caller's dicts are left alone,
  and an unknown ``"optimizer"`` is an error.
- The momentum is float32 whatever the parameter is; ``state_dtype`` chooses (None is neuralops').
- Nesterov momentum is an option, off as in neuralops.
- float64 matrices are orthogonalised in float64, and a GPU does not change the precision unasked:
  ``compute_dtype`` chooses.
- The factory sends embeddings and heads to AdamW; ``routing="all_2d"`` is neuralops' rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import libmuon
from libmuon import checks
from libmuon.compat.params import given_groups, refuse_unordered, require_params
from libmuon.options import CHECKS, Group

__all__ = [
    "Muon",
    "MuonAdamW",
    "create_muon_adamw_optimizer",
    "zeropower_via_newtonschulz5",
]

_MUON: Group = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01, "ns_steps": 5}
_ADAMW: Group = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_DEFAULTS = {"muon": _MUON, "adamw": _ADAMW}


def zeropower_via_newtonschulz5(
    G: Tensor,  # noqa: N803 (neuralops' name)
    steps: int = 5,
    eps: float = 1e-7,
    *,
    compute_dtype: str | torch.dtype = "auto",
) -> Tensor:
    """Orthogonalises the matrices in the last two dims of ``G``.

    Args:
        G: [..., rows, cols].
        steps: iterations of (3.4445, -4.775, 2.0315).
        eps: added to the norm.
        compute_dtype: dtype whose error bound the result meets.

    Returns:
        A tensor of the shape and dtype of ``G``.
    """
    if not isinstance(G, Tensor):
        raise TypeError(f"G should be a tensor but is: {type(G).__name__}")
    if G.dim() < 2:
        raise ValueError(f"G should be matrices [..., rows, cols] but has shape {tuple(G.shape)}")
    return libmuon.orthogonalize(
        G,
        "muon",
        steps,
        eps,
        normalization="add",
        compute_dtype=compute_dtype,
        rows=-2,
        cols=-1,
    )


class Muon(libmuon.Muon):
    """neuralops' ``Muon``: heavy-ball momentum without Nesterov, for matrices.

    Args:
        params: tensors, (name, tensor) pairs or group dicts; every parameter has two dims.
        lr: learning rate.
        momentum: coefficient of the buffer b = momentum b + g.
        weight_decay: decoupled: weights are multiplied by 1 - lr * weight_decay.
        ns_steps: iterations.
        nesterov: orthogonalise g + momentum b instead of b.
        state_dtype: dtype of the momentum.
        compute_dtype: of the orthogonalisation.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        ns_steps: int = 5,
        *,
        nesterov: bool = False,
        state_dtype: str | torch.dtype | None = torch.float32,
        compute_dtype: str | torch.dtype = "auto",
    ) -> None:
        groups = given_groups(params, "create_muon_adamw_optimizer takes a whole model")
        for group in groups:
            require_params(group)
        super().__init__(
            groups,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients="muon",
            ns_steps=ns_steps,
            momentum_form="heavy_ball",
            normalization="add",
            state_dtype=state_dtype,
            compute_dtype=compute_dtype,
        )


class MuonAdamW(Muon):
    """neuralops' ``MuonAdamW``: groups that say ``"optimizer": "muon"`` or ``"adamw"``.

    A Muon group takes ``lr`` (0.02), ``momentum`` (0.95), ``weight_decay`` (0.01) and ``ns_steps``
    (5), an AdamW group ``lr`` (5e-5), ``betas`` (0.9, 0.999), ``eps`` (1e-8) and ``weight_decay``
    (0.01). All of libmuon's options may stand in a group too. Moments follow the gradient's dtype.

    Args:
        param_groups: the groups; left as they are.
        nesterov: of Muon groups.
        state_dtype: dtype of the momentum of Muon groups.
        compute_dtype: of the orthogonalisation.

    Raises:
        ValueError: for a group without ``"optimizer"``, or with another value.
    """

    def __init__(
        self,
        param_groups: Iterable[Mapping[str, Any]],
        *,
        nesterov: bool = False,
        state_dtype: str | torch.dtype | None = torch.float32,
        compute_dtype: str | torch.dtype = "auto",
    ) -> None:
        if isinstance(param_groups, Mapping | Tensor) or not isinstance(param_groups, Iterable):
            raise TypeError(
                f"param_groups should be a list of dicts but is: {type(param_groups).__name__}"
            )
        groups = [_completed(group) for group in param_groups]
        super().__init__(
            groups, nesterov=nesterov, state_dtype=state_dtype, compute_dtype=compute_dtype
        )

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group that says its ``"optimizer"``."""
        super().add_param_group(_completed(param_group))


def _completed(group: Mapping[str, Any]) -> Group:
    if not isinstance(group, Mapping):
        raise TypeError(f"a parameter group should be a dict but is: {type(group).__name__}")
    require_params(group)
    if "optimizer" not in group:
        raise ValueError(
            f"each parameter group needs 'optimizer': 'muon' or 'adamw'; it has: {sorted(group)}"
        )
    kind = checks.choice(*_DEFAULTS)("optimizer", group["optimizer"])
    own = {"state_dtype": None} if kind == "adamw" else {}
    return _DEFAULTS[kind] | own | dict(group)


def create_muon_adamw_optimizer(
    model_or_params: nn.Module | Iterable[Any],
    lr_muon: float = 0.02,
    lr_adam: float = 5e-5,
    weight_decay: float = 0.01,
    momentum: float = 0.95,
    ns_steps: int = 5,
    *,
    routing: str = "auto",
) -> torch.optim.Optimizer:
    """Muon for the matrices of a model and AdamW for everything else, in one optimizer.

    Args:
        model_or_params: a module, or tensors or (name, tensor) pairs; frozen ones are left out.
        lr_muon: learning rate of the matrices.
        lr_adam: learning rate of everything else.
        weight_decay: of both.
        momentum: of Muon.
        ns_steps: of Muon.
        routing: "auto": matrices are the 2D weights that `libmuon.group_parameters` gives to Muon:
            no embeddings, heads or very thin ones. Each is taken whole, as it is stored; give
            `libmuon.Muon` the model for blocks and transposed weights. "all_2d": every 2D
            parameter, neuralops' rule.

    Returns:
        `MuonAdamW`, or ``torch.optim.AdamW`` where there is no matrix.

    Raises:
        TypeError: if ``model_or_params`` is neither a module nor an iterable of parameters.
        ValueError: if nothing requires a gradient, or a number is out of range, used or not.
    """
    checks.choice("auto", "all_2d")("routing", routing)
    for name, value, check in (
        ("lr_muon", lr_muon, CHECKS["lr"]),
        ("lr_adam", lr_adam, CHECKS["lr"]),
        ("weight_decay", weight_decay, CHECKS["weight_decay"]),
        ("momentum", momentum, CHECKS["momentum"]),
        ("ns_steps", ns_steps, CHECKS["ns_steps"]),
    ):
        check(name, value)
    refuse_unordered(model_or_params)
    is_iterable = isinstance(model_or_params, Iterable)
    if isinstance(model_or_params, Tensor | str) or not (
        is_iterable or isinstance(model_or_params, nn.Module)
    ):
        raise TypeError(
            f"expected a module or an iterable of parameters, got {type(model_or_params).__name__}"
        )
    source = model_or_params if isinstance(model_or_params, nn.Module) else list(model_or_params)
    matrices, others = _split(source, routing)
    if not matrices:
        return torch.optim.AdamW(others, lr=lr_adam, weight_decay=weight_decay)
    groups: list[Group] = [
        {
            "params": matrices,
            "optimizer": "muon",
            "lr": lr_muon,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "ns_steps": ns_steps,
        }
    ]
    if others:
        groups.append(
            {"params": others, "optimizer": "adamw", "lr": lr_adam, "weight_decay": weight_decay}
        )
    return MuonAdamW(groups)


def _split(source: nn.Module | list[Any], routing: str) -> tuple[list[Any], list[Any]]:
    """Matrices, and everything else that requires a gradient, with their names where known."""
    named = source.named_parameters() if isinstance(source, nn.Module) else source
    entries = [entry if isinstance(entry, tuple) else ("", entry) for entry in named]
    for index, (_, p) in enumerate(entries):
        if not isinstance(p, Tensor):
            raise TypeError(
                f"expected parameters or (name, parameter) pairs, but entry {index} is a "
                f"{type(p).__name__}; groups go to MuonAdamW"
            )
    trained = [(name, p) for name, p in entries if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient: there is nothing to optimize")
    if routing == "all_2d":
        matrix_ids = {id(p) for _, p in trained if p.dim() == 2}
    else:
        rules = [(lambda name, p, module: p.dim() > 2, "adamw")] if any(
            p.dim() > 2 for _, p in trained
        ) else None  # fmt: skip
        matrix_ids = {
            id(p[1] if isinstance(p, tuple) else p)
            for group in libmuon.group_parameters(source, rules)
            if group["algorithm"] == "muon"
            for p in group["params"]
        }
    has_names = all(name for name, _ in trained)
    keep = [(name, p) if has_names else p for name, p in trained]
    is_matrix = [id(p) in matrix_ids for _, p in trained]
    return (
        [entry for entry, matrix in zip(keep, is_matrix, strict=True) if matrix],
        [entry for entry, matrix in zip(keep, is_matrix, strict=True) if not matrix],
    )
