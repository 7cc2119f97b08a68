"""The QKAN preset: names, defaults, golden results, routing, and what it corrects."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import golden
import pytest
import torch
import torch.distributed as dist
from libmuon.compat import qkan
from reference import exact_orthogonalize
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

KELLER = [(3.4445, -4.775, 2.0315)] * 5


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    p = torch.randn(shape, dtype=dtype).requires_grad_()
    p.grad = torch.randn(shape, dtype=dtype)
    return p


CASES = [c for c in golden.cases("neuralops_qkan_adamw") if c.name.startswith("qkan/")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_cases_through_the_preset(case: golden.Case) -> None:
    params = {k: torch.nn.Parameter(v.clone()) for k, v in case.inputs["params"].items()}
    muon = case.options["muon"]
    adamw = case.options.get("adamw")
    options = {
        "lr": muon["lr"],
        "momentum": muon["momentum"],
        "nesterov": muon["nesterov"],
        "weight_decay": muon["weight_decay"],
        "match_adamw_rms": muon["scale"] == "match_rms_adamw",
    }
    if adamw is not None:
        options |= {
            "adamw_lr": adamw["lr"],
            "adamw_betas": tuple(adamw["betas"]),
            "adamw_eps": adamw["eps"],
            "adamw_weight_decay": adamw["weight_decay"],
        }
    route = case.options["route"]
    opt = qkan.QKANMuon(
        params.items(), muon_filter=lambda name, shape: route[name] == "muon", **options
    )
    for grads, expected in zip(case.inputs["grads"], case.expected["steps"], strict=True):
        for name, p in params.items():
            p.grad = None if grads[name] is None else grads[name].clone()
        opt.step()
        for name, p in params.items():
            case.check(p.detach(), expected["params"][name], "params", name)


def test_row_0_3_arguments_in_order() -> None:
    given = inspect.signature(qkan.QKANMuon).parameters.values()
    positional = {v.name: v.default for v in given if v.kind is v.POSITIONAL_OR_KEYWORD}
    assert list(positional.items())[1:] == [
        ("lr", 0.02),
        ("adamw_lr", 3e-3),
        ("momentum", 0.95),
        ("nesterov", True),
        ("ns_steps", 5),
        ("weight_decay", 0.0),
        ("match_adamw_rms", True),
        ("adamw_betas", (0.9, 0.999)),
        ("adamw_eps", 1e-8),
        ("muon_filter", None),
        ("rank", None),
        ("world_size", None),
        ("process_group", None),
    ]


def test_q1_schedulers_move_both_halves() -> None:
    opt = qkan.QKANMuon([("w", param(3, 3)), ("b", param(3))])
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    assert [g["lr"] for g in opt.param_groups] == [0.02, 3e-3]
    opt.step()
    scheduler.step()
    assert [g["lr"] for g in opt.param_groups] == [0.01, 1.5e-3]


def test_q2_unnamed_matrices_are_used_but_not_silently() -> None:
    with pytest.warns(UserWarning, match=r"2 2D parameters have no name.*\(3, 3\)") as caught:
        opt = qkan.QKANMuon([param(3, 3), param(5, 2), param(4)])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert opt.describe_layout() == [
        ("", (3, 3), "muon"), ("", (5, 2), "muon"), ("", (4,), "adamw"),
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qkan.QKANMuon([param(3, 3)], muon_filter=lambda name, shape: len(shape) == 2)
        qkan.QKANMuon([("w", param(3, 3)), ("b", param(4))])
        qkan.QKANMuon([param(4)])


def test_q2_names_beside_unnamed_parameters_are_kept() -> None:
    with pytest.warns(UserWarning, match="1 2D parameters have no name") as caught:
        opt = qkan.QKANMuon([("w", param(3, 3)), param(4, 4), ("wte.weight", param(5, 3))])
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="1 2D parameters have no name") as caught:
        opt.add_param_group({"params": param(2, 2)})
    assert caught[0].filename == __file__
    assert opt.describe_layout() == [
        ("w", (3, 3), "muon"),
        ("unnamed.1", (4, 4), "muon"),
        ("wte.weight", (5, 3), "adamw"),
        ("unnamed.0", (2, 2), "muon"),
    ]


@pytest.mark.parametrize(
    ("name", "is_muon"),
    [
        ("unmasked_proj.weight", True),
        ("tok_emb.weight", False),
        ("head.weight", False),
        ("patch_embed.weight", True),
        ("layers.0.theta", False),
        ("layers.0.preacts_weight", False),
        ("layers.1.base_weight", False),
        ("layers.1.postact_weights", False),
        ("mask", False),
        ("transformer.wte.weight", False),
        ("wpe.weight", False),
        ("lm_head.weight", False),
        ("theta0", False),
        ("layers.1.base_weights", False),
        ("fc.weight", False),
        ("blocks.0.fc.weight", True),
        ("blocks.0.base.weight", True),
        ("blocks.0.base_linear.weight", True),
        ("blocks.0.weight", True),
        ("", True),
    ],
)
def test_q3_markers_are_words_of_a_name(name: str, is_muon: bool) -> None:
    assert qkan.QKANMuon.is_muon_param(name, (8, 8)) is is_muon
    assert not qkan.QKANMuon.is_muon_param(name, (8,))
    assert not qkan.QKANMuon.is_muon_param(name, (8, 8, 8))


def test_q4_the_scale_follows_the_group() -> None:
    p = param(8, 4, dtype=torch.float64)
    opt = qkan.QKANMuon([("w", p)], lr=1.0, nesterov=False, momentum=0.0)
    changes = []
    for scale in ("match_rms_adamw", "original"):
        opt.param_groups[0]["adjust_lr_fn"] = scale
        before = p.detach().clone()
        opt.step()
        changes.append((p.detach() - before).norm().item())
    assert changes[0] / changes[1] == pytest.approx(0.2 * 8**0.5 / 2**0.5)


def test_q6_routing_is_right_after_a_load_and_a_swap_of_parameters() -> None:
    names = [("w", param(3, 3)), ("emb.weight", param(5, 3)), ("b", param(3))]
    opt = qkan.QKANMuon(names)
    opt.step()
    layout = [("w", (3, 3), "muon"), ("emb.weight", (5, 3), "adamw"), ("b", (3,), "adamw")]
    assert opt.describe_layout() == layout
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.describe_layout() == layout
    live = param(3, 3)
    opt.param_groups[0]["params"][0] = live
    before = live.detach().clone()
    opt.step()
    assert opt.describe_layout() == layout
    assert not torch.equal(live.detach(), before)
    assert names[0][1] not in opt.state


def test_q6_a_copy_routes_as_its_original() -> None:
    opt = qkan.QKANMuon(
        [("w", param(3, 3))], lr=0.5, muon_filter=lambda name, shape: name != "v", adamw_lr=0.25
    )
    twin = copy.deepcopy(opt)
    twin.add_param_group({"params": [("v", param(3, 3)), ("x", param(3, 3))]})
    assert [(name, kind) for name, _, kind in twin.describe_layout()] == [
        ("w", "muon"), ("x", "muon"), ("v", "adamw"),
    ]  # fmt: skip
    assert [g["lr"] for g in twin.param_groups] == [0.5, 0.5, 0.25]


def test_q8_one_of_rank_and_world_size_is_refused_and_many_ranks_are() -> None:
    named = [("w", param(3, 3))]
    qkan.QKANMuon(named, rank=0, world_size=1)
    for wrong in ({"rank": 0}, {"world_size": 1}):
        with pytest.raises(ValueError, match="rank and world_size go together"):
            qkan.QKANMuon(named, **wrong)
    with pytest.raises(ValueError, match=r"rank should be in \[0, 1\] but is: 2"):
        qkan.QKANMuon(named, rank=2, world_size=2)
    with pytest.raises(NotImplementedError, match="2 ranks are not supported in this version"):
        qkan.QKANMuon(named, rank=0, world_size=2)
    with pytest.raises(TypeError, match="process_group should be a ProcessGroup but is: 'gloo'"):
        qkan.QKANMuon(named, process_group="gloo")


@pytest.mark.parametrize("size", [1, 2])
def test_q8_process_groups_are_read_at_construction(size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        named = [("w", param(3, 3))]
        qkan.QKANMuon(named)  # replicas that every rank updates
        qkan.QKANMuon(named, rank=0, world_size=1, process_group=dist.group.WORLD)
        if size == 1:
            qkan.QKANMuon(named, process_group=dist.group.WORLD).step()
            return
        with pytest.raises(NotImplementedError, match="2 ranks are not supported"):
            qkan.QKANMuon(named, process_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_q8_strides_of_a_parameter_change_nothing() -> None:
    dense = param(6, 4)
    strided = dense.detach().t().contiguous().t().requires_grad_()
    strided.grad = dense.grad
    assert not strided.is_contiguous()
    for p in (dense, strided):
        qkan.QKANMuon([("w", p)]).step()
    assert torch.equal(dense, strided)


def test_q9_state_and_iteration_dtypes_are_options() -> None:
    for options, wanted in (({}, torch.bfloat16), ({"state_dtype": "float32"}, torch.float32)):
        p = param(4, 4, dtype=torch.bfloat16)
        with pytest.warns(UserWarning, match="bfloat16 parameters are rounded"):
            opt = qkan.QKANMuon([("w", p)], **options)
        opt.step()
        assert opt.state[p]["momentum_buffer"].dtype == wanted
    start = param(90, 90)
    errors = {}
    for dtype in ("auto", "float64"):
        p = torch.zeros(90, 90, requires_grad=True)
        p.grad = start.grad
        qkan.QKANMuon([("w", p)], lr=1.0, match_adamw_rms=False, compute_dtype=dtype).step()
        # Nesterov's sum is a multiple of the first gradient; a square matrix has the scale 1.
        exact = exact_orthogonalize(start.grad.double(), KELLER, "add")
        errors[dtype] = (p.detach().double() + exact).abs().max().item()
    assert errors["float64"] < 2**-24  # half a unit of entries below 1
    assert errors["float64"] < errors["auto"] < 1e-4


def test_q10_groups_their_names_values_and_decay() -> None:
    group = {
        "params": [("w", param(3, 3)), ("b", param(3))],
        "lr": 0.5,
        "adamw_lr": 0.25,
        "weight_decay": 0.1,
        "adamw_weight_decay": 0.0,
        "adamw_betas": (0.5, 0.6),
        "adamw_eps": 1e-6,
        "match_adamw_rms": False,
        "ns_steps": 3,
        "tag": "body",
    }
    before = copy.copy(group)
    opt = qkan.QKANMuon([group])
    assert group == before
    muon, adamw = opt.param_groups
    wanted = {"lr": 0.5, "weight_decay": 0.1, "ns_steps": 3, "adjust_lr_fn": "original"}
    assert {key: muon[key] for key in wanted} == wanted
    wanted = {"lr": 0.25, "weight_decay": 0.0, "betas": (0.5, 0.6), "eps": 1e-6}
    assert {key: adamw[key] for key in wanted} == wanted
    assert muon["tag"] == adamw["tag"] == "body"
    opt.add_param_group({"params": [("v", param(2, 2)), ("c", param(2))]})
    assert [g["lr"] for g in opt.param_groups[2:]] == [0.02, 3e-3]


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"lr": -1.0}, ValueError, "Learning rate should be >= 0 but is: -1.0"),
        ({"adamw_lr": -1.0}, ValueError, "adamw_lr should be >= 0 but is: -1.0"),
        ({"momentum": 1.0}, ValueError, "momentum should be < 1 but is: 1.0"),
        ({"adamw_betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
        ({"adamw_eps": 0.0}, ValueError, "adamw_eps should be > 0 but is: 0.0"),
        ({"weight_decay": -0.5}, ValueError, "weight decay should be >= 0 but is: -0.5"),
        ({"ns_steps": -3}, ValueError, "ns_steps should be >= 0 but is: -3"),
        ({"match_adamw_rms": "no"}, TypeError, "match_adamw_rms should be True or False"),
        ({"nesterov": "no"}, TypeError, "nesterov should be True or False"),
        ({"adamw_weight_decay": -1.0}, ValueError, "adamw_weight_decay should be >= 0"),
    ],
)
def test_q10_values_are_checked_in_the_constructor_and_in_groups(
    wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        qkan.QKANMuon([("w", param(3, 3)), ("b", param(3))], **wrong)
    opt = qkan.QKANMuon([("w", param(3, 3))])
    with pytest.raises(error, match=text):
        opt.add_param_group({"params": [("v", param(3, 3)), ("c", param(3))], **wrong})
    assert len(opt.param_groups) == 1
    halves = [("w", param(3, 3)), ("b", param(3))]
    with pytest.raises(error, match=rf"{text}.* \(parameter group 1\)"):
        qkan.QKANMuon([{"params": halves}, {"params": [("v", param(3, 3))], **wrong}])


def test_q10_misspelt_options_and_wrong_input_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'match_adamw_rms'"):
        qkan.QKANMuon([{"params": [("w", param(3, 3))], "match_adam_rms": False}])
    for key, value, instead in (
        ("adjust_lr_fn", "original", "match_adamw_rms"),
        ("betas", (0.5, 0.5), "adamw_betas"),
        ("eps", 1e-3, "adamw_eps"),
        ("algorithm", "adamw", "muon_filter"),
    ):
        with pytest.raises(ValueError, match=f"cannot say {key}=.*'{instead}' decides that"):
            qkan.QKANMuon([{"params": [("w", param(3, 3))], key: value}])
    with pytest.raises(ValueError, match="needs 'params'"):
        qkan.QKANMuon([{"lr": 0.1}])
    with pytest.raises(ValueError, match="empty parameter list"):
        qkan.QKANMuon([])
    with pytest.raises(TypeError, match="muon_filter should be callable"):
        qkan.QKANMuon([("w", param(3, 3))], muon_filter="2d")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.nn.Linear(3, 3), r"is a Linear; pass model.named_parameters\(\)"),
        (torch.ones(3, 3), "an iterable of Tensors or dicts, but got torch.FloatTensor; put it"),
        ("w", "an iterable of Tensors or dicts, but got str"),
        ([3], "one of the params is int: entry 0"),
        ([("w", 3)], "one of the params is tuple: entry 0"),
        ([("w", torch.ones(2, 2)), {"params": []}], "param_group must be a dict.* not both"),
        ({torch.ones(2, 2)}, "need to be organized in ordered collections"),
        ([{"params": {torch.ones(2, 2)}}], "need to be organized in ordered collections"),
        ([{"params": 3}], r"pairs but is: int \(parameter group 0\)"),
    ],
)
def test_q10_what_is_no_parameter_is_refused(wrong: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        qkan.QKANMuon(wrong)


def test_row_0_3_step_returns_the_loss_and_refuses_sparse_gradients() -> None:
    opt = qkan.QKANMuon([("w", param(3, 3)), ("b", param(3))])
    assert opt.step(lambda: 7.0) == 7.0
    for shape in ((3, 3), (3,)):
        p = param(*shape)
        p.grad = p.grad.to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            qkan.QKANMuon([("w", p)]).step()


def test_row_0_3_muon_filter_replaces_the_rule() -> None:
    seen = []

    def only_theta(name: str, shape: tuple[int, ...]) -> bool:
        seen.append((name, shape))
        return name == "theta"

    opt = qkan.QKANMuon([("theta", param(3, 3)), ("w", param(3, 3))], muon_filter=only_theta)
    assert seen == [("theta", (3, 3)), ("w", (3, 3))]
    assert opt.describe_layout() == [("theta", (3, 3), "muon"), ("w", (3, 3), "adamw")]


def test_row_0_3_adamw_half_equals_torch() -> None:
    ours, theirs = param(5, dtype=torch.float64), param(5, dtype=torch.float64)
    with torch.no_grad():
        theirs.copy_(ours)
    theirs.grad = ours.grad
    opt = qkan.QKANMuon([("b", ours)], weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.9, 0.999), weight_decay=0.1)
    for _ in range(4):
        opt.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)


def test_row_0_3_reshape_optimizer_state() -> None:
    p = param(6, 4)
    opt = qkan.QKANMuon([("w", p)])
    opt.step()
    opt.state[p]["momentum_buffer"] = opt.state[p]["momentum_buffer"].reshape(24)
    assert qkan.reshape_optimizer_state(opt) == 1
    assert qkan.reshape_optimizer_state(opt) == 0
    assert opt.state[p]["momentum_buffer"].shape == (6, 4)
    opt.step()
    opt.state[p]["momentum_buffer"] = torch.zeros(5)  # a real mismatch is left for the step
    assert qkan.reshape_optimizer_state(opt) == 0
    column = param(1)
    adam = qkan.QKANMuon([("b", column)])
    adam.step()
    step = adam.state[column]["step"]
    assert qkan.reshape_optimizer_state(adam) == 0
    assert adam.state[column]["step"] is step
    assert step.shape == ()


@pytest.mark.parametrize(
    ("group", "text"),
    [({}, r"needs 'params', but has: \[\] "), ({"lr": 0.1}, r"needs 'params', but has: \['lr'\] ")],
)
def test_q10_a_group_without_parameters_is_told_what_it_has(
    group: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text + r"\(parameter group 1\)"):
        qkan.QKANMuon([{"params": [("w", param(3, 3))]}, group])
    opt = qkan.QKANMuon([("w", param(3, 3))])
    with pytest.raises(ValueError, match=text):
        opt.add_param_group(group)


def reasons(opt: qkan.QKANMuon) -> dict[str, str]:
    pairs = [zip(g["param_names"], g["reasons"], strict=True) for g in opt.param_groups]
    return {name: reason for group in pairs for name, reason in group}


def test_row_0_3_the_report_says_why_a_parameter_is_where_it_is() -> None:
    names = ["l.0.w", "l.0.theta1", "wte.weight"]
    named = [(name, param(3, 3)) for name in names] + [("b", param(3)), ("s", param())]
    opt = qkan.QKANMuon(named)
    assert reasons(opt) == {
        "l.0.w": "2D",
        "l.0.theta1": "of a KAN layer (named theta)",
        "wte.weight": "embedding (named wte)",
        "b": "1D",
        "s": "scalar",
    }
    lines = {line.split()[0]: line for line in opt.describe().splitlines() if line}
    assert all(reason in lines[name] for name, reason in reasons(opt).items())
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert reasons(opt)["b"] == "1D"
    with pytest.warns(UserWarning, match="have no name"):
        (group,) = qkan.QKANMuon([param(3, 3)]).param_groups
    assert group["reasons"] == ["2D, without a name"]


def test_row_0_3_the_report_names_a_rule_of_the_users_own() -> None:
    opt = qkan.QKANMuon([("w", param(3, 3)), ("b", param(3))], muon_filter=lambda n, s: n == "w")
    assert set(reasons(opt).values()) == {"muon_filter"}

    class Own(qkan.QKANMuon):
        @staticmethod
        def is_muon_param(name: str, shape: Any) -> bool:
            return name == "w"

    opt = Own([("w", param(3, 3)), ("v", param(3, 3))])
    assert [kind for _, _, kind in opt.describe_layout()] == ["muon", "adamw"]
    assert set(reasons(opt).values()) == {"is_muon_param"}


def test_row_0_3_the_warning_of_rounding_points_at_the_caller() -> None:
    def build() -> None:
        opt = qkan.QKANMuon([("w", param(3, 3, dtype=torch.bfloat16))])
        opt.add_param_group({"params": [("v", param(3, 3, dtype=torch.bfloat16))]})

    with pytest.warns(UserWarning, match="bfloat16 parameters are rounded") as caught:
        build()
    assert [warning.filename for warning in caught] == [__file__, __file__]
