"""Single option values: what is refused, with which text, and what comes out."""

from __future__ import annotations

import libmuon
import numpy as np
import pytest
import torch


def matrix(*shape):
    return torch.nn.Parameter(torch.randn(shape or (4, 3)))


def group_of(**options):
    (group,) = libmuon.Muon([matrix()], **options).param_groups
    return group


def adamw(*params, **options):
    return {"params": list(params), "algorithm": "adamw", **options}


# Values that are refused, by the constructor and in a group alike.

BAD_VALUES = [
    ("lr", -1e-3, "Learning rate should be >= 0 but is: -0.001"),
    ("lr", float("nan"), "Learning rate should be >= 0 but is: nan"),
    ("lr", float("inf"), "Learning rate should be finite but is: inf"),
    ("lr", torch.tensor([0.1, 0.1]), "Tensor lr must be 1-element"),
    ("lr", torch.tensor(-1.0), "Learning rate should be >= 0"),
    ("momentum", 1.5, "momentum should be <= 1 but is: 1.5"),
    ("momentum", -0.1, "momentum should be >= 0 but is: -0.1"),
    ("momentum", float("nan"), "momentum should be >= 0 but is: nan"),
    ("weight_decay", -0.1, "weight decay should be >= 0 but is: -0.1"),
    ("eps", -1e-7, "eps should be >= 0 but is: -1e-07"),
    ("eps", float("nan"), "eps should be >= 0 but is: nan"),
    ("ns_steps", -1, "ns_steps should be >= 0 but is: -1"),
    ("ns_steps", 100, "Number of steps must be less than 100 for computational efficiency"),
    ("ns_coefficients", (3.4, -4.7), "Coefficients must be a tuple of exactly 3 values"),
    ("ns_coefficients", (), "Coefficients must be a tuple of exactly 3 values"),
    ("ns_coefficients", [(1, 2, 3), (1, 2)], "Coefficients must be a tuple of exactly 3 values"),
    ("ns_coefficients", (float("nan"), 1, 1), "ns_coefficients should hold finite numbers"),
    ("ns_coefficients", "quintic", "one of 'muon', 'polar_express'"),
    ("adjust_lr_fn", "arbitrary", "Adjust learning rate function arbitrary is not supported"),
    ("algorithm", "lion", "algorithm should be one of"),
    ("rows", (), "rows should hold at least one integer"),
    ("batch_dims", -1, "batch_dims should be >= 0"),
    ("complex_dim", -2, "complex_dim should be >= -1"),
    ("split_sizes", (2, 0, 2), "split_sizes should hold integers >= 1"),
    ("num_heads", 0, "num_heads should be >= 1"),
    ("num_heads", -1, "num_heads should be >= 1"),
    ("split_dim", 2, r"split_dim should be in \[0, 1\]"),
    ("compute_dtype", torch.int32, "compute_dtype should be one of 'auto', 'float64'"),
    ("compute_dtype", "tf32", "compute_dtype should be one of"),
    ("state_dtype", torch.int32, "state_dtype should be one of"),
    ("nonfinite", "ignore", "nonfinite should be one of 'propagate', 'skip'"),
    ("lr_multiplier", -1.0, "lr_multiplier should be >= 0"),
    ("batch_size", 0, "batch_size should be >= 1"),
    ("momentum_form", "sum", "momentum_form should be one of"),
    ("normalization", "spectral", "normalization should be one of"),
    ("norm_factor", 0.0, "norm_factor should be > 0 but is: 0.0"),
    ("decay_lr", "none", "decay_lr should be one of"),
    ("form", "fast", "form should be one of"),
]


@pytest.mark.parametrize(("name", "value", "text"), BAD_VALUES)
def test_bad_values_are_refused_at_construction(name, value, text):
    with pytest.raises(ValueError, match=text):
        libmuon.Muon([matrix()], **{name: value})


@pytest.mark.parametrize(("name", "value", "text"), BAD_VALUES)
def test_bad_values_in_a_group_are_refused_and_the_group_is_named(name, value, text):
    groups = [{"params": [matrix()]}, {"params": [matrix()], name: value}]
    with pytest.raises(ValueError, match=text) as error:
        libmuon.Muon(groups)
    assert "parameter group 1" in str(error.value)


GROUP_ONLY = [
    ({"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
    ({"betas": (-0.1, 0.9)}, ValueError, "Invalid beta parameter at index 0: -0.1"),
    ({"betas": 0.9}, TypeError, "betas should be a pair"),
    ({"betas": (0.9,)}, ValueError, "betas should be a pair"),
    ({"betas": ("0.9", "0.95")}, TypeError, r"betas\[0\] should be a number"),
    ({"amsgrad": 1}, TypeError, "amsgrad should be True or False"),
    ({"muon_beta2": 0.9}, ValueError, "muon_beta2 is an option of 'normuon'"),
]


@pytest.mark.parametrize(("options", "kind", "text"), GROUP_ONLY)
def test_d7_adam_options_are_checked(options, kind, text):
    with pytest.raises(kind, match=text):
        libmuon.Muon([adamw(matrix(), lr=1e-3, **options)])


@pytest.mark.parametrize("options", [{"betas": (0.9, 0.95)}, {"amsgrad": True}])
def test_adam_options_in_a_muon_group_are_a_mistake(options):
    with pytest.raises(ValueError, match="is an option of 'adam' and 'adamw', but the group's"):
        libmuon.Muon([{"params": [matrix()], **options}])


STRINGS = [
    *(
        (name, "0.8")
        for name in ("lr", "weight_decay", "momentum", "eps", "lr_multiplier", "norm_factor")
    ),
    *((name, "4") for name in ("ns_steps", "batch_dims", "num_heads", "batch_size", "rows")),
    *((name, "false") for name in ("nesterov", "maximize", "cautious", "flatten", "fused")),
    ("ns_coefficients", ("3.4", "-4.7", "2.0")),
    ("split_sizes", "2,2"),
]


@pytest.mark.parametrize(("name", "value"), STRINGS)
def test_h3_strings_for_numbers_and_flags_are_refused(name, value):
    with pytest.raises(TypeError, match=name):
        libmuon.Muon([matrix()], **{name: value})


@pytest.mark.parametrize("value", [2.0, "4", True, [2]])
def test_b18_num_heads_is_an_integer(value):
    with pytest.raises(TypeError, match="num_heads should be an integer"):
        libmuon.Muon([matrix()], num_heads=value)


@pytest.mark.parametrize("value", [True, None, [0.1], 1j, object()])
def test_numbers_have_to_be_numbers(value):
    with pytest.raises(TypeError, match="lr should be a number"):
        libmuon.Muon([matrix()], lr=value)


def test_h7_a_callable_iteration_is_refused_and_triples_take_its_place():
    with pytest.raises(TypeError, match="a triple, a list of triples or a schedule's name"):
        libmuon.Muon([matrix()], ns_coefficients=lambda grad: grad)
    triples = [(4.0, -6.7, 3.4), (3.4, -4.7, 2.0)]
    group = group_of(ns_coefficients=triples)
    assert group["ns_coefficients"] == tuple(triples)
    assert group["ns_steps"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("differentiable", True),
    ],
)
def test_what_is_not_offered_says_so(name, value):
    with pytest.raises(NotImplementedError, match=f"{name}=.*(instead|supported|available)"):
        libmuon.Muon([matrix()], **{name: value})


def test_numpy_scalars_become_plain_numbers():
    group = group_of(lr=np.float32(0.5), weight_decay=np.float64(0.25), ns_steps=np.int64(3))
    assert (type(group["lr"]), type(group["weight_decay"])) == (float, float)
    assert (group["lr"], group["ns_steps"], type(group["ns_steps"])) == (0.5, 3, int)
    assert group_of(nesterov=np.bool_(False))["nesterov"] is False
