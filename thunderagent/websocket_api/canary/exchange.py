"""Requests and answers over one connection; an answer has the id of its request."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Final

from websockets.asyncio.client import ClientConnection

from thunderagent.model.errors import ThunderAgentError
from thunderagent.websocket_api.protocol import Action, ChunkRefused, Joiner, Kind, Problem, encode

MOST_OTHERS: Final = 100
"""Other messages that may come before an answer, such as pushes to the canary's user."""


_THROTTLED: Final = re.compile(r"limit ?exceeded|too many requests|throttl", re.IGNORECASE)


class Unexpected(ThunderAgentError):
    """The peer gave a wrong answer."""


class Throttled(ThunderAgentError):
    """The peer works, and takes no more for now."""


class Conversation:
    """Sends requests over an open connection, one at a time."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self._joiner = Joiner()

    async def ask(self, action: Action, *kinds: Kind, **members: Any) -> dict[str, Any]:
        """The answer to a request, of one of these kinds. Other messages are ignored.

        Raises:
            Throttled: the peer takes no more for now.
            Unexpected: the answer is an error or of another kind, or there were too many other messages.
        """
        number = f"canary-{next(self._ids)}"
        await self._connection.send(encode({"action": action, "id": number, **members}))
        for _ in range(MOST_OTHERS):
            answer = self._read(await self._connection.recv())
            if answer is None:
                continue
            if "type" not in answer and "connectionId" in answer:  # of API Gateway, which knows of no ids
                text = f"{answer.get('message')!s:.150}"
                raise (Throttled if _THROTTLED.search(text) else Unexpected)(f"API Gateway answers {text!r}")
            if answer.get("type") == Kind.ERROR and answer.get("id") in (number, None):
                if answer.get("error") == Problem.THROTTLED:
                    raise Throttled(f"the API answers {answer.get('message')!r:.150}")
                raise Unexpected(f"the answer is the error {answer.get('error')!r:.80}: {answer.get('message')!r:.150}")
            if answer.get("id") != number:
                continue
            if answer.get("type") not in kinds:
                raise Unexpected(f"the answer is of the type {answer.get('type')!r:.80}, not {' or '.join(kinds)}")
            return answer
        raise Unexpected(f"{MOST_OTHERS} messages came, and none is the answer")

    def _read(self, text: str | bytes) -> dict[str, Any] | None:
        """A message; None while its chunks are incomplete."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise Unexpected("what came is not JSON") from None
        if not isinstance(message, dict):
            raise Unexpected("what came is not a JSON object")
        if message.get("type") == Kind.CHUNK:
            try:
                whole = self._joiner.add(message)
            except ChunkRefused as error:
                raise Unexpected(f"{error}") from None
            return None if whole is None else self._read(whole)
        return message
