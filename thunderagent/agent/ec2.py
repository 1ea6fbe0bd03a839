"""Notices that an EC2 instance is to be taken away: the agent drains, and its successor does not begin.

A supervisor starts a fresh agent when one has drained. That agent finds the notice before it looks for work, claims
nothing, and waits for the end of the machine; should the notice be withdrawn, it begins.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from thunderagent.agent.threads import RepeatingThread
from thunderagent.model import fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.errors import ConfigurationError, ThunderAgentError

LOOK_S: Final = 5.0
"""Time between two questions: a spot instance knows of its end two minutes before, of hibernation when it begins."""

RARELY_S: Final = 60.0
"""The same while the metadata service does not answer."""

ENDPOINT: Final = "http://169.254.169.254"
VARIABLE: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The variable of the SDK for another endpoint."""

TIMEOUT_S: Final = 1.0
"""Longest wait for an answer, which comes within milliseconds or never."""

TOKEN_S: Final = 21600
"""How long a token is valid."""

LARGEST: Final = 4096
_HEADER: Final = "X-aws-ec2-metadata-token"
_ENDS: Final = frozenset({"Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated"})
"""States of Auto Scaling in which the machine does not run."""


class MetadataUnavailable(ThunderAgentError):
    """The metadata service did not answer, or refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The future of the instance.

    Attributes:
        leaves: why it is to be taken away; None: it stays.
        at_risk: EC2 recommends to move away, perhaps hours before anything happens.
    """

    leaves: str | None = None
    at_risk: bool = False


class Metadata:
    """The metadata service of this instance, version 2 (IMDSv2). For one thread.

    The fetcher of botocore sends its token through a proxy of the environment, and does not say why there is no answer.

    Args:
        endpoint: its URL; None: that of the environment, else the usual one.
        timeout_s: longest wait for one answer.

    Raises:
        ConfigurationError: the endpoint is no http URL.
    """

    def __init__(self, endpoint: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.endpoint = endpoint or os.environ.get(VARIABLE) or ENDPOINT
        parts = urlsplit(self.endpoint)
        try:
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            self._host = ""
        if parts.scheme != "http" or not self._host:
            raise ConfigurationError(f"{VARIABLE} is {self.endpoint!r}; write for example {ENDPOINT}")
        self._timeout_s = timeout_s
        self._token = ""

    def look(self) -> Outlook:
        """Ask the instance.

        Raises:
            MetadataUnavailable: there is no answer, or a refusal; the message has the remedy.
        """
        if spot := self._get("spot/instance-action"):
            return Outlook(leaves=f"EC2 takes this spot instance away: {_action(spot)}")
        state = (self._get("autoscaling/target-lifecycle-state") or "").strip()
        if state in _ENDS:
            return Outlook(leaves=f"Auto Scaling takes this instance away: its target state is {state}")
        return Outlook(at_risk=bool(self._get("events/recommendations/rebalance")))

    def _get(self, path: str) -> str | None:
        """A piece of metadata; None where there is none."""
        for _ in range(2):
            self._token = self._token or self._new_token()
            status, text = self._ask("GET", f"/latest/meta-data/{path}", {_HEADER: self._token})
            if status != 401:
                break
            self._token = ""  # it has expired, or the instance was stopped and started
        if status == 200:
            return text
        if status == 404:
            return None
        raise MetadataUnavailable(self._refusal(status))

    def _new_token(self) -> str:
        wanted = {f"{_HEADER}-ttl-seconds": str(TOKEN_S), "Content-Length": "0"}
        status, text = self._ask("PUT", "/latest/api/token", wanted)
        if status != 200 or not text.strip().isprintable():
            raise MetadataUnavailable(self._refusal(status))
        return text.strip()

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(LARGEST).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise MetadataUnavailable(
                f"the metadata service of EC2 at {self.endpoint} does not answer ({error or type(error).__name__}): in "
                "a container its answer needs a hop more: aws ec2 modify-instance-metadata-options --instance-id ID "
                "--http-put-response-hop-limit 2; where there is no EC2, set THUNDERAGENT_EC2_NOTICES=false"
            ) from error
        finally:
            connection.close()

    def _refusal(self, status: int) -> str:
        remedy = "it is asked again later"
        if status == 403:
            remedy = (
                "it is switched off, or something in between forbids it: aws ec2 modify-instance-metadata-options "
                "--instance-id ID --http-endpoint enabled"
            )
        elif status in (401, 404, 405):
            remedy = f"that is no metadata service with tokens (IMDSv2): see what {VARIABLE} says"
        return f"the metadata service of EC2 at {self.endpoint} answers {status}: {remedy}"


def _action(text: str) -> str:
    """What is to happen to a spot instance, in words; a text that cannot be read is a notice too."""
    try:
        action: Any = json.loads(text)
        return f"{action['action']} at {action['time']}"
    except (ValueError, LookupError, TypeError):
        return " ".join(text.split())[:200]


class Notices(RepeatingThread):
    """The thread that asks the instance.

    Args:
        retire: drains the agent, with the reason.
        hold: lets nothing start in the agent, with the reason; lets it go on with None.
        monotonic: the clock by which a service that does not answer is asked less often.
    """

    def __init__(
        self,
        metadata: Metadata,
        bus: EventBus,
        *,
        retire: Callable[[str], None],
        hold: Callable[[str | None], None],
        every_s: float = LOOK_S,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        super().__init__("notices", every_s, self.look)
        self._metadata = metadata
        self._bus = bus
        self._retire = retire
        self._hold = hold
        self._monotonic = monotonic
        self._has_begun = self._is_held = self._is_failing = self._is_at_risk = False
        self._due = 0.0

    def start(self) -> None:
        """Begin. The first look is done at once, in the caller's thread: nothing is claimed before."""
        if not self._has_begun:
            self._has_begun = True
            if (outlook := self._ask()) is not None and outlook.leaves:
                self._is_held = True
                self._hold(outlook.leaves)
        super().start()

    def look(self) -> None:
        """Ask, if it is time, and do what the answer wants."""
        if self._monotonic() < self._due:
            return
        outlook = self._ask()
        if outlook is None:
            return
        if self._is_held:
            if outlook.leaves is None:
                self._is_held = False
                self._hold(None)
        elif outlook.leaves:
            self._retire(outlook.leaves)
        if outlook.at_risk and not self._is_at_risk:
            self._bus.emit(fleet_events.InstanceAtRisk())
        self._is_at_risk = outlook.at_risk

    def _ask(self) -> Outlook | None:
        """The outlook; None when there is no answer, of which the first one is an event."""
        try:
            outlook = self._metadata.look()
        except MetadataUnavailable as error:
            if not self._is_failing:
                self._bus.emit(fleet_events.NoticesFailed(error=str(error), next_try_s=RARELY_S))
            self._is_failing = True
            self._due = self._monotonic() + RARELY_S
            return None
        self._is_failing = False
        return outlook
