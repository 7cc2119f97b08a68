"""The code of docs/clients.md runs, each section in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/clients.md"


def programs():
    """Heading -> its code, after that above all headings; lines stand where the page has them."""
    heading, code, found = "", False, {"": {}}
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines()):
        if line.startswith("```"):
            code = line == "```python"
        elif code:
            found[heading][number] = line
        elif match := re.match("## (.*)", line):
            heading = match[1]
            found[heading] = {}
    start = found.pop("")
    return {
        name: "\n".join({**start, **lines}.get(i, "") for i in range(max(lines) + 1))
        for name, lines in found.items()
        if lines
    }


@pytest.mark.parametrize("section", programs())
def test_code_of_a_section_runs(section, tmp_path):
    program = tmp_path / "clients.md.py"
    program.write_text(programs()[section], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
