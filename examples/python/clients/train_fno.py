"""A Fourier neural operator (neuraloperator) on Darcy flow: spectral weights on Muon, or AdamW.

python examples/python/clients/train_fno.py

The data set is made here: -∇·(a ∇u) = 1 on the unit square with u = 0 at the edge, for random
media a, by finite volumes and scipy's sparse solver. The operator learns a → u. A spectral weight
is complex, [inputs, outputs, modes, modes]: for every pair of modes one matrix.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "disabled")  # neuralop imports it

import common
import libmuon
import matplotlib.pyplot as plt
import numpy as np
import torch
from common import Run
from neuralop.losses import LpLoss
from neuralop.models import FNO
from neuralop.training import AdamW
from scipy.fft import idctn
from scipy.sparse import diags_array
from scipy.sparse.linalg import spsolve
from torch import Tensor

SIDE, TRAIN, TEST = 32, 256, 64
STEPS, BATCH = 200, 16
WEIGHT_DECAY = 1e-4
LRS = {"libmuon": 4e-2, "adamw": 2e-2}
GRID = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)

# Rows are outputs, columns inputs; the modes, which are left, are a batch of matrices.
SPECTRAL = ("fno_blocks.convs.*.weight.tensor", {"rows": (1,), "cols": (0,)})


def medium(rng: np.random.Generator) -> np.ndarray:
    """A random field with two values, 3 and 12, [SIDE, SIDE]."""
    frequency = np.pi * np.arange(SIDE)
    decay = (frequency[:, None] ** 2 + frequency**2 + 9.0) ** -1.0
    smooth = idctn(rng.standard_normal((SIDE, SIDE)) * decay, norm="ortho")
    return np.where(smooth > 0, 12.0, 3.0)


def pressure(a: np.ndarray) -> np.ndarray:
    """Solves -∇·(a ∇u) = 1 on cells of width 1 / SIDE, [SIDE, SIDE]."""
    # Between two cells flows the harmonic mean; at the edge u = 0 is half a cell away.
    padded = np.pad(a, 1, mode="edge")
    down = 2 * padded[1:, 1:-1] * padded[:-1, 1:-1] / (padded[1:, 1:-1] + padded[:-1, 1:-1])
    right = 2 * padded[1:-1, 1:] * padded[1:-1, :-1] / (padded[1:-1, 1:] + padded[1:-1, :-1])
    down[[0, -1]] *= 2
    right[:, [0, -1]] *= 2
    centre = down[1:] + down[:-1] + right[:, 1:] + right[:, :-1]
    below = down[1:].copy()
    below[-1] = 0
    beside = right[:, 1:].copy()
    beside[:, -1] = 0
    vertical, horizontal = -below.ravel()[:-SIDE], -beside.ravel()[:-1]
    matrix = diags_array(
        [centre.ravel(), vertical, vertical, horizontal, horizontal],
        offsets=[0, SIDE, -SIDE, 1, -1],
        format="csc",
    )
    return spsolve(matrix, np.full(SIDE * SIDE, 1 / SIDE**2)).reshape(SIDE, SIDE)


def data() -> tuple[Tensor, Tensor]:
    """Media and pressures, each [TRAIN + TEST, 1, SIDE, SIDE] and scaled to about 1."""
    rng = np.random.default_rng(0)
    media = np.stack([medium(rng) for _ in range(TRAIN + TEST)])
    pressures = np.stack([pressure(a) for a in media])
    x = torch.from_numpy((media - 7.5) / 4.5).float().unsqueeze(1)
    y = torch.from_numpy(pressures / pressures[:TRAIN].std()).float().unsqueeze(1)
    return x, y


def make_optimizer(name: str, model: FNO, lr: float) -> torch.optim.Optimizer:
    if name == "libmuon":
        groups = libmuon.group_parameters(model, rules=[SPECTRAL])
        return libmuon.Muon(groups, lr=lr, weight_decay=WEIGHT_DECAY)
    return AdamW(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)


def fit(optimizer: str, lr: float, seed: int) -> tuple[Run, FNO]:
    torch.manual_seed(seed)
    model = FNO(n_modes=(12, 12), hidden_channels=16, in_channels=1, out_channels=1, n_layers=3)
    opt = make_optimizer(optimizer, model, lr)
    schedule = common.linear_to_zero(opt, STEPS)
    relative = LpLoss(d=2, p=2)
    x, y = data()
    losses = []
    for index in common.batches(TRAIN, BATCH, STEPS, seed):
        loss = relative(model(x[index]), y[index]) / BATCH
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        final = relative(model(x[TRAIN:]), y[TRAIN:]).item() / TEST
    return Run(optimizer, lr, final, losses), model


def train(optimizer: str, lr: float, seed: int) -> Run:
    return fit(optimizer, lr, seed)[0]


def draw(path: Path, ours: Run, theirs: Run, model: FNO) -> None:
    x, y = data()
    with torch.no_grad():
        prediction = model(x[TRAIN : TRAIN + 1])[0, 0]
    truth = y[TRAIN, 0]
    figure, panels = plt.subplots(
        1, 5, figsize=(18, 3.5), layout="constrained", width_ratios=(1.6, 1, 1, 1, 1)
    )
    common.draw_losses(panels[0], ours, theirs, "relative L2 error", window=10)
    shown = [
        ("medium a (3 or 12)", x[TRAIN, 0] * 4.5 + 7.5, {"cmap": "cividis"}),
        ("pressure u, solved", truth, {"vmin": 0, "vmax": float(truth.max())}),
        ("pressure u, predicted", prediction, {"vmin": 0, "vmax": float(truth.max())}),
        ("error", prediction - truth, {"cmap": "RdBu_r", "vmin": -0.2, "vmax": 0.2}),
    ]
    for axes, (title, image, options) in zip(panels[1:], shown, strict=True):
        drawn = axes.imshow(image, origin="lower", extent=(0, 1, 0, 1), **options)
        axes.set_title(title)
        figure.colorbar(drawn, ax=axes, shrink=0.85)
    figure.suptitle(
        "A Fourier neural operator on Darcy flow: training loss (legend: test), one test medium"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    args = common.parse_arguments(__doc__)
    if args.tune:
        common.tune(train, LRS, GRID)
        return
    runs, models = common.compare(fit, LRS, args.seed)
    common.write(args.out, "fno", "relative L2 error, test", runs["libmuon"], runs["adamw"])
    draw(args.out / "fno.png", runs["libmuon"], runs["adamw"], models["libmuon"])


if __name__ == "__main__":
    main()
