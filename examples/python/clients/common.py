"""What the clients share: command line, record of a run, result file, look of the pictures."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib.axes import Axes
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
COLORS = {"libmuon": "#1f5fbf", "theirs": "#b5651d"}
LABELS = {"adamw": "AdamW"}
# Rates are chosen on one seed and reported on another.
TUNING_SEED = 1


@dataclass
class Run:
    """One training: its losses step by step, and the number that is compared."""

    optimizer: str
    lr: float
    final: float
    losses: list[float] = field(repr=False)
    seconds: float = 0.0


Train = Callable[[str, float, int], Run]


def parse_arguments(description: str) -> argparse.Namespace:
    """The options that every client has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out/examples")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tune", action="store_true", help="search the learning rates instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def timed(train: Train, optimizer: str, lr: float, seed: int) -> Run:
    """`train` with its seconds."""
    start = time.perf_counter()
    run = train(optimizer, lr, seed)
    run.seconds = time.perf_counter() - start
    return run


def compare(
    fit: Callable[[str, float, int], tuple[Run, Any]], lrs: dict[str, float], seed: int
) -> tuple[dict[str, Run], dict[str, Any]]:
    """Trains with every optimizer; returns runs and models by its name."""
    runs, models = {}, {}
    for optimizer, lr in lrs.items():
        start = time.perf_counter()
        runs[optimizer], models[optimizer] = fit(optimizer, lr, seed)
        runs[optimizer].seconds = time.perf_counter() - start
    return runs, models


def tune(train: Train, optimizers: Iterable[str], grid: Sequence[float]) -> None:
    """Prints the final loss of every optimizer at every learning rate."""
    for optimizer in optimizers:
        finals = {lr: timed(train, optimizer, lr, TUNING_SEED).final for lr in grid}
        best = min(finals, key=lambda lr: (math.isnan(finals[lr]), finals[lr]))
        cells = "  ".join(f"{lr:g}: {final:.5g}" for lr, final in finals.items())
        print(f"{optimizer:<10}{cells}  best {best:g}", flush=True)


def batches(count: int, batch: int, steps: int, seed: int) -> Iterable[Tensor]:
    """Indices of `steps` random batches out of `count` samples."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(count, (batch,), generator=generator)


def linear_to_zero(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate falls linearly and is zero after `steps`."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def write(out: Path, client: str, metric: str, ours: Run, theirs: Run, **extra: Any) -> None:
    """Writes `<client>.json` and prints the comparison in one line."""
    result = {
        "client": client,
        "metric": metric,
        "ours": asdict(ours),
        "theirs": asdict(theirs),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **extra,
    }
    text = json.dumps(result, indent=1) + "\n"
    (out / f"{client}.json").write_text(text, encoding="utf-8")
    sides = " | ".join(
        f"{run.optimizer} {run.final:.5g} (lr {run.lr:g}, {run.seconds:.0f} s)"
        for run in (ours, theirs)
    )
    print(f"{client}: {metric}: {sides}", flush=True)


def smooth(losses: Sequence[float], window: int) -> tuple[list[int], list[float]]:
    """Steps and means of the last `window` losses before each."""
    means = torch.tensor(losses, dtype=torch.float64).unfold(0, window, 1).mean(1)
    return list(range(window, len(losses) + 1)), means.tolist()


def draw_losses(axes: Axes, ours: Run, theirs: Run, ylabel: str, window: int = 1) -> None:
    """Training loss of both over the steps."""
    for run, key in ((theirs, "theirs"), (ours, "libmuon")):
        steps, losses = smooth(run.losses, window)
        name = LABELS.get(run.optimizer, run.optimizer)
        label = f"{name} (lr {run.lr:g}): {run.final:.4g}"
        axes.plot(steps, losses, color=COLORS[key], linewidth=1.8, label=label)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("step" if window == 1 else f"step (mean of {window})")
    axes.set_ylabel(ylabel)
    style(axes)


def style(axes: Axes) -> None:
    """Grid, frame and legend as in all pictures."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
