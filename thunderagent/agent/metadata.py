"""What the EC2 instance knows of itself: whether it is to be taken away. Its metadata service, version 2 (IMDSv2).

http.client, because the service is on the link to the machine: no proxy of the environment may get the token.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import ConfigurationError, ThunderAgentError

ENDPOINT: Final = "http://169.254.169.254"
VARIABLE: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The variable by which the SDK and we are told of another place."""

TIMEOUT_S: Final = 1.0
"""Longest wait for an answer; it comes within milliseconds, or never."""

TOKEN_S: Final = 21600
"""How long a token is good for; a new one is asked for a tenth before."""

LARGEST: Final = 4096
_ENDS: Final = frozenset({"Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated"})
"""States of Auto Scaling in which the machine does not run."""


class MetadataUnavailable(ThunderAgentError):
    """The metadata service did not answer, or does not want to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the instance tells of its future.

    `leaves` says why it will not be there much longer; None: it stays. `at_risk`: EC2 recommends to move away, which
    it may do hours before anything happens, if something does.
    """

    leaves: str | None = None
    at_risk: bool = False


class Metadata:
    """The service of this instance. For one thread.

    Args:
        endpoint: its URL; None: that of the environment, else the usual one.
        timeout_s: longest wait for one answer.
        monotonic: the clock of the token's age.

    Raises:
        ConfigurationError: the endpoint is no http URL.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        self.endpoint = endpoint or os.environ.get(VARIABLE) or ENDPOINT
        parts = urlsplit(self.endpoint)
        try:
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            self._host = ""
        if parts.scheme != "http" or not self._host:
            raise ConfigurationError(f"{VARIABLE} is {self.endpoint!r}; write for example {ENDPOINT}")
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._token = ""
        self._token_until = 0.0

    def look(self) -> Outlook:
        """Ask the instance.

        Raises:
            MetadataUnavailable: there is no answer, or it is a refusal; the message has the remedy.
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
            status, text = self._ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._fresh()})
            if status != 401:
                break
            self._token = ""  # an instance that was stopped and started has forgotten it
        if status == 200:
            return text
        if status == 404:
            return None
        raise MetadataUnavailable(self._refusal(status))

    def _fresh(self) -> str:
        if not self._token or self._monotonic() >= self._token_until:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S), "Content-Length": "0"}
            status, text = self._ask("PUT", "/latest/api/token", wanted)
            if status != 200 or not text.strip().isprintable():
                raise MetadataUnavailable(self._refusal(status))
            self._token, self._token_until = text.strip(), self._monotonic() + TOKEN_S * 0.9
        return self._token

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
    """What is in store for a spot instance, for people; what cannot be read is no less of a notice."""
    try:
        told: Any = json.loads(text)
        return f"{told['action']} at {told['time']}"
    except (ValueError, LookupError, TypeError):
        return " ".join(text.split())[:200]
