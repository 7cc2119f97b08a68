"""The groups of a state file as JSON; the format is in ``include/muon/state_file.h``."""

from __future__ import annotations

import json
import math
import numbers
import reprlib
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from libmuon.options import RUN_OPTIONS, Group, group_checks, is_builtin, own_options

# What a group holds that is neither an option nor metadata.
_STRUCTURE = frozenset({"params", "param_names", "reasons"})
_INTEGERS = 2**63
# Bounds of what a damaged text can make Python allocate; 65,536 parameters fit into any file.
_CHARACTERS = 8_000_000
_VALUES = 2**19


class SavedParameter(NamedTuple):
    """What a file says of a parameter beside its state."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str


class SavedGroup(NamedTuple):
    """A group as a file has it.

    Attributes:
        algorithm: the registered name.
        options: libmuon's options without those of the run.
        own: the options of an algorithm that is not built in.
        params: its parameters.
        extra: what the group holds besides.
    """

    algorithm: str
    options: Group
    own: Group
    params: list[SavedParameter]
    extra: Group

    def options_and_extra(self) -> Group:
        """All of them as they stand in a parameter group."""
        options = dict(self.options)
        rows = options.get("ns_coefficients")
        # One triple for all steps: a list of one would be a schedule of one step.
        if isinstance(rows, list) and len(rows) == 1 and options.get("ns_steps") is not None:
            options["ns_coefficients"] = rows[0]
        return {**self.extra, **options, **self.own, "algorithm": self.algorithm}


def saved_group(group: Group, params: list[SavedParameter]) -> tuple[SavedGroup, list[str]]:
    """A complete group for a file, and the keys that the file cannot hold."""
    algorithm = group["algorithm"]
    own = () if is_builtin(algorithm) else own_options(algorithm).keys()
    known = group_checks(algorithm).keys()
    names = [key for key in known if key in group and key not in {*RUN_OPTIONS, *own, "algorithm"}]
    others = [key for key in group if key not in known and key not in _STRUCTURE]
    extra = {key: _plain(group[key]) for key in others if _can_hold(key, group[key])}
    saved = SavedGroup(
        algorithm,
        {key: _option(key, group[key]) for key in names},
        {key: group[key] for key in own},
        params,
        extra,
    )
    return saved, [str(key) for key in others if key not in extra]


def _option(key: str, value: Any) -> Any:
    if key == "complex_dim" and value is not None:
        return -1  # it is the last one, however it was counted
    if key == "ns_coefficients" and not isinstance(value, str | None):
        return value if isinstance(value[0], Sequence) else (value,)
    return _plain(value)


def _plain(value: Any) -> Any:
    """A number for a tensor of one element (torch's schedulers keep such) or numpy's number."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, bool | str | tuple | None):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _can_hold(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or not is_unicode(key):
        return False
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and _can_hold(key, value.item())
    if isinstance(value, str):
        return is_unicode(value)
    if isinstance(value, numbers.Integral):
        return abs(int(value)) < _INTEGERS
    return value is None or (isinstance(value, numbers.Real) and math.isfinite(value))


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode(groups: Sequence[SavedGroup], data_bytes: int) -> str:
    """The text of groups whose state takes so many bytes.

    Raises:
        ValueError: for more parameters than a file of this size may have.
    """
    items = [
        {
            "algorithm": group.algorithm,
            "options": group.options,
            "algorithm_options": group.own,
            "params": [param._asdict() for param in group.params],
            "extra": group.extra,
        }
        for group in groups
    ]
    text = json.dumps(items, allow_nan=False, ensure_ascii=False)
    _check_size(text, data_bytes)
    return text


def _check_size(text: str, data_bytes: int) -> None:
    values = sum(map(text.count, "[{,"))
    if len(text) > _CHARACTERS + data_bytes // 4 or values > _VALUES + data_bytes // 64:
        raise ValueError(
            f"its groups take {len(text)} characters for about {values} values, too much beside "
            f"{data_bytes} bytes of state"
        )


def decode(text: str, data_bytes: int) -> list[SavedGroup]:
    """The groups of a text beside so many bytes of state, checked but for the options' values.

    Raises:
        ValueError: if it is anything else than what `encode` and C++ write.
    """
    _check_size(text, data_bytes)
    try:
        items = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_number,
        )
    except RecursionError:
        raise ValueError("its groups are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its groups are damaged: {error}") from None
    return [_group(item, f"group {i}") for i, item in enumerate(_typed(items, list, "groups"))]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a key occurs twice among {reprlib.repr([key for key, _ in pairs])}")
    return result


def _integer(text: str) -> int:
    value = int(text) if len(text) <= 20 else _INTEGERS
    if abs(value) >= _INTEGERS:
        raise ValueError(f"{text[:40]} is beyond 63 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


_KINDS = {list: "a list", dict: "an object", str: "a text", int: "an integer"}


def _typed(value: Any, kind: type[Any], what: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what} should be {_KINDS[kind]} but is: {reprlib.repr(value)}")
    if kind is str and not is_unicode(value):
        raise ValueError(f"{what} is no Unicode text: {reprlib.repr(value)}")
    return value


def _group(item: Any, what: str) -> SavedGroup:
    given = _typed(item, dict, what)
    defaults: Group = {"algorithm_options": {}, "extra": {}}
    expected = {"algorithm", "options", "params", *defaults}
    given = defaults | given
    if given.keys() != expected:
        raise ValueError(
            f"{what} has {reprlib.repr(sorted(given))}, expected {', '.join(sorted(expected))}"
        )
    params = _typed(given["params"], list, f"params of {what}")
    return SavedGroup(
        _typed(given["algorithm"], str, f"algorithm of {what}"),
        _values(given["options"], f"options of {what}"),
        _values(given["algorithm_options"], f"algorithm_options of {what}"),
        [_parameter(param, f"parameter {i} of {what}") for i, param in enumerate(params)],
        _extra(given["extra"], f"extra of {what}"),
    )


def _values(item: Any, what: str) -> Group:
    """Options: their values are checked where they become those of a group."""
    options: Group = _typed(item, dict, what)
    for key, value in options.items():
        _typed(key, str, what)
        if isinstance(value, dict):
            raise ValueError(f"{key!r} in {what} is an object")
    return options


def _extra(item: Any, what: str) -> Group:
    extra = _values(item, what)
    for key, value in extra.items():
        if isinstance(value, list):
            raise ValueError(f"{key!r} in {what} is a list")
        if key in _STRUCTURE:
            raise ValueError(f"{what} has {key!r}")
        if isinstance(value, str):
            _typed(value, str, f"{key!r} in {what}")
    return extra


def _parameter(item: Any, what: str) -> SavedParameter:
    given = _typed(item, dict, what)
    if given.keys() != {"name", "shape", "dtype"}:
        raise ValueError(f"{what} has {reprlib.repr(sorted(given))}, expected dtype, name, shape")
    name = given["name"]
    if name is not None:
        _typed(name, str, f"name of {what}")
    shape = tuple(_typed(given["shape"], list, f"shape of {what}"))
    if any(_typed(size, int, f"a size of {what}") < 0 for size in shape):
        raise ValueError(f"shape of {what} is {reprlib.repr(shape)}")
    dtype = _typed(given["dtype"], str, f"dtype of {what}")
    if str(getattr(torch, dtype, None)) != f"torch.{dtype}":
        raise ValueError(f"dtype of {what} is {reprlib.repr(dtype)}, which torch does not have")
    return SavedParameter(name, shape, dtype)


def declared(group: SavedGroup) -> SavedGroup:
    """The group with the algorithm's own options as it declares them.

    Raises:
        ValueError: naming the options that this version does not have.
    """
    algorithm = group.algorithm
    own = {} if is_builtin(algorithm) else own_options(algorithm)
    known = group_checks(algorithm).keys()
    _refuse_unknown("options", group.options, known - own.keys() - RUN_OPTIONS - {"algorithm"})
    _refuse_unknown(f"options of {algorithm!r}", group.own, own)
    if misplaced := sorted(group.extra.keys() & known):
        raise ValueError(f"it has options among the extra keys: {', '.join(misplaced)}")
    values = {name: _as_declared(value, own[name]) for name, value in group.own.items()}
    return group._replace(own=values)


def _refuse_unknown(what: str, given: Group, known: Container[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"it has {what} that this version does not know: {reprlib.repr(unknown)}; load it with "
            "the version that has written it"
        )


def _as_declared(value: Any, default: Any) -> Any:
    """C++ keeps every option of an algorithm as a double."""
    if not isinstance(value, float) or not value.is_integer():
        return value
    if isinstance(default, bool):
        return bool(value) if value in (0.0, 1.0) else value
    return int(value) if isinstance(default, int) else value
