"""What a smaller state costs: loss of the demo's model, bytes, step time, a step's peak memory.

``make bench-state`` trains the demo's model with every format of the momentum at once, a step each
in turn on the same batch, so that the ratios of step times are those of one run; then it times
large matrices in the same way, and measures what a step allocates beyond parameters, gradients
and state. The error of a momentum is that against the same average in float32 of the gradients
that this very run has seen. ``benchmarks/results/state.json`` has the numbers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import libmuon
import torch
from bench_cpu import ROOT, environment
from torch import Tensor

sys.path.extend([str(ROOT / "examples/python"), str(ROOT / "tools")])
import demo_corpus
import demo_runs
import train_gpt
from gpt import GPT, Corpus, Sampler

FORMATS = ("float32", "int8", "int4", "fp8")
# The most that a format may add to the float32 run's validation loss, and its bytes an entry.
LOSS_BOUND = {"int8": 0.01, "int4": 0.03, "fp8": 0.02}
BYTES_BOUND = {"int8": 1.05, "int4": 0.55, "fp8": 1.05}
TIME_BOUND = 1.25
PEAK_BOUND = 64_000_000
MOMENTUM = 0.95
# Of every run of `make demo`.
DEMO = argparse.Namespace(batch=16, context=128, layers=4, width=128, heads=4, eval_batches=8)
LARGE = {"1024x1024": (1024, 1024), "1024x4096": (1024, 4096)}


def matrix_params(optimizer: libmuon.Muon) -> list[Tensor]:
    """The parameters that Muon steps."""
    groups = optimizer.param_groups
    return [p for group in groups if group["algorithm"] == "muon" for p in group["params"]]


def momentum_bytes(optimizer: libmuon.Muon) -> float:
    """Bytes an entry of the momentum, scales included."""
    params = matrix_params(optimizer)
    tensors = [
        tensor
        for p in params
        for key, tensor in optimizer.state[p].items()
        if key.startswith("momentum_buffer")
    ]
    return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in params)


def momentum_error(optimizer: libmuon.Muon, exact: list[Tensor]) -> float:
    """Relative error of the momentum in the Frobenius norm, over all matrices."""
    params = matrix_params(optimizer)
    copies = [p.detach().clone().requires_grad_() for p in params]
    plain = libmuon.Muon(copies, state_dtype="float32")
    groups = plain.state_dict()["param_groups"]
    stored = dict(enumerate(optimizer.state[p] for p in params))
    plain.load_state_dict({"state": stored, "param_groups": groups})
    numbers = [plain.state[p]["momentum_buffer"] for p in copies]
    wrong = sum(((b - e).norm() ** 2).item() for b, e in zip(numbers, exact, strict=True))
    return float((wrong / sum((e.norm() ** 2).item() for e in exact)) ** 0.5)


@dataclass
class Stepped:
    """An optimizer with its times and the exact average of its gradients."""

    optimizer: libmuon.Muon
    exact: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Times a step on the gradients that are there."""
        grads = [p.grad for p in matrix_params(self.optimizer)]
        self.exact = self.exact or [torch.zeros_like(g) for g in grads]
        torch._foreach_lerp_(self.exact, grads, 1 - MOMENTUM)
        start = time.perf_counter()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)

    def result(self, base: Stepped) -> dict[str, float]:
        """Bytes, error and time, the last also relative to `base`, whose steps alternated."""
        return {
            "bytes_per_entry": momentum_bytes(self.optimizer),
            "momentum_error": momentum_error(self.optimizer, self.exact),
            "median_ms": 1e3 * statistics.median(self.seconds),
            "min_ms": 1e3 * min(self.seconds),
            "median_ratio": statistics.median(self.seconds) / statistics.median(base.seconds),
            "min_ratio": min(self.seconds) / min(base.seconds),
        }


class Training:
    """One run of the demo, a step at a time."""

    def __init__(
        self, corpus: Corpus, seed: int, steps: int, lr: float, muon: str, adam: str
    ) -> None:
        self.model = GPT(corpus.vocabulary, DEMO.context, DEMO.layers, DEMO.width, DEMO.heads)
        self.model.initialize(seed)
        optimizer = libmuon.Muon(self.model, lr=lr, weight_decay=train_gpt.WEIGHT_DECAY)
        for group in optimizer.param_groups:
            group["state_dtype"] = muon if group["algorithm"] == "muon" else adam
        self.stepped = Stepped(optimizer)
        factor = train_gpt.warmup_then_linear(steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        loss = self.model.loss(inputs, targets)
        self.stepped.optimizer.zero_grad()
        loss.backward()
        self.stepped.step()
        self.schedule.step()


def train(corpus: Corpus, seed: int, steps: int, adam: list[str]) -> dict[str, dict[str, float]]:
    """Final validation losses, and what `Stepped.result` says, of every format.

    Adam's moments stay float32, but in one more run each of the formats `adam`.
    """
    lr = demo_runs.tuned_lr("muon")
    formats = {name: (name, "float32") for name in FORMATS}
    formats |= {f"{name}, Adam's too": (name, name) for name in adam}
    runs = {name: Training(corpus, seed, steps, lr, *pair) for name, pair in formats.items()}
    sampler = Sampler(corpus.train, DEMO.batch, DEMO.context, seed)
    for step in range(1, steps + 1):
        batch = sampler.next()
        for run in runs.values():
            run.step(*batch)
        if step % 50 == 0:
            print(f"  seed {seed}: {step}/{steps}", file=sys.stderr, flush=True)
    base = runs["float32"]
    losses = {
        name: train_gpt.evaluate(DEMO, run.model, corpus.validation) for name, run in runs.items()
    }
    return {
        name: {
            "validation_loss": losses[name],
            "relative_loss": losses[name] / losses["float32"] - 1,
            **run.stepped.result(base.stepped),
        }
        for name, run in runs.items()
    }


def time_matrix(shape: tuple[int, int], rounds: int) -> dict[str, dict[str, float]]:
    """Steps of one matrix in every format, in turn, on the same fresh gradients."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * 0.02
    runs = {
        name: Stepped(libmuon.Muon([weight.clone().requires_grad_()], state_dtype=name))
        for name in FORMATS
    }
    for _ in range(rounds + 1):
        gradient = torch.randn(shape, generator=generator)
        for run in runs.values():
            matrix_params(run.optimizer)[0].grad = gradient
            run.step()
    for run in runs.values():
        del run.seconds[0]  # allocates the state
    return {name: run.result(runs["float32"]) for name, run in runs.items()}


def memory(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def peak_of_a_step(count: int, threads: int) -> dict[str, int]:
    """What the first two steps on `count` float32 matrices of 1024 x 1024 allocate beyond the rest.

    In a process of its own: what the allocator keeps of earlier work would hide allocations.
    """
    torch.set_num_threads(threads)
    params = [torch.full((1024, 1024), 0.02).requires_grad_() for _ in range(count)]
    for p in params:
        p.grad = torch.randn(1024, 1024)
    optimizer = libmuon.Muon(params, state_dtype="int8")
    before = memory("VmRSS")
    result = {"parameter_bytes": count * 4 * 1024 * 1024}
    for name in ("first_step", "second_step"):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        optimizer.step()
        state = [t for p in params for t in optimizer.state[p].values()]
        state_bytes = sum(t.numel() * t.element_size() for t in state)
        result[name] = memory("VmHWM") - before - state_bytes
    result["state_bytes"] = state_bytes
    return result


def measure_peak(count: int, threads: int) -> dict[str, int]:
    """`peak_of_a_step` in a fresh process whose freed tensors leave it at once."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(peak_of_a_step, count, threads).result()


def print_rows(title: str, rows: dict[str, dict[str, float]]) -> None:
    """One table; a value that misses its bound has a "!" behind it."""
    print(f"\n{title}")
    for name, row in rows.items():
        loss = ""
        if "validation_loss" in row:
            is_high = row["relative_loss"] > LOSS_BOUND.get(name, 1.0)
            mark = "!" if is_high else " "
            loss = f"loss {row['validation_loss']:.4f} ({row['relative_loss']:+6.2%}){mark}  "
        size = "!" if row["bytes_per_entry"] > BYTES_BOUND.get(name, 4.0) else " "
        slow = "!" if row["median_ratio"] > TIME_BOUND else " "
        print(
            f"  {name:18s} {loss}{row['bytes_per_entry']:.3f} bytes{size}  "
            f"momentum error {row['momentum_error']:.1e}  step {row['median_ms']:8.2f} ms, "
            f"{row['median_ratio']:.3f}x{slow} (best {row['min_ratio']:.3f}x)"
        )


def main() -> None:
    """Runs the parts and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="of training; 0 leaves it out")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument(
        "--adam", nargs="*", choices=FORMATS[1:], default=["int8"], help="for Adam's moments too"
    )
    parser.add_argument("--rounds", type=int, default=9, help="steps of each large matrix")
    parser.add_argument("--peak-matrices", type=int, default=256, help="0 leaves the peak out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/state.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {"environment": environment(), "training": {}, "matrices": {}}
    if args.steps:
        folder = ROOT / "out/state/corpus"
        report["corpus"] = demo_corpus.write(folder)["sha256"]
        report["steps"] = args.steps
        for seed in args.seeds:
            rows = train(Corpus(folder), seed, args.steps, args.adam)
            report["training"][f"seed {seed}"] = rows
            print_rows(f"the demo's model, {args.steps} steps, seed {seed}", rows)
    if args.rounds:
        for name, shape in LARGE.items():
            report["matrices"][name] = time_matrix(shape, args.rounds)
            print_rows(f"one matrix, {name}", report["matrices"][name])
    if args.peak_matrices:
        report["peak"] = peak = measure_peak(args.peak_matrices, args.threads)
        worst = max(peak["first_step"], peak["second_step"])
        mark = " !" if worst > PEAK_BOUND else ""
        print(
            f"\nint8 on {peak['parameter_bytes'] / 1e9:.2f} GB of parameters: a step allocates "
            f"{worst / 1e6:.1f} MB beyond parameters, gradients and state{mark}"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
