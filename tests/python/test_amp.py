"""Loss scaling: both of GradScaler's protocols, and steps that it skips."""

from __future__ import annotations

import libmuon
import pytest
import torch
from torch import nn

ALGORITHMS = ["muon", "normuon", "adamw", "adam"]


def problem(algorithm):
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = libmuon.Muon(
        [{"params": [("w", param)], "algorithm": algorithm, "lr": 0.1, "weight_decay": 0.1}]
    )
    return param, optimizer


def snapshot(param, optimizer):
    state = {key: value.clone() for key, value in optimizer.state[param].items()}
    return {"param": param.detach().clone(), **state}


def assert_equal_bits(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def trained(algorithm):
    """An optimizer with state that is not zero."""
    param, optimizer = problem(algorithm)
    param.grad = torch.randn_like(param)
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_found_inf_leaves_no_trace_even_of_finite_gradients(algorithm):
    param, optimizer = trained(algorithm)
    before = snapshot(param, optimizer)
    param.grad = torch.randn_like(param)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert_equal_bits(snapshot(param, optimizer), before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scaled_step_equals_the_unscaled_one_bit_for_bit(algorithm):
    param, optimizer = trained(algorithm)
    saved, start = optimizer.state_dict(), param.detach().clone()
    twin = nn.Parameter(start.clone())
    other = libmuon.Muon([{"params": [("w", twin)], "algorithm": algorithm, "lr": 0.1}])
    other.load_state_dict(saved)
    grad = torch.randn_like(param)
    param.grad, twin.grad = 4.0 * grad, grad
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.step()
    other.step()
    assert_equal_bits(snapshot(param, optimizer), snapshot(twin, other))
    assert torch.equal(param.grad, 4.0 * grad)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_grad_scaler_on_the_cpu(algorithm, unscale_first):
    param, optimizer = problem(algorithm)
    twin = nn.Parameter(param.detach().clone())
    other = libmuon.Muon(
        [{"params": [("w", twin)], "algorithm": algorithm, "lr": 0.1, "weight_decay": 0.1}]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step in range(4):
        data = torch.randn(5, 6)
        overflows = step == 2
        optimizer.zero_grad()
        scaler.scale((data @ param).square().sum()).backward()
        if overflows:
            param.grad[0, 0] = float("inf")
        before = snapshot(param, optimizer)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert_equal_bits(snapshot(param, optimizer), before)
            continue
        other.zero_grad()
        (data @ twin).square().sum().backward()
        other.step()
    assert scaler.get_scale() == 2.0
    assert not hasattr(optimizer, "found_inf")
    assert_equal_bits(snapshot(param, optimizer), snapshot(twin, other))


def test_scaler_sees_that_the_optimizer_takes_scaled_gradients():
    assert libmuon.Muon._step_supports_amp_scaling
    param, optimizer = problem("muon")
    param.grad = torch.ones_like(param)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(1))
    scaler.step(optimizer)
    assert torch.equal(param.grad, torch.ones_like(param))  # not unscaled by the scaler


def test_skipped_step_counts_nothing():
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = libmuon.Muon([param], nonfinite="skip")
    param.grad = torch.full_like(param, float("inf"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.skipped == {}
