"""libmuon.Muon as an optimizer: what it updates, by how much, and what it shows of itself."""

from __future__ import annotations

import gc
import math
import weakref

import libmuon
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

# Largest error of an entry of an orthogonalised matrix in float32, whatever the form.
FLOAT32_ITERATION = 7e-4


def parameter(*shape, **kwargs):
    return nn.Parameter(torch.randn(*shape, **kwargs))


def with_grads(*params):
    for param in params:
        param.grad = torch.randn_like(param)
    return list(params)


def count_ops(action):
    """How often each op of libmuon is called."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        action()
    return {e.key: e.count for e in trace.key_averages() if e.key.startswith("muon::")}


def small_model():
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8), nn.Linear(8, 11)
    )


def adamw(params, **options):
    return {"params": params, "algorithm": "adamw", "lr": 1e-2, **options}


# One call into the core, one plan.


def test_a_step_is_one_call_however_many_groups():
    params = with_grads(*[parameter(4, 3) for _ in range(9)])
    groups = [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(params)]
    groups.append(adamw(with_grads(parameter(3))))
    optimizer = libmuon.Muon(groups)
    assert count_ops(optimizer.step)["muon::step_"] == 1


def test_plan_is_built_once_and_again_only_for_new_parameters_or_structure():
    first, second = with_grads(parameter(4, 3), parameter(5, 3))
    optimizer = libmuon.Muon([first])

    def plans():
        return count_ops(optimizer.step).get("muon::create_plan", 0)

    assert plans() == 1
    for lr in (0.1, 0.2):
        optimizer.param_groups[0].update(lr=lr, momentum=0.9, weight_decay=0.0, nesterov=False)
        first.grad = None if lr == 0.1 else torch.randn_like(first)
        assert plans() == 0
    optimizer.add_param_group({"params": [second]})
    assert plans() == 1
    optimizer.param_groups[1]["ns_steps"] = 4
    assert plans() == 1
    optimizer.param_groups[1]["params"][0] = with_grads(parameter(5, 3))[0]
    assert plans() == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert plans() == 0


def test_optimizer_and_its_plan_are_freed_together():
    optimizer = libmuon.Muon(with_grads(parameter(4, 3)))
    optimizer.step()
    handle = optimizer._plan.handle
    assert torch.ops.muon.explain_plan(handle)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="handle of a live plan"):
        torch.ops.muon.explain_plan(handle)


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


def test_h13_trainers_can_ask_for_a_class_or_a_factory():
    model = small_model()
    options = {"lr": 3e-4, "momentum": 0.9}
    by_class = libmuon.Muon(*[model], **options)  # optimizer_cls(kwargs.pop("model"), **kwargs)
    by_factory = libmuon.MuonFactory()(model, **options)
    with_rules = libmuon.MuonFactory()(model, rules=[("1.weight", "adamw")], **options)
    assert repr(by_factory) == repr(by_class)
    assert isinstance(by_factory, torch.optim.Optimizer)
    names = [
        n for g in with_rules.param_groups if g["algorithm"] == "muon" for n in g["param_names"]
    ]
    assert names
    assert "1.weight" not in names


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


# The report.


def test_b2_c3_description_says_who_why_and_how_fast():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 10))
    groups = [
        {
            "params": [("conv", model[0].weight)],
            "flatten": True,
            "lr": 0.5,
            "weight_decay": 0.1,
            "reasons": ["weight of Conv2d"],
        },
        {"params": [("fc", model[2].weight)], "split_sizes": (5, 3, 2), "lr": 1.0},
        adamw([("bias", model[0].bias), ("frozen", model[2].bias)], lr=0.25, weight_decay=0.5),
    ]
    model[2].bias.requires_grad_(False)
    lines = libmuon.Muon(groups).describe().splitlines()
    header, conv, fc, bias = lines[0], lines[2], lines[3], lines[4]
    assert header.split() == [
        "name", "shape", "matrices", "algorithm", "why", "lr", "lr*wd", "factor"
    ]  # fmt: skip
    assert conv.split() == ["conv", "8x3x3x3", "8x27", "muon", "weight", "of", "Conv2d", "0.5",
                            "0.05", "1"]  # fmt: skip
    assert "5x8 + 3x8 + 2x8" in fc
    assert bias.split() == ["bias", "8", "-", "adamw", "0.25", "0.125", "1"]
    assert "muon: 2 parameters, 296 elements" in lines
    assert "adamw: 1 parameter, 8 elements" in lines
    assert "frozen: 1 parameter, 10 elements" in lines
