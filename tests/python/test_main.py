"""The command line."""

from __future__ import annotations

import subprocess
import sys

import libmuon
import pytest
import torch


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "libmuon", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_info_says_what_is_installed_and_what_it_found():
    result = run("info")
    assert result.returncode == 0, result.stderr
    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert facts["libmuon"] == libmuon.__version__
    assert facts["torch"] == torch.__version__
    assert facts["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert facts["algorithms"] == "adam, adamw, muon, normuon"


@pytest.mark.parametrize("arguments", [(), ("fly",)])
def test_anything_else_is_a_usage_error(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert "usage: python -m libmuon" in result.stderr


def test_g10_importing_libmuon_needs_neither_triton_nor_dynamo():
    code = "import sys; sys.modules['triton'] = None; import libmuon; print(sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "'torch._dynamo'" not in result.stdout
