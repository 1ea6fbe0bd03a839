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

OnFailure = Callable[[str, str], None]
"""Called with the name of a hook, or of another part of a scope, and its error."""


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
    """Its handler has not started, as it is to run apart from others."""
    lost: bool = False
    wedged: bool = False
    warned: float = 0.0
    stop_seen_at: float = 0.0
    """Monotonic second at which the heartbeat first saw that the handler was asked to stop; 0: it was not."""
    outcome: Outcome | None = None
    """Set once the handler has ended."""
    on_failure: OnFailure | None = None
    """Called for hooks that fail around it in a child process."""

    @property
    def deadline(self) -> float:
        """Monotonic second at which the agent stops the handler, unless the lease is renewed before."""
        return self.lease.deadline(self.lease_margin)

    def outcome_of_scope(self, error: BaseException) -> Outcome:
        """The outcome of an exception out of a scope: that of the handler if it ran, else the error."""
        return self.outcome or outcome_of(error, self.job, self.context)


Scope = Callable[[Running], AbstractContextManager[Any]]
"""What surrounds a handler, in its thread or coroutine: log lines, a span, hooks. At its exit the outcome is known."""


def no_scope(_: Running) -> AbstractContextManager[Any]:
    """Nothing around the handler."""
    return nullcontext()
