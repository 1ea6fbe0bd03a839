"""The state of a user as a client sees it, and the changes that a server may not have: pure, without a connection.

A change is a JSON merge patch with an id. It is sent under the same id until a server has acknowledged it, so a server
that has it already does not change anything again. What was acknowledged is kept for a while, as a server of another
region may be behind: an asynchronously replicated table loses the last writes of a region that is gone.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from thunderagent.websocket_messages import encode, merge_patch, size
from thunderagent.wsclient.options import ClientOptions

DEEPEST: Final = 64
"""Objects and lists within each other in a patch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the state."""

    id: str
    patch: Mapping[str, Any]
    """A JSON merge patch (RFC 7396): members that are null are removed, objects are merged."""
    size: int
    """Bytes of the patch's JSON."""
    version: int | None = None
    """The version that it made; None until a server has acknowledged it."""
    region: str | None = None
    """The region of that server."""
    at: float = 0.0
    """When, in monotonic seconds."""
    is_check: bool = False
    """It is sent again only to be sure: what the server shows has it, unless it was lost."""


def check_patch(patch: object) -> None:
    """Refuse what is no patch, before it is in the tail, where it would be for ever.

    Raises:
        TypeError, ValueError: it is no object of JSON, or too deep.
    """
    if not isinstance(patch, Mapping):
        raise TypeError(f"the patch is a {type(patch).__name__}; a JSON merge patch of a state is an object")
    text = json.dumps(patch, allow_nan=False)
    level: list[Any] = [json.loads(text)]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise ValueError(f"the patch has objects in objects over {DEEPEST} deep; a state is to be flatter")


class Replica:
    """The state, its version, and the changes on their way. One change is under way at a time, the head of the tail."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self.confirmed: dict[str, Any] = {}
        """The state as a server has it."""
        self.version = 0
        """The version of `confirmed`."""
        self.region: str | None = None
        """The region of the server that answered last."""
        self._heard_at = float("-inf")  # the region was there then
        self._tail: deque[Change] = deque()
        self._log: deque[Change] = deque()
        self._log_bytes = 0

    @property
    def state(self) -> dict[str, Any]:
        """The state with our changes that are not acknowledged."""
        state = self.confirmed
        for change in self._tail:
            if not change.is_check:
                state = merge_patch(state, change.patch)
        return state

    @property
    def head(self) -> Change | None:
        """The change to send next; it stays the head until a server has answered it."""
        return self._tail[0] if self._tail else None

    @property
    def unacknowledged(self) -> tuple[Change, ...]:
        """Changes that no server has, oldest first: not acknowledged, or lost since."""
        return tuple(change for change in self._tail if not change.is_check)

    @property
    def is_full(self) -> bool:
        """True when no more changes are taken."""
        return sum(change.version is None for change in self._tail) >= self._options.max_unacknowledged

    def add(self, change_id: str, patch: Mapping[str, Any]) -> Change:
        """Put a change at the end of the tail."""
        text = encode(patch)
        change = Change(id=change_id, patch=json.loads(text), size=size(text))
        self._tail.append(change)
        return change

    def drop(self, change_id: str) -> None:
        """A server refused this change for good."""
        self._tail = deque(change for change in self._tail if change.id != change_id)

    def heard(self, now: float) -> None:
        """The region has answered something at this monotonic second."""
        self._heard_at = now

    def saved(self, change_id: str, version: int, region: str | None, now: float) -> bool:
        """A server has this change, which made this version; True when the state has to be read anew."""
        self.heard(now)
        change = next((one for one in self._tail if one.id == change_id), None)
        if change is None:
            return False
        self.drop(change_id)
        if version == self.version + 1:
            self.confirmed = merge_patch(self.confirmed, change.patch)
            self.version = version
        self._keep(replace(change, version=version, region=region, at=now, is_check=False))
        self.region = region
        return version > self.version

    def observed(
        self, state: Mapping[str, Any], version: int, region: str | None, now: float, *, is_behind: bool = False
    ) -> tuple[int, bool]:
        """A server shows its state.

        Args:
            state: the state.
            version: its version.
            region: where the server is.
            now: monotonic seconds.
            is_behind: the server says that it is behind what we knew when we asked.

        Returns:
            The number of acknowledged changes that were lost, and True; if none was for certain, the number of those
            that are sent again to be sure, and False.
        """
        has_moved = region != self.region and self.region is not None
        # How old a change was when its region was heard of last: the way to another may have taken minutes.
        last_heard, self._heard_at = self._heard_at, now
        if version < self.version and not is_behind and not has_moved:
            return 0, False  # an answer that was overtaken by another
        lost = [one for one in self._log if (one.version or 0) > version]
        doubtful = [
            one
            for one in self._log
            if has_moved and one not in lost and one.region != region and last_heard - one.at <= self._options.recheck_s
        ]
        self.confirmed, self.version, self.region = dict(state), version, region
        again = [replace(one, is_check=False) for one in lost] + [replace(one, is_check=True) for one in doubtful]
        again.sort(key=lambda one: one.version or 0)
        waiting = {one.id for one in again}
        self._log = deque(one for one in self._log if one.id not in waiting)
        self._log_bytes = sum(one.size for one in self._log)
        self._tail = deque([*again, *(one for one in self._tail if one.id not in waiting)])
        return (len(lost), True) if lost else (len(doubtful), False)

    def conflict(
        self, sent: int, state: Mapping[str, Any], version: int, region: str | None, now: float
    ) -> tuple[int, bool]:
        """A server refused a change, as it has another version than the one that we `sent`."""
        if version < self.version and version >= sent and region == self.region:
            return 0, False  # we have learnt more since
        return self.observed(state, version, region, now, is_behind=version < sent)

    def _keep(self, change: Change) -> None:
        self._log.append(change)
        self._log_bytes += change.size
        limit, size = self._options.keep_acknowledged, self._options.keep_acknowledged_bytes
        while self._log and (len(self._log) > limit or (self._log_bytes > size and len(self._log) > 1)):
            self._log_bytes -= self._log.popleft().size
