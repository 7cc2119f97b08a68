"""A tiny GPT-2 of transformers on the Python standard library's sources, with its Trainer.

python tools/demo_corpus.py out/demo/corpus && python examples/python/clients/train_gpt2.py

The Trainer gets libmuon in three ways, which must give equal losses, and its own AdamW. GPT-2
keeps its matrices transposed (Conv1D), which libmuon.group_parameters knows; it also fuses query,
key and value, which a rule says.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import common
import libmuon
import matplotlib.pyplot as plt
import numpy as np
import torch
from common import Run
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

CORPUS = common.ROOT / "out/demo/corpus"
STEPS, WARMUP, BATCH, CONTEXT, VALIDATION = 160, 16, 16, 64, 64
VOCABULARY = 98  # tools/demo_corpus.py
WEIGHT_DECAY = 0.1
LRS = {"libmuon": 3.2e-2, "adamw": 2e-3}
GRID = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
# Query, key and value are three matrices, stored side by side.
RULES = [("*.attn.c_attn.weight", {"num_heads": 3})]
WAYS = ("factory", "class", "optimizers")


class Windows(Dataset):
    """Fixed random windows of a text; labels are the inputs, GPT-2 shifts them itself."""

    def __init__(self, split: str, count: int, seed: int) -> None:
        self.text = np.frombuffer((CORPUS / f"{split}.bin").read_bytes(), dtype=np.uint8)
        self.starts = np.random.default_rng(seed).integers(len(self.text) - CONTEXT, size=count)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.starts[index]
        ids = torch.from_numpy(self.text[start : start + CONTEXT].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class KeepLosses(TrainerCallback):
    """Collects the training loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Called by the Trainer after every step."""
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def make_model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            n_embd=96,
            n_layer=3,
            n_head=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def arguments(folder: str, lr: float, seed: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=lr,
        weight_decay=WEIGHT_DECAY,
        adam_beta2=0.95,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=seed,
        disable_tqdm=True,
    )


def how(way: str, model: GPT2LMHeadModel, lr: float) -> dict[str, Any]:
    """The Trainer's arguments that say which optimizer."""
    options = {"lr": lr, "weight_decay": WEIGHT_DECAY}
    if way == "factory":  # the Trainer calls it with its model
        return {"optimizer_cls_and_kwargs": (libmuon.MuonFactory, {"rules": RULES, **options})}
    if way == "class":  # what stands under `model` becomes the first argument
        groups = libmuon.group_parameters(model, RULES)
        return {"optimizer_cls_and_kwargs": (libmuon.Muon, {"model": groups, **options})}
    if way == "optimizers":
        optimizer = libmuon.Muon(libmuon.group_parameters(model, RULES), **options)
        schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
        return {"optimizers": (optimizer, schedule)}
    return {}


def train(optimizer: str, lr: float, seed: int) -> Run:
    model = make_model(seed)
    keep = KeepLosses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=arguments(folder, lr, seed),
            train_dataset=Windows("train", STEPS * BATCH, seed),
            eval_dataset=Windows("validation", VALIDATION * 4, 20_240_918),
            callbacks=[keep],
            **how("factory" if optimizer == "libmuon" else optimizer, model, lr),
        )
        trainer.train()
        final = trainer.evaluate()["eval_loss"]
    return Run(optimizer, lr, final, keep.losses)


def draw(path: Path, ours: Run, theirs: Run) -> None:
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    common.draw_losses(axes, ours, theirs, "training loss, nats per character", window=5)
    axes.set_yscale("linear")
    axes.set_title("A tiny GPT-2 in transformers' Trainer (legend: validation)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    args: argparse.Namespace = common.parse_arguments(__doc__)
    if args.tune:
        common.tune(train, LRS, GRID)
        return
    ways = {way: common.timed(train, way, LRS["libmuon"], args.seed) for way in WAYS}
    ours = ways["factory"]
    ours.optimizer = "libmuon"
    theirs = common.timed(train, "adamw", LRS["adamw"], args.seed)
    common.write(
        args.out,
        "gpt2",
        "nats per character, validation",
        ours,
        theirs,
        ways={way: run.losses for way, run in ways.items()},
    )
    draw(args.out / "gpt2.png", ours, theirs)


if __name__ == "__main__":
    main()
