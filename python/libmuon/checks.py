"""Checks of single option values.

Each check takes the option's name and a value, raises ``TypeError`` or ``ValueError`` with a text
that names both, and returns the value as it stands in a parameter group: a plain number, string,
tuple, ``None``, or the caller's own one-element tensor.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Check = Callable[[str, Any], Any]

# The words of torch's own messages, where they differ from the option's name.
_LABELS = {"lr": "Learning rate", "weight_decay": "weight decay", "wd": "weight decay"}


def number(
    low: float = 0.0,
    high: float = math.inf,
    *,
    below: float = math.inf,
    above: float = -math.inf,
    tensor: bool = False,
) -> Check:
    """A finite real number in ``[low, high]``, less than ``below`` and more than ``above``.

    ``tensor`` also admits a tensor of one element, which is kept as it is: schedulers and captured
    graphs rely on its identity.
    """

    def check(name: str, value: Any) -> float | Tensor:
        label = _LABELS.get(name, name)
        if tensor and isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
            bare = float(value.item())
        else:
            bare = _real(name, value)
        for holds, relation in (
            (bare >= low or low == -math.inf, f">= {low:g}"),
            (bare <= high or high == math.inf, f"<= {high:g}"),
            (bare < below or below == math.inf, f"< {below:g}"),
            (bare > above or above == -math.inf, f"> {above:g}"),
            (math.isfinite(bare), "finite"),
        ):
            if not holds:
                raise ValueError(f"{label} should be {relation} but is: {value}")
        return value if isinstance(value, Tensor) else bare

    return check


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} should be a number but is: {value!r} ({type(value).__name__})")
    # Built-in numbers stay what they are; numpy's would not load with weights_only=True.
    return int(value) if isinstance(value, int) else float(value)


def integer(low: int, high: int | None = None) -> Check:
    """An integer in ``[low, high]``; a bool or a float is a TypeError."""

    def check(name: str, value: Any) -> int:
        bare = _index(name, value)
        if bare < low or (high is not None and bare > high):
            wanted = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise ValueError(f"{name} should be {wanted} but is: {bare}")
        return bare

    return check


def _index(name: str, value: Any) -> int:
    if isinstance(value, bool | Tensor):
        raise TypeError(f"{name} should be an integer but is: {value!r} ({type(value).__name__})")
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} should be an integer but is: {value!r} ({kind})") from None


def ns_steps(name: str, value: Any) -> int:
    """A number of iterations, with torch's upper bound."""
    bare = _index(name, value)
    if bare < 0:
        raise ValueError(f"{name} should be >= 0 but is: {bare}")
    if bare >= 100:
        raise ValueError(
            "Number of steps must be less than 100 for computational efficiency, "
            f"but {name} is: {bare}"
        )
    return bare


def flag(name: str, value: Any) -> bool:
    """A bool; strings such as "false" are true in Python and therefore refused."""
    if type(value).__name__ in ("bool", "bool_"):  # bool_: numpy's
        return bool(value)
    raise TypeError(f"{name} should be True or False but is: {value!r} ({type(value).__name__})")


def choice(*values: str) -> Check:
    """One of the given strings."""

    def check(name: str, value: Any) -> str:
        _require_string(name, value)
        if value not in values:
            raise ValueError(f"{name} should be one of {_listed(values)} but is: {value!r}")
        return str(value)

    return check


def optional(check: Check) -> Check:
    """``None``, or what ``check`` admits."""
    return lambda name, value: None if value is None else check(name, value)


def adjust_lr_fn(name: str, value: Any) -> str:
    """A shape-scaling mode, refused with torch's text."""
    _require_string(name, value)
    modes = ("original", "match_rms_adamw", "spectral_unclamped", "unscaled")
    if value not in modes:
        raise ValueError(
            f"Adjust learning rate function {value} is not supported; {name} is None or one of "
            f"{_listed(modes)}"
        )
    return str(value)


def algorithm(name: str, value: Any) -> str:
    """A registered algorithm's name, in lower case."""
    _require_string(name, value)
    names = torch.ops.muon.registered_algorithms()
    if value.lower() not in names:
        raise ValueError(
            f"{name} should be one of {_listed(names)} but is: {value!r}; an algorithm of your own "
            "must be registered first (libmuon.register_algorithm)"
        )
    return str(value.lower())


def integers(low: int | None = None) -> Check:
    """An integer or a non-empty sequence of integers, each at least ``low``; returns a tuple."""

    def check(name: str, value: Any) -> tuple[int, ...]:
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        result = tuple(_index(name, item) for item in items)
        if not result or (low is not None and min(result) < low):
            wanted = "hold at least one integer" if low is None else f"hold integers >= {low}"
            raise ValueError(f"{name} should {wanted} but is: {value!r}")
        return result

    return check


def betas(name: str, value: Any) -> tuple[float, float]:
    """A pair in [0, 1), refused with torch.optim.AdamW's text."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} should be a pair of numbers but is: {value!r}")
    if len(value) != 2:
        raise ValueError(f"{name} should be a pair of numbers but is: {value!r}")
    for index, beta in enumerate(value):
        if not 0.0 <= _real(f"{name}[{index}]", beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    return (_real(name, value[0]), _real(name, value[1]))


def ns_coefficients(name: str, value: Any) -> str | tuple[Any, ...]:
    """A schedule's name, a triple, or a sequence of triples (one a step)."""
    if isinstance(value, str):
        names = torch.ops.muon.schedule_names()
        if value not in names:
            raise ValueError(f"{name} should be a triple or one of {_listed(names)}, got {value!r}")
        return value
    if isinstance(value, Tensor) or not isinstance(value, Sequence):
        raise TypeError(
            f"{name} should be a triple, a list of triples or a schedule's name but is: {value!r}"
        )
    if value and all(isinstance(item, Sequence) and not isinstance(item, str) for item in value):
        return tuple(_triple(name, item) for item in value)
    return _triple(name, value)


def _triple(name: str, value: Any) -> tuple[float, float, float]:
    if len(value) != 3:
        raise ValueError(
            f"Coefficients must be a tuple of exactly 3 values, but {name} holds: {value!r}"
        )
    a, b, c = (_real(name, item) for item in value)
    if not all(map(math.isfinite, (a, b, c))):
        raise ValueError(f"{name} should hold finite numbers but holds: {value!r}")
    return (a, b, c)


_DTYPES = ("float64", "float32", "bfloat16", "float16")


def dtype(*words: str) -> Check:
    """A floating dtype or its name (returned as its name), or one of ``words``."""

    def check(name: str, value: Any) -> str:
        text = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        _require_string(name, text)
        if text not in (*words, *_DTYPES):
            allowed = _listed([*words, *_DTYPES])
            raise ValueError(f"{name} should be one of {allowed} but is: {value!r}")
        return str(text)

    return check


# Formats in blocks of 128 along a row, and the torch dtypes that mean them.
STATE_FORMATS = ("int8", "int4", "fp8")
_FORMAT_DTYPES = {"float8_e4m3fn": "fp8"}


def state_dtype(name: str, value: Any) -> str:
    """A floating dtype, or one of `STATE_FORMATS`."""
    text = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if isinstance(text, str) and (text := _FORMAT_DTYPES.get(text, text)) in STATE_FORMATS:
        return text
    result: str = dtype(*STATE_FORMATS)(name, value)
    return result


def only(default: Any, instead: str) -> Check:
    """An option that a later version offers: nothing but its default is accepted."""

    def check(name: str, value: Any) -> Any:
        if value is not default and value != default:
            raise NotImplementedError(f"{name}={value!r} is not supported: {instead}")
        return default

    return check


def _require_string(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} should be a string but is: {value!r} ({type(value).__name__})")


def _listed(values: Sequence[str]) -> str:
    return ", ".join(repr(value) for value in values)
