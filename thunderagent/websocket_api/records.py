"""The rows of the WebSocket API and every conditional write of them: states of users, connections, chunks.

Their tables have the key of the task table, so every engine serves them. The table of states is replicated to the other
region. Each region has its own table of connections and chunks, whose rows have `expireAt`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.model.conditions import Above, Absent, Below, Condition, Either, Fewer, Is, Mistyped, Present, Write
from thunderagent.model.rows import as_map, is_number
from thunderagent.model.task import Row, timestamp

MOST_CONNECTIONS: Final = 50
"""Most connections of one user at once."""
MOST_OPEN: Final = 4
"""Most incomplete messages of one connection."""
CONNECTION_S: Final = 2 * 3600.0 + 600.0
"""Life of a connection's row: API Gateway ends a connection after two hours, and may not say so."""
CHUNKS_S: Final = 60.0
"""How long chunks wait for the rest of their message."""


# States. `fence` is the version, `info` has the last changes with the versions that they made.


def state_id(user: str) -> str:
    return f"user:{user}"


def state_row(user: str, text: str, *, changes: Mapping[str, int], region: str, now: float) -> Row:
    """The first version of a state."""
    return {
        "taskId": state_id(user),
        "payload": text,
        "fence": 1,
        "info": {"changes": dict(changes)},
        "lastAgent": region,
        "updatedAt": timestamp(now),
    }


def save_state(seen: Row, text: str, *, changes: Mapping[str, int], region: str, now: float) -> Write:
    """The next version of a state, upon the row that was seen."""
    # Another region may have replaced it by a row of the same version: so the writer and the time must hold too.
    still: list[Condition] = [Is("fence", seen["fence"])]
    still += [Is(name, seen[name]) if name in seen else Absent(name) for name in ("lastAgent", "updatedAt")]
    return Write(
        verb="save state",
        task_id=seen["taskId"],
        set={
            "payload": text,
            "info": {"changes": dict(changes)},
            "lastAgent": region,
            "updatedAt": timestamp(now),
        },
        increase={"fence": 1},
        require=still,
    )


# Connections. Each has a row, `heldBy` its user; the row of a user has the set of them, `holders`. Both rows have
# buckets of tokens: `lockTime` for messages, and that of the user `handoffUntil` for connects.


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket, kept as one number: the time, in milliseconds, at which it is full again (GCRA)."""

    name: str
    """The attribute."""
    rate: float
    """Tokens a second."""
    burst: float
    """Tokens of a full bucket."""

    def wait_s(self, row: Mapping[str, Any], number: float, now: float) -> float:
        """Seconds until so many tokens are there."""
        full_at = self._full_at(row, now)
        return max(0.0, (full_at + self._ms(number) - self._ms(self.burst)) / 1000 - now)

    def is_full(self, row: Mapping[str, Any], now: float) -> bool:
        return self._full_at(row, now) <= _ms(now)

    def take(self, number: float, *, now: float, was_full: bool, into_debt: bool = False) -> dict[str, Any]:
        """The parts of a write that takes tokens.

        Args:
            number: of tokens.
            now: epoch seconds.
            was_full: how the bucket was seen. The write is refused if that is wrong, or tokens are missing.
            into_debt: one token is enough.
        """
        at, cost = _ms(now), self._ms(number)
        if was_full:
            wrong = Above(self.name, self._latest(now)), Mistyped(self.name)  # by a clock that is ahead, or by hand
            free = (Absent(self.name), Below(self.name, at + 1), *wrong)
            return {"set": {self.name: at + cost}, "require": (Either(free),)}
        room = self._ms(self.burst) - (0 if into_debt else cost)
        return {"increase": {self.name: cost}, "require": (Above(self.name, at), Below(self.name, at + room + 1))}

    def _full_at(self, row: Mapping[str, Any], now: float) -> float:
        found = row.get(self.name)
        return found if is_number(found) and found <= self._latest(now) else 0

    def _latest(self, now: float) -> int:
        return _ms(now) + 2 * self._ms(self.burst) + _CLOCKS_MS

    def _ms(self, number: float) -> int:
        return round(1000 * number / self.rate)


_CLOCKS_MS: Final = 60_000


def spend(row_id: str, bucket: Bucket, number: float, *, now: float, was_full: bool, into_debt: bool = False) -> Write:
    """Take tokens out of a bucket. A repeated write takes them again, which costs their owner a moment."""
    taken = bucket.take(number, now=now, was_full=was_full, into_debt=into_debt)
    return Write(verb="spend", task_id=row_id, **taken | {"require": (Present("taskId"), *taken["require"])})


def connection_id_of(connection: str) -> str:
    return f"connection:{connection}"


def connections_id(user: str) -> str:
    return f"connections:{user}"


def connection_row(connection: str, user: str, *, now: float) -> Row:
    """The row of a new connection."""
    return {
        "taskId": connection_id_of(connection),
        "heldBy": user,
        "updatedAt": timestamp(now),
        "expireAt": _over(now, CONNECTION_S),
    }


def connections_row(user: str, connections: Iterable[str], connects: Bucket, *, now: float) -> Row:
    """The first list of a user's connections."""
    return {
        "taskId": connections_id(user),
        "holders": frozenset(connections),
        "updatedAt": timestamp(now),
        "expireAt": _over(now, CONNECTION_S),
        **connects.take(1, now=now, was_full=True)["set"],
    }


def add_connection(user: str, connection: str, connects: Bucket, *, now: float, was_full: bool) -> Write:
    """List a connection; refused for a user with `MOST_CONNECTIONS`, or one that connects too often."""
    taken = connects.take(1, now=now, was_full=was_full)
    return Write(
        verb="add connection",
        task_id=connections_id(user),
        set={"updatedAt": timestamp(now), "expireAt": _over(now, CONNECTION_S), **taken.get("set", {})},
        increase=taken.get("increase", {}),
        insert={"holders": frozenset({connection})},
        require=(Present("taskId"), Fewer("holders", MOST_CONNECTIONS), *taken["require"]),
    )


def replace_connections(
    user: str, seen: frozenset[str], then: frozenset[str], connects: Bucket, *, now: float, was_full: bool
) -> Write:
    """Replace the list that was seen by the connections that live."""
    taken = connects.take(1, now=now, was_full=was_full)
    kept = {"holders": then} if then else {}
    return Write(
        verb="replace connections",
        task_id=connections_id(user),
        set={"updatedAt": timestamp(now), "expireAt": _over(now, CONNECTION_S), **kept, **taken.get("set", {})},
        increase=taken.get("increase", {}),
        remove=() if then else ("holders",),
        require=(Is("holders", seen), *taken["require"]),
    )


def remove_connection(user: str, connection: str) -> Write:
    """Take a connection out of the list. A repeated write changes nothing."""
    return Write(
        verb="remove connection",
        task_id=connections_id(user),
        discard={"holders": connection},
        require=(Present("taskId"),),
    )


def forget_connection(connection: str, user: str) -> Write:
    """Delete the row of a connection that has ended."""
    return Write(
        verb="forget connection",
        task_id=connection_id_of(connection),
        delete=True,
        require=(Is("heldBy", user),),
    )


# Chunks. An incomplete message has a row with its pieces, `holders`; its connection lists such messages.


def chunks_id(connection: str, chunk_id: str) -> str:
    """Id of the row of an incomplete message."""
    return f"chunks:{connection}:{chunk_id}"


def chunks_row(connection: str, chunk_id: str, piece: str, *, of: int, now: float) -> Row:
    """The row of a message after its first chunk."""
    return {
        "taskId": chunks_id(connection, chunk_id),
        "holders": frozenset((piece,)),
        "limitMax": of,
        "updatedAt": timestamp(now),
        "expireAt": _over(now, CHUNKS_S),
    }


def add_chunk(connection: str, chunk_id: str, piece: str, *, of: int) -> Write:
    """Add a piece; a repeated write changes nothing. Refused when the message was taken."""
    return Write(
        verb="add chunk",
        task_id=chunks_id(connection, chunk_id),
        insert={"holders": frozenset({piece})},
        require=(Is("limitMax", of), Absent("heldBy"), Fewer("holders", of + 1)),
    )


def take_chunks(connection: str, chunk_id: str, taker: str, *, of: int) -> Write:
    """Take a complete message: one of several takers handles it.

    The empty row stays. It shows that a late piece was delivered twice, and after a lost reply who the taker was.
    """
    return Write(
        verb="take chunks",
        task_id=chunks_id(connection, chunk_id),
        set={"heldBy": taker},
        remove=("holders",),
        require=(Is("limitMax", of), Absent("heldBy")),
    )


def begin_chunks(connection: str, chunk_id: str) -> Write:
    """List an incomplete message of a connection; refused when it has `MOST_OPEN`."""
    return Write(
        verb="begin chunks",
        task_id=connection_id_of(connection),
        insert={"holders": frozenset({chunk_id})},
        require=(Present("taskId"), Fewer("holders", MOST_OPEN)),
    )


def end_chunks(connection: str, chunk_id: str) -> Write:
    """Take a message out of that list."""
    return Write(
        verb="end chunks",
        task_id=connection_id_of(connection),
        discard={"holders": chunk_id},
        require=(Present("taskId"),),
    )


def changes_of(row: Mapping[str, Any] | None) -> dict[str, int]:
    """The last changes of a state with their versions. A row made by hand may have anything there."""
    changes = as_map(as_map((row or {}).get("info")).get("changes"))
    return {str(name): int(made) for name, made in changes.items() if is_number(made)}


def holders_of(row: Mapping[str, Any] | None) -> frozenset[str]:
    holders = (row or {}).get("holders")
    return frozenset(map(str, holders)) if isinstance(holders, (set, frozenset)) else frozenset()


def _over(now: float, seconds: float) -> int:
    return int(now + seconds)


def _ms(now: float) -> int:
    return int(now * 1000)
