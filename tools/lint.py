"""Checks format and lint of all sources; clang-tidy only of what changed.

clang-tidy takes half a minute a file. It runs on the sources that differ from the base
(origin/main, or the last commit where that is the same) or include a header that does, and not
again on a file whose inputs it has passed already.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "dev"
STAMPS = ROOT / "build" / "lint"
INCLUDE = re.compile(r'^\s*#include [<"](.+?)[>"]', re.MULTILINE)
INCLUDE_DIRS = ["include", "src", "kernels/include", "tests/cpp", "examples/cpp", "benchmarks/cpp"]


def git(*args: str) -> str | None:
    """Output of a git command, None where it fails."""
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def sources(*suffixes: str) -> list[str]:
    """Tracked and new files, relative to the root."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard") or ""
    return sorted(f for f in listed.splitlines() if f.endswith(suffixes) and (ROOT / f).exists())


def changed_files() -> set[str] | None:
    """Files that differ from the base; None where there is no base: everything."""
    head = git("rev-parse", "HEAD")
    base = git("merge-base", "HEAD", "origin/main")
    if base is None or base == head:
        base = git("rev-parse", "HEAD~1")
    if base is None:
        return None
    changed = (git("diff", "--name-only", base) or "").splitlines()
    return {*changed, *(git("ls-files", "--others", "--exclude-standard") or "").splitlines()}


def project_includes(file: str, seen: set[str]) -> set[str]:
    """`file` and all headers of this project that it includes, added to `seen`."""
    if file not in seen:
        seen.add(file)
        for name in INCLUDE.findall((ROOT / file).read_text()):
            for folder in (os.path.dirname(file), *INCLUDE_DIRS):
                header = os.path.normpath(os.path.join(folder, name))
                if (ROOT / header).is_file():
                    project_includes(header, seen)
                    break
    return seen


def clang_tidy(file: str, inputs: set[str]) -> str:
    """Findings of clang-tidy in `file`, empty if there are none."""
    digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes())
    for name in sorted(inputs):
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    stamp = STAMPS / digest.hexdigest()
    if stamp.exists():
        return ""
    done = subprocess.run(
        # The compile commands are g++'s: clang has other options and warnings.
        ["clang-tidy", "--quiet", f"-p={STAMPS}", "--extra-arg=-Wno-error", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        stamp.touch()
        return ""
    return done.stdout + (done.stderr if not done.stdout else "")


def tidy_jobs(everything: bool) -> list[tuple[str, set[str]]]:
    """The sources to check, each with the project files that it consists of."""
    commands = (BUILD / "compile_commands.json").read_text()
    # clang cannot use g++'s precompiled headers, and parsing all of them anew takes half a minute.
    commands = re.sub(r"-include \S+cmake_pch\.hxx", "", commands)
    (STAMPS / "compile_commands.json").write_text(commands)
    compiled = {os.path.relpath(entry["file"], ROOT) for entry in json.loads(commands)}
    changed = None if everything else changed_files()
    jobs = []
    for file in sorted(f for f in compiled if f.endswith(".cpp") and (ROOT / f).exists()):
        inputs = project_includes(file, set())
        if changed is None or not changed.isdisjoint(inputs):
            jobs.append((file, inputs))
    return jobs


def run_clang_tidy(everything: bool) -> bool:
    """Whether all sources to check pass."""
    STAMPS.mkdir(parents=True, exist_ok=True)
    jobs = tidy_jobs(everything)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        findings = list(pool.map(lambda job: clang_tidy(*job), jobs))
    for text in filter(None, findings):
        print(text)
    print(f"clang-tidy: {len(jobs)} sources, {sum(map(bool, findings))} with findings")
    return not any(findings)


def run(*command: str) -> bool:
    """Whether a command succeeds; its output is shown if it does not."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    name = " ".join(command[:2])
    print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'}")
    if done.returncode != 0:
        print(done.stdout + done.stderr)
    return done.returncode == 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="format instead of checking")
    parser.add_argument("--all", action="store_true", help="clang-tidy on every source")
    args = parser.parse_args()
    cpp = sources(".cpp", ".h", ".cu", ".cuh")
    if args.fix:
        passed = [
            run("ruff", "format", "."),
            run("ruff", "check", "--fix", "."),
            run("clang-format", "-i", *cpp),
        ]
    else:
        passed = [
            run("ruff", "check", "."),
            run("ruff", "format", "--check", "."),
            run("mypy"),
            run("clang-format", "--dry-run", "--Werror", *cpp),
            run_clang_tidy(args.all),
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
