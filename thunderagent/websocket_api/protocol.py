"""The protocol of the WebSocket API: names, limits, texts in pieces. JSON in text frames, the same in both directions.

Client to server: `getState`, `setState`, `ping`, `chunk`, told apart by `action`. Server to client: `state`, `saved`,
`conflict`, `changed`, `pong`, `push`, `probe`, `error`, `chunk`, told apart by `type`. What a side does not know it
leaves alone.
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
"""What a client offers that cannot set headers, beside its token, and what the server selects."""
BEARER: Final = "bearer."
"""What stands before the token in the other subprotocol that such a client offers."""

FRAME_BYTES: Final = 32_000
"""A longer text goes in chunks; a frame of Amazon's API Gateway may have 32 KiB."""
MESSAGE_BYTES: Final = 128 * 1024
"""A longer text is refused: more is no message of API Gateway, in however many pieces."""
STATE_BYTES: Final = 120 * 1024
"""A state, as JSON text; a message must hold it with what stands around it."""
MOST_CHUNKS: Final = 64
"""Pieces of one text."""
ID_LETTERS: Final = 128
"""Longest id of a message or a change."""
CHANGES_KEPT: Final = 50
"""Changes of a state that are recognised when they come once more."""


_CHUNK_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Action(StrEnum):
    """What a client asks for."""

    GET_STATE = "getState"
    SET_STATE = "setState"
    PING = "ping"
    CHUNK = "chunk"


class Kind(StrEnum):
    """What the server says."""

    STATE = "state"
    SAVED = "saved"
    CONFLICT = "conflict"
    CHANGED = "changed"
    """Another connection of the user has made a change. It is not sure to come."""
    PONG = "pong"
    PUSH = "push"
    PROBE = "probe"
    """Tells nothing: the server only finds out whether the connection is still there."""
    ERROR = "error"
    CHUNK = "chunk"


class Problem(StrEnum):
    """What an error is about. `unavailable` and `throttled` pass: try again after `retry_after_s`. Others do not."""

    UNKNOWN_ROUTE = "unknown_route"
    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"
    THROTTLED = "throttled"
    """The connection or its user sends too much: nothing was done, and nothing is to be sent for so long."""
    INTERNAL = "internal"


class ChunkRefused(ThunderAgentError):
    """The piece of a message does not fit to those before it."""


def encode(message: Mapping[str, Any]) -> str:
    """A message as the text that is sent."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False)


def size(text: str) -> int:
    """Bytes of a text on the wire; half a surrogate pair counts as it is written out."""
    return len(text.encode("utf-8", "surrogatepass"))


def check_size(text: str) -> None:
    """Refuse a text that no message may have.

    Raises:
        MessageTooLarge: with the size, and what to do.
    """
    if (found := size(text)) > MESSAGE_BYTES:
        raise MessageTooLarge(
            f"the message has {found} bytes, at most {MESSAGE_BYTES} can be sent: store the data and send a reference"
        )


def frames(text: str, chunk_id: str, *, to_server: bool = False) -> list[str]:
    """The text of a message as the texts of its frames: itself, or chunks that give it when their `data` is joined.

    Args:
        text: of one message, JSON.
        chunk_id: tells these chunks from those of another message of the connection; `[A-Za-z0-9_-]`, up to 64 letters.
        to_server: as a client sends them.

    Raises:
        MessageTooLarge: it is over what can be sent at all.
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
    """The chunk in a message.

    Raises:
        ChunkRefused: it is none; says what is wrong.
    """
    chunk_id, index, of, data = (message.get(name) for name in ("id", "index", "of", "data"))
    if not isinstance(chunk_id, str) or not _CHUNK_ID.fullmatch(chunk_id):
        raise ChunkRefused("a chunk needs an id of up to 64 letters, digits, '_' or '-'")
    if not isinstance(data, str):
        raise ChunkRefused("a chunk needs a text as its data")
    if not (type(index) is int and type(of) is int and 0 <= index < of <= MOST_CHUNKS):
        raise ChunkRefused(f"a chunk needs an index from 0 to below its `of`, which is at most {MOST_CHUNKS}")
    return Chunk(chunk_id, index, of, data)


class Joiner:
    """Puts chunks together again, those of several messages side by side. For the receiving end of a connection.

    Args:
        most: messages that may be incomplete at once; with one more the oldest is forgotten.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._parts: dict[str, dict[int, Chunk]] = {}

    def add(self, chunk: Mapping[str, Any]) -> str | None:
        """The text of the message that this chunk completes, else None. A chunk that comes twice changes nothing.

        Raises:
            ChunkRefused: it is none, or does not fit to those before it; its message is forgotten.
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
        """Forget what is incomplete, as a new connection begins."""
        self._parts.clear()


def join(pieces: Iterable[str]) -> str:
    """The text of pieces in their order; a letter that was cut in two is whole again."""
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
    """The text cut so that each piece takes at most so many bytes within a JSON text."""
    pieces, start = [], 0
    while start < len(text):
        length = min(room, len(text) - start)
        while (taken := size(json.dumps(text[start : start + length], ensure_ascii=False)) - 2) > room:
            length = max(1, min(length - 1, length * room // taken))
        pieces.append(text[start : start + length])
        start += length
    return pieces
