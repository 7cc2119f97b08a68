"""What holds for every client: it trains, and libmuon is not worse than the client's optimizer."""

from __future__ import annotations

import math

import clients
import pytest

# qkan's optimizer is the same algorithm in bfloat16, and its rounding may help as well as hurt.
SLACK = {"qkan": 1.25}


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
    assert got["ours"]["final"] <= SLACK.get(client, 1.0) * got["theirs"]["final"]
    assert (clients.OUT / f"{client}.png").stat().st_size > 10_000
