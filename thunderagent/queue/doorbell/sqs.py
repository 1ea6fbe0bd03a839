"""The doorbell of a fleet: one Amazon SQS standard queue that all clients send to and all agents long-poll.

A message reaches one agent. If it is of no use there (another agent's lease, an unknown job, no free slot), it is made
visible again for the others, a few times, and then dropped.

Failure costs little: sending gives up after three seconds, and after a failure nothing is sent for `BREAK_S` seconds,
so that an enqueue does not stay slower than the store.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import ConfigurationError, DoorbellError
from thunderagent.model.forks import renewed
from thunderagent.queue.doorbell.message import DoorbellMessage, Verb, pack, parse
from thunderagent.queue.doorbell.port import Accepts
from thunderagent.stores.aws import LOCAL_REGION, build, is_loopback, new_session

EAGER_POLL_S: Final = 0.005
"""Between two looks into the queue of a local engine, while messages come."""

STAND_BACK_S: Final = 0.15
"""How long an agent lets the others ask for a message that is of no use here before it asks again."""


LONG_POLL_S: Final = 20
"""Longest wait of one request; its price does not depend on the wait."""

BREAK_S: Final = 30.0
"""Seconds after a failure in which nothing is sent."""

LONGEST_DELAY_S: Final = 900
"""Longest delay that SQS allows; polling, which looks ahead, finds what is due later."""

HIDDEN_S: Final = 5
"""Seconds until a message comes to another agent when its first was killed before it deleted it."""

RECEIVES: Final = 15
"""Agents that may hand on a message about a task."""

BEAT_RECEIVES: Final = 40
"""As `RECEIVES`, for a lease: it is one agent's alone, which in a large fleet takes more tries."""

MOST_SENT: Final = 50
"""Messages that one call sends at most."""

EAGER_S: Final = 60.0
"""Seconds after a message in which a local engine is asked often: it looks into its queue every 100 ms only."""

_REGION: Final = re.compile(r"(?:^|\.)sqs(?:-fips)?\.([a-z]{2}[a-z0-9-]*-\d)\.|^([a-z]{2}[a-z0-9-]*-\d)\.queue\.")


class SqsDoorbell:
    """Messages through an SQS queue. Safe in threads and after a fork; `listen` in one thread.

    Args:
        make_client: makes a client from the URL and its configuration; None: one of boto3.
        monotonic: the clock of the break after a failure.
        now: epoch seconds, for the delay of a message.
    """

    is_local = False

    def __init__(
        self,
        url: str,
        *,
        make_client: Callable[[str, Config], Any] | None = None,
        monotonic: Callable[[], float] = since_boot,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.url = url
        self._make_client = make_client or _make_client
        self._monotonic = monotonic
        self._now = now
        self._guard = renewed(threading.Lock())
        self._clients: dict[str, Any] = {}
        self._pid = 0
        self._next_try = -math.inf
        self._last_heard = -math.inf
        self._is_near = is_loopback(url)
        self._used: list[str] = []
        self._useless: list[str] = []
        self._closed = renewed(threading.Event())
        self.is_healthy = True
        self.problem = ""
        """Why the last `ring` failed."""

    def ring(self, messages: Sequence[DoorbellMessage]) -> None:
        entries = self._entries(messages)
        if not entries or not self._may_try():
            return
        try:
            for first in range(0, len(entries), 10):
                self._sender.send_message_batch(QueueUrl=self.url, Entries=entries[first : first + 10])
            self.is_healthy, self._next_try = True, -math.inf
        except Exception as error:  # of any kind: the task is in the table, so a lost hint is no error of the caller
            self.problem = str(_problem(error, self.url))
            self.is_healthy, self._next_try = False, self._monotonic() + BREAK_S

    def listen(self, timeout_s: float, accepts: Accepts) -> list[DoorbellMessage]:
        wait_s = min(LONG_POLL_S, max(0, int(timeout_s)))
        if self._is_near and self._monotonic() - self._last_heard < EAGER_S:
            wait_s = 0
        try:
            client = self._client("listen", Config(connect_timeout=2, read_timeout=LONG_POLL_S + 5, **_ONCE))
            if self._tidy(client):
                self._closed.wait(STAND_BACK_S)
            reply = client.receive_message(
                QueueUrl=self.url,
                MaxNumberOfMessages=10,
                WaitTimeSeconds=wait_s,
                VisibilityTimeout=HIDDEN_S,
                AttributeNames=["ApproximateReceiveCount"],
            )
            received = reply.get("Messages") or []
            if self._closed.is_set():  # too late for this agent
                self._useless += [one["ReceiptHandle"] for one in received]
                self._tidy(self._sender)
                return []
        except (ClientError, BotoCoreError, ConfigurationError) as error:
            raise _problem(error, self.url) from error
        if received:
            self._last_heard = self._monotonic()
        elif self._is_near and wait_s == 0:
            self._closed.wait(EAGER_POLL_S)
        return [message for one in received for message in self._accepted(one, accepts)]

    def close(self) -> None:
        """Hand on what is of no use here. A long poll under way in another thread ends by itself."""
        self._closed.set()
        with suppress(ClientError, BotoCoreError, ConfigurationError):
            if self._used or self._useless:
                self._tidy(self._sender)
        with self._guard:
            clients, self._clients = self._clients, {}
        if self._pid == os.getpid():
            for client in clients.values():
                client.close()

    def _entries(self, messages: Sequence[DoorbellMessage]) -> list[dict[str, Any]]:
        """One packet for each message, as each may be for another agent."""
        now = self._now()
        entries: list[dict[str, Any]] = []
        for message in messages[:MOST_SENT]:
            delay_s = max(0, int(message.at - now))
            for packet in pack([message]) if delay_s <= LONGEST_DELAY_S else ():
                entry = {"Id": str(len(entries)), "MessageBody": packet}
                entries.append({**entry, "DelaySeconds": delay_s} if delay_s else entry)
        return entries

    def _may_try(self) -> bool:
        with self._guard:
            now = self._monotonic()
            if now < self._next_try:
                return False
            if not self.is_healthy:  # one thread tries whether it works again, the others wait for its result
                self._next_try = now + BREAK_S
            return True

    def _accepted(self, received: Mapping[str, Any], accepts: Accepts) -> list[DoorbellMessage]:
        """The messages that are of use here. The next `listen` deletes or hands on what was received: this agent acts
        first, and a message that comes twice does no harm."""
        messages = parse(str(received.get("Body", ""))) or ()
        useful = [message for message in messages if accepts(message)]
        receives = int(received.get("Attributes", {}).get("ApproximateReceiveCount", 1))
        others_may = any(
            receives < (BEAT_RECEIVES if message.verb is Verb.BEAT else RECEIVES)
            for message in messages
            if message not in useful
        )
        (self._useless if others_may else self._used).append(received["ReceiptHandle"])
        return useful

    def _tidy(self, client: Any) -> bool:
        """Delete what was used and hand on what is of no use here; whether there was any to hand on."""
        useless, self._useless = self._useless[:10], []
        used, self._used = self._used[:10], []  # one receive gives no more; the rest comes again by itself
        if useless:
            entries = [
                {"Id": str(number), "ReceiptHandle": one, "VisibilityTimeout": 0} for number, one in enumerate(useless)
            ]
            client.change_message_visibility_batch(QueueUrl=self.url, Entries=entries)
        if used:
            entries = [{"Id": str(number), "ReceiptHandle": one} for number, one in enumerate(used)]
            client.delete_message_batch(QueueUrl=self.url, Entries=entries)
        return bool(useless)

    @property
    def _sender(self) -> Any:
        return self._client("send", Config(connect_timeout=1, read_timeout=2, **_ONCE))

    def _client(self, purpose: str, config: Config) -> Any:
        with self._guard:
            if self._pid != os.getpid():
                self._clients, self._pid = {}, os.getpid()
            if purpose not in self._clients:
                self._clients[purpose] = self._make_client(self.url, config)
            return self._clients[purpose]


_ONCE: Final[dict[str, Any]] = {"retries": {"mode": "standard", "total_max_attempts": 1}, "tcp_keepalive": True}


def _make_client(url: str, config: Config) -> Any:
    parts = urlsplit(url)
    found = _REGION.search(parts.hostname or "")

    def make() -> Any:
        local = is_loopback(url)
        session = new_session(local=local)
        region = (found and (found[1] or found[2])) or session.region_name or (LOCAL_REGION if local else None)
        return session.client("sqs", region_name=region, endpoint_url=f"{parts.scheme}://{parts.netloc}", config=config)

    try:
        return build(make)
    except ValueError as error:
        raise ConfigurationError(f"the wake queue {url!r}: {error}") from error


def _problem(error: Exception, url: str) -> DoorbellError:
    """The error with its remedy."""
    response: Mapping[str, Any] = getattr(error, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    if "NonExistentQueue" in code or code == "QueueDoesNotExist":
        remedy = "it does not exist: create it, or take THUNDERAGENT_WAKE_QUEUE_URL away"
    elif "AccessDenied" in code or code in (
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    ):
        remedy = (
            "it may not be used: allow sqs:SendMessage to clients, and to agents also sqs:ReceiveMessage, "
            "sqs:DeleteMessage and sqs:ChangeMessageVisibility"
        )
    else:
        remedy = "tasks are found by polling until it answers"
    return DoorbellError(f"the wake queue {url} does not work ({error}): {remedy}")
