"""Names, and parameters that are renamed, split, fused or moved between groups."""

from __future__ import annotations

from typing import Any

import libmuon
import pytest
import torch
from converted import load, same
from libmuon.convert import ConversionError, build_optimizer, convert_state_dict
from torch import Tensor, nn


def trained(named: dict[str, nn.Parameter], seed: int = 1, **options: Any) -> libmuon.Muon:
    opt = libmuon.Muon(named.items(), lr=0.02, **options)
    step(opt, named, seed)
    return opt


def step(opt: torch.optim.Optimizer, named: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=generator)
    opt.step()


def parameters(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def names_of(state_dict: dict[str, Any]) -> list[list[str]]:
    return [group["param_names"] for group in state_dict["param_groups"]]


def unnamed(state_dict: dict[str, Any]) -> dict[str, Any]:
    for group in state_dict["param_groups"]:
        del group["param_names"]
    return state_dict


def test_a_list_of_names_is_in_the_optimizers_order() -> None:
    opt = trained(parameters(a=(4, 3), b=(5, 3)))
    state_dict = unnamed(opt.state_dict())
    converted, _ = convert_state_dict(state_dict, names=["x", "y"])
    assert names_of(converted) == [["x", "y"]]
    for wrong, text in ((["x"], "1 names for 2 parameters"), (["x", "x"], "occur twice: x")):
        with pytest.raises(ConversionError, match=text):
            convert_state_dict(state_dict, names=wrong)


def test_names_of_the_file_are_not_overruled() -> None:
    state_dict = trained(parameters(a=(4, 3), b=(5, 3))).state_dict()
    with pytest.raises(ConversionError, match="'b' and 'c' at position 1; use rename"):
        convert_state_dict(state_dict, names=["a", "c"])


def test_ids_that_are_names_are_names() -> None:
    opt = trained(parameters(a=(4, 3), b=(5, 3)))
    state_dict = unnamed(opt.state_dict())
    keyed = {
        "state": {"ab"[key]: entry for key, entry in state_dict["state"].items()},
        "param_groups": [{**state_dict["param_groups"][0], "params": ["a", "b"]}],
    }
    assert names_of(convert_state_dict(keyed)[0]) == [["a", "b"]]


def test_a_model_gives_names_by_shape_and_its_own_shapes() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)
    )
    matrices = [p for p in model.parameters() if p.ndim == 2]
    # As KellerJordan's: the largest first, and groups apart from the model's order.
    opt = libmuon.Muon(
        [
            {"params": [model[1].weight, model[1].bias], "algorithm": "adamw", "lr": 1e-3},
            {"params": matrices[::-1]},
        ]
    )
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    converted, _ = convert_state_dict(opt.state_dict(), names=model.state_dict())
    assert names_of(converted) == [["1.weight", "1.bias"], ["2.weight", "0.weight"]]


def test_a_model_is_refused_where_shapes_say_too_little() -> None:
    named = parameters(a=(4, 3), b=(4, 3), c=(5, 3))
    opt = libmuon.Muon([{"params": [named["a"]]}, {"params": [named["b"], named["c"]]}])
    step(opt, named, 1)
    with pytest.raises(ConversionError, match=r"shape \(4, 3\) are in several groups.*: a, b"):
        convert_state_dict(opt.state_dict(), names=named)
    with pytest.raises(ConversionError, match=r"2 parameters of shape \(4, 3\), the model 1"):
        convert_state_dict(opt.state_dict(), names={k: named[k] for k in "ac"})
    with pytest.raises(ConversionError, match=r"'c' has shape \(3, 5\), its state \(5, 3\)"):
        convert_state_dict(
            opt.state_dict(), names=["a", "b", "c"], shapes=named | {"c": torch.zeros(3, 5)}
        )


def test_shared_weights_of_a_model_count_once() -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    opt = trained({"head": weight})
    tied = {"embed": weight.detach(), "head": weight.detach()}
    converted, _ = convert_state_dict(unnamed(opt.state_dict()), names=tied)
    assert names_of(converted) == [["embed"]]
    converted, _ = convert_state_dict(trained({"head": weight}).state_dict(), shapes=tied)
    assert names_of(converted) == [["head"]]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("module.*=*", ["a.weight", "b.weight"]),
        ("*.weight=*.w", ["module.a.w", "module.b.w"]),
        ("module.a.weight=head", ["head", "module.b.weight"]),
        (r"re:module\.(.)\.weight=w_\1", ["w_a", "w_b"]),
    ],
)
def test_renaming(rule: str, expected: list[str]) -> None:
    named = {
        name: nn.Parameter(torch.randn(4, 3)) for name in ("module.a.weight", "module.b.weight")
    }
    state_dict = trained(named).state_dict()
    converted, _ = convert_state_dict(state_dict, rename=[rule])
    assert names_of(converted) == [expected]
    assert same(converted["state"], state_dict["state"])


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("nothing=x", "fits none of: a, b"),
        ("*=x", "makes names equal: x"),
        ("a", "should be OLD=NEW"),
        ("re:(=x", "no regular expression"),
        ("a=*", r"more \* on the right"),
    ],
)
def test_renaming_that_does_not_work_is_refused(rule: str, text: str) -> None:
    state_dict = trained(parameters(a=(4, 3), b=(5, 3))).state_dict()
    with pytest.raises(ConversionError, match=text):
        convert_state_dict(state_dict, rename=[rule])
    with pytest.raises(ConversionError, match="needs names"):
        convert_state_dict(unnamed(state_dict), rename=["a=b"])


def goes_on_alike(
    old: tuple[libmuon.Muon, dict[str, nn.Parameter]],
    new: tuple[libmuon.Muon, dict[str, nn.Parameter]],
    pieces: dict[str, list[str]],
) -> None:
    """Two more steps of both with the same gradients; `pieces` are the rows of a whole."""
    for seed in (2, 3):
        step(*old, seed)
        for whole, parts in pieces.items():
            grads = [old[1][name].grad for name in (parts if whole in new[1] else [whole])]
            stacked = torch.cat([grad for grad in grads if grad is not None])
            if whole in new[1]:
                new[1][whole].grad = stacked
            else:
                sizes = [new[1][name].shape[0] for name in parts]
                for name, grad in zip(parts, stacked.split(sizes), strict=True):
                    new[1][name].grad = grad
        new[0].step()
    for whole, parts in pieces.items():
        one, many = (old[1], new[1]) if whole in old[1] else (new[1], old[1])
        joined = torch.cat([many[name].detach() for name in parts])
        torch.testing.assert_close(one[whole].detach(), joined, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw"])
def test_blocks_of_a_fused_weight_become_weights_of_their_own(algorithm: str) -> None:
    named = parameters(qkv=(9, 4))
    options: dict[str, Any] = {} if algorithm == "adamw" else {"split_sizes": (4, 3, 2)}
    old = trained(named, algorithm=algorithm, **options)
    converted, report = convert_state_dict(old.state_dict(), split=["qkv=q:4,k:3,v:2"])
    assert names_of(converted) == [["q", "k", "v"]]
    assert not any(entry.notes for entry in report.entries)
    blocks = named["qkv"].detach().split((4, 3, 2))
    pieces = {name: nn.Parameter(p.clone()) for name, p in zip("qkv", blocks, strict=True)}
    new = build_optimizer(converted, pieces.items())
    goes_on_alike((old, named), (new, pieces), {"qkv": ["q", "k", "v"]})


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw"])
def test_weights_that_are_fused_stay_matrices_of_their_own(algorithm: str) -> None:
    named = parameters(q=(4, 4), k=(3, 4), v=(2, 4), other=(5, 4))
    old = trained(named, algorithm=algorithm)
    converted, _ = convert_state_dict(old.state_dict(), fuse=["qkv=q,k,v"])
    whole = torch.cat([named[name].detach() for name in "qkv"])
    fused = {
        "qkv": nn.Parameter(whole),
        "other": nn.Parameter(named["other"].detach().clone()),
    }
    new = build_optimizer(converted, fused.items())
    goes_on_alike((old, named), (new, fused), {"qkv": ["q", "k", "v"], "other": ["other"]})


@pytest.mark.parametrize("state_dtype", ["int8", "int4", "fp8"])
def test_codes_are_cut_and_joined_as_they_are(state_dtype: str) -> None:
    named = parameters(qkv=(9, 130))
    old = trained(named, state_dtype=state_dtype, split_sizes=(4, 3, 2))
    saved = old.state_dict()
    there, _ = convert_state_dict(saved, shapes=named, split=["qkv=q:4,k:3,v:2"])
    pieces = {"q": (4, 130), "k": (3, 130), "v": (2, 130)}
    back, _ = convert_state_dict(there, shapes=pieces, fuse=["qkv=q,k,v"])
    assert same(back["state"], saved["state"])
    heavy, _ = convert_state_dict(saved, momentum_form="heavy_ball")
    mine, theirs = heavy["state"][0], saved["state"][0]
    assert same(mine["momentum_buffer"], theirs["momentum_buffer"])
    scale = theirs["momentum_buffer_scale"] * 20
    torch.testing.assert_close(mine["momentum_buffer_scale"], scale, rtol=1e-6, atol=0)


def test_equal_parts_need_no_sizes_and_the_way_back_is_exact() -> None:
    state_dict = trained(parameters(qkv=(9, 4), o=(4, 4)), split_sizes=None).state_dict()
    there, report = convert_state_dict(state_dict, split=["qkv=q,k,v"])
    assert "orthogonalised as part of one matrix, and now on its own (q, k, v)" in str(report)
    back, _ = convert_state_dict(there, fuse=["qkv=q,k,v"])
    assert back["param_groups"][0]["split_sizes"] == (3, 3, 3)
    for index, name in enumerate(("qkv", "o")):
        assert names_of(back)[index] == [name]
        assert same(back["state"][index], state_dict["state"][index])


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"split": ["a=b"]}, "should be WHOLE=PART,PART"),
        ({"split": ["none=x,y"]}, "there is no parameter 'none'"),
        ({"split": ["a=x,y"]}, "9 rows do not make 2 equal parts"),
        ({"split": ["a=x:4,y:4"]}, r"\[4, 4\] do not add up to 9 rows"),
        ({"split": ["a=x:4,y"]}, "to every part or to none"),
        ({"split": ["a=x,b,y"]}, r"occur twice after splitting and fusing: \['b'\]"),
        ({"fuse": ["x=a:9,b:4"]}, "has sizes"),
        ({"fuse": ["x=a,c"]}, "shapes do not fit"),
        ({"fuse": ["x=a,none"]}, "there is no parameter 'none'"),
        ({"fuse": ["x=a,d"]}, "differ in options"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(rules: dict[str, Any], text: str) -> None:
    named = parameters(a=(9, 4), b=(4, 4), c=(5, 3), d=(6, 4))
    opt = libmuon.Muon(
        [
            {"params": [(name, named[name]) for name in "abc"]},
            {"params": [("d", named["d"])], "momentum": 0.9},
        ]
    )
    step(opt, named, 1)
    with pytest.raises(ConversionError, match=text):
        convert_state_dict(opt.state_dict(), **rules)


def test_other_blocks_than_the_saved_ones_are_refused() -> None:
    state_dict = trained(parameters(qkv=(9, 4)), split_sizes=(3, 3, 3)).state_dict()
    with pytest.raises(ConversionError, match="is cut into .* its matrices were"):
        convert_state_dict(state_dict, split=["qkv=q:5,k:4"])


def test_e6_parameters_move_to_the_groups_of_the_new_optimizer() -> None:
    named = parameters(a=(4, 3), b=(5, 3), c=(6, 3))
    old = trained(named, momentum_form="heavy_ball")
    groups: list[dict[str, Any]] = [
        {"params": [("c", named["c"])]},
        {"params": [("b", named["b"]), ("a", named["a"])]},
    ]
    template = libmuon.Muon(groups, lr=1.0).state_dict()
    converted, _ = convert_state_dict(old.state_dict(), like=template)
    assert names_of(converted) == [["c"], ["b", "a"]]
    new = libmuon.Muon(groups, lr=1.0)
    new.load_state_dict(converted)
    assert {group["lr"] for group in new.param_groups} == {0.02}
    assert {group["momentum_form"] for group in new.param_groups} == {"heavy_ball"}
    for p in named.values():
        assert torch.equal(new.state[p]["momentum_buffer"], old.state[p]["momentum_buffer"])


def test_e6_parameters_that_only_one_side_has_are_named() -> None:
    named = parameters(a=(4, 3), b=(5, 3), c=(6, 3))
    old = trained({k: named[k] for k in "ab"})
    like = libmuon.Muon([(k, named[k]) for k in "bc"]).state_dict()
    with pytest.raises(ConversionError) as raised:
        convert_state_dict(old.state_dict(), like=like)
    assert "c: is not in the file" in str(raised.value)
    assert "a: has no place in `like`" in str(raised.value)
    converted, _ = convert_state_dict(old.state_dict(), like=like, allow_partial=True)
    new = libmuon.Muon([(k, named[k]) for k in "bc"])
    new.load_state_dict(converted)
    assert torch.equal(
        new.state[named["b"]]["momentum_buffer"], old.state[named["b"]]["momentum_buffer"]
    )
    assert not buffers(new.state_dict())[1].any()


def test_adamws_state_goes_where_the_new_optimizer_has_matrices() -> None:
    named = parameters(conv=(6, 3, 2, 2), head=(5, 6), bias=(5,))
    adamw = torch.optim.AdamW(named.items(), lr=3e-3, weight_decay=0.2)
    step(adamw, named, 1)
    groups: list[dict[str, Any]] = [
        {"params": [("conv", named["conv"])], "flatten": True, "lr": 1.0, "momentum": 0.9},
        {"params": [(k, named[k]) for k in ("bias", "head")], "algorithm": "adamw", "lr": 1.0},
    ]
    new = libmuon.Muon(groups)
    converted, _ = convert_state_dict(adamw.state_dict(), like=new.state_dict())
    new.load_state_dict(converted)
    matrix, rest = new.param_groups
    assert (matrix["lr"], matrix["weight_decay"], matrix["momentum"]) == (3e-3, 0.2, 0.9)
    assert torch.equal(
        new.state[named["conv"]]["momentum_buffer"], adamw.state[named["conv"]]["exp_avg"]
    )
    assert (rest["lr"], rest["betas"]) == (3e-3, (0.9, 0.999))
    assert torch.equal(
        new.state[named["head"]]["exp_avg_sq"], adamw.state[named["head"]]["exp_avg_sq"]
    )


def test_one_group_cannot_take_parameters_of_different_options() -> None:
    named = parameters(a=(4, 3), b=(5, 3))
    opt = libmuon.Muon(
        [{"params": [("a", named["a"])], "momentum": 0.9}, {"params": [("b", named["b"])]}]
    )
    step(opt, named, 1)
    like = libmuon.Muon(named.items()).state_dict()
    with pytest.raises(
        ConversionError, match="'a' and 'b', which the file trains with different momentum"
    ):
        convert_state_dict(opt.state_dict(), like=like)


def test_without_names_parameters_keep_the_sources_order() -> None:
    fixture = load("moonlight")
    state_dict, _ = convert_state_dict(fixture["state_dicts"])
    assert "param_names" not in state_dict["param_groups"][0]
    params = {name: nn.Parameter(p.clone()) for name, p in fixture["weights"].items()}
    opt = build_optimizer(state_dict, [params[name] for name in fixture["names"]])
    for gradients in fixture["gradients"]:
        for name, p in params.items():
            p.grad = gradients[name]
        opt.step()
    for name, p in params.items():
        torch.testing.assert_close(p.detach(), fixture["after"][name], rtol=0, atol=1e-5)


def test_an_optimizer_is_built_of_the_parameters_that_the_state_dict_names() -> None:
    named = parameters(a=(4, 3), b=(5, 3))
    state_dict = trained(named).state_dict()
    with pytest.raises(ValueError, match=r"parameters that are not among those given: \['b'\]"):
        build_optimizer(state_dict, [("a", named["a"])])


def buffers(state_dict: dict[str, Any]) -> list[Tensor]:
    return [entry["momentum_buffer"] for entry in state_dict["state"].values()]


def test_the_optimizer_is_found_in_a_checkpoint() -> None:
    opt = trained(parameters(a=(4, 3)))
    inner = opt.state_dict()
    lightning = {"epoch": 1, "optimizer_states": [inner], "state_dict": {"a": torch.zeros(4, 3)}}
    for checkpoint in (inner, {"optimizer": inner}, lightning):
        converted, _ = convert_state_dict(checkpoint)
        assert torch.equal(buffers(converted)[0], buffers(inner)[0])
    two = {"muon": inner, "other": {"adam": inner}}
    with pytest.raises(
        ConversionError, match=r"several optimizers' state dicts: at muon, other\.adam"
    ):
        convert_state_dict(two)
    converted, _ = convert_state_dict(two, key="other.adam")
    assert torch.equal(buffers(converted)[0], buffers(inner)[0])
    with pytest.raises(ConversionError, match="there is no 'wrong'"):
        convert_state_dict(two, key="wrong.adam")
    with pytest.raises(ConversionError, match=r"no optimizer's state dict.*a mapping with a"):
        convert_state_dict({"a": torch.zeros(1)})
