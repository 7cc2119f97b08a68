"""`make examples`: runs the clients of examples/python/clients, and examples/cpp/digits.cpp.

Each prints one line and writes a picture and a JSON file into --out. The clients run one after the
other, in the interpreter that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo_corpus

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out/examples"
FOLDER = ROOT / "examples/python/clients"
DIGITS = ROOT / "build/dev/bin/digits"
CLIENTS = ("qkan", "fno", "gpt2", "lightning", "accelerate", "digits")


def run(client: str, out: Path = OUT) -> dict[str, Any]:
    """Runs one client; returns its JSON file's content."""
    if client == "gpt2":
        demo_corpus.write(ROOT / "out/demo/corpus")
    program = FOLDER / f"train_{client}.py"
    environment = {**os.environ, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", str(program), "--out", str(out)]
    subprocess.run(command, check=True, env=environment)
    return json.loads((out / f"{client}.json").read_text(encoding="utf-8"))


def run_cpp_digits(lr: float, out: Path = OUT) -> dict[str, Any]:
    """Runs the C++ net on the data that the digits client wrote; returns its result."""
    result = out / "digits_cpp.json"
    subprocess.run([DIGITS, out / "digits.bin", result, str(lr)], check=True)
    return json.loads(result.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("clients", nargs="*", choices=[[], *CLIENTS], help="all, if none is named")
    args = parser.parse_args()
    for client in args.clients or CLIENTS:
        result = run(client, args.out)
        if client == "digits":
            run_cpp_digits(result["ours"]["lr"], args.out)
    print(f"{args.out}: a picture and a JSON file for each")


if __name__ == "__main__":
    main()
