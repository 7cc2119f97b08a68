"""tests/README.md says where each id is tested; it must stay true."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
if not (TESTS / "cpp").exists():
    pytest.skip("needs the repository's tests in C++", allow_module_level=True)

ID = re.compile(r"(?:^|(?<=_))([A-H]\d{1,2})(?=_|$)", re.IGNORECASE)


def ids_in_names(folder, pattern, definition):
    """{id: stems of the files in which a test of that name is defined}."""
    found = {}
    for path in folder.glob(pattern):
        for name in re.findall(definition, path.read_text(), re.MULTILINE):
            for key in ID.findall(name):
                found.setdefault(key.upper(), set()).add(path.stem)
    return found


def test_the_table_of_ids_is_true():
    readme = (TESTS / "README.md").read_text()
    rows = re.findall(r"^\| ([A-H]\d+) \| (.*?) \| (.*?) \|$", readme, re.MULTILINE)
    listed = {key: [set(re.findall(r"`(\w+)`", cell)) for cell in cells] for key, *cells in rows}
    python = ids_in_names(TESTS / "python", "test_*.py", r"^\s*def (test_\w+)")
    cpp = ids_in_names(TESTS / "cpp", "*_test.cpp", r"^TEST(?:_F|_P)?\(\w+,\s*(\w+)\)")
    for key, (in_python, in_cpp) in listed.items():
        assert in_python == python.get(key, set()), key
        assert in_cpp == cpp.get(key, set()), key
    unlisted = (python.keys() | cpp.keys()) - listed.keys()
    for key in unlisted:  # those that the text below the table mentions
        assert re.search(rf"\b{key}\b", readme), key


def test_every_test_that_the_readme_names_exists():
    readme = (TESTS / "README.md").read_text()
    files = [*TESTS.glob("python/test_*.py"), *TESTS.glob("parity/test_*.py")]
    defined = {path.stem for path in files}
    for path in files:
        defined.update(re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", readme))
    assert len(named) > 60
    assert not named - defined
