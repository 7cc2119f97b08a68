"""The options of a parameter group: their checks, defaults, aliases and what a group inherits."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from libmuon import checks

Group = dict[str, Any]

# torch.optim.Muon's options in its order, then ours.
CHECKS: dict[str, checks.Check] = {
    "lr": checks.number(tensor=True),
    "weight_decay": checks.number(tensor=True),
    "momentum": checks.number(high=1.0, tensor=True),
    "nesterov": checks.flag,
    "ns_coefficients": checks.ns_coefficients,
    "eps": checks.number(),
    "ns_steps": checks.optional(checks.ns_steps),
    "adjust_lr_fn": checks.optional(checks.adjust_lr_fn),
    "algorithm": checks.algorithm,
    "rows": checks.optional(checks.integers()),
    "cols": checks.optional(checks.integers()),
    "flatten": checks.flag,
    "batch_dims": checks.optional(checks.integer(0)),
    "complex_dim": checks.optional(checks.integer(-1)),
    "split_sizes": checks.optional(checks.integers(1)),
    "num_heads": checks.optional(checks.integer(1)),
    "split_dim": checks.integer(0, 1),
    "maximize": checks.flag,
    "cautious": checks.flag,
    "compute_dtype": checks.dtype("auto"),
    "state_dtype": checks.optional(checks.state_dtype),
    "nonfinite": checks.choice("propagate", "skip"),
    "lr_multiplier": checks.number(),
    "batch_size": checks.optional(checks.integer(1)),
    "momentum_form": checks.choice("ema", "heavy_ball"),
    "normalization": checks.optional(checks.choice("clamp", "add")),
    "norm_factor": checks.optional(checks.number(above=0.0)),
    "decay_lr": checks.choice("lr", "adjusted"),
    "form": checks.choice("auto", "standard", "gram", "gram_x_restart"),
    "fused": checks.optional(checks.flag),
    "foreach": checks.optional(checks.flag),
    "capturable": checks.flag,
    "differentiable": checks.only(False, "the step works in place, through ops without derivative"),
    "deterministic": checks.optional(checks.flag),
    "stochastic_rounding": checks.flag,
    "master": checks.optional(checks.choice("split")),
    "offload": checks.flag,
}

# Options of single algorithms: never in the optimizer's defaults, where OneCycleLR would take
# "betas" for what it has to cycle.
_ADAM: Group = {"betas": (0.9, 0.95), "amsgrad": False}
ALGORITHM_OPTIONS: dict[str, Group] = {
    "muon": {},
    "normuon": {"muon_beta2": 0.95},
    "adam": _ADAM,
    "adamw": _ADAM,
}
_BUILTIN = frozenset(ALGORITHM_OPTIONS)
# What a group takes where the optimizer's defaults are about another algorithm.
FOREIGN_DEFAULTS: dict[str, Group] = {
    "muon": {"weight_decay": 0.1, "eps": 1e-7},
    "adam": {"weight_decay": 0.0, "eps": 1e-8},
    "adamw": {"weight_decay": 0.01, "eps": 1e-8},
}

GROUP_CHECKS: dict[str, checks.Check] = CHECKS | {
    "betas": checks.betas,
    "amsgrad": checks.flag,
    "muon_beta2": checks.number(below=1.0),
}

# Options that belong to how this run computes and stores, not to the training that a checkpoint
# continues: `load_state_dict` leaves them alone.
RUN_OPTIONS = frozenset(
    {
        "state_dtype",
        "batch_size",
        "form",
        "fused",
        "foreach",
        "capturable",
        "differentiable",
        "deterministic",
        "stochastic_rounding",
        "master",
        "offload",
    }
)

# Choices that a group makes as a whole: naming one of a set drops what it inherits of the others.
_EXCLUSIVE: tuple[Group, ...] = (
    {"rows": None, "cols": None, "flatten": False, "batch_dims": None},
    {"split_sizes": None, "num_heads": None},
)

# Names that other optimizers give to our options; kept as metadata they would silently do nothing.
_OTHER_NAMES = {
    "wd": "weight_decay",
    "mu": "momentum",
    "epsilon": "eps",
    "algo": "algorithm",
    "learning_rate": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "adjust_lr": "adjust_lr_fn",
}
# Keys of torch's schedulers that look like options.
_METADATA = frozenset({"max_momentum", "base_momentum", "initial_momentum", "initial_lr", "max_lr"})


# What an algorithm's own option may not be called.
RESERVED = (
    GROUP_CHECKS.keys()
    | _OTHER_NAMES.keys()
    | _METADATA
    | {"params", "param_names", "reasons", "use_muon", "optimizer", "process_group"}
)


def check_names(what: str, declared: Any) -> None:
    """Refuses what maps no names that may be keys of groups, state dicts and files."""
    if not isinstance(declared, Mapping):
        raise TypeError(
            f"{what} should be a mapping by name but is: {declared!r} ({type(declared).__name__})"
        )
    for name in declared:
        if not isinstance(name, str):
            raise TypeError(f"names in {what} should be strings but one is: {name!r}")
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                f"names in {what} should be of letters, digits and '_', without a digit first, "
                f"but one is: {name!r}"
            )


def register_options(algorithm: str, options: Group) -> None:
    """Makes the options of a registered algorithm known, with their defaults."""
    ALGORITHM_OPTIONS[algorithm] = options


def is_builtin(algorithm: str) -> bool:
    """Whether an algorithm is one of libmuon's."""
    return algorithm in _BUILTIN


def own_options(algorithm: str) -> Group:
    """The options that only groups of `algorithm` have, with their defaults.

    An algorithm that another C++ library has registered is known to the core alone.
    """
    own = ALGORITHM_OPTIONS.get(algorithm)
    return dict(torch.ops.muon.algorithm_options(algorithm)) if own is None else own


def option_check(default: Any) -> checks.Check:
    """The check of an algorithm's own option, by the type of its default."""
    if isinstance(default, bool):
        return checks.flag
    if isinstance(default, int):
        return checks.integer(-(2**53), 2**53)
    return checks.number(low=-float("inf"))


def group_checks(algorithm: str) -> dict[str, checks.Check]:
    """The checks of all options that a group of `algorithm` may have."""
    if is_builtin(algorithm):
        return GROUP_CHECKS
    return GROUP_CHECKS | {k: option_check(v) for k, v in own_options(algorithm).items()}


def check_defaults(values: Mapping[str, Any]) -> Group:
    """The optimizer's defaults, checked, in the order of `CHECKS`."""
    defaults = {name: check(name, values[name]) for name, check in CHECKS.items()}
    _check_together(defaults)
    return defaults


@contextmanager
def errors_about(what: str) -> Iterator[None]:
    """Errors that arise inside say at their end what they are about."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        error.args = (f"{error} ({what})", *error.args[1:])
        raise


def normalize_groups(
    new: Sequence[Mapping[str, Any]], defaults: Group, existing: Sequence[Group] = ()
) -> list[Group]:
    """Complete and checked copies of groups; the originals are left alone.

    Args:
        new: groups as a caller writes them.
        defaults: the optimizer's defaults.
        existing: groups that the optimizer has already; they matter for who may inherit `lr`.
    """
    groups = []
    for index, group in enumerate(new, start=len(existing)):
        with errors_about(f"parameter group {index}"):
            groups.append(normalize_group(group, defaults))
    matrix = [g for g in (*existing, *groups) if not is_elementwise(g["algorithm"])]
    one_lr_fits_all = all(g["adjust_lr_fn"] == "match_rms_adamw" for g in matrix)
    elementwise = is_elementwise(defaults["algorithm"])
    for index, group in enumerate(groups, start=len(existing)):
        if "lr" in group:
            continue
        if not (one_lr_fits_all or is_elementwise(group["algorithm"]) == elementwise):
            raise ValueError(
                f"group {index} (algorithm {group['algorithm']!r}) needs its own "
                f"lr: that of {defaults['algorithm']!r} fits it only where every matrix group uses "
                f"adjust_lr_fn='match_rms_adamw'"
            )
        group["lr"] = defaults["lr"]
    return groups


def normalize_group(given: Mapping[str, Any], defaults: Group) -> Group:
    """One group, complete but for `lr`, which only stands in it if it was given."""
    group: Group = dict(given)
    _resolve_aliases(group, defaults)
    group.setdefault("algorithm", defaults["algorithm"])
    algorithm: str = checks.algorithm("algorithm", group["algorithm"])
    known = group_checks(algorithm)
    _refuse_misspelt(group, known)
    for name, check in known.items():
        if name in group:
            group[name] = check(name, group[name])
    _check_applicable(group, algorithm)
    own = _own_defaults(algorithm, defaults)
    for choices in _EXCLUSIVE:
        if any(given.get(name, neutral) != neutral for name, neutral in choices.items()):
            own = own | choices
    for name, value in {**defaults, **own}.items():
        if name != "lr":
            group.setdefault(name, value)
    if group["ns_steps"] is None:
        group["ns_steps"] = schedule_length(group["ns_coefficients"])
    _check_together(group)
    return group


def schedule_length(ns_coefficients: str | tuple[Any, ...]) -> int:
    """How many steps a schedule has: 5 for a single triple, as in torch."""
    if isinstance(ns_coefficients, str):
        spec = f"schedule={ns_coefficients}"
        return len(torch.ops.muon.schedule_coefficients(spec)) // 3
    return len(ns_coefficients) if isinstance(ns_coefficients[0], tuple) else 5


def is_elementwise(algorithm: str) -> bool:
    """Whether an algorithm works on entries (Adam) and not on matrices (Muon)."""
    return bool(torch.ops.muon.is_elementwise(algorithm))


def named_parameters(groups: Iterable[Group], start: int = 0) -> Iterator[tuple[Group, str, Any]]:
    """(group, name, parameter) of every parameter; unnamed ones are named by position.

    `start` is the index that the first of `groups` has in the optimizer.
    """
    for index, group in enumerate(groups, start):
        names = group.get("param_names")
        for position, item in enumerate(group["params"]):
            name = names[position] if names else f"parameter {position} of group {index}"
            yield group, name, item


def _own_defaults(algorithm: str, defaults: Group) -> Group:
    """What a group takes from its algorithm where the constructor's values are not about it."""
    inherited = defaults["algorithm"]
    elementwise = is_elementwise(algorithm)
    own = own_options(algorithm)
    # Muon and its variants share what decay and eps mean; Adam's decay is coupled, AdamW's is not.
    if algorithm == inherited or not (elementwise or is_elementwise(inherited)):
        return own
    return own | FOREIGN_DEFAULTS.get(
        algorithm, FOREIGN_DEFAULTS["adamw" if elementwise else "muon"]
    )


def _refuse_misspelt(group: Group, known: Mapping[str, checks.Check]) -> None:
    for key in group.keys() - known.keys() - _METADATA:
        lowered = str(key).lower()
        close = difflib.get_close_matches(lowered, known, n=1, cutoff=0.8)
        meant = _OTHER_NAMES.get(lowered) or (close[0] if close else None)
        if meant is not None:
            raise ValueError(
                f"unknown option {key!r} in a parameter group; did you mean {meant!r}? "
                "(Keys that resemble no option are kept as metadata.)"
            )


def _resolve_aliases(group: Group, defaults: Group) -> None:
    """`optimizer="adamw"` and `use_muon=False`, as other packages write `algorithm`."""
    if "optimizer" in group:
        meant = checks.algorithm("optimizer", group["optimizer"])
        if checks.algorithm("algorithm", group.setdefault("algorithm", meant)) != meant:
            raise ValueError(
                f"a group says algorithm={group['algorithm']!r} and optimizer={meant!r}; "
                "give one of them"
            )
    if "use_muon" in group:
        wants_matrix = checks.flag("use_muon", group["use_muon"])
        inherited = defaults["algorithm"]
        if is_elementwise(inherited) == wants_matrix:
            inherited = "muon" if wants_matrix else "adamw"
        algorithm = checks.algorithm("algorithm", group.setdefault("algorithm", inherited))
        if is_elementwise(algorithm) == wants_matrix:
            raise ValueError(
                f"a group says algorithm={algorithm!r} and use_muon={wants_matrix}; "
                "give one of them"
            )


def _check_applicable(group: Group, algorithm: str) -> None:
    """Options of one algorithm in a group of another are a mistake about the group."""
    if not is_builtin(algorithm):  # the user knows what it reads
        return
    own = own_options(algorithm)
    for name in ("betas", "amsgrad", "muon_beta2"):
        if name in group and name not in own:
            users = [a for a in sorted(_BUILTIN) if name in ALGORITHM_OPTIONS[a]]
            raise ValueError(
                f"{name} is an option of {' and '.join(map(repr, users))}, but the group's "
                f"algorithm is {algorithm!r}"
            )


def _check_together(group: Group) -> None:
    if group["fused"] and group["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if group["foreach"] is False and group["batch_size"] not in (None, 1):
        raise ValueError(
            f"foreach=False takes one matrix a batch, but batch_size is: {group['batch_size']}"
        )
