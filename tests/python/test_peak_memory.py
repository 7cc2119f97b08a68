"""What a step allocates beyond parameters, gradients and state: no copy of any of them.

Each case runs in a process of its own, this file as a program: what an allocator keeps of earlier
work would hide allocations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import libmuon
import pytest
import torch

LIMIT = 64_000_000
ADAMW = {"algorithm": "adamw"}

# Name: shapes, dtype, options. A float32 copy of all parameters, or of one moment, exceeds LIMIT.
CASES: dict[str, tuple[list[tuple[int, ...]], torch.dtype, dict[str, Any]]] = {
    "muon int8": ([(1024, 1024)] * 24, torch.float32, {"state_dtype": "int8", "ns_steps": 1}),
    "muon split": (
        [(1024, 1024)] * 24,
        torch.bfloat16,
        {"state_dtype": "int8", "master": "split", "ns_steps": 1},
    ),
    "adamw int8": ([(32_768, 1024)], torch.float32, {**ADAMW, "state_dtype": "int8"}),
    "adamw split": ([(32_768, 1024)], torch.bfloat16, {**ADAMW, "master": "split"}),
    "one long vector": ([(32_000_000,)], torch.float32, {**ADAMW, "state_dtype": "int8"}),
}


def memory(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def allocated_beyond(case: str) -> list[int]:
    """Bytes, of the first step, which creates the state, and of the second."""
    shapes, dtype, options = CASES[case]
    params = [torch.full(shape, 0.02, dtype=dtype).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    optimizer = libmuon.Muon(params, **options)
    before = memory("VmRSS")
    beyond = []
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
        optimizer.step()
        peak = memory("VmHWM")
        state = [t for p in params for t in optimizer.state[p].values()]
        beyond.append(peak - before - sum(t.numel() * t.element_size() for t in state))
    return beyond


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_copies_neither_parameters_nor_state(case: str) -> None:
    shapes, _, _ = CASES[case]
    assert sum(4 * torch.Size(shape).numel() for shape in shapes) > 1.5 * LIMIT
    # Every tensor gets pages of its own, which go back when it is freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) <= LIMIT


if __name__ == "__main__":
    print(json.dumps(allocated_beyond(sys.argv[1])))
