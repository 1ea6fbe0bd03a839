"""What was seen when an agent was lost with a task, as the row keeps it, and what follows for the task.

A lost agent takes down everything that it ran, and only one task may be to blame. A task is given up for losses that
it had alone, or for many in changing company.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.model.rows import is_number
from thunderagent.model.task import Task

ALONE: Final = "alone"
"""In the last entry of `errors`: the fence of the run beside which the agent ran nothing else that could be to
blame."""

BESIDE: Final = "beside"
"""In the entry of a loss: how many other tasks were lost with the same agent."""

LIVES: Final = "lives"
"""In the entry of a loss: the agent was seen alive after the lease was over."""

IN_COMPANY: Final = 5
"""Times `max_crashes` at which a task is given up although it never ran alone."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What an observer saw of the agent whose lease is over."""

    agent: str | None
    beside: int = 0
    """Other tasks that were lost with it at the same time."""
    is_alone: bool = False
    """The agent ran nothing else that could be to blame."""
    lives: bool = False
    """The agent was seen alive after the lease was over."""

    @property
    def kept(self) -> dict[str, Any]:
        """What the entry of the loss in `errors` keeps."""
        return {BESIDE: self.beside, **({LIVES: True} if self.lives else {})}

    @property
    def words(self) -> str:
        text = f"the lease ran out although agent {self.agent} lives" if self.lives else f"agent {self.agent} was lost"
        if self.is_alone:
            return f"{text}, which ran only this task"
        return f"{text}, with {self.beside} other task{'s' * (self.beside != 1)}" if self.beside else text


def runs_alone(task: Task) -> bool:
    """Whether the row says that its agent runs nothing else that could be to blame."""
    return any(entry.get(ALONE) == task.fence for entry in task.errors)


def must_run_apart(crash_count: int, max_crashes: int) -> bool:
    """True from the second lost agent on; from the first if only one may be lost."""
    return crash_count >= max(1, min(2, max_crashes))


def is_to_blame(task: Task, max_crashes: int) -> bool:
    """Whether one more loss is one too many: this task alone, or far too many in any company."""
    if task.crash_count < max_crashes:
        return False
    return runs_alone(task) or task.crash_count >= max_crashes * IN_COMPANY


def lived(task: Task, seen_at: Mapping[str, float]) -> int:
    """How many of the agents that were lost with a task are known to have lived after its lease was over.

    Args:
        task: its row names those agents, with the time of each loss.
        seen_at: when each agent wrote its row for the last time.
    """
    return sum(
        bool(entry.get(LIVES)) or (is_number(at := entry.get("at")) and seen_at.get(str(entry.get("agent")), 0.0) > at)
        for entry in task.errors
        if BESIDE in entry
    )


def lost_agents(task: Task) -> set[str]:
    """The agents that were lost with a task, as far as its row goes back."""
    return {str(entry.get("agent")) for entry in task.errors if BESIDE in entry}


def verdict(task: Task, loss: Loss, *, max_crashes: int, alive: int) -> str:
    """Why a task is given up: what was seen, and where to look.

    Args:
        task: as it was lost for the last time.
        loss: that last time.
        max_crashes: takeovers of one task.
        alive: how many of its agents were seen alive after its lease was over.
    """
    number = task.crash_count + 1
    company = ", at last with nothing beside it" if loss.is_alone else ", always beside others" if loss.beside else ""
    limit, last = f"(max_crashes is {max_crashes}){company}", f"the last was {loss.agent}"
    if alive * 2 >= number:
        return (
            f"its lease ran out {number} times while it ran {limit}, and {alive} of its agents were alive afterwards; "
            f"{last}: the job {task.job} may hold the interpreter, or its process may have stood still, for longer "
            f"than the lease of {task.lease_sec or 0:g} s; give it isolation='process' or a longer lease_s"
        )
    return (
        f"{number} agents were lost while they ran it {limit}; {last}: look for 'Out of memory' in the kernel log of "
        f"its host, as the job {task.job} may need more memory than there is"
    )
