"""Runs every client once; its tests read what it wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="session")
def result():
    """`result("qkan")` is that client's JSON file, just written."""
    import clients

    kept = {}

    def run(client):
        if client not in kept:
            (clients.OUT / f"{client}.png").unlink(missing_ok=True)
            kept[client] = clients.run(client)
        return kept[client]

    return run
