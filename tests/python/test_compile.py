"""torch.compile over a step and over the functional core."""

from __future__ import annotations

import libmuon
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Backend:
    """Runs graphs as they are and counts how many there were."""

    def __init__(self):
        self.compilations = 0

    def __call__(self, graph, inputs):
        self.compilations += 1
        return graph.forward


def problem():
    matrix, gain = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3))
    groups = [{"params": [matrix]}, {"params": [gain], "algorithm": "adamw", "lr": 0.01}]
    return (matrix, gain), libmuon.Muon(groups, lr=0.1)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_g7_ten_learning_rates_compile_at_most_twice_and_change_no_bit(tensor_lr):
    params, optimizer = problem()
    twins, other = problem()
    backend = Backend()
    step = torch.compile(optimizer.step, backend=backend)
    if tensor_lr:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    for param, twin in zip(params, twins, strict=True):
        twin.data.copy_(param.data)
    for index in range(10):
        lr = 0.1 / (index + 1)
        if tensor_lr:
            optimizer.param_groups[0]["lr"].fill_(lr)
        else:
            optimizer.param_groups[0]["lr"] = lr
        other.param_groups[0]["lr"] = lr
        for param, twin in zip(params, twins, strict=True):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.clone()
        step()
        other.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
    assert backend.compilations <= 2
    assert counters["stats"]["unique_graphs"] <= 2
    frames = counters["frames"]
    assert frames["total"] <= 8, "the step's frames are compiled again for each learning rate"


def test_compiled_training_loop_equals_the_eager_one():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    twin = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    twin.load_state_dict(model.state_dict())

    def training(model):
        optimizer = libmuon.Muon(model, lr=0.01)

        def step(data):
            loss = model(data).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    eager, compiled = training(model), torch.compile(training(twin), backend="eager")
    for _ in range(3):
        data = torch.randn(5, 6)
        eager(data)
        compiled(data)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


def test_orthogonalize_compiles_without_a_graph_break():
    compiled = torch.compile(
        lambda x: libmuon.orthogonalize(2 * x) + 1, fullgraph=True, backend="aot_eager"
    )
    x = torch.randn(4, 6)
    torch.testing.assert_close(compiled(x), libmuon.orthogonalize(2 * x) + 1)


def test_step_compiles_without_a_graph_break():
    def step(param, grad, momentum):
        libmuon.step_([param], [2 * grad], [momentum], lr=0.1)
        return param + 1

    tensors = [torch.randn(4, 6) for _ in range(2)] + [torch.zeros(4, 6)]
    twins = [t.clone() for t in tensors]
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(result, step(*twins))
    torch.testing.assert_close(tensors, twins)
