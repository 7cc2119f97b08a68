"""Trains a small GPT with libmuon.Muon or with torch.optim.AdamW alone.

python examples/python/train_gpt.py --optimizer muon --lr 0.004 --out out/muon.jsonl

examples/cpp/train_gpt.cpp is the same program in C++; with Muon the two print equal losses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from gpt import GPT, Corpus, Sampler
from tqdm import tqdm

# Validation batches are the same for every run, whatever its seed.
VALIDATION_SEED = 20_240_918
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("out/demo/corpus"))
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a step")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, required=True, help="peak learning rate")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def make_optimizer(args: argparse.Namespace, model: GPT) -> torch.optim.Optimizer:
    if args.optimizer == "muon":
        import libmuon

        return libmuon.Muon(model, lr=args.lr, weight_decay=WEIGHT_DECAY)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=BETAS, fused=True)


def warmup_then_linear(steps: int) -> Callable[[int], float]:
    """Linear warm-up over a tenth of the run, then linearly to zero."""
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(0, steps - step) / (steps - warmup) if steps > warmup else 1.0

    return factor


class Log:
    """One JSON object a line, each with the name of its run."""

    def __init__(self, file: TextIO, run: str) -> None:
        self.file = file
        self.run = run

    def write(self, event: str, **fields: Any) -> None:
        """Appends one object; readers see it at once."""
        print(json.dumps({"run": self.run, "event": event, **fields}), file=self.file, flush=True)


@torch.no_grad()
def evaluate(args: argparse.Namespace, model: GPT, text: torch.Tensor) -> float:
    sampler = Sampler(text, args.batch, args.context, VALIDATION_SEED)
    losses = [model.loss(*sampler.next()).item() for _ in range(args.eval_batches)]
    return sum(losses) / len(losses)


class Progress:
    """Loss, tokens per second and time left on stderr; a line every 50 steps without a terminal."""

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        total = steps * tokens_per_step
        self.bar = tqdm(total=total, unit="tok", unit_scale=True, disable=None)

    def update(self, step: int, train_loss: float, validation_loss: float) -> None:
        """Shows that `step` is done."""
        losses = f"loss {train_loss:.3f} val {validation_loss:.3f}"
        self.bar.set_postfix_str(losses, refresh=False)
        self.bar.update(self.tokens_per_step)
        if self.bar.disable and (step % 50 == 0 or step == self.steps):
            print(f"{step}/{self.steps} {losses}", file=sys.stderr, flush=True)
        if step == self.steps:
            self.bar.close()


def fingerprint(model: GPT) -> int:
    """Sum of all weights' bits: equal for two runs that are bitwise equal."""
    return sum(int(p.detach().view(torch.int32).sum()) for p in model.parameters())


def train(args: argparse.Namespace, corpus: Corpus, log: Log) -> None:
    model = GPT(corpus.vocabulary, args.context, args.layers, args.width, args.heads)
    model.initialize(args.seed)
    optimizer = make_optimizer(args, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_linear(args.steps))
    sampler = Sampler(corpus.train, args.batch, args.context, args.seed)
    validation_loss = evaluate(args, model, corpus.validation)
    log.write("validation", step=0, validation_loss=validation_loss, seconds=0.0)

    # `seconds` is training alone: validation and logging are left out.
    seconds = optimizer_seconds = 0.0
    progress = Progress(args.steps, args.batch * args.context)
    for step in range(1, args.steps + 1):
        lr = schedule.get_last_lr()[0]
        start = time.perf_counter()
        loss = model.loss(*sampler.next())
        optimizer.zero_grad()
        loss.backward()
        before_step = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        schedule.step()
        seconds += end - start
        optimizer_seconds += end - before_step

        train_loss = loss.item()
        log.write("step", step=step, lr=lr, train_loss=train_loss, seconds=seconds)
        if step % args.eval_every == 0 or step == args.steps:
            validation_loss = evaluate(args, model, corpus.validation)
            log.write("validation", step=step, validation_loss=validation_loss, seconds=seconds)
        progress.update(step, train_loss, validation_loss)
    log.write(
        "end",
        validation_loss=validation_loss,
        seconds=seconds,
        optimizer_seconds=optimizer_seconds,
        weights=fingerprint(model),
    )


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(args.corpus)
    with args.out.open("w", encoding="utf-8") as file:
        log = Log(file, f"{args.optimizer}-python")
        settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
        log.write("start", **settings, torch=torch.__version__)
        train(args, corpus, log)


if __name__ == "__main__":
    main()
