"""QKAN's optimizer (``qkan.optim.QKANMuon``), as a preset over libmuon.

Names, defaults and results are those of qkan 0.2.3, with these corrections:

- The AdamW half lives in groups of its own, at ``adamw_lr``: schedulers move both halves.
- Markers match whole words of a name: ``unmasked_proj`` and ``patch_embed`` are matrices,
  ``tok_emb`` and ``head`` are not.
- Parameters without a name are matrices where they have two dims, as in qkan, but not silently: a
  warning says so, unless ``muon_filter`` decides.
- Shape factors follow the group as it is at each step; nothing about routing is cached.
- Values in groups are checked, misspelt options are refused, named pairs in groups work, and the
  halves may decay differently (``adamw_weight_decay``).
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
from libmuon.options import GROUP_CHECKS, Group, is_elementwise, named_parameters
from libmuon.roles import vocabulary_name

__all__ = ["QKANMuon", "reshape_optimizer_state"]

Filter = Callable[[str, tuple[int, ...]], bool]

# Parameters of a quantum-inspired KAN layer that are no matrices, as words of a name.
_MARKERS = (("theta",), ("preacts",), ("base", "weight"), ("postact",), ("postacts",), ("mask",))
# Options that only one half has, and what they are called there.
_ADAMW_NAMES = {
    "adamw_lr": "lr",
    "adamw_betas": "betas",
    "adamw_eps": "eps",
    "adamw_weight_decay": "weight_decay",
}
_MUON_NAMES = ("lr", "momentum", "nesterov", "ns_steps", "match_adamw_rms")


class QKANMuon(libmuon.Muon):
    """qkan's ``QKANMuon``: Muon for matrices, AdamW for everything else, routed by name and rank.

    Every group that is given becomes up to two: its matrices, and the rest at ``adamw_lr``.

    Args:
        params: tensors, (name, tensor) pairs, or group dicts of them. A group may have any of the
            options up to ``adamw_weight_decay``.
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
        world_size: 1; several ranks are not supported in this version.
        process_group: None.
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
        super().__init__(
            self._translated(params),
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
        postact, mask), and the name is not that of an embedding or a head.
        """
        words = re.findall("[a-z0-9]+", name.lower())
        for marker in _MARKERS:
            if any(tuple(words[i : i + len(marker)]) == marker for i in range(len(words))):
                return False
        return len(shape) == 2 and vocabulary_name(name) is None

    def describe_layout(self) -> list[tuple[str, tuple[int, ...], str]]:
        """(name, shape, "muon" or "adamw") of every parameter, as the next step routes it.

        In group order, each given group's matrices first; `describe` adds learning rates and decay.
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
        if "algorithm" in param_group:  # one of ours, translated before
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)
        try:
            for group in self._halves(param_group):
                super().add_param_group(group)
        except Exception:
            del self.param_groups[before:]
            raise

    def _translated(self, params: Iterable[Any]) -> list[Group]:
        if isinstance(params, Tensor | dict):
            raise TypeError(f"params should be an iterable of parameters, got {type(params)}")
        given = list(params)
        if not given:
            raise ValueError("optimizer got an empty parameter list")
        if not isinstance(given[0], dict):
            given = [{"params": given}]
        return [half for group in given for half in self._halves(group)]

    def _halves(self, group: Mapping[str, Any]) -> list[Group]:
        """A given group's matrices, and the rest, each complete."""
        options = self._checked({**self._own_defaults, **group})
        entries = options.pop("params")
        muon, adamw = self._routed([entries] if isinstance(entries, Tensor) else list(entries))
        adamw_options = {key: options.pop(key) for key in _ADAMW_NAMES}
        if adamw_options["adamw_weight_decay"] is None:
            adamw_options["adamw_weight_decay"] = options["weight_decay"]
        scale = "match_rms_adamw" if options.pop("match_adamw_rms") else "original"
        halves: list[Group] = []
        if muon:
            halves.append({**options, "algorithm": "muon", "adjust_lr_fn": scale, "params": muon})
        if adamw:
            rest = {k: v for k, v in options.items() if k not in (*_MUON_NAMES, "weight_decay")}
            translated = {_ADAMW_NAMES[key]: value for key, value in adamw_options.items()}
            halves.append({**rest, **translated, "algorithm": "adamw", "params": adamw})
        return halves

    @staticmethod
    def _checked(options: Group) -> Group:
        if "params" not in options:
            raise ValueError(f"a parameter group needs 'params', but has: {sorted(options)}")
        known = (*_ADAMW_NAMES, *_MUON_NAMES, "weight_decay", "params")
        for key in options.keys() - set(known) - GROUP_CHECKS.keys():
            if close := difflib.get_close_matches(str(key), known, n=1, cutoff=0.8):
                raise ValueError(
                    f"unknown option {key!r} in a parameter group; did you mean {close[0]!r}?"
                )
        checks.number(tensor=True)("adamw_lr", options["adamw_lr"])
        checks.betas("adamw_betas", options["adamw_betas"])
        checks.number(above=0.0)("adamw_eps", options["adamw_eps"])
        checks.number(tensor=True)("weight_decay", options["weight_decay"])
        checks.optional(checks.number())("adamw_weight_decay", options["adamw_weight_decay"])
        checks.flag("match_adamw_rms", options["match_adamw_rms"])
        checks.number(below=1.0, tensor=True)("momentum", options["momentum"])
        return options

    def _routed(self, entries: list[Any]) -> tuple[list[Any], list[Any]]:
        named = [entry if isinstance(entry, tuple) else ("", entry) for entry in entries]
        unnamed = [tuple(p.shape) for name, p in named if not name and p.dim() == 2]
        if unnamed and self._filter is None:
            warnings.warn(
                f"{len(unnamed)} 2D parameters have no name, so that embeddings and heads among "
                f"them go to Muon too (first shape: {unnamed[0]}); pass named_parameters(), or a "
                "muon_filter",
                stacklevel=4,
            )
        decide = self.is_muon_param if self._filter is None else self._filter
        has_names = all(name for name, _ in named)
        halves: tuple[list[Any], list[Any]] = ([], [])
        for name, p in named:
            is_muon = bool(decide(name, tuple(p.shape)))
            halves[0 if is_muon else 1].append((name, p) if has_names else p)
        return halves


def _check_topology(rank: int | None, world_size: int | None, process_group: Any) -> None:
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"rank and world_size go together, but rank is {rank} and world_size is {world_size}"
        )
    if world_size is not None:
        size = checks.integer(1)("world_size", world_size)
        checks.integer(0, size - 1)("rank", rank)
    if process_group is not None or (world_size or 1) > 1:
        raise NotImplementedError(
            "several ranks are not supported in this version: leave process_group and world_size "
            "alone; parameters that every rank updates alike stay equal"
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
