"""QK-clip: which heads shrink, by how much, in which weights, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import libmuon
import pytest
import torch
from torch import Tensor

HEADS, SIZE, WIDTH = 4, 3, 10


def weights(heads: int = HEADS, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(heads * SIZE, WIDTH, dtype=dtype)


def logits_of(query: Tensor, key: Tensor, x: Tensor) -> Tensor:
    q = (x @ query.mT).unflatten(-1, (-1, SIZE)).transpose(0, 1)
    k = (x @ key.mT).unflatten(-1, (-1, SIZE)).transpose(0, 1)
    k = k.repeat_interleave(q.size(0) // k.size(0), 0)
    return q @ k.mT / math.sqrt(SIZE)


def test_h9_heads_above_the_threshold_shrink_by_the_root_in_both_projections() -> None:
    query, key = weights(), weights()
    before = query.clone(), key.clone()
    gamma = libmuon.qk_clip_(query, key, torch.tensor([50.0, 400.0, 100.0, 200.0]))
    assert gamma.tolist() == pytest.approx([1, 0.25, 1, 0.5])
    factors = torch.tensor([1, 0.5, 1, 0.5**0.5], dtype=torch.float64).repeat_interleave(SIZE)
    for now, old in zip((query, key), before, strict=True):
        torch.testing.assert_close(now, old * factors[:, None], rtol=1e-7, atol=0)
        assert torch.equal(now[:SIZE], old[:SIZE])


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_h9_the_largest_logit_becomes_the_threshold(key_heads: int, balance: float) -> None:
    query, key, x = weights() * 30, weights(key_heads), torch.randn(7, WIDTH, dtype=torch.float64)
    before = logits_of(query, key, x)
    old_key = key.clone()
    libmuon.qk_clip_(query, key, before, threshold=20.0, num_key_heads=key_heads, balance=balance)
    largest = logits_of(query, key, x).amax((1, 2))
    expected = before.amax((1, 2)).clamp(max=20.0)
    torch.testing.assert_close(largest, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(key, old_key) == (key_heads != HEADS or balance == 1.0)


def test_h9_logits_of_a_batch_are_as_good_as_their_maxima() -> None:
    logits = torch.randn(2, HEADS, 5, 5) * 100
    logits.masked_fill_(torch.ones(5, 5).triu(1).bool(), -math.inf)
    maxima = logits.amax((0, 2, 3))
    results = []
    for given in (logits, maxima):
        torch.manual_seed(1)
        query, key = weights(), weights()
        libmuon.qk_clip_(query, key, given)
        results.append((query, key))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("largest", [float("nan"), math.inf, -math.inf, 0.0, -500.0])
def test_h9_maxima_that_say_nothing_change_nothing(largest: float) -> None:
    query, key = weights(), weights()
    before = query.clone(), key.clone()
    gamma = libmuon.qk_clip_(query, key, torch.full((HEADS,), largest))
    assert gamma.tolist() == [1.0] * HEADS
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def test_h9_views_of_a_fused_weight_transposed_weights_and_biases() -> None:
    fused = torch.randn(WIDTH, 3 * HEADS * SIZE)  # Conv1D: outputs along dim 1
    before = fused.clone()
    query, key, value = fused.chunk(3, 1)
    largest = torch.full((HEADS,), 400.0)
    libmuon.qk_clip_(query, key, largest, dim=-1)
    torch.testing.assert_close(fused[:, : 2 * HEADS * SIZE], before[:, : 2 * HEADS * SIZE] / 2)
    assert torch.equal(value, before.chunk(3, 1)[2])
    bias = torch.ones(HEADS * SIZE)
    libmuon.qk_clip_(bias, torch.ones(HEADS * SIZE), largest)
    assert torch.equal(bias, torch.full_like(bias, 0.5))


def test_h9_parameters_after_a_step_and_bfloat16() -> None:
    linear = torch.nn.Linear(WIDTH, HEADS * SIZE, bias=False, dtype=torch.bfloat16)
    other = torch.nn.Linear(WIDTH, HEADS * SIZE, bias=False, dtype=torch.bfloat16)
    before = linear.weight.detach().clone()
    libmuon.qk_clip_(linear.weight, other.weight, torch.full((HEADS,), 400.0, dtype=torch.bfloat16))
    assert torch.equal(linear.weight.detach(), before / 2)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"threshold": 0.0}, ValueError, "threshold should be > 0 but is: 0.0"),
        ({"threshold": "high"}, TypeError, "threshold should be a number"),
        ({"balance": 1.5}, ValueError, "balance should be <= 1 but is: 1.5"),
        ({"num_key_heads": 3}, ValueError, "num_key_heads to divide the 4 query heads, got 3"),
        ({"num_key_heads": 0}, ValueError, "num_key_heads should be >= 1 but is: 0"),
        ({"dim": 2}, ValueError, r"dim should be in \[-2, 1\] but is: 2"),
        ({"dim": 1}, ValueError, "the 10 entries of dim 1 of query to divide into 4 heads"),
        ({"logits": torch.ones(4, 4)}, ValueError, r"\[heads\] or \[..., heads, queries, keys\]"),
        ({"logits": torch.ones(4, 0, 3)}, ValueError, "at least one logit a head"),
        ({"logits": torch.ones(5)}, ValueError, "to divide into 5 heads"),
        ({"logits": torch.ones(4).long()}, ValueError, "got Long"),
        ({"logits": torch.ones(4, device="meta")}, ValueError, "with data, or none with"),
        ({"threshold": 1e-320}, ValueError, "expected threshold > 0, got"),
        ({"threshold": 1e308}, ValueError, r"got 1e\+308; logits are float32"),
    ],
)
def test_wrong_arguments_leave_the_weights_alone(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    query, key = weights(), weights()
    before = query.clone(), key.clone()
    arguments = {"logits": torch.full((HEADS,), 400.0)} | changes
    with pytest.raises(error, match=text):
        libmuon.qk_clip_(query, key, arguments.pop("logits"), **arguments)
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def test_a_key_that_cannot_be_written_leaves_the_query_alone() -> None:
    query = weights()
    before, largest = query.clone(), torch.full((HEADS,), 400.0)
    with torch.inference_mode():
        inference = weights()
    for key, text in (
        (torch.ones(1, WIDTH).expand(HEADS * SIZE, WIDTH), "memory of their own, got strides"),
        (inference, "got an inference tensor"),
        (query[: HEADS * SIZE], "but they overlap"),
    ):
        with pytest.raises(ValueError, match=text):
            libmuon.qk_clip_(query, key, largest)
        assert torch.equal(query, before)
