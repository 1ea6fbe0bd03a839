"""The protocol of the WebSocket API: names, limits, texts in pieces. JSON in text frames, the same in both directions.

A client's message has an `action`, a server's message a `type`. Each side ignores what it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from thunderagent.model.errors import MessageTooLarge, ThunderAgentError

SUBPROTOCOL: Final = "thunderagent.v1"
"""Subprotocol that the server selects; a client without headers offers it beside its token."""
BEARER: Final = "bearer."
"""Begins the other subprotocol of such a client, which ends with its token."""

FRAME_BYTES: Final = 32_000
"""A longer text goes in chunks: a frame of Amazon's API Gateway may have 32 KiB."""
MESSAGE_BYTES: Final = 128 * 1024
"""A longer text is refused, in chunks too."""
STATE_BYTES: Final = 120 * 1024
"""Largest state as JSON text: a message must hold it with the other members."""
MOST_CHUNKS: Final = 64
"""Most chunks of one text."""
ID_LETTERS: Final = 128
"""Longest id of a message or a change."""
CHANGES_KEPT: Final = 50
"""Changes of a state that are recognised when they come again."""


_CHUNK_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Action(StrEnum):
    """Action of a client's message."""

    GET_STATE = "getState"
    SET_STATE = "setState"
    PING = "ping"
    CHUNK = "chunk"


class Kind(StrEnum):
    """Type of a server's message."""

    STATE = "state"
    SAVED = "saved"
    CONFLICT = "conflict"
    CHANGED = "changed"
    """Another connection of the user has made a change. It may be lost."""
    PONG = "pong"
    PUSH = "push"
    PROBE = "probe"
    """Says nothing: the server finds out whether the connection still lives."""
    ERROR = "error"
    CHUNK = "chunk"


class Problem(StrEnum):
    """Kind of an error. `unavailable` and `throttled` pass: try again after `retry_after_s`. The others do not."""

    UNKNOWN_ROUTE = "unknown_route"
    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"
    THROTTLED = "throttled"
    """The connection or its user sends too much: nothing was done, and the client must pause."""
    INTERNAL = "internal"


class ChunkRefused(ThunderAgentError):
    """The chunk does not fit the chunks before it."""


def encode(message: Mapping[str, Any]) -> str:
    """The text of a message."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False)


def size(text: str) -> int:
    """Bytes of a text on the wire; half a surrogate pair counts too."""
    return len(text.encode("utf-8", "surrogatepass"))


def check_size(text: str) -> None:
    """Raise `MessageTooLarge` for a text over `MESSAGE_BYTES`."""
    if (found := size(text)) > MESSAGE_BYTES:
        raise MessageTooLarge(
            f"the message has {found} bytes, at most {MESSAGE_BYTES} can be sent: store the data and send a reference"
        )


def frames(text: str, chunk_id: str, *, to_server: bool = False) -> list[str]:
    """The frames of a message: its text alone, or chunks whose joined `data` is the text.

    Args:
        text: one message as JSON.
        chunk_id: unique for the connection; `[A-Za-z0-9_-]`, up to 64 letters.
        to_server: the sender is a client.

    Raises:
        MessageTooLarge: the text is over `MESSAGE_BYTES`.
    """
    check_size(text)
    if size(text) <= FRAME_BYTES:
        return [text]
    word = "action" if to_server else "type"
    head = {word: str(Kind.CHUNK), "id": chunk_id, "index": MOST_CHUNKS, "of": MOST_CHUNKS, "data": ""}
    pieces = _pieces(text, FRAME_BYTES - size(encode(head)))
    return [encode({**head, "index": index, "of": len(pieces), "data": piece}) for index, piece in enumerate(pieces)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the text of a message."""

    id: str
    index: int
    of: int
    data: str


def read_chunk(message: Mapping[str, Any]) -> Chunk:
    """The chunk in a message; raises `ChunkRefused` if it is none."""
    chunk_id, index, of, data = (message.get(name) for name in ("id", "index", "of", "data"))
    if not isinstance(chunk_id, str) or not _CHUNK_ID.fullmatch(chunk_id):
        raise ChunkRefused("a chunk needs an id of up to 64 letters, digits, '_' or '-'")
    if not isinstance(data, str):
        raise ChunkRefused("a chunk needs a text as its data")
    if not (type(index) is int and type(of) is int and 0 <= index < of <= MOST_CHUNKS):
        raise ChunkRefused(f"a chunk needs an index from 0 to below its `of`, which is at most {MOST_CHUNKS}")
    return Chunk(chunk_id, index, of, data)


class Joiner:
    """Joins the chunks that a connection receives. One incomplete message over `most` drops the oldest."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._parts: dict[str, dict[int, Chunk]] = {}

    def add(self, chunk: Mapping[str, Any]) -> str | None:
        """The text of the message that this chunk completes, else None. A repeated chunk changes nothing.

        Raises:
            ChunkRefused: it is none, or does not fit the chunks before it; its message is dropped.
        """
        piece = read_chunk(chunk)
        known = self._parts.pop(piece.id, {})
        known.setdefault(piece.index, piece)
        if any(one.of != piece.of for one in known.values()) or known[piece.index] != piece:
            raise ChunkRefused(f"the chunks with the id {piece.id!r} contradict each other")
        if sum(size(one.data) for one in known.values()) > MESSAGE_BYTES:
            raise ChunkRefused(f"the chunks with the id {piece.id!r} have over {MESSAGE_BYTES} bytes")
        if len(known) < piece.of:
            self._parts[piece.id] = known
            while len(self._parts) > self._most:
                del self._parts[next(iter(self._parts))]
            return None
        return join(known[number].data for number in range(piece.of))

    def clear(self) -> None:
        """Forget incomplete messages when a new connection begins."""
        self._parts.clear()


def join(pieces: Iterable[str]) -> str:
    """The text of pieces in their order. Halves of a surrogate pair become one letter."""
    text = "".join(pieces)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


def merge_patch(state: Any, patch: Any) -> Any:
    """The state with a JSON merge patch (RFC 7396) applied; neither is changed.

    >>> merge_patch({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": 4}})
    {'b': {'c': 4, 'd': 3}}
    """
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(state) if isinstance(state, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def _pieces(text: str, room: int) -> list[str]:
    """The text in pieces that each take at most `room` bytes within a JSON text."""
    pieces, start = [], 0
    while start < len(text):
        length = min(room, len(text) - start)
        while (taken := size(json.dumps(text[start : start + length], ensure_ascii=False)) - 2) > room:
            length = max(1, min(length - 1, length * room // taken))
        pieces.append(text[start : start + length])
        start += length
    return pieces
