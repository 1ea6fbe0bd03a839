"""Events of an agent as one of a fleet: its health, its retirement, its region, its canary."""

from __future__ import annotations

from dataclasses import dataclass

from thunderagent.model.bus import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(Event):
    """The health of the agent has changed; `reasons` say what is wrong and what to look at."""

    healthy: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRetires(Event):
    """The agent drains by itself: for a fresh one, on request, or because its machine goes."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecyclingOff(Event):
    """The agent had more memory than `recycle_mib` before it ran a task: a fresh one would be no smaller, so it does
    not recycle by memory. Give it a larger number."""

    resident_mib: int
    recycle_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFailed(Event):
    """The agent's loop met an unexpected error: it gives its tasks back, if it can, and ends."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceAtRisk(Event):
    """EC2 recommends to move away from this instance, which it may take away soon. The agent goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticesFailed(Event):
    """The EC2 instance does not say whether it is to be taken away. Emitted once; it is asked again, less often."""

    error: str
    next_try_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HookFailed(Event):
    """A hook raised, or could not keep up; its task is not affected."""

    hook: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFailed(Event):
    """Metrics could not be sent; they are counted on, and sent with the next."""

    to: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMeasured(Event):
    """How many tasks of a queue are ready, and since when the oldest; one agent of the fleet measures each minute.

    `is_capped`: there are at least so many.
    """

    queue: str
    ready: int
    oldest_ready_s: float
    is_capped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogMeasured(Event):
    """How many tasks of all queues are ready; emitted after the queues one by one."""

    ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantAsked(Event):
    """The agent wrote to the arbiter for its region, other than a beat; `won`: its write was the first."""

    region: str
    verb: str
    won: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantBegan(Event):
    """The region of the agent has the grant: it claims tasks from now on."""

    region: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantDrains(Event):
    """The grant is to go to another region: the agent gives back what it holds."""

    region: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantEnded(Event):
    """The region of the agent has no grant any more: its handlers are stopped, and it writes nothing."""

    region: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionsFrozen(Event):
    """No region takes the grant by itself from now on, until a person says so."""

    region: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryProbed(Event):
    """A canary has tried a target, or the queue: seconds of each step; `step` and `reason` when one failed.

    `healthy` is the metric: the attempt did, and the target is not down by the attempts before.
    """

    target: str
    observer: str
    ok: bool
    healthy: bool
    steps: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()
    step: str | None = None
    reason: str | None = None
    unjudged: str | None = None
    days_left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryBlind(Event):
    """A canary cannot judge a target, as it is throttled or has no valid token; its last judgement stays."""

    target: str
    observer: str
    unjudged: str
    step: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTokenEnds(Event):
    """The token of a canary expires in so many days, and nothing seems to replace it; emitted once a day."""

    target: str
    observer: str
    days: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryDown(Event):
    """A target of the canary is down: so many attempts in a row have failed, the last in this step."""

    target: str
    observer: str
    step: str
    reason: str
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryUp(Event):
    """A target of the canary is up, at first or again: so many attempts in a row did."""

    target: str
    observer: str
    successes: int
