"""save_state and load_state: what is in the file, and who finds what in it."""

from __future__ import annotations

import copy
import json
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libmuon
import numpy as np
import pytest
import torch
from torch import Tensor, nn

SHAPES = {"blocks.0.weight": (6, 5), "blocks.1.weight": (4, 131), "blocks.1.bias/é": (3, 4)}


class Damped(libmuon.Algorithm):
    """One with options and state of its own."""

    name = "state_file_damped"
    state = {"average": "param", "rows": "row", "count": "step"}
    options = {"damping": 0.25, "period": 2, "sign": False}

    def refine(
        self, matrices: list[Tensor], state: list[libmuon.algorithms.State], groups: libmuon.Groups
    ) -> None:
        for matrix, own, options in zip(matrices, state, groups, strict=True):
            own["rows"].add_(matrix.abs().sum(-1, keepdim=True).reshape(own["rows"].shape))
            matrix.mul_(options["damping"] * (1 + int(own["count"].item()) % options["period"]))


libmuon.register_algorithm(Damped)

OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"momentum_form": "heavy_ball"},
    "normuon": {"muon_beta2": 0.9},
    "adam": {"betas": (0.8, 0.9)},
    "adamw": {"amsgrad": True},
    "state_file_damped": {"damping": 0.5, "period": 3, "sign": True},
}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def steps(optimizer: libmuon.Muon, numbers: range) -> None:
    """Steps whose gradients depend on their number alone."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def build(params: dict[str, nn.Parameter], **options: Any) -> libmuon.Muon:
    return libmuon.Muon(list(params.items()), **options)


def one_group(params: dict[str, nn.Parameter], algorithm: str, **run: Any) -> libmuon.Muon:
    group = {"params": list(params.items()), "algorithm": algorithm, "lr": 0.02}
    return libmuon.Muon([group | OPTIONS[algorithm]], **run)


def snapshot(optimizer: libmuon.Muon) -> Any:
    """Groups, state and parameters, copied."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    state = [dict(optimizer.state.get(p, {})) for p in params]
    return copy.deepcopy((groups, state, [p.detach() for p in params]))


def same(a: Any, b: Any) -> bool:
    """Whether snapshots are equal bit by bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        equal_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return equal_kind and torch.equal(*bits)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and type(a) is type(b)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


ROUNDING: dict[str, dict[str, Any]] = {
    "plain": {},
    "stochastic": {"stochastic_rounding": True},
    "split": {"master": "split"},
}
RUNS = [
    *((dtype, "plain") for dtype in (torch.float32, torch.float64, torch.complex64)),
    *((torch.bfloat16, rounding) for rounding in ROUNDING),
]


@pytest.mark.filterwarnings("ignore:bfloat16 parameters")
@pytest.mark.parametrize(("dtype", "rounding"), RUNS)
@pytest.mark.parametrize("state_dtype", [None, "float32", "bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_e3_three_steps_a_file_and_three_steps_are_six(
    path: Path, algorithm: str, state_dtype: str | None, dtype: torch.dtype, rounding: str
) -> None:
    run = ROUNDING[rounding] | {"state_dtype": state_dtype}
    params = parameters(dtype)
    optimizer = one_group(params, algorithm, **run)
    steps(optimizer, range(3))
    libmuon.save_state(optimizer, path)
    middle = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    steps(optimizer, range(3, 6))

    other = one_group(middle, algorithm, **run)
    libmuon.load_state(other, path)
    steps(other, range(3, 6))
    assert same(snapshot(other), snapshot(optimizer))


def test_e15_every_kind_of_option_comes_back(path: Path) -> None:
    params = parameters()
    given: dict[str, Any] = {
        "lr": 0.1,
        "weight_decay": 1,
        "momentum": 0.75,
        "nesterov": False,
        "ns_coefficients": [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5)],
        "eps": 1e-5,
        "ns_steps": 2,
        "adjust_lr_fn": "unscaled",
        "rows": 1,
        "cols": (0,),
        "num_heads": 1,
        "split_dim": 1,
        "maximize": True,
        "cautious": True,
        "compute_dtype": "float64",
        "nonfinite": "skip",
        "lr_multiplier": 1e-300,
        "momentum_form": "heavy_ball",
        "normalization": "add",
        "norm_factor": 1.25,
        "decay_lr": "adjusted",
    }
    optimizer = build(params, **given)
    libmuon.save_state(optimizer, path)
    other = build(params)
    libmuon.load_state(other, path)
    assert same(snapshot(other), snapshot(optimizer))


@pytest.mark.parametrize(
    "schedule", ["polar_express", (3.4445, -4.775, 2.0315), [(2.0, -1.5, 0.5)]]
)
def test_schedules_come_back(path: Path, schedule: Any) -> None:
    params = parameters()
    optimizer = build(params, ns_coefficients=schedule)
    libmuon.save_state(optimizer, path)
    other = build(params, ns_coefficients="you")
    libmuon.load_state(other, path)
    for twin in (optimizer, other):
        with torch.no_grad():
            for p, q in zip(params.values(), parameters().values(), strict=True):
                p.copy_(q)
        steps(twin, range(3))
        moved = [p.detach().clone() for p in params.values()]
        if twin is optimizer:
            expected = moved
    assert same(moved, expected)
    assert other.param_groups[0]["ns_steps"] == optimizer.param_groups[0]["ns_steps"]


def test_options_of_this_run_stay(path: Path) -> None:
    params = parameters()
    stochastic = build(params, batch_size=2, form="standard", state_dtype="float64", foreach=True)
    libmuon.save_state(stochastic, path)
    other = build(params, state_dtype="int8", batch_size=1, momentum=0.5)
    libmuon.load_state(other, path)
    group = other.param_groups[0]
    assert (group["state_dtype"], group["batch_size"], group["form"]) == ("int8", 1, "auto")
    assert (group["foreach"], group["momentum"]) == (None, 0.95)
    assert other.state[params["blocks.0.weight"]]["momentum_buffer"].dtype == torch.int8


@pytest.mark.filterwarnings("ignore:bfloat16 parameters")
@pytest.mark.parametrize("through", ["file", "state dict"])
@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_a_run_without_rounding_drops_its_count(path: Path, algorithm: str, through: str) -> None:
    params = parameters(torch.bfloat16)
    optimizer = one_group(params, algorithm, stochastic_rounding=True)
    steps(optimizer, range(2))
    other = one_group(params, algorithm)
    if through == "file":
        libmuon.save_state(optimizer, path)
        libmuon.load_state(other, path)
    else:
        other.load_state_dict(optimizer.state_dict())
    for p in params.values():
        expected = {key: value for key, value in optimizer.state[p].items() if key != "step"}
        assert same(dict(other.state[p]), expected)


def test_e13_the_file_is_plain_safetensors_with_checksums(path: Path) -> None:
    params = parameters()
    groups: list[dict[str, Any]] = [
        {"params": list(params.items())[:2], "initial_lr": 0.5},
        {"params": list(params.items())[2:], "algorithm": "adamw", "lr": 1e-3},
    ]
    optimizer = libmuon.Muon(groups, lr=0.02, state_dtype="int8")
    steps(optimizer, range(2))
    libmuon.save_state(optimizer, path)

    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__")
    assert metadata.keys() == {"format", "version", "groups", "checksum"}
    assert (metadata["format"], metadata["version"]) == ("libmuon state", "1")
    assert header.keys() == {
        f"{name}/{key}" for name, p in params.items() for key in optimizer.state[p]
    }
    dtypes = {"F32": "<f4", "I8": "i1"}
    in_order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    sums = []
    for label, entry in in_order:
        begin, end = entry["data_offsets"]
        name, _, key = label.rpartition("/")
        expected = optimizer.state[params[name]][key]
        array = np.frombuffer(data[begin:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
        assert np.array_equal(array, expected.numpy())
        sums.append(zlib.crc32(data[begin:end]))
    kind, first, *others = metadata["checksum"].split()
    before = content[: 8 + length].replace(first.encode(), b"0" * 8, 1)
    assert (kind, first) == ("crc32", f"{zlib.crc32(before):08x}")
    assert others == [f"{value:08x}" for value in sums]

    matrices, rest = json.loads(metadata["groups"])
    assert matrices.keys() == {"algorithm", "options", "algorithm_options", "params", "extra"}
    assert [p["name"] for p in matrices["params"]] == list(SHAPES)[:2]
    assert matrices["params"][1] == {
        "name": "blocks.1.weight",
        "shape": [4, 131],
        "dtype": "float32",
    }
    assert matrices["options"]["ns_coefficients"] == [[3.4445, -4.775, 2.0315]]
    assert matrices["extra"] == {"initial_lr": 0.5}
    assert rest["algorithm"] == "adamw"
    assert rest["options"]["betas"] == [0.9, 0.95]
    assert not {"state_dtype", "batch_size", "form", "algorithm"} & rest["options"].keys()


def test_complex_pairs_are_the_last_dim_in_the_file(path: Path) -> None:
    p = nn.Parameter(torch.randn(4, 5, 2))
    optimizer = libmuon.Muon([("w", p)], rows=0, cols=1, complex_dim=2)
    libmuon.save_state(optimizer, path)
    (group,) = groups_in(path)
    assert group["options"]["complex_dim"] == -1
    other = libmuon.Muon([("w", p)], rows=0, cols=1, complex_dim=2)
    libmuon.load_state(other, path)
    assert other.param_groups[0]["complex_dim"] == -1


def groups_in(path: Path) -> Any:
    _, _, metadata = torch.ops.muon.read_state_file(str(path), True)
    return json.loads(metadata["groups"])


def rewrite(path: Path, groups: Any = None, tensors: Any = None, **metadata: str) -> None:
    """The file with some of it replaced (groups may be a text), and checksums that are right."""
    names, values, before = torch.ops.muon.read_state_file(str(path), True)
    if tensors is not None:
        names, values = list(tensors), list(tensors.values())
    if groups is not None:
        metadata["groups"] = groups if isinstance(groups, str) else json.dumps(groups)
    torch.ops.muon.write_state_file(str(path), names, values, {**before, **metadata})


def test_e6_parameters_are_found_by_name_wherever_they_stand(path: Path) -> None:
    params = parameters()
    a, b, c = params.items()
    whole = libmuon.Muon([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.3}])
    steps(whole, range(2))
    libmuon.save_state(whole, path)

    divided = libmuon.Muon([{"params": [c]}, {"params": [b]}, {"params": [a]}], lr=0.7)
    libmuon.load_state(divided, path)
    assert [group["lr"] for group in divided.param_groups] == [0.3, 0.1, 0.1]
    assert [group["param_names"] for group in divided.param_groups] == [[c[0]], [b[0]], [a[0]]]
    for p in params.values():
        assert same(dict(divided.state[p]), dict(whole.state[p]))

    mixed = libmuon.Muon([{"params": [b, c]}, {"params": [a]}], lr=0.7)
    before = snapshot(mixed)
    text = f"group 0 has {b[0]} and {c[0]}, for which the file has different lr;"
    with pytest.raises(ValueError, match=text):
        libmuon.load_state(mixed, path)
    assert same(snapshot(mixed), before)

    whole.param_groups[1]["lr"] = 0.1
    libmuon.save_state(whole, path)
    libmuon.load_state(mixed, path)
    assert [group["lr"] for group in mixed.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize("unnamed", ["file", "optimizer"])
def test_e6_without_names_parameters_are_found_by_place(path: Path, unnamed: str) -> None:
    params = parameters()
    plain = libmuon.Muon([{"params": [p]} for p in params.values()])
    named = libmuon.Muon([{"params": [item]} for item in params.items()])
    source, target = (plain, named) if unnamed == "file" else (named, plain)
    steps(source, range(2))
    libmuon.save_state(source, path)
    if unnamed == "file":
        names, _, _ = torch.ops.muon.read_state_file(str(path), True)
        assert sorted(names) == [f"{i}.0/momentum_buffer" for i in range(3)]
        assert groups_in(path)[0]["params"][0]["name"] is None
    libmuon.load_state(target, path)
    for p in params.values():
        assert same(dict(target.state[p]), dict(source.state[p]))

    fewer = libmuon.Muon([{"params": list(params.values())[:2]}])
    with pytest.raises(ValueError, match=r"it does not have 0\.1, .* have 1\.0, 2\.0; .*places"):
        libmuon.load_state(fewer, path)


def test_e6_parameters_that_one_side_lacks_are_listed(path: Path) -> None:
    params = {f"p{i:02}": nn.Parameter(torch.randn(3, 2)) for i in range(12)}
    libmuon.save_state(build(params), path)
    fewer = build({name: params[name] for name in list(params)[:2]})
    listed = ", ".join(f"p{i:02}" for i in range(2, 10))
    with pytest.raises(ValueError, match=f"optimizer does not have {listed} and 2 more; .*convert"):
        libmuon.load_state(fewer, path)
    renamed = build({f"module.{name}": p for name, p in params.items()})
    before = snapshot(renamed)
    with pytest.raises(ValueError, match=r"it does not have module\.p00.* and 4 more, and this "):
        libmuon.load_state(renamed, path)
    assert same(snapshot(renamed), before)


def test_e6_other_shapes_and_algorithms_are_named(path: Path) -> None:
    params = parameters()
    libmuon.save_state(build(params), path)
    turned = {name: nn.Parameter(p.detach().T.clone()) for name, p in params.items()}
    with pytest.raises(ValueError, match=r"blocks\.0\.weight of shape \(6, 5\), expected \(5, 6\)"):
        libmuon.load_state(build(turned), path)
    with pytest.raises(ValueError, match=r"'muon' for blocks\.0\.weight, .* with 'normuon'"):
        libmuon.load_state(build(params, algorithm="normuon"), path)


def test_e5_frozen_and_unused_parameters_are_fine_on_both_sides(path: Path) -> None:
    params = parameters()
    frozen = params["blocks.1.weight"].requires_grad_(False)
    optimizer = build(params)
    params["blocks.0.weight"].grad = torch.ones(6, 5)
    optimizer.step()
    libmuon.save_state(optimizer, path)
    names, _, _ = torch.ops.muon.read_state_file(str(path), True)
    assert {name.rpartition("/")[0] for name in names} == params.keys() - {"blocks.1.weight"}
    other = build(params)
    libmuon.load_state(other, path)
    assert same(snapshot(other), snapshot(optimizer))
    frozen.requires_grad_(True)  # from now on: its state begins at zero
    libmuon.load_state(other, path)
    assert frozen not in other.state
    assert other.state_dict()["state"][1]["momentum_buffer"].count_nonzero() == 0


def test_e14_loaded_state_is_its_own(path: Path) -> None:
    params = parameters()
    optimizer = build(params)
    steps(optimizer, range(2))
    libmuon.save_state(optimizer, path)
    content, before = path.read_bytes(), snapshot(optimizer)
    others = [build(parameters()), build(parameters())]
    for other in others:
        libmuon.load_state(other, path)
    kept = snapshot(others[1])
    steps(others[0], range(2))
    assert path.read_bytes() == content
    assert same(snapshot(optimizer), before)
    assert same(snapshot(others[1]), kept)


def test_a_scheduler_resumes(path: Path) -> None:
    def run(optimizer: libmuon.Muon, scheduler: Any, numbers: range) -> Iterator[float]:
        for number in numbers:
            steps(optimizer, range(number, number + 1))
            scheduler.step()
            yield optimizer.param_groups[0]["lr"]

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR
    params = parameters()
    optimizer = build(params, lr=0.5)
    scheduler = schedule(optimizer, 10)
    expected = list(run(optimizer, scheduler, range(4)))[-1]
    libmuon.save_state(optimizer, path)
    other = build(params, lr=9.0)
    libmuon.load_state(other, path)
    assert other.param_groups[0]["lr"] == expected
    resumed = schedule(other, 10, last_epoch=3)
    assert resumed.base_lrs == [0.5]
    # Created at epoch 3 it takes that step again, as torch's own example of resuming does.
    other.param_groups[0]["lr"] = expected
    assert list(run(other, resumed, range(4, 8)))[-1] == pytest.approx(
        list(run(optimizer, scheduler, range(4, 8)))[-1], rel=1e-12
    )


def test_metadata_is_kept_and_what_cannot_be_is_named(path: Path) -> None:
    params = parameters()
    plain = {"initial_lr": 0.5, "note": "größe", "frozen": True, "since": None, "epoch": 7}
    optimizer = build(params)
    optimizer.param_groups[0].update(
        plain,
        initial_lr=torch.tensor(0.5),
        history=[1, 2],
        best=float("inf"),
        schedule=len,
        reasons=["matrix"] * 3,
    )
    with pytest.warns(UserWarning, match="all but finite .*: history, best, schedule$") as caught:
        libmuon.save_state(optimizer, path)
    assert [warning.filename for warning in caught] == [__file__]
    (group,) = groups_in(path)
    assert group["extra"] == plain
    other = build(params)
    other.param_groups[0]["history"] = "mine"
    libmuon.load_state(other, path)
    assert {key: other.param_groups[0][key] for key in plain} == plain
    assert other.param_groups[0]["history"] == "mine"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        libmuon.save_state(build(params), path)


def test_a_tensor_stays_a_tensor(path: Path) -> None:
    params = parameters()
    values = {"lr": 0.02, "weight_decay": 0.25, "momentum": 0.75}
    tensors = {key: torch.tensor([value], dtype=torch.float32) for key, value in values.items()}
    libmuon.save_state(build(params, **tensors), path)
    (group,) = groups_in(path)
    assert group["options"]["lr"] == tensors["lr"].item()
    numbers = build(params)
    libmuon.load_state(numbers, path)
    assert numbers.param_groups[0]["lr"] == tensors["lr"].item()
    other = build(params, **{key: torch.zeros(1, dtype=torch.float64) for key in values})
    libmuon.load_state(other, path)
    for key, tensor in tensors.items():
        assert same(other.param_groups[0][key], tensor.double())


def test_hooks_run_as_in_any_load(path: Path) -> None:
    params = parameters()
    optimizer = build(params)
    steps(optimizer, range(2))
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    libmuon.save_state(optimizer, path)

    def double(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("load")
        groups = [{**group, "lr": 2 * group["lr"]} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    other = build(params)
    other.register_load_state_dict_pre_hook(double)
    other.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    libmuon.load_state(other, path)
    assert calls == ["save", "load", "loaded"]
    assert other.param_groups[0]["lr"] == 2 * optimizer.param_groups[0]["lr"]


def test_numbers_of_cpp_fit_the_options_of_an_algorithm(path: Path) -> None:
    params = parameters()
    optimizer = one_group(params, Damped.name)
    libmuon.save_state(optimizer, path)
    (group,) = groups_in(path)
    assert group["algorithm_options"] == {"damping": 0.5, "period": 3, "sign": True}
    group["algorithm_options"] = {"damping": 0.5, "period": 3.0, "sign": 1.0}
    del group["extra"]
    rewrite(path, [group])
    other = one_group(params, Damped.name)
    other.param_groups[0].update(damping=0.0, period=1, sign=False)
    libmuon.load_state(other, path)
    assert same(snapshot(other), snapshot(optimizer))


@pytest.mark.parametrize("state_dtype", ["int8", "int4", "fp8"])
def test_codes_without_scales_are_not_taken_for_numbers(path: Path, state_dtype: str) -> None:
    p = nn.Parameter(torch.randn(4, 6))
    libmuon.save_state(libmuon.Muon([("w", p)], state_dtype=state_dtype), path)
    _, tensors, _ = torch.ops.muon.read_state_file(str(path), True)
    codes = next(tensor for tensor in tensors if tensor.element_size() == 1)
    codes = codes if codes.shape == p.shape else codes.repeat(1, 2)  # int4: as many as entries
    rewrite(path, tensors={"w/momentum_buffer": codes})
    for run in (None, "float32", state_dtype):
        with pytest.raises(ValueError, match=r"momentum_buffer.* w"):
            libmuon.load_state(libmuon.Muon([("w", p)], state_dtype=run), path)


def test_what_cannot_be_saved_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    params = parameters()
    good = build(params)
    libmuon.save_state(good, path)
    before = path.read_bytes()
    with pytest.raises(TypeError, match=r"expected a libmuon\.Muon but got: SGD"):
        libmuon.save_state(torch.optim.SGD(params.values()), path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a libmuon\.Muon but got: SGD"):
        libmuon.load_state(torch.optim.SGD(params.values()), path)  # type: ignore[arg-type]
    twice = libmuon.Muon([("a", p) for p in params.values()])
    with pytest.raises(ValueError, match="two parameters are called 'a'"):
        libmuon.save_state(twice, path)
    surrogate = build(params)
    surrogate.param_groups[0]["param_names"] = ["a\ud800", "b", "c"]
    with pytest.raises(ValueError, match="should be a Unicode text but is: 'a"):
        libmuon.save_state(surrogate, path)
    good.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"rate should be >= 0 but is: nan \(parameter group 0\)"):
        libmuon.save_state(good, path)
    good.param_groups[0]["lr"] = 0.1
    good.state[params["blocks.0.weight"]]["note"] = "text"
    with pytest.raises(TypeError, match=r"note in the state of blocks\.0\.weight is a str"):
        libmuon.save_state(good, path)
    assert path.read_bytes() == before
    with pytest.raises(RuntimeError, match="No such file or directory"):
        libmuon.save_state(build(params), tmp_path / "none" / "file")
    with pytest.raises(ValueError, match="No such file or directory"):
        libmuon.load_state(build(params), tmp_path / "none" / "file")
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]
