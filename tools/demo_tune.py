"""`make demo-tune`: chooses the demo's learning rates and checks them on seeds of their own.

Each optimizer trains with learning rates a factor 2 apart, at the demo's full length, until the
best of at least 5 has a worse neighbour on both sides. Then the chosen pair runs on three seeds
that had no part in the choice. Writes benchmarks/results/demo_tune.json; takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import demo_corpus
import demo_report
import demo_runs
import torch

FIRST_GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
TUNING_SEED = 100
SEEDS = (0, 1, 2)


class Tuner:
    """Runs the C++ program and keeps its logs in `folder`."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps

    def run(self, optimizer: str, lr: float, seed: int) -> demo_runs.Run:
        """One training run at the demo's length."""
        path = self.folder / f"{optimizer}-lr{lr:g}-seed{seed}.jsonl"
        print(f"{optimizer}, lr {lr:g}, seed {seed}", flush=True)
        options = {
            "corpus": self.folder / "corpus",
            "optimizer": optimizer,
            "lr": lr,
            "steps": self.steps,
            "seed": seed,
        }
        return demo_runs.train("cpp", path, options)

    def search(self, optimizer: str) -> dict[float, float]:
        """Final validation loss by learning rate, the best one not at the edge."""
        losses: dict[float, float] = {}
        pending = list(FIRST_GRID)
        while pending:
            for lr in pending:
                loss = self.run(optimizer, lr, TUNING_SEED).end["validation_loss"]
                diverged = loss is None or not math.isfinite(loss)
                losses[lr] = math.inf if diverged else loss
            best = min(losses, key=lambda lr: losses[lr])
            pending = [lr for lr in (best / 2, best * 2) if lr not in losses]
        return losses


def environment() -> dict[str, Any]:
    """What the numbers depend on."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=demo_runs.ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
    }


def compare(tuner: Tuner, chosen: dict[str, float], seed: int) -> dict[str, Any]:
    """Both optimizers with their chosen rates on one seed."""
    adamw = tuner.run("adamw", chosen["adamw"], seed)
    muon = tuner.run("muon", chosen["muon"], seed)
    reached = demo_report.first_at(muon, adamw.end["validation_loss"])
    return {
        "seed": seed,
        "adamw": adamw.end["validation_loss"],
        "muon": muon.end["validation_loss"],
        "muon_steps_to_adamw_final": reached["step"] if reached else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=demo_runs.ROOT / "out/demo-tune")
    parser.add_argument("--result", type=Path, default=demo_runs.TUNED)
    parser.add_argument("--steps", type=int, default=500, help="the demo's own length")
    args = parser.parse_args()
    meta = demo_corpus.write(args.out / "corpus")
    tuner = Tuner(args.out, args.steps)
    losses = {optimizer: tuner.search(optimizer) for optimizer in ("adamw", "muon")}
    chosen = {optimizer: min(found, key=found.__getitem__) for optimizer, found in losses.items()}
    result = {
        "steps": args.steps,
        "tuning_seed": TUNING_SEED,
        "final_validation_loss": {
            optimizer: {f"{lr:g}": found[lr] for lr in sorted(found)}
            for optimizer, found in losses.items()
        },
        "chosen": chosen,
        "seeds": [compare(tuner, chosen, seed) for seed in SEEDS],
        "corpus": {key: meta[key] for key in ("source", "sha256", "characters")},
        "environment": environment(),
    }
    args.result.parent.mkdir(parents=True, exist_ok=True)
    args.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
