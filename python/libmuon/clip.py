"""QK-clip, a projection of attention weights after a step of any optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from libmuon import checks


@torch.no_grad()
def qk_clip_(
    query: Tensor,
    key: Tensor,
    logits: Tensor,
    *,
    threshold: float = 100.0,
    num_key_heads: int | None = None,
    balance: float = 0.5,
    dim: int = 0,
) -> Tensor:
    """Shrinks the heads whose attention logits have grown beyond a threshold (MuonClip).

    A head with largest logit S > threshold has gamma = threshold / S, others 1: its query weights
    are multiplied by gamma^balance, its key weights by gamma^(1 - balance). Keys that several query
    heads share are left alone; the queries take all of gamma. From Kimi K2, arXiv 2507.20534.

    Args:
        query: weight (or bias) of the query projection, or a view of a fused one; changed in place.
        key: the same of the key projection.
        logits: the largest logit of each head [heads], or logits [..., heads, queries, keys] as
            the softmax takes them. A NaN or infinite maximum clips nothing. Over several ranks or
            micro-batches, take the maximum of the maxima first.
        threshold: the largest logit that is left alone, > 0.
        num_key_heads: of grouped-query attention; None is as many as there are query heads.
        balance: the queries' share of the shrinking, in [0, 1].
        dim: dim of the weights that holds heads x head size: 0 for ``nn.Linear``, 1 for the
            ``Conv1D`` of transformers.

    Returns:
        gamma, float32 [heads]; nothing is read on the host.

    Raises:
        ValueError: for heads that do not divide the weights, or values out of range; the weights
            are as they were.

    Example:
        >>> libmuon.qk_clip_(attention.q_proj.weight, attention.k_proj.weight, largest_logits)
    """
    threshold = checks.number(above=0.0)("threshold", threshold)
    balance = checks.number(high=1.0)("balance", balance)
    heads = checks.optional(checks.integer(1))("num_key_heads", num_key_heads)
    axis = checks.integer(-query.dim(), query.dim() - 1)("dim", dim) % max(query.dim(), 1)
    gamma: Tensor = torch.ops.muon.qk_clip_(
        query, key, logits, threshold, heads or 0, balance, axis
    )
    return gamma
