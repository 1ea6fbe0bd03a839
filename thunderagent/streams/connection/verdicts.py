"""What to do after an end: one table for each profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from thunderagent.model.errors import ConfigurationError
from thunderagent.streams.connection.ending import Cause, ConnectionEnd

REFUSED_S: Final = 300.0
"""Shortest time of refusals that end a stream: a restarting peer refuses for a minute or two."""
UNKNOWN_S: Final = 900.0
"""As `REFUSED_S`, for ends that may or may not pass."""


class Pace(StrEnum):
    AT_ONCE = "at once"
    """The end was ours, and planned."""
    RETRY = "retry"
    """Full jitter under a ceiling that doubles."""
    SPREAD = "spread"
    """5 to 30 s: the peer restarts, and all its clients come back."""
    SLOW = "slow"
    """30 s or more, or Retry-After, up to an hour: the peer is overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do after an end."""

    pace: Pace = Pace.RETRY
    refresh: bool = False
    """The endpoint function learns that the credentials were not accepted."""
    fatal_after: int | None = None
    """Refusals in a row that end the stream as FAILED; 1: at once; None: never. A handled message and an end that is no
    refusal end the row."""
    fatal_after_s: float = REFUSED_S
    """Shortest time of such a row."""

    def is_fatal(self, refusals: int, lasted_s: float) -> bool:
        """True when so many refusals in a row, over so many seconds, end the stream."""
        if self.fatal_after is None or refusals < self.fatal_after:
            return False
        return self.fatal_after == 1 or lasted_s >= self.fatal_after_s


RETRY: Final = Verdict()
PLANNED: Final = Verdict(pace=Pace.AT_ONCE)
SPREAD: Final = Verdict(pace=Pace.SPREAD)
SLOW: Final = Verdict(pace=Pace.SLOW)
REFRESH: Final = Verdict(refresh=True, fatal_after=3)
BROKEN: Final = Verdict(fatal_after=3)
UNKNOWN: Final = Verdict(fatal_after=10, fatal_after_s=UNKNOWN_S)
FATAL: Final = Verdict(fatal_after=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The table of one kind of peer: by close code, HTTP status and cause."""

    codes: Mapping[int, Verdict] = field(default_factory=dict)
    statuses: Mapping[int, Verdict] = field(default_factory=dict)
    causes: Mapping[Cause, Verdict] = field(default_factory=dict)
    other_code: Callable[[int], Verdict] = lambda code: UNKNOWN
    max_connection_age_s: float | None = None
    """Age at which the connection is replaced, before the peer ends it."""


GENERIC: Final = Profile(
    codes={
        **dict.fromkeys((1000, 1001, 1005, 1006, 1011, 1014), RETRY),
        **dict.fromkeys((1002, 1003, 1007, 1010), BROKEN),
        1008: REFRESH,
        1009: Verdict(fatal_after=2),
        1012: SPREAD,
        1013: SLOW,
    },
    statuses={
        **dict.fromkeys((401, 403), REFRESH),
        **dict.fromkeys((429, 503), SLOW),
        **dict.fromkeys((408, 425, 500, 502, 504), RETRY),
    },
    causes={
        Cause.NETWORK: RETRY,
        Cause.ZOMBIE: RETRY,
        Cause.IDLE: RETRY,
        Cause.ROTATED: PLANNED,
        Cause.ASKED: PLANNED,
        Cause.TLS: BROKEN,
        Cause.PROTOCOL: BROKEN,
        Cause.TOO_BIG: Verdict(fatal_after=2),
        Cause.ENDPOINT: UNKNOWN,
        Cause.SUBSCRIBE: UNKNOWN,
        Cause.CONFIGURATION: FATAL,
        Cause.INTERNAL: UNKNOWN,
    },
)


def _range(low: int, high: int, verdict: Verdict) -> dict[int, Verdict]:
    return dict.fromkeys(range(low, high), verdict)


PROFILES: Final[Mapping[str, Profile]] = {
    "generic": GENERIC,
    # https://docs.aws.amazon.com/apigateway/latest/developerguide/limits.html: a connection lives 2 h, is cut off after
    # 10 idle minutes with 1001, and a message over 128 KB ends it with 1009.
    "apigateway": Profile(max_connection_age_s=6300.0),
    # https://pusher.com/docs/channels/library_auth_reference/pusher-websockets-protocol: 4000-4099 do not come back,
    # 4100-4199 after a pause, 4200-4299 at once.
    "pusher": Profile(codes={**_range(4000, 4100, FATAL), **_range(4100, 4200, SLOW), **_range(4200, 4300, RETRY)}),
    # https://centrifugal.dev/docs/server/codes: 3500-3999 and 4500-4999 are terminal.
    "centrifugo": Profile(codes={**_range(3500, 4000, FATAL), **_range(4500, 5000, FATAL), 3014: REFRESH}),
    # https://discord.com/developers/docs/topics/opcodes-and-status-codes: 4004 and 4010-4014 do not come back.
    "discord": Profile(codes={4004: REFRESH, **_range(4010, 4015, FATAL), 4008: SLOW}, other_code=lambda code: RETRY),
    # https://github.com/enisdenjo/graphql-ws/blob/master/PROTOCOL.md
    "graphql_ws": Profile(
        codes={
            **dict.fromkeys((4004, 4005, 4400, 4406, 4409, 4429, 4500), BROKEN),
            **dict.fromkeys((4401, 4403), REFRESH),
        }
    ),
}


def profile_named(name: str) -> Profile:
    """The profile of this name.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ConfigurationError(f"there is no profile {name!r}; known are: {', '.join(PROFILES)}") from None


def verdict_of(end: ConnectionEnd, profile: Profile) -> Verdict:
    """The verdict of a profile, else that of `generic`."""
    for table in (profile, GENERIC):
        if end.status is not None and end.status in table.statuses:
            return table.statuses[end.status]
        if end.cause is Cause.CLOSED and end.code is not None and end.code in table.codes:
            return table.codes[end.code]
        if end.cause in table.causes:
            return table.causes[end.cause]
    if end.status is not None:  # a redirect that cannot be followed, 400, 404, 410, …: 500 and over may pass
        return BROKEN if end.status < 500 else RETRY
    return profile.other_code(end.code or 1006)
