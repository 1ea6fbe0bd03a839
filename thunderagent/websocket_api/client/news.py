"""What happens to a client, told to everybody who listens."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from thunderagent.websocket_api.client.happenings import Closed, Event, Pushed, Resubmitted, StateChanged
from thunderagent.websocket_api.client.outlet import Outlet
from thunderagent.websocket_api.client.replica import Replica

PUSHES_KNOWN: Final = 100
"""Ids of pushes that are recognised when they come once more, over a second connection for example."""
STORY: Final = 100
"""Events of the connection that are kept."""


class News:
    """Tells events to outlets, each once.

    Args:
        replica: whose state is told.
        limit: events that wait in one outlet.
        clock: epoch seconds.
    """

    def __init__(self, replica: Replica, limit: int, clock: Callable[[], float]) -> None:
        self._replica = replica
        self._limit = limit
        self.clock = clock
        self._outlets: list[Outlet] = []
        self._pushes: deque[str] = deque(maxlen=PUSHES_KNOWN)
        self._told: tuple[dict[str, Any], int] = ({}, 0)
        self._last: Closed | None = None
        self.story: deque[Event] = deque(maxlen=STORY)

    def outlet(self) -> Outlet:
        """A new outlet, with every event from now on."""
        outlet = Outlet(self._limit)
        self._outlets.append(outlet)
        if self._last is not None:
            outlet.put(self._last)
        return outlet

    def drop(self, outlet: Outlet) -> None:
        """Nobody reads this outlet any more."""
        if outlet in self._outlets:
            self._outlets.remove(outlet)

    def tell(self, event: Event) -> None:
        """Tell an event."""
        if isinstance(event, Closed):
            self._last = event
        if not isinstance(event, (Pushed, StateChanged)):
            self.story.append(event)
        for outlet in self._outlets:
            outlet.put(event)

    def state(self) -> None:
        """Tell the state, if it is another one than was told last."""
        replica = self._replica
        state, version = replica.state, replica.version
        if (state, version) != self._told:
            self._told = copy.deepcopy(state), version
            told = copy.deepcopy(state)  # a handler may do with it what it likes
            self.tell(StateChanged(at=self.clock(), state=told, version=version, region=replica.region))

    def push(self, push_id: object, message: Any) -> None:
        """Tell a message that was pushed, unless it has an id and came before."""
        if isinstance(push_id, str):
            if push_id in self._pushes:
                return
            self._pushes.append(push_id)
        self.tell(Pushed(at=self.clock(), message=message))

    def again(self, changes: int, *, is_certain: bool) -> None:
        """Tell that acknowledged changes are sent again."""
        self.tell(Resubmitted(at=self.clock(), changes=changes, region=self._replica.region, is_certain=is_certain))
