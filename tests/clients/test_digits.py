"""The convolutional net: C++ and Python are one program."""

from __future__ import annotations

import clients
import pytest


def test_cpp_trains_the_same_net(result):
    python = result("digits")
    cpp = clients.run_cpp_digits(python["ours"]["lr"])
    assert cpp["losses"][:20] == pytest.approx(python["ours"]["losses"][:20], rel=1e-4)
    assert cpp["final"] <= python["theirs"]["final"]
    assert min(*python["test_accuracy"].values(), cpp["test_accuracy"]) > 0.98
