"""bfloat16 parameters: float32 trajectories by 16 more bits, and rounding without a bias."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import libmuon
import pytest
import torch
from torch import Tensor

WAYS: list[dict[str, Any]] = [{"stochastic_rounding": True}, {"master": "split"}]
ALGORITHMS = ("muon", "normuon", "adamw", "adam")


def make(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The float32 that a bfloat16 entry and its 16 bits are."""
    bits = high.detach().view(torch.int16).int() * 65536 + low.int()
    return bits.view(torch.float32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((40, 33), {}),
        ((4, 3, 5, 5), {"flatten": True}),
        ((9, 12), {"rows": 1, "cols": 0, "num_heads": 3}),
    ],
)
def test_a_split_parameter_takes_the_float32_trajectory(
    algorithm: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    options = {} if algorithm.startswith("adam") else options
    ours = make(*shape)
    if len(shape) == 4:
        ours = ours.detach().to(memory_format=torch.channels_last).requires_grad_()
    theirs = ours.detach().float().requires_grad_()
    # Small enough that a bfloat16 parameter alone would not move.
    common = {"algorithm": algorithm, "lr": 1e-4, "state_dtype": "float32", **options}
    opts = [libmuon.Muon([ours], master="split", **common), libmuon.Muon([theirs], **common)]
    for _ in range(20):
        gradient = torch.randn(shape).bfloat16()
        ours.grad, theirs.grad = gradient.clone(), gradient.float()
        for opt in opts:
            opt.step()
    exact = joined(ours, opts[0].state[ours]["param_remainder"])
    assert torch.equal(exact, theirs.detach())
    assert torch.equal(ours.detach(), theirs.detach().bfloat16())


def test_splitting_holds_at_the_ends_of_the_range() -> None:
    values = torch.tensor([[0.0, -0.0, 1e-40, -3e38, 3.4e38, math.inf, math.nan, 1.00390625]])
    p = values.bfloat16().requires_grad_()
    p.grad = torch.zeros_like(p)
    opt = libmuon.Muon([{"params": [p], "algorithm": "adamw", "lr": 0.0}], master="split")
    before = p.detach().clone()
    opt.step()
    assert torch.equal(p.detach().nan_to_num(), before.nan_to_num())
    assert torch.equal(p.detach().isnan(), before.isnan())


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_rounding_is_right_on_average(algorithm: str) -> None:
    # From 1, bfloat16 goes to 1 - 1/256 or 1 + 1/128: rounded to the nearest, nothing would move.
    p = torch.ones(256, 256).bfloat16().requires_grad_()
    q = torch.ones(256, 256).requires_grad_()
    lr = {"muon": 1e-3, "adamw": 1e-4}[algorithm]
    common = {"algorithm": algorithm, "lr": lr, "weight_decay": 0.0, "state_dtype": "float32"}
    opts = [libmuon.Muon([p], stochastic_rounding=True, **common), libmuon.Muon([q], **common)]
    gradient = torch.randn(256, 256).bfloat16()
    steps = 30
    for _ in range(steps):
        p.grad, q.grad = gradient.clone(), gradient.float()
        for opt in opts:
            opt.step()
    exact, rounded = q.detach() - 1, p.detach().float() - 1
    # The part of the exact way that was gone. Each rounding's variance is at most a quarter of the
    # gap's square.
    part = (exact * rounded).sum() / exact.square().sum()
    spread = math.sqrt(steps / 4) / 128 / exact.norm()
    assert spread < 0.1
    assert abs(part - 1) <= 5 * spread


def test_rounding_goes_to_a_neighbour_and_leaves_exact_values() -> None:
    p = make(64, 64)
    p.grad = torch.randn(64, 64).bfloat16()
    wide = p.detach().float().requires_grad_()
    wide.grad = p.grad.float()
    libmuon.Muon([p], stochastic_rounding=True, state_dtype="float32", lr=1e-3).step()
    libmuon.Muon([wide], lr=1e-3).step()
    exact = wide.detach()
    # Toward zero, and the next value away from it.
    below = (exact.view(torch.int32) & -65536).view(torch.float32)
    above = ((exact.view(torch.int32) & -65536) + 65536).view(torch.float32)
    rounded = p.detach().float()
    assert ((rounded == below) | (rounded == above)).all()
    assert (rounded == below).any()
    assert (rounded == above).any()
    still = make(8, 8)
    before, still.grad = still.detach().clone(), torch.zeros(8, 8).bfloat16()
    libmuon.Muon([still], stochastic_rounding=True, weight_decay=0.0).step()
    assert torch.equal(still.detach(), before)


def test_rounding_differs_from_step_to_step_and_between_parameters() -> None:
    a = torch.ones(64, 64).bfloat16().requires_grad_()
    b = torch.ones(64, 64).bfloat16().requires_grad_()
    options = {"algorithm": "adamw", "lr": 1e-3, "weight_decay": 1.0}
    opt = libmuon.Muon([a, b], stochastic_rounding=True, **options)
    patterns = []
    for _ in range(2):
        for p in (a, b):
            p.data.fill_(1.0)
            p.grad = torch.zeros_like(p)
        opt.step()
        patterns += [a.detach().clone(), b.detach().clone()]
    for i, one in enumerate(patterns):
        assert 0 < (one != 1).float().mean() < 0.5
        assert not any(torch.equal(one, other) for other in patterns[i + 1 :])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("state_dtype", [None, "int8", "int4"])
def test_e3_resume_is_bitwise(way: dict[str, Any], algorithm: str, state_dtype: str | None) -> None:
    straight = [make(30, 40), make(7, 150)]
    resumed = [p.detach().clone().requires_grad_() for p in straight]
    gradients = [[torch.randn(p.shape).bfloat16() for p in straight] for _ in range(6)]
    options = {"algorithm": algorithm, "lr": 1e-3, "state_dtype": state_dtype, **way}

    def train(opt: libmuon.Muon, params: list[Tensor], steps: list[list[Tensor]]) -> None:
        for step in steps:
            for p, gradient in zip(params, step, strict=True):
                p.grad = gradient.clone()
            opt.step()

    train(libmuon.Muon(straight, **options), straight, gradients)
    first = libmuon.Muon(resumed, **options)
    train(first, resumed, gradients[:3])
    second = libmuon.Muon(resumed, **options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, resumed, gradients[3:])
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", WAYS)
def test_batches_do_not_change_the_rounding(way: dict[str, Any]) -> None:
    results = []
    for batch_size in (None, 1, 2):
        torch.manual_seed(2)
        p = make(5, 20, 30)
        p.grad = torch.randn(5, 20, 30).bfloat16()
        libmuon.Muon([p], batch_dims=1, batch_size=batch_size, **way).step()
        results.append(p)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_large_parameters_are_cut_without_a_trace() -> None:
    # More than a slice of 2^20 values.
    p = make(1100, 1000)
    pieces = [q.clone().requires_grad_() for q in p.detach().split(300)]
    options = {"algorithm": "adamw", "lr": 1e-4, "master": "split"}
    p.grad = torch.randn(1100, 1000).bfloat16()
    for q, gradient in zip(pieces, p.grad.split(300), strict=True):
        q.grad = gradient.clone()
    libmuon.Muon([p], **options).step()
    libmuon.Muon(pieces, **options).step()
    assert torch.equal(p.detach(), torch.cat([q.detach() for q in pieces]))


@pytest.mark.parametrize("way", WAYS)
def test_other_dtypes_are_as_without(way: dict[str, Any]) -> None:
    ours, theirs = (torch.ones(6, 4).requires_grad_() for _ in range(2))
    gradient = torch.randn(6, 4)
    ours.grad, theirs.grad = gradient.clone(), gradient.clone()
    opt = libmuon.Muon([ours], **way)
    opt.step()
    libmuon.Muon([theirs]).step()
    assert torch.equal(ours, theirs)
    assert opt.state[ours].keys() == {"momentum_buffer"}


@pytest.mark.parametrize("way", WAYS)
def test_an_algorithm_of_ones_own_steps_in_float32(way: dict[str, Any]) -> None:
    dtypes = []

    class Small(libmuon.Algorithm):
        name = f"small-{'-'.join(way)}"

        def apply(self, params, matrices, groups, factors):  # type: ignore[no-untyped-def]
            for p in params:
                dtypes.append(p.dtype)
                p.mul_(1 - 2**-12)

    libmuon.register_algorithm(Small)
    p = torch.ones(64, 64).bfloat16().requires_grad_()
    opt = libmuon.Muon([p], algorithm=Small.name, **way)
    for _ in range(8):
        p.grad = torch.ones_like(p)
        opt.step()
    assert set(dtypes) == {torch.float32}
    mean = p.detach().float().mean()
    if "master" in way:
        exact = joined(p, opt.state[p]["param_remainder"])
        expected = torch.ones(())
        for _ in range(8):
            expected = expected * (1 - 2**-12)
        assert (exact == expected).all()
    else:
        assert abs(mean - (1 - 2**-12) ** 8) < 5 * math.sqrt(8 / 4) / 256 / 64


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_round_well_need_no_warning(way: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        libmuon.Muon([make(4, 4)], **way)
    with pytest.warns(UserWarning, match="master='split' keeps 16 more bits"):
        libmuon.Muon([make(4, 4)])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="two ways to the same end; choose one"):
        libmuon.Muon([make(4, 4)], stochastic_rounding=True, master="split")
    with pytest.raises(
        NotImplementedError, match="but the dtype of parameter 0.* is: torch.float16"
    ):
        libmuon.Muon([torch.ones(4, 4).half().requires_grad_()], master="split")
    with pytest.raises(ValueError, match="master should be one of 'split' but is: 'full'"):
        libmuon.Muon([make(4, 4)], master="full")
    with pytest.raises(TypeError, match="stochastic_rounding should be True or False"):
        libmuon.Muon([make(4, 4)], stochastic_rounding=1)
