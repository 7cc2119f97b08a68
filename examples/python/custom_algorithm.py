"""AdaMuon, an algorithm that libmuon does not have, written as two stages of its own.

AdaMuon (Si, Zhang and Shen, arXiv 2507.11005) orthogonalises the sign of the momentum, divides by
the root of a running mean of squares, and keeps the update's size. The momentum, the batches, the
decay and the update of the parameters stay libmuon's.

    python examples/python/custom_algorithm.py --lr 0.016 --out out/adamuon.jsonl

trains the demo's model on the demo's text (`make demo` writes it); the C++ example of that name
is the same program.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from typing import TextIO

import libmuon
import torch
from gpt import GPT, Corpus, Sampler
from libmuon import Groups
from torch import Tensor
from train_gpt import Progress, parse_arguments


@libmuon.register_algorithm
class AdaMuon(libmuon.Algorithm):
    """Muon with a second moment of the orthogonalised update."""

    name = "adamuon"
    state = {"momentum_buffer": "param", "second_momentum": "param"}
    options = {"update_beta": 0.95, "update_eps": 1e-8}

    def orthogonalize(self, matrices: Tensor, groups: Groups) -> None:
        """Orthogonalises the signs."""
        super().orthogonalize(matrices.sign_(), groups)

    def refine(
        self, matrices: list[Tensor], state: list[Mapping[str, Tensor]], groups: Groups
    ) -> None:
        """Divides by the root mean square; the norm becomes that of an orthogonal matrix."""
        for o, slots, options in zip(matrices, state, groups, strict=True):
            v = slots["second_momentum"].view(o.shape)
            v.lerp_(o.square().to(v.dtype), 1 - options["update_beta"])
            o.div_(v.sqrt().to(o.dtype) + options["update_eps"])
            norm = torch.linalg.matrix_norm(o, keepdim=True)
            o.mul_(min(o.shape[-2:]) ** 0.5 / norm.clamp(min=options["update_eps"]))


def make_optimizer(args: argparse.Namespace, model: GPT) -> libmuon.Muon:
    return libmuon.Muon(model, lr=args.lr, algorithm="adamuon", weight_decay=0.1)


def train(args: argparse.Namespace, corpus: Corpus, log: TextIO) -> None:
    """Trains at a constant rate; half-way, all goes through a file into a new optimizer."""
    model = GPT(corpus.vocabulary, args.context, args.layers, args.width, args.heads)
    model.initialize(args.seed)
    opt = make_optimizer(args, model)
    sampler = Sampler(corpus.train, args.batch, args.context, args.seed)
    progress = Progress(args.steps, args.batch * args.context)
    for step in range(1, args.steps + 1):
        loss = model.loss(*sampler.next())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step == args.steps // 2:
            file = io.BytesIO()
            torch.save(opt.state_dict(), file)
            file.seek(0)
            opt = make_optimizer(args, model)
            opt.load_state_dict(torch.load(file, weights_only=True))
        print(json.dumps({"step": step, "train_loss": loss.item()}), file=log, flush=True)
        progress.update(step, loss.item(), loss.item())


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as log:
        train(args, Corpus(args.corpus), log)


if __name__ == "__main__":
    main()
