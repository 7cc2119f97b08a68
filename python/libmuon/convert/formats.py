"""State that libmuon keeps as codes with scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from libmuon.convert.model import Shape
from libmuon.options import Group
from libmuon.spec import scale_key, spec_text


def coded_keys(state: Mapping[str, Any]) -> list[str]:
    """The keys of a state that hold codes."""
    return [key for key in state if scale_key(key) in state]


def is_packed(value: Any) -> bool:
    """Whether codes are two in a byte, so that their last dim is not the parameter's."""
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def decoded(group: Group, key: str, state: Mapping[str, Any], shape: Shape, name: str) -> Tensor:
    """A momentum or moment as float32.

    Args:
        group: complete options, of which `state_dtype` is the format.
        key: of the codes.
        state: has the codes and their scales.
        shape: the parameter's.
        name: the parameter's, for errors.
    """
    plain: Tensor = torch.ops.muon.decode_state(
        state[key], state[scale_key(key)], spec_text(group), list(shape), False, name
    )
    return plain
