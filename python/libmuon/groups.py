"""Which parameter of a model goes to which algorithm, with which options, and why."""

from __future__ import annotations

import fnmatch
import glob
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from libmuon.options import is_elementwise
from libmuon.roles import Kind, Role, Use, collect_uses, role_of, vocabulary_parameters

__all__ = ["Decision", "Rule", "group_parameters", "route_parameters"]

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Predicate = Callable[[str, Tensor, nn.Module | None], Any]
Match = str | re.Pattern[str] | type[nn.Module] | Predicate
Rule = tuple[Match, str | Mapping[str, Any]] | Predicate
"""What a user says about some parameters: ``(match, options)``, or a function that gives options.

``match`` is a glob over the whole name (``"blocks.*.attn.*"``; ``*`` crosses dots), a compiled
regular expression that is searched in the name, a module class (the parameters that such a module
holds itself), or a predicate ``(name, parameter, module) -> bool``. ``options`` is an algorithm or
a mapping of group options. A function ``(name, parameter, module)`` alone returns such options, or
``None`` where it has no opinion. ``module`` is the one that holds the parameter, ``None`` for a
bare tensor; a shared parameter is offered under each of its names.
"""

# The options that say which dims make a matrix, and those that cut it into blocks. A rule that
# chooses a view replaces all that routing would have chosen; one that chooses blocks, the blocks.
_VIEW_OPTIONS = frozenset({"rows", "cols", "flatten", "batch_dims"})
_SPLIT_OPTIONS = frozenset({"split_sizes", "num_heads", "split_dim"})


@dataclass(frozen=True)
class Decision:
    """What was decided about one parameter.

    Attributes:
        name: Its full name without wrappers such as ``_orig_mod.``; empty for an unnamed tensor.
        parameter: The parameter itself.
        options: The options of its group, ``algorithm`` among them; empty if it is frozen.
        reason: Why, in a few words.
    """

    name: str
    parameter: Tensor = field(repr=False)
    options: dict[str, Any]
    reason: str

    @property
    def frozen(self) -> bool:
        """Whether the parameter takes no part: no group, no state."""
        return not self.options


def group_parameters(model: Params, rules: Iterable[Rule] | None = None) -> list[dict[str, Any]]:
    """Splits a model's parameters into groups for :class:`libmuon.Muon`.

    Weights that are matrices go to Muon, with ``adjust_lr_fn="match_rms_adamw"`` so that one
    learning rate serves all; embeddings, heads, norms, biases, scalars, depthwise kernels and
    matrices with a side under 4 or an aspect ratio over 128 go to AdamW, one-dimensional ones
    without weight decay. Convolutions are flattened (each group of a grouped one is a matrix of
    its own), transposed ones and the ``Conv1D`` of transformers read along their output dim, and
    the stacked weights of ``MultiheadAttention``, ``LSTM`` and ``GRU`` split into their blocks. A
    shared weight is an embedding or a head if it is one anywhere.

    Args:
        model: A module. Tensors or ``(name, tensor)`` pairs work too, with less to go by.
        rules: A list of :data:`Rule`. They come before everything else: all rules that match a
            parameter add their options to it, and a layout in a rule means Muon.

    Returns:
        One group a distinct set of options, in model order. ``params`` are named pairs, and
        ``reasons`` says for each why it is here. Frozen parameters are in no group.

    Raises:
        ValueError: If a rule matches nothing, if two rules contradict each other, if nothing is
            trainable, or, once for all such parameters, if a parameter of three or more dimensions
            is matrices in a way that only the user can know.

    Example:
        >>> rules = [("*.lora_A.*", "adamw"), ("moe.experts.*", {"batch_dims": 1})]
        >>> optimizer = libmuon.Muon(libmuon.group_parameters(model, rules), lr=3e-4)
    """
    groups: list[dict[str, Any]] = []
    by_options: dict[Any, dict[str, Any]] = {}
    for decision in route_parameters(model, rules):
        if decision.frozen:
            continue
        key = _comparable(decision.options)
        if key not in by_options:
            by_options[key] = {"params": [], "reasons": [], **decision.options}
            groups.append(by_options[key])
        named = (decision.name, decision.parameter)
        by_options[key]["params"].append(named if decision.name else decision.parameter)
        by_options[key]["reasons"].append(decision.reason)
    if not groups:
        raise ValueError("no parameter requires a gradient: there is nothing to optimize")
    return groups


def route_parameters(model: Params, rules: Iterable[Rule] | None = None) -> list[Decision]:
    """The decision on every parameter, in model order, frozen ones included.

    Takes and raises what :func:`group_parameters` does.
    """
    compiled = _compile_rules(rules)
    found = collect_uses(model)
    vocabulary = vocabulary_parameters(model) if isinstance(model, nn.Module) else {}
    _check_names([uses[0].name for _, uses in found])
    decisions: list[Decision] = []
    unclear: list[tuple[Tensor, Use]] = []
    for index, (parameter, uses) in enumerate(found):
        wanted, origin = _ask_rules(compiled, parameter, uses)
        name = uses[0].name
        if not parameter.requires_grad:
            decisions.append(Decision(name, parameter, {}, "frozen: requires_grad is False"))
            continue
        role = role_of(parameter, uses, vocabulary)
        options = _options(name or f"parameter {index}", parameter, role, wanted)
        if options is None:
            unclear.append((parameter, uses[0]))
            continue
        decisions.append(Decision(name, parameter, options, _reason(role, wanted, origin)))
    _check_all_matched(compiled, [use.name for _, uses in found for use in uses])
    if unclear:
        raise ValueError(_ask_for_layouts(unclear))
    _warn_if_nothing_on_muon([decision for decision in decisions if not decision.frozen])
    return decisions


def _options(
    name: str, parameter: Tensor, role: Role, wanted: dict[str, Any]
) -> dict[str, Any] | None:
    """The group options of a parameter; None if it is matrices in a way nobody has said."""
    says_matrix = not wanted.keys().isdisjoint(_VIEW_OPTIONS | _SPLIT_OPTIONS)
    on_muon = says_matrix or role.kind in (Kind.MATRIX, Kind.UNKNOWN)
    algorithm: str = wanted.get("algorithm", "muon" if on_muon else "adamw")
    if is_elementwise(algorithm):
        decay = {"weight_decay": 0.0} if role.kind is Kind.GAIN else {}
        return {"algorithm": algorithm, **decay, **wanted}
    if parameter.ndim < 2:
        raise ValueError(
            f"a rule puts {name!r} of shape {tuple(parameter.shape)} on {algorithm!r}, which needs "
            "matrices: give it algorithm 'adamw' or leave it to the default"
        )
    says_view = not wanted.keys().isdisjoint(_VIEW_OPTIONS)
    if role.layout is None and parameter.ndim > 2 and not says_view:
        return None
    replaced = (_VIEW_OPTIONS | _SPLIT_OPTIONS) if says_view else frozenset[str]()
    if not wanted.keys().isdisjoint(_SPLIT_OPTIONS):
        replaced |= _SPLIT_OPTIONS
    layout = {key: value for key, value in (role.layout or {}).items() if key not in replaced}
    return {"algorithm": algorithm, "adjust_lr_fn": "match_rms_adamw", **layout, **wanted}


def _reason(role: Role, wanted: dict[str, Any], origin: list[str]) -> str:
    if not origin:
        return role.reason
    decided = not wanted.keys().isdisjoint({"algorithm", *_VIEW_OPTIONS, *_SPLIT_OPTIONS})
    sources = ", ".join(origin)
    return sources if decided else f"{role.reason}; options of {sources}"


@dataclass
class _CompiledRule:
    label: str
    ask: Callable[[Use, Tensor], str | Mapping[str, Any] | None]
    must_match: bool
    matched: bool = False

    def options(self, use: Use, parameter: Tensor) -> dict[str, Any]:
        """What the rule wants for the parameter under this name; empty if nothing."""
        wanted = self.ask(use, parameter)
        self.matched |= wanted is not None
        if wanted is None:
            return {}
        if isinstance(wanted, str):
            wanted = {"algorithm": wanted}
        if not isinstance(wanted, Mapping):
            raise TypeError(
                f"{self.label} gives {type(wanted).__name__}; "
                "expected an algorithm's name or a mapping of group options"
            )
        if "params" in wanted or not isinstance(wanted.get("algorithm", ""), str):
            raise ValueError(f"{self.label} gives {dict(wanted)!r}, which are no group options")
        # An algorithm's name counts in any case, so that rules agree and groups are few.
        return {k: v.lower() if k == "algorithm" else v for k, v in wanted.items()}


def _compile_rules(rules: Iterable[Rule] | None) -> list[_CompiledRule]:
    if rules is None:
        return []
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
        raise TypeError(
            f"rules must be a list of (match, options), got {type(rules).__name__} {rules!r}; "
            'for one rule write [("head.*", "adamw")]'
        )
    return [_compile_rule(index, rule) for index, rule in enumerate(rules)]


def _compile_rule(index: int, rule: Any) -> _CompiledRule:
    if callable(rule) and not isinstance(rule, type):
        label = f"rule {index} ({getattr(rule, '__name__', rule)})"
        return _CompiledRule(label, lambda use, p: rule(use.name, p, use.module), False)
    if isinstance(rule, str) or not isinstance(rule, Sequence) or len(rule) != 2:
        raise TypeError(f"rule {index} must be (match, options) or a function, got {rule!r}")
    match, options = rule
    test = _matcher(match)
    if test is None:
        raise TypeError(
            f"rule {index} must match by a glob, a compiled regular expression, a module class "
            f"or a predicate, got {match!r}"
        )
    shown = match.pattern if isinstance(match, re.Pattern) else getattr(match, "__name__", match)
    return _CompiledRule(
        f"rule {index} ({shown})", lambda use, p: options if test(use, p) else None, True
    )


def _matcher(match: Any) -> Callable[[Use, Tensor], Any] | None:
    if isinstance(match, str):
        return lambda use, p: fnmatch.fnmatchcase(use.name, match)
    if isinstance(match, re.Pattern):
        return lambda use, p: match.search(use.name)
    if isinstance(match, type):
        return (
            (lambda use, p: isinstance(use.module, match)) if issubclass(match, nn.Module) else None
        )
    return (lambda use, p: match(use.name, p, use.module)) if callable(match) else None


def _ask_rules(
    rules: list[_CompiledRule], parameter: Tensor, uses: list[Use]
) -> tuple[dict[str, Any], list[str]]:
    """All that the rules want for a parameter, and the rules that want it."""
    wanted: dict[str, Any] = {}
    source: dict[str, str] = {}
    for rule in rules:
        for use in uses:
            for key, value in rule.options(use, parameter).items():
                if key in wanted and _comparable(wanted[key]) != _comparable(value):
                    raise ValueError(
                        f"contradictory rules for {use.name!r}: {source[key]} gives "
                        f"{key}={wanted[key]!r}, {rule.label} gives {key}={value!r}; "
                        "narrow one of them"
                    )
                wanted[key] = value
                source.setdefault(key, rule.label)
    return wanted, list(dict.fromkeys(source.values()))


def _comparable(value: Any) -> Any:
    """A hashable stand-in that is equal for equal options; tensors count by identity."""
    if isinstance(value, Mapping):
        return frozenset((key, _comparable(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(item) for item in value)
    return id(value) if isinstance(value, Tensor) else value


def _check_names(names: list[str]) -> None:
    unnamed = sum(not name for name in names)
    if 0 < unnamed < len(names):
        raise TypeError(
            f"{unnamed} of {len(names)} parameters have no name; name all of them or none"
        )
    if unnamed:
        warnings.warn(
            "the parameters have no names: an embedding or a head cannot be told from another "
            "matrix and goes to Muon; pass the module, or model.named_parameters()",
            stacklevel=4,
        )


def _check_all_matched(rules: list[_CompiledRule], names: list[str]) -> None:
    idle = [rule.label for rule in rules if rule.must_match and not rule.matched]
    if idle:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            f"{', '.join(idle)} matches no parameter; globs must fit the whole name. "
            f"The names are: {shown}"
        )


def _ask_for_layouts(unclear: list[tuple[Tensor, Use]]) -> str:
    """The text that lists each parameter with rules to choose from."""
    text = (
        "parameters with three or more dimensions need a choice: which dims make the matrices? "
        "Keep one line of each in group_parameters(model, rules=[...]):"
    )
    for parameter, use in unclear:
        *batch, rows, cols = parameter.shape
        flat = math.prod((*batch[1:], rows, cols))
        pattern = repr(glob.escape(use.name)) if use.name else "lambda name, p, module: ..."
        text += f"""
  # {use.name or "unnamed"} of {use.owner}, shape {tuple(parameter.shape)}
  ({pattern}, {{"batch_dims": {len(batch)}}}),  # {math.prod(batch)} matrices of {rows} x {cols}
  ({pattern}, {{"flatten": True}}),  # one matrix of {parameter.shape[0]} x {flat}
  ({pattern}, "adamw"),  # none"""
    return text


def _warn_if_nothing_on_muon(decisions: list[Decision]) -> None:
    if decisions and all(is_elementwise(d.options["algorithm"]) for d in decisions):
        empty = sum(d.parameter.numel() == 0 for d in decisions)
        hint = f" {empty} of them are empty: route before the weights are sharded." if empty else ""
        warnings.warn(
            f"no parameter is on Muon: all {len(decisions)} go to other algorithms.{hint}",
            stacklevel=4,
        )
