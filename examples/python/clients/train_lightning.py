"""An autoencoder of digits in Lightning: bfloat16 autocast, clipping, gradient accumulation.

python examples/python/clients/train_lightning.py
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import common
import digits
import libmuon
import lightning
import matplotlib.pyplot as plt
import torch
from common import Run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, ACCUMULATE = 24, 32, 2
LRS = {"libmuon": 3.2e-2, "adamw": 1.6e-2}
GRID = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)


class Autoencoder(lightning.LightningModule):
    """64 pixels through 8 numbers and back."""

    def __init__(self, optimizer: str, lr: float) -> None:
        super().__init__()
        self.optimizer, self.lr = optimizer, lr
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
        self.decode = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 64))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, 64] as its input."""
        return self.decode(self.encode(x))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """One micro-batch."""
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Muon for the whole module, or AdamW."""
        if self.optimizer == "libmuon":
            optimizer: torch.optim.Optimizer = libmuon.Muon(self, lr=self.lr)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95))
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = common.linear_to_zero(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips here: Lightning refuses to if an optimizer can unscale gradients itself."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val or 1.0)


def fit(optimizer: str, lr: float, seed: int) -> tuple[Run, Autoencoder]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    x, _, x_test, _ = digits.load()
    torch.manual_seed(seed)
    model = Autoencoder(optimizer, lr)
    loader = DataLoader(TensorDataset(x.flatten(1)), BATCH, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        trainer.fit(model, loader)
    with torch.no_grad():
        final = nn.functional.mse_loss(model(x_test.flatten(1)), x_test.flatten(1)).item()
    return Run(optimizer, lr, final, model.losses), model


def train(optimizer: str, lr: float, seed: int) -> Run:
    return fit(optimizer, lr, seed)[0]


def draw(path: Path, ours: Run, theirs: Run, models: dict[str, Autoencoder]) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    common.draw_losses(panels[0], ours, theirs, "mean squared error", window=20)
    panels[0].set_xlabel(f"micro-batch (mean of 20), {ACCUMULATE} a step")
    x = digits.load()[2][:10]
    rows = [x]
    with torch.no_grad():
        rows += [models[name](x.flatten(1)).view_as(x) for name in ("libmuon", "adamw")]
    framed = [nn.functional.pad(row, (0, 1, 0, 2), value=float("nan")) for row in rows]
    image = torch.cat([torch.cat(list(row), dim=1) for row in framed])
    panels[1].imshow(image, cmap="gray", vmin=-1, vmax=1)
    panels[1].set_xticks([])
    panels[1].tick_params(left=False)
    panels[1].spines[:].set_visible(False)
    panels[1].set_yticks([3.5, 13.5, 23.5], ["digits", "libmuon", "AdamW"])
    panels[1].set_title("test digits through 8 numbers and back")
    figure.suptitle("Lightning: bf16-mixed, clipping, gradient accumulation (legend: test error)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    args = common.parse_arguments(__doc__)
    if args.tune:
        common.tune(train, LRS, GRID)
        return
    runs, models = common.compare(fit, LRS, args.seed)
    ours, theirs = runs["libmuon"], runs["adamw"]
    common.write(args.out, "lightning", "mean squared error, test", ours, theirs)
    draw(args.out / "lightning.png", ours, theirs, models)


if __name__ == "__main__":
    main()
