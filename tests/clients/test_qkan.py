"""libmuon's QKANMuon follows qkan's, as far as qkan's bfloat16 lets it be followed."""

from __future__ import annotations

import math
import statistics


def difference(run, other):
    return [abs(a - b) / b for a, b in zip(run["losses"], other["losses"], strict=True)]


def test_loss_curves_agree_within_bfloat16(result):
    got = result("qkan")
    differences = difference(got["ours"], got["theirs"])
    # A step is off by bfloat16's rounding; steps add up, and training amplifies the sum.
    assert max(differences[:10]) < 2**-8
    assert max(differences[:50]) < 2**-6
    assert sum(differences) / len(differences) < 0.1


def test_loss_curves_agree_closely_when_qkan_iterates_in_float32(result):
    got = result("qkan")
    differences = difference(got["ours"], got["float32"])
    assert max(differences[:50]) < 1e-5
    assert max(differences) < 2e-2


def test_losses_are_not_worse_on_average(result):
    finals = result("qkan")["short_finals"]
    logs = {name: [math.log(final) for final in finals[name]] for name in finals}
    assert len(logs["libmuon"]) == 5
    # What bfloat16 does to qkan's own result, seed by seed, is the spread that ours may have too.
    rounding = [a - b for a, b in zip(logs["qkan in float32"], logs["qkan"], strict=True)]
    # Student's t with 4 degrees of freedom: equally good optimizers exceed it once in 200 times.
    bound = 4.604 * statistics.stdev(rounding) / math.sqrt(len(rounding))
    assert statistics.mean(logs["libmuon"]) - statistics.mean(logs["qkan"]) <= bound
