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

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> TaskStore: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def bus(self) -> EventBus: ...

    @property
    def gate(self) -> Gate: ...

    @property
    def running(self) -> int:
        """Number of tasks that the agent holds now."""

    @property
    def pauses(self) -> PauseWatcher: ...

    @property
    def vitals(self) -> Vitals: ...

    @property
    def facts(self) -> dict[str, Any]:
        """Further facts for the agent's row, by name."""

    def wake(self) -> None:
        """Look for work at once."""

    def retire(self, reason: str) -> None:
        """Drain, once, for a reason that is logged."""
