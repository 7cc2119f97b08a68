"""What every option set owes the user of a torch optimizer: one table, options x behaviours."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import libmuon
import pytest
import torch
from torch import Tensor

MATRICES = ((6, 4), (4, 9), (5, 5))


@dataclass(frozen=True)
class OptionSet:
    shapes: tuple[tuple[int, ...], ...] = MATRICES
    group: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    lr: float = 0.3  # at which a small problem is solved in 100 steps


def matrices(shapes: tuple[tuple[int, ...], ...] = MATRICES, **group: Any) -> OptionSet:
    return OptionSet(shapes, group)


def adam(**group: Any) -> OptionSet:
    return OptionSet(((6, 4), (7,), ()), group)


TABLE = {
    "torch_defaults": matrices(),
    "no_nesterov": matrices(nesterov=False),
    "no_momentum": matrices(momentum=0.0),
    "heavy_ball": matrices(momentum_form="heavy_ball"),
    "polar_express": matrices(ns_coefficients="polar_express"),
    "own_triples": matrices(ns_coefficients=((2.5, -2.5, 1.0), (3.4, -4.7, 2.0)), ns_steps=6),
    "add_normalization": matrices(normalization="add", norm_factor=1.02),
    "scale_free": matrices(eps=0.0),
    "match_rms_adamw": matrices(adjust_lr_fn="match_rms_adamw"),
    "spectral_unclamped": matrices(adjust_lr_fn="spectral_unclamped"),
    "unscaled": matrices(adjust_lr_fn="unscaled"),
    "cautious": matrices(cautious=True),
    "adjusted_decay": matrices(decay_lr="adjusted"),
    "lr_multiplier": OptionSet(group={"lr_multiplier": 0.5}, lr=0.6),
    "one_matrix_a_batch": matrices(foreach=False),
    "batches_of_two": matrices(((6, 4),) * 5, batch_size=2),
    "fused": matrices(fused=True),
    "gram": matrices(form="gram"),
    "float32_computing": matrices(compute_dtype=torch.float32),
    "skip_nonfinite": matrices(nonfinite="skip"),
    "conv_flattened": matrices(((6, 2, 3, 3), (4, 3, 5)), flatten=True),
    "experts_batched": matrices(((3, 6, 4), (2, 2, 4, 4)), rows=-2, cols=-1),
    "stored_transposed": matrices(rows=1, cols=0),
    "unequal_blocks": matrices(((9, 4), (9, 5)), split_sizes=(4, 3, 2)),
    "heads_in_columns": matrices(((5, 8), (3, 4)), num_heads=2, split_dim=1),
    "complex_last_dim": matrices(((5, 4, 2), (3, 7, 2)), complex_dim=-1),
    "complex": OptionSet(dtype=torch.complex64),
    "float64": OptionSet(dtype=torch.float64),
    "bfloat16_state": matrices(state_dtype=torch.bfloat16),
    "float64_state": matrices(state_dtype="float64"),
    "normuon": matrices(algorithm="normuon"),
    "normuon_batched": matrices(((3, 6, 4), (2, 4, 4)), algorithm="normuon", batch_dims=1),
    "normuon_split": matrices(
        ((9, 4), (9, 5)), algorithm="normuon", split_sizes=(4, 5), muon_beta2=0.9
    ),
    "adamw": adam(algorithm="adamw"),
    "adamw_amsgrad": adam(algorithm="adamw", amsgrad=True, betas=(0.8, 0.9), eps=1e-6),
    "adam": adam(algorithm="adam"),
    "adam_coupled_decay": adam(algorithm="adam", weight_decay=0.01),
}
table = pytest.mark.parametrize("options", TABLE.values(), ids=TABLE)


def parameters(options: OptionSet) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(s, dtype=options.dtype)) for s in options.shapes]


def build(options: OptionSet, params: list[torch.nn.Parameter], **more: Any) -> libmuon.Muon:
    # One named group, so that options of single algorithms have their place.
    named = [(f"weight{i}", p) for i, p in enumerate(params)]
    return libmuon.Muon([{"params": named, "lr": options.lr, **options.group, **more}])


def copies(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def gradients(params: list[torch.nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in params]


def train(
    optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range
) -> list[Tensor]:
    for step in steps:
        for param, grad in zip(params, gradients(params, step), strict=True):
            param.grad = grad
        optimizer.step()
    return [p.detach().clone() for p in params]


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": value.clone() for i in state for key, value in state[i].items()}


def dims_laid_out_in_reverse(tensor: Tensor) -> Tensor:
    order = list(range(tensor.ndim))[::-1]
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def assert_equal_bits(actual: Any, expected: Any) -> None:
    """Equal values, dtypes and strides, NaNs included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)


@table
def test_solves_a_small_problem(options: OptionSet) -> None:
    params = parameters(options)
    targets = [torch.randn_like(p) for p in params]
    optimizer = build(options, params, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)

    def distance() -> Tensor:
        return sum((p - t).abs().square().sum() for p, t in zip(params, targets, strict=True))

    first = distance().item()
    for _ in range(100):
        optimizer.zero_grad()
        distance().backward()
        optimizer.step()
        schedule.step()
    assert distance().item() < 0.05 * first


@table
def test_saved_run_resumes_bit_for_bit(options: OptionSet) -> None:
    params = parameters(options)
    whole = copies(params)
    expected = train(build(options, whole), whole, range(6))

    optimizer = build(options, params)
    train(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = copies(params)
    other = build(options, resumed, lr=7.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_equal_bits(train(other, resumed, range(3, 6)), expected)


@table
def test_deepcopy_goes_on_alone(options: OptionSet) -> None:
    params = parameters(options)
    optimizer = build(options, params)
    train(optimizer, params, range(2))
    at_copy = [p.detach().clone() for p in params]
    twin, twin_params = copy.deepcopy((optimizer, params))
    after = train(twin, twin_params, range(2, 4))
    assert_equal_bits([p.detach() for p in params], at_copy)
    assert_equal_bits(train(optimizer, params, range(2, 4)), after)


@table
def test_pickle_keeps_everything(options: OptionSet) -> None:
    params = parameters(options)
    optimizer = build(options, params)
    train(optimizer, params, range(2))
    twin, twin_params = pickle.loads(pickle.dumps((optimizer, params)))
    assert repr(twin) == repr(optimizer)
    after = train(twin, twin_params, range(2, 4))
    assert_equal_bits(train(optimizer, params, range(2, 4)), after)


@table
def test_added_group_equals_one_given_at_construction(options: OptionSet) -> None:
    params = parameters(options)
    expected_params = copies(params)
    expected = train(build(options, expected_params), expected_params, range(3))

    optimizer = build(options, params[:1])
    rest = [(f"weight{i}", p) for i, p in enumerate(params)][1:]
    optimizer.add_param_group({"params": rest, "lr": options.lr, **options.group})
    assert_equal_bits(train(optimizer, params, range(3)), expected)


@table
def test_d20_missing_gradient_leaves_parameter_and_state_alone(options: OptionSet) -> None:
    params = parameters(options)
    optimizer = build(options, params, weight_decay=0.1)
    train(optimizer, params, range(2))
    optimizer.zero_grad()
    before, state = [p.detach().clone() for p in params], flat_state(optimizer)
    optimizer.step()
    assert_equal_bits([p.detach() for p in params], before)
    assert_equal_bits(flat_state(optimizer), state)


@table
def test_a1_d20_first_zero_gradient_only_decays(options: OptionSet) -> None:
    params = parameters(options)
    decay = 0.1
    optimizer = build(options, params, lr=0.25, weight_decay=decay, adjust_lr_fn="unscaled")
    multiplier = options.group.get("lr_multiplier", 1.0)
    factor = 1 - 0.25 * decay * (multiplier if options.group.get("decay_lr") == "adjusted" else 1)
    if options.group.get("cautious"):
        factor = 1.0
    before = [p.detach().clone() for p in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    if options.group.get("algorithm") == "adam":  # coupled: the decay is a gradient
        assert all(p.isfinite().all() for p in params)
        return
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old * factor, rtol=1e-6, atol=0)


@table
def test_zero_gradient_at_zero_lr_changes_no_bit(options: OptionSet) -> None:
    params = parameters(options)
    optimizer = build(options, params, lr=0.0)
    before = [p.detach().clone() for p in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step(closure=None)
    assert_equal_bits([p.detach() for p in params], before)
    assert all(value.isfinite().all() for value in flat_state(optimizer).values())


@table
def test_empty_group_is_no_obstacle(options: OptionSet) -> None:
    params = parameters(options)
    alone = copies(params)
    expected = train(build(options, alone), alone, range(2))
    optimizer = build(options, params)
    optimizer.add_param_group({"params": [], "param_names": [], "lr": 1.0})
    assert_equal_bits(train(optimizer, params, range(2)), expected)
    optimizer.load_state_dict(optimizer.state_dict())


@table
def test_maximize_is_the_negated_gradient(options: OptionSet) -> None:
    params = parameters(options)
    mirrored = copies(params)
    ascent = build(options, params, maximize=True)
    descent = build(options, mirrored)
    for step in range(3):
        for p, m, grad in zip(params, mirrored, gradients(params, step), strict=True):
            p.grad, m.grad = grad.clone(), -grad
        ascent.step()
        descent.step()
    assert_equal_bits([p.detach() for p in params], [m.detach() for m in mirrored])


@table
def test_h4_closure_runs_with_gradients_and_returns_the_loss(options: OptionSet) -> None:
    params = parameters(options)
    optimizer = build(options, params)
    before = [p.detach().clone() for p in params]

    def closure() -> float:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum(p.abs().square().sum() for p in params)
        loss.backward()
        return loss.item()

    expected = closure()
    assert optimizer.step(closure) == expected
    assert optimizer.step(closure=closure) < expected
    assert all((p != old).any() for p, old in zip(params, before, strict=True))


@table
def test_schedule_equals_setting_lr_by_hand(options: OptionSet) -> None:
    params = parameters(options)
    by_hand = copies(params)
    optimizer = build(options, params)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2)
    other = build(options, by_hand)
    for step, factor in enumerate((1.0, 0.5, 0.0)):
        before = [p.detach().clone() for p in params]
        other.param_groups[0]["lr"] = options.lr * factor
        train(optimizer, params, range(step, step + 1))
        train(other, by_hand, range(step, step + 1))
        schedule.step()
    assert_equal_bits([p.detach() for p in params], [p.detach() for p in by_hand])
    assert_equal_bits([p.detach() for p in params], before)  # the last lr was zero


@table
def test_tensor_hyperparameters_are_read_at_every_step_and_kept(options: OptionSet) -> None:
    params = parameters(options)
    plain = copies(params)
    tensors = {
        "lr": torch.tensor(options.lr, dtype=torch.float64),
        "weight_decay": torch.tensor([0.25]),
        "momentum": torch.tensor(0.5),
    }
    optimizer = build(options, params, **tensors)
    other = build(options, plain, lr=options.lr, weight_decay=0.25, momentum=0.5)
    train(optimizer, params, range(2))
    train(other, plain, range(2))
    tensors["lr"].fill_(0.125)
    other.param_groups[0]["lr"] = 0.125
    after = train(optimizer, params, range(2, 4))
    assert_equal_bits(after, train(other, plain, range(2, 4)))
    tensors["lr"].zero_()
    assert_equal_bits(train(optimizer, params, range(4, 5)), after)
    assert all(optimizer.param_groups[0][key] is value for key, value in tensors.items())


@table
def test_h6_gradients_are_left_as_they_were(options: OptionSet) -> None:
    params = parameters(options)
    optimizer = build(options, params, maximize=True)
    for step in range(2):
        grads = gradients(params, step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        kept = [p.grad for p in params]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(params, kept, strict=True))
        assert_equal_bits(kept, grads)


@table
def test_two_runs_are_bitwise_equal(options: OptionSet) -> None:
    params = parameters(options)
    others = copies(params)
    first = train(build(options, params), params, range(3))
    assert_equal_bits(train(build(options, others), others, range(3)), first)


@table
def test_strides_do_not_matter(options: OptionSet) -> None:
    params = parameters(options)
    strided = [torch.nn.Parameter(dims_laid_out_in_reverse(p.detach())) for p in params]
    expected = train(build(options, params), params, range(3))
    optimizer = build(options, strided)
    train(optimizer, strided, range(3))
    tolerance = 1e-4 if options.dtype != torch.float64 else 1e-11
    for param, other in zip(strided, expected, strict=True):
        torch.testing.assert_close(param.detach(), other, rtol=tolerance, atol=tolerance)
    for param in strided:
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            if key in optimizer.state[param]:
                assert optimizer.state[param][key].stride() == param.stride()


@table
def test_e5_state_is_there_before_the_first_gradient_and_never_for_frozen(
    options: OptionSet,
) -> None:
    params = parameters(options)
    params[0].requires_grad_(False)
    optimizer = build(options, params)
    assert not optimizer.state
    saved = optimizer.state_dict()["state"]
    assert list(saved) == list(range(1, len(params)))
    assert all(value.count_nonzero() == 0 for entry in saved.values() for value in entry.values())
    keys = [list(entry) for entry in saved.values()]
    train(optimizer, params[1:], range(1))
    assert [list(entry) for entry in optimizer.state_dict()["state"].values()] == keys


@table
def test_b2_c3_description_names_every_parameter(options: OptionSet) -> None:
    params = parameters(options)
    text = build(options, params).describe()
    for index, param in enumerate(params):
        (line,) = [line for line in text.splitlines() if line.startswith(f"weight{index} ")]
        assert options.group.get("algorithm", "muon") in line
        assert ("x".join(map(str, param.shape)) or "scalar") in line
