"""A task in a slot, and what surrounds its handler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job
from thunderagent.jobs.outcome import Outcome, outcome_of
from thunderagent.model.clock import since_boot
from thunderagent.model.task import Lease

Failed = Callable[[str, str], None]
"""Told the name of a hook, or of another part of a scope, and what went wrong in it."""


@dataclass(eq=False, slots=True)
class Running:
    """One task in one slot. `lease` is replaced at each renewal; the context keeps the lease of the claim."""

    lease: Lease
    job: Job[Any]
    context: Context
    lease_margin: float
    beat_s: float
    started: float = field(default_factory=since_boot)
    next_beat: float = 0.0
    settling: bool = False
    waits: bool = False
    """Its handler is not started yet: it is to run apart from others."""
    lost: bool = False
    wedged: bool = False
    warned: float = 0.0
    stop_seen_at: float = 0.0
    """Monotonic second at which the heartbeat first saw that the handler was told to stop; 0: it was not."""
    outcome: Outcome | None = None
    """What came of the handler, once it has ended."""
    failed: Failed | None = None
    """Told of hooks that fail around it in a child process."""

    @property
    def deadline(self) -> float:
        """Monotonic second at which we stop by ourselves unless the lease is renewed before."""
        return self.lease.deadline(self.lease_margin)

    def outcome_of_scope(self, error: BaseException) -> Outcome:
        """What an exception out of a scope means: what the handler did counts; without a run it is the error."""
        return self.outcome or outcome_of(error, self.job, self.context)


Scope = Callable[[Running], AbstractContextManager[Any]]
"""What surrounds a handler, in its own thread or coroutine: log lines know its task, spans its time, hooks what they
want. Entered before the handler begins; at its exit the outcome is known."""


def no_scope(_: Running) -> AbstractContextManager[Any]:
    """Nothing around the handler."""
    return nullcontext()
