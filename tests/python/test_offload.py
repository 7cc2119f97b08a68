"""State in host memory: the same bits as state beside the parameters."""

from __future__ import annotations

from typing import Any

import libmuon
import pytest
import torch
from torch import Tensor

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
MATRICES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((64, 130), {}),
    ((6, 5, 3, 3), {"flatten": True}),
    ((9, 40), {"split_sizes": (2, 3, 4)}),
    ((20, 140), {"rows": 1, "cols": 0}),
    ((7, 9, 140), {"batch_dims": 1, "batch_size": 2}),  # in several chunks
]


def make(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]


def train(
    device: str, dtype: torch.dtype, algorithm: str, offload: bool, options: dict[str, Any]
) -> tuple[list[Tensor], libmuon.Muon]:
    torch.manual_seed(4)
    elementwise = algorithm.startswith("adam")
    shapes = [(33,), (), (70, 9)] if elementwise else [s for s, _ in MATRICES]
    params = make(device, dtype, *shapes)
    layouts = [{}] * len(params) if elementwise else [layout for _, layout in MATRICES]
    groups = [{"params": [p], **layout} for p, layout in zip(params, layouts, strict=True)]
    opt = libmuon.Muon(groups, lr=0.01, algorithm=algorithm, offload=offload, **options)
    for _ in range(4):
        for p in params:
            p.grad = torch.randn(p.shape).to(device, dtype)
        opt.step()
    return params, opt


@pytest.mark.filterwarnings("ignore:bfloat16 parameters are rounded")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw", "adam"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"state_dtype": "int8"}),
        (torch.float32, {"state_dtype": "int4"}),
        (torch.bfloat16, {"state_dtype": "fp8", "stochastic_rounding": True}),
        (torch.bfloat16, {"state_dtype": "float32", "master": "split"}),
    ],
)
def test_offloaded_steps_have_the_same_bits(
    device: str, algorithm: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    near, _ = train(device, dtype, algorithm, False, options)
    far, opt = train(device, dtype, algorithm, True, options)
    for a, b in zip(near, far, strict=True):
        assert torch.equal(a, b)
    for entry in opt.state.values():
        for key, tensor in entry.items():
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned() == (device == "cuda" and key != "step")


@pytest.mark.parametrize("device", DEVICES)
def test_state_moves_with_the_option_and_through_a_checkpoint(device: str) -> None:
    params, opt = train(device, torch.float32, "normuon", True, {})
    twins = [p.detach().clone().requires_grad_() for p in params]
    groups = [{"params": [p], **layout} for p, (_, layout) in zip(twins, MATRICES, strict=True)]
    other = libmuon.Muon(groups, lr=0.01, algorithm="normuon")
    other.load_state_dict(opt.state_dict())
    for group in opt.param_groups:
        group["offload"] = False
    for group in other.param_groups:
        group["offload"] = True
    for _ in range(2):
        for p, twin in zip(params, twins, strict=True):
            p.grad = torch.randn(p.shape).to(device)
            twin.grad = p.grad.clone()
        opt.step()
        other.step()
    for p, twin in zip(params, twins, strict=True):
        assert torch.equal(p, twin)
        assert opt.state[p]["momentum_buffer"].device == p.device
        assert other.state[twin]["momentum_buffer"].device.type == "cpu"


@pytest.mark.parametrize("whole", ["refine", "matrix_update", "update"])
def test_algorithms_of_ones_own_need_nothing(whole: str) -> None:
    def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
        for u, slots in zip(matrices, state, strict=True):
            slots["second"].add_(u)
            u.copy_(slots["second"])

    def update(self, params, grads, state, groups, *factors):  # type: ignore[no-untyped-def]
        for p, g, slots in zip(params, grads, state, strict=True):
            slots["second"].add_(g)
            p.sub_(slots["second"])

    body = {
        "name": f"offloaded-{whole}",
        "state": {"momentum_buffer": "param", "second": "param"},
        whole: refine if whole == "refine" else update,
    }
    libmuon.register_algorithm(type("Offloaded", (libmuon.Algorithm,), body))
    results = []
    for offload in (False, True):
        torch.manual_seed(5)
        params = make("cpu", torch.float32, (8, 9), (4, 5))
        opt = libmuon.Muon(params, algorithm=f"offloaded-{whole}", offload=offload)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape)
            opt.step()
        results.append(params)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
