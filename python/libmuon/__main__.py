"""``python -m libmuon``: info, convert, inspect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import libmuon
from libmuon import inspection
from libmuon.convert import cli as convert_cli


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


def main(given: Sequence[str] | None = None) -> int:
    """The command line, or `given` arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m libmuon", description=libmuon.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help=info.__doc__)
    convert = "make another optimizer's checkpoint one of libmuon or of torch.optim.Muon"
    convert_cli.add_arguments(commands.add_parser("convert", help=convert))
    inspect = "what a checkpoint holds: whose it is, groups, shapes, norms"
    inspection.add_arguments(commands.add_parser("inspect", help=inspect))
    arguments = parser.parse_args(given)
    if arguments.command == "info":
        print(info())
        return 0
    run = convert_cli.run if arguments.command == "convert" else inspection.run
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
