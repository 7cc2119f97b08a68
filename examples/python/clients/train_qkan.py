"""A network with qkan's layers, trained with qkan's own QKANMuon and with libmuon's.

python examples/python/clients/train_qkan.py

Both start from the same weights and see the same batches. qkan iterates in bfloat16, libmuon in
float32: the loss curves agree up to that rounding. A third run has qkan's own code iterate in
float32; it agrees with libmuon's far more closely. Short runs with other seeds tell whether one of
the two ends lower than the other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import common
import matplotlib.pyplot as plt
import qkan
import torch
from common import Run
from libmuon.compat.qkan import QKANMuon
from torch import Tensor, nn

OPTIMIZERS = {
    "libmuon": QKANMuon,
    "qkan": qkan.QKANMuon,
    "qkan in float32": qkan.QKANMuon,
}
LR = 1e-2  # at higher rates rounding alone sends the two different ways
GRID = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
STEPS, BATCH, WIDTH, NARROW, BLOCKS = 300, 256, 32, 6, 2
SEEDS, SHORT = 5, 50


class Block(nn.Module):
    """A residual bottleneck: linear, QKAN, linear."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, NARROW)
        self.kan = qkan.QKAN([NARROW, NARROW], reps=3, seed=seed, ba_trainable=True)
        self.up = nn.Linear(NARROW, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, WIDTH]."""
        return x + self.up(self.kan(self.down(x)))


class Net(nn.Module):
    """Two inputs, one output. `embed`, `lm_head` and all that is QKAN's stay on AdamW."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(2, WIDTH)
        self.blocks = nn.Sequential(*(Block(seed + i) for i in range(BLOCKS)))
        self.lm_head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, 1] for [batch, 2]."""
        return self.lm_head(self.blocks(self.embed(x)))


def target(x: Tensor) -> Tensor:
    """A ripple around the origin with a slope."""
    radius = x.square().sum(-1, keepdim=True).sqrt()
    return torch.cos(7 * radius) * torch.exp(-radius) + 0.5 * x[:, :1]


def square(side: int) -> Tensor:
    """A grid of side·side points in [-1, 1]²."""
    line = torch.linspace(-1, 1, side)
    return torch.cartesian_prod(line, line)


def fit(optimizer: str, lr: float, seed: int, steps: int = STEPS) -> tuple[Run, Net]:
    model = Net(seed)
    opt = OPTIMIZERS[optimizer](model.named_parameters(), lr=lr, adamw_lr=lr)
    points = torch.rand((4096, 2), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    losses = []
    for step, index in enumerate(common.batches(len(points), BATCH, steps, seed)):
        # qkan keeps AdamW's rate beside Muon's, libmuon in a group of its own.
        for group in opt.param_groups:
            group |= {key: lr * (1 - step / steps) for key in ("lr", "adamw_lr") if key in group}
        x = points[index]
        loss = nn.functional.mse_loss(model(x), target(x))
        opt.zero_grad()
        loss.backward()
        with in_float32() if optimizer == "qkan in float32" else nullcontext():
            opt.step()
        losses.append(loss.item())
    with torch.no_grad():
        final = nn.functional.mse_loss(model(square(64)), target(square(64))).item()
    return Run(optimizer, lr, final, losses), model


def in_float32() -> AbstractContextManager[Any]:
    """qkan's iteration, which converts its matrix to bfloat16, leaves it in float32 instead."""
    return mock.patch.object(Tensor, "bfloat16", Tensor.float)


def train(optimizer: str, lr: float, seed: int) -> Run:
    return fit(optimizer, lr, seed)[0]


def short_finals(seed: int) -> dict[str, list[float]]:
    """Errors after `SHORT` steps, by optimizer, each with the same `SEEDS` seeds."""
    return {
        optimizer: [fit(optimizer, LR, seed + i, SHORT)[0].final for i in range(SEEDS)]
        for optimizer in OPTIMIZERS
    }


def difference(run: Run, other: Run) -> list[float]:
    """Relative difference of two runs' losses, step by step."""
    return [abs(a - b) / b for a, b in zip(run.losses, other.losses, strict=True)]


def draw(path: Path, runs: dict[str, Run], model: Net) -> None:
    ours, theirs = runs["libmuon"], runs["qkan"]
    figure, panels = plt.subplots(1, 4, figsize=(17, 4), layout="constrained")
    common.draw_losses(panels[0], ours, theirs, "mean squared error")
    panels[0].lines[0].set_linewidth(5)  # libmuon's curve lies on it
    panels[0].lines[1].set_linewidth(1.2)
    panels[0].legend(frameon=False)
    for name, color in (("qkan", "#b5651d"), ("qkan in float32", "#3a7d44")):
        values = difference(ours, runs[name])
        panels[1].plot(range(1, STEPS + 1), values, color=color, linewidth=1, label=f"to {name}")
    rounding = {"color": "#777777", "linestyle": (0, (4, 3)), "label": "bfloat16's rounding, 2⁻⁸"}
    panels[1].axhline(2**-8, **rounding)
    panels[1].set(yscale="log", xlabel="step", xlim=(0, STEPS), ylim=(1e-10, 2))
    panels[1].set_ylabel("relative difference of libmuon's loss")
    common.style(panels[1])
    with torch.no_grad():
        images = [target(square(64)), model(square(64))]
    for axes, image, title in zip(panels[2:], images, ("target", "fit, libmuon"), strict=True):
        shown = axes.imshow(
            image.view(64, 64).T, origin="lower", extent=(-1, 1, -1, 1), vmin=-1, vmax=1.2
        )
        axes.set_title(title)
    figure.colorbar(shown, ax=panels[2:], shrink=0.8)
    figure.suptitle(
        "A network of qkan's layers, trained with qkan's QKANMuon and with libmuon's "
        "(legend: error on a grid)"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    args = common.parse_arguments(__doc__)
    if args.tune:
        common.tune(train, ("libmuon", "qkan"), GRID)
        return
    runs, models = common.compare(fit, dict.fromkeys(OPTIMIZERS, LR), args.seed)
    common.write(
        args.out,
        "qkan",
        "mean squared error on a grid",
        runs["libmuon"],
        runs["qkan"],
        float32=asdict(runs["qkan in float32"]),
        short_finals=short_finals(args.seed),
    )
    draw(args.out / "qkan.png", runs, models["libmuon"])


if __name__ == "__main__":
    main()
