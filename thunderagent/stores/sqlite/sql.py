"""Renders a `Write` to one SQL statement, and rows to and from the columns of the table `tasks`.

Each attribute of the table is a column of the same name; sets, lists and maps are JSON text. The statement depends
only on the shape of a write (which attributes, which conditions), so it is rendered once per shape and cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, Final

from thunderagent.model.conditions import (
    Above,
    Absent,
    Below,
    Condition,
    Counts,
    Either,
    Fewer,
    Is,
    Mistyped,
    OneOf,
    Present,
    Typed,
    Write,
)
from thunderagent.model.rows import ATTRIBUTES, MOST_COUNTED
from thunderagent.model.task import Row

COLUMNS: Final = tuple(ATTRIBUTES)
_SQL_TYPES: Final = {"S": "TEXT", "N": "NUMERIC", "BOOL": "INTEGER", "SS": "TEXT", "L": "TEXT", "M": "TEXT"}
_TYPES_OF: Final = {"S": "'text'", "N": "'integer', 'real'", "BOOL": "'integer'"}
_JSON: Final = frozenset(name for name, kind in ATTRIBUTES.items() if kind in ("SS", "L", "M"))
_LISTED: Final = ", ".join(f'"{name}"' for name in COLUMNS)

ADDED: Final[dict[int, tuple[str, ...]]] = {
    3: ("handoffOwner", "handoffUntil", "handoffState"),
    4: ("uniqueKey", "uniqueScope", "limitKey", "limitMax", "heldBy", "holders"),
    5: ("traceparent",),
    6: ("regionEpoch",),
}
"""Columns by the version of the schema that added them."""


def add_columns(version: int) -> tuple[str, ...]:
    return tuple(f'ALTER TABLE tasks ADD COLUMN "{name}" {_SQL_TYPES[ATTRIBUTES[name]]}' for name in ADDED[version])


_LATER: Final = {name: version for version, names in ADDED.items() for name in names}

CREATE: Final = (
    "CREATE TABLE tasks ("
    + ", ".join(
        f'"{name}" {_SQL_TYPES[kind]}' + (" PRIMARY KEY NOT NULL" if name == "taskId" else "")
        for name, kind in ATTRIBUTES.items()
        if name not in _LATER
    )
    + ") WITHOUT ROWID"
)
CREATE_INDEX: Final = (
    'CREATE INDEX "status-createdAt-index" ON tasks ("status", "createdAt", "taskId", "job", "kind") '
    'WHERE "status" IS NOT NULL'
)
SELECT: Final = f"SELECT {_LISTED} FROM tasks"  # noqa: S608 - columns are constants
SELECT_ONE: Final = f'{SELECT} WHERE "taskId" = ?'


DUE: Final = (
    'SELECT "taskId", "expireAt" FROM tasks WHERE "expireAt" < ? AND ("status" IS NOT ? OR "expireAt" < ?) '
    'ORDER BY "expireAt" LIMIT ?'
)
"""Overdue rows; those of agents only when they are so for longer."""
DELETE_DUE: Final = (
    f'DELETE FROM tasks WHERE "taskId" IN (SELECT "taskId" FROM ({DUE})) '  # noqa: S608
    'RETURNING "taskId", "job", "uniqueKey"'
)
COUNT_DUE: Final = f'SELECT COUNT(*), MIN("expireAt") FROM ({DUE})'  # noqa: S608


def encode(name: str, value: Any) -> Any:
    """A value of an attribute as its column keeps it."""
    if name in _JSON:
        if isinstance(value, (set, frozenset)):  # as SQLite itself writes them, with letters as they are
            return json.dumps(sorted(value), separators=(",", ":"), ensure_ascii=False)
        return json.dumps(value, separators=(",", ":"))
    return value


def decode(values: Sequence[Any]) -> Row:
    """The row in the columns; NULL is an absent attribute."""
    row = {name: value for name, value in zip(COLUMNS, values, strict=True) if value is not None}
    for name in _JSON.intersection(row):
        if isinstance(row[name], str):  # binary data may be JSON too, but no condition of a write takes it for that
            with suppress(ValueError, RecursionError):  # a row made by hand
                row[name] = json.loads(row[name])
        is_set = ATTRIBUTES[name] == "SS" and isinstance(row[name], list)
        if is_set and all(type(member) in (str, int) for member in row[name]):
            row[name] = frozenset(map(str, row[name]))
    if row.get("cancelRequested") in (0, 1):
        row["cancelRequested"] = bool(row["cancelRequested"])
    return row


@cache
def select(version: int) -> str:
    """The statement that reads rows of a file of this version; missing columns are NULL."""
    listed = ", ".join(f'"{name}"' if _LATER.get(name, 1) <= version else "NULL" for name in COLUMNS)
    return f"SELECT {listed} FROM tasks"  # noqa: S608 - columns are constants


@lru_cache(maxsize=512)
def insert_sql(names: tuple[str, ...]) -> str:
    """The statement that puts a row with these attributes unless its id is taken."""
    columns, marks = ", ".join(f'"{name}"' for name in names), ", ".join("?" * len(names))
    return f"INSERT OR IGNORE INTO tasks ({columns}) VALUES ({marks})"  # noqa: S608 - names are attributes


def insert(row: Row) -> tuple[str, list[Any]]:
    return insert_sql(tuple(row)), [encode(name, value) for name, value in row.items()]


def update(write: Write) -> tuple[str, list[Any]]:
    """Statement and parameters of a write; the statement returns the row that it left, or nothing."""
    parameters = [encode(name, value) if name in _JSON else value for name, value in write.set.items()]
    parameters.extend(write.increase.values())
    for name, members in write.insert.items():
        parameters.extend([encode(name, members)] if len(members) > 1 else [*members, *members])
    parameters.extend(write.discard.values())
    parameters.append(write.task_id)
    shape = (
        write.delete,
        tuple(write.set),
        tuple(write.increase),
        tuple(write.remove),
        tuple([(name, len(members) > 1) for name, members in write.insert.items()]),
        tuple(write.discard),
        tuple([_shape(condition, parameters) for condition in write.conditions]),
    )
    return _update_sql(shape), parameters


_Shape = tuple[Any, ...]

_INSERT_ONE: Final = (  # behind the others: to sort a large set takes eight times as long
    "CASE WHEN EXISTS (SELECT 1 FROM json_each(@) WHERE value = ?) "
    "THEN @ ELSE json_insert(COALESCE(@, '[]'), '$[#]', ?) END"
)
_INSERT_MANY: Final = (
    "(SELECT json_group_array(value) FROM (SELECT value FROM json_each(COALESCE(@, '[]')) "
    "UNION SELECT value FROM json_each(?)))"
)


@lru_cache(maxsize=512)
def _update_sql(shape: _Shape) -> str:
    delete, sets, increases, removes, inserts, discards, conditions = shape
    holds = "".join(f" AND {_condition_sql(condition)}" for condition in conditions)
    if delete:
        return f'DELETE FROM tasks WHERE "taskId" = ?{holds} RETURNING {_LISTED}'  # noqa: S608
    changes = [f'"{name}" = ?' for name in sets]
    changes += [f'"{name}" = COALESCE("{name}", 0) + ?' for name in increases]
    changes += [f'"{name}" = NULL' for name in removes]
    changes += [
        f'"{name}" = ' + (_INSERT_MANY if many else _INSERT_ONE).replace("@", f'"{name}"') for name, many in inserts
    ]
    changes += [
        f"""\"{name}" = NULLIF((SELECT json_group_array(value) FROM (
            SELECT value FROM json_each(COALESCE("{name}", '[]')) WHERE value <> ? ORDER BY 1)), '[]')"""  # noqa: S608
        for name in discards
    ]
    return f'UPDATE tasks SET {", ".join(changes)} WHERE "taskId" = ?{holds} RETURNING {_LISTED}'  # noqa: S608


def _shape(condition: Condition, values: list[Any]) -> _Shape:
    """The shape of a condition. Its values are appended to `values`, in the order of its marks."""
    if isinstance(condition, Is):
        values.append(encode(condition.name, condition.value))
    elif isinstance(condition, (Below, Above)):
        values.append(condition.value)
    elif isinstance(condition, Fewer):
        values.append(condition.number)
    elif isinstance(condition, OneOf):
        values.extend(condition.values)
        return (OneOf, condition.name, len(condition.values))
    elif isinstance(condition, Either):
        return (Either, *[_shape(one, values) for one in condition.conditions])
    return (type(condition), condition.name)


def _condition_sql(shape: _Shape) -> str:
    kind, *rest = shape
    if kind is Either:
        return "(" + " OR ".join(map(_condition_sql, rest)) + ")"
    render: Callable[[], str] = {
        Is: lambda: f"{_sorted(rest[0]) if ATTRIBUTES[rest[0]] == 'SS' else _quoted(rest[0])} = ?",
        Absent: lambda: f'"{rest[0]}" IS NULL',
        Present: lambda: f'"{rest[0]}" IS NOT NULL',
        Below: lambda: f'"{rest[0]}" < ?',  # any number is below any text, in the order of SQLite
        Above: lambda: f'("{rest[0]}" > ? AND {_typed(rest[0])})',
        Fewer: lambda: (
            f'("{rest[0]}" IS NULL OR CASE WHEN {_typed(rest[0])} THEN json_array_length("{rest[0]}") < ? END)'
        ),
        Counts: lambda: f'("{rest[0]}" IS NULL OR "{rest[0]}" BETWEEN 0 AND {MOST_COUNTED})',
        Typed: lambda: _typed(rest[0]),
        Mistyped: lambda: f'("{rest[0]}" IS NOT NULL AND NOT {_typed(rest[0])})',
        OneOf: lambda: f'"{rest[0]}" IN ({", ".join("?" * rest[1])})',
    }[kind]
    return render()


def _quoted(name: str) -> str:
    return f'"{name}"'


def _typed(name: str) -> str:
    """Whether a column has a value of the type of its attribute: true or false, never NULL."""
    column, kind = _quoted(name), ATTRIBUTES[name]
    if kind in ("SS", "L", "M"):
        is_json = f"typeof({column}) = 'text' AND json_valid({column})"
        is_right = f"json_type({column}) = '{'object' if kind == 'M' else 'array'}'"
        if kind == "SS":
            members = f"SELECT 1 FROM json_each({column}) WHERE type NOT IN ('text', 'integer')"  # noqa: S608
            is_right += f" AND NOT EXISTS ({members})"
        return f"(CASE WHEN {is_json} THEN {is_right} ELSE 0 END)"
    return f"(typeof({column}) IN ({_TYPES_OF[kind]}))"


def _sorted(name: str) -> str:
    """A set as `encode` writes it, whatever a person has written."""
    return (
        f"CASE WHEN {_typed(name)} THEN (SELECT json_group_array(member) FROM "  # noqa: S608
        f"(SELECT DISTINCT CAST(value AS TEXT) AS member FROM json_each({_quoted(name)}) ORDER BY 1)) END"
    )
