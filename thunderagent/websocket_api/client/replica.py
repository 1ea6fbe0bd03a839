"""The state of a user as a client sees it, and the changes that a server may not have. No input or output.

A change is a JSON merge patch with an id. It is sent under this id until a server acknowledges it, so no server makes
it twice. Acknowledged changes are kept for a while: an asynchronously replicated table loses the last writes of a
region that is lost.

The patch of an update comes from a function of the state. The function is called again for each new state, so no change
of another client is overwritten by a value that was computed without it.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from thunderagent.websocket_api.client.options import ClientOptions
from thunderagent.websocket_api.protocol import CHANGES_KEPT, Action, check_size, encode, merge_patch, size

DEEPEST: Final = 64
"""Most objects and lists inside each other in a patch."""

Make = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Returns the patch of an update for a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    id: str
    patch: Mapping[str, Any]
    """A JSON merge patch (RFC 7396): null removes a member, objects are merged."""
    size: int
    """Bytes of the patch's JSON."""
    version: int | None = None
    """The version that it made; None until a server acknowledges it."""
    region: str | None = None
    """The region of that server."""
    at: float = 0.0
    """Monotonic seconds of that."""
    is_check: bool = False
    """It is sent again to be sure: the server's state has it unless it was lost."""
    make: Make | None = None
    """The function of an update."""
    base: Mapping[str, Any] | None = None
    """The state for which it returned `patch`."""
    problem: Exception | None = None
    """Its error for the present state, which may have the change already."""
    expected: int | None = None
    """The only version that the change may be made upon; None: any."""
    unanswered: int | None = None
    """The version upon which it may have been made: that of the first request without an answer."""

    @property
    def is_shown(self) -> bool:
        """Whether the state includes it."""
        return not self.is_check and self.problem is None


def text_of_patch(patch: object) -> str:
    """The JSON of a patch. A patch that no server can take would stay in the tail for ever.

    Raises:
        TypeError, ValueError: it is no JSON object, or too deep.
        MessageTooLarge: it cannot be sent.
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
        raise ValueError(f"the patch has objects in objects over {DEEPEST} deep; make the state flatter")
    message = {"action": Action.SET_STATE, "id": "0" * 16, "version": 1 << 53, "patch": patch, "change": "0" * 36}
    check_size(encode(message))
    return encode(patch)


class Replica:
    """The state, its version, and the tail of changes on their way. Only the first of them, the head, is sent.

    Args:
        options: how much is kept.
        failed: called for an update whose function raised for a new state, or returned no patch.
    """

    def __init__(
        self, options: ClientOptions, failed: Callable[[Change, Exception], None] = lambda change, error: None
    ) -> None:
        self._options = options
        self._failed = failed
        self.confirmed: dict[str, Any] = {}
        """The state as a server has it."""
        self.version = 0
        self.region: str | None = None
        """The region of the server that answered last."""
        self._heard_at = float("-inf")  # the last answer of the region
        self._tail: deque[Change] = deque()
        self._log: deque[Change] = deque()
        self._log_bytes = 0
        self._is_making = False

    @property
    def state(self) -> dict[str, Any]:
        """The confirmed state with the changes of this client."""
        state = self.confirmed
        for change in self._tail:
            if change.is_shown:
                state = merge_patch(state, change.patch)
        return state

    @property
    def head(self) -> Change | None:
        """The change to send; it stays the head until a server answers it."""
        return self._tail[0] if self._tail else None

    @property
    def unacknowledged(self) -> tuple[Change, ...]:
        """Changes that no server has, oldest first: not acknowledged, or lost."""
        return tuple(change for change in self._tail if not change.is_check)

    @property
    def is_full(self) -> bool:
        return sum(change.version is None for change in self._tail) >= self._options.max_unacknowledged

    def add(self, change_id: str, patch: Mapping[str, Any] | Make, *, expected: int | None = None) -> Change:
        """Add a change to the tail.

        Args:
            change_id: its id.
            patch: the patch, or a function that returns it for a state.
            expected: the only version that the change may be made upon.

        Raises:
            TypeError, ValueError, MessageTooLarge: see `text_of_patch`.
            Exception: what the function raised.
        """
        if self._is_making:
            raise RuntimeError("the function of an update changes the state; it may only compute")
        if isinstance(patch, Mapping):
            text = text_of_patch(patch)
            change = Change(id=change_id, patch=json.loads(text), size=size(text), expected=expected)
        else:
            change = _made(Change(id=change_id, patch={}, size=0, make=patch), self.state)
        self._tail.append(change)
        return change

    def drop(self, change_id: str) -> None:
        """A server refused this change."""
        self._remove(change_id)
        self._make_again()

    def sent(self, change_id: str, version: int | None) -> None:
        """A change is sent with this version. None: the server has answered that it is not made."""
        if version is not None:
            self._tail = deque(
                replace(one, unanswered=version) if one.id == change_id and one.unanswered is None else one
                for one in self._tail
            )
            return
        self._tail = deque(
            replace(one, unanswered=None, is_check=False) if one.id == change_id else one for one in self._tail
        )
        self._make_again()

    def version_for(self, change: Change) -> int:
        """The version to send a change with."""
        if change.expected is not None:
            return change.expected
        if change.problem is None:
            return self.version
        assert change.unanswered is not None
        return change.unanswered  # only asks: the server does not make it upon its present version

    def is_in_doubt(self, change: Change) -> bool:
        """Whether no server can know any more if a change was made, and making it twice would be wrong."""
        is_plain = change.make is None and change.expected is None
        return not is_plain and change.unanswered is not None and self.version - change.unanswered > CHANGES_KEPT

    def heard(self, now: float) -> None:
        """The region answered at this monotonic second."""
        self._heard_at = now

    def saved(self, change_id: str, version: int, region: str | None, now: float) -> bool:
        """A server has saved a change as this version. True: the state must be read again."""
        self.heard(now)
        change = next((one for one in self._tail if one.id == change_id), None)
        if change is None:
            return False
        self._remove(change_id)
        if version == self.version + 1:
            self.confirmed = merge_patch(self.confirmed, change.patch)
            self.version = version
        fresh = replace(change, is_check=False, base=None, problem=None, expected=None, unanswered=None)
        self._keep(replace(fresh, version=version, region=region, at=now))
        self.region = region
        self._make_again()
        return version > self.version

    def changed(self, change_id: str, version: int, patch: Mapping[str, Any] | None, region: str | None) -> bool:
        """Another connection of the user has made a change.

        Args:
            change_id: its id.
            version: the version that it made.
            patch: its patch; None: it was too long to be sent.
            region: where it was made.

        Returns:
            True if changes before it are missing: the state must be read.
        """
        if version <= self.version and region == self.region:
            return False
        if any(one.id == change_id for one in self._tail):
            return False  # sent by this client over a second connection: its answer is on the way
        if version != self.version + 1 or patch is None or region != self.region:
            return True
        self.confirmed, self.version = merge_patch(self.confirmed, patch), version
        self._make_again()
        return False

    def observed(
        self, state: Mapping[str, Any], version: int, region: str | None, now: float, *, is_behind: bool = False
    ) -> tuple[int, bool]:
        """A server has sent its state.

        Args:
            state: the state.
            version: its version.
            region: where the server is.
            now: monotonic seconds.
            is_behind: the server has an earlier version than the request named.

        Returns:
            The number of acknowledged changes that were lost, and True. If none is certainly lost: the number of
            changes that are sent again to be sure, and False.
        """
        has_moved = region != self.region and self.region is not None
        # Changes are as old as at the last answer of their region: the way to another region may take minutes.
        last_heard, self._heard_at = self._heard_at, now
        if version < self.version and not is_behind and not has_moved:
            return 0, False  # a later answer came first
        lost = [one for one in self._log if (one.version or 0) > version]
        doubtful = [
            one
            for one in self._log
            if has_moved and one not in lost and one.region != region and last_heard - one.at <= self._options.recheck_s
        ]
        self.confirmed, self.version, self.region = dict(state), version, region
        again = [replace(one, is_check=False) for one in lost]
        again += [replace(one, is_check=True, unanswered=(one.version or 1) - 1) for one in doubtful]
        again.sort(key=lambda one: one.version or 0)
        waiting = {one.id for one in again}
        self._log = deque(one for one in self._log if one.id not in waiting)
        self._log_bytes = sum(one.size for one in self._log)
        self._tail = deque([*again, *(one for one in self._tail if one.id not in waiting)])
        self._make_again()
        return (len(lost), True) if lost else (len(doubtful), False)

    def conflict(
        self, sent: int, state: Mapping[str, Any], version: int, region: str | None, now: float
    ) -> tuple[int, bool]:
        """A server refused a change: its version is not the one that was `sent`."""
        if version < self.version and version >= sent and region == self.region:
            return 0, False  # a later version is known
        return self.observed(state, version, region, now, is_behind=version < sent)

    def _remove(self, change_id: str) -> None:
        self._tail = deque(change for change in self._tail if change.id != change_id)

    def _make_again(self) -> None:
        """Make the patch of each update for the state before it. A failing update goes unless a server may have it."""
        state, tail, failed = self.confirmed, deque[Change](), list[tuple[Change, Exception]]()
        for change in self._tail:
            self._is_making = True
            try:
                made = _made(change, state)
            except Exception as error:
                if change.unanswered is None:
                    failed.append((change, error))
                    continue
                made = replace(change, problem=error, base=None)
            finally:
                self._is_making = False
            tail.append(made)
            if made.is_shown:
                state = merge_patch(state, made.patch)
        self._tail = tail
        for change, problem in failed:
            self._failed(change, problem)

    def _keep(self, change: Change) -> None:
        self._log.append(change)
        self._log_bytes += change.size
        limit, size = self._options.keep_acknowledged, self._options.keep_acknowledged_bytes
        while self._log and (len(self._log) > limit or (self._log_bytes > size and len(self._log) > 1)):
            self._log_bytes -= self._log.popleft().size


def _made(change: Change, state: Mapping[str, Any]) -> Change:
    """The change with its patch for this state; the same change if it has that already: it may be on its way."""
    if change.make is None or (change.base is not None and change.base == state):
        return change
    try:
        text = text_of_patch(change.make(copy.deepcopy(dict(state))))
    except StopIteration as error:  # no future takes it
        raise RuntimeError("the function of an update raised StopIteration") from error
    return replace(change, patch=json.loads(text), size=size(text), base=state, problem=None)
