"""libmuon.Muon against torch.optim.Muon: results, errors, signature."""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path

import libmuon
import pytest
import torch
from torch.testing._internal.common_optimizers import (
    optim_error_inputs_func_muon,
    optim_inputs_func_muon,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "torch_muon.json").read_text())
SHAPES = [(5, 3), (3, 7), (4, 4), (1, 6), (6, 1), (33, 65)]
STEPS = 5

OPTION_SETS = [
    pytest.param(given.kwargs, id=given.desc.replace(" ", "_"))
    for given in optim_inputs_func_muon("cpu", torch.float64)
]


def torch_iteration_in_float64(grad, ns_coefficients, ns_steps, eps):
    """torch's iteration as it stands, but for the cast to bfloat16."""
    a, b, c = ns_coefficients
    x = grad.double()
    if grad.size(0) > grad.size(1):
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def run(cls, start, grads, options):
    """Parameters and momentum after each of the gradients."""
    params = [torch.nn.Parameter(p.clone()) for p in start]
    optimizer = cls(params, **options)
    history = []
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in params]
        history.append(([p.detach().clone() for p in params], momenta))
    return history


@pytest.mark.parametrize("options", OPTION_SETS)
def test_a16_float64_trajectory_equals_torch_with_a_float64_iteration(options, monkeypatch):
    monkeypatch.setattr(
        torch.optim._muon, "_zeropower_via_newtonschulz", torch_iteration_in_float64
    )
    start = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    grads = [[torch.randn_like(p) for p in start] for _ in range(STEPS)]
    ours = run(libmuon.Muon, start, grads, options)
    theirs = run(torch.optim.Muon, start, grads, in_float64(options))
    for step in range(STEPS):
        for part in range(2):
            for mine, other in zip(ours[step][part], theirs[step][part], strict=True):
                bound = 1e-12 * max(1.0, other.abs().max().item())
                torch.testing.assert_close(mine, other, rtol=0, atol=bound)


def in_float64(options):
    """The same values; torch rounds 1 - lr * weight_decay to a tensor lr's own dtype."""
    return {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def golden_tensor(entry):
    return torch.tensor(entry["data"]).view(entry["shape"])


@pytest.mark.parametrize("options", OPTION_SETS)
def test_trajectory_stays_within_bfloat16_bounds_of_torch(options):
    case = GOLDEN[0]
    names = list(case["inputs"]["params"])
    start = [golden_tensor(case["inputs"]["params"][name]) for name in names]
    given = [[golden_tensor(step[name]) for name in names] for step in case["inputs"]["grads"]]
    grads = [given[step % len(given)] for step in range(STEPS)]
    ours = run(libmuon.Muon, start, grads, options)
    theirs = run(torch.optim.Muon, start, grads, options)
    # An update differs by torch's bfloat16 error at most; `lr` and shape factor scale it.
    bound = max(c["tolerance"]["bf16"]["update"] for c in GOLDEN)
    probe = libmuon.Muon([torch.nn.Parameter(p) for p in start], **options)
    for step in range(STEPS):
        for index, param in enumerate(probe.param_groups[0]["params"]):
            (lr,) = probe.effective_lr(param)
            torch.testing.assert_close(
                ours[step][0][index], theirs[step][0][index], rtol=0, atol=(step + 1) * lr * bound
            )


def test_a15_linear_10x10_equals_torch_with_a_float64_iteration(monkeypatch):
    monkeypatch.setattr(
        torch.optim._muon, "_zeropower_via_newtonschulz", torch_iteration_in_float64
    )
    weight = torch.nn.Linear(10, 10).weight.detach().double()
    options = {"lr": 1e-3, "weight_decay": 0.1}
    grad = torch.randn_like(weight)
    ((ours,), _) = run(libmuon.Muon, [weight], [[grad]], options)[0]
    ((theirs,), _) = run(torch.optim.Muon, [weight], [[grad]], options)[0]
    assert (theirs - weight).abs().max() > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_results_are_float32_accurate_where_torch_iterates_in_bfloat16(monkeypatch):
    start = [torch.randn(24, 16)]
    grads = [[torch.randn(24, 16)] for _ in range(STEPS)]
    ours = run(libmuon.Muon, start, grads, {"lr": 0.1})[-1][0][0]
    monkeypatch.setattr(
        torch.optim._muon, "_zeropower_via_newtonschulz", torch_iteration_in_float64
    )
    exact = run(
        torch.optim.Muon, [start[0].double()], [[g[0].double()] for g in grads], {"lr": 0.1}
    )
    torch.testing.assert_close(ours.double(), exact[-1][0][0], rtol=0, atol=1e-5)


ERROR_INPUTS = [
    pytest.param(given.optimizer_error_input, id=given.optimizer_error_input.desc.replace(" ", "_"))
    for given in optim_error_inputs_func_muon("cpu", torch.float32)
    if "complex" not in given.optimizer_error_input.desc
]


def error_of(cls, given):
    params = given.params
    if params is None:
        params = [torch.nn.Parameter(torch.randn(2, 3))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            cls(params, **given.kwargs)
        except (Exception, Warning) as error:
            return type(error), str(error)
    pytest.fail(f"{cls.__module__}.Muon accepts: {given.desc}")


@pytest.mark.parametrize("given", ERROR_INPUTS)
def test_error_has_torchs_type_and_begins_with_its_text(given):
    kind, text = error_of(torch.optim.Muon, given)
    our_kind, our_text = error_of(libmuon.Muon, given)
    assert our_kind is kind
    assert our_text.startswith(text)


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"momentum": -0.5}, {"weight_decay": -0.1}, {"lr": float("nan")}]
)
def test_range_errors_begin_with_torchs_text(options):
    given = [torch.nn.Parameter(torch.randn(2, 3))]
    with pytest.raises(ValueError) as theirs:
        torch.optim.Muon(given, **options)
    with pytest.raises(ValueError) as ours:
        libmuon.Muon(given, **options)
    assert str(ours.value).startswith(str(theirs.value))


def test_sparse_gradient_begins_with_torchs_text():
    def text(cls):
        param = torch.nn.Parameter(torch.randn(4, 3))
        param.grad = torch.eye(4, 3).to_sparse()
        with pytest.raises(RuntimeError) as error:
            cls([("table", param)]).step()
        return str(error.value)

    theirs, ours = text(torch.optim.Muon), text(libmuon.Muon)
    assert ours.startswith(theirs)
    assert "table" in ours


def test_d16_signature_and_defaults_are_torchs():
    theirs = inspect.signature(torch.optim.Muon.__init__).parameters
    ours = inspect.signature(libmuon.Muon.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind
        if name != "ns_steps":  # None: a schedule's own length, torch's 5 for a triple
            assert ours[name].default == parameter.default
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def test_groups_have_torchs_keys_and_values():
    param = torch.nn.Parameter(torch.randn(4, 3))
    (theirs,) = torch.optim.Muon([param]).param_groups
    (ours,) = libmuon.Muon([param]).param_groups
    assert {key: ours[key] for key in theirs} == theirs


def test_state_dict_loads_into_torch_and_back_and_training_goes_on_alike(monkeypatch):
    monkeypatch.setattr(
        torch.optim._muon, "_zeropower_via_newtonschulz", torch_iteration_in_float64
    )
    start = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    grads = [[torch.randn_like(p) for p in start] for _ in range(6)]

    def train(optimizer, params, steps):
        for step in steps:
            for param, grad in zip(params, grads[step], strict=True):
                param.grad = grad.clone()
            optimizer.step()

    expected = run(torch.optim.Muon, start, grads, {"lr": 0.02, "momentum": 0.9})[-1][0]
    params = [torch.nn.Parameter(p.clone()) for p in start]
    optimizer = torch.optim.Muon(params, lr=0.02, momentum=0.9)
    train(optimizer, params, (0, 1))
    for cls, steps in ((libmuon.Muon, (2, 3)), (torch.optim.Muon, (4, 5))):
        saved = optimizer.state_dict()
        optimizer = cls(params)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.02
        train(optimizer, params, steps)
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("algorithm", "cls"), [("adam", "Adam"), ("adamw", "AdamW")])
def test_d7_adam_groups_equal_torchs_adam(algorithm, cls, weight_decay, amsgrad):
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": amsgrad}
    options["weight_decay"] = weight_decay
    start = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (7,), ())]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizer = libmuon.Muon([{"params": ours, "algorithm": algorithm, **options}])
    other = getattr(torch.optim, cls)(theirs, **options)
    for _ in range(STEPS):
        for mine, theirs_too in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            theirs_too.grad = mine.grad.clone()
        optimizer.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for mine, theirs_too in zip(ours, theirs, strict=True):
        for key, value in other.state[theirs_too].items():
            torch.testing.assert_close(optimizer.state[mine][key], value, rtol=0, atol=1e-12)
