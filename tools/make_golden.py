#!/usr/bin/env python3
"""Writes or checks the golden data of tests/golden.

    python tools/make_golden.py            write the JSON files
    python tools/make_golden.py --check    recompute everything and compare with the files

What the cases are is in golden_cases.py, the formulas are in golden_model.py, the format and the
rules for tolerances in tests/golden/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from golden_cases import FILES, Case
from golden_model import (
    BF16,
    FP32,
    FP64,
    Precision,
    compute,
    matrix_sides,
    orthogonalize_by_svd,
    shape_factor,
)
from torch import Tensor

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
PRECISIONS = {"fp64": FP64, "fp32": FP32, "bf16": BF16}

# --- sizes, errors, tolerances -------------------------------------------------------------------


def quantities(expected: Any, quantity: str = "") -> list[tuple[str, Tensor]]:
    """Every number of an `expected` tree with its quantity, the outermost key besides "steps"."""
    if isinstance(expected, dict):
        pairs = [(key if quantity in ("", "steps") else quantity, v) for key, v in expected.items()]
    elif isinstance(expected, list):
        pairs = [(quantity, v) for v in expected]
    else:
        return [(quantity, torch.as_tensor(expected, dtype=torch.float64))]
    return [leaf for key, value in pairs for leaf in quantities(value, key)]


def largest(leaves: list[tuple[str, Tensor]]) -> dict[str, float]:
    """The largest absolute value of each quantity."""
    found: dict[str, float] = {}
    for key, value in leaves:
        found[key] = max(found.get(key, 0.0), value.abs().max().item())
    return found


def largest_error(got: Case, expected: Case) -> dict[str, float]:
    pairs = zip(quantities(got), quantities(expected), strict=True)
    return largest([(key, a - b) for (key, a), (_, b) in pairs])


def round_up(x: float) -> float:
    """To two significant digits."""
    if x == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return float(f"{math.ceil(x / unit - 1e-9) * unit:.1e}")


def widest_factor(case: Case) -> float:
    muon = case["options"]["muon"]
    shapes = [list(p.shape) for p in case["inputs"]["params"].values() if p.ndim > 1]
    sides = [matrix_sides(shape, muon["flatten"]) for shape in shapes]
    return max(shape_factor(muon["scale"], *side) for side in sides)


def bf16_tolerances(case: Case, size: dict[str, float]) -> dict[str, float] | None:
    """Three errors of a bf16 iteration, with a floor of about four roundings of 1."""
    error = largest_error(compute(case, BF16), case["expected"])
    floor = {"output": 0.015, "update": 0.015}
    if "variance_neuron" in size:
        floor["variance_neuron"] = 0.03 * size["variance_neuron"]
    muon = case["options"].get("muon")
    if muon is not None:
        factor = widest_factor(case)
        floor["params"] = 2 * 0.015 * muon["lr"] * factor
        if muon["decay"] == "cautious":  # room for one flipped entry of the mask a step
            decay_lr = muon["lr"] * (factor if muon["decay_lr"] == "lr*scale" else 1)
            error["params"] += decay_lr * muon["weight_decay"] * size["params"] / 3
    bounds = {k: round_up(max(3 * error[k], floor.get(k, 0.0) if size[k] else 0.0)) for k in size}
    meaningless = any(bounds.get(k, 0.0) > 0.6 for k in ("output", "update"))
    return None if meaningless else bounds


def tolerances(case: Case) -> dict[str, dict[str, float] | None]:
    size = largest(quantities(case["expected"]))
    error = largest_error(compute(case, FP32), case["expected"])
    fp64 = {k: round_up(1e-12 * max(1.0, v)) if v else 0.0 for k, v in size.items()}
    fp32 = {
        k: round_up(max(4 * error[k], 1e-6 * max(v, 0.1))) if v else 0.0 for k, v in size.items()
    }
    iterates = "x" in case["inputs"] or "params" in case["inputs"]
    bf16 = bf16_tolerances(case, size) if iterates else fp32
    if bf16 is not None:
        bf16 = {k: max(bound, fp32[k]) for k, bound in bf16.items()}
    return {"fp64": fp64, "fp32": fp32, "bf16": bf16}


# --- JSON ----------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        data = [x + 0.0 for x in value.reshape(-1).tolist()]  # no negative zeros
        return {"shape": list(value.shape), "data": data}
    if isinstance(value, dict):
        return {k: encode(v) for k, v in value.items()}
    return [encode(v) for v in value] if isinstance(value, list | tuple) else value


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"shape", "data"}


def decode(value: Any) -> Any:
    if is_tensor(value):
        return torch.tensor(value["data"], dtype=torch.float64).reshape(value["shape"])
    if isinstance(value, dict):
        return {k: decode(v) for k, v in value.items()}
    return [decode(v) for v in value] if isinstance(value, list) else value


def dump(value: Any, indent: str = "") -> str:
    """JSON with one tensor, or one dict of plain values, a line."""
    inner = indent + " "
    nested = isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values())
    if nested and not is_tensor(value):
        lines = [f"{inner}{json.dumps(k)}: {dump(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        lines = [inner + dump(v, inner) for v in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return json.dumps(value, separators=(",", ":"))


# --- writing and checking ------------------------------------------------------------------------


def write(folder: Path) -> None:
    for name, cases in FILES.items():
        finished = []
        for case in cases():
            case["expected"] = compute(case)
            finished.append(encode(case | {"tolerance": tolerances(case)}))
        (folder / name).write_text(dump(finished) + "\n")
        print(f"{name:28} {len(finished):3} cases")


def check_within(case: Case, got: Case, precision: str, what: str) -> None:
    bounds = case["tolerance"][precision]
    if bounds is None:
        return
    for key, error in largest_error(got, case["expected"]).items():
        if not error <= bounds[key]:
            raise SystemExit(
                f"{case['name']}: {what}: {key} is off by {error}, allowed {bounds[key]}"
            )


def check_case(stored: Case, fresh: Case) -> None:
    for key in ("name", "source", "options", "inputs"):
        if encode(fresh[key]) != encode(stored[key]):
            raise SystemExit(f"{stored['name']}: {key} differs from golden_cases.py")
    precision: Precision
    for label, precision in PRECISIONS.items():
        check_within(stored, compute(stored, precision), label, f"recomputed in {label}")
    if "x" in stored["inputs"]:
        by_svd = orthogonalize_by_svd(stored["inputs"]["x"], stored["options"])
        check_within(stored, {"output": by_svd}, "fp64", "by its singular values")


def check(folder: Path) -> int:
    """Compares the files of `folder` with a fresh computation; returns the number of cases."""
    names: list[str] = []
    for name, cases in FILES.items():
        stored = decode(json.loads((folder / name).read_text()))
        for old, new in zip(stored, cases(), strict=True):
            check_case(old, new)
            names.append(old["name"])
    if len(set(names)) != len(names):
        raise SystemExit("case names are not unique")
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes or checks the data of tests/golden.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--folder", type=Path, default=GOLDEN, help="default: tests/golden")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.check:
        print(f"{check(args.folder)} cases agree")
    else:
        write(args.folder)


if __name__ == "__main__":
    main()
