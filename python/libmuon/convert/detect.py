"""Whose state dict it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libmuon.convert.model import ConversionError, Source, option_keys
from libmuon.convert.sources import SOURCES


def candidates(
    groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> list[Source]:
    """The sources whose keys the groups and states have.

    Presets of `libmuon.compat` keep keys of the packages that they stand for, and are libmuon's.
    """
    found = [source for source in SOURCES.values() if groups and _fits(source, groups, states)]
    native = SOURCES["libmuon"]
    return [native] if native in found else found


def _fits(
    source: Source, groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> bool:
    try:
        return source.matches(groups, states)
    except (TypeError, RuntimeError):  # a key of the same name with a value of another kind
        return False


def detect(
    groups: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, Any]],
    name: str | None = None,
) -> Source:
    """The one source that fits, or the named one.

    Raises:
        ConversionError: if none or several fit; the text lists them.
    """
    if name is not None:
        if name not in SOURCES:
            raise ConversionError(f"source should be one of {sorted(SOURCES)} but is: {name!r}")
        return SOURCES[name]
    found = candidates(groups, states)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(repr(source.name) for source in found)
        raise ConversionError(
            f"the file could be of several optimizers: {names}; say which by the source's name"
        )
    keys = sorted({str(key) for group in groups for key in option_keys(group)})
    kinds = sorted({str(key) for state in states for key in state})
    raise ConversionError(
        f"no known optimizer has groups with {keys} and state with {kinds}; if it is one of "
        f"{sorted(SOURCES)} all the same, say so by the source's name"
    )
