"""One attempt of a canary at a WebSocket API: the steps of a user, within ten seconds.

Connect, authorize, ping, save a new number, read it back, close. A failure is a result that names the step and the
reason. A peer that throttles, and a canary without a good token, are no broken peer: such a result says so. Without a
token the peer is tried all the same: what took the token away may have taken the peer too.

The state of the canary's user keeps one number for each of `SLOTS` probers of each observer, and does not grow. Probers
may share a slot, and replication may bring another region's write in between: one more try tells that from a fault.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final
from zlib import crc32

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from thunderagent.model.canary_targets import is_region
from thunderagent.model.clock import since_boot
from thunderagent.model.pacing import Backoff
from thunderagent.model.rows import is_number
from thunderagent.streams.connection.endpoint import Endpoint
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.resolver import Resolver
from thunderagent.streams.connection.transport import abort_connection, open_connection
from thunderagent.websocket_api.canary.exchange import Conversation, Throttled, Unexpected
from thunderagent.websocket_api.canary.tokens import Tokens, TokenUnavailable, claims_of
from thunderagent.websocket_api.protocol import MESSAGE_BYTES, Action, Kind

BUDGET_S: Final = 10.0
"""Longest time for all steps together."""

SLOTS: Final = 16
"""Numbers that the state of a canary's user keeps for each observer."""

TRIES: Final = 4
"""Numbers that an attempt saves until it reads one of them back, while others write at the same time."""

SAVES: Final = 12
"""Saves of one number until it is the first to know the version, while others write at the same time."""

TOKEN_SHARE: Final = 0.6
"""Share of an attempt's time for its token: a source that hangs must not hide a peer that is gone."""

_REFUSED: Final = (401, 403)
_UNTAKEN: Final = (*_REFUSED, 500)
"""Answers to an expired token, or to none. A local engine makes 500 of 401. On AWS, 500 is a broken authorizer, which
an expired token hides until it is replaced."""
_THROTTLED: Final = 429
_UNSENT: Final = "no token was sent; say where it comes from in THUNDERAGENT_CANARY_TOKEN_FROM"


class Step(StrEnum):
    """The steps of a probe in their order, as the metric of latencies names them."""

    TOKEN = "token"  # noqa: S105 - a step
    CONNECT = "connect"
    AUTH = "auth"
    PING = "ping"
    SET = "setState"
    GET = "getState"
    CLOSE = "close"
    RUN = "run"
    """Of the queue: from the put of its task to its end."""


class Unjudged(StrEnum):
    """Why a failed attempt says nothing about its target. The last judgement stays."""

    THROTTLED = "throttled"
    """The peer works, and takes no more for now. Clients that move to another region take their flood along."""
    TOKEN = "token"  # noqa: S105 - a reason
    """The canary has no good token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One attempt at one target."""

    target: str
    steps: Mapping[Step, float] = field(default_factory=dict)
    """Seconds of each step, in their order, with the failed one."""
    failed: Step | None = None
    reason: str = ""
    """Why it failed, and what to look at; never a secret."""
    unjudged: Unjudged | None = None
    """Why a failure does not count; None: it counts."""
    refused: bool = False
    """The peer refused the token, and the token does not say that it has expired."""
    days_left: float | None = None
    """Days until the token ends; None: unknown, or something replaces it in time."""
    region: str | None = None
    """The region that answered."""
    version: int = 0
    """Version of the canary's state afterwards; it saves the next attempt a request."""

    @property
    def ok(self) -> bool:
        """Whether every step succeeded."""
        return self.failed is None

    @property
    def counts(self) -> bool | None:
        """True: for the target; False: against it; None: neither."""
        return None if self.unjudged else self.ok

    @property
    def was_let_in(self) -> bool:
        """Whether the peer accepted the token."""
        return self.ok or self.failed in (Step.PING, Step.SET, Step.GET, Step.CLOSE)

    @property
    def seconds(self) -> float:
        """Seconds of all steps together."""
        return sum(self.steps.values())

    def as_data(self) -> dict[str, Any]:
        """As plain data, for rows, replies and `--json`."""
        data: dict[str, Any] = {
            "target": self.target,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "steps": {str(step): round(seconds, 3) for step, seconds in self.steps.items()},
        }
        more = {
            "step": self.failed and str(self.failed),
            "reason": self.reason,
            "unjudged": self.unjudged and str(self.unjudged),
            "region": self.region,
        }
        return data | {name: value for name, value in more.items() if value}


class Prober:
    """Probes targets, in one event loop at a time.

    Args:
        observer: the region that probes.
        tokens: of the targets.
        who: unique among the probers of the observer, such as the name of an agent.
        budget_s: longest time of an attempt.
        context: for wss; None: the certificate authorities of the system.
        monotonic: the clock of the steps.
        now: epoch seconds, for the end of tokens.
    """

    def __init__(
        self,
        observer: str,
        tokens: Tokens,
        *,
        who: str = "",
        budget_s: float = BUDGET_S,
        context: ssl.SSLContext | None = None,
        monotonic: Callable[[], float] = since_boot,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.observer = observer
        self._tokens = tokens
        self._slot = f"{observer}.{crc32(who.encode()) % SLOTS}"
        self._budget_s = budget_s
        self._options = StreamOptions(
            open_timeout_s=budget_s,
            dns_timeout_s=budget_s / 2,
            close_timeout_s=budget_s / 5,
            max_size=2 * MESSAGE_BYTES,
            ssl=context,
        )
        self._monotonic = monotonic
        self._now = now
        self._let_in: dict[str, bool] = {}
        """Whether a target took its token the last time."""
        self._resolver = Resolver()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rng = random.Random()

    async def probe(self, target: str, url: str, *, version: int = 0) -> ProbeResult:
        """Try all steps once. A broken peer, network or token is a result.

        Args:
            target: its name.
            url: of the WebSocket.
            version: of the canary's state after the last attempt; 0: unknown.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._resolver = loop, Resolver()  # what it waits for belongs to one loop
        attempt = _Attempt(self, target, url, version)
        try:
            async with asyncio.timeout(self._budget_s):
                await attempt.run()
        except Exception as error:
            return attempt.failure(error, self._reason(error, attempt))
        finally:
            attempt.abort()
        return attempt.result()

    async def probe_all(
        self, targets: Mapping[str, str], versions: Mapping[str, int] | None = None
    ) -> list[ProbeResult]:
        """Probe several targets at once; one result for each, in their order.

        A token that no target takes is a fault of the canary.
        """
        known = versions or {}
        probes = [self.probe(target, url, version=known.get(target, 0)) for target, url in targets.items()]
        results = await asyncio.gather(*probes)
        self._let_in.update({one.target: one.was_let_in for one in results if one.was_let_in or one.refused})
        is_alone = len({*self._let_in, *targets}) < 2
        return [one if is_alone or not one.refused or any(self._let_in.values()) else _doubted(one) for one in results]

    def _reason(self, error: Exception, attempt: _Attempt) -> str:
        """The meaning of an error in a line that holds no secret and that the peer cannot make long."""
        match error:
            case TimeoutError() if attempt.left_s <= 0:
                return f"no answer: the {self._budget_s:g} s for all steps were over"
            case TokenUnavailable() | Throttled() | Unexpected():
                return str(error)
            case InvalidStatus(response=response) if response.status_code in _REFUSED or (
                attempt.is_over and response.status_code in _UNTAKEN
            ):
                self._tokens.drop(attempt.target)  # the next attempt has a new one
                why = "the token is over, or not one for this API" if attempt.token else _UNSENT
                if attempt.is_over:
                    why = "the token is over: replace it where THUNDERAGENT_CANARY_TOKEN_FROM has it from"
                return f"refused with {response.status_code}: {why}"
            case InvalidStatus(response=response):
                # A local engine answers 500 when the authorizer refuses.
                why = f": {_UNSENT}" if response.status_code == 500 and not attempt.token else ""
                return f"the handshake was answered with {response.status_code}{why}"
            case InvalidHandshake():
                return f"the peer does not speak WebSocket: {error!s:.150}"
            case ConnectionClosed():
                end = error.rcvd or error.sent
                return f"the peer ended the connection ({f'code {end.code}' if end else 'without a close'})"
            case TimeoutError(__cause__=TimeoutError() as cause) if str(cause):  # such as that of a name
                return f"TimeoutError: {cause!s:.150}"
            case _:
                return f"{type(error).__name__}: {error!s:.150}"


class _Attempt:
    """One attempt under way."""

    def __init__(self, prober: Prober, target: str, url: str, version: int) -> None:
        self._prober = prober
        self.target = target
        self._url = url
        self._version = version
        self._begun = self._since = prober._monotonic()
        self._step = Step.TOKEN
        self._steps: dict[Step, float] = {}
        self._connection: ClientConnection | None = None
        self._region: str | None = None
        self.token: str | None = None
        self._lacking: Exception | None = None
        """Why there is no token."""

    @property
    def is_over(self) -> bool:
        """Whether the token says that it has expired."""
        ends_at = claims_of(self.token or "").get("exp")
        return is_number(ends_at) and ends_at <= self._prober._now()

    @property
    def left_s(self) -> float:
        """Seconds of the budget."""
        return self._prober._budget_s - (self._prober._monotonic() - self._begun)

    def failure(self, error: Exception, reason: str) -> ProbeResult:
        """The result of a failed attempt."""
        failed, status = self.failing(error), error.response.status_code if isinstance(error, InvalidStatus) else None
        unjudged = None
        if isinstance(error, Throttled) or status == _THROTTLED:
            unjudged = Unjudged.THROTTLED
        elif error is self._lacking or (status in _UNTAKEN and (self._lacking is not None or self.is_over)):
            unjudged = Unjudged.TOKEN
        if self._lacking is not None:
            lacks = self._prober._reason(self._lacking, self)
            self._note(failed)
            failed, reason = (Step.TOKEN, lacks) if unjudged is Unjudged.TOKEN else (failed, f"{reason}; {lacks}")
        is_refused = status in _REFUSED and self.token is not None and unjudged is None
        return replace(self.result(failed=failed, reason=reason), unjudged=unjudged, refused=is_refused)

    def result(self, *, failed: Step | None = None, reason: str = "") -> ProbeResult:
        """The result."""
        if failed is not None:
            self._note(failed)
        days = (
            None if self.token is None else self._prober._tokens.days_left(self.target, self.token, self._prober._now())
        )
        return ProbeResult(
            target=self.target,
            steps=self._steps,
            failed=failed,
            reason=reason,
            days_left=days,
            region=self._region,
            version=self._version,
        )

    def failing(self, error: Exception) -> Step:
        """The step of an error."""
        return Step.AUTH if isinstance(error, InvalidStatus) and self._step is Step.CONNECT else self._step

    def abort(self) -> None:
        """Abort the connection."""
        if self._connection is not None:
            abort_connection(self._connection)

    async def run(self) -> None:
        """Do all steps; a failing step raises."""
        prober = self._prober
        with self._during(Step.TOKEN):
            await self._get_token(TOKEN_SHARE * prober._budget_s)
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        self._step = Step.CONNECT
        endpoint = Endpoint(self._url, headers=headers)
        self._connection = connection = await open_connection(
            endpoint, prober._options, prober._resolver, reached=self._reached
        )
        self._note(Step.AUTH)
        if self._lacking is not None:
            raise self._lacking  # the peer works, and asks for no token
        talk = Conversation(connection)
        with self._during(Step.PING):
            self._region = _region(await talk.ask(Action.PING, Kind.PONG))
            if is_region(self.target) and self._region not in (None, self.target):
                raise Unexpected(
                    f"the region {self._region} answered in its place: give the URL of the API in {self.target}, not a "
                    "name that follows a failover"
                )
        await self._keep_a_number(talk)
        with self._during(Step.CLOSE):
            await connection.close()
            if connection.protocol.close_rcvd is None:
                raise Unexpected("the peer did not answer the close")

    async def _get_token(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                self.token = await self._prober._tokens.get(self.target)
        except TimeoutError:
            self._lacking = TokenUnavailable(f"no token within {within_s:g} s")
        except Exception as error:  # the peer is tried all the same
            self._lacking = error

    async def _keep_a_number(self, talk: Conversation) -> None:
        """Save a number and read it back; try again if others write at the same time."""
        for left in reversed(range(TRIES)):
            number = secrets.token_hex(16)
            with self._during(Step.SET):
                await self._save(talk, number, may_wait=left > 0)
            with self._during(Step.GET):
                if await self._is_kept(talk, number, may_differ=left > 0):
                    return

    async def _save(self, talk: Conversation, number: str, *, may_wait: bool) -> None:
        change = str(uuid.uuid4())
        patch = {"canary": {self._prober._slot: number}}
        for pause in range(SAVES):
            answer = await talk.ask(
                Action.SET_STATE, Kind.SAVED, Kind.CONFLICT, version=self._version, patch=patch, change=change
            )
            self._version = _version(answer)
            if answer["type"] == Kind.SAVED:
                return
            if pause:  # the first conflict only tells the version
                await asyncio.sleep(Backoff(base_s=0.01, cap_s=0.5).delay(pause, self._prober._rng))
        raise Unexpected(f"{SAVES} times in a row another client saved first: give the canary a user of its own")

    async def _is_kept(self, talk: Conversation, number: str, *, may_differ: bool) -> bool:
        answer = await talk.ask(Action.GET_STATE, Kind.STATE, known_version=self._version)
        version, before = _version(answer), self._version
        state = answer.get("state")
        canary = state.get("canary") if isinstance(state, dict) else None
        kept = canary.get(self._prober._slot) if isinstance(canary, dict) else None
        self._version = version
        if kept == number:
            return True
        if version == before:
            raise Unexpected("what is read is not what was saved: another number, under the same version")
        if may_differ:
            return False
        if version < before:
            raise Unexpected(f"version {before} was saved and version {version} is read: what is saved gets lost")
        raise Unexpected("each time another client saved in between: give the canary a user of its own")

    def _reached(self) -> None:
        """TCP and TLS are done; the handshake with its authorizer follows."""
        self._note(Step.CONNECT)
        self._step = Step.AUTH

    @contextmanager
    def _during(self, step: Step) -> Iterator[None]:
        self._step, self._since = step, self._prober._monotonic()
        yield
        self._note(step)

    def _note(self, step: Step) -> None:
        """Add the time since the last note to a step, which may come more than once."""
        now = self._prober._monotonic()
        self._steps[step] = self._steps.get(step, 0.0) + now - self._since
        self._since = now


def _doubted(result: ProbeResult) -> ProbeResult:
    reason = f"{result.reason}; no other API takes the canary's token either, so it is the token that is wrong"
    return replace(result, unjudged=Unjudged.TOKEN, reason=reason)


def _region(answer: Mapping[str, Any]) -> str | None:
    region = answer.get("region")
    return region[:64] if isinstance(region, str) else None


def _version(answer: Mapping[str, Any]) -> int:
    version = answer.get("version")
    if type(version) is not int or version < 0:
        raise Unexpected(f"the answer {answer['type']!r} has no version")
    return version
