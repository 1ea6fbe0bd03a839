"""Heeds the notices of an EC2 instance that is to be taken away: the agent drains, and its successor does not begin.

A supervisor starts a fresh agent when one has drained. That one finds the notice before it looks for work, claims
nothing, and waits for the end of the machine; should the notice be withdrawn, it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from thunderagent.agent.metadata import Metadata, MetadataUnavailable, Outlook
from thunderagent.agent.threads import RepeatingThread
from thunderagent.model import fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot

NOTICES_S: Final = 5.0
"""Time between two questions to an EC2 instance whether it is to be taken away; a spot one tells two minutes before,
and of hibernation in the moment in which it begins."""

NOTICES_RARELY_S: Final = 60.0
"""The same when it does not answer."""


class Notices(RepeatingThread):
    """The thread that asks the instance.

    Args:
        metadata: of the instance.
        bus: told of a recommendation to move away, and of a service that does not answer.
        retire: has the agent drain, with the reason.
        hold: lets nothing start in the agent, with the reason; lets it go on with None.
        every_s: seconds between two looks.
        monotonic: the clock by which a service that does not answer is asked less often.
    """

    def __init__(
        self,
        metadata: Metadata,
        bus: EventBus,
        *,
        retire: Callable[[str], None],
        hold: Callable[[str | None], None],
        every_s: float = NOTICES_S,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        super().__init__("notices", every_s, self.look)
        self._metadata = metadata
        self._bus = bus
        self._retire = retire
        self._hold = hold
        self._monotonic = monotonic
        self._has_begun = self._is_held = self._is_failing = self._is_at_risk = False
        self._due = 0.0

    def start(self) -> None:
        """Begin. The first look is done at once, in the thread of the agent: nothing is claimed before."""
        if not self._has_begun:
            self._has_begun = True
            if (outlook := self._ask()) is not None and outlook.leaves:
                self._is_held = True
                self._hold(outlook.leaves)
        super().start()

    def look(self) -> None:
        """Ask once, if it is time, and do what the answer wants."""
        if self._monotonic() < self._due:
            return
        outlook = self._ask()
        if outlook is None:
            return
        if self._is_held:
            if outlook.leaves is None:
                self._is_held = False
                self._hold(None)
        elif outlook.leaves:
            self._retire(outlook.leaves)
        if outlook.at_risk and not self._is_at_risk:
            self._bus.emit(fleet_events.InstanceAtRisk())
        self._is_at_risk = outlook.at_risk

    def _ask(self) -> Outlook | None:
        """What the instance tells; None when it does not, which is told once."""
        try:
            outlook = self._metadata.look()
        except MetadataUnavailable as error:
            if not self._is_failing:
                self._bus.emit(fleet_events.NoticesFailed(error=str(error), next_try_s=NOTICES_RARELY_S))
            self._is_failing = True
            self._due = self._monotonic() + NOTICES_RARELY_S
            return None
        self._is_failing = False
        return outlook
