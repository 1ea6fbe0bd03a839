"""The health of an agent, judged by its progress. Pure: `vitals.py` collects the facts.

* `alive`: its threads make progress. A watchdog restarts an agent that is not alive. An agent without its store is
  alive, since a new process would not reach the store either.
* `healthy`: it is alive, its store answers, and it takes the work that there is. Alarms ask this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

WEDGED_S: Final = 300.0
"""A thread without progress for so long is stuck: no call to a store takes that long, however it fails."""

DEAD_S: Final = 3.0
"""Intervals without a sign of life after which an agent is taken for gone."""

ANNOUNCE_S: Final = 15.0
"""Time between two renewals of an agent's row."""

SILENT_S: Final = DEAD_S * ANNOUNCE_S
"""The same in seconds, for an agent's row."""

CAUSES: Final = ("store", "work")
"""Reasons that come first: the others may be their consequences."""

GOES_ON_S: Final = 5.0
"""A handler that ignores a request to stop for so long is worth a note."""

TOLD: Final = "told to stop"
"""In each sentence on such handlers, with the names of their jobs; agents of other versions write it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What is seen of one queue and kind of tasks.

    Attributes:
        queue: its name.
        slots: tasks that run at once.
        free: slots that are free.
        unlooked_s: since the index was last read, or not read on purpose.
        refused_s: for how long claims of a task that stays where it is have won nothing; None: there is no such task.
        refused_task: that task.
        oldest_s: for how long it has been due.
        leaked_s: for how long each handler has ignored a request to stop.
        leaked_jobs: the jobs of these handlers, in the same order.
    """

    queue: str
    slots: int
    free: int
    unlooked_s: float = 0.0
    refused_s: float | None = None
    refused_task: str = ""
    oldest_s: float = 0.0
    leaked_s: tuple[float, ...] = ()
    leaked_jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is seen of an agent at one moment; all times in seconds ago.

    Attributes:
        loop_s: its loop made progress.
        loop_at: where in the code the loop is, when that was long ago.
        loop_asks: whether the loop waits there for the store.
        answered_s: the store answered the loop.
        outage_s: the store began to fail each time; None: it does not.
        store_error: the last failure of the store.
        round_s: the heartbeat ended a round.
        beats_fail_s: renewals of leases began to fail, one and all; None: they do not.
        beat_error: the last failure of a renewal.
        held: tasks whose leases the agent has.
        tick_s: its event loop ticked; None: it has none.
        tick_at: where in the code the event loop is, when that was long ago.
        dead: names of its threads that have ended.
        doorbell: whether messages can be received; None: there is no doorbell, or it has not been tried yet.
        queues: what the agent serves.
        draining: it stops.
        paused: it claims nothing.
        lines_dropped: lines of its log and its output that had no reader in time.
        held_for: why it holds itself back, such as a region without a grant; empty: it is paused by a command.
    """

    loop_s: float = 0.0
    loop_at: str = ""
    loop_asks: bool = False
    answered_s: float = 0.0
    outage_s: float | None = None
    store_error: str = ""
    round_s: float = 0.0
    beats_fail_s: float | None = None
    beat_error: str = ""
    held: int = 0
    tick_s: float | None = None
    tick_at: str = ""
    dead: tuple[str, ...] = ()
    doorbell: bool | None = None
    queues: tuple[QueueFacts, ...] = ()
    draining: bool = False
    paused: bool = False
    lines_dropped: int = 0
    held_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds after which an agent is not well.

    Attributes:
        progress_s: without progress (`health_s` of the settings).
        pause_s: longest pause between two looks at a queue.
        wedged_s: without progress, so that none is to be expected.
    """

    progress_s: float
    pause_s: float
    wedged_s: float = WEDGED_S


@dataclass(frozen=True, slots=True)
class Reason:
    """A problem: a short name that stays the same, and a sentence with numbers and what to look at."""

    name: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The judgement. `notes` are no reason to worry."""

    healthy: bool
    alive: bool
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    state: str = "ok"

    def entry(self) -> Mapping[str, Any]:
        return {
            "healthy": self.healthy,
            "alive": self.alive,
            "state": self.state,
            "reasons": [reason.text for reason in self.reasons],
            "notes": list(self.notes),
        }


def judge(facts: Facts, limits: Limits) -> Health:
    """Judge an agent. An agent that drains or is paused is healthy if its threads are alive."""
    wedged = tuple(_wedged(facts, limits))
    reasons = wedged
    if not facts.draining:
        known = {reason.name for reason in wedged}
        reasons += tuple(reason for reason in _problems(facts, limits) if reason.name not in known)
    reasons = tuple(sorted(reasons, key=lambda reason: reason.name not in CAUSES))
    state = "not healthy" if reasons else "draining" if facts.draining else "paused" if facts.paused else "ok"
    notes = tuple(_notes(facts, {reason.name for reason in reasons}))
    return Health(healthy=not reasons, alive=not wedged, reasons=reasons, notes=notes, state=state)


def _wedged(facts: Facts, limits: Limits) -> Iterator[Reason]:
    """Problems that a fresh process would mend."""
    if facts.loop_s > limits.wedged_s:
        yield _loop(facts)
    if facts.round_s > limits.wedged_s:
        yield _heartbeat(facts)
    if facts.tick_s is not None and facts.tick_s > limits.wedged_s:
        yield _event_loop(facts)


def _problems(facts: Facts, limits: Limits) -> Iterator[Reason]:
    for name in facts.dead:
        yield Reason(
            "thread", f"the thread {name} has died; the agent starts it again, and its log says what it died of"
        )
    is_late, outage_s = facts.loop_s > limits.progress_s, facts.outage_s or 0.0
    # A loop that stands still gets no answer either, whatever it waits for.
    beats_fail = facts.held > 0 and (facts.beats_fail_s or 0.0) > limits.progress_s
    # A renewal may be older than the last answer that the loop got: its failure or wait is then seen first.
    is_behind = beats_fail or facts.round_s > limits.progress_s
    silence_s = limits.progress_s / 2 if is_behind else limits.progress_s
    is_silent = facts.answered_s > silence_s and (not is_late or facts.loop_asks or facts.outage_s is not None)
    store = is_silent or outage_s > limits.progress_s
    if is_silent:
        yield Reason(
            "store",
            f"the store has not answered for {_s(facts.answered_s)}{_last(facts.store_error)}: look at network, "
            "credentials and permissions (thunderagent doctor); the agent goes on by itself when it answers",
        )
    elif store:
        yield Reason(
            "work",
            f"no work could be looked for, claimed or settled for {_s(outage_s)}{_last(facts.store_error)}, although "
            "the store answers other requests: look at throttles and permissions (thunderagent doctor)",
        )
    if is_late and not store:
        yield _loop(facts)
    if facts.round_s > limits.progress_s:
        yield _heartbeat(facts)
    if beats_fail:
        yield Reason(
            "beats",
            f"no lease could be renewed for {_s(facts.beats_fail_s or 0.0)} while {facts.held} are held"
            f"{_last(facts.beat_error)}: handlers are told to stop when their leases end, and other agents go on",
        )
    if facts.tick_s is not None and facts.tick_s > limits.progress_s:
        yield _event_loop(facts)
    for one in facts.queues:
        yield from _queue(one, facts, limits, explained=store or is_late)


def _queue(one: QueueFacts, facts: Facts, limits: Limits, *, explained: bool) -> Iterator[Reason]:
    leaked = sorted(seconds for seconds in one.leaked_s if seconds > limits.progress_s)
    if one.slots and len(leaked) >= one.slots:
        yield Reason(
            f"leaked:{one.queue}",
            f"all {one.slots} slots of the queue {one.queue} are held by handlers that were told to stop at least "
            f"{_s(leaked[0])} ago and go on ({', '.join(sorted(set(one.leaked_jobs)))}): nothing of it can run here; "
            'restart the agent, and give these jobs isolation="process" or let them look at ctx.stop_reason',
        )
    if facts.paused or explained or one.free <= 0:
        return
    if one.refused_s is not None and one.refused_s > limits.progress_s and one.oldest_s > limits.progress_s:
        yield Reason(
            f"starved:{one.queue}",
            f"the queue {one.queue} has tasks that this agent could run, {one.free} of {one.slots} slots are free, and "
            f"no claim was won for {_s(one.refused_s)}{_last(facts.store_error)}; {one.refused_task} has been due for "
            f"{_s(one.oldest_s)}: look at it (thunderagent explain {one.refused_task}), at throttles and permissions",
        )
    if one.unlooked_s - facts.answered_s > limits.pause_s + limits.progress_s:  # else it is the silence of the store
        yield Reason(
            f"unlooked:{one.queue}",
            f"the queue {one.queue} was not looked at for {_s(one.unlooked_s)} although {one.free} of {one.slots} "
            f"slots are free{_last(facts.store_error)}: if outcomes cannot be written, the log says so; else restart "
            "the agent",
        )


def _loop(facts: Facts) -> Reason:
    return Reason("loop", f"the agent's loop has not come round for {_s(facts.loop_s)}{_at(facts.loop_at)}")


def _heartbeat(facts: Facts) -> Reason:
    return Reason(
        "heartbeat",
        f"the heartbeat has not ended a round for {_s(facts.round_s)}: the {facts.held} leases that are held run out",
    )


def _event_loop(facts: Facts) -> Reason:
    return Reason(
        "event-loop",
        f"the event loop stands still since {_s(facts.tick_s or 0.0)}{_at(facts.tick_at)}: a coroutine does something "
        "there that blocks; make it a plain function, or use asyncio.to_thread",
    )


def _notes(facts: Facts, known: Collection[str]) -> Iterator[str]:
    if facts.draining:
        yield f"draining: {'1 task is' if facts.held == 1 else f'{facts.held} tasks are'} still held"
    elif facts.paused:
        yield f"paused: it claims nothing: {facts.held_for or 'thunderagent pauses tells why'}"
    if facts.doorbell is False and not facts.draining:
        yield (
            "the doorbell does not work: tasks may start up to a poll later; the agent's log says why "
            "(doorbell does not work), and it is tried again"
        )
    if facts.lines_dropped:
        yield (
            f"{facts.lines_dropped} lines of its log or its other output were dropped, as nobody took them in time: "
            "look at what reads its standard output and standard error"
        )
    leaked = [
        job
        for one in facts.queues
        for seconds, job in zip(one.leaked_s, one.leaked_jobs, strict=True)
        if seconds > GOES_ON_S and f"leaked:{one.queue}" not in known
    ]
    if leaked:
        many = f"{len(leaked)} handlers go on although they were"
        who = "1 handler goes on although it was" if len(leaked) == 1 else many
        yield (
            f"{who} {TOLD} ({', '.join(sorted(set(leaked)))}): each keeps its slot until it ends; let the job look "
            'at ctx.stop_reason, or give it isolation="process"'
        )


def _s(seconds: float) -> str:
    return f"{seconds:.0f} s"


def _last(error: str) -> str:
    return f" (last error: {error})" if error else ""


def _at(where: str) -> str:
    return f"; it is in {where}" if where else ""
