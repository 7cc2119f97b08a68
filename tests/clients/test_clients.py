"""What holds for every client: it trains, and libmuon is not worse than the client's optimizer."""

from __future__ import annotations

import math

import clients
import pytest


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("client", clients.CLIENTS)
def test_losses_fall_and_ours_is_not_worse(client, result):
    got = result(client)
    for run in (got["ours"], got["theirs"]):
        losses = run["losses"]
        tenth = len(losses) // 10
        assert all(map(math.isfinite, losses))
        assert mean(losses[-tenth:]) < 0.7 * mean(losses[:tenth])
    if client != "qkan":  # the same algorithm but for rounding: test_qkan compares several seeds
        assert got["ours"]["final"] <= got["theirs"]["final"]
    assert (clients.OUT / f"{client}.png").stat().st_size > 10_000
