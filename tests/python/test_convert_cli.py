"""``python -m libmuon convert``: files in, a report and a file out."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import libmuon
import pytest
import torch
from converted import arguments, go_on, largest, load, same
from libmuon.__main__ import main
from libmuon.convert import build_optimizer, convert_state_dict
from torch import nn


class Result(NamedTuple):
    """What a command has returned and written."""

    returncode: int
    stdout: str
    stderr: str


def convert(*given: str | Path) -> Result:
    """The command in this process: importing torch takes longer than all it does."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main(["convert", *map(str, given)])
        except SystemExit as exit:  # argparse
            status = int(exit.code or 0)
    return Result(status, out.getvalue(), error.getvalue())


def test_the_command_runs_as_a_program(tmp_path: Path) -> None:
    (path,) = checkpoints(tmp_path, "keller")
    given = [path, "--to", "libmuon", "--model-names", "bias,a,b,conv"]
    command = [sys.executable, "-m", "libmuon", "convert", *map(str, given)]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=False)
    assert (dry.returncode, dry.stdout) == convert(*given, "--dry-run")[:2]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == "error: give a file to write with -o, or --dry-run\n"


def checkpoints(folder: Path, name: str) -> list[Path]:
    """A training run's files: the optimizer inside a checkpoint, one a rank."""
    fixture = load(name)
    paths = []
    for rank, state_dict in enumerate(fixture["state_dicts"]):
        paths.append(folder / f"rank{rank}.pt")
        torch.save({"epoch": 3, "model": fixture["weights"], "optimizer": state_dict}, paths[-1])
    (folder / "names.txt").write_text("\n".join(fixture["names"]) + "\n")
    return paths


def test_a_checkpoint_becomes_a_file_that_libmuon_continues(tmp_path: Path) -> None:
    (path,) = checkpoints(tmp_path, "muonium")
    out = tmp_path / "out.pt"
    names = ("--model-names", tmp_path / "names.txt", "--model-names", path)
    result = convert(path, "--to", "libmuon", *names, "-o", out)
    assert result.returncode == 0, result.stderr
    fixture = load("muonium")
    written = torch.load(out, weights_only=True)
    given = arguments("muonium", fixture)
    expected, report = convert_state_dict(fixture["state_dicts"], **given)
    assert same(written, expected)
    assert largest(go_on(fixture, written)) <= 1e-5
    for entry in report.entries:
        assert entry.name in result.stdout
    assert f"written to {out}" in result.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == ["names.txt", "out.pt", "rank0.pt"]


def test_a_dry_run_reports_and_writes_nothing(tmp_path: Path) -> None:
    (path,) = checkpoints(tmp_path, "keller")
    before = {file.name for file in tmp_path.iterdir()}
    out = ("-o", tmp_path / "out.pt")
    result = convert(path, "--to", "libmuon", "--model-names", "bias,a,b,conv", "--dry-run", *out)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("source  KellerJordan/Muon\ntarget  libmuon\n")
    assert "a     (6, 4)        group 1  muon   momentum_buffer" in result.stdout
    assert {file.name for file in tmp_path.iterdir()} == before


def test_all_ranks_files_are_given_at_once(tmp_path: Path) -> None:
    paths = checkpoints(tmp_path, "qkan_ranks")
    names = ("--model-names", tmp_path / "names.txt")
    out = tmp_path / "out.pt"
    alone = convert(paths[0], "--to", "libmuon", *names, "-o", out)
    assert alone.returncode == 1
    assert "every rank's file" in alone.stderr
    assert not out.exists()
    result = convert(*paths, "--to", "libmuon", *names, "-o", out)
    assert result.returncode == 0, result.stderr
    assert largest(go_on(load("qkan_ranks"), torch.load(out, weights_only=True))) <= 1e-5


def test_every_option_reaches_the_conversion(tmp_path: Path) -> None:
    (path,) = checkpoints(tmp_path, "torch_muon")
    like = tmp_path / "like.pt"
    first = convert(
        path,
        *("--to", "libmuon", "--from", "torch", "--key", "optimizer"),
        *("--rename", "a=first", "--split", "first=up,down", "--fuse", "both=up,down"),
        *("--set", "ns_steps=6", "--set", "compute_dtype=float64"),
        *("--momentum-form", "heavy_ball", "-o", like),
    )
    assert first.returncode == 0, first.stderr
    written = torch.load(like, weights_only=True)
    assert [group["param_names"] for group in written["param_groups"]] == [["both"], ["b"]]
    group = written["param_groups"][0]
    assert group["split_sizes"] == (3, 3)
    assert (group["ns_steps"], group["compute_dtype"]) == (6, "float64")
    assert group["momentum_form"] == "heavy_ball"
    again = convert(path, "--to", "libmuon", "--rename", "a=both", "--like", like, "--dry-run")
    assert again.returncode == 0, again.stderr
    assert "both  (6, 4)  group 0" in again.stdout


def test_adamw_switches_where_the_globs_say(tmp_path: Path) -> None:
    (path,) = checkpoints(tmp_path, "torch_adamw")
    names = ("--model-names", "a,b,bias")
    result = convert(path, "--to", "libmuon", *names, "--matrices", "[ab]", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "exp_avg -> momentum_buffer; exp_avg_sq, max_exp_avg_sq, step left out" in result.stdout
    none = convert(path, "--to", "libmuon", *names, "--matrices", "none", "--dry-run")
    assert "momentum_buffer" not in none.stdout


def test_partial_conversions_are_asked_for(tmp_path: Path) -> None:
    (path,) = checkpoints(tmp_path, "keller")
    out = tmp_path / "out.pt"
    given = (path, "--to", "torch", "--model-names", "bias,a,b,conv", "-o", out)
    refused = convert(*given)
    assert refused.returncode == 1
    assert "conv: torch.optim.Muon takes 2D parameters only" in refused.stderr
    assert "problems" in refused.stdout  # the whole report all the same
    assert not out.exists()
    partial = convert(*given, "--allow-partial")
    assert partial.returncode == 0, partial.stderr
    written = torch.load(out, weights_only=True)
    assert written["param_groups"][0]["param_names"] == ["a", "b"]
    assert written["adamw"]["param_groups"][0]["param_names"] == ["bias"]


class Malicious:
    def __reduce__(self):
        return print, ("executed",)


def test_files_that_are_not_plain_tensors_are_refused_unread(tmp_path: Path) -> None:
    evil, short, text = tmp_path / "evil.pt", tmp_path / "short.pt", tmp_path / "text.pt"
    torch.save({"state": Malicious(), "param_groups": []}, evil)
    (whole,) = checkpoints(tmp_path, "keller")
    short.write_bytes(whole.read_bytes()[:-700])
    text.write_text("no checkpoint\n")
    for path in (evil, short, text, tmp_path / "missing.pt"):
        result = convert(path, "--to", "libmuon", "--dry-run")
        assert result.returncode == 1, path
        assert "executed" not in result.stdout
        assert result.stderr.startswith("error: ")
        assert path.name in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("given", "status", "text"),
    [
        ((), 2, "--to"),
        (("--to", "libmuon"), 1, "give a file to write with -o, or --dry-run"),
        (("--to", "libmuon", "-o", "rank0.pt"), 1, "is the file to read"),
        (("--to", "libmuon", "-o", "no/out.pt"), 1, "there is no folder"),
        (("--to", "libmuon", "--dry-run", "--set", "ns_steps"), 1, "should be OPTION=VALUE"),
        (("--to", "libmuon", "--dry-run", "--model-names", "no/such.txt"), 1, "no such file"),
        (("--to", "elsewhere", "--dry-run"), 2, "invalid choice"),
        (("--to", "libmuon", "--dry-run", "--set", "ns_steps=-1"), 1, "ns_steps should be >= 0"),
    ],
)
def test_wrong_arguments_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], status: int, text: str
) -> None:
    (path,) = checkpoints(tmp_path, "keller")
    monkeypatch.chdir(tmp_path)
    result = convert(path, *given)
    assert result.returncode == status
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_a_state_file_is_written_read_and_loaded(tmp_path: Path) -> None:
    (path,) = checkpoints(tmp_path, "muonium")
    names = ("--model-names", tmp_path / "names.txt", "--model-names", path)
    plain, out, again = (tmp_path / name for name in ("out.pt", "out.safetensors", "again.pt"))
    for target in (plain, out):
        result = convert(path, "--to", "libmuon", *names, "-o", target)
        assert result.returncode == 0, result.stderr
    expected = torch.load(plain, weights_only=True)
    fixture = load("muonium")
    weights = zip(fixture["names"], fixture["weights"].values(), strict=True)
    optimizer = build_optimizer(expected, [(name, nn.Parameter(w)) for name, w in weights])
    wanted = optimizer.state_dict()
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    libmuon.load_state(optimizer, out)
    assert same(optimizer.state_dict()["state"], wanted["state"])
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in wanted["param_groups"]]

    result = convert(out, "--to", "libmuon", "--rename", "*=module.*", "-o", again)
    assert result.returncode == 0, result.stderr
    renamed = torch.load(again, weights_only=True)
    assert [group["param_names"] for group in renamed["param_groups"]] == [
        [f"module.{name}" for name in group["param_names"]] for group in expected["param_groups"]
    ]
    assert same(renamed["state"], expected["state"])


@pytest.mark.filterwarnings("ignore:bfloat16 parameters")
@pytest.mark.parametrize(
    "run",
    [
        {"state_dtype": "int4"},
        {"master": "split"},
        {"stochastic_rounding": True},
        {"state_dtype": "fp8", "master": "split"},
        {"state_dtype": "int8", "stochastic_rounding": True},
    ],
)
def test_a_state_file_keeps_its_formats_through_a_renaming(
    tmp_path: Path, run: dict[str, Any]
) -> None:
    p = nn.Parameter(torch.randn(4, 7).bfloat16())
    frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
    optimizer = libmuon.Muon([("w", p), ("frozen", frozen)], **run)
    p.grad = torch.randn_like(p)
    optimizer.step()
    path, out = tmp_path / "state.safetensors", tmp_path / "renamed.safetensors"
    libmuon.save_state(optimizer, path)
    result = convert(path, "--to", "libmuon", "--rename", "*=module.*", "-o", out)
    assert result.returncode == 0, result.stderr
    assert "module.w       (4, 7)  group 0  muon" in result.stdout
    other = libmuon.Muon([("module.frozen", frozen), ("module.w", p)], **run)
    libmuon.load_state(other, out)
    assert same(dict(other.state[p]), dict(optimizer.state[p]))


def test_a_state_file_is_for_libmuon_and_says_shapes(tmp_path: Path) -> None:
    (path,) = checkpoints(tmp_path, "keller")
    out = tmp_path / "out.safetensors"
    names = ("--model-names", "bias,a,b,conv", "--allow-partial")
    refused = convert(path, "--to", "torch", *names, "-o", out)
    assert refused.returncode == 1
    assert "would be a state file, which torch's optimizers do not load" in refused.stderr
    frozen = [("w", nn.Parameter(torch.ones(3, 2))), ("v", nn.Parameter(torch.ones(3, 2)))]
    theirs = torch.optim.Muon(frozen)
    frozen[0][1].grad = torch.ones(3, 2)
    theirs.step()
    torch.save(theirs.state_dict(), path)
    refused = convert(path, "--to", "libmuon", "-o", out)
    assert refused.returncode == 1
    assert "the shape of 'v', which a state file says, is not known" in refused.stderr
    assert not out.exists()


def test_a_damaged_state_file_and_a_models_safetensors_are_told_apart(tmp_path: Path) -> None:
    path, model = tmp_path / "state", tmp_path / "model.safetensors"
    p = nn.Parameter(torch.randn(4, 3))
    libmuon.save_state(libmuon.Muon([("w", p)]), path)  # known by its contents, not its name
    assert convert(path, "--to", "libmuon", "--dry-run").returncode == 0
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = convert(path, "--to", "libmuon", "--dry-run")
    assert result.returncode == 1
    assert "do not match their checksum" in result.stderr
    of_tomorrow = {"format": "libmuon state", "version": "2"}
    torch.ops.muon.write_state_file(str(path), ["w"], [p.detach()], of_tomorrow)
    result = convert(path, "--to", "libmuon", "--dry-run")
    assert "its version is '2', and this libmuon reads version '1'" in result.stderr
    torch.ops.muon.write_state_file(str(model), ["w"], [p.detach()], {"format": "pt"})
    theirs = torch.optim.Muon([p])
    p.grad = torch.ones_like(p)
    theirs.step()
    torch.save(theirs.state_dict(), tmp_path / "old.pt")
    old = (tmp_path / "old.pt", "--to", "libmuon", "--model-names", model, "--dry-run")
    result = convert(*old)
    assert result.returncode == 0, result.stderr
    assert "names are the model's" in result.stdout
