"""Renders writes and queries to arguments of DynamoDB requests, and rows to and from attribute values.

Pure: no request is made here and boto3 is not imported. Names are always aliased (`status` is reserved) and values are
numbered as they appear. The types come from `ATTRIBUTES`; JSON values within lists and maps carry their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
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
from thunderagent.model.task import Candidate, Row
from thunderagent.stores.engine import PAYLOAD_MARK

INDEX: Final = "status-createdAt-index"
PROJECTED: Final = ("job", "kind")
"""What the index has beside its keys. Never an attribute that heartbeats change: each beat would be billed twice."""

Arguments = dict[str, Any]
AttributeValue = dict[str, Any]

_EXACT_INTEGERS: Final = 2.0**53


def encode(name: str, value: Any) -> AttributeValue:
    """A value of an attribute of the table. None becomes NULL, which equals nothing, as in SQL."""
    if value is None:
        return {"NULL": True}
    match ATTRIBUTES[name]:
        case "S":
            return {"S": value}
        case "N":
            return {"N": number(value)}
        case "BOOL":
            return {"BOOL": bool(value)}
        case "SS":
            return {"SS": sorted(value)}
        case _:
            return encode_json(value)


def number(value: float | Decimal) -> str:
    """The shortest text that reads back as the same number."""
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < _EXACT_INTEGERS
        return str(int(value)) if whole else repr(value)
    return str(value)


def encode_json(value: Any) -> AttributeValue:
    """A JSON value within a list or a map.

    Raises:
        TypeError: the value is not JSON.
    """
    if value is None:
        return {"NULL": True}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, str):
        return {"S": value}
    if isinstance(value, (int, float, Decimal)):
        return {"N": number(value)}
    if isinstance(value, Mapping):
        return {"M": {str(key): encode_json(member) for key, member in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"L": [encode_json(member) for member in value]}
    raise TypeError(f"a {type(value).__name__} is not JSON: {value!r:.100}")


def decode(value: AttributeValue) -> Any:
    """An attribute value as Python data: whole numbers as int, others as float, sets as frozenset."""
    [(kind, content)] = value.items()
    match kind:
        case "N":
            return _read_number(content)
        case "SS" | "BS":
            return frozenset(content)
        case "NS":
            return frozenset(map(_read_number, content))
        case "L":
            return [decode(member) for member in content]
        case "M":
            return {key: decode(member) for key, member in content.items()}
        case "NULL":
            return None
        case _:
            return content


def _read_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        exact = Decimal(text)  # such as 1.0 or 1E+2, from an engine that does not normalise
        return int(exact) if exact == exact.to_integral_value() else float(text)


def encode_row(row: Row) -> dict[str, AttributeValue]:
    """A row as an item; absent and None are the same."""
    return {name: encode(name, value) for name, value in row.items() if value is not None}


def decode_row(item: Mapping[str, AttributeValue]) -> Row:
    """The row of an item. Attributes of a newer version are left out."""
    return {name: decode(value) for name, value in item.items() if name in ATTRIBUTES}


def decode_candidate(item: Mapping[str, AttributeValue]) -> Candidate:
    row = decode_row(item)
    return Candidate.of(row["taskId"], row["status"], row["createdAt"], row.get("job"), row.get("kind"))


def key(task_id: str) -> dict[str, AttributeValue]:
    return {"taskId": {"S": task_id}}


class _Names:
    def __init__(self) -> None:
        self._aliases: dict[str, str] = {}
        self._values: dict[str, AttributeValue] = {}

    def name(self, name: str) -> str:
        alias = f"#{name}"
        self._aliases[alias] = name
        return alias

    def value(self, name: str, value: Any) -> str:
        mark = f":v{len(self._values)}"
        self._values[mark] = encode(name, value)
        return mark

    def condition(self, condition: Condition) -> str:
        match condition:
            case Is(name, value):
                return f"{self.name(name)} = {self.value(name, value)}"
            case Below(name, value):
                return f"{self.name(name)} < {self.value(name, value)}"
            case Above(name, value):
                return f"{self.name(name)} > {self.value(name, value)}"
            case Fewer(name, fewer):
                alias, is_set = self.name(name), self.typed(name)
                size = f"size({alias}) < {self.value('limitMax', fewer)}"
                return f"(attribute_not_exists({alias}) OR ({is_set} AND {size}))"
            case Counts(name):
                alias = self.name(name)
                bounds = f"{self.value(name, 0)} AND {self.value(name, MOST_COUNTED)}"
                return f"(attribute_not_exists({alias}) OR {alias} BETWEEN {bounds})"
            case Typed(name):
                return self.typed(name)
            case Mistyped(name):
                return f"(attribute_exists({self.name(name)}) AND NOT {self.typed(name)})"
            case Absent(name):
                return f"attribute_not_exists({self.name(name)})"
            case Present(name):
                return f"attribute_exists({self.name(name)})"
            case OneOf(name, values):
                marks = ", ".join([self.value(name, value) for value in values])
                return f"{self.name(name)} IN ({marks})"
            case Either(conditions):
                return "(" + " OR ".join(map(self.condition, conditions)) + ")"

    def typed(self, name: str) -> str:
        return f"attribute_type({self.name(name)}, {self.value('status', ATTRIBUTES[name])})"

    def arguments(self) -> Arguments:
        arguments: Arguments = {"ExpressionAttributeNames": self._aliases}
        if self._values:  # DynamoDB refuses an empty map
            arguments["ExpressionAttributeValues"] = self._values
        return arguments


def update(table: str, write: Write) -> Arguments:
    """UpdateItem of a write; answers with the row it left, or with the row that refused it."""
    names = _Names()
    sets = [f"{names.name(name)} = {names.value(name, value)}" for name, value in write.set.items()]
    adds = [f"{names.name(name)} {names.value(name, value)}" for name, value in write.increase.items()]
    adds += [f"{names.name(name)} {names.value(name, members)}" for name, members in write.insert.items()]
    removes = [names.name(name) for name in write.remove]
    deletes = [f"{names.name(name)} {names.value(name, {member})}" for name, member in write.discard.items()]
    clauses = (("SET", sets), ("ADD", adds), ("REMOVE", removes), ("DELETE", deletes))
    return {
        "TableName": table,
        "Key": key(write.task_id),
        "UpdateExpression": " ".join(f"{word} {', '.join(parts)}" for word, parts in clauses if parts),
        "ConditionExpression": " AND ".join(map(names.condition, write.conditions)),
        "ReturnValues": "ALL_NEW",
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        **names.arguments(),
    }


def remove(table: str, write: Write) -> Arguments:
    """DeleteItem of a write; answers with the deleted row, or with the row that refused it."""
    names = _Names()
    return {
        "TableName": table,
        "Key": key(write.task_id),
        "ConditionExpression": " AND ".join(map(names.condition, write.conditions)),
        "ReturnValues": "ALL_OLD",
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        **names.arguments(),
    }


def put(table: str, row: Row) -> Arguments:
    """PutItem of a row whose id must not be taken; a refusal answers with the row that has it."""
    names = _Names()
    return {
        "TableName": table,
        "Item": encode_row(row),
        "ConditionExpression": names.condition(Absent("taskId")),
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        **names.arguments(),
    }


def insert(table: str, row: Row) -> Arguments:
    """PartiQL INSERT of a row whose id must not be taken, as a member of BatchExecuteStatement."""
    item = encode_row(row)
    marks = ", ".join(f"'{name}': ?" for name in item)
    return {"Statement": f'INSERT INTO "{table}" VALUE {{{marks}}}', "Parameters": list(item.values())}


def put_text(table: str, text_key: str, text: str, *, expire_at: float, now: float) -> Arguments:
    """PutItem of a text that is too large for the row of its task. A payload that lives as long already refuses it."""
    row = {"taskId": text_key, "payload": text, "expireAt": int(expire_at), "updatedAt": now}
    arguments: Arguments = {"TableName": table, "Item": encode_row(row)}
    if PAYLOAD_MARK not in text_key:
        return arguments
    names = _Names()  # the key has the digest of the text: what is there is the same
    condition = names.condition(Either((Absent("expireAt"), Below("expireAt", int(expire_at)))))
    return {**arguments, "ConditionExpression": condition, **names.arguments()}


def touch_text(table: str, text_key: str, text: str, *, expire_at: float, now: float) -> Arguments:
    """UpdateItem that writes a payload without ending it earlier; without a condition, as the same text is there."""
    names = _Names()
    expiry = names.name("expireAt")
    sets = [
        f"{names.name(name)} = {names.value(name, value)}" for name, value in (("payload", text), ("updatedAt", now))
    ]
    sets.append(f"{expiry} = if_not_exists({expiry}, {names.value('expireAt', int(expire_at))})")
    return {
        "TableName": table,
        "Key": key(text_key),
        "UpdateExpression": f"SET {', '.join(sets)}",
        **names.arguments(),
    }


def delete_payload(table: str, text_key: str, *, before: float) -> Arguments:
    """DeleteItem of a payload that was not written since `before`; releases that wrote no time are older."""
    names = _Names()
    condition = names.condition(Either((Absent("updatedAt"), Below("updatedAt", before))))
    return {"TableName": table, "Key": key(text_key), "ConditionExpression": condition, **names.arguments()}


def shorten_payload(table: str, text_key: str, *, until: float, most: float) -> Arguments:
    """UpdateItem that ends a payload at `until`; refused where it ends before that, or after `most`."""
    names = _Names()
    later, earlier = names.condition(Above("expireAt", int(until))), names.condition(Below("expireAt", int(most) + 1))
    return {
        "TableName": table,
        "Key": key(text_key),
        "UpdateExpression": f"SET {names.name('expireAt')} = {names.value('expireAt', int(until))}",
        "ConditionExpression": f"{later} AND {earlier}",
        **names.arguments(),
    }


def delete(table: str, row: Row) -> Arguments:
    """DeleteItem of a row that still has the status and the fence given; answers with the deleted row."""
    names = _Names()
    still = (Is("status", row["status"]), Is("fence", row["fence"]))
    return {
        "TableName": table,
        "Key": key(row["taskId"]),
        "ConditionExpression": " AND ".join(map(names.condition, still)),
        "ReturnValues": "ALL_OLD",
        **names.arguments(),
    }


def query(
    table: str,
    status_value: str,
    *,
    until: float | None = None,
    limit: int | None = None,
    after: Any = None,
    newest_first: bool = False,
) -> Arguments:
    """Query of the index for one status value in the order of `createdAt`. A filter would hide ready tasks."""
    names = _Names()
    condition = names.condition(Is("status", status_value))
    if until is not None:
        condition += f" AND {names.name('createdAt')} <= {names.value('createdAt', until)}"
    arguments: Arguments = {
        "TableName": table,
        "IndexName": INDEX,
        "KeyConditionExpression": condition,
        "ScanIndexForward": not newest_first,
        **names.arguments(),
    }
    if limit is not None:
        arguments["Limit"] = limit
    if after is not None:
        arguments["ExclusiveStartKey"] = after
    return arguments


def count(
    table: str, status_value: str, *, until: float | None = None, limit: int | None = None, after: Any = None
) -> Arguments:
    """Query that counts one page of the index, at most `limit` entries."""
    return {**query(table, status_value, until=until, limit=limit, after=after), "Select": "COUNT"}


def add_lanes(table: str, row_id: str, suffixes: list[str]) -> Arguments:
    """UpdateItem that puts suffixes of lanes into the registry row, refused when all are there already.

    No other update may create its row: the first task of the first lane does.
    """
    names = _Names()
    registry = names.name("dependents")
    addition = names.value("dependents", suffixes)
    known = " AND ".join(f"contains({registry}, {names.value('taskId', suffix)})" for suffix in suffixes)
    can_grow = names.condition(Either((Absent("dependents"), Typed("dependents"))))
    return {
        "TableName": table,
        "Key": key(row_id),
        "UpdateExpression": f"ADD {registry} {addition}",
        "ConditionExpression": f"{can_grow} AND NOT ({known})",
        **names.arguments(),
    }
