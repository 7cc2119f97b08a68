"""State dicts for torch.optim.Muon, with those for AdamW and Adam beside it."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import libmuon
import pytest
import torch
from converted import arguments, go_on, largest, load
from libmuon.convert import ConversionError, convert_state_dict
from torch import Tensor, nn

# Two float32 runs of three steps, as in test_convert.
BOUND = 1e-5
# torch.optim.Muon iterates in bfloat16, 8 bits: its update differs from a float32 one by a few
# percent in norm and by less than 0.05 in an entry below 1, for three steps of lr * factor.
BFLOAT16 = 0.05


def optimizers(
    state_dict: dict[str, Any], params: dict[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """torch's own optimizers, built by the names of the groups, with the state dict loaded."""
    made: list[torch.optim.Optimizer] = []
    for kind, part in (
        (torch.optim.Muon, state_dict),
        (torch.optim.AdamW, state_dict.get("adamw")),
        (torch.optim.Adam, state_dict.get("adam")),
    ):
        if part is None or not part["param_groups"]:
            continue
        groups = [
            {"params": [(name, params[name]) for name in group["param_names"]]}
            for group in part["param_groups"]
        ]
        optimizer = kind(groups)
        optimizer.load_state_dict(deepcopy(part))  # torch would train in the same tensors
        made.append(optimizer)
    return made


def torch_run(fixture: dict[str, Any], state_dict: dict[str, Any]) -> dict[str, Tensor]:
    params = {name: nn.Parameter(p.clone()) for name, p in fixture["weights"].items()}
    made = optimizers(state_dict, params)
    for gradients in fixture["gradients"]:
        for name, p in params.items():
            p.grad = gradients[name].clone()
        for optimizer in made:
            optimizer.step()
    return {name: p.detach() - fixture["after"][name] for name, p in params.items()}


@pytest.mark.parametrize(
    "name", ["torch_muon", "keller_ranks", "moonlight", "neuralops", "neuralops_muon", "qkan"]
)
def test_torch_goes_on_from_what_it_can_express(name: str) -> None:
    fixture = load(name)
    given = arguments(name, fixture)
    state_dict, report = convert_state_dict(fixture["state_dicts"], to="torch", **given)
    assert report.complete
    for key, difference in torch_run(fixture, state_dict).items():
        groups = state_dict["param_groups"]
        lrs = [group["lr"] for group in groups if key in group["param_names"]]
        if not lrs:  # AdamW's, in float32
            assert difference.abs().max() <= BOUND
            continue
        rows, cols = difference.shape
        factor = max(math.sqrt(max(1.0, rows / cols)), 0.2 * math.sqrt(max(rows, cols)))
        assert difference.abs().max() <= 3 * lrs[0] * factor * BFLOAT16
    # The same groups in libmuon iterate in float32, where the factor of the momentum shows.
    matrices = {key: p for key, p in fixture["weights"].items() if key in names_of(state_dict)}
    reduced = {**fixture, "weights": matrices}
    with_algorithm = {
        **state_dict,
        "param_groups": [{**group, "algorithm": "muon"} for group in state_dict["param_groups"]],
    }
    assert largest(go_on(reduced, with_algorithm)) <= BOUND


def names_of(state_dict: dict[str, Any]) -> set[str]:
    return {name for group in state_dict["param_groups"] for name in group["param_names"]}


def run(opt: torch.optim.Optimizer, params: list[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "unscaled"},
        {"adjust_lr_fn": "match_rms_adamw", "lr_multiplier": 0.25},
        {"decay_lr": "adjusted", "momentum_form": "heavy_ball"},
        {"adjust_lr_fn": "unscaled", "decay_lr": "adjusted", "lr_multiplier": 3.0},
        {"adjust_lr_fn": "spectral_unclamped"},
    ],
)
def test_learning_rates_and_decay_are_rewritten_exactly(options: dict[str, Any]) -> None:
    shapes = ((6, 4), (3, 5), (9, 4))
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    names = ["a", "b", "c"]
    named = list(zip(names, params, strict=True))
    opt = libmuon.Muon(named, lr=0.02, weight_decay=0.3, momentum=0.9, **options)
    opt.param_groups[0]["initial_lr"] = 0.04
    run(opt, params, 1)
    state_dict, _ = convert_state_dict(opt.state_dict(), to="torch")
    other = {name: nn.Parameter(p.detach().clone()) for name, p in named}
    # torch's options in libmuon, which iterates in float32 as `opt` does.
    groups = [
        {"params": [(name, other[name]) for name in group["param_names"]], "algorithm": "muon"}
        for group in state_dict["param_groups"]
    ]
    continued = libmuon.Muon(groups)
    continued.load_state_dict(state_dict)
    for mine, theirs in zip(
        run(continued, list(other.values()), 2), run(opt, params, 2), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for group in state_dict["param_groups"]:
        assert group["initial_lr"] == pytest.approx(2 * group["lr"])
        assert group["adjust_lr_fn"] in (None, "original", "match_rms_adamw", "spectral_unclamped")
    assert optimizers(state_dict, other)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": "normuon"}, "has no 'normuon'"),
        ({"cautious": True}, "has no cautious=True"),
        ({"maximize": True}, "has no maximize=True"),
        ({"split_sizes": (2, 4)}, r"has no split_sizes=\(2, 4\)"),
        ({"ns_coefficients": "polar_express"}, "has one triple of coefficients"),
        ({"norm_factor": 1.01}, "has no factor on the norm"),
    ],
)
def test_what_torch_cannot_express_is_refused(options: dict[str, Any], text: str) -> None:
    p = nn.Parameter(torch.randn(6, 4))
    opt = libmuon.Muon([("w", p)], **options)
    run(opt, [p], 1)
    with pytest.raises(ConversionError, match=text):
        convert_state_dict(opt.state_dict(), to="torch")
    state_dict, _ = convert_state_dict(opt.state_dict(), to="torch", allow_partial=True)
    (made,) = optimizers(state_dict, {"w": p})
    assert torch.equal(made.state[p]["momentum_buffer"], opt.state[p]["momentum_buffer"])
    assert len(made.state[p]) == 1
    made.step()


@pytest.mark.parametrize("state_dtype", ["int8", "int4", "fp8"])
def test_codes_become_the_numbers_that_they_stand_for(state_dtype: str) -> None:
    named = {"w": nn.Parameter(torch.randn(6, 131)), "b": nn.Parameter(torch.randn(131))}
    groups: list[dict[str, Any]] = [
        {"params": [("w", named["w"])]},
        {"params": [("b", named["b"])], "algorithm": "adamw", "lr": 1e-3},
    ]
    coded = libmuon.Muon([{**group, "state_dtype": state_dtype} for group in groups])
    run(coded, list(named.values()), 1)
    plain = libmuon.Muon(groups)
    plain.load_state_dict(coded.state_dict())
    state_dict, report = convert_state_dict(coded.state_dict(), to="torch", names=named)
    assert "left out" not in str(report)
    made = optimizers(state_dict, named)
    for key, p in named.items():
        (mine,) = (optimizer.state[p] for optimizer in made if p in optimizer.state)
        assert mine.keys() == plain.state[p].keys()
        for name, value in plain.state[p].items():
            assert torch.equal(mine[name], value), (key, name)


def test_packed_codes_need_the_models_shapes() -> None:
    p = nn.Parameter(torch.randn(6, 131))
    opt = libmuon.Muon([("w", p)], state_dtype="int4")
    run(opt, [p], 1)
    with pytest.raises(ConversionError, match="packed codes of an unknown shape"):
        convert_state_dict(opt.state_dict(), to="torch")


def test_the_bits_of_a_split_master_are_not_lost_silently() -> None:
    p = nn.Parameter(torch.randn(6, 4).bfloat16())
    opt = libmuon.Muon([("w", p)], master="split")
    run(opt, [p], 1)
    with pytest.raises(ConversionError, match="cannot keep the bits of master='split'"):
        convert_state_dict(opt.state_dict(), to="torch")


def test_parameters_of_more_dims_are_refused_and_left_out() -> None:
    fixture = load("keller")
    given = arguments("keller", fixture)
    with pytest.raises(ConversionError, match=r"conv: .*2D parameters only, not \(4, 2, 3, 2\)"):
        convert_state_dict(fixture["state_dicts"], to="torch", **given)
    state_dict, report = convert_state_dict(
        fixture["state_dicts"], to="torch", allow_partial=True, **given
    )
    assert names_of(state_dict) == {"a", "b"}
    (entry,) = (entry for entry in report.entries if entry.group is None)
    assert entry.name == "conv"


def test_adam_and_adamw_stand_beside_muon() -> None:
    fixture = load("pytorch_optimizer")
    given = arguments("pytorch_optimizer", fixture)
    state_dict, _ = convert_state_dict(
        fixture["state_dicts"], to="torch", allow_partial=True, **given
    )
    assert names_of(state_dict["adamw"]) == {"bias"}
    assert names_of(state_dict["adam"]) == {"gain"}
    differences = torch_run(fixture, state_dict)
    assert largest({name: differences[name] for name in ("bias", "gain")}) <= BOUND


def test_a_momentum_of_one_has_no_average() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    opt = libmuon.Muon([("w", p)], momentum=1.0, momentum_form="heavy_ball")
    run(opt, [p], 1)
    with pytest.raises(ConversionError, match="heavy_ball momentum of 1 has no ema form"):
        convert_state_dict(opt.state_dict(), to="torch")
