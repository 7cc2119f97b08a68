"""libmuon itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.model import Parameter, Raw, Source
from libmuon.options import group_checks


def _matches(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> bool:
    return all({"algorithm", "momentum_form", "compute_dtype"} <= group.keys() for group in groups)


def _read(raw: Raw, into: Parameter) -> None:
    into.algorithm = raw.group.take("algorithm")
    known = group_checks(into.algorithm)
    into.options = {key: raw.group.take(key) for key in raw.group.rest if key in known}
    for key in raw.state.rest:
        into.keep(key, key, raw.state.take(key))


SOURCE = Source("libmuon", "libmuon.Muon", _matches, _read)
