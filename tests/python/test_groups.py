"""group_parameters: groups, rules, and what it refuses to guess."""

from __future__ import annotations

import copy
import fnmatch
import re
import warnings

import libmuon
import pytest
import torch
from libmuon.groups import route_parameters
from routing_models import (
    Experts,
    Twin,
    algorithms,
    decisions,
    module_of,
    parameter,
    step_once,
    text_of,
)
from torch import nn


def test_groups_are_few_and_hold_every_trainable_parameter_once():
    model = Twin()
    groups = libmuon.group_parameters(model)
    held = [id(p) for group in groups for _, p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    options = [
        {k: v for k, v in group.items() if k not in ("params", "reasons")} for group in groups
    ]
    assert all(a != b for i, a in enumerate(options) for b in options[:i])
    for group in groups:
        assert len(group["reasons"]) == len(group["params"])
        assert all(group["reasons"])
        assert "lr" not in group
        assert (group.get("adjust_lr_fn") == "match_rms_adamw") == (group["algorithm"] == "muon")


def test_frozen_parameters_are_reported_and_get_no_group():
    model = Twin()
    assert decisions(model)["frozen.weight"].reason == "frozen: requires_grad is False"
    names = [name for group in libmuon.group_parameters(model) for name, _ in group["params"]]
    assert "frozen.weight" not in names


def test_nothing_trainable_is_an_error():
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        libmuon.group_parameters(nn.Linear(8, 8).requires_grad_(False))


def test_b5_the_optimizer_accepts_what_the_helper_returns():
    model = Twin()
    before = copy.deepcopy(model.state_dict())
    optimizer = step_once(model, libmuon.group_parameters(model))
    named = {name: p for group in optimizer.param_groups
             for name, p in zip(group["param_names"], group["params"], strict=True)}  # fmt: skip
    for name, p in named.items():
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before[name]), name
    assert torch.equal(model.frozen.weight, before["frozen.weight"])


def test_b9_a_vector_is_refused_on_muon():
    with pytest.raises(ValueError, match=r"'bias' of shape \(8,\) on 'muon', which needs matrices"):
        libmuon.group_parameters(nn.Linear(8, 8), [("bias", "muon")])


def test_b14_the_axis_of_a_stack_is_never_guessed():
    model = module_of(
        moe=Experts(), other=module_of(w=parameter(2, 3, 4, 5)), hidden=nn.Linear(8, 8)
    )
    with pytest.raises(ValueError) as error:
        libmuon.group_parameters(model)
    text = str(error.value)
    assert "moe.gate_up_proj of Experts, shape (4, 16, 8)" in text
    assert "moe.down_proj" in text
    assert "other.w of Module, shape (2, 3, 4, 5)" in text
    assert "_bias" not in text
    assert algorithms(model, [("*proj", "adamw"), ("other.w", "adamw")])[
        "moe.gate_up_proj_bias"
    ] == "adamw"  # fmt: skip


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_b14_the_choices_in_the_error_can_be_pasted(choice):
    model = module_of(moe=Experts(), hidden=nn.Linear(8, 8))
    with pytest.raises(ValueError) as error:
        libmuon.group_parameters(model)
    choices = [line for line in str(error.value).splitlines() if line.startswith("  (")]
    assert len(choices) == 6
    rules = eval("[" + "\n".join(choices[choice::3]) + "\n]")
    expected = ("muon batch_dims=1", "muon flatten=1", "adamw")[choice]
    assert text_of(decisions(model, rules)["moe.down_proj"]) == expected


def test_c3_the_report_shows_lr_and_decay_of_a_moved_parameter():
    model = module_of(wte=nn.Embedding(32, 8), hidden=nn.Linear(8, 8, bias=False))
    rules = [("wte.weight", {"algorithm": "adamw", "lr": 0.0125, "weight_decay": 0.4})]
    text = libmuon.Muon(libmuon.group_parameters(model, rules), lr=3e-4).describe()
    line = next(line for line in str(text).splitlines() if "wte.weight" in line)
    assert "0.0125" in line
    assert "0.005" in line  # lr * weight_decay
    assert "rule 0 (wte.weight)" in line


def test_c3_excluded_matrices_can_have_their_own_lr():
    model = module_of(vocab_map=nn.Linear(8, 32, bias=False), hidden=nn.Linear(8, 8, bias=False))
    groups = libmuon.group_parameters(model, [("vocab_map.*", {"algorithm": "adamw", "lr": 0.01})])
    optimizer = libmuon.Muon(groups, lr=3e-4)
    lrs = {name: g["lr"] for g in optimizer.param_groups for name in g["param_names"]}
    assert lrs == {"vocab_map.weight": 0.01, "hidden.weight": 3e-4}


@pytest.mark.parametrize(
    "match",
    ["wieght", "weight.*", re.compile("attn"), nn.Conv2d, lambda name, p, module: p.ndim > 2],
)
def test_c4_a_rule_that_matches_nothing_is_an_error(match):
    with pytest.raises(ValueError, match=r"rule 1 \(.*\) matches no parameter.*weight, bias"):
        libmuon.group_parameters(nn.Linear(8, 8), [("bias", {"lr": 1.0}), (match, "adamw")])


def test_c4_contradictory_rules_are_an_error():
    rules = [("weight", "adamw"), (nn.Linear, {"algorithm": "normuon"})]
    with pytest.raises(
        ValueError,
        match=r"contradictory rules for 'weight': rule 0 \(weight\) gives algorithm='adamw', "
        r"rule 1 \(Linear\) gives algorithm='normuon'",
    ):
        libmuon.group_parameters(nn.Linear(8, 8, bias=False), rules)


def test_c4_rules_that_agree_add_up():
    rules = [
        ("weight", "NorMuon"),
        (nn.Linear, {"algorithm": "normuon", "lr": 0.1}),
        ("*", {"x": 1}),
    ]
    decision = decisions(nn.Linear(8, 8, bias=False), rules)["weight"]
    assert decision.options == {
        "algorithm": "normuon",
        "adjust_lr_fn": "match_rms_adamw",
        "lr": 0.1,
        "x": 1,
    }
    assert decision.reason == "rule 0 (weight), rule 1 (Linear), rule 2 (*)"


def test_c4_every_trainable_parameter_has_a_decision():
    model = Twin()
    assert [id(d.parameter) for d in route_parameters(model)] == [id(p) for p in model.parameters()]


def test_c5_tensors_without_names_work():
    params = [parameter(8, 8), parameter(8)]
    with pytest.warns(UserWarning, match="have no names"):
        groups = libmuon.group_parameters(params)
    optimizer = libmuon.Muon(groups, lr=1e-3)
    assert [g["algorithm"] for g in optimizer.param_groups] == ["muon", "adamw"]
    assert "param_names" not in optimizer.param_groups[0]


@pytest.mark.parametrize("shape", [(0,), (8,)])
def test_c6_nothing_on_muon_warns(shape):
    # ZeRO-3 leaves empty placeholders where the weights were.
    model = module_of(hidden=module_of(weight=parameter(*shape)))
    with pytest.warns(UserWarning, match="no parameter is on Muon: all 1 go to other") as record:
        libmuon.group_parameters(model)
    assert record[0].filename == __file__
    assert ("are empty" in str(record[0].message)) == (shape == (0,))


def test_c6_no_warning_otherwise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        libmuon.group_parameters(Twin())


def test_c10_names_and_modules_are_optional():
    # A bare tensor has neither a path nor a module; types and shapes are enough for the rest.
    named = [("blocks.0.up", parameter(8, 8)), ("lm_head.weight", parameter(32, 8))]
    assert algorithms(named) == {"blocks.0.up": "muon", "lm_head.weight": "adamw"}
    assert algorithms(nn.Linear(8, 8)) == {"weight": "muon", "bias": "adamw"}
    with pytest.raises(TypeError, match="1 of 2 parameters have no name"):
        libmuon.group_parameters([("a", parameter(8, 8)), parameter(8, 8)])
    with pytest.raises(TypeError, match=r"got dict \(parameter 0\)"):
        libmuon.group_parameters([{"params": []}])


@pytest.mark.parametrize("rules", ["head.*", {"head.*": "adamw"}, 3])
def test_c11_rules_are_a_list(rules):
    with pytest.raises(TypeError, match="rules must be a list"):
        libmuon.group_parameters(nn.Linear(8, 8), rules)


@pytest.mark.parametrize(
    "rule", ["ab", ("weight",), ("weight", "adamw", 1), (3, "adamw"), (int, "adamw"), ("weight", 3)]
)
def test_c11_a_rule_is_a_pair(rule):
    with pytest.raises(TypeError, match="rule 0"):
        libmuon.group_parameters(nn.Linear(8, 8), [rule])


def test_c11_lists_and_tuples_of_rules_are_accepted():
    for rules in ([["weight", "adamw"]], (("weight", "adamw"),), iter([("weight", "adamw")])):
        with pytest.warns(UserWarning, match="no parameter is on Muon"):
            assert algorithms(nn.Linear(8, 8), rules)["weight"] == "adamw"


def test_q2_tensors_without_names_are_never_routed_silently():
    with pytest.warns(UserWarning, match=r"goes to Muon; pass the module, or model\.named_param"):
        groups = libmuon.group_parameters([parameter(32, 8)])
    assert groups[0]["algorithm"] == "muon"


# --- rules ----------------------------------------------------------------------------------------


def test_rules_match_by_name_type_predicate_and_function():
    model = module_of(a=nn.Linear(8, 8), b=nn.Conv1d(8, 8, 3), c=nn.Linear(8, 16, bias=False))

    def by_function(name, p, module):
        return {"momentum": 0.9} if name == "c.weight" else None

    rules = [
        ("a.*", {"x": 1}),
        (re.compile(r"\.weight$"), {"y": 2}),
        (nn.Conv1d, {"z": 3}),
        (lambda name, p, module: p.shape == (8, 8) and isinstance(module, nn.Linear), {"w": 4}),
        by_function,
    ]
    got = {
        name: {k: v for k, v in d.options.items() if len(k) == 1 or k == "momentum"}
        for name, d in decisions(model, rules).items()
    }
    assert got == {
        "a.weight": {"x": 1, "y": 2, "w": 4},
        "a.bias": {"x": 1},
        "b.weight": {"y": 2, "z": 3},
        "b.bias": {"z": 3},
        "c.weight": {"y": 2, "momentum": 0.9},
    }


def test_a_glob_fits_the_whole_name():
    names = ["a.weight", "a.bias", "ba.weight"]
    model = module_of(a=nn.Linear(8, 8), ba=nn.Linear(8, 8, bias=False))
    for pattern in ("a.*", "*weight", "?.bias"):
        got = decisions(model, [(pattern, {"x": 1})])
        assert {n for n, d in got.items() if "x" in d.options} == set(
            fnmatch.filter(names, pattern)
        )


def test_a_rule_replaces_the_layout_that_the_module_suggests():
    model = nn.Sequential(nn.Conv2d(8, 16, 3, groups=2, bias=False), nn.MultiheadAttention(16, 4))
    rules = [("0.weight", {"batch_dims": 2}), ("1.in_proj_weight", {"split_sizes": (16, 32)})]
    got = decisions(model, rules)
    assert text_of(got["0.weight"]) == "muon batch_dims=2"
    assert text_of(got["1.in_proj_weight"]) == "muon split_sizes=16,32"


def test_a_layout_in_a_rule_means_muon():
    model = module_of(
        wte=nn.Embedding(32, 8), dw=nn.Conv2d(8, 8, 3, groups=8, bias=False), up=nn.Linear(8, 8)
    )
    got = decisions(model, [("wte.weight", {"num_heads": 2}), ("dw.weight", {"flatten": True})])
    assert text_of(got["wte.weight"]) == "muon num_heads=2"
    assert text_of(got["dw.weight"]) == "muon flatten=1"


def test_other_options_leave_the_decision_alone():
    decision = decisions(nn.Linear(8, 8), [("*", {"lr_multiplier": 0.5})])["bias"]
    assert decision.options == {"algorithm": "adamw", "weight_decay": 0.0, "lr_multiplier": 0.5}
    assert decision.reason == "1D; options of rule 0 (*)"


def test_a_scale_chosen_by_rule_wins():
    groups = libmuon.group_parameters(
        nn.Linear(8, 8, bias=False), [("weight", {"adjust_lr_fn": "original"})]
    )
    assert groups[0]["adjust_lr_fn"] == "original"


def test_rules_are_not_modified():
    rules = [("weight", {"algorithm": "NorMuon"}), ("*", {"lr": 0.1})]
    before = copy.deepcopy(rules)
    libmuon.group_parameters(nn.Linear(8, 8), rules)
    assert rules == before
