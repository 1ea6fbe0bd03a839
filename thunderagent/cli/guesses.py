"""What looks wrong in a name that was typed, by what the live agents and the jobs tell. Never refuses anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from thunderagent.jobs.registry import Registry
from thunderagent.model.errors import StoreError
from thunderagent.model.names import meant, plain_job
from thunderagent.model.task import DEFAULT_QUEUE, Status, Task
from thunderagent.stores.tasks import AgentInfo, TaskStore

READ: Final = 100
"""Agents whose rows are read: of a larger fleet it cannot be said that none has a job."""


def doubts(store: TaskStore, task: Task) -> list[str]:
    """Why nobody may take a task that was just put by the name of its job.

    Empty when an agent can, when none is alive, and when it cannot be known: not everybody may list the agents.
    """
    if task.status not in (Status.PENDING, Status.BLOCKED):
        return []
    try:
        agents = store.agents(most=READ)
    except StoreError:
        return []
    if not agents or len(agents) >= READ or not all(_jobs(agent) for agent in agents):
        return []
    able = [agent for agent in agents if task.job_value in _jobs(agent)]
    queues = {queue for agent in able for queue in agent.info["queues"]}
    if task.queue in queues:
        return []
    if able:
        options = " or ".join(f"--queue {queue}" for queue in sorted(queues))
        return [
            f"no live agent that has the job {task.job_value!r} serves the queue {task.queue}: "
            f"give {options}, or --jobs PACKAGE, which knows the queue of each job"
        ]
    known = {name for agent in agents for name in _jobs(agent)}
    others = sorted(name for name in known if plain_job(name) == task.job)
    hint = f"; they have {' and '.join(map(repr, others))}" if others else meant(task.job, map(plain_job, known))
    end = "" if hint.endswith("?") else "."
    return [f"no live agent has the job {task.job_value!r}{hint}{end} It waits in the queue {task.queue}"]


def idle_queues(wanted: Mapping[str, int], jobs: Registry) -> Iterator[str]:
    """A sentence for each queue that an agent is told to serve and that none of its jobs names. The plain queue is no
    mistake: it is where tasks go that are put by the name of their job alone."""
    for queue in wanted:
        if queue != DEFAULT_QUEUE and queue not in jobs.queues:
            hint = meant(queue, jobs.queues) or "."
            yield f"no job goes to the queue {queue!r}{hint} It is served for tasks that name it"


def _jobs(agent: AgentInfo) -> tuple[str, ...]:
    jobs = agent.info.get("jobs")
    return tuple(map(str, jobs)) if isinstance(jobs, (list, tuple)) else ()
