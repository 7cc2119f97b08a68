"""As in tests/python: a fixed seed, and a fresh one on demand."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch before each test; MUON_TEST_SEED=<n> makes it another run."""
    value = int(os.environ.get("MUON_TEST_SEED", "0"))
    torch.manual_seed(value)
    return value
