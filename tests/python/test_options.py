"""What a group may say, what it inherits, and what is refused."""

from __future__ import annotations

import copy

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
        ("state_dtype", "int8"),
        ("state_dtype", "int4"),
        ("state_dtype", "fp8"),
        ("state_dtype", torch.float8_e4m3fn),
        ("stochastic_rounding", True),
        ("master", "split"),
        ("offload", True),
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


# What a group inherits.


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 5),
        ({"ns_coefficients": (3.0, -4.0, 2.0)}, 5),
        ({"ns_coefficients": "polar_express", "ns_steps": 7}, 7),
        ({"ns_coefficients": [(3.0, -4.0, 2.0)] * 3}, 3),
    ],
)
def test_resolved_ns_steps_stands_in_the_group(given, steps):
    assert group_of(**given)["ns_steps"] == steps


def test_h8_a_groups_own_schedule_brings_its_own_length():
    for name, triples in libmuon.schedules().items():
        (group,) = libmuon.Muon([{"params": [matrix()], "ns_coefficients": name}]).param_groups
        assert group["ns_steps"] == len(triples)


def test_d7_adam_groups_take_nothing_of_muons():
    groups = [
        {"params": [matrix()]},
        adamw(matrix(), lr=1e-3),
        {"params": [matrix()], "algorithm": "Adam", "lr": 1e-3},
    ]
    optimizer = libmuon.Muon(groups, lr=0.02, weight_decay=0.5, eps=1e-3)
    muon, adamw_group, adam_group = optimizer.param_groups
    assert (muon["weight_decay"], muon["eps"]) == (0.5, 1e-3)
    assert (adamw_group["weight_decay"], adamw_group["eps"]) == (0.01, 1e-8)
    assert (adam_group["weight_decay"], adam_group["eps"]) == (0.0, 1e-8)
    assert adamw_group["betas"] == adam_group["betas"] == (0.9, 0.95)
    assert adam_group["algorithm"] == "adam"
    assert not {"betas", "amsgrad", "muon_beta2"} & (optimizer.defaults.keys() | muon.keys())


def test_normuon_shares_muons_values():
    groups = [{"params": [matrix()]}, {"params": [matrix()], "algorithm": "normuon"}]
    _, normuon = libmuon.Muon(groups, lr=0.02, weight_decay=0.5, eps=1e-3).param_groups
    assert (normuon["lr"], normuon["weight_decay"], normuon["eps"]) == (0.02, 0.5, 1e-3)
    assert normuon["muon_beta2"] == 0.95


def test_an_adam_group_needs_its_own_lr():
    with pytest.raises(ValueError, match=r"group 1 \(algorithm 'adamw'\) needs its own lr"):
        libmuon.Muon([{"params": [matrix()]}, adamw(matrix())], lr=0.02)


def test_an_adam_group_shares_lr_where_every_muon_group_matches_it():
    groups = [{"params": [matrix()]}, adamw(matrix())]
    optimizer = libmuon.Muon(groups, lr=3e-4, adjust_lr_fn="match_rms_adamw")
    assert optimizer.param_groups[1]["lr"] == 3e-4
    groups.append({"params": [matrix()], "adjust_lr_fn": "original"})
    with pytest.raises(ValueError, match="group 1"):
        libmuon.Muon(groups, lr=3e-4, adjust_lr_fn="match_rms_adamw")


def test_added_adam_group_needs_its_own_lr_too():
    optimizer = libmuon.Muon([matrix()], lr=0.02)
    with pytest.raises(ValueError, match=r"group 1 \(algorithm 'adamw'\) needs its own lr"):
        optimizer.add_param_group(adamw(matrix()))
    optimizer.add_param_group(adamw(matrix(), lr=1e-3))


def test_a_groups_choice_of_matrices_replaces_the_inherited_one():
    groups = [{"params": [matrix(4, 3, 2)], "flatten": True}, {"params": [matrix(2, 4, 3)]}]
    first, second = libmuon.Muon(groups, batch_dims=1).param_groups
    assert (first["flatten"], first["batch_dims"]) == (True, None)
    assert (second["flatten"], second["batch_dims"]) == (False, 1)
    groups = [{"params": [matrix(4, 3)], "num_heads": 2}]
    assert libmuon.Muon(groups, split_sizes=(1, 3)).param_groups[0]["split_sizes"] is None


@pytest.mark.parametrize(
    ("alias", "algorithm"),
    [
        ({"use_muon": True}, "muon"),
        ({"use_muon": False}, "adamw"),
        ({"optimizer": "AdamW"}, "adamw"),
        ({"optimizer": "normuon"}, "normuon"),
        ({"use_muon": False, "algorithm": "adam"}, "adam"),
        ({"use_muon": True, "algorithm": "normuon"}, "normuon"),
    ],
)
def test_aliases_of_algorithm(alias, algorithm):
    (group,) = libmuon.Muon([{"params": [matrix()], "lr": 0.1, **alias}]).param_groups
    assert group["algorithm"] == algorithm
    assert all(group[key] == value for key, value in alias.items() if key != "algorithm")


@pytest.mark.parametrize(
    "options",
    [{"use_muon": True, "algorithm": "adamw"}, {"optimizer": "muon", "algorithm": "adamw"}],
)
def test_contradictory_aliases_are_refused(options):
    with pytest.raises(ValueError, match="give one of them"):
        libmuon.Muon([{"params": [matrix()], "lr": 0.1, **options}])


# Keys.


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("weight_decy", "weight_decay"),
        ("momentun", "momentum"),
        ("ns_step", "ns_steps"),
        ("maximise", "maximize"),
        ("beta", "betas"),
        ("LR", "lr"),
        ("wd", "weight_decay"),
        ("mu", "momentum"),
        ("epsilon", "eps"),
        ("adjust_lr", "adjust_lr_fn"),
    ],
)
def test_misspelt_options_are_refused_by_name(key, meant):
    with pytest.raises(ValueError, match=f"unknown option '{key}'.*did you mean '{meant}'"):
        libmuon.Muon([{"params": [matrix()], key: 0.1}])


def test_h5_other_keys_are_kept_as_metadata():
    metadata = {
        "name": "blocks",
        "initial_lr": 0.1,
        "max_lr": 1.0,
        "base_momentum": 0.85,
        "max_momentum": 0.95,
        "lr_scale": 0.5,
        "decoupled_weight_decay": True,
        "reasons": ["2D weight"],
    }
    optimizer = libmuon.Muon([{"params": [matrix()], **metadata}])
    optimizer.add_param_group({"params": [matrix()], **metadata})
    for group in optimizer.param_groups:
        assert metadata.items() <= group.items()
        assert group["momentum"] == 0.95


def test_h2_group_values_survive():
    groups = [
        {"params": [matrix()], "lr": 0.5, "weight_decay": 0.0, "momentum": 0.8},
        adamw(matrix(3), lr=0.25, weight_decay=0.0, betas=(0.5, 0.6), eps=1e-4),
    ]
    optimizer = libmuon.Muon(groups, lr=0.1, weight_decay=0.3)
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        assert all(group[key] == value for key, value in given.items() if key != "params")


def test_callers_dicts_are_left_as_they_were():
    given = [
        {"params": (p for p in [matrix(), matrix()]), "use_muon": True, "rows": [0]},
        adamw(matrix(), lr=0.1),
    ]
    before = [copy.copy(group) for group in given]
    optimizer = libmuon.Muon(given)
    extra = {"params": matrix(), "lr": 1}
    optimizer.add_param_group(extra)
    assert given == before
    assert extra.keys() == {"params", "lr"}


# Parameters.


def test_b5_b14_all_parameters_that_are_no_matrices_are_listed_at_once():
    groups = [
        {"params": [("conv.weight", matrix(8, 4, 3, 3)), ("bias", matrix(8))]},
        {"params": [("experts", matrix(3, 4, 5)), ("fine", matrix(3, 4)), ("gain", matrix(1))]},
    ]
    groups[1]["params"].append(("scalar", torch.nn.Parameter(torch.tensor(1.0))))
    with pytest.raises(ValueError) as error:
        libmuon.Muon(groups)
    text = str(error.value)
    assert text.startswith(
        "Muon only supports 2D parameters whereas we found a parameter with size: "
        "torch.Size([8, 4, 3, 3])"
    )
    for line in ("conv.weight: (8, 4, 3, 3)", "bias: (8,)", "experts: (3, 4, 5)", "gain: (1,)"):
        assert line in text
    assert "scalar: ()" in text
    assert "fine" not in text
    for option in ("rows=", "cols=", "flatten=True", "batch_dims=", "algorithm='adamw'"):
        assert option in text


@pytest.mark.parametrize("shape", [(64, 1, 1), (1, 1, 64), (64,)])
def test_b9_gain_like_shapes_are_refused_at_construction(shape):
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        libmuon.Muon([matrix(*shape)])


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((9, 4), {"split_sizes": (4, 4)}, "split_sizes must sum to dim 0"),
        ((9, 4), {"num_heads": 2}, "num_heads to divide"),
        ((8, 4), {"num_heads": 2, "split_sizes": (4, 4)}, "split_sizes or num_heads"),
        ((8, 4, 3), {"rows": 0, "flatten": True}, "one of rows/cols, flatten and batch_dims"),
        ((8, 4, 3), {"rows": 5}, "rows to hold dims"),
        ((8, 4, 3), {"rows": 0, "cols": 0}, "at most once"),
        ((8, 4, 3), {"batch_dims": 2}, "batch_dims to leave at least two dims"),
        ((8, 4, 2), {"complex_dim": 1}, "complex_dim should be the last dim"),
        ((8, 4, 3), {"complex_dim": -1}, "last dim has size 2"),
    ],
)
def test_b16_layouts_that_do_not_fit_name_the_parameter(shape, options, text):
    with pytest.raises(ValueError, match=text) as error:
        libmuon.Muon([("qkv.weight", matrix(*shape))], **options)
    assert "qkv.weight" in str(error.value)


def test_complex_dim_takes_the_index_of_the_last_dim():
    for dim in (-1, 2):
        assert (
            libmuon.Muon([matrix(4, 3, 2)], complex_dim=dim).param_groups[0]["complex_dim"] == dim
        )


def test_fused_and_foreach_exclude_each_other():
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        libmuon.Muon([matrix()], fused=True, foreach=True)
    with pytest.raises(ValueError, match="foreach=False takes one matrix a batch"):
        libmuon.Muon([matrix()], foreach=False, batch_size=4)


def test_fused_names_the_tensor_it_is_not_for():
    param = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match=r"`fused=True` requires all the params.*spectrum"):
        libmuon.Muon([("spectrum", param)], fused=True)


def test_failed_add_param_group_changes_nothing():
    optimizer = libmuon.Muon([("w", matrix())])
    before = repr(optimizer)
    for bad in (
        {"params": [("bias", matrix(3))]},
        {"params": [("w2", matrix())], "momentum": 1.5},
        {"params": [("w2", matrix())], "weigth_decay": 0.5},
        {"params": [matrix()]},
        {"params": [("w2", matrix())], "split_sizes": (1, 1)},
        {"params": [("w", optimizer.param_groups[0]["params"][0])]},
    ):
        with pytest.raises(ValueError):
            optimizer.add_param_group(bad)
        assert repr(optimizer) == before
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([matrix()])


def test_added_group_is_named_by_its_place():
    optimizer = libmuon.Muon([matrix()])
    with pytest.raises(ValueError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [matrix(3)]})


def test_bfloat16_parameters_get_one_warning():
    param = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="updates below 1/256") as warned:
        libmuon.Muon([{"params": [param]}, {"params": [param.detach().clone()]}])
    assert len(warned) == 1
    assert warned[0].filename == __file__


# Values that change between steps.


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("lr", float("nan"), ValueError),
        ("lr", -0.1, ValueError),
        ("momentum", 1.5, ValueError),
        ("weight_decay", "0.1", TypeError),
        ("momentum_form", "sum", ValueError),
        ("adjust_lr_fn", "arbitrary", ValueError),
        ("split_sizes", (1, 1), ValueError),
        ("ns_steps", -1, ValueError),
    ],
)
def test_bad_values_set_between_steps_stop_the_step_before_it_changes_anything(key, value, kind):
    first, second = matrix(), matrix()
    optimizer = libmuon.Muon([{"params": [first]}, {"params": [second]}])
    for param in (first, second):
        param.grad = torch.randn_like(param)
    optimizer.step()
    before = [first.detach().clone(), second.detach().clone()]
    good = optimizer.param_groups[1][key]
    optimizer.param_groups[1][key] = value
    with pytest.raises(kind):
        optimizer.step()
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    optimizer.param_groups[1][key] = good
    optimizer.step()
    assert not torch.equal(second, before[1])


def test_structural_options_set_between_steps_take_effect():
    param = matrix(8, 6)
    plain, split = torch.nn.Parameter(param.detach().clone()), param
    optimizer = libmuon.Muon([split], lr=0.1)
    other = libmuon.Muon([plain], lr=0.1)
    optimizer.param_groups[0]["num_heads"] = 2
    for p in (split, plain):
        p.grad = torch.arange(48.0).sin().view(8, 6)
    optimizer.step()
    other.step()
    assert not torch.allclose(split, plain)
