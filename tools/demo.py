"""`make demo`: trains a small GPT with AdamW and with Muon in C++, then with Muon in Python.

Writes metrics.jsonl, summary.json and loss.png into --out and prints a table. Fails if Muon's loss
is not below AdamW's or if C++ and Python disagree.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import demo_corpus
import demo_report
import demo_runs

RUNS = (("adamw", "cpp"), ("muon", "cpp"), ("muon", "python"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=demo_runs.ROOT / "out/demo")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--adamw-lr", type=float, help="instead of the tuned one")
    parser.add_argument("--muon-lr", type=float, help="instead of the tuned one")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    started = time.monotonic()
    lrs = {
        "adamw": args.adamw_lr or demo_runs.tuned_lr("adamw"),
        "muon": args.muon_lr or demo_runs.tuned_lr("muon"),
    }
    corpus = args.out / "corpus"
    meta = demo_corpus.write(corpus)
    characters = sum(meta["characters"].values()) / 1e6
    print(f"text: {meta['source']}, {len(meta['files'])} files, {characters:.1f} M characters")

    runs = []
    for optimizer, program in RUNS:
        name = f"{optimizer}-{program}"
        print(f"{name}: {args.steps} steps, lr {lrs[optimizer]:g}", flush=True)
        options = {
            "corpus": corpus,
            "optimizer": optimizer,
            "lr": lrs[optimizer],
            "steps": args.steps,
            "seed": args.seed,
        }
        runs.append(demo_runs.train(program, args.out / "runs" / f"{name}.jsonl", options))

    with (args.out / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for run in runs:
            file.writelines(json.dumps(event) + "\n" for event in run.events)
    adamw, muon, python = runs
    summary = demo_report.summarize(adamw, muon, python)
    summary["corpus"] = {key: meta[key] for key in ("source", "sha256", "characters")}
    summary["wall_seconds"] = time.monotonic() - started
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    demo_report.draw(adamw, muon, args.out / "loss.png")

    print(f"\n{demo_report.table(summary)}\n")
    print(f"{args.out}: loss.png, metrics.jsonl, summary.json ({summary['wall_seconds']:.0f} s)")
    failures = demo_report.failures(summary)
    for failure in failures:
        print(f"demo: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
