"""Algorithms written in Python, in one registry with those of the core.

The contract of the stages is in ``include/muon/algorithm.h``; each Python stage becomes a
dispatcher op of that schema, which the core's executor calls as it calls its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor

from libmuon.options import RESERVED, check_names, errors_about, option_check, register_options
from libmuon.spec import HYPER_COLUMNS

State = Mapping[str, Tensor]

_PIECES = "Tensor hyper, int[] groups"
_SCHEMAS = {
    "accumulate": f"(Tensor[] grads, Tensor(a!)[] state, Tensor(b!)[] matrices, {_PIECES}, "
    "Tensor? grad_scale) -> ()",
    "orthogonalize": f"(Tensor(a!) matrices, {_PIECES}, str spec) -> ()",
    "refine": f"(Tensor(a!)[] matrices, Tensor(b!)[] state, {_PIECES}) -> ()",
    "apply": f"(Tensor(a!)[] params, Tensor[] matrices, {_PIECES}, float[] factors) -> ()",
    "matrix_update": f"(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, {_PIECES}, "
    "float[] factors, Tensor? grad_scale, str spec) -> ()",
    "update": f"(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, {_PIECES}, "
    "Tensor? grad_scale, str spec) -> ()",
}
_KINDS = ("param", "row", "step")


class Groups(Sequence[Mapping[str, Any]]):
    """The options of the group that each piece belongs to, as they are in this step.

    ``groups[i]`` maps ``lr``, ``weight_decay``, ``momentum``, ``eps``, ``lr_multiplier``,
    ``beta1``, ``beta2``, ``muon_beta2``, ``nesterov``, ``maximize``, ``cautious``, ``heavy_ball``,
    ``decay_adjusted`` and the algorithm's own options to numbers and bools.

    Attributes:
        hyper: all groups' numbers, float64 [groups, columns], as the core's ops take them.
        indices: the row of ``hyper`` of each piece.
        spec: the structural options as text (empty where a stage does not get them).
    """

    def __init__(
        self, hyper: Tensor, indices: Sequence[int], own: Mapping[str, Any], spec: str = ""
    ) -> None:
        self.hyper = hyper
        self.indices = list(indices)
        self.spec = spec
        self._own = own
        self._read: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Groups: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Groups:
        if isinstance(index, slice):
            return Groups(self.hyper, self.indices[index], self._own, self.spec)
        row = self.indices[index]
        if row not in self._read:
            values = self.hyper[row].tolist()
            named = {name: kind(v) for (name, kind), v in zip(HYPER_COLUMNS, values, strict=False)}
            own = zip(self._own.items(), values[len(HYPER_COLUMNS) :], strict=False)
            self._read[row] = named | {name: type(default)(v) for (name, default), v in own}
        return self._read[row]


class Algorithm:
    """Base of an algorithm written in Python; see `register_algorithm`.

    A subclass sets the class attributes and overrides the stages in which it differs from Muon;
    the others run in the core. Or it defines ``matrix_update`` or ``update``, which do everything.
    The stages work in place, on lists with one entry a piece: a piece is a batch of equal matrices
    of one parameter, [batch, rows, cols] (see ``include/muon/algorithm.h`` for other layouts).
    An instance is made once, without arguments, and shared by all optimizers: it holds no state.

    Attributes:
        name: what ``algorithm=`` selects, in any case; it is written into checkpoints.
        state: key in the state dict -> kind: "param" (the parameter's shape; its dtype follows
            ``state_dtype``), "row" (float32, one value a row of each matrix: [batch, rows, 1]) or
            "step" (0-d float32: the number of steps with a gradient, counted by the core, except in
            an ``update`` of one's own). With stages, the first is the momentum.
        options: options that a group of this algorithm has, with their defaults: bools, integers
            and floats. They are checked, inherited, scheduled and saved as all others are.
    """

    name: ClassVar[str] = ""
    state: ClassVar[Mapping[str, str]] = {"momentum_buffer": "param"}
    options: ClassVar[Mapping[str, float]] = {}

    def accumulate(
        self,
        grads: list[Tensor],
        momenta: list[Tensor],
        matrices: list[Tensor],
        groups: Groups,
        grad_scale: Tensor | None,
    ) -> None:
        """Updates the momenta and writes what is to be orthogonalised into ``matrices``."""
        torch.ops.muon.accumulate_(
            grads, momenta, matrices, groups.hyper, groups.indices, grad_scale
        )

    def orthogonalize(self, matrices: Tensor, groups: Groups) -> None:
        """Orthogonalises ``matrices`` [count, rows, cols]; ``groups`` has one entry a matrix."""
        torch.ops.muon.orthogonalize_(matrices, groups.hyper, groups.indices, groups.spec)

    def refine(self, matrices: list[Tensor], state: list[State], groups: Groups) -> None:
        """Changes the orthogonalised matrices; ``state`` has all slots but the first."""

    def apply(
        self, params: list[Tensor], matrices: list[Tensor], groups: Groups, factors: list[float]
    ) -> None:
        """Decays and updates the parameters; ``factors`` are the shape factors of lr."""
        torch.ops.muon.apply_(params, matrices, groups.hyper, groups.indices, factors)


_Class = TypeVar("_Class", bound=type[Algorithm])
_library: Any = torch.library.Library("muon_python", "FRAGMENT")  # type: ignore[no-untyped-call]
_algorithms: dict[str, Algorithm] = {}


def register_algorithm(cls: _Class) -> _Class:
    """Class decorator: makes an `Algorithm` available as ``algorithm=cls.name``.

    Registering the same class again (same module and qualified name, as when a notebook cell runs
    twice) replaces it. A state dict that names an algorithm loads only where it is registered.

    Raises:
        TypeError: if ``cls`` is no subclass of `Algorithm`, ``state`` or ``options`` is no mapping
            with strings as keys, or an option is no number.
        ValueError: for a name that is taken or not usable, a state kind that does not exist, or an
            option whose name has a meaning already. State and options are named as variables are,
            [A-Za-z_][A-Za-z0-9_]*: the names become keys of state dicts and files.
    """
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"expected a subclass of libmuon.Algorithm, got {cls!r}")
    name = _checked_name(cls)
    _check_declarations(cls)
    instance = cls()  # first: an error leaves what is registered as it was
    stages = {
        stage: _define_op(name, stage)
        for stage in _SCHEMAS
        if getattr(cls, stage, None) is not getattr(Algorithm, stage, None)
    }
    torch.ops.muon.register_algorithm(
        name,
        [f"{key} {kind}" for key, kind in cls.state.items()],
        [f"{stage}={op}" for stage, op in stages.items()],
        list(cls.options),
        [float(value) for value in cls.options.values()],
        replace=True,
    )
    register_options(name, dict(cls.options))
    _algorithms[name] = instance
    return cls


def registered_algorithms() -> tuple[str, ...]:
    """The names of all algorithms, sorted."""
    return tuple(torch.ops.muon.registered_algorithms())


def _checked_name(cls: type[Algorithm]) -> str:
    name = cls.name
    if not isinstance(name, str):
        raise TypeError(f"{cls.__qualname__}.name should be a string but is: {name!r}")
    if not re.fullmatch(r"[A-Za-z0-9_.+-]+", name):
        raise ValueError(
            f"{cls.__qualname__}.name should be of letters, digits, '_', '.', '+' and '-', "
            f"but is: {name!r}"
        )
    name = name.lower()
    known = _algorithms.get(name)
    identity = (cls.__module__, cls.__qualname__)
    is_same = known is not None and identity == (type(known).__module__, type(known).__qualname__)
    if not is_same and name in registered_algorithms():
        owner = f"{type(known).__module__}.{type(known).__qualname__}" if known else "the core"
        raise ValueError(f"algorithm {name!r} is registered already, by {owner}; choose a new name")
    return name


def _check_declarations(cls: type[Algorithm]) -> None:
    check_names(f"{cls.__qualname__}.state", cls.state)
    for key, kind in cls.state.items():
        if kind not in _KINDS:
            raise ValueError(
                f"{cls.__qualname__}.state should map names to one of {_KINDS}, "
                f"but holds: {key!r}: {kind!r}"
            )
    check_names(f"{cls.__qualname__}.options", cls.options)
    for option, default in cls.options.items():
        if option in RESERVED or option in {column for column, _ in HYPER_COLUMNS}:
            raise ValueError(
                f"{cls.__qualname__}.options: {option!r} has a meaning already; choose a new name"
            )
        with errors_about(f"the default in {cls.__qualname__}.options"):
            option_check(default)(option, default)


def _define_op(name: str, stage: str) -> str:
    """The op that runs a stage of whichever class has the name then."""
    # Different names, different ops: "a-b" and "a_b" too.
    op = re.sub("[^a-z0-9]", lambda found: f"_{ord(found[0]):x}_", name) + f"_{stage}"
    full_name = f"{_library.ns}::{op}"
    if not torch._C._jit_get_schemas_for_operator(full_name):
        _library.define(op + _SCHEMAS[stage])
        kernel = _with_note(name, stage, _KERNELS[stage](name))
        _library.impl(op, kernel, "CompositeExplicitAutograd")
    return full_name


def _with_note(name: str, stage: str, kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel; an exception that leaves it says where it was raised."""

    def run(*args: Any) -> None:
        try:
            kernel(*args)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                owner = type(_algorithms[name])
                shapes = sorted({tuple(piece.shape) for piece in _tensors(args[0])})
                error.add_note(
                    f"raised in {stage} of algorithm {name!r} ({owner.__module__}."
                    f"{owner.__qualname__}) on tensors of shape {', '.join(map(str, shapes))}; "
                    "this step is half done: load the last checkpoint to repeat it exactly"
                )
            raise

    return run


def _tensors(first: Tensor | list[Tensor]) -> list[Tensor]:
    return [first] if isinstance(first, Tensor) else first


def _own(name: str) -> Mapping[str, float]:
    return _algorithms[name].options


def _by_piece(name: str, state: list[Tensor], skip: int = 0) -> list[State]:
    """The flat list of state tensors as one mapping a piece."""
    keys = list(_algorithms[name].state)[skip:]
    return [
        dict(zip(keys, state[i : i + len(keys)], strict=True))
        for i in range(0, len(state), max(len(keys), 1))
    ]


def _accumulate_kernel(name: str) -> Callable[..., None]:
    def run(
        grads: list[Tensor],
        state: list[Tensor],
        matrices: list[Tensor],
        hyper: Tensor,
        groups: list[int],
        grad_scale: Tensor | None,
    ) -> None:
        options = Groups(hyper, groups, _own(name))
        _algorithms[name].accumulate(grads, state, matrices, options, grad_scale)

    return run


def _orthogonalize_kernel(name: str) -> Callable[..., None]:
    def run(matrices: Tensor, hyper: Tensor, groups: list[int], spec: str) -> None:
        _algorithms[name].orthogonalize(matrices, Groups(hyper, groups, _own(name), spec))

    return run


def _refine_kernel(name: str) -> Callable[..., None]:
    def run(matrices: list[Tensor], state: list[Tensor], hyper: Tensor, groups: list[int]) -> None:
        options = Groups(hyper, groups, _own(name))
        pieces = _by_piece(name, state, skip=1) or [{} for _ in matrices]
        _algorithms[name].refine(matrices, pieces, options)

    return run


def _apply_kernel(name: str) -> Callable[..., None]:
    def run(
        params: list[Tensor],
        matrices: list[Tensor],
        hyper: Tensor,
        groups: list[int],
        factors: list[float],
    ) -> None:
        _algorithms[name].apply(params, matrices, Groups(hyper, groups, _own(name)), factors)

    return run


def _matrix_update_kernel(name: str) -> Callable[..., None]:
    def run(
        params: list[Tensor],
        grads: list[Tensor],
        state: list[Tensor],
        hyper: Tensor,
        groups: list[int],
        factors: list[float],
        grad_scale: Tensor | None,
        spec: str,
    ) -> None:
        options = Groups(hyper, groups, _own(name), spec)
        pieces = _by_piece(name, state) or [{} for _ in params]
        whole: Any = _algorithms[name]
        whole.matrix_update(params, _unscaled(grads, grad_scale), pieces, options, factors)

    return run


def _update_kernel(name: str) -> Callable[..., None]:
    def run(
        params: list[Tensor],
        grads: list[Tensor],
        state: list[Tensor],
        hyper: Tensor,
        groups: list[int],
        grad_scale: Tensor | None,
        spec: str,
    ) -> None:
        options = Groups(hyper, groups, _own(name), spec)
        pieces = _by_piece(name, state) or [{} for _ in params]
        whole: Any = _algorithms[name]
        whole.update(params, _unscaled(grads, grad_scale), pieces, options)

    return run


def _unscaled(grads: list[Tensor], grad_scale: Tensor | None) -> list[Tensor]:
    """Gradients as the loss has them, never the caller's tensors where they had to change."""
    if grad_scale is None:
        return grads
    return [grad / grad_scale.to(grad.device, grad.dtype) for grad in grads]


_KERNELS: dict[str, Callable[[str], Callable[..., None]]] = {
    "accumulate": _accumulate_kernel,
    "orthogonalize": _orthogonalize_kernel,
    "refine": _refine_kernel,
    "apply": _apply_kernel,
    "matrix_update": _matrix_update_kernel,
    "update": _update_kernel,
}
