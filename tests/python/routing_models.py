"""Models and shorthands of the routing tests."""

from __future__ import annotations

import libmuon
import torch
from libmuon.groups import Decision, route_parameters
from torch import nn

LAYOUT_OPTIONS = (
    "rows",
    "cols",
    "flatten",
    "batch_dims",
    "split_sizes",
    "num_heads",
    "split_dim",
    "weight_decay",
)


class Conv1D(nn.Module):
    """A linear map stored as (in, out), under the name that transformers gives it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class PatchEmbedding(nn.Module):
    """No table of a vocabulary, for all its name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(16, 12))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Module()])
        self.heads[0].key = nn.Linear(16, 8, bias=False)
        self.fc = nn.Linear(16, 16, bias=False)
        self.exit_head = nn.Linear(16, 8, bias=False)


class Twin(nn.Module):
    """One parameter of every sort; tests/cpp/groups_test.cpp has its twin."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, 16)
        self.table = nn.Parameter(torch.zeros(8, 16))
        self.tied = self.wte.weight
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, 16))
        self.gamma = nn.Parameter(torch.zeros(4, 16))
        self.layer_scale = nn.Parameter(torch.zeros(16, 1, 1))
        self.broadcast = nn.Parameter(torch.zeros(1, 9, 16))
        self.router_bias = nn.Parameter(torch.zeros(4, 16))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.patch_embed = nn.Conv2d(3, 16, 4)
        self.grouped = nn.Conv2d(8, 16, 3, groups=2, bias=False)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.upsample = nn.ConvTranspose2d(16, 8, 2, bias=False)
        self.upsample_grouped = nn.ConvTranspose2d(16, 8, 2, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.plane_norm = nn.LayerNorm([8, 8])
        self.attn = nn.MultiheadAttention(16, 4)
        self.lstm = nn.LSTM(16, 8, proj_size=4)
        self.gru = nn.GRU(16, 8)
        self.cell = nn.LSTMCell(16, 8)
        self.stored_transposed = Conv1D(8, 16)
        self.unmasked_proj = nn.Linear(16, 16, bias=False)
        self.patches = PatchEmbedding()
        self.mixer = module_of(fc=nn.Linear(16, 16, bias=False))
        self.decoder = module_of(up=nn.Linear(16, 16, bias=False))
        self.mlp_head = module_of(up=nn.Linear(16, 16, bias=False))
        self.bottleneck = nn.Linear(16, 2, bias=False)
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList([Block()])
        self.classifier = nn.Sequential(nn.Linear(16, 8))
        self.fc = nn.Linear(16, 8, bias=False)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 8))


def module_of(**children: nn.Module | nn.Parameter) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def decisions(model, rules=None) -> dict[str, Decision]:
    return {d.name: d for d in route_parameters(model, rules)}


def algorithms(model, rules=None) -> dict[str, str]:
    return {d.name: d.options.get("algorithm", "frozen") for d in route_parameters(model, rules)}


def text_of(decision: Decision) -> str:
    """A decision as tests/golden/routing.json writes it."""
    if decision.frozen:
        return "frozen"
    parts = [decision.options["algorithm"]]
    for key in LAYOUT_OPTIONS:
        if key in decision.options:
            value = decision.options[key]
            value = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"
            parts.append(f"{key}={value}")
    return " ".join(parts)


def step_once(model: nn.Module, groups: list[dict]) -> libmuon.Muon:
    optimizer = libmuon.Muon(groups, lr=1e-3)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer
