"""What a background thread may see of its agent, and ask of it."""

from __future__ import annotations

from typing import Any, Protocol

from thunderagent.agent.health.vitals import Vitals
from thunderagent.agent.pauses import PauseWatcher
from thunderagent.model.bus import EventBus
from thunderagent.regions.gate import Gate
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore


class AgentView(Protocol):
    """An agent as its background threads see it. Safe in any thread."""

    name: str
    store: TaskStore
    settings: Settings
    bus: EventBus
    gate: Gate
    pauses: PauseWatcher
    vitals: Vitals
    facts: dict[str, Any]
    """Further facts for the agent's row, by name."""

    @property
    def running(self) -> int:
        """Number of tasks that the agent holds now."""

    def wake(self) -> None:
        """Look for work at once."""

    def retire(self, reason: str) -> None:
        """Drain, once, for a reason that is logged."""
