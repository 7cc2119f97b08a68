"""A run that goes from Python to C++ and back through its state file, bit by bit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import libmuon
import pytest
import torch
from torch import Tensor

PROGRAM = Path(__file__).resolve().parents[2] / "build/dev/bin/state_resume"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"needs {PROGRAM}: make build")
SHAPES = [(7, 130), (20, 9), (5, 3)]
RUNS = [
    *((dtype, state, {}) for dtype in ("float32", "bfloat16", "float16")
      for state in (None, "float32", "int8", "int4", "fp8")),
    ("bfloat16", "int8", {"stochastic_rounding": True}),
    ("bfloat16", None, {"master": "split"}),
]  # fmt: skip


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    torch.ops.muon.write_state_file(str(path), list(tensors), list(tensors.values()), {})


def read(path: Path) -> dict[str, Tensor]:
    names, tensors, _ = torch.ops.muon.read_state_file(str(path), True)
    return dict(zip(names, tensors, strict=True))


def make(weights: list[Tensor], options: dict[str, Any]) -> tuple[list[Tensor], libmuon.Muon]:
    params = [w.clone().requires_grad_() for w in weights]
    named = [(f"weight{i}", p) for i, p in enumerate(params)]
    return params, libmuon.Muon(named, lr=0.02, **options)


def train(opt: libmuon.Muon, params: list[Tensor], steps: list[list[Tensor]]) -> None:
    for step in steps:
        for p, gradient in zip(params, step, strict=True):
            p.grad = gradient.clone()
        opt.step()


def in_cpp(
    folder: Path,
    weights: list[Tensor],
    steps: list[list[Tensor]],
    state: Path | None,
    options: dict[str, Any],
) -> tuple[list[Tensor], Path]:
    """Weights and state file after C++ has taken the steps."""
    tensors = {str(i): w for i, w in enumerate(weights)}
    tensors |= {f"{s}.{i}": g for s, step in enumerate(steps) for i, g in enumerate(step)}
    write(folder / "in", tensors)
    rounding = "stochastic" if options.get("stochastic_rounding") else options.get("master", "none")
    subprocess.run(
        [
            PROGRAM,
            folder / "in",
            state or "-",
            options["algorithm"],
            str(options["state_dtype"]),
            rounding,
            folder / "out",
            folder / "cpp.safetensors",
        ],
        check=True,
    )
    out = read(folder / "out")
    return [out[str(i)] for i in range(len(weights))], folder / "cpp.safetensors"


@pytest.mark.filterwarnings("ignore:bfloat16 parameters are rounded")
@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw", "adam"])
@pytest.mark.parametrize(("dtype", "state_dtype", "rounding"), RUNS)
def test_e12_e16_three_steps_in_one_language_and_three_in_the_other(
    tmp_path: Path, algorithm: str, dtype: str, state_dtype: str | None, rounding: dict[str, Any]
) -> None:
    weights = [torch.randn(s).to(getattr(torch, dtype)) for s in SHAPES]
    steps = [[torch.randn_like(w) for w in weights] for _ in range(6)]
    options = {"algorithm": algorithm, "state_dtype": state_dtype, **rounding}
    straight, whole = make(weights, options)
    train(whole, straight, steps)

    half, first = make(weights, options)
    train(first, half, steps[:3])
    libmuon.save_state(first, tmp_path / "python.safetensors")
    rest, state = in_cpp(
        tmp_path, [p.detach() for p in half], steps[3:], tmp_path / "python.safetensors", options
    )
    for a, b in zip(straight, rest, strict=True):
        assert torch.equal(a.detach(), b)

    middle, state = in_cpp(tmp_path, weights, steps[:3], None, options)
    params, second = make(middle, options)
    libmuon.load_state(second, state)
    train(second, params, steps[3:])
    for a, b in zip(straight, params, strict=True):
        assert torch.equal(a, b)
        for key, value in whole.state[a].items():
            other = second.state[b][key]
            assert value.dtype == other.dtype
            assert torch.equal(
                value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
            )
