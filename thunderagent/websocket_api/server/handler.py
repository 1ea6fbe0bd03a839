"""The handler of all routes of the WebSocket API: `$connect`, `$disconnect`, and every message.

Every message is answered, and only a flood of messages closes a connection. The function returns a reply of one frame
and pushes a longer one in chunks. State belongs to the user that the authorizer found, not to the connection. A change
is notified to the user's other connections before its reply goes: a function that has returned does nothing more.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from thunderagent.model import edge_events, events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import PushFailed, StoreError, ThunderAgentError
from thunderagent.stores.engine import Engine
from thunderagent.websocket_api.protocol import (
    FRAME_BYTES,
    STATE_BYTES,
    SUBPROTOCOL,
    Action,
    ChunkRefused,
    Problem,
    encode,
    frames,
    read_chunk,
    size,
)
from thunderagent.websocket_api.push import Broadcast
from thunderagent.websocket_api.records import MOST_CONNECTIONS
from thunderagent.websocket_api.server import answers, requests
from thunderagent.websocket_api.server.answers import MessageId, Refusal, Reply
from thunderagent.websocket_api.server.authorizer import offered_protocols, user_of
from thunderagent.websocket_api.server.chunks import Chunks
from thunderagent.websocket_api.server.connections import Connections
from thunderagent.websocket_api.server.state import Conflict, Saved, States
from thunderagent.websocket_api.server.throttle import Rates, Throttle, Throttled

Post = Callable[[str, str], bool]
"""Sends a text to a connection by its id. False: it is gone."""

PROTOCOL_HEADER: Final = "Sec-WebSocket-Protocol"
NOTIFY_S: Final = 2.0
"""Longest time that the reply to a change waits for its notices."""


class WebSocketApi:
    """Handles the events that API Gateway hands to Lambda.

    Args:
        states: the table of states.
        connections: the table of connections of this region.
        region: its name in replies, and the writer of states.
        post: sends replies of several frames, and probes.
        end: closes a connection. False: it was gone.
        now: epoch seconds; None: those of the table of states.
        bus: gets refusals and failures.
        rates: what a user may do at most.
    """

    def __init__(
        self,
        states: Engine,
        connections: Engine,
        *,
        region: str,
        post: Post,
        end: Callable[[str], bool],
        now: Callable[[], float] | None = None,
        bus: EventBus | None = None,
        rates: Rates = Rates(),  # noqa: B008 - frozen
    ) -> None:
        self.bus = bus or EventBus()
        self.region = region
        self._post = post
        self._end = end
        now = now or states.clock.now
        self._states = States(states, region, now)
        self._connections = Connections(connections, now, post, rate=rates.connect_rate)
        self._throttle = Throttle(connections, now, rate=rates.user_rate, burst=rates.user_burst)
        self._chunks = Chunks(connections, now)
        self._others = Broadcast(post, timeout_s=NOTIFY_S)
        self._listed = connections

    def close(self) -> None:
        """End the threads that notify."""
        self._others.close()

    def handle(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to any event, in the form of API Gateway."""
        about = event.get("requestContext") or {}
        connection, user = str(about.get("connectionId", "")), user_of(event)
        match about.get("eventType"):
            case "CONNECT":
                return self._connect(event, connection, user)
            case "DISCONNECT":
                return self._disconnect(connection, user)
            case _:
                return self._message(event, connection, user)

    # Connections

    def _connect(self, event: Mapping[str, Any], connection: str, user: str | None) -> dict[str, Any]:
        if user is None:
            return self._refused(connection, 401, "the event names no user: give $connect the authorizer")
        try:
            if not self._connections.open(connection, user):
                reason = f"the user {user!r} has {MOST_CONNECTIONS} connections, which is all that one may have"
                return self._refused(connection, 429, reason)
        except Throttled as error:
            reason = f"the user {user!r} connects too often; let {error.wait_s:.1f} s pass"
            return self._refused(connection, 429, reason)
        except StoreError as error:
            self._store_failed("$connect", error)
            return self._refused(connection, 503, f"the table of connections does not answer: {error}")
        self.bus.emit(edge_events.ConnectionOpened(connection=connection, user=user))
        is_offered = SUBPROTOCOL in offered_protocols(event)
        return answers.http(200, headers={PROTOCOL_HEADER: SUBPROTOCOL} if is_offered else None)

    def _refused(self, connection: str, status: int, reason: str) -> dict[str, Any]:
        self.bus.emit(edge_events.ConnectionRefused(connection=connection, status=status, reason=reason))
        return answers.http(status)

    def _disconnect(self, connection: str, user: str | None) -> dict[str, Any]:
        if user is not None:
            try:
                self._connections.close(connection, user)
            except StoreError as error:  # its rows go by themselves
                self._store_failed("$disconnect", error)
        return answers.http(200)

    # Messages

    def _message(self, event: Mapping[str, Any], connection: str, user: str | None) -> dict[str, Any]:
        try:
            if user is not None:
                self._throttle.check(connection, user)
        except Throttled as error:
            return self._throttled(_text(event), connection, user or "", error)
        except StoreError as error:  # a store without an answer refuses no message
            self._store_failed("a look at the limits", error)
        reply = self._reply(_text(event), connection, user)
        return answers.http(200) if reply is None else self._send(connection, user or "", reply)

    def _throttled(self, text: str | None, connection: str, user: str, error: Throttled) -> dict[str, Any]:
        """Ask the client for a pause; one that does not stop is disconnected."""
        try:
            message_id = requests.id_of(requests.read(text or ""))
        except Refusal:
            message_id = None
        reply = answers.throttled(message_id, error.wait_s)
        if error.is_first:  # a line for each would be a flood too
            reason = reply["message"]
            self.bus.emit(
                edge_events.MessageRefused(connection=connection, user=user, error=Problem.THROTTLED, reason=reason)
            )
        if not error.is_flood:
            return answers.http(200, encode(reply))
        self.bus.emit(edge_events.ConnectionFlooded(connection=connection, user=user))
        with suppress(ThunderAgentError):  # it may read nothing
            self._post(connection, encode(reply))
        try:
            self._end(connection)
            self._connections.flooded(user)
        except ThunderAgentError as failure:
            return self._send(connection, user, self._failure(failure, connection, user, message_id))
        return answers.http(200)

    def _reply(self, text: str | None, connection: str, user: str | None, *, joined: bool = False) -> Reply | None:
        message_id: MessageId = None
        try:
            if user is None:
                raise Refusal(Problem.BAD_REQUEST, "the connection has no user: give $connect the authorizer")
            if text is None:
                raise Refusal(Problem.BAD_REQUEST, "the message is no text in UTF-8")
            data = requests.read(text)
            message_id = requests.id_of(data)
            return self._answer(data, message_id, connection, user, joined)
        except Refusal as refusal:
            self.bus.emit(
                edge_events.MessageRefused(
                    connection=connection, user=user or "", error=refusal.problem, reason=str(refusal)
                )
            )
            return answers.error(refusal.message_id or message_id, refusal.problem, str(refusal))
        except StoreError as error:
            self._store_failed("a message", error)
            return answers.unavailable(message_id)
        except Exception as error:  # the error reply of API Gateway would say nothing
            return self._failure(error, connection, user or "", message_id)

    def _answer(
        self, data: dict[str, Any], message_id: MessageId, connection: str, user: str, joined: bool
    ) -> Reply | None:
        match data.get("action"):
            case Action.GET_STATE:
                wanted = requests.typed(requests.GetState, data, message_id)
                held = self._states.read(user)
                ahead = held.version < wanted.known_version
                return answers.state(message_id, held.value, held.version, self.region, ahead=ahead)
            case Action.SET_STATE:
                return self._save(requests.typed(requests.SetState, data, message_id), connection, user)
            case Action.PING:
                return answers.pong(message_id, self.region)
            case Action.CHUNK if not joined:
                text = self._chunk(data, message_id, connection)
                return None if text is None else self._reply(text, connection, user, joined=True)
            case Action.CHUNK:
                raise Refusal(Problem.BAD_REQUEST, "a message that came in chunks is itself a chunk", message_id)
            case action:
                raise requests.unknown(action, message_id)

    def _chunk(self, data: dict[str, Any], message_id: MessageId, connection: str) -> str | None:
        try:
            return self._chunks.add(connection, read_chunk(data))
        except ChunkRefused as error:
            raise Refusal(Problem.BAD_REQUEST, str(error), message_id) from None
        except StoreError as error:  # the chunk may be kept
            self._store_failed("a chunk", error)
            raise Refusal(Problem.UNAVAILABLE, answers.CHUNK_LOST, message_id) from None

    def _save(self, wanted: requests.SetState, connection: str, user: str) -> Reply:
        try:
            done = self._states.save(user, version=wanted.version, change=wanted.change, patch=wanted.patch)
        except (ValueError, RecursionError) as error:
            raise Refusal(Problem.BAD_REQUEST, str(error), wanted.id) from None
        match done:
            case Saved(version=version):
                if done.is_last:
                    changed = answers.changed(version, wanted.change, self.region)
                    self._notify_others(changed, wanted.patch if done.is_new else None, connection, user)
                return answers.saved(wanted.id, version, self.region)
            case Conflict(held=held):
                return answers.conflict(wanted.id, held.value, held.version, self.region)
            case _:
                text = f"the state would have {done.size} bytes; at most {STATE_BYTES} are kept: take something out"
                raise Refusal(Problem.TOO_LARGE, text, wanted.id)

    def _notify_others(self, changed: Reply, patch: Mapping[str, Any] | None, connection: str, user: str) -> None:
        """Notify the user's other connections of a change. It is saved, even if this fails."""
        text = encode(changed if patch is None else changed | {"patch": patch})
        if size(text) > FRAME_BYTES:  # one post for each connection: without the patch it asks for the state
            text = encode(changed)
        try:
            self._others.send(self._listed, user, [text], but=connection)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.bus.emit(edge_events.NotificationFailed(user=user, version=changed["version"], error=reason))

    def _send(self, connection: str, user: str, reply: Reply) -> dict[str, Any]:
        """Return a reply as the answer of the function; push one of several frames."""
        try:
            texts = frames(encode(reply), uuid.uuid4().hex)
            if len(texts) == 1:
                return answers.http(200, texts[0])
            for text in texts:
                if not self._post(connection, text):
                    break  # the client is gone: it asks again when it comes back
            return answers.http(200)
        except Exception as error:
            return answers.http(200, encode(self._failure(error, connection, user, reply.get("id"))))

    def _failure(self, error: Exception, connection: str, user: str, message_id: MessageId) -> Reply:
        text = f"{type(error).__name__}: {error}"
        self.bus.emit(edge_events.MessageFailed(connection=connection, user=user, error=text))
        if isinstance(error, (StoreError, PushFailed)):
            return answers.unavailable(message_id)
        text = "the message could not be handled, which is not your fault; the log of the API says why"
        return answers.error(message_id, Problem.INTERNAL, text)

    def _store_failed(self, during: str, error: StoreError) -> None:
        self.bus.emit(events.StoreFailed(during=during, error=str(error), next_try_s=answers.RETRY_AFTER_S))


def _text(event: Mapping[str, Any]) -> str | None:
    """The text of a message; None: it is not UTF-8."""
    body = event.get("body")
    if not isinstance(body, str):
        return None
    if not event.get("isBase64Encoded"):
        return body
    try:
        return base64.b64decode(body, validate=True).decode()
    except ValueError:
        return None
