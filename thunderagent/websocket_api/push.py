"""Pushes messages to the connections of a user through the management API of Amazon's API Gateway.

The handlers of the WebSocket API keep the table of connections. A push takes connections that are gone out of it.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import AccessDenied, ConfigurationError, PushFailed, StoreError
from thunderagent.model.forks import renewed
from thunderagent.model.jsondata import dump_json
from thunderagent.settings import push_problem
from thunderagent.stores import open_engine
from thunderagent.stores.aws import LOCAL_REGION, build, code_of, is_loopback, new_session, translate
from thunderagent.stores.engine import Engine
from thunderagent.websocket_api.protocol import Kind, encode, frames
from thunderagent.websocket_api.records import connections_id, forget_connection, holders_of, remove_connection

AT_ONCE: Final = 8
"""Connections that a process pushes to at once."""
PUSH_S: Final = 10.0
"""Longest time of a push; connections that were not reached by then do not get it."""

_REGION: Final = re.compile(r"\.execute-api\.([a-z0-9-]+)\.")
_GONE: Final = frozenset({"GoneException", "410"})


class ManagementApi:
    """The management API of one WebSocket API and stage. Safe in threads and after a fork.

    Args:
        endpoint: `https://API.execute-api.REGION.amazonaws.com/STAGE`; on this machine also http.
        region: for signing; None: that of the endpoint, else that of the environment.

    Raises:
        ConfigurationError: the endpoint is not such a URL.
    """

    def __init__(self, endpoint: str, *, region: str | None = None) -> None:
        if problem := push_problem(endpoint):
            raise ConfigurationError(f"the endpoint for pushes {problem}")
        self.endpoint = endpoint.rstrip("/")
        found = _REGION.search(urlsplit(endpoint).hostname or "")
        self._region = region or (found.group(1) if found else None)
        self._client: tuple[int, Any] | None = None
        self._guard = renewed(threading.Lock())

    def post(self, connection: str, text: str) -> bool:
        """Send a text to a connection. False: it is gone.

        Raises:
            ConfigurationError: no region is known.
            CredentialsMissing: there are no credentials.
            AccessDenied: `execute-api:ManageConnections` is not allowed.
            PushFailed: API Gateway did not answer, or did not take the text.
        """
        return self._ask(lambda api: api.post_to_connection(ConnectionId=connection, Data=text.encode()))

    def end(self, connection: str) -> bool:
        """Close a connection. False: it is gone. It raises what `post` raises."""
        return self._ask(lambda api: api.delete_connection(ConnectionId=connection))

    def _ask(self, request: Callable[[Any], object]) -> bool:
        try:
            request(self._made())
        except (ClientError, BotoCoreError) as error:
            code = code_of(error)
            if code in _GONE or _status(error) == 410:
                return False
            raise self._problem(error) from error
        return True

    def close(self) -> None:
        """Close the sockets. A later call opens new ones."""
        with self._guard:
            made, self._client = self._client, None
        if made is not None and made[0] == os.getpid():
            made[1].close()

    def _made(self) -> Any:
        with self._guard:
            if self._client is None or self._client[0] != os.getpid():
                self._client = os.getpid(), build(self._make)
            return self._client[1]

    def _make(self) -> Any:
        local = is_loopback(self.endpoint)
        session = new_session(local=local)
        return session.client(
            "apigatewaymanagementapi",
            region_name=self._region or session.region_name or (LOCAL_REGION if local else None),
            endpoint_url=self.endpoint,
            config=Config(
                connect_timeout=2,
                read_timeout=3,
                retries={"mode": "standard", "total_max_attempts": 2},
                max_pool_connections=AT_ONCE,
            ),
        )

    def _problem(self, error: ClientError | BotoCoreError) -> Exception:
        allow = "execute-api:ManageConnections (arn:aws:execute-api:REGION:ACCOUNT:API/STAGE/POST/@connections/*)"
        problem = translate(error, "a push", self.endpoint, permission=allow)
        if isinstance(problem, (AccessDenied, ConfigurationError)):
            return problem
        return PushFailed(f"no push through {self.endpoint}: {error}")


class Broadcast:
    """Sends texts to the connections of a user, several at a time. Safe in threads and after a fork.

    Args:
        post: sends a text to a connection by its id. False: it is gone.
        timeout_s: longest time for all connections together.
    """

    def __init__(
        self,
        post: Callable[[str, str], bool],
        *,
        timeout_s: float = PUSH_S,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        self._post = post
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._guard = renewed(threading.Lock())
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def send(self, connections: Engine, user: str, texts: Sequence[str], *, but: str | None = None) -> int:
        """Send texts of one frame each, in their order, to every connection of a user but one.

        Returns:
            The number of connections that took them.

        Raises:
            StoreError: the table of connections did not answer; nothing was sent.
            PushFailed: no connection took them, for a reason that may pass.
            ThunderAgentError: no connection took them, for a reason that does not pass, such as `AccessDenied`.
        """
        row_id = connections_id(user)
        ids = sorted(one for one in holders_of(connections.get([row_id]).get(row_id)) if one != but)
        if not ids:
            return 0
        pool, until = self._ready(), self._monotonic() + self._timeout_s
        sent = {pool.submit(self._send, one, texts, until): one for one in ids}
        left = set(sent)
        while left and (wait_s := until - self._monotonic()) > 0:
            _, left = wait(left, timeout=wait_s, return_when=FIRST_COMPLETED)
        for late in left:
            late.cancel()
        return self._count(connections, user, sent)

    def close(self) -> None:
        """End the threads."""
        with self._guard:
            pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, connection: str, texts: Sequence[str], until: float) -> bool:
        for text in texts:
            if self._monotonic() >= until:
                raise PushFailed(f"the push took over {self._timeout_s:g} s")
            if not self._post(connection, text):
                return False
        return True

    def _count(self, engine: Engine, user: str, sent: Mapping[Future[bool], str]) -> int:
        reached, gone = 0, list[str]()
        problem: BaseException | None = None
        for future, connection in sent.items():
            if not future.done() or future.cancelled():
                problem = problem or PushFailed(f"the push took over {self._timeout_s:g} s")
            elif (error := future.exception()) is not None:
                problem = error
            elif future.result():
                reached += 1
            else:
                gone.append(connection)
        if gone:
            writes = [write for one in gone for write in (remove_connection(user, one), forget_connection(one, user))]
            with suppress(StoreError):  # the next push finds them
                engine.apply(writes)
        if problem is not None and not reached:
            raise problem
        return reached

    def _ready(self) -> ThreadPoolExecutor:
        with self._guard:
            if self._pool is None or self._pid != os.getpid():
                self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="push")
                self._pid = os.getpid()
            return self._pool


class Pusher:
    """Pushes messages to users. Safe in threads and after a fork; it opens nothing before the first push.

    Args:
        post: sends a text to a connection by its id. False: it is gone.
        connections: opens the table of connections.
    """

    def __init__(
        self,
        post: Callable[[str, str], bool],
        connections: Callable[[], Engine],
        *,
        timeout_s: float = PUSH_S,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        self._broadcast = Broadcast(post, timeout_s=timeout_s, monotonic=monotonic)
        self._open = connections
        self._guard = renewed(threading.Lock())
        self._engine: Engine | None = None
        self._pid = 0

    def push(self, user: str, message: Any) -> int:
        """Push a message to every connection of a user; it arrives as `{"type": "push", "id": …, "message": …}`.

        All connections get the same id: a client with two of them, while it replaces one, drops the second message.

        Returns:
            The number of connections that took it. 0 is no error: the user is not connected.

        Raises:
            ValueError: the message is not JSON data.
            MessageTooLarge: it is over 128 KiB; nothing was sent.
            StoreError: the table of connections did not answer; nothing was sent.
            PushFailed: no connection took it, for a reason that may pass.
            ThunderAgentError: no connection took it, for a reason that does not pass, such as `AccessDenied`.
        """
        push_id = uuid.uuid4().hex
        text = encode({"type": Kind.PUSH, "id": push_id})[:-1] + f',"message":{dump_json(message, "the message")}}}'
        return self._broadcast.send(self._ready(), user, frames(text, push_id))

    def close(self) -> None:
        """End threads and connections."""
        with self._guard:
            engine, is_ours = self._engine, self._pid == os.getpid()
            self._engine = None
        self._broadcast.close()
        if engine is not None and is_ours:
            engine.close()

    def _ready(self) -> Engine:
        with self._guard:
            if self._engine is None or self._pid != os.getpid():
                self._engine = self._open()
                self._pid = os.getpid()
            return self._engine


def make_pusher(endpoint: str, connections: str) -> Pusher:
    """The extension `push`, for the endpoint of the management API and the URL of the table of connections.

    Raises:
        ConfigurationError: the endpoint is no such URL.
    """
    return Pusher(ManagementApi(endpoint).post, lambda: open_engine(connections, hasty=True))


def _status(error: Exception) -> int:
    response = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
