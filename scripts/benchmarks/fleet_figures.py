"""What is asked of a measurement of what a fleet costs to watch, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Final

PARTS: Final = ("telemetry", "listing", "reads")
NOTHING: Final = "all off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and how much of it."""

    only: frozenset[str]
    tasks: int
    """Tasks of each run of an agent."""
    rounds: int
    """How often each kind of telemetry has its turn."""
    agents: int
    """Rows of agents that are listed."""
    rows: int
    """Tasks that are counted."""
    calls: int
    """How often each command and call is timed."""
    deadline_s: float
    """Longest wait for one run, or one command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What an agent tells of itself, by settings in its environment, named without their prefix."""

    name: str
    settings: dict[str, str] = field(default_factory=dict)
    has_goal: bool = False


@dataclass(slots=True, kw_only=True)
class Cost:
    """What an agent needs for each task with one kind of telemetry."""

    name: str
    cpu_us: list[float] = field(default_factory=list)
    """Microseconds of user and system time of the agent's process, of each run."""
    ratios: list[float] = field(default_factory=list)
    """The same beside the agent that tells nothing, of the same round."""
    has_goal: bool = False

    @property
    def ratio(self) -> float:
        """The median over all rounds."""
        return median(self.ratios)


@dataclass(slots=True, kw_only=True)
class Listing:
    """How long a command takes that shows the whole fleet or all queues."""

    command: str
    rows: int
    command_s: list[float]
    """The whole command, the start of Python included."""
    call_s: list[float]
    """The call of the client alone."""
    start_s: list[float]
    """`thunderagent --version`: the start of Python and the imports alone."""


@dataclass(slots=True, kw_only=True)
class Reads:
    """What a call reads on DynamoDB."""

    call: str
    rows: int
    requests: int
    read_units: float
    is_capped: bool
    cap: int
    """Where each count stopped in this measurement."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """Everything that was measured."""

    costs: list[Cost] = field(default_factory=list)
    scrape_ms: list[float] | None = None
    """CPU of an agent for one answer to `/metrics`, in milliseconds."""
    listings: list[Listing] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)
