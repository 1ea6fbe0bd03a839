"""The port of the doorbell: how rings get from the process that has something to tell to the agents.

Nothing depends on it. A doorbell that loses, doubles or delays rings, or is broken, costs time and changes no result:
the agents poll anyway, and only how often depends on whether their doorbell works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from thunderagent.queue.doorbell.message import Ring

Wanted = Callable[[Ring], bool]
"""Whether a listener can do something with a ring now; called in the thread that listens."""


class Doorbell(Protocol):
    """Carries rings. `ring` may be called from any thread, `listen` from one at a time."""

    @property
    def is_local(self) -> bool:
        """True when a ring reaches every agent, and these are all on one machine; else it reaches one of many."""

    @property
    def is_healthy(self) -> bool:
        """False after a failure, until it works again."""

    def ring(self, rings: Sequence[Ring]) -> None:
        """Tell whoever listens. Never raises, and takes a few seconds at worst; what cannot be told is forgotten."""

    def listen(self, timeout_s: float, wanted: Wanted) -> list[Ring]:
        """Wait for rings.

        Args:
            timeout_s: how long; none came in time: an empty list.
            wanted: rings for which it says no are left to others, where the doorbell can do that.

        Raises:
            DoorbellError: it does not work now.
        """

    def close(self) -> None:
        """Let go of what is open; where that is possible, `listen` in another thread ends at once."""
