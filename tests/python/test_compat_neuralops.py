"""The neuralops preset: names, defaults, golden results, and what it corrects."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import golden
import pytest
import torch
from libmuon.compat import neuralops
from reference import exact_orthogonalize
from torch import Tensor, nn

KELLER = [(3.4445, -4.775, 2.0315)] * 5


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    p = torch.randn(shape, dtype=dtype).requires_grad_()
    p.grad = torch.randn(shape, dtype=dtype)
    return p


CASES = [c for c in golden.cases("neuralops_qkan_adamw") if c.name.startswith("neuralops/")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_cases_through_the_preset(case: golden.Case) -> None:
    params = {k: torch.nn.Parameter(v.clone()) for k, v in case.inputs["params"].items()}
    groups: list[dict[str, Any]] = []
    for kind in ("muon", "adamw"):
        names = [name for name, route in case.options["route"].items() if route == kind]
        if not names:
            continue
        options = case.options[kind]
        keys = (
            ("lr", "momentum", "weight_decay") if kind == "muon" else ("lr", "weight_decay", "eps")
        )
        group = {key: options[key] for key in keys}
        if kind == "adamw":
            group["betas"] = tuple(options["betas"])
        groups.append({"params": [params[name] for name in names], "optimizer": kind, **group})
    dtype = golden.PRECISIONS[case.precision]
    if len(groups) == 1:
        (only,) = groups
        del only["optimizer"]
        opt = neuralops.Muon(only.pop("params"), **only, state_dtype=dtype)
    else:
        opt = neuralops.MuonAdamW(groups, state_dtype=dtype)
    for grads, expected in zip(case.inputs["grads"], case.expected["steps"], strict=True):
        for name, p in params.items():
            p.grad = None if grads[name] is None else grads[name].clone()
        opt.step()
        for name, p in params.items():
            case.check(p.detach(), expected["params"][name], "params", name)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (neuralops.zeropower_via_newtonschulz5, {"steps": 5, "eps": 1e-7}),
        (
            neuralops.Muon,
            {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01, "ns_steps": 5},
        ),
        (neuralops.MuonAdamW, {}),
        (
            neuralops.create_muon_adamw_optimizer,
            {
                "lr_muon": 0.02,
                "lr_adam": 5e-5,
                "weight_decay": 0.01,
                "momentum": 0.95,
                "ns_steps": 5,
            },
        ),
    ],
)
def test_row_0_2_arguments_in_order(function: Any, arguments: dict[str, Any]) -> None:
    given = inspect.signature(function).parameters.values()
    positional = {v.name: v.default for v in given if v.kind is v.POSITIONAL_OR_KEYWORD}
    assert list(positional.items())[1:] == list(arguments.items())


def test_row_0_2_defaults_of_the_two_kinds_of_groups() -> None:
    opt = neuralops.MuonAdamW(
        [
            {"params": [param(3, 3)], "optimizer": "muon"},
            {"params": [param(3)], "optimizer": "adamw"},
        ]
    )
    muon, adamw = opt.param_groups
    wanted = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01, "ns_steps": 5, "nesterov": False}
    assert {key: muon[key] for key in wanted} == wanted
    wanted = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    assert {key: adamw[key] for key in wanted} == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 3, 5)])
def test_n5_zeropower_keeps_the_dtype_and_takes_batches(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(dtype)
    got = neuralops.zeropower_via_newtonschulz5(x)
    assert got.dtype == dtype
    want = exact_orthogonalize(x, KELLER, "add")
    unit = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=unit)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 2**-24), ("bfloat16", 0.05)])
def test_n5_the_precision_is_an_option_and_not_the_devices(dtype: str, bound: float) -> None:
    x = torch.randn(90, 80)
    exact = exact_orthogonalize(x, KELLER, "add")
    got = neuralops.zeropower_via_newtonschulz5(x, compute_dtype=dtype)
    assert got.dtype == torch.float32
    assert (got.double() - exact).abs().max().item() < bound
    opt = neuralops.Muon([param(3, 3)], compute_dtype=dtype)
    assert opt.param_groups[0]["compute_dtype"] == dtype


def test_row_0_2_zeropower_steps_eps_and_wrong_input() -> None:
    x = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    torch.testing.assert_close(neuralops.zeropower_via_newtonschulz5(x, 0), x / 5)
    torch.testing.assert_close(neuralops.zeropower_via_newtonschulz5(x, 0, eps=5.0), x / 10)
    assert torch.equal(neuralops.zeropower_via_newtonschulz5(0 * x), 0 * x)
    with pytest.raises(ValueError, match="ns_steps should be >= 0 but is: -1"):
        neuralops.zeropower_via_newtonschulz5(x, -1)
    with pytest.raises(ValueError, match=r"rows, cols\] but has shape \(3,\)"):
        neuralops.zeropower_via_newtonschulz5(torch.ones(3))
    with pytest.raises(TypeError, match="G should be a tensor but is: list"):
        neuralops.zeropower_via_newtonschulz5([[1.0]])  # type: ignore[arg-type]


def test_n7_matrices_of_a_shape_are_one_batch_with_the_same_bits() -> None:
    results = []
    for options in ({}, {"foreach": False}, {"batch_size": 2}):
        torch.manual_seed(0)
        params = [param(6, 5) for _ in range(5)]
        opt = neuralops.MuonAdamW([{"params": params, "optimizer": "muon", **options}])
        opt.step()
        results.append(torch.stack(params).detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_n2_an_unknown_optimizer_is_refused_and_a_missing_one() -> None:
    with pytest.raises(
        ValueError, match="optimizer should be one of 'muon', 'adamw' but is: 'sgd'"
    ):
        neuralops.MuonAdamW([{"params": [param(3, 3)], "optimizer": "sgd"}])
    with pytest.raises(ValueError, match="each parameter group needs 'optimizer'"):
        neuralops.MuonAdamW([{"params": [param(3, 3)]}])
    with pytest.raises(TypeError, match="should be a dict but is: Tensor"):
        neuralops.MuonAdamW([param(3, 3)])  # type: ignore[list-item]
    for wrong in (nn.Linear(3, 3), param(3, 3), {"params": [param(3, 3)], "optimizer": "muon"}):
        with pytest.raises(TypeError, match="param_groups should be a list of dicts but is"):
            neuralops.MuonAdamW(wrong)  # type: ignore[arg-type]


def test_row_0_2_a_whole_model_goes_to_the_factory() -> None:
    with pytest.raises(TypeError, match="is a Linear; create_muon_adamw_optimizer takes"):
        neuralops.Muon(nn.Linear(3, 3))


def test_row_0_2_step_returns_the_loss_and_groups_survive_a_load() -> None:
    groups = [
        {"params": [param(3, 3)], "optimizer": "muon"},
        {"params": [param(3)], "optimizer": "adamw"},
    ]
    opt = neuralops.MuonAdamW(groups)
    assert opt.step(lambda: 7.0) == 7.0
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert [g["optimizer"] for g in opt.param_groups] == ["muon", "adamw"]
    twin = copy.deepcopy(opt)
    twin.add_param_group({"params": [param(3)], "optimizer": "adamw"})
    assert twin.param_groups[2]["lr"] == 5e-5


def test_n3_nesterov_is_an_option() -> None:
    results = []
    for options in ({}, {"nesterov": False}, {"nesterov": True}):
        torch.manual_seed(0)
        p = param(4, 4)
        opt = neuralops.Muon([p], **options)
        for _ in range(2):
            opt.step()
            p.grad = torch.randn(4, 4)
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_n4_a_bfloat16_heavy_ball_momentum_does_not_saturate() -> None:
    p = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    with pytest.warns(UserWarning, match="bfloat16 parameters are rounded"):
        opt = neuralops.Muon([p], lr=0.0)
    for _ in range(400):
        p.grad = torch.ones_like(p)
        opt.step()
    momentum = opt.state[p]["momentum_buffer"]
    assert momentum.dtype == torch.float32
    torch.testing.assert_close(momentum, torch.full((2, 2), 20.0), rtol=1e-5, atol=0)


def test_n4_the_momentum_is_float32_and_moments_follow_the_gradient() -> None:
    matrix, vector = param(3, 3, dtype=torch.bfloat16), param(3, dtype=torch.bfloat16)
    groups = [
        {"params": [matrix], "optimizer": "muon"},
        {"params": [vector], "optimizer": "adamw"},
    ]
    for options, wanted in (({}, torch.float32), ({"state_dtype": None}, torch.bfloat16)):
        with pytest.warns(UserWarning, match="bfloat16 parameters are rounded"):
            opt = neuralops.MuonAdamW(groups, **options)
        opt.step()
        assert opt.state[matrix]["momentum_buffer"].dtype == wanted
        assert opt.state[vector]["exp_avg"].dtype == torch.bfloat16


def test_n6_groups_names_and_the_callers_dicts() -> None:
    group = {"params": [("w", param(3, 3))], "lr": 0.5}
    before = copy.copy(group)
    opt = neuralops.Muon([group])
    assert group == before
    assert opt.param_groups[0]["param_names"] == ["w"]
    adam = {"params": [param(3)], "optimizer": "adamw"}
    before = copy.copy(adam)
    both = neuralops.MuonAdamW([{"params": [param(3, 3)], "optimizer": "muon"}])
    both.add_param_group(adam)
    assert adam == before
    assert both.param_groups[1]["lr"] == 5e-5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"momentum": 2.0}, "momentum should be <= 1 but is: 2.0"),
        ({"weight_decay": -0.1}, "weight decay should be >= 0 but is: -0.1"),
        ({"ns_steps": -1}, "ns_steps should be >= 0 but is: -1"),
    ],
)
def test_n6_values_are_checked(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        neuralops.Muon([param(3, 3)], **arguments)
    with pytest.raises(ValueError, match=rf"{text}.* \(parameter group 0\)"):
        neuralops.MuonAdamW([{"params": [param(3, 3)], "optimizer": "muon", **arguments}])


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4)])
def test_n6_parameters_that_are_no_matrices_are_refused_at_once(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        neuralops.Muon([param(*shape)])
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        neuralops.MuonAdamW([{"params": [param(*shape)], "optimizer": "muon"}])


def test_n6_sparse_gradients_are_refused_in_both_halves() -> None:
    for kind, shape in (("muon", (3, 3)), ("adamw", (3,))):
        p = param(*shape)
        p.grad = p.grad.to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            neuralops.MuonAdamW([{"params": [p], "optimizer": kind}]).step()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.conv = nn.Conv1d(16, 16, 3)
        self.head = nn.Linear(16, 50, bias=False)


def names_of(opt: torch.optim.Optimizer) -> dict[str, list[str]]:
    return {g["optimizer"]: g["param_names"] for g in opt.param_groups}


def test_n1_the_factory_sends_embeddings_and_heads_to_adamw() -> None:
    assert names_of(neuralops.create_muon_adamw_optimizer(Model())) == {
        "muon": ["body.weight"],
        "adamw": ["embed.weight", "body.bias", "conv.weight", "conv.bias", "head.weight"],
    }
    assert names_of(neuralops.create_muon_adamw_optimizer(Model(), routing="all_2d")) == {
        "muon": ["embed.weight", "body.weight", "head.weight"],
        "adamw": ["body.bias", "conv.weight", "conv.bias"],
    }


def test_row_0_2_the_factory_passes_its_numbers_on() -> None:
    opt = neuralops.create_muon_adamw_optimizer(Model(), 0.1, 0.2, 0.3, 0.4, 6)
    muon, adamw = opt.param_groups
    wanted = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.4, "ns_steps": 6}
    assert {key: muon[key] for key in wanted} == wanted
    assert (adamw["lr"], adamw["weight_decay"]) == (0.2, 0.3)


def test_row_0_2_the_factory_takes_frozen_matrixless_empty_and_wrong_input() -> None:
    model = Model()
    model.body.requires_grad_(False)
    model.frozen = nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False)
    with pytest.warns(UserWarning, match="all 4 go to other algorithms"):
        plain = neuralops.create_muon_adamw_optimizer(model)
    assert type(plain) is torch.optim.AdamW
    assert plain.defaults["lr"] == 5e-5
    assert len(plain.param_groups[0]["params"]) == 4
    with pytest.warns(UserWarning, match="the parameters have no names"):
        only = neuralops.create_muon_adamw_optimizer(iter([param(8, 8), param(3)]))
    assert [len(g["params"]) for g in only.param_groups] == [1, 1]
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        neuralops.create_muon_adamw_optimizer(Model().requires_grad_(False))
    for wrong in (3, param(3, 3), "w"):
        with pytest.raises(TypeError, match="expected a module or an iterable of parameters"):
            neuralops.create_muon_adamw_optimizer(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="entry 0 is a dict; groups go to MuonAdamW"):
        neuralops.create_muon_adamw_optimizer([{"params": [param(3, 3)]}])
    with pytest.raises(ValueError, match="routing should be one of 'auto', 'all_2d'"):
        neuralops.create_muon_adamw_optimizer(Model(), routing="every")


@pytest.mark.parametrize("shapes", [[(8,)], [(8, 8)], [(8, 8), (8,)]])
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"lr_muon": -1.0}, ValueError, "lr_muon should be >= 0 but is: -1.0"),
        ({"lr_muon": float("nan")}, ValueError, "lr_muon should be .* but is: nan"),
        ({"lr_adam": float("nan")}, ValueError, "lr_adam should be .* but is: nan"),
        ({"lr_adam": -1.0}, ValueError, "lr_adam should be >= 0 but is: -1.0"),
        ({"weight_decay": float("inf")}, ValueError, "weight decay should be finite but is: inf"),
        ({"momentum": 2.0}, ValueError, "momentum should be <= 1 but is: 2.0"),
        ({"ns_steps": -1}, ValueError, "ns_steps should be >= 0 but is: -1"),
        ({"ns_steps": 2.5}, TypeError, "ns_steps should be an integer but is: 2.5"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*have no names", "ignore:no parameter is on Muon")
def test_n6_the_factory_checks_its_numbers_whether_or_not_it_uses_them(
    shapes: list[tuple[int, ...]], wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    params = [param(*shape) for shape in shapes]
    neuralops.create_muon_adamw_optimizer(params)
    with pytest.raises(error, match=text):
        neuralops.create_muon_adamw_optimizer(params, **wrong)


def test_n6_sets_and_groups_without_parameters_are_refused() -> None:
    for make in (neuralops.Muon, neuralops.create_muon_adamw_optimizer):
        with pytest.raises(TypeError, match="need to be organized in ordered collections"):
            make({param(3, 3)})
    with pytest.raises(ValueError, match=r"needs 'params', but has: \['lr'\]"):
        neuralops.Muon([{"lr": 0.1}])
    with pytest.raises(ValueError, match=r"needs 'params', but has: \['optimizer'\]"):
        neuralops.MuonAdamW([{"optimizer": "muon"}])


def test_row_0_2_the_warning_of_rounding_points_at_the_caller() -> None:
    def matrix() -> Tensor:
        return param(8, 8, dtype=torch.bfloat16)

    def build() -> None:
        neuralops.Muon([matrix()])
        opt = neuralops.MuonAdamW([{"params": [matrix()], "optimizer": "muon"}])
        opt.add_param_group({"params": [matrix()], "optimizer": "adamw"})
        neuralops.create_muon_adamw_optimizer([("w", matrix())])

    with pytest.warns(UserWarning, match="bfloat16 parameters are rounded") as caught:
        build()
    assert [warning.filename for warning in caught] == [__file__] * 4
