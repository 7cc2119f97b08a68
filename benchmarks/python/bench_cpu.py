"""Whole optimizer steps on a CPU, peers interleaved in one process, errors beside times.

``make bench-cpu`` runs every set of ``benchmarks/shapes.json`` in float32 and writes
``benchmarks/results/cpu.json``. A time is the median of several steps; the error is that of the
first step's update against the same step in float64, relative, in the Frobenius norm.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import statistics
import subprocess
import time
from typing import Any

import libmuon
import torch
from contenders import LR, WEIGHT_DECAY, Contender, contenders, newton_schulz
from torch import Tensor

ROOT = pathlib.Path(__file__).resolve().parents[2]


def flop(shape: list[int]) -> float:
    """Products of the standard form, 5 steps."""
    n, m = sorted(shape)
    return n * n * (20.0 * m + 10.0 * n)


def make_params(matrices: list[dict[str, Any]], seed: int) -> list[Tensor]:
    """Fresh parameters with gradients."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for entry in matrices:
        for _ in range(entry["count"]):
            p = torch.randn(entry["shape"], generator=generator) * 0.02
            p.requires_grad_()
            p.grad = torch.randn(entry["shape"], generator=generator)
            params.append(p)
    return params


def exact_update(p: Tensor) -> Tensor:
    """A first Muon step's change of ``p``, in float64."""
    assert p.grad is not None
    factor = max(1.0, p.size(0) / p.size(1)) ** 0.5
    return -LR * WEIGHT_DECAY * p.double() - LR * factor * newton_schulz(p.grad.double())


def update_error(contender: Contender, matrices: list[dict[str, Any]]) -> float:
    """Largest relative error of a first step over one matrix of each shape."""
    worst = 0.0
    one_each = [{**entry, "count": 1} for entry in matrices]
    with torch.no_grad():
        params = make_params(one_each, seed=1)
        before = [p.clone() for p in params]
        expected = [exact_update(p) for p in params]
        contender.build(params).step()
        for p, old, want in zip(params, before, expected, strict=True):
            got = p.double() - old.double()
            worst = max(worst, ((got - want).norm() / want.norm()).item())
    return worst


def predicted_seconds(contender: Contender, matrices: list[dict[str, Any]]) -> float:
    """Extrapolates from one step on the cheapest matrix of the set."""
    cheapest = min(matrices, key=lambda entry: flop(entry["shape"]))
    optimizer = contender.build(make_params([{**cheapest, "count": 1}], seed=2))
    start = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - start
    total = sum(entry["count"] * flop(entry["shape"]) for entry in matrices)
    return seconds * total / flop(cheapest["shape"])


def measure(matrices: list[dict[str, Any]], rounds: int, limit: float) -> dict[str, dict[str, Any]]:
    """Times of all contenders, a step each in turn; torch's is skipped where too slow."""
    results: dict[str, dict[str, Any]] = {}
    running: dict[str, Any] = {}
    for contender in contenders():
        predicted = predicted_seconds(contender, matrices)
        if predicted * (rounds + 2) > limit and contender.name == "torch.optim.Muon":
            results[contender.name] = {"skipped": f"predicted {predicted:.0f} s a step"}
            continue
        results[contender.name] = {
            "error": update_error(contender, matrices) if contender.is_muon else None
        }
        running[contender.name] = contender.build(make_params(matrices, seed=3))
        running[contender.name].step()
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, optimizer in running.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append(time.perf_counter() - start)
    for name, samples in times.items():
        results[name]["median_ms"] = 1e3 * statistics.median(samples)
        results[name]["min_ms"] = 1e3 * min(samples)
    return results


def print_set(name: str, results: dict[str, dict[str, Any]]) -> None:
    """One table: time, ratio to libmuon, error."""
    ours = results["libmuon.Muon"]["median_ms"]
    print(f"\n{name}")
    for contender, result in results.items():
        if "skipped" in result:
            print(f"  {contender:26s} skipped: {result['skipped']}")
            continue
        error = "" if result["error"] is None else f"error {result['error']:.1e}"
        ratio = result["median_ms"] / ours
        print(f"  {contender:26s} {result['median_ms']:10.2f} ms   {ratio:7.2f}x   {error}")


def environment() -> dict[str, Any]:
    """Hardware, versions and commit of a result."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "libmuon": libmuon.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """Runs the sets and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="*", help="names from shapes.json (default: all)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for torch.optim.Muon")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/cpu.json")
    args = parser.parse_args()
    catalogue = json.loads((ROOT / "benchmarks/shapes.json").read_text())
    report: dict[str, Any] = {"environment": environment(), "sets": {}}
    for name in args.sets or catalogue:
        results = measure(catalogue[name]["matrices"], args.rounds, args.limit)
        print_set(name, results)
        report["sets"][name] = results
    ratios = [
        result["libmuon.Muon"]["median_ms"] / result["plain float32 loop"]["median_ms"]
        for result in report["sets"].values()
    ]
    print(f"\nplain loop / libmuon, geometric mean: {math.prod(ratios) ** (-1 / len(ratios)):.2f}x")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
