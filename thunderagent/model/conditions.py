"""A conditional write as a value: what changes in one row, and what must hold for any of it to happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunderagent.model.rows import is_set
from thunderagent.model.task import Row


@dataclass(frozen=True, slots=True)
class Is:
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Absent:
    name: str


@dataclass(frozen=True, slots=True)
class Present:
    name: str


@dataclass(frozen=True, slots=True)
class Below:
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Above:
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Fewer:
    """The attribute is a set with fewer members than this, or absent."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The attribute is a count from 0 that every engine holds exactly, or absent."""

    name: str


@dataclass(frozen=True, slots=True)
class Typed:
    """The attribute has the type that the table gives it."""

    name: str


@dataclass(frozen=True, slots=True)
class Mistyped:
    """The attribute is there with another type: a person wrote the row."""

    name: str


@dataclass(frozen=True, slots=True)
class OneOf:
    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Either:
    conditions: tuple[Condition, ...]


Condition = Is | Absent | Present | Below | Above | Fewer | Counts | Typed | Mistyped | OneOf | Either


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    verb: str
    task_id: str
    set: Mapping[str, Any] = field(default_factory=dict)
    increase: Mapping[str, int] = field(default_factory=dict)
    remove: Sequence[str] = ()
    insert: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Members to put into the string set of that name."""
    discard: Mapping[str, str] = field(default_factory=dict)
    """Member to take out of the string set of that name; an empty set is an absent attribute."""
    delete: bool = False
    """Delete the row, and change nothing else."""
    require: Sequence[Condition]

    def __post_init__(self) -> None:
        if not self.require:
            raise ValueError(f"the write {self.verb!r} has no condition")

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What the verb requires, and that what is counted or collected has its own type.

        Engines differ in what becomes of an attribute of another type, so all of them refuse the write.
        """
        if not (self.increase or self.insert or self.discard):
            return tuple(self.require)
        pinned = {one.name for one in self.require if isinstance(one, (Is, Fewer))}
        counted = [Counts(name) for name in self.increase if name not in pinned]
        sets = [Either((Absent(name), Typed(name))) for name in (*self.insert, *self.discard) if name not in pinned]
        return (*self.require, *counted, *sets)

    def landed_on(self, row: Row) -> bool:
        """Whether the row looks exactly as this write leaves it: a lost reply, not a lost race.

        Owners are unique per process start and times have milliseconds, so no other writer leaves the same values.
        """
        if not self.set or any(row.get(name) != value for name, value in self.set.items()):
            return False
        if any(name in row for name in self.remove):
            return False
        if any(not is_set(row.get(name)) or not members <= row[name] for name, members in self.insert.items()):
            return False
        return all(
            row.get(condition.name) == condition.value
            for condition in self.require
            if isinstance(condition, Is) and condition.name == "fence" and "fence" not in self.increase
        )
