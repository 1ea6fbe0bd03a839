"""Messages in chunks. Each chunk may reach another process, so they gather in a row of the connection table.

The chunks of a message are members of one set: a repeated chunk is there once, and the write of the last one says so.
The taker of the message leaves an empty row for chunks that come late. Rows expire.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress

from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Row
from thunderagent.stores.engine import Applied, Engine
from thunderagent.websocket_api.protocol import MESSAGE_BYTES, Chunk, ChunkRefused, join, size
from thunderagent.websocket_api.records import (
    CHUNKS_S,
    MOST_OPEN,
    add_chunk,
    begin_chunks,
    chunks_id,
    chunks_row,
    end_chunks,
    holders_of,
    take_chunks,
)

_TRIES = 4
_DIGITS = 3
_HALVES = "!"
"""Marks a piece with half a surrogate pair, which no store can keep: it is escaped."""


class Chunks:
    """The incomplete messages of one region, in its table of connections."""

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self._engine = engine
        self._now = now

    def add(self, connection: str, chunk: Chunk) -> str | None:
        """The text of the message that this chunk completes, once; else None.

        Raises:
            ChunkRefused: it does not fit the chunks before it, or too many messages of the connection are incomplete.
            StoreError: the store did not answer.
        """
        row = self._put(connection, chunk)
        if row is None:
            return None
        pieces = [_read(member) for member in holders_of(row)]
        indexes = {index for index, _ in pieces}
        problem = None
        if len(pieces) > len(indexes):
            problem = f"the chunks with the id {chunk.id!r} contradict each other: send the message again"
        elif sum(size(data) for _, data in pieces) > MESSAGE_BYTES:
            problem = f"the chunks with the id {chunk.id!r} have over {MESSAGE_BYTES} bytes: no message may have more"
        elif len(indexes) < chunk.of:
            return None
        is_ours = self._take(connection, chunk)
        if problem is not None:
            raise ChunkRefused(problem)
        return join(data for _, data in sorted(pieces)) if is_ours else None

    def _put(self, connection: str, chunk: Chunk) -> Row | None:
        """Add a piece; the row with all pieces so far, None if the message was taken."""
        piece = _written(chunk)
        for _ in range(_TRIES):
            applied = self._apply(add_chunk(connection, chunk.id, piece, of=chunk.of))
            if applied.won and applied.row is not None:
                return applied.row
            if (row := applied.row) is not None:
                if "heldBy" in row:
                    return None
                if row.get("limitMax") != chunk.of or len(holders_of(row)) > chunk.of:
                    text = f"the chunks with the id {chunk.id!r} contradict each other: send the message again"
                    raise ChunkRefused(text)
                continue  # it has come just now
            self._begin(connection, chunk.id)
            [applied] = self._engine.put([chunks_row(connection, chunk.id, piece, of=chunk.of, now=self._now())])
            if _checked(applied).won and applied.row is not None:
                return applied.row
        raise ChunkRefused(f"the chunks with the id {chunk.id!r} come and go: send the message again")

    def _begin(self, connection: str, chunk_id: str) -> None:
        for _ in range(2):
            applied = self._apply(begin_chunks(connection, chunk_id))
            if applied.won or chunk_id in holders_of(applied.row):
                return
            if applied.row is None:
                raise ChunkRefused("the connection is not known any more: connect again")
            self._drop_stale(connection, holders_of(applied.row))
        raise ChunkRefused(
            f"{MOST_OPEN} messages of this connection wait for chunks; complete one, or wait {CHUNKS_S:g} s"
        )

    def _drop_stale(self, connection: str, chunk_ids: Iterable[str]) -> None:
        """Take messages out of the connection's list that were completed, or have expired."""
        ids = {chunks_id(connection, one): one for one in chunk_ids}
        rows, now = self._engine.get(list(ids)), self._now()
        for row_id, chunk_id in ids.items():
            row = rows.get(row_id)
            if row is None or "heldBy" in row or row.get("expireAt", 0) <= now:
                self._apply(end_chunks(connection, chunk_id))

    def _take(self, connection: str, chunk: Chunk) -> bool:
        taker = uuid.uuid4().hex
        applied = self._apply(take_chunks(connection, chunk.id, taker, of=chunk.of))
        with suppress(StoreError):  # `_drop_stale` does it later
            self._apply(end_chunks(connection, chunk.id))
        return applied.won or (applied.row or {}).get("heldBy") == taker

    def _apply(self, write: Write) -> Applied:
        return _checked(self._engine.apply([write])[0])


def _checked(applied: Applied) -> Applied:
    if applied.error is not None:
        raise applied.error
    return applied


def _written(chunk: Chunk) -> str:
    """A piece as a member of a set: its number, so that equal texts stay two members, and its text."""
    try:
        chunk.data.encode()
        mark, data = "", chunk.data
    except UnicodeEncodeError:
        mark, data = _HALVES, json.dumps(chunk.data)
    return f"{chunk.index:0{_DIGITS}}{mark}:{data}"


def _read(member: str) -> tuple[int, str]:
    head, _, data = member.partition(":")
    if head.endswith(_HALVES):
        data = json.loads(data)
    return int(head[:_DIGITS]), data
