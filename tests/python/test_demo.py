"""The demo: its text, its two programs, its report and the recorded learning rates."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAIN_GPT = ROOT / "build/dev/bin/train_gpt"

pytestmark = pytest.mark.skipif(
    not (ROOT / "tools/demo.py").exists(), reason="needs the repository's tools and examples"
)
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "examples/python")]

TINY = {
    "steps": 60,
    "seed": 3,
    "batch": 4,
    "context": 16,
    "layers": 2,
    "width": 32,
    "heads": 2,
    "eval_every": 20,
    "eval_batches": 2,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small standard library: 40 modules, and files that the demo must not read."""
    root = tmp_path_factory.mktemp("lib")
    for index in range(40):
        path = root / ("package" if index % 2 else "") / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def function{index}(x):\n    return x * {index}\n" * 20)
    for name in ("test/test_x.py", "site-packages/torch.py", "_sysconfigdata_linux.py"):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("excluded = True\n")
    return root


@pytest.fixture(scope="module")
def run(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Trains a tiny GPT: run(program, optimizer, attempt), each once a session."""
    import demo_corpus
    import demo_runs

    folder = tmp_path_factory.mktemp("runs")
    demo_corpus.write(folder / "corpus", library)

    @functools.cache
    def train(program: str, optimizer: str, attempt: int = 0) -> Any:
        if program == "cpp" and not TRAIN_GPT.exists():
            pytest.skip("needs build/dev/bin/train_gpt: make build")
        out = folder / f"{program}-{optimizer}-{attempt}.jsonl"
        options = {"corpus": folder / "corpus", "optimizer": optimizer, "lr": 2e-3, **TINY}
        return demo_runs.train(program, out, options)

    return train


def test_corpus_reads_sources_in_one_order_and_leaves_out_tests_and_packages(library: Path) -> None:
    import demo_corpus

    _, meta = demo_corpus.build(library)
    names = [file["name"] for file in meta["files"]]
    assert len(names) == 40
    assert names == sorted(names)


def test_corpus_split_depends_on_the_name_of_a_file_alone(library: Path, tmp_path: Path) -> None:
    import demo_corpus

    library = Path(shutil.copytree(library, tmp_path / "lib"))
    before = {file["name"]: file["split"] for file in demo_corpus.build(library)[1]["files"]}
    (library / "aaa.py").write_text("pass\n")
    after = {file["name"]: file["split"] for file in demo_corpus.build(library)[1]["files"]}
    assert {"train", "validation"} == set(before.values())
    assert {name: after[name] for name in before} == before


def test_corpus_holds_every_character_and_reads_rare_ones_as_unknown() -> None:
    import demo_corpus

    text = "def f():\n\treturn 'x' # ~"
    assert "".join(demo_corpus.VOCABULARY[i] for i in demo_corpus.encode(text)) == text
    assert demo_corpus.VOCABULARY[demo_corpus.encode("é")[0]] == demo_corpus.UNKNOWN


def test_corpus_hash_changes_with_one_character(library: Path, tmp_path: Path) -> None:
    import demo_corpus

    library = Path(shutil.copytree(library, tmp_path / "lib"))
    before = demo_corpus.build(library)[1]["sha256"]
    assert demo_corpus.build(library)[1]["sha256"] == before
    path = library / "module0.py"
    path.write_text(path.read_text().replace("x * 0", "x * 1", 1))
    assert demo_corpus.build(library)[1]["sha256"] != before


def test_corpus_without_sources_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    import demo_corpus

    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        demo_corpus.write(tmp_path / "corpus", tmp_path)


def test_sampler_repeats_itself_and_targets_are_one_character_later() -> None:
    from gpt import Sampler

    text = torch.arange(200, dtype=torch.uint8)
    one, other = (Sampler(text, batch=5, context=7, seed=1) for _ in range(2))
    for _ in range(3):
        inputs, targets = one.next()
        assert torch.equal(targets, inputs + 1)
        assert all(map(torch.equal, (inputs, targets), other.next()))


def test_schedule_warms_up_then_falls_to_zero() -> None:
    from train_gpt import warmup_then_linear

    factors = [warmup_then_linear(50)(step) for step in range(51)]
    assert factors[:6] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert factors[50] == 0.0
    assert all(a > b for a, b in itertools.pairwise(factors[5:]))


def test_cpp_and_python_losses_agree(run: Callable[..., Any]) -> None:
    import demo_report

    cpp, python = run("cpp", "muon"), run("python", "muon")
    assert demo_report.largest_difference(cpp, python, 50) <= 1e-6
    assert demo_report.largest_difference(cpp, python) <= 1e-3
    assert [s["lr"] for s in cpp.steps] == [s["lr"] for s in python.steps]
    assert cpp.end["validation_loss"] < cpp.validations[0]["validation_loss"] - 0.5


def test_cpp_and_python_agree_with_adamw_alone(run: Callable[..., Any]) -> None:
    import demo_report

    # LibTorch's AdamW rounds in another order than torch's fused one.
    assert demo_report.largest_difference(run("cpp", "adamw"), run("python", "adamw")) <= 1e-3


@pytest.mark.parametrize("program", ["cpp", "python"])
def test_two_runs_of_a_program_are_bitwise_equal(program: str, run: Callable[..., Any]) -> None:
    one, other = (run(program, "muon", attempt) for attempt in range(2))
    assert one is not other
    assert one.losses() == other.losses()
    assert one.end["weights"] == other.end["weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rate", "1"], "unknown option --learning-rate"),
        (["--steps", "5x"], "--steps: expected a number, got 5x"),
        (["--steps"], "--steps needs a value"),
        (["--optimizer", "sgd"], "expected muon or adamw, got sgd"),
        (["--lr", "1", "--out", "unused", "--corpus", "/nowhere"], "cannot read"),
    ],
)
def test_cpp_program_says_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    if not TRAIN_GPT.exists():
        pytest.skip("needs build/dev/bin/train_gpt: make build")
    done = subprocess.run(
        [str(TRAIN_GPT), *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert message in done.stderr


def fake_run(optimizer: str, program: str, losses: list[float]) -> Any:
    """A run with one step a validation, a second a step."""
    import demo_runs

    name = f"{optimizer}-{program}"
    settings = {"optimizer": optimizer, "lr": 1e-3, "seed": 0, "layers": 1}
    events: list[dict[str, Any]] = [{"event": "start", **settings}]
    for step, loss in enumerate(losses):
        timed = {"step": step, "seconds": float(step)}
        events.append({"event": "validation", "validation_loss": loss, **timed})
    end = {"seconds": 4.0, "optimizer_seconds": 1.0, "weights": 7, "validation_loss": losses[-1]}
    events.append({"event": "end", **end})
    return demo_runs.Run([{"run": name, **event} for event in events])


def test_report_finds_where_muon_reaches_adamws_final_loss(tmp_path: Path) -> None:
    import demo_report

    adamw = fake_run("adamw", "cpp", [4.0, 3.5, 3.2, 3.0])
    muon = fake_run("muon", "cpp", [4.0, 2.9, 2.5, 2.0])
    summary = demo_report.summarize(adamw, muon, fake_run("muon", "python", [4.0, 2.9, 2.5, 2.0]))
    found = summary["optimizers"]["muon"]
    assert found["steps_to_adamw_final"] == 1
    assert found["optimizer_share"] == 0.25
    assert demo_report.failures(summary) == []
    assert "2.0000" in demo_report.table(summary)
    demo_report.draw(adamw, muon, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_report_fails_when_muon_is_worse_or_the_languages_differ() -> None:
    import demo_report

    adamw = fake_run("adamw", "cpp", [4.0, 3.0])
    muon = fake_run("muon", "cpp", [4.0, 3.1])
    summary = demo_report.summarize(adamw, muon, fake_run("muon", "python", [4.0, 3.2]))
    assert summary["optimizers"]["muon"]["steps_to_adamw_final"] is None
    assert "not reached" in demo_report.table(summary)
    assert len(demo_report.failures(summary)) == 3


def test_recorded_learning_rates_were_chosen_fairly_and_muon_wins_on_every_seed() -> None:
    import demo_runs

    recorded = json.loads(demo_runs.TUNED.read_text(encoding="utf-8"))
    for optimizer, losses in recorded["final_validation_loss"].items():
        lrs = [float(lr) for lr in losses]
        assert len(lrs) >= 5
        assert all(math.isclose(b / a, 2.0) for a, b in itertools.pairwise(lrs))
        best = min(losses, key=losses.__getitem__)
        assert float(best) == recorded["chosen"][optimizer]
        assert lrs[0] < float(best) < lrs[-1]
    assert len(recorded["seeds"]) == 3
    for result in recorded["seeds"]:
        assert result["muon"] < result["adamw"]
        assert result["muon_steps_to_adamw_final"] < recorded["steps"]


def test_custom_algorithm_is_the_same_program_in_both_languages(
    library: Path, tmp_path: Path
) -> None:
    """AdaMuon, registered from outside in either language, over a save and a load half-way."""
    import demo_corpus

    demo_corpus.write(tmp_path / "corpus", library)
    programs = {
        "cpp": [ROOT / "build/dev/bin/custom_algorithm"],
        "python": [sys.executable, ROOT / "examples/python/custom_algorithm.py"],
    }
    if not programs["cpp"][0].exists():
        pytest.skip("needs build/dev/bin/custom_algorithm: make build")
    sizes = {k.replace("_", "-"): v for k, v in TINY.items() if not k.startswith("eval")}
    losses = {}
    for name, command in programs.items():
        out = tmp_path / f"{name}.jsonl"
        options = {"corpus": tmp_path / "corpus", "lr": 4e-3, "out": out, **sizes}
        arguments = [str(part) for k, v in options.items() for part in (f"--{k}", v)]
        subprocess.run([*map(str, command), *arguments], check=True, capture_output=True)
        losses[name] = [json.loads(line)["train_loss"] for line in out.read_text().splitlines()]
    assert len(losses["cpp"]) == TINY["steps"]
    assert losses["cpp"] == pytest.approx(losses["python"], rel=1e-6)
    assert sum(losses["cpp"][-10:]) < 0.8 * sum(losses["cpp"][:10])
