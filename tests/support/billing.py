"""What DynamoDB bills for a write, by the rules that AWS documents, from the row before and after it.

No local engine can be asked: ministack reports one unit for the table and one for each index whatever a write does,
moto half a unit, dynalite no index. The rules (developer guide: "DynamoDB item sizes and formats", and "Write capacity
units" of global secondary indexes): the larger of the row before and after, in whole kilobytes; in the index nothing
when no projected attribute changed, one entry when the key stayed, and two entries, out and in, when it changed.
"""

from __future__ import annotations

from math import ceil
from typing import Any

KEY = ("taskId", "status", "createdAt")
PROJECTED = (*KEY, "job", "kind")

Item = dict[str, Any]


def write_units(before: Item | None, after: Item) -> tuple[int, int]:
    """Units in all, and the part of them that the index takes."""
    index = _index_units(before, after)
    return max(_units(before), _units(after)) + index, index


def _index_units(before: Item | None, after: Item) -> int:
    old, new = _entry(before), _entry(after)
    if old == new:
        return 0
    if old and new and all(old[name] == new[name] for name in KEY):
        return max(_units(old), _units(new))
    return _units(old) + _units(new)


def _entry(item: Item | None) -> Item | None:
    if item is None or any(name not in item for name in KEY):
        return None
    return {name: item[name] for name in PROJECTED if name in item}


def _units(item: Item | None) -> int:
    return ceil(size(item) / 1024) if item else 0


def size(item: Item) -> int:
    """Bytes of an item: the names and the values of its attributes."""
    return sum(len(name.encode()) + _size(value) for name, value in item.items())


def _size(value: dict[str, Any]) -> int:
    [(kind, content)] = value.items()
    match kind:
        case "S":
            return len(content.encode())
        case "N":
            return ceil(len(content.strip("-").replace(".", "").strip("0")) / 2) + 1
        case "SS":
            return sum(len(member.encode()) for member in content)
        case "L":
            return 3 + sum(1 + _size(member) for member in content)
        case "M":
            return 3 + sum(1 + len(name.encode()) + _size(member) for name, member in content.items())
        case _:
            return 1
