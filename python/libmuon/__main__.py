"""``python -m libmuon info``: what this installation is."""

from __future__ import annotations

import argparse

import torch

import libmuon


def info() -> str:
    """Versions, how libmuon was built and what it found on this machine."""
    facts = {
        "libmuon": libmuon.__version__,
        "torch": torch.__version__,
        "build": torch.ops.muon.build_info(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "algorithms": ", ".join(torch.ops.muon.registered_algorithms()),
        "schedules": ", ".join(torch.ops.muon.schedule_names()),
        "cmake_prefix_path": libmuon.cmake_prefix_path,
    }
    width = max(map(len, facts))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m libmuon", description=libmuon.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help=info.__doc__)
    parser.parse_args()
    print(info())


if __name__ == "__main__":
    main()
