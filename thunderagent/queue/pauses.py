"""What is paused: the entries of the one row that tells so.

An entry of the row `control:` stands for a queue, a job or an agent of which no task starts. Its name is
`queue:reports`, its content a map with `since`, `until` and `reason`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from thunderagent.model.task import Row, timestamp
from thunderagent.model.unreadable import as_map, is_number
from thunderagent.model.writes.shared import CONTROL_ID
from thunderagent.stores.tasks import TaskStore


class PauseKind(StrEnum):
    """What can be paused."""

    QUEUE = "queue"
    JOB = "job"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A queue, a job or an agent of which no task starts; times are epoch seconds."""

    kind: PauseKind
    name: str
    """Of an agent its whole name, or its host: that is every agent there."""
    since: float | None = None
    until: float | None = None
    """When it ends by itself; None: when somebody resumes it."""
    reason: str | None = None

    @property
    def key(self) -> str:
        """Name of its entry in the row."""
        return f"{self.kind}:{self.name}"

    def is_over(self, now: float) -> bool:
        """True when it has ended by itself."""
        return self.until is not None and self.until <= now

    def entry(self) -> dict[str, Any]:
        """Its entry in the row."""
        until = None if self.until is None else timestamp(self.until)
        return {"since": self.since, "until": until, "reason": self.reason}


def pauses_of(row: Row | None) -> dict[str, Pause]:
    """The pauses that the row tells of, over or not, by their keys.

    An entry of another kind is a newer version's. One that is no map is no pause, and a value of a wrong type is as if
    it were not there: a row made by hand must not stop an agent.
    """
    found = (_pause(key, entry) for key, entry in info_of(row).items())
    return {pause.key: pause for pause in found if pause is not None}


def info_of(row: Row | None) -> Mapping[str, Any]:
    """The entries of the row, whatever they are."""
    return as_map((row or {}).get("info"))


def read_pauses(store: TaskStore) -> dict[str, Pause]:
    """The pauses that are not over, by their keys.

    Raises:
        StoreError: the store did not answer.
    """
    now = store.clock.now()
    found = pauses_of(store.engine.get([CONTROL_ID]).get(CONTROL_ID))
    return {key: pause for key, pause in found.items() if not pause.is_over(now)}


def names_of(agent: str) -> tuple[str, str]:
    """The names under which an agent can be paused: its own, and its host's."""
    return agent, agent.partition(":")[0]


_KINDS: Final = frozenset(PauseKind)


def _pause(key: str, entry: object) -> Pause | None:
    kind, _, name = key.partition(":")
    if kind not in _KINDS or not name or not isinstance(entry, Mapping):
        return None
    reason = entry.get("reason")
    return Pause(
        kind=PauseKind(kind),
        name=name,
        since=_moment(entry.get("since")),
        until=_moment(entry.get("until")),
        reason=reason if isinstance(reason, str) and reason else None,
    )


def _moment(value: object) -> float | None:
    return float(value) if is_number(value) else None
