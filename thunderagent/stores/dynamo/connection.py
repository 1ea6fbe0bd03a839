"""The client of DynamoDB: made once for each process and purpose, watched for the service's clock and capacity.

A low-level client, because resources are not safe in threads. Retries and timeouts are explicit, because those of
botocore differ between versions and one default call may take ten minutes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from thunderagent.model.clock import DateClock, since_boot
from thunderagent.model.errors import ConfigurationError, CredentialsExpired
from thunderagent.stores import purposes
from thunderagent.stores.aws import BUILDING, LOCAL_REGION, build, code_of, is_loopback, new_session
from thunderagent.stores.dynamo.consumed import Consumed, throttle_reasons
from thunderagent.stores.dynamo.errors import Place, Refused, translate

Purpose = Literal["work", "lease"]
RENEW_PAUSE_S: Final = 5.0
"""Shortest time between two sessions made because credentials had expired."""

_METERED: Final = frozenset(
    {"UpdateItem", "PutItem", "DeleteItem", "GetItem", "Query", "BatchGetItem", "BatchExecuteStatement"}
)


def client_config(purpose: Purpose, connections: int) -> Config:
    """Timeouts, attempts and pool of a client.

    A lease client answers within 6 s whatever happens, so that a heartbeat does not outlive its own lease.
    """
    connect_s, read_s, attempts = (1, 2, 2) if purpose == "lease" else (2, 5, 4)
    return Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=connections,
        tcp_keepalive=True,
    )


class Connection:
    """Calls to DynamoDB for one table, with errors translated. Safe in threads and after a fork.

    Raises:
        ConfigurationError: no region is known, or the endpoint is not a URL.
    """

    def __init__(
        self,
        place: Place,
        *,
        purpose: Purpose = "work",
        connections: int = 24,
        clock: DateClock | None = None,
        consumed: Consumed | None = None,
    ) -> None:
        self.purpose: Purpose = purpose
        self.connections = connections
        self.clock = clock or DateClock()
        self.consumed = consumed or Consumed()
        self.place = place
        self.guard: Callable[[str], None] | None = None
        """Called before each attempt of a write leaves, with the id of its row; it may raise."""
        self._sent = threading.local()
        self._renewed_at = -RENEW_PAUSE_S
        with BUILDING:
            self._client, self._pid = self._build(), os.getpid()
        self.place = replace(place, region=self._client.meta.region_name)

    @property
    def client(self) -> Any:
        if self._client is None or self._pid != os.getpid():
            with BUILDING:
                if self._client is None or self._pid != os.getpid():
                    self._client, self._pid = self._build(), os.getpid()
        return self._client

    def call(
        self, action: str, *, what_for: purposes.RequestPurpose = purposes.RequestPurpose.OTHER, **arguments: Any
    ) -> dict[str, Any]:
        """Do one request, such as `UpdateItem`, and answer with its reply.

        Raises:
            Refused: the condition of a write did not hold.
            StoreError: as `errors.translate` says.
            CredentialsMissing: there are no credentials.
        """
        if self.consumed.enabled and action in _METERED:
            arguments["ReturnConsumedCapacity"] = "INDEXES"
        self._sent.guard = self._guard_of(action, arguments)
        client = self.client
        try:
            return self._call(client, action, arguments, what_for)
        except CredentialsExpired:
            if not self._renew(client):
                raise
            return self._call(self.client, action, arguments, what_for)

    def close(self) -> None:
        """Close the sockets; a later call opens new ones."""
        client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            client.close()

    def _call(
        self, client: Any, action: str, arguments: dict[str, Any], what_for: purposes.RequestPurpose
    ) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = getattr(client, xform_name(action))(**arguments)
        except (ClientError, BotoCoreError) as error:
            if code_of(error) == "ConditionalCheckFailedException":
                self.consumed.add_refused(what_for)
                raise Refused(getattr(error, "response", {}).get("Item")) from error
            raise translate(error, action, self.place) from error
        self.consumed.add(action, reply, what_for)
        return reply

    def _renew(self, expired: Any) -> bool:
        """Replace a client whose credentials have expired, one thread for all. False: that was done just now."""
        with BUILDING:
            if self._client is not expired:
                return True
            if since_boot() - self._renewed_at < RENEW_PAUSE_S:
                return False
            self._renewed_at = since_boot()
            self._client, self._pid = self._build(), os.getpid()
            return True

    def _build(self) -> Any:
        place = self.place
        try:
            local = is_loopback(place.endpoint)
            session = new_session(local=local)
            region = place.region or session.region_name or (LOCAL_REGION if local else None)
            config = client_config(self.purpose, self.connections)
            make = partial(session.client, "dynamodb")
            client: Any = build(lambda: make(region_name=region, endpoint_url=place.endpoint, config=config))
        except BotoCoreError as error:
            raise translate(error, "the first connection", place) from error
        except ValueError as error:
            raise ConfigurationError(f"{place}: {error}") from error
        events = client.meta.events
        events.register("before-send.dynamodb", self._note_sent)
        events.register("response-received.dynamodb", self._note_received)
        return client

    def _guard_of(self, action: str, arguments: Mapping[str, Any]) -> Callable[[], None] | None:
        """The guard for the attempts of a write of one row. Batches put new rows alone, and are checked before."""
        guard, key = self.guard, arguments.get("Key") or arguments.get("Item")
        return None if guard is None or key is None or action == "GetItem" else partial(guard, key["taskId"]["S"])

    def _note_sent(self, **_: Any) -> None:
        self._sent.at = self.clock.monotonic()
        if (guard := getattr(self._sent, "guard", None)) is not None:
            guard()

    def _note_received(
        self, response_dict: dict[str, Any] | None = None, parsed_response: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Look at every reply, also those that botocore repeats by itself."""
        if parsed_response is not None and (reasons := throttle_reasons(parsed_response)):
            self.consumed.add_throttle(reasons)
        if response_dict is not None:
            date = response_dict["headers"].get("date")
            self.clock.observe(date, sent=self._sent.at, received=self.clock.monotonic())
