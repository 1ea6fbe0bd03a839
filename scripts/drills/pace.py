"""How much faster time runs in a drill than outside: every length of the project is divided by the same number."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from thunderagent.agent import doorbell, heartbeat, housekeeping, poller, queues, stream_balance, stream_handoff
from thunderagent.model.pacing import Backoff
from thunderagent.regions import grant
from thunderagent.streams.connection import pump
from thunderagent.websocket_api.canary import watch
from thunderagent.websocket_api.client import session, submitter, talk

SHORTER: Final[dict[ModuleType, tuple[str, ...]]] = {
    doorbell: ("MISSED_S",),
    grant: ("REGION_HURRY_S", "REGION_LOOK_S"),
    heartbeat: ("HEARTBEAT_RETRY_S",),
    housekeeping: ("LOST_LOOK_S", "STREAM_LOOK_S"),
    poller: ("AHEAD_S",),
    pump: ("FLOOR_S", "SLOW_S", "SPREAD_S"),
    queues: ("STREAM_POLL_S",),
    session: ("PASSING",),
    stream_balance: ("OTHERS_S",),
    stream_handoff: ("HANDOFF_S",),
    submitter: ("OVERTAKEN",),
    talk: ("ASK_AGAIN_S",),
    watch: ("CANARY_FIRST_S",),
}
"""Waits that are no settings, by their owners. Those that give a thread or a socket time to end stay: the machine is
no faster."""

LAG_S: Final = 0.5
"""Of replication between the regions, in seconds of the story."""

LEAST_S: Final = 0.3
"""An answer over the loopback may take so long on a machine with two busy cores, however fast time runs."""

MOST: Final = 40.0
"""With a grant of 0.75 s and beats each 0.25 s a thread that waits for a core now and then is not yet a lost region."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Real seconds are those of the story divided by `scale`."""

    scale: float

    def s(self, seconds: float, least: float = 0.0) -> float:
        """Real seconds for seconds of the story, at least `least`."""
        return max(seconds / self.scale, least)

    def told(self, real_s: float) -> float:
        """Seconds of the story for real ones."""
        return real_s * self.scale


def hasten(pace: Pace) -> None:
    """Shorten the waits in every module of the project that is loaded; for a process that does nothing else."""
    for owner, names in SHORTER.items():
        for name in names:
            long = getattr(owner, name)
            short = _shorter(long, pace)
            for module in [one for title, one in sys.modules.items() if title.startswith("thunderagent")]:
                if vars(module).get(name) is long:
                    setattr(module, name, short)


def _shorter(value: Any, pace: Pace) -> Any:
    if isinstance(value, Backoff):
        return dataclasses.replace(value, base_s=pace.s(value.base_s), cap_s=pace.s(value.cap_s))
    return tuple(map(pace.s, value)) if isinstance(value, tuple) else pace.s(value)
