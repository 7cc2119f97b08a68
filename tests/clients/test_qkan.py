"""libmuon's QKANMuon follows qkan's, as far as qkan's bfloat16 lets it be followed."""

from __future__ import annotations


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
