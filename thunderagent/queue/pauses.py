"""Pauses and requests to drain: the entries of the one row `control:`, which every agent reads.

An entry `queue:reports` pauses a queue, a job or an agent: no task of it starts. An entry `drain:` and the name of an
agent asks that one process to end; the agent that its supervisor starts next has another name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from thunderagent.model.arguments import SHORTEST_S, check, seconds_problem, text_problem
from thunderagent.model.errors import NotAllowed
from thunderagent.model.rows import as_map, as_number, is_number
from thunderagent.model.task import Row, timestamp
from thunderagent.model.writes import pauses as pause_writes
from thunderagent.model.writes.pauses import CONTROL_ID
from thunderagent.stores.tasks import TaskStore

DRAIN: Final = "drain:"
"""How the key of a request to drain begins."""

OLD_S: Final = 86400.0
"""Age of a request to drain at which the next change of the row drops it: its agent is gone."""

LONGEST_REASON: Final = 200

TRIES: Final = 20
"""Attempts to change the row while others change it."""


class PauseKind(StrEnum):
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
    """When it ends by itself; None: when it is resumed."""
    reason: str | None = None

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.name}"

    def is_over(self, now: float) -> bool:
        """True when it has ended by itself."""
        return self.until is not None and self.until <= now

    def entry(self) -> dict[str, Any]:
        until = None if self.until is None else timestamp(self.until)
        return {"since": self.since, "until": until, "reason": self.reason}


def pauses_of(row: Row | None) -> dict[str, Pause]:
    """The pauses in the row, over or not, by their keys.

    Entries of another kind are a newer version's. An entry that is no map is no pause, and a value of a wrong type
    counts as missing: a row made by hand must not stop an agent.
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


def check_pause(for_s: float | None, reason: str | None) -> None:
    """Check the length of a pause and its reason.

    Raises:
        ConfigurationError: the seconds make no sense, or the reason is not one short line.
    """
    check(
        None if for_s is None else seconds_problem("for_s", for_s, least=SHORTEST_S),
        None if reason is None else text_problem("the reason", reason, most=LONGEST_REASON),
    )


def drain_entry(*, since: float, reason: str | None) -> dict[str, Any]:
    return {"since": timestamp(since), "reason": reason or None}


def drain_asked(row: Row | None, agent: str) -> str | None:
    """Why an agent is asked to drain, empty without a reason; None if it is not. Any entry is a request."""
    info = info_of(row)
    if f"{DRAIN}{agent}" not in info:
        return None
    reason = as_map(info[f"{DRAIN}{agent}"]).get("reason")
    return reason if isinstance(reason, str) else ""


def drains_of(row: Row | None) -> dict[str, float]:
    """The agents that are asked to drain, and since when in epoch seconds."""
    found = {key.removeprefix(DRAIN): entry for key, entry in info_of(row).items() if key.startswith(DRAIN)}
    return {name: _since(entry) for name, entry in found.items() if name}


def without_old(info: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The entries of the row without requests to drain older than `OLD_S`."""
    return {
        key: entry for key, entry in info.items() if not key.startswith(DRAIN) or not 0 < _since(entry) < now - OLD_S
    }


def without_drains(agents: Collection[str]) -> Callable[[Row | None], dict[str, Any] | None]:
    keys = {f"{DRAIN}{name}" for name in agents}

    def change(row: Row | None) -> dict[str, Any] | None:
        info = info_of(row)
        return None if keys.isdisjoint(info) else {key: one for key, one in info.items() if key not in keys}

    return change


def change_controls(
    store: TaskStore, row: Row | None, change: Callable[[Row | None], Mapping[str, Any] | None]
) -> Row | None:
    """Change the entries of the row; repeated while others change it.

    Args:
        row: the row as it was read.
        change: answers with the entries that the row is to have; None: nothing is to be done.

    Raises:
        NotAllowed: others change the row all the time.
        StoreError: the store did not answer.
    """
    for _ in range(TRIES):
        info, now = change(row), store.clock.now()
        if info is None:
            return row
        info = without_old(info, now)
        if row is None:
            is_done, row = store.insert_row(pause_writes.control_row(info, now=now))
        else:
            [(is_done, row)] = store.write_rows([pause_writes.set_controls(row, info, now=now)])
        if is_done:
            return row
    raise NotAllowed("what is paused is changed by others all the time: try again")


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


def _since(entry: object) -> float:
    return as_number(as_map(entry).get("since"))
