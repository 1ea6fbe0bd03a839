"""Attributes of the table, the values that each may have, and rows that this version cannot read.

A newer version or a person may have written such a row. It becomes a value: readers of many rows leave it out, do not
change it, and name it once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from thunderagent.model.forks import renewed

_BY_TYPE: Final[Mapping[str, str]] = {
    "S": "taskId status job kind payload payloadRef leaseOwner lastAgent onParentFailure desiredState "
    "handoffOwner handoffState progress result resultRef error doneReason uniqueKey uniqueScope limitKey "
    "heldBy traceparent",
    "N": "createdAt submittedAt startedAt finishedAt updatedAt retryCount maxRetry crashCount fence lockTime "
    "leaseSec hb handoffUntil expireAt limitMax regionEpoch",
    "L": "dependsOn errors",
    "SS": "waitingFor dependents holders",
    "M": "lastSeq info",
    "BOOL": "cancelRequested",
}
ATTRIBUTES: Final[Mapping[str, str]] = {name: kind for kind, names in _BY_TYPE.items() for name in names.split()}
"""Every attribute of the table and its DynamoDB type.

No task has `info` (agents, journals, schedules, pauses), `heldBy` (unique keys) or `holders` (limits).
"""

LEASE_ATTRIBUTES: Final = ("lockTime", "leaseOwner", "leaseSec", "hb")
"""Present exactly while RUNNING."""

REMEDY: Final = "upgrade this installation if a newer version has written the row, else mend or delete it"

NAMED: Final = 10_000
"""Rows that one process names at most."""

ALONE_S: Final = 600.0
"""How long a task is not claimed after its row could not be read; it may be mended meanwhile."""

LARGEST: Final = 1e126
"""Numbers of a row are below it, as those of DynamoDB."""

MOST_COUNTED: Final = 2**53
"""Up to here every whole number is exact on both engines."""

_SHOWN: Final = 80
_TEXTS: Final = frozenset({"payload", "result", "progress", "error", "errors", "doneReason", "uniqueKey", "info"})
"""Attributes whose content is the application's, and reaches no log."""
_IN_WORDS: Final[Mapping[type, str]] = {
    str: "a text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    bytes: "binary data",
    list: "a list",
    dict: "a map",
    frozenset: "a set",
    type(None): "NULL",
}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that this version cannot read, with the first attribute that it does not understand."""

    row_id: str
    attribute: str
    value: str
    """Short and in words: the type, and the value itself unless it is the application's."""

    @classmethod
    def of(cls, row: Mapping[str, Any], attribute: str) -> Unreadable:
        return cls(f"{row.get('taskId', '')!s:.512}", attribute, _in_words(attribute, row))

    def __str__(self) -> str:
        return f"the row {self.row_id!r} cannot be read: {self.attribute} is {self.value}; {REMEDY}"


class Unread:
    """The rows that one process could not read: names each once, and knows which tasks not to claim.

    Args:
        monotonic: the clock for `ALONE_S`.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._guard = renewed(threading.Lock())
        self._named: dict[str, float] = {}
        self._number = 0
        self.listener: Callable[[Unreadable], object] = lambda one: None
        """Called once for each row, in the thread that has read it."""

    def note(self, one: Unreadable) -> None:
        """Name a row once, and no more rows than `NAMED`."""
        with self._guard:
            is_new = self._named.pop(one.row_id, None) is None and self._number < NAMED
            self._number += is_new
            self._named[one.row_id] = self._monotonic() + ALONE_S
            while len(self._named) > NAMED:
                del self._named[next(iter(self._named))]
        if is_new:
            self.listener(one)

    def is_left_alone(self, task_id: str) -> bool:
        """Whether the row of a task could not be read within `ALONE_S`."""
        return bool(self._named) and self._named.get(task_id, 0.0) > self._monotonic()

    @property
    def pause_s(self) -> float:
        """Wait of a task that was claimed in vain: of many, all agents together claim ten in a second."""
        return max(1.0, len(self._named) / 10)


def is_number(value: object) -> TypeGuard[float]:
    """A finite number of a size that both engines hold."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST  # type: ignore[operator] # mypy knows no `in`


def is_count(value: object) -> bool:
    """A whole number from 0 that every engine counts exactly."""
    return type(value) in (int, float) and 0 <= value <= MOST_COUNTED and value % 1 == 0  # type: ignore[operator]


def is_set(value: object) -> bool:
    return isinstance(value, (set, frozenset)) and all(isinstance(member, str) for member in value)


def is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(member, str) for member in value)


def is_maps(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, Mapping) for one in value) and is_json(value)


def is_json(value: object) -> bool:
    """Data that a row can keep: no bytes, no sets, no NaN."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            left += one
        elif not (one is None or isinstance(one, (str, bool)) or is_number(one)):
            return False
    return True


RIGHT: Final[Mapping[str, Callable[[object], bool]]] = {
    "S": lambda value: isinstance(value, str),
    "N": is_number,
    "BOOL": lambda value: isinstance(value, bool),
    "SS": is_set,
    "L": is_json,
    "M": lambda value: isinstance(value, Mapping) and is_json(value),
}
"""Whether a value has the type of an attribute."""


def mistyped(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these attributes that is there with a wrong type, or None."""
    return next((name for name in names if name in row and not RIGHT[ATTRIBUTES[name]](row[name])), None)


def as_map(value: object) -> Mapping[str, Any]:
    """A map of a row, or an empty one in the place of anything else."""
    return value if isinstance(value, Mapping) else {}


def as_number(value: object) -> float:
    """A number of a row, or 0 in the place of anything else."""
    return value if is_number(value) else 0.0


def _in_words(attribute: str, row: Mapping[str, Any]) -> str:
    if attribute not in row:
        return "missing"
    value = row[attribute]
    kind = _IN_WORDS.get(type(value), type(value).__name__)
    if attribute in _TEXTS or not isinstance(value, (str, int, float)):
        return kind
    text = f"{value!r:.{_SHOWN}}"
    return f"{text}…" if len(text) == _SHOWN else text
