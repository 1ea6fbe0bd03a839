"""Commands on queues, jobs and agents: pause, resume, list the pauses, and have agents drain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from thunderagent.jobs.job import Job
from thunderagent.model.arguments import check, iterated, seconds_problem, text_problem
from thunderagent.model.errors import ConfigurationError, NotAllowed, StoreError, WaitTimeout
from thunderagent.model.names import names_of, plain_job
from thunderagent.model.pacing import wait_delays
from thunderagent.model.rows import as_map, is_number
from thunderagent.model.task import Lane, Row, timestamp
from thunderagent.model.writes.pauses import CONTROL_ID
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.pauses import (
    DRAIN,
    Pause,
    PauseKind,
    change_controls,
    check_pause,
    drain_entry,
    drains_of,
    info_of,
    pauses_of,
    read_pauses,
    without_drains,
    without_old,
)
from thunderagent.stores.tasks import AgentInfo, TaskStore

MOST_PAUSES: Final = 100
"""Pauses at one moment at most: every agent reads all of them, each time."""

MOST_LOOKS: Final = 20
"""Queues whose agents are asked to look at once after a change; the others poll at their usual pace."""

MOST_DRAINS: Final = 100
"""Requests to drain at one moment at most: every agent reads all of them, each time."""

FORGOTTEN_S: Final = 60.0
"""Age at which a request to an agent that was killed is dropped by the next `drain`."""

NAMED: Final = 10
"""Agents that an error names; of the others it gives their number."""

LONGEST_NAME: Final = 256

_A: Final = {PauseKind.JOB: "a job", PauseKind.AGENT: "an agent"}
_Info = Mapping[str, Any]


class PauseCommands:
    """What `client.pauses` does."""

    def __init__(self, store: TaskStore, sender: DoorbellSender) -> None:
        self._store = store
        self._sender = sender

    def pause(
        self,
        *,
        queue: str | None = None,
        job: Job[Any] | str | None = None,
        agent: str | None = None,
        for_s: float | None = None,
        reason: str | None = None,
    ) -> Pause:
        """Let no task of a queue, of a job or in an agent start; what runs goes on. Name one of the three.

        Agents see it within `poll_min_s` seconds, when they next look for work. A second pause changes the end and, if
        one is given, the reason. An unknown name is no error: its agent may come later.

        Args:
            job: a job or its name, in whatever queue its tasks are.
            agent: name of an agent, or of a host: every agent there, those that start later too.
            for_s: seconds after which it ends by itself; None: only `resume` ends it.

        Returns:
            the pause as it is in the store.

        Raises:
            ConfigurationError: not exactly one is named, or a name, the time or the reason makes no sense.
            NotAllowed: 100 things are paused already.
            StoreError: the store did not take it.
        """
        kind, name = _named(queue, job, agent)
        check_pause(for_s, reason)
        now = self._store.clock.now()
        wanted = Pause(
            kind=kind,
            name=name,
            since=timestamp(now),
            until=None if for_s is None else timestamp(now + for_s),
            reason=reason or None,
        )
        row = _change_controls(self._store, lambda row: _with(row, wanted, now))
        _announce(self._store, self._sender, wanted)
        return pauses_of(row)[wanted.key]

    def resume(
        self, *, queue: str | None = None, job: Job[Any] | str | None = None, agent: str | None = None
    ) -> Pause | None:
        """End a pause before its time; the arguments are those of `pause`.

        Returns:
            the pause that has ended, None if there was none.

        Raises:
            ConfigurationError: not exactly one is named.
            StoreError: the store did not take it.
        """
        kind, name = _named(queue, job, agent)
        key = Pause(kind=kind, name=name).key
        ended: list[Pause | None] = []

        def without(row: Row | None) -> _Info | None:
            ended[:] = [pauses_of(row).get(key)]
            info = info_of(row)
            return {other: entry for other, entry in info.items() if other != key} if key in info else None

        _change_controls(self._store, without)
        _announce(self._store, self._sender, Pause(kind=kind, name=name))
        [pause] = ended
        return None if pause is None or pause.is_over(self._store.clock.now()) else pause

    def list(self) -> Sequence[Pause]:
        """What is paused now, by kind and name.

        Raises:
            StoreError: the store did not answer.
        """
        found = read_pauses(self._store)
        return [found[key] for key in sorted(found)]


class AgentCommands:
    """What `client.agents` does."""

    def __init__(self, store: TaskStore, sender: DoorbellSender) -> None:
        self._store = store
        self._sender = sender

    def list(self, *, lost: bool = False) -> Sequence[AgentInfo]:
        """The agents that are alive; with `lost` also those that were killed or cut off, as long as their rows last.

        Raises:
            StoreError: the store did not answer.
        """
        return self._store.agents(lost=lost)

    def drain(self, agent: str, *, all_of_host: bool = False, reason: str | None = None) -> Sequence[AgentInfo]:
        """Have an agent stop claiming, finish or give back what it holds, and end with exit code 0.

        It sees that within `poll_min_s` seconds when it looks for work, and within 15 s when all of its slots are
        taken. Its supervisor starts a fresh agent with another name. A second request changes nothing.

        Args:
            agent: the name of an agent or the beginning of one name; with `all_of_host`, the name of a host.
            all_of_host: all agents that are alive on that host.

        Returns:
            the agents that are asked, as their rows have them.

        Raises:
            NotAllowed: no such agent is alive, or too many drain already.
            ConfigurationError: the name fits several, or the reason is not one short line.
            StoreError: the store did not take it.
        """
        check(text_problem("agent", agent, most=LONGEST_NAME))
        check_pause(None, reason)
        alive = self._store.agents()
        asked = _named_agents(agent, alive, all_of_host=all_of_host)
        now = self._store.clock.now()
        fresh = {f"{DRAIN}{one.name}": drain_entry(since=now, reason=reason) for one in asked}
        names = {one.name for one in alive}

        def change(row: Row | None) -> dict[str, Any] | None:
            drains, info = drains_of(row), info_of(row)
            gone = {f"{DRAIN}{name}" for name, at in drains.items() if name not in names and now - at > FORGOTTEN_S}
            kept = {key: entry for key, entry in without_old(info, now).items() if key not in gone}
            if fresh.keys() <= kept.keys() and not gone:
                return None
            changed = {**fresh, **kept}
            if sum(key.startswith(DRAIN) for key in changed) > MOST_DRAINS:
                raise NotAllowed(f"{MOST_DRAINS} agents are asked to drain already: wait until some of them are gone")
            return changed

        _change_controls(self._store, change)
        for one in asked:
            _announce(self._store, self._sender, Pause(kind=PauseKind.AGENT, name=one.name))
        return asked

    def wait_gone(self, agents: Sequence[AgentInfo | str], *, timeout_s: float) -> None:
        """Wait until agents have ended, or are overdue.

        Args:
            agents: their names.
            timeout_s: longest wait; the agents need up to their `drain_s`, and 15 s to see the request.

        Raises:
            WaitTimeout: some are still there; it says what they run.
            StoreError: the store did not answer.
        """
        check(seconds_problem("timeout_s", timeout_s, most=math.inf))
        several = [agents] if isinstance(agents, (str, AgentInfo)) else agents
        names = [_name_of(one) for one in iterated("agents", several)]
        until = time.monotonic() + timeout_s
        for delay_s in wait_delays():
            rows = self._store.engine.get([f"agent:{name}" for name in names])
            earliest = self._store.clock.leases.earliest()
            left = [row for row in rows.values() if is_number(at := row.get("expireAt")) and at > earliest]
            if not left:
                break
            if (left_s := until - time.monotonic()) <= 0:
                raise WaitTimeout(
                    f"not gone within {timeout_s:g} s: {_listing(list(map(_still, left)))}; the agents end within "
                    "their THUNDERAGENT_DRAIN_S once they see it, unless their version is too old to know drains"
                )
            time.sleep(min(delay_s, left_s))
        _change_controls(self._store, without_drains(names))


def _change_controls(store: TaskStore, change: Callable[[Row | None], _Info | None]) -> Row | None:
    """Change the entries of the row; `change` answers None if nothing is to be done."""
    return change_controls(store, store.engine.get([CONTROL_ID]).get(CONTROL_ID), change)


def _announce(store: TaskStore, sender: DoorbellSender, changed: Pause) -> None:
    """Ask the agents that a change concerns to look at once, as far as they can be reached."""
    sender.wake()
    with suppress(StoreError):  # they look anyway, a little later
        concerned = [agent for agent in store.agents() if _concerns(changed, agent)]
        queues = [queue for agent in concerned for queue in agent.info["queues"]]
        if changed.kind is PauseKind.QUEUE:
            queues = [changed.name] * len(concerned)  # one for each: on SQS only one agent receives a message
        sender.looks(queues[:MOST_LOOKS])


def _concerns(pause: Pause, agent: AgentInfo) -> bool:
    """True when an agent is what is paused, serves that queue, or has that job."""
    match pause.kind:
        case PauseKind.QUEUE:
            return pause.name in agent.info["queues"]
        case PauseKind.JOB:
            jobs = agent.info.get("jobs")
            names = map(plain_job, jobs) if isinstance(jobs, (list, tuple)) else ()  # it may be of another version
            return pause.name in names
        case PauseKind.AGENT:
            return pause.name in names_of(agent.name)


def doubt(store: TaskStore, pause: Pause) -> str | None:
    """A sentence about a pause that names nothing known; None if it is known.

    Raises:
        StoreError: the store did not answer.
    """
    if any(_concerns(pause, agent) for agent in store.agents()):
        return None
    match pause.kind:
        case PauseKind.QUEUE if any(lane.queue == pause.name for lane in store.engine.lanes()):
            return None
        case PauseKind.QUEUE:
            return f"no task was ever in the queue {pause.name!r} and no live agent serves it"
        case PauseKind.JOB:
            return f"no live agent has the job {pause.name!r}"
        case PauseKind.AGENT:
            return f"no live agent has the name or the host {pause.name!r}"


def _named(queue: str | None, job: Job[Any] | str | None, agent: str | None) -> tuple[PauseKind, str]:
    name_of_job = job.name if isinstance(job, Job) else job
    given = {PauseKind.QUEUE: queue, PauseKind.JOB: name_of_job, PauseKind.AGENT: agent}
    named = [(kind, name) for kind, name in given.items() if name is not None]
    if len(named) != 1:
        raise ConfigurationError("name one queue, one job or one agent")
    [(kind, name)] = named
    if kind is PauseKind.QUEUE:
        return kind, Lane(name).queue
    check(text_problem(f"the name of {_A[kind]}", name, least=1, most=LONGEST_NAME))
    if kind is PauseKind.JOB and plain_job(name) != name:
        raise ConfigurationError(f"a pause is of all versions of a job: name {plain_job(name)!r}, without a version")
    return kind, name


def _with(row: Row | None, wanted: Pause, now: float) -> _Info | None:
    """The entries with this one; those of ours that are over go, those that we do not know stay as they are."""
    known = pauses_of(row)
    over = {key for key, pause in known.items() if pause.is_over(now)}
    before = None if wanted.key in over else known.get(wanted.key)
    if before is not None:
        since = before.since if before.since is not None else wanted.since
        wanted = replace(wanted, since=since, reason=wanted.reason or before.reason)
        if wanted == before:
            return None
    elif len(known.keys() - over) >= MOST_PAUSES:
        raise NotAllowed(f"{MOST_PAUSES} queues, jobs and agents are paused already: resume some of them")
    info = {key: entry for key, entry in info_of(row).items() if key not in over}
    return info | {wanted.key: {**as_map(info.get(wanted.key)), **wanted.entry()}}


def _named_agents(name: str, alive: Sequence[AgentInfo], *, all_of_host: bool) -> list[AgentInfo]:
    """The agents with this name, or on this host."""
    names = [one.name for one in alive]
    if not alive:
        raise NotAllowed(f"no agent is alive, so none is called {name!r}; see: thunderagent agents")
    if all_of_host:
        found = [one for one in alive if name == names_of(one.name)[1]]
        if not found:
            hosts = sorted({names_of(one)[1] for one in names})
            raise NotAllowed(f"no agent is alive on the host {name!r}; there are some on {_listing(hosts)}")
        return found
    found = [one for one in alive if one.name == name] or [one for one in alive if name and one.name.startswith(name)]
    if not found:
        raise NotAllowed(f"no live agent is called {name!r}, or begins so; alive are {_listing(names)}")
    if len(found) > 1:
        raise ConfigurationError(
            f"{name!r} is the beginning of {len(found)} agents: {_listing([one.name for one in found])}; write more of "
            "the one, or ask for all agents of a host with --all-of-host"
        )
    return found


def _name_of(agent: AgentInfo | str) -> str:
    name = agent.name if isinstance(agent, AgentInfo) else agent
    check(text_problem("the name of an agent", name, least=1, most=LONGEST_NAME))
    return name


def _still(row: Row) -> str:
    running = as_map(info_of(row).get("running"))
    number = sum(filter(is_number, running.values()))
    name = str(row["taskId"]).removeprefix("agent:")
    return f"{name} ({'1 task' if number == 1 else f'{number:g} tasks'})" if number else name


def _listing(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
