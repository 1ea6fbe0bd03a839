"""What lies between agents and tables, where a drill cuts and counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from thunderagent.model.conditions import Is, Write
from thunderagent.stores.engine import Applied, Engine
from thunderagent.testing.faulty_engine import FaultyEngine


class Link(FaultyEngine):
    """The way of one agent to the arbiter: `outage()` cuts it. The arbiter is there longer than the agent."""

    def close(self) -> None:
        """Leave the engine behind it open."""

    def sibling(self) -> FaultyEngine:
        """Itself: the arbiter is in memory."""
        return self


class Counted:
    """The engine of a region's agents, which counts what they write and keeps the last renewal of each task."""

    def __init__(self, engine: Engine) -> None:
        self.behind = engine
        self._guard = threading.Lock()
        self.won = Counter[str]()
        """Writes that were made, by verb."""
        self.refused = Counter[str]()
        """Writes that the row refused, by verb."""
        self.renewals: dict[str, Write] = {}
        """The last renewal of each task, as it was sent."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        """As the engine."""
        answers = self.behind.apply(batch)
        with self._guard:
            for write, answer in zip(batch, answers, strict=True):
                (self.won if answer.won else self.refused)[write.verb] += 1
                if write.verb == "renew" and any(isinstance(one, Is) and one.name == "fence" for one in write.require):
                    self.renewals[write.task_id] = write
        return answers

    def sibling(self) -> Engine:
        """Itself: the table is in memory."""
        return cast(Engine, self)

    def close(self) -> None:
        """Leave the region open, which is there longer than an agent."""
