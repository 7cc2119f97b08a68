"""A transformer that reads a digit row by row, with Accelerate: bfloat16, clipping, accumulation.

python examples/python/clients/train_accelerate.py
"""

from __future__ import annotations

from pathlib import Path

import common
import digits
import libmuon
import matplotlib.pyplot as plt
import torch
from accelerate import Accelerator
from common import Run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, ACCUMULATE, WIDTH = 12, 28, 2, 48
LRS = {"libmuon": 1.6e-2, "adamw": 4e-3}
GRID = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)


class Reader(nn.Module):
    """The 8 rows of a picture are 8 tokens. The query, key and value weight is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits [batch, 10] for pictures [batch, 8, 8]."""
        return self.head(self.layers(self.embed(x) + self.positions).mean(1))


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name == "libmuon":
        return libmuon.Muon(model, lr=lr)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))


def train(optimizer: str, lr: float, seed: int) -> Run:
    x, y, x_test, y_test = digits.load()
    torch.manual_seed(seed)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE
    )
    model = Reader()
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    opt = make_optimizer(optimizer, model, lr)
    schedule = common.linear_to_zero(opt, EPOCHS * len(loader) // ACCUMULATE)
    model, opt, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
    losses = []
    for _ in range(EPOCHS):
        for pictures, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(pictures), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                schedule.step()
                opt.zero_grad()
            losses.append(loss.item())
    with torch.no_grad():
        final = nn.functional.cross_entropy(model(x_test), y_test).item()
    return Run(optimizer, lr, final, losses)


def draw(path: Path, ours: Run, theirs: Run) -> None:
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    common.draw_losses(axes, ours, theirs, "cross entropy", window=20)
    axes.set_xlabel(f"micro-batch (mean of 20), {ACCUMULATE} a step")
    axes.set_title("Accelerate: bf16, clipping, accumulation (legend: test)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    args = common.parse_arguments(__doc__)
    if args.tune:
        common.tune(train, LRS, GRID)
        return
    runs = {name: common.timed(train, name, lr, args.seed) for name, lr in LRS.items()}
    ours, theirs = runs["libmuon"], runs["adamw"]
    common.write(args.out, "accelerate", "cross entropy, test", ours, theirs)
    draw(args.out / "accelerate.png", ours, theirs)


if __name__ == "__main__":
    main()
