"""The doorbell of a fleet: one Amazon SQS standard queue that all clients send to and all agents long-poll.

A message reaches one agent. Is it of no use there (another agent's lease, a job that it does not have, no free slot),
it is made visible again for the others, a few times; then it is dropped, as it is a hint and nothing more.

What does not work costs little: sending gives up after three seconds, and after a failure nothing is sent for
`BREAK_S`, so that an enqueue is not slower than the store for long.
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
from thunderagent.model.pacing import EAGER_POLL_S, STAND_BACK_S
from thunderagent.queue.doorbell.message import Ring, Verb, pack, parse
from thunderagent.queue.doorbell.port import Wanted
from thunderagent.stores.dynamo.connection import LOCAL_REGION, build, is_loopback, new_session

LONG_POLL_S: Final = 20
"""Longest that SQS waits for a message; the request is paid for once, however long it waits."""

BREAK_S: Final = 30.0
"""After a failure nothing is sent for so long."""

LONGEST_DELAY_S: Final = 900
"""SQS holds a message back no longer; what is due later is found by polling, which looks ahead."""

HIDDEN_S: Final = 5
"""A message that an agent took and did not delete, as it was killed in between, comes to another after this time."""

RECEIVES: Final = 15
"""How many agents may find a task of no use for them."""

BEAT_RECEIVES: Final = 40
"""A lease is one agent's alone, which in a large fleet is not found with the first tries."""

MOST_SENT: Final = 50
"""Rings that one call sends at most."""

EAGER_S: Final = 60.0
"""A local engine looks into its queue every 100 ms while somebody waits; so long after a ring we ask it more often."""

_REGION: Final = re.compile(r"(?:^|\.)sqs(?:-fips)?\.([a-z]{2}[a-z0-9-]*-\d)\.|^([a-z]{2}[a-z0-9-]*-\d)\.queue\.")


class SqsDoorbell:
    """Rings through a queue. Safe in threads and after a fork; `listen` in one thread."""

    is_local = False

    def __init__(
        self,
        url: str,
        *,
        make_client: Callable[[str, Config], Any] | None = None,
        monotonic: Callable[[], float] = since_boot,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Make one; nothing is contacted.

        Args:
            url: of the queue.
            make_client: makes a client from the URL and its configuration; None: one of boto3.
            monotonic: the clock of the break after a failure.
            now: epoch seconds, for the delay of a ring.
        """
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
        """What went wrong when something was sent last."""

    def ring(self, rings: Sequence[Ring]) -> None:
        entries = self._entries(rings)
        if not entries or not self._may_try():
            return
        try:
            for first in range(0, len(entries), 10):
                self._sender.send_message_batch(QueueUrl=self.url, Entries=entries[first : first + 10])
            self.is_healthy, self._next_try = True, -math.inf
        except Exception as error:  # whatever it is: the task is in the table, and the caller is not to hear of a hint
            self.problem = str(_problem(error, self.url))
            self.is_healthy, self._next_try = False, self._monotonic() + BREAK_S

    def listen(self, timeout_s: float, wanted: Wanted) -> list[Ring]:
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
            messages = reply.get("Messages") or []
            if self._closed.is_set():  # they came too late for us
                self._useless += [message["ReceiptHandle"] for message in messages]
                self._tidy(self._sender)
                return []
        except (ClientError, BotoCoreError, ConfigurationError) as error:
            raise _problem(error, self.url) from error
        if messages:
            self._last_heard = self._monotonic()
        elif self._is_near and wait_s == 0:
            self._closed.wait(EAGER_POLL_S)
        return [ring for message in messages for ring in self._sorted(message, wanted)]

    def close(self) -> None:
        """Give back what is of no use here. A long poll under way in another thread ends by itself."""
        self._closed.set()
        with suppress(ClientError, BotoCoreError, ConfigurationError):
            if self._used or self._useless:
                self._tidy(self._sender)
        with self._guard:
            clients, self._clients = self._clients, {}
        if self._pid == os.getpid():
            for client in clients.values():
                client.close()

    def _entries(self, rings: Sequence[Ring]) -> list[dict[str, Any]]:
        """One message for each ring, as each may be for another agent."""
        now = self._now()
        entries: list[dict[str, Any]] = []
        for ring in rings[:MOST_SENT]:
            delay_s = max(0, int(ring.at - now))
            for message in pack([ring]) if delay_s <= LONGEST_DELAY_S else ():
                entry = {"Id": str(len(entries)), "MessageBody": message}
                entries.append({**entry, "DelaySeconds": delay_s} if delay_s else entry)
        return entries

    def _may_try(self) -> bool:
        with self._guard:
            now = self._monotonic()
            if now < self._next_try:
                return False
            if not self.is_healthy:  # one tries whether it works again, the others go by what that one finds
                self._next_try = now + BREAK_S
            return True

    def _sorted(self, message: Mapping[str, Any], wanted: Wanted) -> list[Ring]:
        """The rings of a message that are of use here. What becomes of the message is told before the next are asked
        for: first things first, and a ring that was handed over and comes again does no harm."""
        rings = parse(str(message.get("Body", ""))) or ()
        useful = [ring for ring in rings if wanted(ring)]
        received = int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1))
        others_may = any(
            received < (BEAT_RECEIVES if ring.verb is Verb.BEAT else RECEIVES) for ring in rings if ring not in useful
        )
        (self._useless if others_may else self._used).append(message["ReceiptHandle"])
        return useful

    def _tidy(self, client: Any) -> bool:
        """Delete what was handed over, and give the others what is of no use here; whether there was such."""
        useless, self._useless = self._useless[:10], []
        used, self._used = self._used[:10], []  # a receive gives no more, and what is left out comes again by itself
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
    """What is wrong, and the remedy where there is one."""
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
