"""The port of the doorbell: carries messages from a process that changed something to the agents.

Nothing depends on it. A doorbell that loses, doubles or delays messages costs time and changes no result: the agents
poll anyway, and only their pace depends on whether their doorbell works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from thunderagent.queue.doorbell.message import DoorbellMessage

Accepts = Callable[[DoorbellMessage], bool]
"""Whether a listener can act on a message now; called in the thread that listens."""


class Doorbell(Protocol):
    """Carries messages. `ring` may be called from any thread, `listen` from one at a time."""

    @property
    def is_local(self) -> bool:
        """True when a message reaches every agent, all on one machine; else it reaches one agent."""

    @property
    def is_healthy(self) -> bool:
        """False after a failure, until it works again."""

    def ring(self, messages: Sequence[DoorbellMessage]) -> None:
        """Send messages. Never raises, takes a few seconds at worst, and drops what cannot be sent."""

    def listen(self, timeout_s: float, accepts: Accepts) -> list[DoorbellMessage]:
        """Wait for messages.

        Args:
            timeout_s: longest wait; after it the list is empty.
            accepts: messages that it rejects are left to other agents, where the doorbell can do that.

        Raises:
            DoorbellError: it does not work now.
        """

    def close(self) -> None:
        """Release what is open; where possible, `listen` in another thread ends at once."""
