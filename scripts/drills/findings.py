"""What a drill of the loss of a region has found, and whether it is what is promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from drills.ledger import Run, overlaps, silently_twice, twice
from drills.pace import LAG_S, Pace
from drills.timeline import Timeline

SWITCH_S: Final = 150.0
"""From the loss to the name that leads elsewhere."""
ACTIVE_S: Final = 45.0
"""From the loss to agents that work elsewhere: the machines are cut off here, so no canary has to fail before."""
STREAMS_S: Final = 60.0
"""From the loss to the last stream that is live elsewhere."""
STOP_S: Final = 30.0
"""From the loss to the end of the last handler in the lost region."""
CLIENTS_S: Final = 270.0
"""From the loss to the last client that is back: the switch, the time to live, and the longest pause of a client."""
CONNECT_S: Final = 2.0
"""Real seconds beside these in which two cores let hundreds of clients in."""
UNDER_WAY: Final = 20
"""Messages of the feed that may be on their way to a stream at the end."""
MACHINE_S: Final = 0.25
"""Real seconds beside these that a machine with two busy cores may take, however fast time runs."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One promise."""

    name: str
    ok: bool
    told: str


@dataclass(slots=True, kw_only=True)
class Found:
    """Everything that the verdict goes by."""

    pace: Pace
    loss: Timeline
    back: Timeline | None
    lost_region: str
    other_region: str
    streams: int
    clients: int
    epoch: int
    """Of the grant at the end."""
    runs: Sequence[Run]
    messages: Mapping[str, Mapping[int, int]]
    open_tasks: Mapping[str, str]
    """Tasks that are not SUCCESS at the end, and what they are."""
    tasks: int
    stale: Sequence[str] = ()
    """Streams whose row still says what a late write of the lost region said."""
    late: int = 0
    reasserted: int = 0
    overwritten: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    differences: Sequence[str] = ()
    """Rows that are not the same in both regions at the end."""

    @property
    def people(self) -> Sequence[Mapping[str, Any]]:
        """What each client tells."""
        found: Sequence[Mapping[str, Any]] = self.report.get("people", ())
        return found

    @property
    def again(self) -> int:
        """Acknowledged changes that clients sent again, as the other region did not have them."""
        return sum(event[3] for one in self.people for event in one["events"] if event[0] == "again")

    @property
    def checked(self) -> int:
        """… and those that they sent again only to be sure."""
        return sum(event[3] for one in self.people for event in one["events"] if event[0] == "check")

    @property
    def lost_changes(self) -> list[str]:
        """Changes that were acknowledged, and that no state has at the end, but for those that collided."""
        return [name for name, has_collided in self._missing() if not has_collided]

    @property
    def collided(self) -> list[str]:
        """Changes that are gone as the user's other device changed the state in the other region within the lag of
        replication: of two writes the later stays, and both were acknowledged.
        """
        return [name for name, has_collided in self._missing() if has_collided]

    def _missing(self) -> list[tuple[str, bool]]:
        """Acknowledged changes that no state has, and whether each has collided."""
        found = []
        lag_s = self.pace.s(LAG_S) + MACHINE_S
        for one in self.people:
            others = [
                acknowledged
                for other in self.people
                if other["user"] == one["user"] and other["device"] != one["device"]
                for acknowledged in other["acknowledged"]
            ]
            kept = self.states.get(one["user"], {}).get("done", {})
            for number, at, region in one["acknowledged"]:
                if (name := f"{one['device']}.{number}") not in kept:
                    has_collided = any(abs(at - when) <= lag_s and region != where for _, when, where in others)
                    found.append((f"{one['user']}: {name}", has_collided))
        return found

    @property
    def changes(self) -> int:
        """Changes that were acknowledged."""
        return sum(len(one["acknowledged"]) for one in self.people)

    @property
    def gaps(self) -> int:
        """Messages of streams that nobody has handled, from the first of each to those that came just now."""
        newest = self.report.get("messages", 0) - UNDER_WAY
        return sum(max(newest, *counts) - min(counts) + 1 - len(counts) for counts in self.messages.values() if counts)

    @property
    def repeated(self) -> int:
        """Messages that were handled again."""
        return sum(number - 1 for counts in self.messages.values() for number in counts.values())

    def goals(self) -> list[Goal]:
        """The verdict, promise by promise."""
        goals = [*self._times(), *self._tasks(), *self._streams()]
        return goals + (self._clients() if self.clients else [])

    def _times(self) -> list[Goal]:
        names = {"agents active": "the other region's agents work", "stopped": "the lost region's agents have stopped"}
        limits = {"agents active": ACTIVE_S, "stopped": STOP_S}
        if self.clients:
            names = {"switched": "the loss is detected and the name leads elsewhere", **names}
            limits["switched"] = SWITCH_S
        return [self._within(name, text, limits[name]) for name, text in names.items()]

    def _within(self, name: str, text: str, limit_s: float, more_s: float = MACHINE_S) -> Goal:
        real_s = self.loss.since(name)
        if real_s is None:
            return Goal(name, False, f"{text}: never")
        ok = real_s <= self.pace.s(limit_s) + more_s
        return Goal(name, ok, f"{text} after {self.pace.told(real_s):.0f} s of at most {limit_s:.0f}")

    def _tasks(self) -> list[Goal]:
        both = overlaps(list(self.runs), self.lost_region, self.other_region)
        double, silent = twice(list(self.runs)), silently_twice(list(self.runs))
        wanted = 2 if self.back is None else 3
        if both:
            run, beside = both[0]
            told = (
                f"TWO REGIONS WERE ACTIVE: {len(both)} runs in {self.lost_region} beside runs in {self.other_region}, "
                f"the first of {run.task_id} (epoch {run.epoch}) beside {beside.task_id} (epoch {beside.epoch})"
            )
        else:
            told = f"one region was active at a time; the grant moved {self.epoch - 1} times of {wanted - 1}"
        lost = ", ".join(f"{name} is {status}" for name, status in list(self.open_tasks.items())[:3])
        return [
            Goal("one region", not both and self.epoch == wanted, told),
            Goal(
                "no task lost",
                not self.open_tasks,
                f"{len(self.open_tasks)} of {self.tasks} tasks lost {lost}".rstrip(),
            ),
            Goal(
                "nothing twice silently",
                not silent,
                f"{len(double)} tasks came to their end twice, once in each of two epochs and under a larger fence; "
                f"{len(silent)} otherwise",
            ),
        ]

    def _streams(self) -> list[Goal]:
        late = f"{self.late} late writes of the lost region: {self.reasserted} written over, {len(self.stale)} stayed"
        goals = [
            self._within("streams", f"all {self.streams} streams are live again", STREAMS_S),
            Goal("streams whole", not self.gaps, f"{self.gaps} messages of streams missing, {self.repeated} replayed"),
        ]
        if self.back is not None:
            goals.append(Goal("late writes", not self.stale, late))
            same = f"{len(self.differences)} rows differ between the regions at the end"
            goals.append(Goal("replicas equal", not self.differences, same))
        return goals

    def _clients(self) -> list[Goal]:
        lost = self.lost_changes
        without = [
            one["user"]
            for one in self.people
            if one["unacknowledged"] or one["region"] != (self.other_region if self.back is None else self.lost_region)
        ]
        told = f"{len(lost)} of {self.changes} acknowledged changes lost; {self.again} were sent again by clients"
        if self.collided:
            told += f"; {len(self.collided)} collided with one of the user's other device in the other region"
        return [
            self._within("clients all", "all clients are back", CLIENTS_S, CONNECT_S),
            Goal("no state lost", not lost, told),
            Goal(
                "clients with state", not without, f"{len(without)} of {len(self.people)} clients without their state"
            ),
        ]


class Strain(threading.Thread):
    """Measures how long a thread of this process waits for a core at worst: a drill on a machine that stands still
    says nothing about the project.
    """

    def __init__(self) -> None:
        super().__init__(name="strain", daemon=True)
        self.worst_s = 0.0
        self._ends = threading.Event()

    def run(self) -> None:
        """Until `close`."""
        while True:
            before = time.monotonic()
            if self._ends.wait(0.01):
                return
            self.worst_s = max(self.worst_s, time.monotonic() - before - 0.01)

    def close(self) -> None:
        """End."""
        self._ends.set()
        self.join(5.0)
