"""``python -m libmuon convert``."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

from libmuon.convert.conversion import convert_state_dict
from libmuon.convert.files import find_state_dict, model_names, read_file
from libmuon.convert.model import ConversionError
from libmuon.convert.sources import SOURCES
from libmuon.convert.write import is_state_file, save


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="a checkpoint or a libmuon state file; or all ranks'",
    )
    add("--to", required=True, choices=("libmuon", "torch"), help="whose state dict to write")
    add("--from", dest="source", choices=sorted(SOURCES), help="whose it is; default: by its keys")
    add("--key", help="where in the checkpoint the optimizer is, such as optimizer_states.0")
    add(
        "--model-names",
        action="append",
        default=[],
        metavar="FILE_OR_LIST",
        help="names in the optimizer's order (a text file with one a line, or a list with commas), "
        "or a file with the model's state dict; may be given twice, for names and for shapes",
    )
    add("--rename", action="append", default=[], metavar="OLD=NEW", help="* is any text; or re:")
    add("--split", action="append", default=[], metavar="WHOLE=PART[:ROWS],PART[:ROWS]")
    add("--fuse", action="append", default=[], metavar="WHOLE=PART,PART")
    add("--like", metavar="FILE", help="state dict of the optimizer that will take the result")
    add(
        "--matrices",
        action="append",
        metavar="GLOB",
        help="which parameters of AdamW switch to Muon: auto (default), none, or globs",
    )
    add("--set", action="append", default=[], metavar="OPTION=VALUE", help="of all matrix groups")
    add("--momentum-form", default="keep", choices=("keep", "ema", "heavy_ball"))
    add("--allow-partial", action="store_true", help="leave out what cannot be converted")
    add("--dry-run", action="store_true", help="print the report and write nothing")
    add(
        "-o",
        "--output",
        metavar="OUT",
        help="the file to write; a state file if it ends in .safetensors",
    )


def run(arguments: argparse.Namespace) -> int:
    """Converts, prints the report and writes the file; returns the exit status."""
    try:
        return _run(arguments)
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        report = getattr(error, "report", None)
        if report is not None:
            print(report)
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.output is None and not arguments.dry_run:
        raise ConversionError("give a file to write with -o, or --dry-run")
    given = [Path(arguments.output)] if arguments.output else []
    if any(path.resolve() == Path(file).resolve() for path in given for file in arguments.files):
        raise ConversionError(f"{arguments.output} is the file to read; write to another one")
    if any(not path.resolve().parent.is_dir() for path in given):
        raise ConversionError(f"there is no folder {given[0].resolve().parent} to write to")
    if arguments.to == "torch" and any(map(is_state_file, given)):
        raise ConversionError(
            f"{arguments.output} would be a state file, which torch's optimizers do not load; give "
            "it another ending, such as .pt"
        )
    names, shapes = _names(arguments.model_names)
    matrices = arguments.matrices
    if matrices is not None and len(matrices) == 1:
        matrices = matrices[0]
    converted, report = convert_state_dict(
        [read_file(file) for file in arguments.files],
        source=arguments.source,
        to=arguments.to,
        names=names,
        shapes=shapes,
        key=arguments.key,
        rename=arguments.rename,
        split=arguments.split,
        fuse=arguments.fuse,
        like=None if arguments.like is None else find_state_dict(read_file(arguments.like))[1],
        matrices=matrices,
        overrides=dict(map(_assignment, arguments.set)),
        momentum_form=arguments.momentum_form,
        allow_partial=arguments.allow_partial,
    )
    print(report)
    if arguments.output is not None and not arguments.dry_run:
        save(converted, arguments.output, report)
        print(f"\nwritten to {arguments.output}")
    return 0


def _names(given: list[str]) -> tuple[list[str] | None, dict[str, Any] | None]:
    """Lists of names, and a model's names and shapes."""
    names: list[str] | None = None
    shapes: dict[str, Any] | None = None
    for text in given:
        path = Path(text)
        if not path.is_file():
            if "," not in text and ("/" in text or path.suffix in (".txt", ".pt", ".pth")):
                raise ConversionError(f"--model-names {text}: there is no such file")
            names = [name.strip() for name in text.split(",")]
        elif (lines := _text_lines(path)) is not None:
            names = lines
        else:
            shapes = model_names(read_file(path))
    return names, shapes


def _text_lines(path: Path) -> list[str] | None:
    """The lines of a text file; None if it is something else."""
    content = path.read_bytes()
    if b"\0" in content:
        return None
    try:
        return [line.strip() for line in content.decode().splitlines() if line.strip()]
    except UnicodeDecodeError:
        return None


def _assignment(text: str) -> tuple[str, Any]:
    option, separator, value = text.partition("=")
    if not separator:
        raise ConversionError(f"--set {text} should be OPTION=VALUE")
    try:
        return option, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return option, value
