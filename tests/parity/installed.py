"""Single modules of the packages that libmuon takes over from."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load(package: str, file: str) -> Any:
    """A module alone: its package imports much that an optimizer does not need."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: make setup"
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / file
    module_spec = importlib.util.spec_from_file_location(f"{package}_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    return module
