"""The demo's text: the Python standard library's own sources, as one byte a character.

python tools/demo_corpus.py out/demo/corpus

Writes train.bin and validation.bin (token ids), and corpus.json: the vocabulary, every file with
its SHA-256, and one hash over the whole, so that two results can be told to share their text.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

# Not written by hand, not prose, or not in every distribution's package of the standard library.
EXCLUDED_FOLDERS = frozenset(
    {
        "__phello__",
        "dist-packages",
        "distutils",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")

# Any other character is read as this one.
UNKNOWN = "\ufffd"
VOCABULARY = "\t\n" + "".join(map(chr, range(32, 127))) + UNKNOWN


def source_files(root: Path) -> list[Path]:
    """All sources below `root` that the demo reads, in one order on every machine."""
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if EXCLUDED_FOLDERS.isdisjoint(parts) and not parts[0].startswith(EXCLUDED_PREFIXES):
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def is_validation(name: str) -> bool:
    """One file in ten, chosen by its name alone: a file more or less moves no other."""
    return zlib.crc32(name.encode()) % 10 == 0


def encode(text: str) -> bytes:
    """One byte a character: its index in VOCABULARY."""
    ids = {character: index for index, character in enumerate(VOCABULARY)}
    return bytes(ids.get(character, ids[UNKNOWN]) for character in text)


def build(root: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Returns the token ids of both splits and what corpus.json holds."""
    ids = {"train": bytearray(), "validation": bytearray()}
    files = []
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        content = path.read_bytes()
        split = "validation" if is_validation(name) else "train"
        ids[split] += encode(content.decode("utf-8", errors="replace").replace("\r\n", "\n"))
        files.append({"name": name, "split": split, "sha256": hashlib.sha256(content).hexdigest()})
    if not ids["train"] or not ids["validation"]:
        raise FileNotFoundError(f"expected the standard library's sources below {root}, found none")
    digest = hashlib.sha256(bytes(ids["train"]) + bytes(ids["validation"])).hexdigest()
    meta = {
        "source": f"standard library of Python {platform.python_version()}",
        "sha256": digest,
        "vocabulary": VOCABULARY,
        "characters": {split: len(content) for split, content in ids.items()},
        "files": files,
    }
    return {split: bytes(content) for split, content in ids.items()}, meta


def write(folder: Path, root: Path | None = None) -> dict[str, Any]:
    """Writes the corpus into `folder` unless it is there already; returns corpus.json's content."""
    ids, meta = build(root or Path(sysconfig.get_paths()["stdlib"]))
    text = json.dumps(meta, indent=1)
    index = folder / "corpus.json"
    if index.exists() and index.read_text(encoding="utf-8") == text:
        return meta
    folder.mkdir(parents=True, exist_ok=True)
    for split, content in ids.items():
        (folder / f"{split}.bin").write_bytes(content)
    index.write_text(text, encoding="utf-8")
    return meta


if __name__ == "__main__":
    written = write(Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo/corpus"))
    print(len(written["files"]), "files,", written["characters"], "sha256", written["sha256"])
