"""What each parameter of a model is: a matrix for Muon, or something that AdamW should train.

The evidence is taken in this order: the type of the module that holds the parameter, whole words of
its name, its shape. ``include/muon/groups.h`` follows the same order with the same words, so that a
model and its C++ twin are routed alike; a change here belongs there too.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# A matrix with a shorter side or a larger aspect ratio gains nothing from orthogonalisation.
MIN_SIDE = 4
MAX_ASPECT = 128

EMBEDDING_WORDS = frozenset({"emb", "embed", "embeds", "embedding", "embeddings", "wte", "wpe"})
HEAD_WORDS = frozenset(
    {"head", "heads", "lmhead", "classifier", "unembed", "unembedding", "logits"}
)
# Names that mean the last layer only where the model itself holds it: blocks have an `fc` too.
OUTPUT_NAMES = frozenset({"fc", "out", "output", "decoder", "score"})
GAIN_WORDS = frozenset(
    {"bias", "norm", "layernorm", "rmsnorm", "ln", "scale", "gain", "gamma", "beta"}
)

# What wrappers (torch.compile, activation checkpointing, FSDP1) insert into names.
WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

_GATES: tuple[tuple[type[nn.Module], int], ...] = (
    (nn.LSTM, 4),
    (nn.LSTMCell, 4),
    (nn.GRU, 3),
    (nn.GRUCell, 3),
    (nn.RNNBase, 1),
    (nn.RNNCellBase, 1),
)
_CONV_TYPES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class Kind(enum.IntEnum):
    """Roles; of the roles of a shared parameter the smallest one decides."""

    VOCABULARY = 0  # embedding or head: AdamW
    GAIN = 1  # norm, bias, scalar, broadcast vector: AdamW without decay
    SMALL = 2  # a matrix that Muon does not help: AdamW
    MATRIX = 3  # Muon
    UNKNOWN = 4  # three or more dimensions whose meaning cannot be told


@dataclass(frozen=True)
class Use:
    """One place where a parameter is registered."""

    name: str  # full name, wrappers removed
    path: str  # the same, seen through a parametrization: what the module calls it
    module: nn.Module | None  # the module that holds it; None for a bare tensor

    @property
    def attribute(self) -> str:
        """What the module calls the parameter."""
        return self.path.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """The class of the module."""
        return "a tensor" if self.module is None else type(self.module).__name__


@dataclass(frozen=True)
class Role:
    """A kind, why, and the group options that say how the parameter is matrices."""

    kind: Kind
    reason: str
    layout: dict[str, Any] | None = None


def collect_uses(
    params: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
) -> list[tuple[Tensor, list[Use]]]:
    """Every parameter once, in model order, with all places where it is registered."""
    found: dict[int, tuple[Tensor, list[Use]]] = {}
    entries = list(_module_uses(params) if isinstance(params, nn.Module) else _tensor_uses(params))
    # DistributedDataParallel and its like put everything under "module".
    while entries and all(use.name.startswith("module.") for _, use in entries):
        entries = [
            (p, Use(use.name.removeprefix("module."), use.path.removeprefix("module."), use.module))
            for p, use in entries
        ]
    for parameter, use in entries:
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {use.name!r} of {use.owner} has no shape yet; "
                "run the model once before its parameters are grouped"
            )
        found.setdefault(id(parameter), (parameter, []))[1].append(use)
    return list(found.values())


def _module_uses(model: nn.Module) -> Iterator[tuple[Tensor, Use]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        owner, path = module, prefix
        if isinstance(module, parametrize.ParametrizationList):
            # "linear.parametrizations.weight" holds what is linear.weight to everyone else.
            path = prefix.replace("parametrizations.", "")
            owner = modules[path.rpartition(".")[0]]
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = _clean(f"{prefix}.{attribute}")
            yield parameter, Use(name, name if owner is module else _clean(path), owner)


def _tensor_uses(params: Iterable[Any]) -> Iterator[tuple[Tensor, Use]]:
    for index, entry in enumerate(params):
        name, parameter = entry if isinstance(entry, tuple) and len(entry) == 2 else ("", entry)
        if not isinstance(name, str) or not isinstance(parameter, Tensor):
            raise TypeError(
                f"expected a module, tensors or (name, tensor) pairs, got {type(entry).__name__} "
                f"(parameter {index}); group dicts go to libmuon.Muon as they are"
            )
        yield parameter, Use(_clean(name), _clean(name), None)


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part and part not in WRAPPER_NAMES)


def vocabulary_name(name: str) -> str | None:
    """Why a parameter of that name is an embedding or a head; None if the name does not say so."""
    return _vocabulary_name(Use(_clean(name), _clean(name), None))


def vocabulary_parameters(model: nn.Module) -> dict[int, str]:
    """Reasons, by id, for the parameters that a module declares to be embeddings or heads."""
    found: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            found.update((id(p), "head (AdaptiveLogSoftmaxWithLoss)") for p in module.parameters())
        for method in ("get_input_embeddings", "get_output_embeddings"):
            try:
                part = getattr(module, method)() if hasattr(module, method) else None
            except NotImplementedError:  # how a model says that it has none
                continue
            # Vision models return their patch convolution here, which is no table of a vocabulary.
            if isinstance(part, nn.Module) and not isinstance(part, _CONV_TYPES):
                kind = "embedding" if "input" in method else "head"
                found.update((id(p), f"{kind} ({method})") for p in part.parameters())
    return found


def role_of(parameter: Tensor, uses: list[Use], vocabulary: dict[int, str]) -> Role:
    """The role of a parameter, the union of its roles where it is shared."""
    declared = vocabulary.get(id(parameter))
    roles = [_role(parameter, use, declared) for use in uses]
    index = min(range(len(uses)), key=lambda i: roles[i].kind)
    role = roles[index]
    if index > 0:
        return Role(role.kind, f"shared with {uses[index].name}: {role.reason}", role.layout)
    return role


def _role(parameter: Tensor, use: Use, declared: str | None) -> Role:
    shape = tuple(parameter.shape)
    if len(shape) <= 1 or (len(shape) > 2 and parameter.numel() == max(shape)):
        return Role(
            Kind.GAIN, ("scalar", "1D")[len(shape)] if len(shape) < 2 else "a vector in shape"
        )
    layout, reason = _layout(use, shape)
    vocabulary = declared or _vocabulary_type(use) or _vocabulary_name(use)
    if vocabulary:
        return Role(Kind.VOCABULARY, vocabulary, layout)
    if _has_type_named(use.module, r"norm(\d+d)?$"):
        return Role(Kind.GAIN, f"norm ({use.owner})", layout)
    if not _has_known_layout(use) and _words(use.attribute, _owner_name(use)) & GAIN_WORDS:
        return Role(Kind.GAIN, "norm, bias or gain by name", layout)
    if layout is None:
        if 1 in shape[:2]:
            return Role(Kind.SMALL, "broadcast over a leading dimension of size 1")
        return Role(Kind.UNKNOWN, reason)
    if _is_depthwise(use, shape):
        return Role(Kind.SMALL, f"depthwise kernel ({use.owner})", layout)
    rows, cols = _block(shape, layout)
    if min(rows, cols) < MIN_SIDE or max(rows, cols) > MAX_ASPECT * min(rows, cols):
        return Role(Kind.SMALL, f"too thin for Muon: {rows} x {cols}", layout)
    return Role(Kind.MATRIX, reason, layout)


def _layout(use: Use, shape: tuple[int, ...]) -> tuple[dict[str, Any] | None, str]:
    """The options that make a parameter matrices (None: cannot be told), and the reason."""
    module, attribute, owner = use.module, use.attribute, use.owner
    if isinstance(module, _CONV_TYPES) and attribute.startswith("weight"):
        # The groups of a convolution are maps of their own, as the heads of an attention are.
        groups = 1 if _is_depthwise(use, shape) else module.groups
        split: dict[str, Any] = {} if groups == 1 else {"num_heads": groups}
        if not module.transposed:
            return {"flatten": True, **split}, f"{owner}: rows are output channels"
        split = split and {**split, "split_dim": 1}
        others = (0, *range(2, len(shape)))
        return {"rows": (1,), "cols": others, **split}, f"{owner}: rows are output channels"
    if len(shape) > 2:
        return None, f"{len(shape)}D parameter of {owner}"
    if isinstance(module, nn.MultiheadAttention) and attribute == "in_proj_weight":
        return {"num_heads": 3}, f"{owner}: query, key and value are matrices of their own"
    if attribute.startswith(("weight_ih", "weight_hh")):
        gates = next((n for kind, n in _GATES if isinstance(module, kind)), 1)
        if gates > 1:
            return {"num_heads": gates}, f"{owner}: each of {gates} gates is a matrix of its own"
    if _has_type_named(module, "^conv1d$") and attribute == "weight":  # transformers' (in, out)
        return {"rows": (1,), "cols": (0,)}, "Conv1D: stored transposed"
    return {}, f"2D weight of {owner}"


def _has_known_layout(use: Use) -> bool:
    known = (nn.Linear, *_CONV_TYPES)
    return isinstance(use.module, known) and use.attribute.startswith("weight")


def _is_depthwise(use: Use, shape: tuple[int, ...]) -> bool:
    return isinstance(use.module, _CONV_TYPES) and use.module.groups > 1 and shape[1] == 1


def _has_type_named(module: nn.Module | None, pattern: str) -> bool:
    """Whether the module's class or a base of it has such a name, in lower case."""
    return any(re.search(pattern, kind.__name__.lower()) for kind in type(module).__mro__)


def _vocabulary_type(use: Use) -> str | None:
    is_embedding = _has_type_named(use.module, "embedding(bag)?$")
    if is_embedding and not _has_type_named(use.module, "patch"):
        return f"embedding ({use.owner})"
    return None


def _vocabulary_name(use: Use) -> str | None:
    """Whether whole words of the name say embedding or head.

    The name of the holding module counts (numbers skipped), the parameter's own, and for heads also
    those of enclosing modules outside numbered blocks: `head.0.weight` is a layer of the head,
    `blocks.0.heads.1.key.weight` is not.
    """
    parts = use.path.split(".")
    for name in (parts[-1], _owner_name(use)):
        words = _words(name)
        if words & EMBEDDING_WORDS and "patch" not in words:
            return f"embedding (named {name})"
    modules = parts[:-1]
    numbers = [i for i, part in enumerate(modules) if part.isdigit()]
    outside = modules[: numbers[0]] if numbers else modules
    for name in (parts[-1], _owner_name(use), *outside):
        words_in_order = re.findall("[a-z]+", name.lower())
        if words_in_order and words_in_order[-1] in HEAD_WORDS:
            return f"head (named {name})"
    if len(parts) == 2 and parts[0] in OUTPUT_NAMES:
        return f"head (named {parts[0]})"
    return None


def _owner_name(use: Use) -> str:
    named = [part for part in use.path.split(".")[:-1] if not part.isdigit()]
    return named[-1] if named else ""


def _words(*names: str) -> set[str]:
    """The words of snake_case names, digits dropped: "tok_emb2" -> {"tok", "emb"}."""
    return {word for name in names for word in re.findall("[a-z]+", name.lower())}


def _block(shape: tuple[int, ...], layout: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of one matrix under the layouts that `_layout` gives."""
    rows = math.prod(shape[d] for d in layout.get("rows", (0,)))
    cols = torch.Size(shape).numel() // rows if rows else 0
    blocks = layout.get("num_heads", 1)
    return (rows, cols // blocks) if layout.get("split_dim") == 1 else (rows // blocks, cols)
