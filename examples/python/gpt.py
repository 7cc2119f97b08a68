"""A small character-level GPT and its data, op for op the same as examples/cpp/gpt/."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Pre-norm attention and MLP, both without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output, [batch, length, width] as its input."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention of all heads."""
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q = self.query(x).view(split).transpose(1, 2)
        k = self.key(x).view(split).transpose(1, 2)
        v = self.value(x).view(split).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Token and position embeddings, `layers` blocks, an untied head."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draws every matrix, in parameter order; residual outputs start smaller."""
        generator = torch.Generator().manual_seed(seed)
        residual_scale = 1.0 / math.sqrt(2.0 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            parameter.normal_(0.0, 0.02, generator=generator)
            if name.endswith(("proj.weight", "down.weight")):
                parameter.mul_(residual_scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns logits [batch, length, vocabulary] for token ids [batch, length]."""
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats per character."""
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


class Corpus:
    """The token ids that tools/demo.py wrote: one byte a character."""

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        self.vocabulary = len(meta["vocabulary"])
        self.train = self._read(folder / "train.bin")
        self.validation = self._read(folder / "validation.bin")

    @staticmethod
    def _read(path: Path) -> Tensor:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


class Sampler:
    """Random windows of a text, the same sequence of batches for the same seed."""

    def __init__(self, text: Tensor, batch: int, context: int, seed: int) -> None:
        if text.numel() <= context:
            raise ValueError(f"expected more than {context} characters, got {text.numel()}")
        self.text = text
        self.batch = batch
        self.window = torch.arange(context + 1)
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, int64 [batch, context]; targets are one character later."""
        last = self.text.numel() - self.window.numel()
        starts = torch.randint(0, last + 1, (self.batch, 1), generator=self.generator)
        ids = self.text.take(starts + self.window).to(torch.int64)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
