"""Reads the golden data of tests/golden and says its options to libmuon."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent.parent / "golden"
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}
STORED = PRECISIONS | {"bf16": torch.float32}  # with a bfloat16 iteration
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A case and the precision in which it is to be run; tensors are in that precision."""

    name: str
    precision: str
    options: Options
    inputs: Options
    expected: Options
    tolerance: Options  # by quantity, for `precision`

    def __str__(self) -> str:
        return f"{self.name}-{self.precision}"

    def check(self, got: Tensor, expected: Tensor, quantity: str, where: str = "") -> None:
        """Asserts that `got` is as near to `expected` as the case demands of `quantity`."""
        assert got.shape == expected.shape, (self.name, quantity, where)
        error = (got.double() - expected).abs().max().item()
        bound = self.tolerance[quantity]
        assert error <= bound, f"{self}: {quantity} {where} is off by {error}, allowed {bound}"


def cases(*files: str, precisions: Iterable[str] = PRECISIONS) -> list[Case]:
    """Every case of the files, in float64 and in float32."""
    return [case for file in files for case in _read(file, precisions)]


def _read(file: str, precisions: Iterable[str]) -> Iterator[Case]:
    for raw in json.loads((FOLDER / f"{file}.json").read_text()):
        for precision in precisions:
            if raw["tolerance"][precision] is None:
                continue
            yield Case(
                name=raw["name"],
                precision=precision,
                options=raw["options"],
                inputs=_decode(raw["inputs"], STORED[precision]),
                expected=_decode(raw["expected"], torch.float64),
                tolerance=raw["tolerance"][precision],
            )


def _decode(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"shape", "data"}:
            return torch.tensor(value["data"], dtype=dtype).reshape(value["shape"])
        return {key: _decode(v, dtype) for key, v in value.items()}
    return [_decode(v, dtype) for v in value] if isinstance(value, list) else value


# --- how the options of a case are said to libmuon: the one place that knows ----------------------


def orthogonalize_options(ortho: Options) -> Options:
    """Keyword arguments of `libmuon.orthogonalize`, which are options of a group as well."""
    rows = [tuple(row) for row in ortho["coefficients"]]
    schedule = {"ns_coefficients": rows} if rows else {}
    return schedule | {
        "ns_steps": len(rows),
        "eps": ortho["eps"],
        "normalization": ortho["norm"],
        "norm_factor": ortho["norm_factor"],
    }


def muon_options(muon: Options, ndim: int) -> Options:
    """A parameter group of `libmuon.Muon` for parameters of `ndim` dims."""
    normuon = muon["normuon_beta2"] is not None
    options = {
        "algorithm": "normuon" if normuon else "muon",
        "lr": muon["lr"],
        "weight_decay": muon["weight_decay"],
        "momentum": muon["momentum"],
        "nesterov": muon["nesterov"],
        "maximize": muon["maximize"],
        "momentum_form": muon["momentum_form"],
        "adjust_lr_fn": muon["scale"],
        "cautious": muon["decay"] == "cautious",
        "decay_lr": "adjusted" if muon["decay_lr"] == "lr*scale" else "lr",
        "split_sizes": muon["split_sizes"],
        **orthogonalize_options(muon["ortho"]),
    }
    if normuon:
        options["muon_beta2"] = muon["normuon_beta2"]
    if ndim > 2:
        options |= {"flatten": True} if muon["flatten"] else {"batch_dims": ndim - 2}
    return options


def adamw_options(adamw: Options) -> Options:
    """The parameter group of AdamW."""
    return {"algorithm": "adamw"} | adamw | {"betas": tuple(adamw["betas"])}


def is_supported(case: Case) -> bool:
    """Whether libmuon has the case's rules.

    The exception is muonium's own rule for the blocks of a split weight; `muonium_fixed` and
    `normuon_fixed` are what libmuon does instead.
    """
    muon = case.options.get("muon")
    return muon is None or muon["split_sizes"] is None or muon["split_rule"] == "separate"
