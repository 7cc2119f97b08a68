"""What a group inherits, which keys it may have, and values that change between steps."""

from __future__ import annotations

import copy

import libmuon
import pytest
import torch


def matrix(*shape):
    return torch.nn.Parameter(torch.randn(shape or (4, 3)))


def group_of(**options):
    (group,) = libmuon.Muon([matrix()], **options).param_groups
    return group


def adamw(*params, **options):
    return {"params": list(params), "algorithm": "adamw", **options}


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


def test_fused_and_foreach_exclude_each_other():
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        libmuon.Muon([matrix()], fused=True, foreach=True)
    with pytest.raises(ValueError, match="foreach=False takes one matrix a batch"):
        libmuon.Muon([matrix()], foreach=False, batch_size=4)


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


def test_the_warning_of_rounding_points_at_the_caller():
    class Own(libmuon.Muon):
        pass

    matrices = [torch.nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16)) for _ in range(4)]
    holder = torch.nn.Module()
    holder.weight = matrices[3]

    def build():
        optimizer = libmuon.Muon(matrices[:1])
        optimizer.add_param_group({"params": matrices[1]})
        Own(matrices[2:3])
        libmuon.MuonFactory()(holder, lr=0.1)

    with pytest.warns(UserWarning, match="bfloat16 parameters are rounded") as caught:
        build()
    assert [warning.filename for warning in caught] == [__file__] * 4
