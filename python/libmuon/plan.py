"""The shell's side of a plan: which parameters it is for, and what it is rebuilt upon."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from libmuon.options import Group, named_parameters
from libmuon.spec import SPEC_OPTIONS, Slot, spec_text, state_slots

Key = tuple[Any, ...]


def trained_parameters(
    groups: list[Group], state: Mapping[Tensor, Any]
) -> Iterator[tuple[int, Tensor]]:
    """(group index, parameter) of what a step may update: frozen parameters are left out.

    A parameter that is listed twice is updated once.
    """
    seen = set()
    for index, group in enumerate(groups):
        for param in group["params"]:
            if (param.requires_grad or param.grad is not None or param in state) and (
                id(param) not in seen
            ):
                seen.add(id(param))
                yield index, param


def plan_key(groups: list[Group], params: list[tuple[int, Tensor]]) -> Key:
    """Everything that a plan depends on; equal keys mean that a plan still fits."""
    return (
        [(group, id(p), p.shape, p.dtype, p.device) for group, p in params],
        [tuple(map(group.get, SPEC_OPTIONS)) for group in groups],
    )


class Plan:
    """A handle into the core's table of plans, with what the shell needs at every step.

    It holds no tensors; losing it costs the time to build it again, never results.
    """

    def __init__(self, groups: list[Group], params: list[tuple[int, Tensor]], key: Key) -> None:
        names = {id(param): name for _, name, param in named_parameters(groups)}
        self.ids = [id(param) for _, param in params]
        self.key = key
        self.names = [names[id(param)] for _, param in params]
        self.groups = [group for group, _ in params]
        specs = [spec_text(group) for group in groups]
        self.slots: list[list[Slot]] = [
            state_slots(specs[group], param, name)
            for (group, param), name in zip(params, self.names, strict=True)
        ]
        self.handle = torch.ops.muon.create_plan(
            [param for _, param in params], self.groups, specs, self.names
        )
        # Process exit frees the table anyway.
        weakref.finalize(self, torch.ops.muon.free_plan, self.handle).atexit = False

    def carried_over(self, old: Plan | None, skipped: Tensor | None) -> Tensor:
        """Counts of skipped matrices, those of parameters that `old` had taken over."""
        counts = torch.zeros(len(self.ids), dtype=torch.int64)
        if old is not None and skipped is not None:
            before = dict(zip(old.ids, skipped.tolist(), strict=True))
            counts += torch.tensor([before.get(i, 0) for i in self.ids], dtype=torch.int64)
        return counts
