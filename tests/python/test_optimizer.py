"""libmuon.Muon as a torch optimizer: what surrounds a step, whose parameters come and go."""

from __future__ import annotations

import libmuon
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


def parameter(*shape, **kwargs):
    return nn.Parameter(torch.randn(*shape, **kwargs))


def with_grads(*params):
    for param in params:
        param.grad = torch.randn_like(param)
    return list(params)


def small_model():
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8), nn.Linear(8, 11)
    )


# What surrounds a step.


def test_hooks_run_around_the_step_and_the_profiler_knows_it():
    (param,) = with_grads(parameter(4, 3))
    optimizer = libmuon.Muon([param])
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(param.detach().clone()))
    optimizer.register_step_post_hook(lambda *_: seen.append(param.detach().clone()))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        optimizer.step()
        optimizer.zero_grad()
    before, after = seen
    assert not torch.equal(before, after)
    assert torch.equal(param, after)
    names = {event.key for event in trace.key_averages()}
    assert {"Optimizer.step#Muon.step", "Optimizer.zero_grad#Muon.zero_grad"} <= names
    assert param.grad is None


def test_h4_closure_error_leaves_everything_alone():
    (param,) = with_grads(parameter(4, 3))
    optimizer = libmuon.Muon([param])
    before = param.detach().clone()

    def closure():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert torch.equal(param, before)


def test_in_backward_stepping_equals_a_step_after_backward():
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    twin = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    twin.load_state_dict(model.state_dict())
    optimizers = {p: libmuon.Muon([p], lr=0.1) for p in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    optimizer = libmuon.Muon(twin.parameters(), lr=0.1)
    for _ in range(3):
        data = torch.randn(5, 4)
        model(data).square().sum().backward()
        twin(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other)


def test_f2_accumulated_gradients_count_as_one_step():
    model = nn.Linear(6, 4, bias=False)
    data = torch.randn(8, 6, dtype=torch.float64)
    results = []
    for batches in (1, 4):
        twin = nn.Linear(6, 4, bias=False).double()
        twin.load_state_dict(model.state_dict())
        optimizer = libmuon.Muon(twin.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for part in data.chunk(batches):
                twin(part).square().sum().backward()
            optimizer.step()
        results.append(twin.weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


# Parameters that come, go and change.


def test_state_of_a_replaced_parameter_is_dropped():
    old, kept = with_grads(parameter(4, 3), parameter(4, 3))
    optimizer = libmuon.Muon([old, kept])
    optimizer.step()
    new = nn.Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    new.grad = torch.randn_like(new)
    optimizer.step()
    assert set(optimizer.state) == {new, kept}
    optimizer.param_groups[0]["params"][0] = parameter(4, 3)
    assert set(optimizer.state_dict()["state"]) == {0, 1}


def test_frozen_parameter_joins_when_it_is_unfrozen():
    frozen, trained = with_grads(parameter(4, 3), parameter(4, 3))
    frozen.requires_grad_(False)
    frozen.grad = None
    optimizer = libmuon.Muon([frozen, trained])
    optimizer.step()
    assert set(optimizer.state) == {trained}
    with_grads(frozen.requires_grad_())
    before = frozen.detach().clone()
    optimizer.step()
    assert not torch.equal(frozen, before)
    assert set(optimizer.state) == {frozen, trained}


def test_e8_deleting_its_state_restarts_a_parameter():
    first, second = with_grads(parameter(4, 3), parameter(4, 3))
    optimizer = libmuon.Muon([first, second], momentum=0.5)
    optimizer.step()
    del optimizer.state[first]
    optimizer.step()
    assert torch.equal(optimizer.state[first]["momentum_buffer"], 0.5 * first.grad)
    assert not torch.equal(optimizer.state[second]["momentum_buffer"], 0.5 * second.grad)


def test_e6_a_parameter_that_changes_its_algorithm_keeps_no_state_of_the_former_one():
    moved, stays = with_grads(parameter(4, 3), parameter(4, 3))
    optimizer = libmuon.Muon([{"params": [moved]}, {"params": [stays]}])
    optimizer.step()
    optimizer.param_groups[0].update(algorithm="adamw", lr=0.01)
    optimizer.step()
    assert set(optimizer.state[moved]) == {"exp_avg", "exp_avg_sq", "step"}
    assert set(optimizer.state[stays]) == {"momentum_buffer"}
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[moved]["step"] == 1


def test_h1_one_object_trains_a_whole_model():
    model = small_model()
    optimizer = libmuon.Muon(model, lr=0.02)
    tokens = torch.arange(10)

    def loss():
        return nn.functional.cross_entropy(model(tokens), tokens)

    first = loss().item()
    for _ in range(80):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.2 * first
    assert {group["algorithm"] for group in optimizer.param_groups} == {"muon", "adamw"}
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_module_form_gives_one_learning_rate_to_both_halves():
    for group in libmuon.Muon(small_model(), lr=3e-4, weight_decay=0.3).param_groups:
        assert group["lr"] == 3e-4
        if group["algorithm"] == "muon":
            assert (group["adjust_lr_fn"], group["weight_decay"]) == ("match_rms_adamw", 0.3)
        else:
            assert group["weight_decay"] in (0.0, 0.01)


def test_module_form_gives_the_constructors_choice_to_the_matrices():
    optimizer = libmuon.Muon(small_model(), lr=3e-4, algorithm="normuon")
    assert {g["algorithm"] for g in optimizer.param_groups} == {"normuon", "adamw"}
    with pytest.raises(ValueError, match="needs its own lr"):
        libmuon.Muon(small_model(), lr=0.02, adjust_lr_fn="original")


def test_c6_a_model_without_matrices_warns():
    with pytest.warns(UserWarning, match="no parameter is on Muon"):
        libmuon.Muon(nn.Sequential(nn.Embedding(5, 8), nn.LayerNorm(8)))
