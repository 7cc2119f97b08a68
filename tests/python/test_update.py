"""How much libmuon.Muon moves a parameter: factors, schedules, dtypes, odd values, momentum."""

from __future__ import annotations

import math

import libmuon
import pytest
import torch
from torch import nn

# Largest error of an entry of an orthogonalised matrix in float32, whatever the form.
FLOAT32_ITERATION = 7e-4


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


def adamw(params, **options):
    return {"params": params, "algorithm": "adamw", "lr": 1e-2, **options}


# How large an update is.


@pytest.mark.parametrize(
    ("shape", "mode", "factor"),
    [
        ((256, 1, 3, 3), "original", math.sqrt(256 / 9)),
        ((256, 1, 3, 3), "match_rms_adamw", 0.2 * math.sqrt(256)),
        ((64, 16), None, 2.0),
        ((16, 64), "original", 1.0),
        ((64, 16), "match_rms_adamw", 1.6),
        ((16, 64), "match_rms_adamw", 1.6),
        ((64, 16), "spectral_unclamped", 2.0),
        ((16, 64), "spectral_unclamped", 0.5),
        ((64, 16), "unscaled", 1.0),
    ],
)
def test_b6_d1_d3_d18_effective_lr_is_lr_times_the_shape_factor(shape, mode, factor):
    param = parameter(*shape)
    flatten = len(shape) > 2
    optimizer = libmuon.Muon(
        [param], lr=0.5, adjust_lr_fn=mode, flatten=flatten, lr_multiplier=0.25
    )
    assert optimizer.effective_lr(param) == [pytest.approx(0.125 * factor, rel=1e-15)]
    # And it is what a step applies: u = (old - new) / effective lr has singular values near 1.
    before = param.detach().clone()
    param.grad = torch.randn_like(param)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    update = (before - param.detach()).flatten(1) / (0.125 * factor)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_effective_lr_knows_blocks_adam_and_strangers():
    fused, bias = parameter(12, 4), parameter(3)
    groups = [{"params": [fused], "split_sizes": (8, 4), "lr": 1.0}, adamw([bias], lr=0.5)]
    optimizer = libmuon.Muon(groups)
    assert optimizer.effective_lr(fused) == [pytest.approx(math.sqrt(2)), 1.0]
    assert optimizer.effective_lr(bias) == [0.5]
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        optimizer.effective_lr(parameter(2, 2))


def test_d15_clipping_changes_the_adam_half_alone():
    muon, gain = parameter(6, 4), parameter(5)
    optimizer = libmuon.Muon([{"params": [muon], "lr": 0.1, "eps": 0.0}, adamw([gain], eps=1.0)])
    start = [muon.detach().clone(), gain.detach().clone()]
    grads = [torch.randn_like(muon), torch.randn_like(gain)]
    results = []
    for scale in (1.0, 0.125):
        for param, old, grad in zip((muon, gain), start, grads, strict=True):
            param.data.copy_(old)
            param.grad = scale * grad
        optimizer.state.clear()
        optimizer.step()
        results.append((muon.detach().clone(), gain.detach().clone()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(results[0][1], results[1][1])


# Schedules.


def test_d8_d9_d10_schedules_scale_each_group_from_its_own_lr():
    muon, gain = with_grads(parameter(4, 3), parameter(3))
    optimizer = libmuon.Muon([{"params": [muon], "lr": 0.2}, adamw([gain], lr=0.01)])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(4):
        assert [g["lr"] for g in optimizer.param_groups] == [0.2 * 0.5**step, 0.01 * 0.5**step]
        before = gain.detach().clone()
        optimizer.step()
        schedule.step()
        assert not torch.equal(gain, before)


def test_d11_ratio_between_the_halves_survives_schedule_and_reload():
    def build(model):
        optimizer = libmuon.Muon(libmuon.group_parameters(model), lr=0.1)
        optimizer.param_groups[-1]["lr"] = 0.02
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model = small_model()
    optimizer, schedule = build(model)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    resumed, resumed_schedule = build(model)
    resumed.load_state_dict(optimizer.state_dict())
    resumed_schedule.load_state_dict(schedule.state_dict())
    for _ in range(2):
        resumed.step()
        resumed_schedule.step()
    lrs = [group["lr"] for group in resumed.param_groups]
    assert lrs == pytest.approx([0.1 / 6] * (len(lrs) - 1) + [0.02 / 6])


def test_d19_onecycle_moves_momentum():
    (param,) = with_grads(parameter(4, 3))
    groups = [{"params": [param]}, adamw(with_grads(parameter(3)))]
    optimizer = libmuon.Muon(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.1, 0.01], total_steps=10, base_momentum=0.5, max_momentum=0.9
    )
    seen = []
    for _ in range(9):
        optimizer.step()
        seen.append(optimizer.param_groups[0]["momentum"])
        schedule.step()
    assert seen[0] == 0.9
    assert min(seen) == pytest.approx(0.5, abs=0.05)
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)


def test_moved_momentum_is_the_one_that_is_used():
    (param,) = with_grads(parameter(4, 3))
    optimizer = libmuon.Muon([param], momentum=0.5)
    optimizer.param_groups[0]["momentum"] = 0.75
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], 0.25 * param.grad)


# Dtypes.


@pytest.mark.filterwarnings("ignore:bfloat16 parameters")
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a2_a3_a4_every_mix_of_dtypes_steps(dtype, algorithm, state):
    # No small gradients: a second moment in float16 would be a denormal number.
    start, grad = torch.randn(8, 6), torch.randn(8, 6).sign() * (0.5 + torch.rand(8, 6))
    results = []
    for param_dtype in (dtype, torch.float64):
        param = nn.Parameter(start.to(param_dtype, copy=True))
        options = {"lr": 0.125, "weight_decay": 0.0, "algorithm": algorithm}
        optimizer = libmuon.Muon([{"params": [param], "state_dtype": state, **options}])
        for _ in range(2):
            param.grad = grad.to(param_dtype)
            optimizer.step()
        results.append(param.detach().double() - start.to(param_dtype).double())
        moments = [v for k, v in optimizer.state[param].items() if k.endswith(("buffer", "avg"))]
        assert all(m.dtype == (state or param_dtype) for m in moments)
    rounding = 8 * max(torch.finfo(dtype).eps, torch.finfo(state or dtype).eps)
    iteration = 2 * 0.125 * math.sqrt(8 / 6) * FLOAT32_ITERATION
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=rounding + iteration)


# Values that are not finite.


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_gradients_touch_no_other_parameter(bad):
    params = with_grads(*[parameter(4, 3) for _ in range(4)])
    params[2].grad[1, 1] = bad
    libmuon.Muon(params).step()
    assert [bool(p.isfinite().all()) for p in params] == [True, True, False, True]


def test_skip_keeps_value_and_momentum_and_counts_by_name():
    experts, other = parameter(3, 6, 4), parameter(3, 6, 4)
    optimizer = libmuon.Muon(
        [("experts", experts), ("other", other)], batch_dims=1, nonfinite="skip"
    )
    with_grads(experts, other)
    optimizer.step()
    assert optimizer.skipped == {}
    before = [t.clone() for t in (experts.detach(), optimizer.state[experts]["momentum_buffer"])]
    for count in (1, 2):
        with_grads(experts, other)
        experts.grad[1, 0, 0] = float("nan")
        optimizer.step()
        assert optimizer.skipped == {"experts": count}
    assert torch.equal(experts[1], before[0][1])
    assert torch.equal(optimizer.state[experts]["momentum_buffer"][1], before[1][1])
    assert (experts[0] != before[0][0]).any()
    assert experts.isfinite().all()
    # The counts outlive a new plan, and are no part of the state dict.
    optimizer.add_param_group({"params": [("late", parameter(6, 4))], "batch_dims": 0})
    optimizer.step()
    assert optimizer.skipped == {"experts": 3}
    assert "skipped" not in repr(optimizer.state_dict())


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_sparse_gradient_is_refused_before_anything_changes(algorithm):
    dense, table = with_grads(parameter(4, 3), parameter(4, 3))
    table.grad = table.grad.to_sparse()
    optimizer = libmuon.Muon(
        [{"params": [("dense", dense), ("table", table)], "algorithm": algorithm, "lr": 0.1}]
    )
    before = dense.detach().clone()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*\(table\)"):
        optimizer.step()
    assert torch.equal(dense, before)
    assert not optimizer.state


# Momentum.


def trained(params, grads, **options):
    optimizer = libmuon.Muon([{"params": params, "lr": 0.1, **options}])
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("nesterov", [True, False])
def test_d21_heavy_ball_is_the_ema_scaled(nesterov):
    start = torch.randn(6, 4, dtype=torch.float64)
    grads = [[torch.randn_like(start)] for _ in range(4)]
    ema, ball = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"momentum": 0.75, "nesterov": nesterov, "eps": 0.0}
    first = trained([ema], grads, **options)
    second = trained([ball], grads, momentum_form="heavy_ball", **options)
    torch.testing.assert_close(ball, ema, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        0.25 * second.state[ball]["momentum_buffer"],
        first.state[ema]["momentum_buffer"],
        rtol=0,
        atol=1e-14,
    )


def test_zero_gradients_after_a_real_one_let_the_weight_come_to_rest():
    (param,) = with_grads(parameter(6, 4))
    optimizer = libmuon.Muon([param], lr=0.1, weight_decay=0.0)
    optimizer.step()
    param.grad.zero_()
    for _ in range(1000):  # 0.95^1000 = 5e-23: far below eps
        optimizer.step()
    resting = param.detach().clone()
    for _ in range(50):
        optimizer.step()
    assert (param - resting).abs().max() < 1e-6
