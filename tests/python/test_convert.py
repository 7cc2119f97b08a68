"""State dicts that other optimizers have written, continued by libmuon."""

from __future__ import annotations

from typing import Any

import libmuon
import pytest
import torch
from converted import SAYS, arguments, go_on, largest, load, same
from libmuon.compat import neuralops
from libmuon.convert import ConversionError, build_optimizer, candidates, convert_state_dict
from torch import nn

# Both sides compute in float32. A step rounds each weight, which stays below 1, at most three
# times: 9 * 2**-25 in three steps. Iterations differ by their own rounding, which the polynomial's
# slope at zero, below 1000, amplifies to 1e-4 of an update at most, and three updates come to 0.1
# at most: 1e-5. A wrong factor, form or option changes updates by percents, hundreds of times more.
BOUND = 1e-5


@pytest.mark.parametrize("name", SAYS)
def test_training_continues_on_the_sources_trajectory(name: str) -> None:
    fixture = load(name)
    state_dict, report = convert_state_dict(fixture["state_dicts"], **arguments(name, fixture))
    assert report.complete
    assert largest(go_on(fixture, state_dict)) <= BOUND
    assert {entry.name for entry in report.entries} == set(fixture["names"])


@pytest.mark.parametrize("name", SAYS)
def test_each_file_is_of_one_known_optimizer(name: str) -> None:
    state_dict = load(name)["state_dicts"][0]
    found = candidates(state_dict["param_groups"], list(state_dict["state"].values()))
    expected = {"torch_muon": "torch", "torch_adamw": "adamw"}.get(name)
    if expected is None:
        prefixes = ("keller", "normuon", "moonlight", "dion", "timm", "pytorch_optimizer")
        prefixes += ("muonium", "neuralops", "qkan")
        (expected,) = (prefix for prefix in prefixes if name.startswith(prefix))
    assert [source.name for source in found] == [expected]


@pytest.mark.parametrize("name", SAYS)
def test_the_source_is_left_alone(name: str) -> None:
    fixture, again = load(name), load(name)
    state_dict, _ = convert_state_dict(fixture["state_dicts"], **arguments(name, fixture))
    go_on(fixture, state_dict)
    assert same(fixture, again)


@pytest.mark.parametrize("name", ["moonlight", "qkan", "muonium_01", "neuralops_muon"])
def test_a_heavy_ball_momentum_becomes_an_average_by_one_factor(name: str) -> None:
    fixture = load(name)
    given = arguments(name, fixture) | {"momentum_form": "ema"}
    state_dict, report = convert_state_dict(fixture["state_dicts"], **given)
    matrix = [g for g in state_dict["param_groups"] if g["algorithm"] == "muon"]
    assert {group["momentum_form"] for group in matrix} == {"ema"}
    assert largest(go_on(fixture, state_dict)) <= BOUND
    assert "exact only if the momentum has always been 0.95" in str(report)


def test_an_average_becomes_a_heavy_ball_momentum_by_the_inverse_factor() -> None:
    fixture = load("keller")
    given = arguments("keller", fixture) | {"momentum_form": "heavy_ball"}
    state_dict, _ = convert_state_dict(fixture["state_dicts"], **given)
    assert largest(go_on(fixture, state_dict)) <= BOUND
    index = fixture["names"].index("a")
    mine = state_dict["state"][index]["momentum_buffer"]
    theirs = fixture["state_dicts"][0]["state"][index]["momentum_buffer"]
    torch.testing.assert_close(mine, theirs * 20, rtol=1e-6, atol=0)


def test_what_libmuon_has_written_comes_back_bit_for_bit() -> None:
    params = [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (3, 5), (5,))]
    named = list(zip("abc", params, strict=True))
    groups: list[dict[str, Any]] = [
        {"params": named[:2], "algorithm": "normuon", "momentum_form": "heavy_ball"},
        {"params": named[2:], "algorithm": "adamw", "lr": 1e-3, "purpose": "bias"},
    ]
    optimizer = libmuon.Muon(groups)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    converted, report = convert_state_dict(optimizer.state_dict())
    assert same(converted, optimizer.state_dict())
    assert report.source == "libmuon.Muon"


def test_a_presets_state_is_libmuons() -> None:
    p, q = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    preset = neuralops.MuonAdamW(
        [{"params": [p], "optimizer": "muon"}, {"params": [q], "optimizer": "adamw"}]
    )
    _, report = convert_state_dict(preset.state_dict())
    assert report.source == "libmuon.Muon"


def adamw(*shapes: tuple[int, ...]) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    names = ["layer.weight", "embed.weight", "layer.bias", "narrow.weight", "conv.weight"]
    params = {
        name: nn.Parameter(torch.randn(shape)) for name, shape in zip(names, shapes, strict=False)
    }
    optimizer = torch.optim.AdamW(params.items(), lr=3e-3, weight_decay=0.2, betas=(0.8, 0.99))
    for p in params.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return params, optimizer


def test_a_run_switches_from_adamw_to_muon() -> None:
    params, before = adamw((8, 6), (9, 4), (8,), (3, 7), (8, 4, 3, 3))
    state_dict, report = convert_state_dict(before.state_dict())
    optimizer = build_optimizer(state_dict, params.items())
    matrix, rest = optimizer.param_groups[1], optimizer.param_groups[0]
    if matrix["algorithm"] != "muon":
        matrix, rest = rest, matrix
    assert matrix["param_names"] == ["layer.weight"]
    assert {k: matrix[k] for k in ("lr", "weight_decay", "adjust_lr_fn", "momentum_form")} == {
        "lr": 3e-3,
        "weight_decay": 0.2,
        "adjust_lr_fn": "match_rms_adamw",
        "momentum_form": "ema",
    }
    weight = params["layer.weight"]
    mine, theirs = optimizer.state[weight], before.state[weight]
    assert mine.keys() == {"momentum_buffer"}
    assert torch.equal(mine["momentum_buffer"], theirs["exp_avg"])
    assert rest["betas"] == (0.8, 0.99)
    for name in set(params) - {"layer.weight"}:
        torch.testing.assert_close(
            dict(optimizer.state[params[name]]), dict(before.state[params[name]])
        )
    (entry,) = (entry for entry in report.entries if entry.name == "layer.weight")
    assert "exp_avg -> momentum_buffer" in entry.moved
    assert any(text.startswith("exp_avg_sq, step left out") for text in entry.moved)


def test_globs_say_which_parameters_switch() -> None:
    params, before = adamw((8, 6), (9, 4), (8,))
    state_dict, _ = convert_state_dict(before.state_dict(), matrices=["embed.*", "layer.w*"])
    algorithms = {
        name: group["algorithm"]
        for group in state_dict["param_groups"]
        for name in group["param_names"]
    }
    assert algorithms == {"layer.weight": "muon", "embed.weight": "muon", "layer.bias": "adamw"}
    for wrong, text in ((["nothing.*"], "fits no parameter"), (["*.bias"], "no matrix by itself")):
        with pytest.raises(ConversionError, match=text):
            convert_state_dict(before.state_dict(), matrices=wrong)
    unnamed = torch.optim.AdamW(params.values()).state_dict()
    with pytest.raises(ConversionError, match="have no names, so embeddings and heads"):
        convert_state_dict(unnamed)


def test_old_adam_and_adamw_files_cannot_be_told_apart() -> None:
    state_dict = adamw((8, 6))[1].state_dict()
    for group in state_dict["param_groups"]:
        del group["decoupled_weight_decay"]
    with pytest.raises(ConversionError, match="several optimizers: 'adamw', 'adam'"):
        convert_state_dict(state_dict)
    for source in ("adamw", "adam"):
        converted, _ = convert_state_dict(state_dict, source=source, matrices="none")
        assert converted["param_groups"][0]["algorithm"] == source


def test_an_unknown_optimizer_is_refused_with_what_it_has() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    sgd = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.randn_like(p)
    sgd.step()
    with pytest.raises(ConversionError, match=r"no known optimizer has groups with.*'dampening'"):
        convert_state_dict(sgd.state_dict())
    with pytest.raises(ConversionError, match="is not as timm"):
        convert_state_dict(sgd.state_dict(), source="timm")
    with pytest.raises(ConversionError, match="source should be one of"):
        convert_state_dict(sgd.state_dict(), source="sgd")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("torch_muon", "b"),
        ("muonium", "stack"),
        ("dion", "heads"),
        ("pytorch_optimizer", "conv"),
        ("qkan", "bias"),
        ("timm", "a"),
        ("timm", "b"),
    ],
)
def test_e5_a_parameter_that_never_had_a_gradient_stays_in_its_group(
    name: str, missing: str
) -> None:
    fixture = load(name)
    given = arguments(name, fixture)
    whole, _ = convert_state_dict(fixture["state_dicts"], **given)
    del fixture["state_dicts"][0]["state"][fixture["names"].index(missing)]
    state_dict, report = convert_state_dict(fixture["state_dicts"], **given)
    assert report.complete
    assert "no state in the file: starts at zero" in str(report)
    assert same(state_dict["param_groups"], whole["param_groups"])
    differences = go_on(fixture, state_dict)
    assert differences.pop(missing).abs().max() > BOUND
    assert largest(differences) <= BOUND


@pytest.mark.parametrize("name", ["keller_ranks", "qkan_ranks"])
def test_a_missing_ranks_momenta_are_not_lost_silently(name: str) -> None:
    fixture = load(name)
    given = arguments(name, fixture)
    with pytest.raises(ConversionError, match="give all ranks' files") as raised:
        convert_state_dict(fixture["state_dicts"][:1], **given)
    assert raised.value.report is not None
    assert not raised.value.report.complete
    state_dict, report = convert_state_dict(fixture["state_dicts"][:1], **given, allow_partial=True)
    assert not report.complete
    assert largest(go_on(fixture, state_dict)) > BOUND


def test_files_of_other_steps_or_groups_are_not_put_together() -> None:
    fixture = load("qkan_ranks")
    first, second = fixture["state_dicts"]
    given = arguments("qkan_ranks", fixture)
    index = fixture["names"].index("bias")  # every rank has it
    second["state"][index]["exp_avg"][0] += 1
    with pytest.raises(ConversionError, match="another state of parameter"):
        convert_state_dict([first, second], **given)
    second["param_groups"][0]["lr"] = 1.0
    with pytest.raises(ConversionError, match="other groups than the first"):
        convert_state_dict([first, second], **given)


def test_qkans_frozen_factor_wins_over_the_option() -> None:
    fixture = load("qkan")
    fixture["state_dicts"][0]["param_groups"][0]["match_adamw_rms"] = False
    state_dict, _ = convert_state_dict(fixture["state_dicts"], **arguments("qkan", fixture))
    assert largest(go_on(fixture, state_dict)) <= BOUND


def test_muoniums_missing_keys_are_what_muonium_fills_in() -> None:
    fixture = load("muonium_01")
    (group, *_) = fixture["state_dicts"][0]["param_groups"]
    for key in ("nesterov", "ns_steps", "orthogonalization_strategy", "use_cautious_wd"):
        del group[key]
    state_dict, _ = convert_state_dict(fixture["state_dicts"], **arguments("muonium_01", fixture))
    assert largest(go_on(fixture, state_dict)) <= BOUND


def test_flattened_momenta_get_the_parameters_shape() -> None:
    fixture = load("muonium")
    index = fixture["names"].index("conv")
    saved = fixture["state_dicts"][0]["state"][index]["momentum_buffer"]
    assert saved.shape == (4, 12)
    given = arguments("muonium", fixture)
    state_dict, report = convert_state_dict(fixture["state_dicts"], **given)
    assert {group["lr"] for group in state_dict["param_groups"]} == {0.02}  # a float32 tensor there
    assert state_dict["state"][index]["momentum_buffer"].shape == (4, 2, 2, 3)
    assert "reshaped from (4, 12)" in str(report)
    del given["shapes"]  # nothing but the model knows the shape
    state_dict, report = convert_state_dict(fixture["state_dicts"], **given)
    assert "more than two dims, give a model's state dict" in str(report)
    with pytest.raises(ValueError, match=r"shape \(4, 12\).*for conv, expected \(4, 2, 2, 3\)"):
        go_on(fixture, state_dict)


@pytest.mark.parametrize(
    ("name", "group", "changes", "text"),
    [
        ("timm", 0, {"nesterov": True}, "NAdamW"),
        ("timm", 0, {"algo": "adamuon"}, "algo='adamuon' is not available"),
        ("dion_normuon", 1, {"adjust_lr": "spectral_norm"}, "variance_neuron of split blocks"),
        ("dion", 3, {"cautious_wd": True}, "cautious_wd of an AdamW group"),
        ("dion", 0, {"algorithm": "lion"}, "'lion' is not available"),
        ("pytorch_optimizer", 0, {"weight_decouple": False}, "decoupled decay only"),
        ("pytorch_optimizer", 0, {"cautious": True}, "masks whole updates"),
        ("muonium", 0, {"algorithm": "mine"}, "'mine' is not registered"),
        ("neuralops", 1, {"optimizer": "lion"}, "leaves groups with optimizer='lion' untrained"),
    ],
)
def test_what_libmuon_does_not_have_is_refused(
    name: str, group: int, changes: dict[str, Any], text: str
) -> None:
    fixture = load(name)
    fixture["state_dicts"][0]["param_groups"][group] |= changes
    given = arguments(name, fixture)
    with pytest.raises(ConversionError, match=text):
        convert_state_dict(fixture["state_dicts"], **given)
    state_dict, report = convert_state_dict(fixture["state_dicts"], **given, allow_partial=True)
    assert text in str(report)
    go_on(fixture, state_dict)  # it loads and steps all the same


@pytest.mark.parametrize("name", ["normuon", "dion"])
def test_row_statistics_of_single_kernels_are_refused(name: str) -> None:
    group: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "params": [0]}
    if name == "normuon":
        group |= {"momentum": 0.9, "beta2": 0.9}
        keys = ("momentum_buffer", "second_momentum_buffer")
    else:
        group |= {"mu": 0.9, "beta1": 0.9, "beta2": 0.9, "algorithm": "normuon", "epsilon": 1e-8}
        group |= {"flatten": True}
        keys = ("momentum", "variance_neuron")
    saved = dict(zip(keys, (torch.randn(4, 2, 3, 3), torch.rand(4, 2, 3, 1)), strict=True))
    state_dict = {"state": {0: saved}, "param_groups": [group]}
    with pytest.raises(ConversionError, match=f"{keys[1]} is of single kernels"):
        convert_state_dict(state_dict)
    converted, _ = convert_state_dict(state_dict, allow_partial=True)
    optimizer = build_optimizer(converted, [nn.Parameter(torch.randn(4, 2, 3, 3))])
    (state,) = optimizer.state.values()
    assert torch.equal(state["momentum_buffer"], saved[keys[0]])
    assert state["variance_neuron"].shape == (4, 1)
    assert not state["variance_neuron"].any()


def test_unknown_state_is_refused_and_left_out() -> None:
    fixture = load("keller")
    index = fixture["names"].index("a")
    fixture["state_dicts"][0]["state"][index]["preconditioner"] = torch.ones(4, 4)
    given = arguments("keller", fixture)
    with pytest.raises(ConversionError, match="a: preconditioner of its state is not known"):
        convert_state_dict(fixture["state_dicts"], **given)
    state_dict, _ = convert_state_dict(fixture["state_dicts"], **given, allow_partial=True)
    assert largest(go_on(fixture, state_dict)) <= BOUND


def test_overrides_replace_options_of_matrices_and_are_checked() -> None:
    fixture = load("keller")
    given = arguments("keller", fixture)
    state_dict, _ = convert_state_dict(fixture["state_dicts"], **given, overrides={"ns_steps": 6})
    steps = {g["algorithm"]: g["ns_steps"] for g in state_dict["param_groups"]}
    assert steps["muon"] == 6
    assert largest(go_on(fixture, state_dict)) > BOUND
    with pytest.raises(ValueError, match="did you mean 'ns_steps'"):
        convert_state_dict(fixture["state_dicts"], **given, overrides={"ns_step": 6})


def test_scheduler_bookkeeping_is_kept_and_scaled_with_lr() -> None:
    fixture = load("timm")
    fixture["state_dicts"][0]["param_groups"][0] |= {"initial_lr": 0.04, "purpose": "body"}
    state_dict, _ = convert_state_dict(fixture["state_dicts"], **arguments("timm", fixture))
    seen = {g["algorithm"]: g for g in state_dict["param_groups"] if g.get("purpose") == "body"}
    assert seen["muon"]["initial_lr"] == 0.04
    assert (seen["adamw"]["lr"], seen["adamw"]["initial_lr"]) == (0.01, 0.02)
