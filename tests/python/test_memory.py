"""What `Muon.memory` says is what is allocated."""

from __future__ import annotations

from typing import Any

import libmuon
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def peak_of_a_step(opt: libmuon.Muon) -> int:
    """Bytes that a step held at most, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        opt.step()
    held = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    params = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


@pytest.mark.parametrize(
    ("options", "state", "scales", "remainders"),
    [
        ({}, 4 * 6 * 300, 0, 0),
        ({"state_dtype": "bfloat16"}, 2 * 6 * 300, 0, 0),
        ({"state_dtype": "int8"}, 6 * 300, 4 * 6 * 3, 0),
        ({"state_dtype": "int4"}, 6 * 150, 4 * 6 * 3, 0),
        ({"algorithm": "normuon"}, 4 * 6 * 300 + 4 * 6, 0, 0),
        ({"algorithm": "adamw", "state_dtype": "fp8"}, 2 * 6 * 300 + 4, 2 * 4 * 6 * 3, 0),
    ],
)
def test_m6_bytes_by_kind(
    options: dict[str, Any], state: int, scales: int, remainders: int
) -> None:
    opt = libmuon.Muon(make((6, 300)), **options)
    before = opt.memory()
    assert not opt.state  # asking creates nothing
    opt.step()
    after = opt.memory()
    for memory in (before, after):
        assert (memory.state, memory.scales, memory.remainders) == (state, scales, remainders)
    stored = sum(t.numel() * t.element_size() for e in opt.state.values() for t in e.values())
    assert stored == state + scales + remainders


def test_groups_add_up_and_remainders_count() -> None:
    a, b = make((8, 200), (4, 140), dtype=torch.bfloat16)
    opt = libmuon.Muon(
        [{"params": [a], "master": "split"}, {"params": [b], "stochastic_rounding": True}],
        state_dtype="float32",
    )
    memory = opt.memory()
    assert memory.groups == ((4 * 1600, 0, 2 * 1600), (4 * 560 + 4, 0, 0))
    assert memory[:3] == (4 * 1600 + 4 * 560 + 4, 0, 2 * 1600)
    assert memory.host == 0


@pytest.mark.parametrize("shape", [(256, 256), (200, 700), (700, 200), (40, 300)])
@pytest.mark.parametrize("count", [1, 6])
def test_the_workspace_bounds_what_a_step_allocates(shape: tuple[int, int], count: int) -> None:
    opt = libmuon.Muon(make(*[shape] * count))
    opt.step()
    peak, said = peak_of_a_step(opt), opt.memory().workspace
    assert peak <= said + 65536
    assert peak >= said / 4
