"""The thread that tries the API of this agent's region every half minute, and those of other regions less often.

The region authority goes by its judgement of its own region: a region that its users cannot use should not have the
grant. It has its own thread and event loop, so no handler can hold it up.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.fleet_events import CanaryBlind, CanaryDown, CanaryProbed, CanaryTokenEnds, CanaryUp
from thunderagent.model.pacing import jittered
from thunderagent.regions.hysteresis import Hysteresis
from thunderagent.websocket_api.canary.probe import BUDGET_S, Prober, ProbeResult, Unjudged
from thunderagent.websocket_api.canary.tokens import WARN_DAYS

CANARY_FIRST_S: Final = 2.0
"""Time between two attempts of a canary while nothing is known of its own region, so that an agent knows it soon."""

CANARY_END_S: Final = 1.0
"""Longest wait for a canary's attempt to end that was broken off."""


OTHERS: Final = 2
"""Other regions are tried at each second turn: the agent's decisions depend on its own region."""

STALE_TURNS: Final = 3
"""Age of the last attempt, in turns, at which a judgement expires: the thread hangs, or has died."""


class CanaryWatch:
    """The thread `canary`.

    Args:
        targets: URLs by name.
        prober: tries them.
        bus: gets every attempt, and targets that go down or up.
        own: the target of this agent's region; None, or not among the targets: there is none.
        every_s: seconds between two turns.
        facts: for the agent's row; the canary keeps the entry `canary` up to date.
        now: epoch seconds, for that entry.
        monotonic: the clock for the age of a judgement.
    """

    name = "canary"

    def __init__(
        self,
        targets: Mapping[str, str],
        prober: Prober,
        bus: EventBus,
        *,
        own: str | None = None,
        every_s: float = 30.0,
        facts: dict[str, Any] | None = None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        self._targets = dict(targets)
        self._prober = prober
        self._bus = bus
        self._own = own if own in targets else None
        self._every_s = every_s
        self._facts = facts if facts is not None else {}
        self._facts["canary"] = {}
        self._now = now
        self._monotonic = monotonic
        self._rng = random.Random()
        self._judge = Judge(targets, prober.observer)
        self._tried_at = -math.inf
        self._turns = 0
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._is_closed = False

    @property
    def has_own_target(self) -> bool:
        """Whether this agent's region is among the targets."""
        return self._own is not None

    @property
    def judged(self) -> Mapping[str, Hysteresis]:
        """The present judgement of each target."""
        return dict(self._judge.judged)

    @property
    def is_well(self) -> bool:
        """Whether this agent's region is up: two attempts in a row succeeded, no two failed since, the last is not old.

        False in the first seconds, and without an own target. A canary that cannot judge from the start says nothing
        against its region, or it would stop all regions at once.
        """
        if self._own is None:
            return False
        judged = self._judge.judged[self._own]
        if not judged.is_up and not (self._own in self._judge.blind and self._judge.is_fine(self._own)):
            return False
        return self._monotonic() - self._tried_at <= STALE_TURNS * self._every_s + BUDGET_S

    @property
    def successes(self) -> int:
        """The last successful attempts at the own region in a row; 0 when it is not well."""
        return self.judged[self._own].successes if self._own is not None and self.is_well else 0

    # The thread

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        with self._guard:
            self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)
        if self._thread is not None:
            self._thread.join(CANARY_END_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._whole())
        except asyncio.CancelledError:
            pass  # closed
        finally:
            with self._guard:
                self._running = None

    async def _whole(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._guard:
            if self._is_closed:
                return
            self._running = (asyncio.get_running_loop(), task)
        try:
            while True:
                await self.turn()
                await asyncio.sleep(self._pause_s())
        finally:
            with self._guard:
                self._running = None

    def _pause_s(self) -> float:
        is_known = self._own is None or self._own in self._judge.blind or self.judged[self._own].is_up is not None
        return jittered(self._every_s if is_known else min(CANARY_FIRST_S, self._every_s), self._rng)

    # The work

    async def turn(self) -> list[ProbeResult]:
        """Try the own region, and the others at their turn, all at once."""
        turn, self._turns = self._turns, self._turns + 1
        every = turn % OTHERS == 0 or self._own is None
        targets = {name: url for name, url in self._targets.items() if every or name == self._own}
        results = await self._prober.probe_all(targets, self._judge.versions)
        if len(targets) < len(self._targets) and any(one.refused for one in results):
            # If another region takes the token now, the region is wrong and not the token.
            results = await self._prober.probe_all(self._targets, self._judge.versions)
        for result in results:
            self._judge.take(result, self._bus)
        self._tried_at = self._monotonic()
        self._facts["canary"] = {**self._facts["canary"], **{result.target: self._entry(result) for result in results}}
        return results

    def _entry(self, result: ProbeResult) -> dict[str, Any]:
        """The entry of a target for the agent's row."""
        up = self.judged[result.target].is_up
        entry = {
            "state": {None: "unknown", True: "up", False: "down"}[up],
            "at": round(self._now(), 1),
            **result.as_data(),
        }
        return {name: value for name, value in entry.items() if name not in ("target", "steps")}


class Judge:
    """The judgement of each target after each attempt."""

    def __init__(self, targets: Iterable[str], observer: str) -> None:
        self._observer = observer
        self.judged = dict.fromkeys(targets, Hysteresis())
        self.versions: dict[str, int] = {}
        self.blind: dict[str, Unjudged] = {}
        """Why the last attempt could not judge, by target."""
        self._days: dict[str, int] = {}

    def is_fine(self, target: str) -> bool:
        """The metric: the last attempt succeeded and the target is not down.

        An attempt that could not judge counts as a success: a failure before it must not stand for ever.
        """
        judged = self.judged[target]
        return judged.is_up is not False if target in self.blind else judged.is_fine

    def take(self, result: ProbeResult, bus: EventBus) -> None:
        """Count an attempt, and emit it with what it changes."""
        target, observer, before = result.target, self._observer, self.judged[result.target]
        after = self.judged[target] = before.after(result.counts)
        self.versions[target] = result.version
        about: dict[str, Any] = {"target": target, "observer": observer}
        step = None if result.failed is None else str(result.failed)
        was_blind = self.blind.pop(target, None)
        if result.unjudged is not None:
            self.blind[target] = result.unjudged
        bus.emit(
            CanaryProbed(
                **about,
                ok=result.ok,
                healthy=self.is_fine(target),
                steps=tuple(map(str, result.steps)),
                seconds=tuple(round(seconds, 4) for seconds in result.steps.values()),
                step=step,
                reason=result.reason or None,
                unjudged=result.unjudged and str(result.unjudged),
                days_left=result.days_left,
            )
        )
        if result.unjudged is not None and result.unjudged is not was_blind:
            bus.emit(CanaryBlind(**about, unjudged=str(result.unjudged), step=str(step), reason=result.reason))
        if (days := result.days_left) is not None and days < WARN_DAYS and self._days.get(target) != math.floor(days):
            self._days[target] = math.floor(days)
            bus.emit(CanaryTokenEnds(**about, days=round(days, 2)))
        if after.is_up is before.is_up:
            return
        if after.is_up:
            bus.emit(CanaryUp(**about, successes=after.successes))
        else:
            bus.emit(CanaryDown(**about, step=str(step), reason=result.reason, failures=after.failures))
