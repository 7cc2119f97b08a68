"""The muonium preset: its names and defaults, its golden results, what it corrects, its base."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import golden
import libmuon
import pytest
import torch
from libmuon.compat import muonium
from reference import exact_orthogonalize
from torch import Tensor

KELLER = [(3.4445, -4.775, 2.0315)] * 5
POLAR = libmuon.schedules()["polar_express"]


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    p = torch.randn(shape, dtype=dtype).requires_grad_()
    p.grad = torch.randn(shape, dtype=dtype)
    return p


CASES = [
    case for case in golden.cases("muonium_muon", "muonium_normuon") if golden.is_supported(case)
]


def preset(case: golden.Case, params: dict[str, Tensor]) -> muonium.Muon:
    """The case as a user of muonium writes it."""
    muon = case.options["muon"]
    ortho = muon["ortho"]
    group: dict[str, Any] = {"params": [(name, params[name]) for name in case.options["route"]]}
    if muon["normuon_beta2"] is not None:
        group |= {"algorithm": "NorMuon", "muon_beta2": muon["normuon_beta2"]}
    if muon["split_sizes"] is not None:
        group["split_sizes"] = muon["split_sizes"]
    if muon["flatten"]:
        group["flatten"] = True
    elif any(p.dim() > 3 for p in params.values()):
        group |= {"rows": -2, "cols": -1}
    if muon["scale"] != "original":
        group["adjust_lr_fn"] = muon["scale"]
    return muonium.Muon(
        [group],
        muon["lr"],
        muon["weight_decay"],
        muon["decay"] == "cautious",
        muon["maximize"],
        muon["momentum"],
        muon["nesterov"],
        len(ortho["coefficients"]),
        ortho["method"],
        decay_lr="adjusted" if muon["decay_lr"] == "lr*scale" else "lr",
        state_dtype=golden.PRECISIONS[case.precision],
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_cases_through_the_preset(case: golden.Case) -> None:
    params = {k: torch.nn.Parameter(v.clone()) for k, v in case.inputs["params"].items()}
    opt = preset(case, params)
    for grads, expected in zip(case.inputs["grads"], case.expected["steps"], strict=True):
        for name, p in params.items():
            p.grad = None if grads[name] is None else grads[name].clone()
        opt.step()
        for name, p in params.items():
            case.check(p.detach(), expected["params"][name], "params", name)


def test_row_0_1_constructor_has_muoniums_arguments_in_order() -> None:
    arguments = inspect.signature(muonium.Muon).parameters
    positional = {k: v.default for k, v in arguments.items() if v.kind is v.POSITIONAL_OR_KEYWORD}
    assert list(positional.items())[1:] == [
        ("lr", 1e-3),
        ("wd", 0.1),
        ("use_cautious_wd", True),
        ("maximize", False),
        ("momentum", 0.95),
        ("nesterov", True),
        ("ns_steps", 5),
        ("orthogonalization_strategy", "polar_express"),
        ("amsgrad", False),
        ("adam_betas", (0.9, 0.95)),
        ("adam_eps", 1e-8),
        ("is_adamw", True),
        ("fused_adam", None),
        ("foreach_adam", None),
        ("foreach", None),
        ("batch_size", None),
    ]


def test_row_0_1_defaults_of_groups() -> None:
    matrix, vector = param(4, 3), param(3)
    opt = muonium.Muon([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}])
    muon, adam = opt.param_groups
    assert (muon["lr"], muon["weight_decay"], muon["momentum"], muon["nesterov"]) == (
        1e-3, 0.1, 0.95, True,
    )  # fmt: skip
    assert (muon["ns_coefficients"], muon["ns_steps"], muon["cautious"]) == (
        "polar_express", 5, True,
    )  # fmt: skip
    assert (adam["lr"], adam["weight_decay"], adam["betas"], adam["eps"], adam["amsgrad"]) == (
        1e-3, 0.1, (0.9, 0.95), 1e-8, False,
    )  # fmt: skip
    assert not adam["cautious"]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("algorithm", ["adam", "adamw"])
def test_row_0_1_adam_groups_equal_torch(algorithm: str, maximize: bool, amsgrad: bool) -> None:
    ours = param(5, 3, dtype=torch.float64)
    theirs = ours.detach().clone().requires_grad_()
    theirs.grad = ours.grad
    opt = muonium.Muon(
        [{"params": [ours], "algorithm": algorithm.upper()}],
        lr=1e-2, wd=0.3, maximize=maximize, amsgrad=amsgrad, is_adamw=False,
    )  # fmt: skip
    torch_class = torch.optim.Adam if algorithm == "adam" else torch.optim.AdamW
    reference = torch_class(
        [theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, amsgrad=amsgrad,
        maximize=maximize,
    )  # fmt: skip
    for _ in range(4):
        opt.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)


def test_m21_decoupling_follows_the_group_alone() -> None:
    groups = [
        {"params": [param(2)], "algorithm": "adamw"},
        {"params": [param(2)], "algorithm": "adamw", "decoupled_weight_decay": False},
        {"params": [param(2)], "algorithm": "adam", "decoupled_weight_decay": True},
    ]
    opt = muonium.Muon(groups, is_adamw=False)
    assert [g["algorithm"] for g in opt.param_groups] == ["adamw", "adam", "adamw"]


def test_m2_gradients_and_m3_later_groups_and_the_callers_dicts() -> None:
    first, second = param(4, 3), param(3, 3)
    group = {"params": [second], "wd": 0.0, "orthogonalization_strategy": "newton_schulz"}
    before = copy.copy(group)
    opt = muonium.Muon([first])
    opt.add_param_group(group)
    assert group == before
    grads = first.grad.clone(), second.grad.clone()
    opt.step()
    assert torch.equal(first.grad, grads[0])
    assert torch.equal(second.grad, grads[1])
    assert opt.param_groups[1]["weight_decay"] == 0.0
    assert opt.param_groups[1]["ns_coefficients"] == "muon"
    assert opt.state[second]["momentum_buffer"].dtype == torch.float32


def test_m4_momentum_of_bfloat16_parameters_stays_float32_after_a_load() -> None:
    p = param(4, 3, dtype=torch.bfloat16)
    opt = muonium.Muon([p])
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    other = muonium.Muon([p])
    other.load_state_dict(state)
    loaded = other.state[p]["momentum_buffer"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, opt.state[p]["momentum_buffer"])


def test_m5_flatten_takes_channels_last_gradients() -> None:
    ours = param(4, 3, 2, 2)
    theirs = ours.detach().clone().requires_grad_()
    theirs.grad = ours.grad.clone()
    ours.grad = ours.grad.to(memory_format=torch.channels_last)
    for p in (ours, theirs):
        muonium.Muon([{"params": [p], "flatten": True}]).step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_m9_decay_is_plain_by_default() -> None:
    """A zero gradient leaves the decay alone; cautious decay would leave that out too."""
    changes = []
    for rule in ("lr", "adjusted"):
        p = torch.ones(16, 4, requires_grad=True)
        p.grad = torch.zeros(16, 4)
        muonium.Muon([p], lr=0.1, wd=0.5, use_cautious_wd=False, decay_lr=rule).step()
        changes.append(1 - p.detach().mean().item())
    assert changes == pytest.approx([0.05, 0.1], rel=1e-5)


def test_m14_4d_parameters_need_a_choice() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 3, 2, 2\) needs a choice: flatten=True"):
        muonium.Muon([param(3, 3), param(4, 3, 2, 2)])


def test_row_0_1_3d_parameters_are_batches_beside_matrices() -> None:
    batch, matrix = param(2, 4, 3, dtype=torch.float64), param(4, 3, dtype=torch.float64)
    with torch.no_grad():
        matrix.copy_(batch[1])
    matrix.grad.copy_(batch.grad[1])
    muonium.Muon([batch, matrix], state_dtype=None).step()
    torch.testing.assert_close(batch[1], matrix, rtol=1e-14, atol=1e-14)


def test_m16_misspelt_keys_are_refused_and_metadata_is_kept() -> None:
    opt = muonium.Muon([{"params": [param(3, 3)], "weight_decay": 0.0, "name": "body"}])
    assert opt.param_groups[0]["weight_decay"] == 0.0
    assert opt.param_groups[0]["name"] == "body"
    for wrong, meant in (("use_cautious_w", "use_cautious_wd"), ("momentom", "momentum")):
        with pytest.raises(ValueError, match=f"'{wrong}'.*did you mean '{meant}'"):
            muonium.Muon([{"params": [param(3, 3)], wrong: True}])
    with pytest.raises(ValueError, match=r"wd=0.1 and weight_decay=0.2; give one"):
        muonium.Muon([{"params": [param(3, 3)], "wd": 0.1, "weight_decay": 0.2}])


@pytest.mark.parametrize("steps", [0, 3, 5, 7])
def test_m18_polar_express_of_any_length(steps: int) -> None:
    x = torch.randn(6, 9, dtype=torch.float64)
    rows = (list(POLAR) + [POLAR[-1]] * 2)[:steps]
    want = exact_orthogonalize(x, rows, "add", 1.02)
    got = muonium.zeropower(x, steps, strategy="polar_express")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (batched,) = muonium.foreach_zeropower([x], steps, strategy="polar_express")
    assert torch.equal(batched, got)


def test_m26_named_parameters_tensor_lr_and_empty_columns() -> None:
    lr = torch.tensor(0.1)
    opt = muonium.Muon([("w", param(3, 3)), ("empty", param(3, 0))], lr=lr)
    opt.step()
    assert opt.param_groups[0]["lr"] is lr
    assert opt.param_groups[0]["param_names"] == ["w", "empty"]


def test_row_0_1_closure_value_is_returned() -> None:
    assert muonium.Muon([param(2, 2)]).step(lambda: 3.5) == 3.5


def test_row_0_1_foreach_and_batch_size_change_nothing() -> None:
    results = []
    for options in ({}, {"foreach": True}, {"foreach": False}, {"batch_size": 2}):
        torch.manual_seed(0)
        params = [param(6, 4) for _ in range(5)]
        opt = muonium.Muon(params, **options)
        for _ in range(3):
            opt.step()
        results.append(torch.stack([p.detach() for p in params]))
    for other in results[1:]:
        assert torch.equal(other, results[0])


def test_row_0_1_zeropower_of_zeros_and_of_nothing() -> None:
    assert torch.equal(muonium.zeropower(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
    empty = torch.zeros(0, 3, 4)
    assert muonium.zeropower(empty) is empty


def test_row_0_1_foreach_zeropower_keeps_the_order_of_mixed_shapes() -> None:
    tensors = [torch.randn(3, 4), torch.randn(4, 3), torch.randn(3, 4)]
    for got, x in zip(muonium.foreach_zeropower(tensors), tensors, strict=True):
        assert torch.equal(got, muonium.zeropower(x))
    assert muonium.foreach_zeropower([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (3, 33, 20), (1, 4), (4, 1), (2, 0, 3), (3, 0)])
def test_row_0_1_gram_is_exactly_symmetric(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype)
    got = muonium.gram(x)
    assert torch.equal(got, got.mH)
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    unit = 2**-8 if dtype is torch.bfloat16 else 2**-24
    bound = (shape[-1] + 2) * unit * (wide.abs() @ wide.abs().mT)
    assert ((got.to(wide.dtype) - wide @ wide.mH).abs() <= bound + 1e-30).all()
    out = torch.full_like(got, float("nan"))
    assert muonium.gram_(x, out) is out
    assert torch.equal(out, got)
    with pytest.raises(ValueError, match="expected out of shape"):
        muonium.gram_(x, out.new_empty(1, 1, 1))


def test_row_0_1_split_helpers_scale_blocks() -> None:
    g = torch.randn(4, 2, dtype=torch.float64)
    scales = muonium.split_lr_scales((1, 3), 4, 2)
    assert scales == pytest.approx([1 / 2**0.5, 1.5**0.5 / 2**0.5])
    got = muonium.orthogonalize_single(g, ns_steps=5, strategy="newton_schulz", split_sizes=(1, 3))
    want = torch.cat(
        [
            exact_orthogonalize(b, KELLER, "add") * s
            for b, s in zip(g.split([1, 3]), scales, strict=True)
        ]
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (batched,) = muonium.orthogonalize_batch(
        [g], ns_steps=5, strategy="newton_schulz", split_sizes=(1, 3)
    )
    assert torch.equal(batched, got)


# --- the research base ---


class Baseline(muonium.MuonAlgorithm):
    """muonium's own rule as a user would write it."""

    name = "Test-Baseline"
    options = {"sharpen": 1.0, "stretch": False}
    state_spec = {
        "momentum_buffer": muonium.BufferSpec("grad"),
        "row_mean": muonium.BufferSpec("grad_rows", signed=False),
    }

    def update(self, param, grad, state, lr_ratio, **o):  # type: ignore[no-untyped-def]
        g = -grad if o["maximize"] else grad
        b = state["momentum_buffer"].mul_(o["momentum"]).add_(g)
        q = g + o["momentum"] * b if o["nesterov"] else b
        u = muonium.orthogonalize_single(
            q,
            ns_steps=o["ns_steps"],
            strategy=o["orthogonalization_strategy"],
            split_sizes=o["split_sizes"],
        )
        state["row_mean"].copy_(u.mean(-1, keepdim=True))
        mask = (u * param > 0) if o["cautious_wd"] else 1
        param.sub_(
            o["lr"] * lr_ratio * o["sharpen"] * u + o["lr"] * o["weight_decay"] * mask * param
        )


@pytest.fixture
def baseline() -> type[Baseline]:
    return muonium.register_muon_algorithm(Baseline)


def test_row_0_1_a_registered_algorithm_gets_the_flattened_matrix(
    baseline: type[Baseline],
) -> None:
    matrix = param(4, 12, dtype=torch.float64)
    conv = matrix.detach().reshape(4, 3, 2, 2).to(memory_format=torch.channels_last)
    conv.requires_grad_().grad = matrix.grad.reshape(4, 3, 2, 2)  # type: ignore[union-attr]
    for p, flatten in ((matrix, False), (conv, True)):
        group = {"params": [p], "algorithm": baseline.name, "flatten": flatten}
        opt = muonium.Muon([group], lr=0.1)
        for _ in range(3):
            opt.step()
    torch.testing.assert_close(conv.detach().reshape(4, 12), matrix.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("strategy", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize("cautious", [False, True])
def test_row_0_1_a_registered_algorithm_trains_as_the_core_does(
    baseline: type[Baseline], strategy: Any, cautious: bool
) -> None:
    shapes = ((6, 4), (3, 5), (6, 4), (2, 4, 3))
    ours = [param(*s, dtype=torch.float64) for s in shapes]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        b.grad = a.grad
    options: Any = {
        "lr": 0.05, "use_cautious_wd": cautious, "orthogonalization_strategy": strategy,
        "state_dtype": None,
    }  # fmt: skip
    opt = muonium.Muon([{"params": ours, "algorithm": "TEST-baseline"}], **options)
    native = muonium.Muon(theirs, **options)
    for _ in range(3):
        opt.step()
        native.step()
    for a, b in zip(ours, theirs, strict=True):
        # lr and lr_ratio cross as float32 scalars
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert opt.state[ours[0]]["row_mean"].shape == (6, 1)


def test_row_0_1_split_blocks_reach_an_algorithm_as_matrices(baseline: type[Baseline]) -> None:
    p = param(4, 2)
    opt = muonium.Muon(
        [{"params": [p], "algorithm": baseline.name, "split_sizes": (1, 3), "sharpen": 2.0}]
    )
    opt.step()
    assert opt.state[p]["row_mean"].shape == (4, 1)
    assert opt.param_groups[0]["sharpen"] == 2.0
    again = muonium.Muon([{"params": [p], "algorithm": baseline.name, "split_sizes": (1, 3)}])
    again.load_state_dict(opt.state_dict())
    assert torch.equal(again.state[p]["row_mean"], opt.state[p]["row_mean"])


def test_row_0_1_registry_lookups() -> None:
    assert muonium.get_algorithm("NorMuon").options == {"muon_beta2": 0.95}
    assert muonium.get_algorithm("muon").state_spec == {
        "momentum_buffer": muonium.BufferSpec("grad")
    }
    assert {"adam", "adamw", "muon", "normuon"} <= set(muonium.registered_algorithms())
    with pytest.raises(ValueError, match="Unknown algorithm 'nothing'; known: muon, normuon"):
        muonium.get_algorithm("nothing")


def test_m20_reserved_names_are_refused_at_registration() -> None:
    def define(**body: Any) -> Any:
        return type("Wrong", (muonium.MuonAlgorithm,), {"name": "test-wrong", **body})

    for option in ("weight_decay", "cautious_wd", "state", "lr", "wd", "params", "flatten"):
        with pytest.raises(ValueError, match=f"option '{option}' of Wrong is reserved"):
            muonium.register_muon_algorithm(define(options={option: 1.0}))
    for key in ("step", "lr_ratio"):
        with pytest.raises(ValueError, match=f"state '{key}' of Wrong is reserved"):
            muonium.register_muon_algorithm(define(state_spec={key: muonium.BufferSpec("grad")}))
    for taken in ("adam", "Muon"):
        with pytest.raises(ValueError, match="is registered already"):
            muonium.register_muon_algorithm(define(name=taken))
    with pytest.raises(TypeError, match="expected a subclass of MuonAlgorithm"):
        muonium.register_muon_algorithm(int)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="like should be 'grad' or 'grad_rows' but is: 'rows'"):
        muonium.BufferSpec("rows")  # type: ignore[arg-type]


# --- errors: table 1.19 ---


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"lr": -1.0}, ValueError, "Learning rate should be >= 0 but is: -1.0"),
        ({"adam_eps": -1.0}, ValueError, "Invalid epsilon: adam_eps should be >= 0"),
        ({"adam_betas": (1.0, 0.9)}, ValueError, "index 0"),
        ({"adam_betas": (0.9, -0.1)}, ValueError, "index 1"),
        ({"wd": -0.1}, ValueError, "weight decay should be >= 0 but is: -0.1"),
        ({"momentum": 1.5}, ValueError, "momentum should be <= 1 but is: 1.5"),
        ({"ns_steps": -3}, ValueError, "ns_steps should be >= 0 but is: -3"),
        ({"batch_size": -2}, ValueError, "batch_size should be >= 1 but is: -2"),
        ({"orthogonalization_strategy": "svd"}, ValueError, "one of 'newton_schulz', 'polar_exp"),
    ],
)
def test_row_1_19_values_are_checked_at_construction(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        muonium.Muon([param(3, 3)], **arguments)


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"params": []}, TypeError, "but got dict; put it into a list"),
        ([], ValueError, "empty parameter list"),
        ([{"params": []}], ValueError, "empty parameter list"),
        ([{"lr": 1.0}], ValueError, "needs 'params'"),
        ([{"params": [param(2, 2)], "algorithm": "sgd"}], ValueError, "Unknown algorithm 'sgd'"),
        ([param(3)], ValueError, r"2D\+ parameters, got shape \(3,\)"),
        ([{"params": [param(4, 2)], "split_sizes": (4,)}], ValueError, "at least 2 block sizes"),
        ([{"params": [param(4, 2)], "split_sizes": (0, 4)}], ValueError, "split_sizes should hold"),
        ([{"params": [param(4, 2)], "split_sizes": (1, 2)}], ValueError, "must sum to dim 0"),
        ([{"params": [param(4, 2, 2)], "split_sizes": (1, 3)}], ValueError, "only supported for"),
        ([{"params": [param(4, 2)], "split_sizes": (True, 3)}], TypeError, "should be an integer"),
    ],
)  # fmt: skip
def test_row_1_19_parameters_are_checked_at_construction(
    params: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        muonium.Muon(params)


def test_row_1_19_sparse_gradients_are_refused() -> None:
    p = param(3, 3)
    p.grad = p.grad.to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        muonium.Muon([p]).step()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({param(2, 2)}, "need to be organized in ordered collections"),
        ([{"params": {param(2, 2)}}], "ordered collections.* \\(parameter group 0\\)"),
        (param(2, 2), "an iterable of Tensors or dicts, but got torch.FloatTensor; put it into a"),
        (torch.nn.Linear(2, 2), r"is a Linear; pass its parameters\(\).* to libmuon.Muon"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), "is a Sequential; pass its parameters"),
        ([{"params": [param(2, 2)]}, param(2, 2)], "must be a dict.* .entry 1 of.*not both"),
        ([param(2, 2), {"params": [param(2, 2)]}], "must be a dict.* .entry 0 of.*not both"),
        (3, "an iterable of Tensors or dicts, but got int"),
        ([{"params": 3}], r"tensors or \(name, tensor\) pairs but is: int \(parameter group 0\)"),
        ([("w", 3)], "one of the params is tuple: entry 0 of 'params'"),
        ([("w", param(2, 2), 1)], "one of the params is tuple: entry 0 of 'params'"),
    ],
)  # fmt: skip
def test_row_1_19_what_is_no_list_of_parameters_is_refused(params: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        muonium.Muon(params)


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((3,), {}, r"2D\+ parameters, got shape \(3,\) \(body.w\); put it into"),
        ((2, 2, 2), {"split_sizes": (1, 1)}, r"2D parameters, got shape \(2, 2, 2\) \(body.w\)"),
        ((2, 2, 2, 2), {}, r"body.w of shape \(2, 2, 2, 2\) needs a choice"),
        ((3,), {"algorithm": Baseline.name}, r"2D\+ parameters.* \(body.w\) \(parameter group 1"),
    ],
)
def test_row_1_19_parameters_that_are_no_matrices_are_named(
    baseline: type[Baseline], shape: tuple[int, ...], options: dict[str, Any], text: str
) -> None:
    groups = [
        {"params": [("first", param(2, 2))]},
        {"params": [("body.v", param(2, 2)), ("body.w", param(*shape))], **options},
    ]
    with pytest.raises(ValueError, match=text):
        muonium.Muon(groups)
    with pytest.raises(ValueError, match=r"got shape \(3,\) \(parameter 1\)"):
        muonium.Muon([param(2, 2), param(3)])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"use_cautious_wd": "no"}, TypeError, "use_cautious_wd should be True or False but is"),
        ({"wd": "high"}, TypeError, "wd should be a number but is: 'high'"),
        ({"wd": torch.ones(2)}, ValueError, "Tensor wd must be 1-element"),
    ],
)
def test_row_1_19_errors_name_the_option_as_it_was_written(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        muonium.Muon([param(2, 2)], **options)
    with pytest.raises(error, match=rf"{text}.* \(parameter group 0\)"):
        muonium.Muon([{"params": [param(2, 2)], **options}])
    opt = muonium.Muon([param(2, 2)])
    with pytest.raises(error, match=rf"{text}.* \(parameter group 1\)"):
        opt.add_param_group({"params": [param(2, 2)], **options})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("name", ["fused_adam", "foreach_adam"])
def test_row_1_19_values_for_adam_groups_are_checked_without_one(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} should be True or False but is: 'no'"):
        muonium.Muon([param(2, 2)], **{name: "no"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"wd": torch.tensor([0.1, 0.2]), "weight_decay": torch.tensor([0.1, 0.2, 0.3])},
            r"Tensor wd must be 1-element, got shape \(2,\)",
        ),
        (
            {"wd": torch.tensor(0.5), "weight_decay": torch.tensor([0.1, 0.2])},
            r"Tensor weight_decay must be 1-element, got shape \(2,\)",
        ),
        (
            {"wd": torch.tensor(0.5), "weight_decay": torch.tensor([0.25])},
            r"says wd=tensor\(0.5000\) and weight_decay=tensor\(\[0.2500\]\); give one",
        ),
        (
            {"orthogonalization_strategy": "newton_schulz", "ns_coefficients": "polar_express"},
            "says orthogonalization_strategy='newton_schulz' and ns_coefficients='polar_express'",
        ),
    ],
)
def test_m16_two_names_of_one_option_must_agree(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        muonium.Muon([{"params": [param(2, 2)], **options}])
    equal = {"wd": torch.tensor(0.5), "weight_decay": torch.tensor([0.5], dtype=torch.float64)}
    (group,) = muonium.Muon([{"params": [param(2, 2)], **equal}]).param_groups
    assert group["weight_decay"] is equal["weight_decay"]


@pytest.mark.parametrize(
    ("attributes", "error", "text"),
    [
        ({"options": None}, TypeError, "Wrong.options should be a mapping by name but is: None"),
        ({"options": ["a"]}, TypeError, "Wrong.options should be a mapping by name"),
        ({"options": {"a.b": 1.0}}, ValueError, "names in Wrong.options .* 'a.b'"),
        ({"state_spec": None}, TypeError, "Wrong.state_spec should be a mapping by name"),
        ({"state_spec": ["b"]}, TypeError, r"Wrong.state_spec should be a mapping .* \(list\)"),
        ({"state_spec": {1: 2}}, TypeError, "names in Wrong.state_spec should be strings"),
        ({"state_spec": {"b": "grad"}}, TypeError, "names to BufferSpec, but holds: 'b': 'grad'"),
    ],
)
def test_m20_declarations_of_a_wrong_type_are_refused(
    attributes: dict[str, Any], error: type[Exception], text: str
) -> None:
    wrong: Any = type("Wrong", (muonium.MuonAlgorithm,), {"name": "test-wrong", **attributes})
    with pytest.raises(error, match=text):
        muonium.register_muon_algorithm(wrong)
    assert "test-wrong" not in muonium.registered_algorithms()


def test_row_0_1_the_warning_of_rounding_points_at_the_caller() -> None:
    def build() -> None:
        opt = muonium.Muon([param(3, 3, dtype=torch.bfloat16)])
        opt.add_param_group({"params": [param(3, 3, dtype=torch.bfloat16)]})

    with pytest.warns(UserWarning, match="bfloat16 parameters are rounded") as caught:
        build()
    assert [warning.filename for warning in caught] == [__file__, __file__]
