"""``python -m libmuon inspect``: what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import libmuon
import pytest
import torch
from converted import SAYS, load
from libmuon.__main__ import main
from libmuon.convert import ConversionError
from libmuon.inspection import inspect_file
from torch import nn

TITLES = {
    "torch_muon": "torch.optim.Muon",
    "torch_adamw": "torch.optim.AdamW",
    "keller": "KellerJordan/Muon",
    "keller_ranks": "KellerJordan/Muon",
    "normuon": "zichongli5/NorMuon",
    "moonlight": "MoonshotAI/Moonlight",
    "dion": "microsoft/dion",
    "dion_normuon": "microsoft/dion",
    "timm": "timm.optim.Muon",
    "pytorch_optimizer": "pytorch_optimizer.Muon 4.1 or newer",
    "pytorch_optimizer_40": "pytorch_optimizer.Muon 3.8 to 4.0",
    "muonium": "muonium 0.2",
    "muonium_01": "muonium 0.1",
    "neuralops": "neuralops",
    "neuralops_muon": "neuralops",
    "qkan": "qkan.optim.QKANMuon",
    "qkan_ranks": "qkan.optim.QKANMuon",
}


def saved(folder: Path, value: Any) -> Path:
    path = folder / "file.pt"
    torch.save(value, path)
    return path


def rows(text: str) -> list[list[str]]:
    """The cells of the table, without its head."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("parameter "))
    return [line.split() for line in lines[start + 1 : lines.index("", start)]]


@pytest.mark.parametrize("name", SAYS)
def test_it_says_whose_file_it_is(tmp_path: Path, name: str) -> None:
    state_dict = load(name)["state_dicts"][0]
    text = inspect_file(saved(tmp_path, {"optimizer": state_dict}))
    assert text.splitlines()[:2] == [
        f"contents  optimizer state of {TITLES[name]}",
        "found at  optimizer",
    ]
    keys = [key for entry in state_dict["state"].values() for key in entry]
    assert sorted(keys) == sorted(key for key in keys if f" {key} " in text)


def run_of_two(state_dtype: torch.dtype | None = None) -> libmuon.Muon:
    named = [("weight", nn.Parameter(torch.ones(3, 4))), ("bias", nn.Parameter(torch.ones(4)))]
    groups: list[dict[str, Any]] = [
        {"params": named[:1], "state_dtype": state_dtype},
        {"params": named[1:], "algorithm": "adamw", "lr": 0.125},
    ]
    return libmuon.Muon(groups, lr=0.25)


def test_the_table_has_shapes_dtypes_bytes_norms_and_counts(tmp_path: Path) -> None:
    state_dict = run_of_two(torch.bfloat16).state_dict()
    momentum = state_dict["state"][0]["momentum_buffer"]
    momentum.copy_(torch.tensor([[3.0, 0, 0, 0], [4.0, 0, 0, 0], [0, 0, 0, 0]]))
    momentum[2, 0], momentum[2, 1], momentum[2, 2] = float("nan"), float("inf"), float("-inf")
    state_dict["state"][1]["exp_avg"].fill_(2)
    text = inspect_file(saved(tmp_path, state_dict))
    table = {(row[0], row[1]): row[2:] for row in rows(text)}
    assert table["weight", "momentum_buffer"] == ["(3,", "4)", "bfloat16", "24", "plain", "5", "3"]
    assert table["bias", "exp_avg"] == ["(4,)", "float32", "16", "plain", "4", "0"]
    assert table["bias", "step"] == ["()", "float32", "4", "plain", "0", "0"]
    assert "total  4 tensors, 21 elements, 60 bytes, 3 non-finite" in text


def test_groups_are_listed_with_their_options(tmp_path: Path) -> None:
    lines = inspect_file(saved(tmp_path, run_of_two().state_dict())).splitlines()
    first, second = lines.index("group 0: 1 parameters"), lines.index("group 1: 1 parameters")
    assert "  lr=0.25" in lines[first:second]
    assert "  algorithm='muon'" in lines[first:second]
    assert "  lr=0.125" in lines[second:]
    assert "  betas=(0.9, 0.95)" in lines[second:]


def test_parameters_without_state_and_without_names_are_listed(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    opt = torch.optim.Muon(params, lr=torch.tensor(0.5))
    params[1].grad = torch.ones(4, 4)
    opt.step()
    text = inspect_file(saved(tmp_path, opt.state_dict()))
    assert [row[:5] for row in rows(text)] == [
        ["0", "of", "group", "0", "none"],
        ["1", "of", "group", "0", "momentum_buffer"],
    ]
    assert "  lr=tensor(0.5)" in text


def test_a_models_state_dict_is_shown_too(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 2.0)
    text = inspect_file(saved(tmp_path, {"epoch": 1, "model": model.state_dict()}))
    assert text.startswith("contents  a model's state dict\n")
    assert ["weight", "(2,", "3)", "float32", "24", "plain", "4.89898", "0"] in rows(text)


def test_complex_and_integer_tensors_have_a_format(tmp_path: Path) -> None:
    tensors = {
        "spectral": torch.full((2, 2), 3 + 4j),
        "codes": torch.full((3,), 2, dtype=torch.uint8),
        "index": torch.tensor([3, 4]),
    }
    text = inspect_file(saved(tmp_path, tensors))
    assert [row[0:1] + row[-3:] for row in rows(text)] == [
        ["spectral", "plain", "10", "0"],
        ["codes", "integers", "3.4641", "0"],
        ["index", "integers", "5", "0"],
    ]


@pytest.mark.parametrize("state_dtype", ["int8", "int4", "fp8"])
def test_codes_are_measured_by_what_they_stand_for(tmp_path: Path, state_dtype: str) -> None:
    p = nn.Parameter(torch.randn(6, 131))
    opt = libmuon.Muon([("w", p)], state_dtype=state_dtype)
    p.grad = torch.randn_like(p)
    opt.step()
    plain = libmuon.Muon([("w", p)])
    plain.load_state_dict(opt.state_dict())
    norm = plain.state[p]["momentum_buffer"].norm().item()
    codes, scales = rows(inspect_file(saved(tmp_path, opt.state_dict())))
    assert codes[-4:-2] == [state_dtype, "codes"]
    assert float(codes[-2]) == pytest.approx(norm, rel=1e-5)
    assert scales[-3] == "scales"


def test_one_of_several_optimizers_is_chosen_by_its_key(tmp_path: Path) -> None:
    both = {"first": run_of_two().state_dict(), "second": load("keller")["state_dicts"][0]}
    path = saved(tmp_path, both)
    with pytest.raises(ConversionError, match="several optimizers' state dicts: at first, second"):
        inspect_file(path)
    assert "KellerJordan/Muon" in inspect_file(path, "second")


def test_the_command_prints_it_or_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, run_of_two().state_dict())
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == inspect_file(path)
    saved(tmp_path, [1, 2])
    for wrong in (path, tmp_path / "missing.pt"):
        assert main(["inspect", str(wrong)]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.out == ""


@pytest.mark.parametrize("state_dtype", [None, "int4"])
def test_a_state_file_shows_what_a_checkpoint_of_the_run_shows(
    tmp_path: Path, state_dtype: str | None
) -> None:
    p = nn.Parameter(torch.randn(6, 131))
    opt = libmuon.Muon([("w", p)], lr=0.25, state_dtype=state_dtype)
    p.grad = torch.randn_like(p)
    opt.step()
    path = tmp_path / "state.safetensors"
    libmuon.save_state(opt, path)
    text = inspect_file(path)
    assert text.splitlines()[:5] == [
        "contents  optimizer state of libmuon.Muon",
        "format    libmuon state, version 1",
        "",
        "group 0: 1 parameters",
        "  lr=0.25",
    ]
    assert sorted(rows(text)) == sorted(rows(inspect_file(saved(tmp_path, opt.state_dict()))))
    assert ("  state_dtype='int4'" in text.splitlines()) == (state_dtype == "int4")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConversionError, match="cannot read state file"):
        inspect_file(path)


def test_a_models_safetensors_is_shown_too(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.ops.muon.write_state_file(str(path), ["weight"], [torch.full((2, 3), 2.0)], {})
    text = inspect_file(path)
    assert text.startswith("contents  a model's state dict\n")
    assert ["weight", "(2,", "3)", "float32", "24", "plain", "4.89898", "0"] in rows(text)
