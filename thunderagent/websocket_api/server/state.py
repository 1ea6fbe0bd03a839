"""The state of a user: a change applies to the version that the client has seen, and once for its id."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from thunderagent.model.jsondata import dump_json
from thunderagent.model.task import Row
from thunderagent.stores.engine import Engine
from thunderagent.websocket_api.protocol import CHANGES_KEPT, STATE_BYTES, merge_patch, size
from thunderagent.websocket_api.records import changes_of, save_state, state_id, state_row


class Unreadable(Exception):
    """What is stored is no state."""


@dataclass(frozen=True, slots=True)
class Held:
    """A state as the store has it. Version 0 is the empty state of a new user."""

    value: dict[str, Any]
    version: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """The change is in the state since this version."""

    version: int
    is_new: bool = field(default=True, compare=False)
    """False: it was there already, perhaps with another patch."""
    is_last: bool = field(default=True, compare=False)
    """No change came after it: the user's other connections may not know it."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The change is not saved: the state has another version."""

    held: Held


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The change is not saved: the state would be over its limit."""

    size: int


class States:
    """The states of users, and the region that writes them."""

    def __init__(self, engine: Engine, region: str, now: Callable[[], float]) -> None:
        self._engine = engine
        self._region = region
        self._now = now

    def read(self, user: str) -> Held:
        """The state as it is now.

        Raises:
            StoreError: the store did not answer.
            Unreadable: the row, perhaps written by hand, is no state.
        """
        return _held(self._row(user))

    def save(self, user: str, *, version: int, change: str, patch: Mapping[str, Any]) -> Saved | Conflict | TooLarge:
        """Merge a patch into the state, if it still has this version.

        A change whose id is in the state already counts as saved: its reply was lost, or it was delivered twice.

        Raises:
            StoreError: the store did not answer. The change may be saved; the same call finds out.
            ValueError: the patch is not JSON data.
            Unreadable: the row is no state.
        """
        row = self._row(user)
        for _ in range(_LOOKS):
            answered = self._known(row, version, change)
            if answered is not None:
                return answered
            text = dump_json(merge_patch(_held(row).value, patch), "the patch")
            if (found := size(text)) > STATE_BYTES:
                return TooLarge(found)
            changes = _latest(changes_of(row), change, version + 1)
            about: dict[str, Any] = {"changes": changes, "region": self._region, "now": self._now()}
            if row is None:
                [applied] = self._engine.put([state_row(user, text, **about)])
            else:
                [applied] = self._engine.apply([save_state(row, text, **about)])
            if applied.error is not None:
                raise applied.error
            if applied.won:
                return Saved(version + 1)
            if applied.row is None:
                row = None  # deleted meanwhile
            elif applied.row.get("fence") == version and row is not None:
                return self._known(applied.row, version, change) or Conflict(_held(applied.row))
            else:
                row = applied.row
        return Conflict(_held(row))

    def _known(self, row: Row | None, version: int, change: str) -> Saved | Conflict | None:
        """The answer of the row to a change; None: it can be made."""
        made = changes_of(row).get(change)
        if made is not None:
            return Saved(made, is_new=False, is_last=made == (row or {}).get("fence"))
        held = _held(row)
        return None if held.version == version else Conflict(held)

    def _row(self, user: str) -> Row | None:
        row_id = state_id(user)
        return self._engine.get([row_id]).get(row_id)


_LOOKS: Final = 3
"""Attempts to change a row that is deleted meanwhile."""


def _held(row: Row | None) -> Held:
    if row is None:
        return Held({})
    text, version = row.get("payload"), row.get("fence")
    if not isinstance(text, str) or not isinstance(version, int) or version < 1:
        raise Unreadable(f"the row {row['taskId']!r} is no state")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Unreadable(f"the row {row['taskId']!r} has no object as its state")
    return Held(value, version)


def _latest(changes: Mapping[str, int], change: str, version: int) -> dict[str, int]:
    kept = sorted(changes.items(), key=lambda one: one[1])[-(CHANGES_KEPT - 1) :]
    return {**dict(kept), change: version}
