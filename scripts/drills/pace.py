"""How much faster time runs in a drill than outside: every length of the project is divided by the same number."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.model import pacing
from thunderagent.model.pacing import Backoff

SHORTER: Final = (
    "AHEAD_S",
    "ASK_AGAIN_S",
    "CANARY_FIRST_S",
    "FLOOR_S",
    "HANDOFF_S",
    "HEARTBEAT_RETRY_S",
    "LOST_LOOK_S",
    "MISSED_S",
    "OTHERS_S",
    "OVERTAKEN",
    "PASSING",
    "REGION_HURRY_S",
    "REGION_LOOK_S",
    "SLOW_S",
    "SPREAD_S",
    "STREAM_LOOK_S",
    "STREAM_POLL_S",
)
"""Waits that are no settings. Those that give a thread or a socket time to end stay: the machine is no faster."""

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
    shorter = {name: _shorter(getattr(pacing, name), pace) for name in SHORTER}
    for name, module in list(sys.modules.items()):
        if name.startswith("thunderagent"):
            for one, value in shorter.items():
                if one in vars(module):
                    setattr(module, one, value)


def _shorter(value: Any, pace: Pace) -> Any:
    if isinstance(value, Backoff):
        return dataclasses.replace(value, base_s=pace.s(value.base_s), cap_s=pace.s(value.cap_s))
    return tuple(map(pace.s, value)) if isinstance(value, tuple) else pace.s(value)
