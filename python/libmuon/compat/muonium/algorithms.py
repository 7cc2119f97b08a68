"""muonium's research base: algorithms as Python classes, in libmuon's registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from libmuon import algorithms
from libmuon.options import GROUP_CHECKS, check_names, own_options


@dataclass(frozen=True)
class BufferSpec:
    """A state buffer of an algorithm.

    Attributes:
        like: "grad" (the shape of the gradient) or "grad_rows" (one value a row).
        signed: whether its values may be negative; for storage formats.
    """

    like: Literal["grad", "grad_rows"]
    signed: bool = True

    def __post_init__(self) -> None:
        if self.like not in ("grad", "grad_rows"):
            raise ValueError(f"like should be 'grad' or 'grad_rows' but is: {self.like!r}")


class MuonAlgorithm:
    """Base of an algorithm in muonium's form; see `register_muon_algorithm`.

    Attributes:
        name: what ``algorithm=`` selects, in any case.
        options: a group's own options with their defaults: numbers and bools.
        state_spec: name of each buffer -> `BufferSpec`; "step" and "lr_ratio" are reserved.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {"momentum_buffer": BufferSpec("grad")}

    def validate_param(self, p: Tensor) -> None:
        """Refuses a parameter that the algorithm cannot train."""
        if p.dim() < 2:
            raise ValueError(f"{self.name} needs 2D+ parameters, got shape {tuple(p.shape)}")
        if p.is_complex():
            raise NotImplementedError(f"{self.name} does not train complex parameters")

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        lr_ratio: Tensor,
        **options: Any,
    ) -> None:
        """Updates ``param`` and ``state`` in place.

        ``param`` and ``grad`` are one matrix, or [batch, rows, cols]; a row block where the weight
        is split. ``options`` are ``lr`` (0-d tensor), ``weight_decay``, ``cautious_wd``,
        ``momentum``, ``nesterov``, ``maximize``, ``ns_steps``, ``orthogonalization_strategy``,
        ``split_sizes`` (None: blocks come one by one) and the algorithm's own.
        """
        raise NotImplementedError(f"{type(self).__name__} needs an update")

    def foreach_update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: dict[str, list[Tensor]],
        lr_ratios: list[Tensor],
        **options: Any,
    ) -> None:
        """Updates equal matrices together; by default one after the other."""
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            one = {key: buffers[i] for key, buffers in state.items()}
            self.update(param, grad, one, lr_ratios[i], **options)


class _Native(MuonAlgorithm):
    """An algorithm of the core: it describes itself, and steps without a Python update."""

    def __init__(self, name: str, state_spec: Mapping[str, BufferSpec]) -> None:
        self.name = name  # type: ignore[misc]
        self.options = own_options(name)  # type: ignore[misc]
        self.state_spec = state_spec  # type: ignore[misc]


_GRAD, _ROWS = BufferSpec("grad"), BufferSpec("grad_rows", signed=False)
_native = {
    "muon": _Native("muon", {"momentum_buffer": _GRAD}),
    "normuon": _Native("normuon", {"momentum_buffer": _GRAD, "variance_neuron": _ROWS}),
}
registered: dict[str, MuonAlgorithm] = {}
_KIND = {"grad": "param", "grad_rows": "row"}
# What `update` is called with, and what its state is beside the algorithm's own.
_ARGUMENTS = {"param", "params", "grad", "grads", "state", "lr_ratio", "lr_ratios", "cautious_wd"}
_OPTIONS = {"use_muon", "wd", "use_cautious_wd", "orthogonalization_strategy"}
_RESERVED_STATE = frozenset({"step", "lr_ratio"})

_Class = TypeVar("_Class", bound=type[MuonAlgorithm])


def register_muon_algorithm(cls: _Class) -> _Class:
    """Class decorator: makes a `MuonAlgorithm` available to every optimizer of libmuon.

    Registering the same class again (same module and qualified name) replaces it.

    Raises:
        TypeError: if ``cls`` is no subclass of `MuonAlgorithm`, ``options`` or ``state_spec`` is no
            mapping by name, an option is no number, or a state is no `BufferSpec`.
        ValueError: for a name that is taken or not usable, or a reserved option or state key.
    """
    if not (isinstance(cls, type) and issubclass(cls, MuonAlgorithm)):
        raise TypeError(f"expected a subclass of MuonAlgorithm, got {cls!r}")
    check_names(f"{cls.__qualname__}.options", cls.options)
    check_names(f"{cls.__qualname__}.state_spec", cls.state_spec)
    for option in cls.options:
        if option in _ARGUMENTS | _OPTIONS | GROUP_CHECKS.keys():
            raise ValueError(f"option {option!r} of {cls.__qualname__} is reserved")
    for key, spec in cls.state_spec.items():
        if key in _RESERVED_STATE:
            raise ValueError(f"state {key!r} of {cls.__qualname__} is reserved")
        if not isinstance(spec, BufferSpec):
            raise TypeError(
                f"{cls.__qualname__}.state_spec should map names to BufferSpec, "
                f"but holds: {key!r}: {spec!r}"
            )
    instance = cls()
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "name": cls.name,
        "state": {key: _KIND[spec.like] for key, spec in cls.state_spec.items()},
        "options": dict(cls.options),
        "matrix_update": _bridge(instance),
    }
    bridge = type(cls.__name__, (algorithms.Algorithm,), body)
    algorithms.register_algorithm(bridge)
    registered[cls.name.lower()] = instance
    return cls


def get_algorithm(name: str) -> MuonAlgorithm:
    """The matrix algorithm of that name in any case; ValueError that lists the names else."""
    known = _native | registered
    if name.lower() not in known:
        raise ValueError(f"Unknown algorithm {name!r}; known: {', '.join(sorted(known))}")
    return known[name.lower()]


def registered_algorithms() -> tuple[str, ...]:
    """The names of all algorithms, sorted."""
    return algorithms.registered_algorithms()


def _bridge(instance: MuonAlgorithm) -> Callable[..., None]:
    """A ``matrix_update`` of libmuon's that calls ``foreach_update`` once a group."""
    own = tuple(type(instance).options)

    def matrix_update(
        self: algorithms.Algorithm,
        params: list[Tensor],
        grads: list[Tensor],
        state: list[Mapping[str, Tensor]],
        groups: algorithms.Groups,
        factors: list[float],
    ) -> None:
        for row in dict.fromkeys(groups.indices):
            pieces = [i for i, index in enumerate(groups.indices) if index == row]
            options = groups[pieces[0]]
            instance.foreach_update(
                [_matrix(params[i]) for i in pieces],
                [_matrix(grads[i]) for i in pieces],
                {key: [_matrix(state[i][key]) for i in pieces] for key in state[pieces[0]]},
                [torch.tensor(factors[i]) for i in pieces],
                lr=torch.tensor(options["lr"] * options["lr_multiplier"]),
                weight_decay=options["weight_decay"],
                cautious_wd=options["cautious"],
                momentum=options["momentum"],
                nesterov=options["nesterov"],
                maximize=options["maximize"],
                **_iteration(groups.spec),
                split_sizes=None,
                **{name: options[name] for name in own},
            )

    return matrix_update


def _matrix(piece: Tensor) -> Tensor:
    return piece[0] if piece.size(0) == 1 else piece


def _iteration(spec: str) -> dict[str, Any]:
    """Steps and strategy from a group's structural options."""
    items = dict(item.split("=", 1) for item in spec.split(";"))
    is_polar = items.get("schedule") == "polar_express"
    strategy = "polar_express" if is_polar else "newton_schulz"
    return {"ns_steps": int(items["steps"]), "orthogonalization_strategy": strategy}
