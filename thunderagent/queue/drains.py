"""Agents that are asked to drain: entries of the row that tells what is paused, named `drain:` and the agent.

The name of an agent is that of one process, so an entry does not concern the agent that the supervisor starts next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from thunderagent.model.errors import NotAllowed
from thunderagent.model.task import Row, timestamp
from thunderagent.model.unreadable import as_map, as_number
from thunderagent.model.writes import shared as shared_writes
from thunderagent.queue.pauses import info_of
from thunderagent.stores.tasks import TaskStore

PREFIX: Final = "drain:"

OLD_S: Final = 86400.0
"""After so long an entry is taken away by whoever changes the row next: it is of an agent that is gone."""

TRIES: Final = 20
"""How often a change of the row is tried while others change it."""

ASKED: Final = "somebody has asked for it"
"""What an agent tells that was given no reason."""


def drain_entry(*, since: float, reason: str | None) -> dict[str, Any]:
    """The content of an entry."""
    return {"since": timestamp(since), "reason": reason or None}


def drain_asked(row: Row | None, agent: str) -> str | None:
    """Why an agent is asked to drain, None if it is not. An entry of whatever content is one."""
    info = info_of(row)
    if f"{PREFIX}{agent}" not in info:
        return None
    reason = as_map(info[f"{PREFIX}{agent}"]).get("reason")
    return reason if isinstance(reason, str) and reason else ASKED


def drains_of(row: Row | None) -> dict[str, float]:
    """The agents that are asked to drain, and since when in epoch seconds."""
    found = {key.removeprefix(PREFIX): entry for key, entry in info_of(row).items() if key.startswith(PREFIX)}
    return {name: _since(entry) for name, entry in found.items() if name}


def without_old(info: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The entries of the row without requests to drain that are so old that their agents have long seen them."""
    return {
        key: entry for key, entry in info.items() if not key.startswith(PREFIX) or not 0 < _since(entry) < now - OLD_S
    }


def without_drains(agents: Collection[str]) -> Callable[[Row | None], dict[str, Any] | None]:
    """The change that takes the requests to these agents away."""
    keys = {f"{PREFIX}{name}" for name in agents}

    def change(row: Row | None) -> dict[str, Any] | None:
        info = info_of(row)
        return None if keys.isdisjoint(info) else {key: one for key, one in info.items() if key not in keys}

    return change


def change_controls(
    store: TaskStore, row: Row | None, change: Callable[[Row | None], Mapping[str, Any] | None]
) -> Row | None:
    """Change the entries of the row as nobody else changes them.

    Args:
        store: where the row is.
        row: the row as it was seen.
        change: answers with the entries that are to be there; None: nothing is to be done.

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
            is_done, row = store.found(shared_writes.control_row(info, now=now))
        else:
            [(is_done, row)] = store.attempt([shared_writes.set_controls(row, info, now=now)])
        if is_done:
            return row
    raise NotAllowed("what is paused is changed by others all the time: try again")


def _since(entry: object) -> float:
    return as_number(as_map(entry).get("since"))
