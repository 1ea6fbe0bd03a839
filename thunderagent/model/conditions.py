"""A conditional write as a value: what is changed in one row, and what must hold for any of it to happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunderagent.model.rows import is_set
from thunderagent.model.task import Row


@dataclass(frozen=True, slots=True)
class Is:
    """The attribute has exactly this value."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Absent:
    """The attribute is not there."""

    name: str


@dataclass(frozen=True, slots=True)
class Present:
    """The attribute is there."""

    name: str


@dataclass(frozen=True, slots=True)
class Below:
    """The attribute is a number smaller than this one."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Above:
    """The attribute is a number larger than this one."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Fewer:
    """The attribute is a set with fewer members than this, or is not there."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The attribute is a number that can be counted on: from 0, and exact on every engine. Or it is not there."""

    name: str


@dataclass(frozen=True, slots=True)
class Typed:
    """The attribute is there and has the type that the table gives it."""

    name: str


@dataclass(frozen=True, slots=True)
class Mistyped:
    """The attribute is there and has another type: of a row that was written by hand."""

    name: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """The attribute has one of these values."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """At least one of these conditions holds."""

    conditions: tuple[Condition, ...]


Condition = Is | Absent | Present | Below | Above | Fewer | Counts | Typed | Mistyped | OneOf | Either


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One conditional change of one row."""

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
    """Take the whole row away; nothing else is changed then."""
    require: Sequence[Condition]

    def __post_init__(self) -> None:
        if not self.require:
            raise ValueError(f"the write {self.verb!r} has no condition")

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What must hold: what the verb requires, and that what is counted or collected is not of another type.

        Engines do not agree about what becomes of such an attribute: so all of them refuse the write.
        """
        if not (self.increase or self.insert or self.discard):
            return tuple(self.require)
        pinned = {one.name for one in self.require if isinstance(one, (Is, Fewer))}
        counted = [Counts(name) for name in self.increase if name not in pinned]
        sets = [Either((Absent(name), Typed(name))) for name in (*self.insert, *self.discard) if name not in pinned]
        return (*self.require, *counted, *sets)

    def landed_on(self, row: Row) -> bool:
        """True when the row looks exactly as this write leaves it: a lost reply, not a lost race.

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
