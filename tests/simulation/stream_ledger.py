"""The rules of streams as an observer sees them: every call of a handler and every write, in one order.

Nothing here is taken from the code under test but the words of its rows: places are compared as `(epoch, number)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreRejected
from thunderagent.model.task import Row, Status
from thunderagent.stores.engine import Applied, Engine
from thunderagent.streams.context import LOOP_LATE_S, StreamContext
from thunderagent.streams.journal import Missed
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import FaultyEngine

Place = tuple[int, int]
"""The number of an epoch, and a number in it."""

SETTLES: Final = ("succeed", "retry", "snooze", "release", "fail", "close", "stop")
CLEAN: Final = ("release", "stop", "close", "hand over")
"""Verbs after which nothing may be handled again that was handled before."""
CLAIMS: Final = ("claim", "take over")
TICK_S: Final = 1.5
"""How late the heartbeat may find out that a stream makes no progress."""


def place_of(cursor: Mapping[str, Any] | None) -> Place | None:
    """The place of an attribute `lastSeq`, or of a message."""
    if not cursor:
        return None
    return int(str(cursor["epoch"]).rpartition("-")[2]), int(cursor["seq"])


@dataclass(eq=False)
class Holder:
    """A process as the ledger knows it."""

    name: str
    is_alive: bool = True
    is_paused: bool = False
    stood_at: float = float("-inf")
    """When it, or its event loop, last stood still: then it cannot close a connection."""
    disturbed_at: float = float("-inf")
    """When it was last killed, stood still, blocked its loop, or had no store or a slow one."""
    late_at: float = float("-inf")
    """When what it sends was last on its way for long."""
    loop_ran_at: float = 0.0
    open_connections: Callable[[str], int] = lambda task: 0


@dataclass(eq=False)
class Call:
    """One call of a handler."""

    task: str
    fence: int
    place: Place
    holder: Holder
    began: float
    ended_at: float = float("inf")
    """When it came to its end well."""


@dataclass(eq=False)
class Run:
    """What one fence of a task has handled."""

    holder: Holder
    began: float
    """When its fence was won."""
    context: StreamContext
    last: Place | None = None
    """The last place at which a call began, or a snapshot was taken."""
    done: Place | None = None
    """The last place whose call came to its end."""
    broken: bool = False
    """A call did not come to its end."""
    gaps: list[Missed] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Those that have ended well."""


class Ledger:
    """All calls of all handlers, judged as they come."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.calls: list[Call] = []
        self.runs: dict[tuple[str, int], Run] = {}
        self.violations: list[str] = []
        self.most: dict[str, Place] = {}
        """By task: the furthest place that was handled, or read in a snapshot."""
        self.by: dict[tuple[str, Place], Run] = {}
        """The run that handled a place last."""
        self.clean: dict[str, Place] = {}
        """By task: where a run ended that leaves nothing to be handled again."""
        self.cursors: dict[str, Place | None] = {}
        self.claimed: dict[tuple[str, int], float] = {}
        self.open_calls: list[Call] = []
        """Calls that are under way."""
        self._fences: dict[str, int] = {}

    def blame(self, text: str) -> None:
        """A rule is broken."""
        self.violations.append(f"at {self.clock.monotonic() - 1000:.3f} s: {text}")

    # Calls

    def begin(self, holder: Holder, context: StreamContext, place: Place) -> Call:
        """A handler is called."""
        task, fence = context.task_id, context.fence
        run = self._run(holder, context)
        what = f"{task} fence {fence} at {place} by {holder.name}"
        if not holder.is_alive or holder.is_paused:
            self.blame(f"the simulation is wrong: {what} is called by a process that does not run")
        if run.holder is not holder:
            self.blame(f"two owners under one fence: {what}, and {run.holder.name}")
        if fence < self._fences.get(task, 0):
            self.blame(f"a call after one of a later fence: {what}, after fence {self._fences[task]}")
        self._fences[task] = max(fence, self._fences.get(task, 0))
        for call in self.open_calls:
            if call.task == task and call.holder.disturbed_at < call.began:
                self.blame(f"a call while another is under way: {what}, and fence {call.fence} at {call.place}")
        self._check_place(run, context, place, what)
        run.last = place
        call = Call(task, fence, place, holder, self.clock.monotonic())
        self.calls.append(call)
        self.open_calls.append(call)
        self.by[task, place] = run
        self.most[task] = max(place, self.most.get(task, place))
        return call

    def end(self, call: Call, *, well: bool) -> None:
        """A call is over; not `well`: the handler raised or was cancelled in it."""
        self.open_calls.remove(call)
        run = self.runs[call.task, call.fence]
        if well:
            call.ended_at, run.done = self.clock.monotonic(), call.place
            run.calls.append(call)
        else:
            run.broken = True

    def died(self, holder: Holder) -> None:
        """Nothing of what this process had begun goes on."""
        self.open_calls = [call for call in self.open_calls if call.holder is not holder]

    def snapshot(self, holder: Holder, context: StreamContext, place: Place) -> None:
        """The handler has read the state anew, everything up to this place included."""
        run = self._run(holder, context)
        run.last = max(place, run.last or place)
        self.most[context.task_id] = max(place, self.most.get(context.task_id, place))

    def _run(self, holder: Holder, context: StreamContext) -> Run:
        key = context.task_id, context.fence
        if key not in self.runs:
            self.runs[key] = Run(holder, self.claimed.get(key, 0.0), context)
        return self.runs[key]

    def _check_place(self, run: Run, context: StreamContext, place: Place, what: str) -> None:
        gaps = list(context.journal._gaps)
        run.gaps = gaps
        before = run.last
        if before is None:
            before = place_of(None if context.cursor is None else context.cursor.to_map())
        elif place <= before:
            self.blame(f"handled twice under one fence: {what}, after {before}")
        if before is not None and place != (before[0], before[1] + 1) and place > before:
            known = [place_of(gap.before) for gap in gaps]
            if place not in known:
                self.blame(f"skipped without a record: {what}, after {before}; gaps to {known}")
        self._check_repetition(context, place, what)

    def _check_repetition(self, context: StreamContext, place: Place, what: str) -> None:
        task = context.task_id
        before = self.by.get((task, place))
        if before is None or before.context is context:
            return
        saved, clean = self.cursors.get(task), self.clean.get(task)
        if saved is not None and place <= saved:
            self.blame(f"handled again though the saved cursor is {saved}: {what}")
        if clean is not None and place <= clean:
            self.blame(f"handled again after a clean end at {clean}: {what}")
        if not before.broken and before.holder.disturbed_at < before.began:
            self.blame(f"handled again though nothing happened to {before.holder.name}: {what}")


class Watch(FaultyEngine):
    """An engine in front of the real one that looks at each write that is really done."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        super().__init__(engine)
        self.ledger = ledger
        self.actor: Holder | None = None
        self.exclusive: Callable[[str], bool] = lambda task: True
        self.is_stream: Callable[[str], bool] = lambda task: False
        self.handler_timeout_s = 60.0
        self.lease_s = 0.0
        self.sent = 0.0
        """When the request that is carried out now was sent."""
        self.newer: dict[str, Row] = {}
        """Rows of a newer version."""
        self.newer_wish = ""
        """A value of `desiredState` that only newer versions know."""
        self.never: Callable[[Write], bool] = lambda write: False
        """Writes of streams that the store does not take, now or later."""
        self._refused: set[str] = set()
        """Streams whose last renewal was refused."""
        self._renewed: dict[str, float] = {}
        self._offers: dict[tuple[str, str], int] = {}
        self._owners: dict[tuple[str, int], str] = {}

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return [self._look(write) for write in batch]

    def put_newer(self, row: Row) -> None:
        """An agent of a newer version puts a row."""
        if self._engine.put([row])[0].won:
            self.newer[row["taskId"]] = row

    def _look(self, write: Write) -> Applied:
        if not self.is_stream(write.task_id):
            [answer] = self._engine.apply([write])
            before = self.newer.get(write.task_id)
            if before is not None and answer.won and not str(before["status"]).startswith(Status.PENDING):
                self.ledger.blame(f"a row of a newer version is changed: {write}")
            return answer
        if self.never(write):
            if write.verb == "renew":
                self._refused.add(write.task_id)
            return Applied(won=False, error=StoreRejected("the row is too large"))
        before = self._engine.get([write.task_id]).get(write.task_id, {})
        [answer] = self._engine.apply([write])
        if answer.won and answer.row is not None:
            self._check(write, before, answer.row)
        return answer

    def _check(self, write: Write, before: Row, after: Row) -> None:
        ledger, task, verb = self.ledger, write.task_id, write.verb
        actor = self.actor
        old, new = place_of(before.get("lastSeq")), place_of(after.get("lastSeq"))
        who = f"{verb} of {task} by {actor.name if actor else 'a client'}"
        ledger.cursors[task] = new
        if "key" in (kept := after.get("lastSeq") or {}):
            others = [place_of(other) for other in kept.get("others", {}).values()]
            if others != [new]:
                ledger.blame(f"the place of one key is {new}, and of the other one {others}: {who}")
        if old is not None and (new is None or new < old):
            ledger.blame(f"the cursor went back from {old} to {new}: {who}")
        if actor is None:
            return
        if not actor.is_alive or actor.is_paused:
            ledger.blame(f"the simulation is wrong: {who}, which does not run")
        if before.get("desiredState") == self.newer_wish != after.get("desiredState"):
            ledger.blame(f"a wish of a newer version is taken back: {who}")
        fence: int = before["fence"]
        if verb == "take over" and (held_s := ledger.clock.monotonic() - self._renewed[task]) < self.lease_s:
            ledger.blame(f"a lease is taken {held_s:.1f} s after it was renewed: {who}")
        if verb in CLAIMS or verb == "renew":
            self._renewed[task] = self.sent
        if verb in CLAIMS:
            if after["fence"] <= fence or (task, after["fence"]) in self._owners:
                ledger.blame(f"no new fence: {who} under {after['fence']}")
            self._owners[task, after["fence"]] = actor.name
            ledger.claimed[task, after["fence"]] = ledger.clock.monotonic()
        elif verb == "offer":
            self._offers[task, actor.name] = fence
        elif verb == "renew":
            self._check_renewal(actor, task, fence, new, who)
        elif verb == "fail" and "errors" not in write.set:
            return  # the store did not take the outcome, and thus no cursor
        elif verb in SETTLES or verb == "hand over":
            fence = self._offers.get((task, actor.name), fence) if verb == "hand over" else fence
            self._check_end(actor, task, fence, new, who, clean=verb in CLEAN)

    def _check_renewal(self, actor: Holder, task: str, fence: int, new: Place | None, who: str) -> None:
        now = self.ledger.clock.monotonic()
        if now - actor.late_at < TICK_S:  # it may have been sent before the process stood still
            return
        if now - actor.loop_ran_at > LOOP_LATE_S + TICK_S:
            self.ledger.blame(
                f"renewed though the event loop has stood still for {now - actor.loop_ran_at:.1f} s: {who}"
            )
        run = self.ledger.runs.get((task, fence))
        done = [call.place for call in run.calls if call.ended_at < now - TICK_S] if run is not None else []
        is_bare = task in self._refused  # with a cursor the store did not take it
        self._refused.discard(task)
        if done and not is_bare and (new is None or new < max(done)):
            self.ledger.blame(f"renewed with the cursor {new} though {max(done)} was handled: {who}")
        for call in self.ledger.open_calls:
            stuck = (call.task, call.fence) == (task, fence) and now - call.began > self.handler_timeout_s + TICK_S
            if stuck and actor.disturbed_at < call.began:
                self.ledger.blame(f"renewed though the handler hangs since {now - call.began:.1f} s: {who}")

    def _check_end(self, actor: Holder, task: str, fence: int, new: Place | None, who: str, *, clean: bool) -> None:
        ledger = self.ledger
        if (open_now := actor.open_connections(task)) and self.exclusive(task):
            ledger.blame(f"{open_now} connections are open at the end: {who}")
        run = ledger.runs.get((task, fence))
        if run is None or run.done is None:
            return
        if new != run.done:
            ledger.blame(f"the run has handled up to {run.done}, and the cursor is {new}: {who}")
        if clean:
            ledger.clean[task] = max(run.done, ledger.clean.get(task, run.done))
