"""What muonium's optimizer and algorithms orthogonalise with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import libmuon
from libmuon import checks

OrthogonalizationStrategy = Literal["newton_schulz", "polar_express"]

_STRATEGIES: dict[str, str] = {"newton_schulz": "muon", "polar_express": "polar_express"}
_strategy = checks.choice(*_STRATEGIES)


def schedule(name: str, value: Any) -> str:
    """libmuon's schedule for one of muonium's strategies."""
    return _STRATEGIES[_strategy(name, value)]


def zeropower(
    G: Tensor,  # noqa: N803 (muonium's name)
    steps: int = 5,
    eps: float = 1e-7,
    use_triton: bool = True,
    strategy: OrthogonalizationStrategy = "newton_schulz",
    *,
    compute_dtype: str | torch.dtype = "auto",
) -> Tensor:
    """Orthogonalises the matrices in the last two dims of ``G``.

    Args:
        G: [..., rows, cols]; returned unchanged if it holds no matrix.
        steps: iterations; 0 gives the normalised input.
        eps: added to the norm.
        use_triton: accepted; the device decides.
        strategy: "newton_schulz" or "polar_express".
        compute_dtype: dtype whose error bound the result meets; muonium computes in bfloat16.

    Returns:
        A tensor of the shape and dtype of ``G``.
    """
    checks.flag("use_triton", use_triton)
    if G.dim() < 2:
        raise ValueError(f"expected matrices, got shape {tuple(G.shape)}")
    if G.numel() == 0:
        return G
    return libmuon.orthogonalize(
        G,
        schedule("strategy", strategy),
        steps,
        eps,
        normalization="add",
        compute_dtype=compute_dtype,
        rows=-2,
        cols=-1,
    )


def foreach_zeropower(
    Gs: Sequence[Tensor],  # noqa: N803
    steps: int = 5,
    eps: float = 1e-7,
    use_triton: bool = True,
    strategy: OrthogonalizationStrategy = "newton_schulz",
    *,
    compute_dtype: str | torch.dtype = "auto",
) -> list[Tensor]:
    """`zeropower` of each tensor, equal shapes in one call; in the order of ``Gs``."""
    by_kind: dict[Any, list[int]] = {}
    for i, tensor in enumerate(Gs):
        by_kind.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(i)
    results: list[Tensor] = list(Gs)
    for members in by_kind.values():
        batch = torch.stack([Gs[i] for i in members])
        done = zeropower(batch, steps, eps, use_triton, strategy, compute_dtype=compute_dtype)
        for i, result in zip(members, done.unbind(), strict=True):
            results[i] = result
    return results


def split_lr_scales(split_sizes: Sequence[int], rows: int, cols: int) -> list[float]:
    """What turns a whole matrix's shape factor into that of each of its row blocks."""

    def factor(n: int) -> float:
        return math.sqrt(max(1.0, n / cols))

    return [factor(size) / factor(rows) for size in split_sizes]


def orthogonalize_single(
    g: Tensor,
    *,
    ns_steps: int,
    strategy: OrthogonalizationStrategy,
    split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """What an algorithm's ``update`` calls: `zeropower`, or block by block and scaled."""
    if split_sizes is None:
        return zeropower(g, ns_steps, strategy=strategy)
    blocks = [zeropower(b, ns_steps, strategy=strategy) for b in torch.split(g, list(split_sizes))]
    scales = split_lr_scales(split_sizes, g.size(0), g.size(1))
    return torch.cat([block * scale for block, scale in zip(blocks, scales, strict=True)])


def orthogonalize_batch(
    gs: Sequence[Tensor],
    *,
    ns_steps: int,
    strategy: OrthogonalizationStrategy,
    split_sizes: Sequence[int] | None = None,
) -> list[Tensor]:
    """What an algorithm's ``foreach_update`` calls: `orthogonalize_single` of all, in batches."""
    if split_sizes is None:
        return foreach_zeropower(gs, ns_steps, strategy=strategy)
    return [
        orthogonalize_single(g, ns_steps=ns_steps, strategy=strategy, split_sizes=split_sizes)
        for g in gs
    ]


def gram(x: Tensor) -> Tensor:
    """``x @ x.mT`` of matrices [..., rows, cols], exactly symmetric."""
    return torch.ops.muon.gram(x)  # type: ignore[no-any-return]


def gram_(x: Tensor, out: Tensor) -> Tensor:
    """`gram` into ``out`` [..., rows, rows], which is returned."""
    expected = (*x.shape[:-1], x.size(-2))
    if tuple(out.shape) != expected or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"expected out of shape {expected} and {x.dtype} on {x.device}, got "
            f"{tuple(out.shape)} and {out.dtype} on {out.device}"
        )
    return out.copy_(gram(x))
