"""What passes between the readers of foreign state dicts and the writers of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from libmuon.options import Group

Shape = tuple[int, ...]
_REQUIRED = object()


class Fields:
    """A mapping that remembers which of its keys a reader has taken."""

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self._values = dict(values)
        self._what = what

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """A value that stays."""
        return self._values.get(key, default)

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """A value, or `default`; `rest` no longer has it.

        Raises:
            ValueError: if the key is missing and there is no default.
        """
        if key not in self._values and default is _REQUIRED:
            raise ValueError(f"{self._what} has no {key!r}; it has: {sorted(self._values)}")
        return self._values.pop(key, default)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """`take` of a number, which files may hold as a one-element tensor."""
        value = self.take(key, default)
        return _shortest(value) if isinstance(value, Tensor) else value

    @property
    def rest(self) -> dict[str, Any]:
        """What nobody has taken."""
        return dict(self._values)


def _shortest(value: Tensor) -> float:
    """The number that somebody has written into a float32 tensor: 0.02, not 0.0199999996."""
    exact = float(value.item())
    for digits in range(6, 10):
        short = float(f"{exact:.{digits}g}")
        if torch.full_like(value, short).item() == exact:
            return short
    return exact


@dataclass
class Parameter:
    """One parameter on its way from a source to a target.

    Attributes:
        group: Index of its group in the file.
        position: Its position there.
        index: Its position in the whole file.
        name: Its name, where the file or the caller knows it.
        shape: The parameter's shape: the model's if given, else that of its state; None if neither
            is known.
        algorithm: The registered name of what trains it.
        options: Its group's options, in libmuon's names; what is missing has libmuon's default.
        metadata: Keys of its group that are no options.
        state: Its state under libmuon's keys.
        moved: What was read of its state, and what it became.
        notes: What the new trajectory depends on.
        problems: What could not be converted, and why.
    """

    group: int
    position: int
    index: int
    name: str | None = None
    shape: Shape | None = None
    algorithm: str = "muon"
    options: Group = field(default_factory=dict)
    metadata: Group = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name, or the position in the file."""
        return self.name or f"parameter {self.position} of group {self.group}"

    def keep(self, key: str, read: str, value: Any) -> None:
        """Takes over one tensor of the state, that the file calls `read`."""
        if not isinstance(value, Tensor):
            self.problems.append(f"{read} is a {type(value).__name__} instead of a tensor")
            return
        self.state[key] = value
        self.moved.append(read if read == key else f"{read} -> {key}")

    def leave(self, key: str, why: str) -> None:
        """Says that one piece of the state is left out, and why that loses nothing."""
        self.moved.append(f"{key} left out ({why})")


@dataclass(frozen=True)
class Raw:
    """One parameter as the file has it."""

    group: Fields
    state: Fields
    shape: Shape | None  # the model's, else the state's
    from_model: bool

    @property
    def is_stack(self) -> bool:
        """Whether the parameter is known to have more than two dims."""
        return self.shape is not None and len(self.shape) > 2


@dataclass(frozen=True)
class Source:
    """An optimizer whose state dicts can be read.

    Attributes:
        name: What ``--from`` calls it.
        title: What reports call it.
        matches: Whether groups and states have its keys.
        read: Fills a `Parameter` from a `Raw`; keys of the group that it does not take are kept as
            metadata, keys of the state that it does not take are problems.
        version: What can be told of the version.
        sharded: Whether, on several ranks, each file has only the state of its own parameters.
    """

    name: str
    title: str
    matches: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], bool]
    read: Callable[[Raw, Parameter], None]
    version: Callable[[Sequence[Mapping[str, Any]]], str] = lambda groups: ""
    sharded: bool = False


# Keys that schedulers and trainers add to any group.
BOOKKEEPING = frozenset(
    {
        "params",
        "param_names",
        "initial_lr",
        "max_lr",
        "min_lr",
        "max_momentum",
        "base_momentum",
        "swa_lr",
        "name",
    }
)


def option_keys(group: Mapping[str, Any]) -> set[str]:
    """The keys of a group that are its optimizer's own."""
    return {key for key in group if key not in BOOKKEEPING}


def state_keys(states: Sequence[Mapping[str, Any]]) -> set[str]:
    """All keys that any state has."""
    return {key for state in states for key in state}


class ConversionError(ValueError):
    """A state dict that cannot be converted as asked; `report` says what could be, if anything."""

    def __init__(self, text: str, report: Report | None = None) -> None:
        super().__init__(text)
        self.report = report


@dataclass(frozen=True)
class Entry:
    """What became of one parameter: a line of the report."""

    name: str
    shape: Shape | None
    group: int | None
    algorithm: str
    moved: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass
class Report:
    """What was read, what it became, and what could not be converted.

    Attributes:
        source: The optimizer that wrote the file, with what is known of its version.
        target: "libmuon" or "torch".
        groups: A line for each group that the new optimizer needs, in order.
        entries: A line for each parameter.
        notes: What concerns the whole file.
        problems: What could not be converted of the whole file.
    """

    source: str
    target: str
    groups: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything could be converted."""
        return not self.problems and not any(entry.problems for entry in self.entries)

    def __str__(self) -> str:
        lines = [f"source  {self.source}", f"target  {self.target}", "", "groups"]
        lines += [f"  {index}  {text}" for index, text in enumerate(self.groups)]
        lines += ["", "parameters"]
        rows = [
            (
                entry.name,
                "?" if entry.shape is None else str(tuple(entry.shape)),
                "-" if entry.group is None else f"group {entry.group}",
                entry.algorithm,
                "; ".join(entry.moved) or "no state in the file: starts at zero",
            )
            for entry in self.entries
        ]
        lines += [f"  {line}" for line in table(rows)]
        for title, own in (("notes", self.notes), ("problems", self.problems)):
            texts = [f"  {text}" for text in own]
            for text, names in self._by_text(title):
                texts.append(f"  {text} ({listed(names)})")
            if texts:
                lines += ["", title, *texts]
        return "\n".join(lines)

    def _by_text(self, title: str) -> Iterator[tuple[str, list[str]]]:
        found: dict[str, list[str]] = {}
        for entry in self.entries:
            for text in getattr(entry, title):
                found.setdefault(text, []).append(entry.name)
        yield from found.items()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of texts in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def as_step(value: Any) -> Tensor:
    """A step count as libmuon keeps it."""
    return torch.as_tensor(value, dtype=torch.float32).reshape(()).clone()
