"""QKAN's optimizer (``qkan.optim.QKANMuon``), as a preset over libmuon.

Names, defaults and results are those of qkan 0.2.3, with these corrections:

- The AdamW half lives in groups of its own, at ``adamw_lr``: schedulers move both halves.
- Markers match whole words of a name: ``unmasked_proj`` and ``patch_embed`` are matrices,
  ``tok_emb`` and ``head`` are not, nor is a ``fc`` or ``out`` that is the model's own last layer.
  ``muon_filter`` brings back any other rule.
- Parameters without a name are matrices where they have two dims, as in qkan, but not silently: a
  warning says so, unless ``muon_filter`` decides.
- Shape factors follow the group as it is at each step; nothing about routing is cached.
- Values in groups are checked, misspelt options are refused, named pairs in groups work, and the
  halves may decay differently (``adamw_weight_decay``).
- ``rank`` without ``world_size`` is an error, and so are several ranks, for now.
- The momentum's dtype (``state_dtype``) and the iteration's (``compute_dtype``) are options; a CPU
  iterates in float32.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import libmuon
from libmuon import checks
from libmuon.compat.params import given_groups, named_members, require_params
from libmuon.options import (
    GROUP_CHECKS,
    Group,
    errors_about,
    is_elementwise,
    named_parameters,
)
from libmuon.roles import vocabulary_name

__all__ = ["QKANMuon", "reshape_optimizer_state"]

Filter = Callable[[str, tuple[int, ...]], bool]

# Parameters of a quantum-inspired KAN layer that are no matrices, as words of one part of a name.
_MARKERS = re.compile("(^|_)(thetas?|preacts?|base_weights?|postacts?|masks?)(_|$)")
# Options that only one half has, and what they are called there.
_ADAMW_NAMES = {
    "adamw_lr": "lr",
    "adamw_betas": "betas",
    "adamw_eps": "eps",
    "adamw_weight_decay": "weight_decay",
}
_MUON_NAMES = ("lr", "momentum", "nesterov", "ns_steps", "match_adamw_rms")
# Options of libmuon that a group here decides by another one.
_DECIDED_BY = {
    "algorithm": "muon_filter",
    "use_muon": "muon_filter",
    "optimizer": "muon_filter",
    "adjust_lr_fn": "match_adamw_rms",
    "betas": "adamw_betas",
    "eps": "adamw_eps",
}


class QKANMuon(libmuon.Muon):
    """qkan's ``QKANMuon``: Muon for matrices, AdamW for everything else, routed by name and rank.

    Every group that is given becomes up to two: its matrices, and the rest at ``adamw_lr``.

    Args:
        params: tensors, (name, tensor) pairs, or group dicts of them. A group may have any of the
            options up to ``adamw_eps``, and ``adamw_weight_decay``.
        lr: learning rate of the matrices.
        adamw_lr: learning rate of everything else.
        momentum: coefficient of the heavy-ball buffer b = momentum b + g.
        nesterov: orthogonalise g + momentum b instead of b.
        ns_steps: iterations.
        weight_decay: decoupled, of both halves.
        match_adamw_rms: shape factor 0.2 sqrt(max(rows, cols)); else sqrt(max(1, rows / cols)).
        adamw_betas: of AdamW.
        adamw_eps: of AdamW, > 0.
        muon_filter: ``(name, shape) -> bool`` decides instead of `is_muon_param`.
        rank: accepted together with ``world_size``.
        world_size: 1; several ranks are not supported in this version. Without it every rank
            updates all parameters, which keeps replicas with equal gradients equal.
        process_group: a group of one rank.
        adamw_weight_decay: of the AdamW half; None is ``weight_decay``.
        state_dtype: dtype of the momentum; None follows the gradient, as in qkan.
        compute_dtype: of the orthogonalisation.

    Raises:
        ValueError: for values out of range, or one of ``rank`` and ``world_size`` alone.
        NotImplementedError: for more than one rank.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        adamw_lr: float | Tensor = 3e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.0,
        match_adamw_rms: bool = True,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        muon_filter: Filter | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        *,
        adamw_weight_decay: float | None = None,
        state_dtype: str | torch.dtype | None = None,
        compute_dtype: str | torch.dtype = "auto",
    ) -> None:
        _check_topology(rank, world_size, process_group)
        if muon_filter is not None and not callable(muon_filter):
            raise TypeError(f"muon_filter should be callable but is: {muon_filter!r}")
        self._filter = muon_filter
        self._own_defaults: Group = {
            "lr": lr,
            "momentum": momentum,
            "adamw_lr": adamw_lr,
            "match_adamw_rms": match_adamw_rms,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "adamw_weight_decay": adamw_weight_decay,
            "weight_decay": weight_decay,
        }
        groups: list[Group] = []
        for index, group in enumerate(given_groups(params, "pass model.named_parameters()")):
            groups += self._halves(index, group, stacklevel=3)
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

    @staticmethod
    def is_muon_param(name: str, shape: Sequence[int]) -> bool:
        """Whether a parameter of that name and shape is a matrix for Muon.

        It has two dims, no word of its name is one of a KAN layer (theta, preacts, base_weight,
        postact, mask; plurals and digits do not matter), and the name is not that of an embedding
        or a head, as `libmuon.group_parameters` tells by name.
        """
        return _reason_against(name, shape) is None

    def describe_layout(self) -> list[tuple[str, tuple[int, ...], str]]:
        """(name, shape, "muon" or "adamw") of every parameter, as the next step routes it.

        In group order, each given group's matrices first; `describe` adds why, learning rates and
        decay.
        """
        return [
            (
                name if group.get("param_names") else "",
                tuple(param.shape),
                "adamw" if is_elementwise(group["algorithm"]) else "muon",
            )
            for group, name, param in named_parameters(self.param_groups)
        ]

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group in qkan's names, as up to two groups."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        if not self._constructed:  # the constructor has translated them all
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)
        try:
            for group in self._halves(before, param_group, stacklevel=3):
                super().add_param_group(group)
        except Exception:
            del self.param_groups[before:]
            raise

    def __getstate__(self) -> dict[str, Any]:
        own = {"_filter": self._filter, "_own_defaults": self._own_defaults}
        return {**super().__getstate__(), **own}

    def _halves(self, index: int, group: Mapping[str, Any], stacklevel: int) -> list[Group]:
        """A given group's matrices, and the rest, each complete."""
        with errors_about(f"parameter group {index}"):
            members = named_members(require_params(group))
            options = self._checked({**self._own_defaults, **group})
        del options["params"]
        muon, adamw = self._routed(members, stacklevel + 1)
        adamw_options = {key: options.pop(key) for key in _ADAMW_NAMES}
        if adamw_options["adamw_weight_decay"] is None:
            adamw_options["adamw_weight_decay"] = options["weight_decay"]
        scale = "match_rms_adamw" if options.pop("match_adamw_rms") else "original"
        halves: list[Group] = []
        if muon:
            halves.append({**options, "algorithm": "muon", "adjust_lr_fn": scale, **muon})
        if adamw:
            rest = {k: v for k, v in options.items() if k not in (*_MUON_NAMES, "weight_decay")}
            translated = {_ADAMW_NAMES[key]: value for key, value in adamw_options.items()}
            halves.append({**rest, **translated, "algorithm": "adamw", **adamw})
        return halves

    @staticmethod
    def _checked(options: Group) -> Group:
        for key in options.keys() & _DECIDED_BY.keys():
            raise ValueError(
                f"a group of QKANMuon cannot say {key}={options[key]!r}: {_DECIDED_BY[key]!r} "
                "decides that (groups in libmuon's own names go to libmuon.Muon)"
            )
        known = (*_ADAMW_NAMES, *_MUON_NAMES, "weight_decay", "params")
        for key in options.keys() - set(known) - GROUP_CHECKS.keys():
            if close := difflib.get_close_matches(str(key), known, n=1, cutoff=0.8):
                raise ValueError(
                    f"unknown option {key!r} in a parameter group; did you mean {close[0]!r}?"
                )
        for key, value in options.items():
            if key in GROUP_CHECKS:
                GROUP_CHECKS[key](key, value)
        checks.number(tensor=True)("adamw_lr", options["adamw_lr"])
        checks.betas("adamw_betas", options["adamw_betas"])
        checks.number(above=0.0)("adamw_eps", options["adamw_eps"])
        checks.optional(checks.number())("adamw_weight_decay", options["adamw_weight_decay"])
        checks.flag("match_adamw_rms", options["match_adamw_rms"])
        checks.number(below=1.0, tensor=True)("momentum", options["momentum"])
        return options

    def _routed(self, named: list[tuple[str, Tensor]], stacklevel: int) -> tuple[Group, Group]:
        """Parameters of the two halves and the reasons of each; an empty half is empty."""
        unnamed = [tuple(p.shape) for name, p in named if not name and p.dim() == 2]
        if unnamed and self._filter is None:
            warnings.warn(
                f"{len(unnamed)} 2D parameters have no name, so that embeddings and heads among "
                f"them go to Muon too (first shape: {unnamed[0]}); pass named_parameters(), or a "
                "muon_filter",
                stacklevel=stacklevel,
            )
        decide = self.is_muon_param if self._filter is None else self._filter
        # torch wants a name for every parameter or for none.
        has_names = any(name for name, _ in named) or any(
            "param_names" in group for group in self.__dict__.get("param_groups", ())
        )
        halves: tuple[Group, Group] = ({}, {})
        for index, (name, p) in enumerate(named):
            shape = tuple(p.shape)
            half = halves[0 if decide(name, shape) else 1]
            entry = (name or f"unnamed.{index}", p) if has_names else p
            half.setdefault("params", []).append(entry)
            half.setdefault("reasons", []).append(self._reason(name, shape))
        return halves

    def _reason(self, name: str, shape: tuple[int, ...]) -> str:
        if self._filter is not None:
            return "muon_filter"
        if type(self).is_muon_param is not QKANMuon.is_muon_param:  # a subclass's rule
            return "is_muon_param"
        return _reason_against(name, shape) or ("2D" if name else "2D, without a name")


def _reason_against(name: str, shape: Sequence[int]) -> str | None:
    """Why a parameter is no matrix for Muon; None if it is one."""
    if len(shape) != 2:
        return f"{len(shape)}D" if shape else "scalar"
    for part in re.sub("[0-9]", "", name.lower()).split("."):
        if marker := _MARKERS.search(part):
            return f"of a KAN layer (named {marker[2]})"
    return vocabulary_name(name)


def _check_topology(rank: int | None, world_size: int | None, process_group: Any) -> None:
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"rank and world_size go together, but rank is {rank} and world_size is {world_size}"
        )
    size = 1
    if process_group is not None:
        if not isinstance(process_group, torch.distributed.ProcessGroup):
            raise TypeError(f"process_group should be a ProcessGroup but is: {process_group!r}")
        size = process_group.size()
    if world_size is not None:
        size = checks.integer(1)("world_size", world_size)
        checks.integer(0, size - 1)("rank", rank)
    if size > 1:
        raise NotImplementedError(
            f"{size} ranks are not supported in this version: leave rank, world_size and "
            "process_group out; every rank then updates all parameters, and replicas stay equal"
        )


def reshape_optimizer_state(optimizer: torch.optim.Optimizer) -> int:
    """Gives state tensors the shape that their parameter has now, where the size agrees.

    For parameters whose storage shape changed after a state dict was loaded or a step was made.

    Returns:
        How many tensors were reshaped.
    """
    count = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                is_buffer = isinstance(value, Tensor) and value.dim() > 0
                if is_buffer and value.shape != param.shape and value.numel() == param.numel():
                    optimizer.state[param][key] = value.reshape(param.shape)
                    count += 1
    return count
