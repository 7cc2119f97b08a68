"""muonium's ``Muon``: its names and defaults over `libmuon.Muon`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import libmuon
from libmuon import checks
from libmuon.compat.muonium.algorithms import registered, registered_algorithms
from libmuon.compat.muonium.orthogonalize import OrthogonalizationStrategy, schedule
from libmuon.compat.params import given_groups, named_members, require_params
from libmuon.options import CHECKS, Group, errors_about, group_checks, is_elementwise

# What muonium calls our options in a group.
_RENAMED = {
    "wd": "weight_decay",
    "use_cautious_wd": "cautious",
    "orthogonalization_strategy": "ns_coefficients",
}
_ADAM_KEYS = ("amsgrad", "betas", "eps", "decoupled_weight_decay", "fused", "foreach")


class Muon(libmuon.Muon):
    """muonium's ``Muon``: Muon, NorMuon, registered algorithms and Adam in one optimizer.

    Args:
        params: tensors or (name, tensor) pairs (one Muon group), or group dicts with ``algorithm``
            "muon" (default), "normuon", "adam", "adamw" or a registered name. Matrix groups take
            ``lr``, ``wd``, ``use_cautious_wd``, ``momentum``, ``nesterov``, ``ns_steps``,
            ``orthogonalization_strategy``, ``maximize``, ``flatten``, ``split_sizes``, ``foreach``,
            ``batch_size`` and their algorithm's options; Adam groups ``lr``, ``wd``, ``betas``,
            ``eps``, ``amsgrad``, ``decoupled_weight_decay``, ``maximize``, ``fused``, ``foreach``.
            All of libmuon's options may stand in a group too.
        lr: learning rate of every group that has none; a number or a one-element tensor.
        wd: decoupled weight decay of every group that has none.
        use_cautious_wd: decay only where update and parameter agree in sign (not in Adam groups).
        maximize: ascend.
        momentum: coefficient of the heavy-ball buffer b = momentum b + g.
        nesterov: orthogonalise g + momentum b instead of b.
        ns_steps: iterations; above 5, Polar Express repeats its last row.
        orthogonalization_strategy: "polar_express" or "newton_schulz".
        amsgrad: of Adam groups.
        adam_betas: of Adam groups.
        adam_eps: of Adam groups.
        is_adamw: accepted; see the module's text.
        fused_adam: accepted as torch does.
        foreach_adam: accepted as torch does.
        foreach: False computes one matrix at a time; the numbers are the same.
        batch_size: matrices computed together at most; None is chosen by size.
        decay_lr: "lr", or "adjusted" for muonium's own rule, lr * shape factor * wd.
        state_dtype: dtype of the momentum. Adam's moments follow the gradient.
        compute_dtype: of the orthogonalisation; "auto" chooses by device.

    Raises:
        TypeError: for a module, a set or a single tensor or dict as ``params``, and for values of a
            wrong type.
        ValueError: for values out of range, unknown options and parameters that are no matrices.
        NotImplementedError: never for complex matrices, which muonium refuses: libmuon has them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        wd: float = 0.1,
        use_cautious_wd: bool = True,
        maximize: bool = False,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        orthogonalization_strategy: OrthogonalizationStrategy = "polar_express",
        amsgrad: bool = False,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        is_adamw: bool = True,
        fused_adam: bool | None = None,
        foreach_adam: bool | None = None,
        foreach: bool | None = None,
        batch_size: int | None = None,
        *,
        decay_lr: str = "lr",
        state_dtype: str | torch.dtype | None = torch.float32,
        compute_dtype: str | torch.dtype = "auto",
    ) -> None:
        checks.flag("is_adamw", is_adamw)
        checks.flag("use_cautious_wd", use_cautious_wd)
        self._adam_defaults: Group = {
            "lr": lr,
            "weight_decay": CHECKS["weight_decay"]("wd", wd),
            "amsgrad": checks.flag("amsgrad", amsgrad),
            "betas": checks.betas("adam_betas", adam_betas),
            "eps": _invalid("epsilon", "adam_eps", adam_eps),
            "maximize": maximize,
            "cautious": False,
            "fused": CHECKS["fused"]("fused_adam", fused_adam),
            "foreach": CHECKS["foreach"]("foreach_adam", foreach_adam),
            "state_dtype": None,
        }
        super().__init__(
            self._translated(params),
            lr=lr,
            weight_decay=wd,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=schedule("orthogonalization_strategy", orthogonalization_strategy),
            ns_steps=ns_steps,
            cautious=use_cautious_wd,
            maximize=maximize,
            momentum_form="heavy_ball",
            normalization="add",
            foreach=foreach,
            batch_size=batch_size,
            decay_lr=decay_lr,
            state_dtype=state_dtype,
            compute_dtype=compute_dtype,
        )

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group in muonium's names; an error leaves the optimizer as it was."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        super().add_param_group(self._translated_group(len(self.param_groups), param_group))

    def _translated(self, params: Iterable[Any]) -> list[Group]:
        given = given_groups(
            params, "pass its parameters() or named_parameters(), or give it to libmuon.Muon"
        )
        groups = [self._translated_group(index, group) for index, group in enumerate(given)]
        groups = [group for group in groups if group["params"]]
        if not groups:
            raise ValueError("optimizer got an empty parameter list")
        return groups

    def _translated_group(self, index: int, group: Mapping[str, Any]) -> Group:
        """The group in libmuon's names; one that is in them already comes back as it is."""
        with errors_about(f"parameter group {index}"):
            members = named_members(require_params(group))
            algorithm = _checked_algorithm(group.get("algorithm", "muon"))
            _refuse_misspelt(group, algorithm)
            result = _renamed(group)
            result["params"] = [(name, param) if name else param for name, param in members]
            result["algorithm"] = algorithm
            if is_elementwise(algorithm):
                return self._adam_group(result)
            labelled = [(name or f"parameter {i}", p) for i, (name, p) in enumerate(members)]
            if algorithm in registered:
                for label, param in labelled:
                    with errors_about(label):
                        registered[algorithm].validate_param(param)
            return _with_layout(result, labelled)

    def _adam_group(self, group: Group) -> Group:
        if group["algorithm"] in ("adam", "adamw"):
            decoupled = group.pop("decoupled_weight_decay", group["algorithm"] == "adamw")
            is_decoupled = checks.flag("decoupled_weight_decay", decoupled)
            group["algorithm"] = "adamw" if is_decoupled else "adam"
        return {**self._adam_defaults, **group}


def _invalid(what: str, name: str, value: Any) -> float:
    """A number >= 0, refused in muonium's words."""
    try:
        result: float = checks.number()(name, value)
    except ValueError as error:
        raise ValueError(f"Invalid {what}: {error}") from None
    return result


def _checked_algorithm(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"algorithm should be a string but is: {name!r} ({type(name).__name__})")
    if name.lower() not in registered_algorithms():
        raise ValueError(f"Unknown algorithm {name!r}; known: {', '.join(registered_algorithms())}")
    return name.lower()


def _refuse_misspelt(group: Mapping[str, Any], algorithm: str) -> None:
    known = (*_RENAMED, *_ADAM_KEYS, *group_checks(algorithm))
    for key in group.keys() - set(known) - {"params"}:
        close = difflib.get_close_matches(str(key).lower(), known, n=1, cutoff=0.8)
        if close:
            raise ValueError(
                f"unknown option {key!r} in a parameter group; did you mean {close[0]!r}?"
            )


def _renamed(group: Mapping[str, Any]) -> Group:
    """A copy in which muonium's names are libmuon's, each value checked under the name it had."""
    result = dict(group)
    for theirs, ours in _RENAMED.items():
        if theirs not in result:
            continue
        value = result.pop(theirs)
        check = schedule if theirs == "orthogonalization_strategy" else CHECKS[ours]
        checked = check(theirs, value)
        if ours in result and _bare(checked) != _bare(CHECKS[ours](ours, result[ours])):
            raise ValueError(
                f"a group says {theirs}={value!r} and {ours}={result[ours]!r}; give one"
            )
        result.setdefault(ours, checked)
    return result


def _bare(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _with_layout(group: Group, labelled: list[tuple[str, Tensor]]) -> Group:
    """muonium's rule where the group does not say what its matrices are: the last two dims."""
    if group.get("flatten") or any(
        group.get(key) is not None for key in ("rows", "cols", "batch_dims")
    ):
        return group
    is_split = group.get("split_sizes") is not None
    for label, param in labelled:
        shape = tuple(param.shape)
        if len(shape) < 2:
            raise ValueError(
                f"algorithm {group['algorithm']!r} needs 2D+ parameters, got shape {shape} "
                f"({label}); put it into a group with algorithm='adamw'"
            )
        if is_split and len(shape) != 2:
            raise ValueError(
                f"split_sizes is only supported for 2D parameters, got shape {shape} ({label})"
            )
        if len(shape) > 3:
            raise ValueError(
                f"{label} of shape {shape} needs a choice: flatten=True (rows = dim 0, columns = "
                "the rest: convolutions) or rows=-2, cols=-1 (all other dims are a batch)"
            )
    has_batches = any(param.dim() == 3 for _, param in labelled)
    return {**group, "rows": -2, "cols": -1} if has_batches else group
