"""Options of a connection, with their defaults, checked all at once."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from thunderagent.model.arguments import choice_problem, seconds_problem, whole_problem
from thunderagent.model.errors import ConfigurationError
from thunderagent.streams.connection.ending import ConnectionEnd
from thunderagent.streams.connection.verdicts import PROFILES, Profile, Verdict, profile_named, verdict_of

OnFull = Literal["pause", "drop_oldest", "fail"]
Restart = Literal["accept", "fail"]
MOST: Final = 2**40
_OPTIONAL: Final = ("ping_interval_s", "idle_timeout_s", "max_connection_age_s")
_OVER_ZERO: Final = (
    "open_timeout_s",
    "subscribe_timeout_s",
    "close_timeout_s",
    "dns_timeout_s",
    "max_size",
    "backoff_base_s",
    "backoff_cap_s",
    "stable_after_s",
    "stable_after_messages",
    "ping_interval_s",
    "pong_misses",
    "idle_timeout_s",
    "max_pending",
    "max_pending_bytes",
    "handler_timeout_s",
    "max_connection_age_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How connections are opened, watched, buffered and replaced.

    Raises:
        ConfigurationError: the options cannot work; all problems are listed.
    """

    open_timeout_s: float = 10.0
    """For TCP, TLS and the handshake together."""
    subscribe_timeout_s: float = 10.0
    """For `on_open`."""
    close_timeout_s: float = 2.0
    """Longest wait for the peer's answer to our close; then the connection is cut."""
    dns_timeout_s: float = 5.0
    """For the lookup of the name, at each attempt."""
    max_size: int = 2**20
    """Largest message in bytes; a larger one ends the connection with 1009."""
    ssl: ssl.SSLContext | None = field(default=None, repr=False)
    """For wss; None takes one context for the whole process, with the certificate authorities of the system."""
    proxy: str | bool = True
    """True: from the environment; False: none; or its URL."""
    compression: bool = False
    """Offer permessage-deflate: fewer bytes, for 44 to 68 KiB a connection and twice the time to read a message."""
    require_subprotocol: bool = False
    """Refuse a peer that chose none of the endpoint's subprotocols."""
    backoff_base_s: float = 0.5
    """Longest random delay before the first retry; doubles with each."""
    backoff_cap_s: float = 60.0
    """Longest random delay before any retry."""
    stable_after_s: float = 30.0
    """Age of a connection at which delays and counts of failures start again."""
    stable_after_messages: int = 100
    """As `stable_after_s`, in messages handled since the last failure."""
    profile: str = "generic"
    """What close codes mean: generic, apigateway, pusher, centrifugo, discord or graphql_ws."""
    classify: Callable[[ConnectionEnd], Verdict | None] | None = None
    """Decides before the profile; its None leaves the verdict to the profile."""
    ping_interval_s: float | None = 15.0
    """Time between pings; None: no pings."""
    pong_misses: int = 2
    """Unanswered pings after which a connection is cut; only time spent listening counts."""
    only_pongs_count: bool = False
    """Messages do not count as an answer to a ping."""
    idle_timeout_s: float | None = None
    """Silence after which a connection is cut, though pings are answered; None: silence is fine."""
    max_pending: int = 256
    """Messages that wait for the handler."""
    max_pending_bytes: int = 8 * 2**20
    """As `max_pending`, in bytes."""
    on_full: OnFull = "pause"
    """"pause": read no more until the handler has caught up; "drop_oldest": a gap; "fail": FAILED."""
    handler_timeout_s: float = 60.0
    """Longest time of the handler for one message; then the stream goes to another agent."""
    max_connection_age_s: float | None = None
    """Age at which a connection is replaced, less up to a tenth; None takes the profile's."""
    contiguous: bool = True
    """Positions grow by one, so that a jump is a gap."""
    restart: Restart | None = None
    """A new connection begins behind the last place of the same epoch. None: duplicates, with a warning; "accept": the
    peer counts from its beginning, a gap; "fail": FAILED."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigurationError(
                "these stream options cannot work:\n" + "\n".join(f"  - {one}" for one in problems)
            )

    @property
    def age_limit_s(self) -> float | None:
        """Age at which a connection is replaced: the option, else the profile's."""
        return self.max_connection_age_s or self._profile.max_connection_age_s

    @property
    def _profile(self) -> Profile:
        return profile_named(self.profile)

    def verdict(self, end: ConnectionEnd) -> Verdict:
        verdict = self.classify(end) if self.classify else None
        if verdict is None:
            return verdict_of(end, self._profile)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"classify answered with {verdict!r}; it is to be a Verdict or None")
        return verdict

    def _problems(self) -> Iterator[str]:
        problems = [
            *map(self._number_problem, _OVER_ZERO),
            choice_problem("on_full", self.on_full, ("pause", "drop_oldest", "fail")),
            None if self.restart is None else choice_problem("restart", self.restart, ("accept", "fail")),
            choice_problem("profile", self.profile, PROFILES),
        ]
        yield from filter(None, problems)
        backoff = ("backoff_base_s", "backoff_cap_s")
        if not any(map(self._number_problem, backoff)) and self.backoff_base_s > self.backoff_cap_s:
            yield f"backoff_base_s is {self.backoff_base_s:g}, over backoff_cap_s, which is {self.backoff_cap_s:g}"

    def _number_problem(self, name: str) -> str | None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return None
        if name.endswith("_s"):
            return seconds_problem(name, value, least=1e-9)
        return whole_problem(name, value, least=1, most=MOST)
