"""Starts examples/{cpp,python}/train_gpt and reads what they log."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TUNED = ROOT / "benchmarks/results/demo_tune.json"
PROGRAMS = {
    "cpp": [str(ROOT / "build/dev/bin/train_gpt")],
    "python": [sys.executable, str(ROOT / "examples/python/train_gpt.py")],
}


@dataclass(frozen=True)
class Run:
    """One training run, as its program logged it."""

    events: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The optimizer and the program's language, such as "muon-cpp"."""
        return str(self.events[0]["run"])

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the run."""
        return self._all("start")[0]

    @property
    def end(self) -> dict[str, Any]:
        """Final loss, seconds and the sum of the weights' bits."""
        return self._all("end")[0]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Every step: step, lr, train_loss, seconds."""
        return self._all("step")

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Every validation: step, validation_loss, seconds of training so far."""
        return self._all("validation")

    def losses(self) -> list[tuple[str, int, float]]:
        """Every logged loss with its kind and step."""
        keys = {"step": "train_loss", "validation": "validation_loss"}
        return [
            (event["event"], event["step"], event[keys[event["event"]]])
            for event in self.events
            if event["event"] in keys
        ]

    def _all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def read(path: Path) -> Run:
    """Reads the JSON lines of one run."""
    return Run([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def train(program: str, out: Path, options: dict[str, Any]) -> Run:
    """Runs a program ("cpp" or "python") to its end; its progress goes to our stderr."""
    command = PROGRAMS[program] + ["--out", str(out)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is missing; build it with: make build") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{command[0]} failed with status {error.returncode}") from None
    return read(out)


def tuned_lr(optimizer: str) -> float:
    """The learning rate that `make demo-tune` chose."""
    if not TUNED.exists():
        raise SystemExit(f"{TUNED.relative_to(ROOT)} is missing; write it with: make demo-tune")
    return float(json.loads(TUNED.read_text(encoding="utf-8"))["chosen"][optimizer])
