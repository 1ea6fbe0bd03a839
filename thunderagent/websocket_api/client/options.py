"""The options of a client, and its verdict on the end of a connection."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from thunderagent.model.errors import ConfigurationError
from thunderagent.streams.connection.ending import Cause, ConnectionEnd
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.verdicts import RETRY, SPREAD, Verdict

CONNECTS_A_SECOND: Final = 500.0
"""New connections a second that API Gateway takes for an account in a region, unless a quota was raised.

https://docs.aws.amazon.com/apigateway/latest/developerguide/apigateway-execution-service-websocket-limits-table.html
"""

_OVER_ZERO: Final = (
    "heartbeat_s",
    "missed_pongs",
    "request_timeout_s",
    "open_timeout_s",
    "close_timeout_s",
    "backoff_base_s",
    "backoff_cap_s",
    "stable_after_s",
    "rotate_after_s",
    "max_unacknowledged",
    "max_events",
    "refusals",
)
_REFUSED_CODES: Final = frozenset({1008, 4001, 4003, 4401, 4403})
_REFUSED_STATUSES: Final = frozenset({401, 403})
_THROTTLED: Final = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client connects, watches its connection, and what it keeps.

    Raises:
        ConfigurationError: the options cannot work; lists all problems.
    """

    heartbeat_s: float = 30.0
    """Time between two pings. Each is a paid request to the API. API Gateway cuts after 10 idle minutes."""
    missed_pongs: int = 2
    """Pings without an answer that end a connection: with 2, a dead server is found within two heartbeats."""
    request_timeout_s: float = 10.0
    """Longest wait for an answer. Then the request is sent again, which changes nothing twice."""
    open_timeout_s: float = 10.0
    """Longest time for the functions of token and URL, and again for TCP, TLS and the handshake together."""
    close_timeout_s: float = 2.0
    """Longest time for the end of a connection."""
    backoff_base_s: float = 0.5
    """Upper end of the random delay before the first retry. It doubles with each retry."""
    backoff_cap_s: float = 60.0
    """Upper end of the random delay before any retry."""
    stable_after_s: float = 30.0
    """Life of a connection that counts as progress: delays and refusals begin again at 0."""
    rotate_after_s: float = 6300.0
    """Age at which a connection is replaced, less up to a tenth: API Gateway ends each after 2 h."""
    fleet: int = 1
    """Clients that lose their connections together: their first retries are spread over `fleet` / 500 s."""
    refusals: int = 20
    """Refusals of fresh tokens without progress that end the client: about 7 minutes, longer than a fail-over."""
    max_unacknowledged: int = 100
    """Changes that wait for a server; `set` refuses one more."""
    keep_acknowledged: int = 100
    """Acknowledged changes that are kept in case a server loses them."""
    keep_acknowledged_bytes: int = 1 << 20
    """The same in bytes of their JSON."""
    recheck_s: float = 60.0
    """Age of acknowledged changes, at the last answer of their region, up to which a server of another region gets them
    again: it may not have them."""
    max_events: int = 256
    """Events that wait for a slow handler; one more drops the oldest push, and an event says so."""
    ssl: ssl.SSLContext | None = field(default=None, repr=False)
    """For wss; None: the certificate authorities of the system."""
    proxy: str | bool = True
    """True: that of the environment; False: none; or its URL."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigurationError(
                "these client options cannot work:\n" + "\n".join(f"  - {one}" for one in problems)
            )

    def _problems(self) -> Iterator[str]:
        for name in _OVER_ZERO:
            if not getattr(self, name) > 0:
                yield f"{name} is {getattr(self, name)!r}; it must be over 0"
        for name in ("fleet", "keep_acknowledged", "keep_acknowledged_bytes", "recheck_s"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)!r}; it must not be below 0"
        if self.backoff_base_s > self.backoff_cap_s:
            yield f"backoff_base_s is {self.backoff_base_s:g}, over backoff_cap_s, which is {self.backoff_cap_s:g}"
        if self.rotate_after_s <= self.stable_after_s:
            yield f"rotate_after_s is {self.rotate_after_s:g}; it must be over stable_after_s, {self.stable_after_s:g}"

    @property
    def streaming(self) -> StreamOptions:
        """The options of the connection."""
        return StreamOptions(
            open_timeout_s=self.open_timeout_s,
            subscribe_timeout_s=self.request_timeout_s,
            close_timeout_s=self.close_timeout_s,
            dns_timeout_s=min(5.0, self.open_timeout_s),
            ssl=self.ssl,
            proxy=self.proxy,
            backoff_base_s=self.backoff_base_s,
            backoff_cap_s=self.backoff_cap_s,
            stable_after_s=self.stable_after_s,
            profile="apigateway",
            classify=self.verdict,
            ping_interval_s=self.heartbeat_s,
            pong_misses=self.missed_pongs,
            only_pongs_count=True,
            max_connection_age_s=self.rotate_after_s,
        )

    def verdict(self, end: ConnectionEnd) -> Verdict | None:
        """The verdict on an end; None: that of the profile of API Gateway.

        A failing region may answer anything, and the next attempt may reach another region. So only a configuration
        that cannot work ends the client at once.
        """
        if is_refusal(end):
            return Verdict(refresh=True, fatal_after=self.refusals, fatal_after_s=0.0)
        if end.status == _THROTTLED:  # all clients come back at once: the short first delays of RETRY are in vain
            return SPREAD
        if end.status is not None and 400 <= end.status < 500:
            return Verdict(fatal_after=self.refusals, fatal_after_s=0.0)
        if end.cause in (Cause.CONFIGURATION, Cause.TOO_BIG):
            return None
        return None if end.cause in (Cause.ROTATED, Cause.ASKED) or end.code in (1012, 1013) else RETRY


def is_refusal(end: ConnectionEnd) -> bool:
    """Whether the peer refused the credentials."""
    if end.cause is Cause.HTTP:
        return end.status in _REFUSED_STATUSES
    return end.cause is Cause.CLOSED and end.code in _REFUSED_CODES
