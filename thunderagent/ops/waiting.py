"""Why a task does not run, in sentences.

It reads at most `LISTED` rows of other tasks and `COUNTED` entries of the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from thunderagent.agent.health.judgement import SILENT_S, TOLD
from thunderagent.agent.stream_balance import is_paused
from thunderagent.model.clock import at_text, on_host, span_text
from thunderagent.model.names import names_of, plain_job
from thunderagent.model.rows import Unreadable, as_map, as_number
from thunderagent.model.task import Status, Task, UniqueScope
from thunderagent.model.writes.limits import limit_id
from thunderagent.model.writes.unique import key_id
from thunderagent.queue.limits.permits import holders_of
from thunderagent.queue.pauses import Pause, PauseKind, read_pauses
from thunderagent.queue.unique import holds
from thunderagent.stores.tasks import AgentInfo, TaskStore
from thunderagent.streams.journal import Link

LISTED: Final = 10
"""Most parents and holders whose rows are read."""

COUNTED: Final = 1000
"""Most entries of the index that are counted."""

NO_AGENT: Final = "no agent is alive"

UNREADABLE: Final = "UNREADABLE"

NAMED: Final = 3
"""Things that are named in a sentence; the others are counted."""


def why(store: TaskStore, task: Task) -> list[str]:
    """Why a task does not run now, most important first. Empty for a task that has ended, or runs undisturbed.

    A running task may have an agent that is silent, or whose handlers of the job do not stop.

    Args:
        store: has the task.
        task: just read.

    Raises:
        StoreError: the store did not answer.
    """
    if task.status.is_terminal:
        return []
    task = on_the_clock(store, task)
    now, beside = store.clock.now(), list(_key(store, task))
    if task.status is Status.RUNNING:
        if task.lock_time is None or task.lock_time >= now:
            return [*_agent_of(store, task, now), *beside]
        over = f"the lease of {task.lease_owner} ended {span_text(now - task.lock_time)} ago"
        held = [f"{over}: another agent takes the task over"]
    else:
        held = [*_parents(store, task), *_waitlist(store, task), *_due(task, now)]
    agents = store.agents()
    held = [*_pauses(store, task, agents, now), *held, *_agents(task, agents)]
    return [*(held or _ready(store, task, agents)), *beside]


def on_the_clock(store: TaskStore, task: Task) -> Task:
    """A task for people: the times of its lease are on the clock of the host too."""
    if store.clock.leases is store.clock:
        return task
    lease, handoff = (at and on_host(store.clock, at) for at in (task.lock_time, task.handoff_until))
    return replace(task, lock_time=lease, handoff_until=handoff)


def _agent_of(store: TaskStore, task: Task, now: float) -> Iterator[str]:
    """Faults of the agent of a running task: its handlers of the job do not stop; or it is silent while its lease
    lasts, and nothing happens until that ends."""
    if task.lease_owner is None or task.lock_time is None:
        return
    row_id = f"agent:{task.lease_owner}"
    row = store.engine.get([row_id]).get(row_id)
    heard = max(as_number((row or {}).get("updatedAt")), task.lock_time - (task.lease_sec or task.lock_time))
    if row is not None and now - heard <= SILENT_S:
        health = as_map(as_map(row.get("info")).get("health"))
        for said in (*_texts(health.get("reasons")), *_texts(health.get("notes"))):
            if TOLD in said and task.job in said:
                yield f"its agent {task.lease_owner} tells: {said}"
        return
    how = "is not among the live agents" if row is None else f"was last heard of {span_text(now - heard)} ago"
    left = span_text(task.lock_time - now)
    yield f"its agent {task.lease_owner} {how}: when the lease ends in {left}, another agent takes the task over"
    others = [agent for agent in store.agents() if agent.name != task.lease_owner]
    yield from _pauses(store, task, others, now)
    yield from _agents(task, others)


def pause_text(pause: Pause, now: float) -> str:
    """The begin, the end and the reason of a pause."""
    since = "" if pause.since is None else f" since {at_text(pause.since)}"
    until = ""
    if pause.until is not None:
        until = f"{',' if since else ''} until {at_text(pause.until)} (in {span_text(pause.until - now)})"
    return f"paused{since}{until}" + (f": {pause.reason}" if pause.reason else "")


def status_text(task: Task | Unreadable) -> str:
    """The status of a task, or `UNREADABLE`."""
    return str(task.status) if isinstance(task, Task) else UNREADABLE


def link_text(link: Link, now: float, at: Callable[[float], str] = at_text) -> str:
    """Since when a stream is connected; or why it is not, and when it tries again."""
    if link.is_connected:
        return f"connected since {at(link.since)}"
    if not link.reason:
        return f"not connected yet: it tries since {at(link.since)}"
    away = f"not connected since {at(link.since)}"
    if link.next_at is None:
        return f"{away}, tries now: {link.reason}"
    left = f" (in {span_text(link.next_at - now)})" if link.next_at > now else ""
    return f"{away}, next attempt at {at(link.next_at)}{left}: {link.reason}"


def _named(names: Iterable[str]) -> str:
    """Names in a sentence."""
    known = list(names)
    first = known[:NAMED] if len(known) > NAMED + 1 else known
    texts = [*first, *([f"{len(known) - len(first)} more"] if len(first) < len(known) else [])]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _tasks(number: int) -> str:
    return "1 task is" if number == 1 else f"{'at least ' if number >= COUNTED else ''}{number} tasks are"


# What holds it


def _parents(store: TaskStore, task: Task) -> Iterator[str]:
    if task.waiting_for:
        names = sorted(task.waiting_for)
        rows = store.read(names[:LISTED])
        read = [f"{name} ({status_text(rows[name]) if name in rows else 'gone'})" for name in names[:LISTED]]
        yield f"it waits for {_named([*read, *names[LISTED:]])}, which it depends on"
    elif task.status is Status.BLOCKED and task.waitlist is None:
        yield "nothing that it waits for is left: the next sweep puts it into its queue"


def _waitlist(store: TaskStore, task: Task) -> Iterator[str]:
    """The permits of its limit, and how many tasks are before it on the waitlist."""
    if task.waitlist is None:
        return
    row = store.engine.get([limit_id(task.waitlist)]).get(limit_id(task.waitlist))
    number = int(as_number((row or {}).get("limitMax"))) or task.limit_max or 1
    holders = sorted({member.rpartition("#")[0] for member in holders_of(row)})
    entries = store.engine.page(task.status_value, limit=COUNTED, until=task.created_at).entries
    before = len([one for one in entries if one.task_id != task.task_id and one.created_at <= task.created_at])
    place = f"{_tasks(before)} before it" if before else "it is the next"
    if len(holders) < number:
        free = number - len(holders)
        permits = f"{free} of {number} permits {'is' if free == 1 else 'are'} free, and the next sweep gives them away"
    else:
        taken = "the only permit is taken" if number == 1 else f"{len(holders)} of {number} permits are taken"
        permits = f"{taken} by {_named(_states(store, holders))}"
    yield f"it waits for a permit of the limit {task.waitlist!r}: {permits}; {place}"


def _states(store: TaskStore, names: Sequence[str]) -> list[str]:
    """Holders of permits, with their status if they do not run."""
    rows, now = store.read(names[:LISTED]), store.clock.now()
    texts = []
    for name in names:
        task = rows.get(name)
        task = on_the_clock(store, task) if isinstance(task, Task) else task
        if name not in names[:LISTED] or (isinstance(task, Task) and task.status is Status.RUNNING):
            is_over = isinstance(task, Task) and task.lock_time is not None and task.lock_time < now
            texts.append(f"{name} (its lease is over)" if is_over else name)
        else:
            texts.append(f"{name} ({'gone' if task is None else status_text(task)})")
    return texts


def _due(task: Task, now: float) -> Iterator[str]:
    if task.status is Status.PENDING and task.created_at > now:
        again = " again, after an error," if task.retry_count and task.error else ""
        yield f"it is due{again} at {at_text(task.created_at)} (in {span_text(task.created_at - now)})"


def _pauses(store: TaskStore, task: Task, agents: Sequence[AgentInfo], now: float) -> Iterator[str]:
    found = read_pauses(store)
    for kind, name in ((PauseKind.QUEUE, task.queue), (PauseKind.JOB, task.job)):
        if pause := found.get(f"{kind}:{name}"):
            yield f"its {kind} {name} is {pause_text(pause, now)}"
    able = [agent for agent in agents if _can(agent, task)]
    paused = [
        (agent.name, pause)
        for agent in able
        if (pause := next((found[key] for one in names_of(agent.name) if (key := f"agent:{one}") in found), None))
    ]
    if able and len(paused) == len(able):
        name, pause = paused[0]
        others = f"the agent {name} and all others that could run it are"
        alone = f"the agent {name}, the only one that could run it, is"
        yield f"{others if len(paused) > 1 else alone} {pause_text(pause, now)}"


def _key(store: TaskStore, task: Task) -> Iterator[str]:
    """Its unique key, which does not keep it from running, but keeps others from being put."""
    if task.unique_key is None or not holds(task):
        return
    row_id = key_id(task.job, task.unique_key)
    holder = store.engine.get([row_id]).get(row_id, {}).get("heldBy")
    until = "has started" if task.unique_scope == UniqueScope.UNTIL_START else "has ended"
    if holder == task.task_id:
        yield f"it holds the unique key {task.unique_key!r} of {task.job} until it {until}"
    elif holder is not None:
        yield f"its unique key {task.unique_key!r} of {task.job} is held by {holder}"


# Who could run it


def _can(agent: AgentInfo, task: Task) -> bool:
    return task.queue in agent.info["queues"] and task.job_value in _jobs(agent)


def _jobs(agent: AgentInfo) -> Sequence[str]:
    jobs = agent.info.get("jobs")
    return jobs if isinstance(jobs, (list, tuple)) else ()


def _agents(task: Task, agents: Sequence[AgentInfo]) -> Iterator[str]:
    """No agent could run it."""
    serving = [agent for agent in agents if task.queue in agent.info["queues"]]
    if not agents:
        yield NO_AGENT
    elif not serving:
        yield f"no live agent serves the queue {task.queue}"
    elif not any(_can(agent, task) for agent in serving):
        named = _named(agent.name for agent in serving)
        other = any(task.job in map(plain_job, _jobs(agent)) for agent in serving)
        what = f"version {task.version} of the job {task.job}" if other else f"the job {task.job}"
        yield f"no live agent of the queue {task.queue} has {what}: it is served by {named}"
    elif all(_is_draining(agent) for agent in serving if _can(agent, task)):
        yield "every agent that could run it is stopping"
    yield from _regions(task, agents)


def _regions(task: Task, agents: Sequence[AgentInfo]) -> Iterator[str]:
    """All agents that could run it are in a region without a grant."""
    regions = [as_map(agent.info.get("region")) for agent in agents if _can(agent, task)]
    if regions and all(region.get("state") == "passive" for region in regions):
        names = " and ".join(sorted({str(region.get("name")) for region in regions}))
        yield f"the agents that could run it are in {names}, which has no grant; see: thunderagent region status"


def _is_draining(agent: AgentInfo) -> bool:
    return bool(as_map(agent.info.get("health")).get("draining"))


def _ready(store: TaskStore, task: Task, agents: Sequence[AgentInfo]) -> list[str]:
    """It could run: it waits for a slot, or for the next poll."""
    entries = store.engine.page(task.status_value, limit=COUNTED, until=task.created_at).entries
    before = len([one for one in entries if one.task_id != task.task_id and one.created_at <= task.created_at])
    able = [agent for agent in agents if _can(agent, task) and not is_paused(agent)]
    slots = 0 if task.is_stream else sum(int(as_number(agent.info["queues"].get(task.queue))) for agent in able)
    taken = sum(int(as_number(as_map(agent.info.get("running")).get(task.queue))) for agent in able)
    after = f"{_tasks(before)} before it in the queue {task.queue}" if before else f"it is the next of {task.queue}"
    if slots and taken >= slots:
        return [f"all {slots} slots of the queue {task.queue} are taken, as its agents last reported; {after}"]
    if before:
        return [f"it is ready, and {_tasks(before)} before it in the queue {task.queue}"]
    return ["it is ready: an agent takes it with its next poll"]


def _texts(value: Any) -> Sequence[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, (list, tuple)) else ()
