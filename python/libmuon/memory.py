"""What an optimizer keeps and takes, in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from libmuon.options import Group
from libmuon.plan import Plan
from libmuon.spec import REMAINDER, Slot, scale_key, state_dtype


class GroupMemory(NamedTuple):
    """Bytes of one group's state.

    Attributes:
        state: momenta, moments (or their codes), statistics and counts.
        scales: the scales of codes.
        remainders: the 16 bits that split bfloat16 parameters keep.
    """

    state: int
    scales: int
    remainders: int


class Memory(NamedTuple):
    """Bytes of an optimizer: of all groups, then of each.

    Attributes:
        state, scales, remainders: as in `GroupMemory`.
        host: how much of these three lives in host memory beside parameters that do not.
        workspace: what a step takes beyond parameters, gradients and state, an upper estimate.
        groups: one entry a group.
    """

    state: int
    scales: int
    remainders: int
    host: int
    workspace: int
    groups: tuple[GroupMemory, ...]


def memory_of(
    groups: Sequence[Group], plan: Plan, params: Sequence[Tensor], state: Mapping[Tensor, Any]
) -> Memory:
    """The report; state that no step has created yet counts as it will be."""
    by_group = [[0, 0, 0] for _ in groups]
    host = 0
    for index, slots, param in zip(plan.groups, plan.slots, params, strict=True):
        keys = {slot.name for slot in slots}
        kept = state.get(param, {})
        for slot in slots:
            group = groups[index]
            size = _bytes(slot, kept.get(slot.name), param, group)
            by_group[index][_kind(slot.name, keys)] += size
            if param.device.type != "cpu" and (group["offload"] or slot.kind == "step"):
                host += size
    entries = tuple(GroupMemory(*sizes) for sizes in by_group)
    state_bytes, scales, remainders = (sum(sizes[kind] for sizes in by_group) for kind in range(3))
    workspace = torch.ops.muon.workspace_bytes(plan.handle)
    return Memory(state_bytes, scales, remainders, host, workspace, entries)


def _kind(name: str, keys: set[str]) -> int:
    if name == REMAINDER:
        return 2
    return int(any(scale_key(key) == name for key in keys))


def _bytes(slot: Slot, tensor: Tensor | None, param: Tensor, group: Group) -> int:
    if tensor is not None:
        return tensor.numel() * tensor.element_size()
    meta = torch.empty_like(param, device="meta")
    dtype = slot.create(meta, state_dtype(group, param)).dtype
    return math.prod(slot.sizes) * dtype.itemsize
