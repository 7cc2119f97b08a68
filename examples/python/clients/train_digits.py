"""A convolutional net on scikit-learn's digits: each kernel is one matrix of its output channels.

python examples/python/clients/train_digits.py

Also writes the data for examples/cpp/digits.cpp, which trains the same net from the same weights on
the same batches.
"""

from __future__ import annotations

import math
from pathlib import Path

import common
import digits
import libmuon
import matplotlib.pyplot as plt
import torch
from common import Run
from torch import Tensor, nn

STEPS, BATCH = 300, 64
LRS = {"libmuon": 1.6e-2, "adamw": 8e-3}
GRID = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)


class Net(nn.Module):
    """Two convolutions and a head, as in examples/cpp/digits.cpp."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.head = nn.Linear(32 * 4 * 4, 10)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draws every weight in parameter order; biases are zero."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() < 2:
                parameter.zero_()
            else:
                deviation = 1.0 / math.sqrt(parameter[0].numel())
                parameter.normal_(0.0, deviation, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits [batch, 10] for pictures [batch, 1, 8, 8]."""
        y = self.conv2(self.conv1(x).relu()).relu()
        return self.head(y.flatten(1))


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name == "libmuon":
        return libmuon.Muon(model, lr=lr)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))


def fit(optimizer: str, lr: float, seed: int) -> tuple[Run, Net]:
    x, y, x_test, y_test = digits.load()
    model = Net()
    model.initialize(seed)
    opt = make_optimizer(optimizer, model, lr)
    schedule = common.linear_to_zero(opt, STEPS)
    losses = []
    for index in common.batches(len(x), BATCH, STEPS, seed):
        loss = nn.functional.cross_entropy(model(x[index].unsqueeze(1)), y[index])
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        final = nn.functional.cross_entropy(model(x_test.unsqueeze(1)), y_test).item()
    return Run(optimizer, lr, final, losses), model


def train(optimizer: str, lr: float, seed: int) -> Run:
    return fit(optimizer, lr, seed)[0]


def accuracy(model: Net) -> float:
    """Share of the test pictures that are read correctly."""
    _, _, x, y = digits.load()
    with torch.no_grad():
        return (model(x.unsqueeze(1)).argmax(1) == y).float().mean().item()


def draw(path: Path, ours: Run, theirs: Run, model: Net) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    common.draw_losses(panels[0], ours, theirs, "cross entropy", window=10)
    kernels = model.conv1.weight.detach()[:, 0]
    image = nn.functional.pad(kernels, (0, 1, 0, 1), value=float("nan"))
    rows = [torch.cat(list(row), dim=1) for row in image.split(8)]
    shown = panels[1].imshow(torch.cat(rows), cmap="RdBu_r", vmin=-1, vmax=1)
    figure.colorbar(shown, ax=panels[1], shrink=0.7)
    panels[1].set_axis_off()
    panels[1].set_title("the 16 kernels of the first convolution, libmuon")
    figure.suptitle("A convolutional net on digits (legend: test cross entropy)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    args = common.parse_arguments(__doc__)
    digits.export(args.out / "digits.bin")
    if args.tune:
        common.tune(train, LRS, GRID)
        return
    runs, models = common.compare(fit, LRS, args.seed)
    ours, theirs = runs["libmuon"], runs["adamw"]
    accuracies = {name: accuracy(model) for name, model in models.items()}
    common.write(args.out, "digits", "cross entropy, test", ours, theirs, test_accuracy=accuracies)
    draw(args.out / "digits.png", ours, theirs, models["libmuon"])


if __name__ == "__main__":
    main()
