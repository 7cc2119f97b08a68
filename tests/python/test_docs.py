"""README and docs: their code runs, prints what they show, and their tables hold."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import subprocess
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import libmuon
import pytest
import torch
from libmuon.options import ALGORITHM_OPTIONS, GROUP_CHECKS

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs/index.md").exists():
    pytest.skip("needs the repository's documentation", allow_module_level=True)

GENERATED = {"build", "dist", "out"}
FOLDERS = [f for f in ROOT.iterdir() if f.is_dir() and f.name[0] != "." and f.name not in GENERATED]
FILES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in folder.rglob("*.md"))])
PAGES = [path.relative_to(ROOT).as_posix() for path in FILES]
NOT_RUN = "<!-- not run: "


class Fence(NamedTuple):
    """A code block of a page."""

    language: str
    code: str
    line: int
    is_run: bool
    output: str | None  # the text block that follows directly


def fences(page: str) -> list[Fence]:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found: list[Fence] = []
    previous_end = -2
    start = 0
    while start < len(lines):
        if not lines[start].startswith("```"):
            start += 1
            continue
        language = lines[start].removeprefix("```")
        end = lines.index("```", start + 1)
        code = "\n".join(lines[start + 1 : end]) + "\n"
        before = next((line for line in reversed(lines[:start]) if line), "")
        follows = not any(lines[previous_end + 1 : start]) and found
        if language == "text" and follows and found[-1].language == "python":
            found[-1] = found[-1]._replace(output=code)
        found.append(Fence(language, code, start + 2, not before.startswith(NOT_RUN), None))
        previous_end, start = end, end + 1
    return found


def pages_with(language: str) -> list[str]:
    return [
        page for page in PAGES if any(f.language == language and f.is_run for f in fences(page))
    ]


def table(page: str, first_cell: str) -> list[list[str]]:
    """The rows below the header that begins with `first_cell`."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    (header,) = [i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |")]
    rows = []
    for line in lines[header + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


@pytest.fixture
def strict() -> Iterator[None]:
    """Documented code warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run_in_order_and_print_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__docs__"}
    for fence in fences(page):
        if fence.language != "python" or not fence.is_run:
            continue
        # Empty lines in front make the line numbers of errors those of the page.
        code = compile("\n" * (fence.line - 1) + fence.code, page, "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if fence.output is not None:
            assert printed.getvalue() == fence.output, f"{page}:{fence.line}"


def test_readme_shows_the_quickstart_programs():
    for language, path in (
        ("cpp", "examples/cpp/quickstart.cpp"),
        ("python", "examples/python/quickstart.py"),
    ):
        shown = [fence.code for fence in fences("README.md") if fence.language == language]
        assert (ROOT / path).read_text(encoding="utf-8") in shown, path


def test_cpp_blocks_are_part_of_a_program_that_is_compiled():
    source = (ROOT / "examples/cpp/guide.cpp").read_text(encoding="utf-8")
    for fence in fences("docs/cpp.md"):
        if fence.language == "cpp":
            in_place = [textwrap.indent(fence.code, " " * indent) for indent in (0, 2, 4)]
            assert any(code in source for code in in_place), f"docs/cpp.md:{fence.line}"


@pytest.mark.parametrize("program", ["quickstart", "guide"])
def test_documented_cpp_programs_run(program):
    built = ROOT / "build/dev/bin" / program
    assert built.exists(), f"{program} is not built: make build"
    done = subprocess.run([built], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page} links to {target}"


def anchors(file: Path) -> set[str]:
    """What a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_make_targets_that_the_pages_name_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE))
    known = {name for line in targets for name in line.split()}
    for page in PAGES:
        named = re.findall(r"`make ([a-z-]+)`", (ROOT / page).read_text(encoding="utf-8"))
        assert set(named) <= known, page


def test_option_table_lists_every_option_with_its_default():
    documented = {}
    for options, _, default, _ in table("README.md", "option"):
        names = re.findall(r"`(\w+)`", options)
        values = re.findall(r"`([^`]*)`", default)
        assert len(values) in (1, len(names)), options
        documented |= dict(zip(names, values * len(names), strict=False))
    signature = inspect.signature(libmuon.Muon.__init__).parameters
    expected = {name: parameter.default for name, parameter in signature.items()}
    for options in ALGORITHM_OPTIONS.values():
        expected |= options
    expected = {name: value for name, value in expected.items() if name in GROUP_CHECKS}
    refused = {"differentiable"}
    assert documented.keys() == expected.keys() - refused
    for name, value in documented.items():
        assert eval(value) == expected[name], name


def test_table_of_state_formats_holds():
    """Columns: format, largest error of a block's largest value, error of Gaussian blocks."""
    values = torch.randn(4096, 128)
    largest = values.abs().amax(1, keepdim=True)
    for name, limit, typical in table("docs/numerics.md", "format"):
        spec = f"algorithm=muon;state_format={name.strip('`')}"
        codes, scales = torch.ops.muon.encode_state(values, spec, "x")
        shape = list(values.shape)
        error = torch.ops.muon.decode_state(codes, scales, spec, shape, False, "x") - values
        bound, relative = (float(cell.removesuffix(" %")) / 100 for cell in (limit, typical))
        # The table has two digits.
        assert (error.abs() / largest).max() <= bound * 1.05
        assert (error.norm() / values.norm()).item() == pytest.approx(relative, rel=0.05)


def polynomial(x: torch.Tensor, rows: Any) -> torch.Tensor:
    for a, b, c in rows:
        x = a * x + b * x**3 + c * x**5
    return x


def test_schedule_table_holds():
    """Columns: name, steps, normalisation, band from 0.01, band from 0.001, value at 1, slope."""
    schedules = libmuon.schedules()
    listed = {}
    for name, steps, divisor, *numbers in table("docs/numerics.md", "schedule"):
        listed[name.strip("`")] = (steps, divisor, numbers)
    assert listed.keys() == schedules.keys()
    for name, (steps, divisor, (wide, low, at_one, slope)) in listed.items():
        rows = schedules[name]
        factor = float(found[0]) if (found := re.findall(r"1\.\d+", divisor)) else 1.0
        assert len(rows) == int(steps)
        for first, band in ((-2, wide), (-3, low)):
            grid = torch.logspace(first, 0, 100001, dtype=torch.float64) / factor
            values = polynomial(grid, rows)
            expected = f"{values.min():.3f} … {values.max():.3f}"
            assert band == expected, name
        one = torch.ones((), dtype=torch.float64)
        assert at_one == f"{polynomial(one / factor, rows):.4f}", name
        total = 1 / factor
        for a, _, _ in rows:
            total *= a
        assert slope == f"{total:.0f}", name
        # The library divides by the same factor.
        got = libmuon.orthogonalize(torch.eye(1, dtype=torch.float64), name, eps=0.0)
        assert at_one == f"{got.item():.4f}", name


def test_shape_factor_table_holds():
    """A column a shape, a row a factor."""
    shapes = [(512, 512), (2048, 512), (512, 2048), (1, 512)]
    rows = table("docs/numerics.md", "`adjust_lr_fn`")
    assert len(rows) == 4
    for mode, _, *numbers in rows:
        assert len(numbers) == len(shapes)
        for shape, number in zip(shapes, numbers, strict=True):
            param = torch.nn.Parameter(torch.empty(shape))
            choice = re.findall(r'"(\w+)"', mode)[0]
            optimizer = libmuon.Muon([param], lr=1.0, adjust_lr_fn=choice)
            assert number == f"{optimizer.effective_lr(param)[0]:.4g}", (mode, shape)


def test_demo_numbers_are_those_of_the_result_file():
    recorded = json.loads((ROOT / "benchmarks/results/demo_tune.json").read_text(encoding="utf-8"))
    losses = "{seed} {adamw:.3f} {muon:.3f} {muon_steps_to_adamw_final}"
    expected = [losses.format(**run).split() for run in recorded["seeds"]]
    assert table("README.md", "seed") == expected
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "AdamW {adamw}, Muon {muon}".format(**recorded["chosen"]) in text


def test_version_is_the_same_everywhere():
    version = libmuon.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## [{version}]" in changelog
    assert f"version: {version}" in citation
