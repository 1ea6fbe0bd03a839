"""The client of DynamoDB: made once for each process and purpose, watched for the service's clock and capacity.

A low-level client, because resources are not safe in threads. Retries and timeouts are explicit, because those of
botocore differ between versions and one default call may take ten minutes.
"""

from __future__ import annotations

import ipaddress
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore import xform_name
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from thunderagent.model.clock import DateClock, since_boot
from thunderagent.model.errors import ConfigurationError, CredentialsExpired
from thunderagent.model.forks import renewed
from thunderagent.stores import purposes
from thunderagent.stores.dynamo.consumed import Consumed, throttle_reasons
from thunderagent.stores.dynamo.errors import Place, Refused, code_of, translate

Purpose = Literal["work", "lease"]
T = TypeVar("T")

LOCAL_REGION: Final = "us-east-1"
RENEW_PAUSE_S: Final = 5.0
"""Shortest time between two sessions made because the credentials were over."""

_METERED: Final = frozenset(
    {"UpdateItem", "PutItem", "DeleteItem", "GetItem", "Query", "BatchGetItem", "BatchExecuteStatement"}
)

_building: Final = renewed(threading.Lock())
"""Sessions and clients are made one at a time: botocore's loaders are not safe in threads."""

_descriptions: Any = None


_clients: Final[set[weakref.ref[Any]]] = set()


def _close_idle() -> None:
    """Close the sockets that no request uses: no child inherits them, and the client goes on with others."""
    for found in list(_clients):
        if (client := found()) is not None:
            client.close()


os.register_at_fork(before=_close_idle, after_in_child=_clients.clear)


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
        """Asked before each attempt of a write leaves, with the id of its row; it may raise."""
        self._sent = threading.local()
        self._renewed_at = -RENEW_PAUSE_S
        with _building:
            self._client, self._pid = self._build(), os.getpid()
        self.place = replace(place, region=self._client.meta.region_name)

    @property
    def client(self) -> Any:
        """The client of this process."""
        if self._client is None or self._pid != os.getpid():
            with _building:
                if self._client is None or self._pid != os.getpid():
                    self._client, self._pid = self._build(), os.getpid()
        return self._client

    def call(
        self, action: str, *, what_for: purposes.RequestPurpose = purposes.RequestPurpose.OTHER, **arguments: Any
    ) -> dict[str, Any]:
        """Do one request, such as `UpdateItem`, and answer with its reply; it is counted under what it is for.

        Raises:
            Refused: the condition of a write did not hold.
            StoreError: as `failures.translate` says.
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
        """Replace a client whose credentials are over, one thread for all. False: that was done just now."""
        with _building:
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
            client: Any = _noted(
                session.client(
                    "dynamodb",
                    region_name=region,
                    endpoint_url=place.endpoint,
                    config=client_config(self.purpose, self.connections),
                )
            )
        except BotoCoreError as error:
            raise translate(error, "the first connection", place) from error
        except ValueError as error:
            raise ConfigurationError(f"{place}: {error}") from error
        events = client.meta.events
        events.register("before-send.dynamodb", self._note_sent)
        events.register("response-received.dynamodb", self._note_received)
        return client

    def _guard_of(self, action: str, arguments: Mapping[str, Any]) -> Callable[[], None] | None:
        """What the attempts of a write of one row are to ask. Batches put new rows alone, and are asked for before."""
        guard, key = self.guard, arguments.get("Key") or arguments.get("Item")
        return None if guard is None or key is None or action == "GetItem" else partial(guard, key["taskId"]["S"])

    def _note_sent(self, **_: Any) -> None:
        self._sent.at = self.clock.monotonic()
        if (guard := getattr(self._sent, "guard", None)) is not None:
            guard()

    def _note_received(
        self, response_dict: dict[str, Any] | None = None, parsed_response: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Look at every reply, those that botocore repeats by itself included."""
        if parsed_response is not None and (reasons := throttle_reasons(parsed_response)):
            self.consumed.add_throttle(reasons)
        if response_dict is not None:
            date = response_dict["headers"].get("date")
            self.clock.observe(date, sent=self._sent.at, received=self.clock.monotonic())


def is_loopback(endpoint: str | None) -> bool:
    """True for an endpoint on this machine: a local engine, which checks no credentials."""
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def build(make: Callable[[], T]) -> T:
    """Make a session or a client while no other thread makes one."""
    with _building:
        return _noted(make())


def _noted(made: T) -> T:
    """What was made; a client lets go of its idle sockets before each fork."""
    if isinstance(made, BaseClient):
        _clients.add(weakref.ref(made, _clients.discard))
    return made


def new_session(*, local: bool) -> boto3.Session:
    """A session of its own, with the credentials of the environment or the profile.

    A local engine checks none, so `local` asks neither the network for them nor the caller: without any, dummies do.
    The descriptions of the services are read once a process, which makes every client but the first cheap.
    """
    global _descriptions
    core = botocore.session.Session()
    if _descriptions is None:
        _descriptions = core.get_component("data_loader")
    core.register_component("data_loader", _descriptions)
    session = boto3.Session(botocore_session=core)
    if local:
        resolver = core.get_component("credential_provider")
        for asks_the_network in ("container-role", "iam-role"):
            resolver.remove(asks_the_network)
        if session.get_credentials() is None:
            core.set_credentials("local", "local")
    return session
