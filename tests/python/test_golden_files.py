"""The golden data is what its generator computes."""

import sys
from pathlib import Path

import golden
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if not (TOOLS / "make_golden.py").exists():
    pytest.skip("needs the repository's tools", allow_module_level=True)
sys.path.insert(0, str(TOOLS))

import make_golden  # noqa: E402


def test_the_files_agree_with_the_generator():
    files = {path.name for path in golden.FOLDER.glob("*.json")}
    assert files >= set(make_golden.FILES)
    assert make_golden.check(golden.FOLDER) == 154


def test_the_check_notices_a_changed_number(tmp_path):
    for path in golden.FOLDER.glob("*.json"):
        text = path.read_text()
        if path.name == "torch_muon.json":
            digits = "0.4397615693809668"
            assert text.count(digits) >= 1
            text = text.replace(digits, "0.4397615693909668", 1)
        (tmp_path / path.name).write_text(text)
    with pytest.raises(SystemExit, match="torch/nesterov/original"):
        make_golden.check(tmp_path)
