"""libmuon.orthogonalize, step_ and schedules: the typed wrappers over the ops."""

from __future__ import annotations

import libmuon
import pytest
import torch
from reference import exact_orthogonalize
from torch import nn

TRIPLE = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_result_has_the_shape_and_dtype_of_the_input_which_is_left_alone(dtype):
    x = torch.randn(4, 6, 3).to(dtype)
    before = x.clone()
    result = libmuon.orthogonalize(x)
    assert (result.shape, result.dtype) == (x.shape, dtype)
    assert torch.equal(x, before)


def test_a9_real_tensors_with_a_complex_dim_equal_complex_ones():
    x = torch.randn(6, 9, dtype=torch.complex128)
    result = libmuon.orthogonalize(torch.view_as_real(x), complex_dim=-1)
    torch.testing.assert_close(
        torch.view_as_complex(result), libmuon.orthogonalize(x), rtol=0, atol=1e-14
    )


def test_a11_schedules_are_the_triples_that_are_used():
    x = torch.randn(6, 9, dtype=torch.float64)
    for name, triples in libmuon.schedules().items():
        plain = {"normalization": "clamp", "norm_factor": 1.0}
        torch.testing.assert_close(
            libmuon.orthogonalize(x, name, **plain),
            exact_orthogonalize(x, triples),
            rtol=1e-9,
            atol=1e-9,
        )
    assert libmuon.schedules()["muon"] == (TRIPLE,) * 5


def test_h8_normalization_is_a_choice():
    x = torch.randn(6, 9, dtype=torch.float64) * 1e-3
    added = libmuon.orthogonalize(x, normalization="add", norm_factor=1.25, eps=0.5)
    expected = exact_orthogonalize(x, [TRIPLE] * 5, "add", 1.25, 0.5)
    torch.testing.assert_close(added, expected, rtol=1e-10, atol=1e-12)
    clamped = libmuon.orthogonalize(x, eps=0.5)
    expected = exact_orthogonalize(x, [TRIPLE] * 5, eps=0.5)
    torch.testing.assert_close(clamped, expected, rtol=1e-10, atol=1e-12)


def test_layout_options_say_what_a_matrix_is():
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    flat = libmuon.orthogonalize(x.flatten(1)).view_as(x)
    torch.testing.assert_close(libmuon.orthogonalize(x, flatten=True), flat, rtol=0, atol=1e-13)
    halves = torch.cat([libmuon.orthogonalize(half) for half in x.flatten(1).split(3)])
    torch.testing.assert_close(
        libmuon.orthogonalize(x.flatten(1), num_heads=2), halves, rtol=0, atol=1e-13
    )
    with pytest.raises(ValueError, match="at least 2 dims"):
        libmuon.orthogonalize(torch.randn(3))


def test_form_is_a_choice_that_changes_no_more_than_rounding():
    x = torch.randn(16, 64)
    standard = libmuon.orthogonalize(x, form="standard")
    for form in ("auto", "gram", "gram_x_restart"):
        result = libmuon.orthogonalize(x, form=form)
        torch.testing.assert_close(result, standard, rtol=0, atol=1e-4)


def test_options_are_checked():
    with pytest.raises(ValueError, match="eps should be >= 0"):
        libmuon.orthogonalize(torch.eye(3), eps=-1.0)
    with pytest.raises(TypeError, match="ns_steps should be an integer"):
        libmuon.orthogonalize(torch.eye(3), ns_steps="5")


def test_gradients_do_not_flow():
    x = torch.randn(4, 3, requires_grad=True)
    assert not libmuon.orthogonalize(x).requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"momentum_form": "heavy_ball", "maximize": True, "cautious": True},
        {
            "ns_coefficients": "polar_express",
            "adjust_lr_fn": "match_rms_adamw",
            "num_heads": 2,
        },
    ],
)
def test_h13_step_equals_the_optimizers_step(options):
    params = [nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    plain = [p.detach().clone() for p in params]
    momenta = [torch.zeros_like(p) for p in plain]
    optimizer = libmuon.Muon(params, lr=0.1, **options)
    for _ in range(3):
        grads = [torch.randn(6, 4), None, torch.randn(6, 4)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        libmuon.step_(plain, grads, momenta, lr=0.1, **options)
    for param, other, momentum in zip(params, plain, momenta, strict=True):
        assert torch.equal(param, other)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], momentum)


def test_step_works_on_parameters_and_refuses_other_algorithms():
    param, momentum = nn.Parameter(torch.randn(4, 3)), torch.zeros(4, 3)
    before = param.detach().clone()
    libmuon.step_([param], [torch.randn(4, 3)], [momentum])
    assert not torch.equal(param, before)
    with pytest.raises(ValueError, match="one for matrices"):
        libmuon.step_([param], [torch.randn(4, 3)], [momentum], algorithm="adamw")
