from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from thunderagent.model.arguments import LONGEST_S, check, seconds_problem, shown
from thunderagent.model.errors import (
    ConfigurationError,
    ParentResultLost,
    TaskStopped,
    TaskUnreadable,
    ThunderAgentError,
)
from thunderagent.model.forks import renewed
from thunderagent.model.jsondata import NOT_STORED, dump_json
from thunderagent.model.rows import Unreadable
from thunderagent.model.task import Lease, Status, Task

PROGRESS_BYTES: Final = 1024
_EPOCH_SHIFT: Final = 32
"""Runs of one task within an epoch are fewer than 2 ** 32; the sum is exact in JSON for two million epochs."""


@dataclass(frozen=True, slots=True)
class Snooze:
    """A handler's answer: run me again after `seconds`; no retry is used up. A negative number means at once.

    >>> Snooze(60)
    Snooze(seconds=60)

    Raises:
        ConfigurationError: it is no number of seconds, or over ten years.
    """

    seconds: float

    def __post_init__(self) -> None:
        check(seconds_problem("the time of a Snooze", self.seconds, least=-LONGEST_S))


@dataclass(frozen=True, slots=True)
class Cancel:
    """A handler's answer: close the task as DONE, on purpose; dependents follow `on_parent_failure`."""

    reason: str = "cancelled by its handler"

    def __post_init__(self) -> None:
        check(_reason_problem("a Cancel", self.reason))


@dataclass(frozen=True, slots=True)
class Fail:
    """A handler's answer: FAILED at once, whatever retries are left."""

    reason: str

    def __post_init__(self) -> None:
        check(_reason_problem("a Fail", self.reason))


def _reason_problem(what: str, reason: object) -> str | None:
    return None if isinstance(reason, str) else f"the reason of {what} is {shown(reason)}; use a text"


@dataclass(frozen=True, slots=True)
class ParentFailure:
    """Why a parent did not succeed, for a task with `on_parent_failure="run"`."""

    status: str
    """FAILED or DONE."""
    reason: str
    """Its error, or why it was closed."""


class ParentResults(Mapping[str, Any]):
    """Results of parents by task id. A result that was not stored or could not be read raises why.

    Args:
        results: the known ones, with None for a parent that did not succeed.
        unread: why others are missing.
        failed: the parents that did not succeed.
    """

    def __init__(
        self,
        results: Mapping[str, Any],
        unread: Mapping[str, ThunderAgentError] | None = None,
        failed: Mapping[str, ParentFailure] | None = None,
    ) -> None:
        self._results = results
        self.unread = unread or {}
        self.failed = failed or {}

    @classmethod
    def of(cls, task_ids: Iterable[str], parents: Mapping[str, Task | Unreadable]) -> ParentResults:
        """The results of these parents; some rows may be gone."""
        results, unread, failed = dict[str, Any](), dict[str, ThunderAgentError](), dict[str, ParentFailure]()
        for name in task_ids:
            parent = parents.get(name)
            if parent is None:
                unread[name] = ParentResultLost(f"the result of {name} cannot be had: its row is gone")
            elif isinstance(parent, Unreadable):
                unread[name] = TaskUnreadable(str(parent))
            elif parent.result_error is not None:
                unread[name] = parent.result_error
            elif parent.status is not Status.SUCCESS:
                results[name] = None
                failed[name] = ParentFailure(str(parent.status), parent.error or parent.done_reason or "")
            elif parent.result_text is None and (parent.error or "").startswith(NOT_STORED):
                unread[name] = ParentResultLost(
                    f"{name} of {parent.job} succeeded, and {parent.error}; return what can be stored, or let that job "
                    'fail: on_bad_result="fail"'
                )
            else:
                results[name] = parent.result
        return cls(results, unread, failed)

    def __getitem__(self, task_id: str) -> Any:
        if task_id in self.unread:
            raise self.unread[task_id]
        return self._results[task_id]

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._results or task_id in self.unread

    def __iter__(self) -> Iterator[str]:
        yield from self._results
        yield from self.unread

    def __len__(self) -> int:
        return len(self._results) + len(self.unread)


class Context:
    """What a handler knows of its task and can ask of its agent.

    One context belongs to one run under one fence. All methods may be called from any thread.
    """

    _guard: ClassVar = renewed(threading.Lock())  # shared, as each lock would be renewed after a fork
    __slots__ = ("_on_stop", "_parents", "_progress", "_push", "_stop", "_stopped", "lease", "push_place")

    def __init__(
        self,
        lease: Lease,
        parents: Callable[[], Mapping[str, Any]] | None = None,
        *,
        push: Callable[[str, Any], int] | None = None,
    ) -> None:
        self.lease = lease
        self._parents = parents
        self._push = push
        self.push_place: tuple[str, str] | None = None
        """For the engine: where pushes go, for a handler in a process of its own."""
        self._stopped: threading.Event | None = None
        self._stop: TaskStopped | None = None
        self._on_stop: Callable[[TaskStopped], None] | None = None
        self._progress: str | None = None

    @property
    def task_id(self) -> str:
        """Id of the task: the same in every attempt, so a good name for what the handler writes."""
        return self.lease.task_id

    @property
    def attempt(self) -> int:
        """Number of this run, from 1."""
        return self.lease.task.attempt

    @property
    def fence(self) -> int:
        """A number that grows with each run; a resource that remembers the largest can refuse a run that is over.

        Where several regions share a table, a region that has not seen another's claim gives the same number again. So
        the epoch of the region's grant stands in front, as a multiple of 2 ** 32.
        """
        return ((self.lease.task.region_epoch or 0) << _EPOCH_SHIFT) + self.lease.fence

    @property
    def idempotency_key(self) -> str:
        """Task id and fence: the same only within this run."""
        return f"{self.task_id}:{self.fence}"

    @property
    def cancelled(self) -> bool:
        """True once the handler should stop: cancelled, lease lost, time over, or the agent is stopping."""
        return self._stop is not None

    @property
    def stop_reason(self) -> TaskStopped | None:
        return self._stop

    def check(self) -> None:
        """Stop here if the task should stop; call it between steps of long work.

        Raises:
            TaskStopped: one of its subclasses says why.
        """
        if self._stop is not None:
            raise self._stop

    def wait(self, seconds: float) -> bool:
        """Sleep, but not past a request to stop; True when the task should stop."""
        with self._guard:
            if self._stop is not None:
                return True
            stopped = self._stopped = self._stopped or threading.Event()
        return stopped.wait(seconds)

    def progress(self, value: Any) -> None:
        """Save how far the work is: JSON data up to 1 KB. It rides on the next heartbeat and costs no extra write.

        Raises:
            ValueError: the value is not JSON data or too large.
        """
        text = dump_json(value, "the progress")
        if len(text.encode()) > PROGRESS_BYTES:
            raise ValueError(f"the progress has {len(text.encode())} bytes, at most {PROGRESS_BYTES} can be kept")
        with self._guard:
            self._progress = text

    def parent_results(self) -> Mapping[str, Any]:
        """Results of the tasks this one depends on, by task id; None for a parent that returned None or failed.

        A result that was not stored, or whose row is gone, raises `ParentResultLost`. One that could not be read raises
        a `StoreError` or `TaskUnreadable`; the others are there.
        """
        parents = self.parents()
        return parents if parents.unread else dict(parents)

    def failed_parents(self) -> Mapping[str, ParentFailure]:
        """The parents that did not succeed, by task id; only a task with `on_parent_failure="run"` runs after one."""
        return self.parents().failed

    def parents(self) -> ParentResults:
        """For the engine: the results of the parents."""
        found = self._parents() if self._parents else {}
        return found if isinstance(found, ParentResults) else ParentResults(found)

    def push(self, user_id: str, message: Any) -> int:
        """Push a message to every WebSocket connection of a user.

        It arrives as `{"type": "push", "id": …, "message": …}`, with the same id on each of them, and takes 10 s at
        most. In a
        coroutine use `await ctx.push_async(…)`.

        Args:
            user_id: the `sub` of the user's token.
            message: JSON data, up to 128 KiB.

        Returns:
            the number of connections that took it. 0 is no error: the user is not connected.

        Raises:
            ConfigurationError: `push_endpoint` and `push_connections` are not set.
            ValueError: the message is not JSON data.
            MessageTooLarge: nothing was sent.
            PushFailed: there are connections and none took it, for a reason that may pass; the task may be retried.
            StoreError: the table of connections did not answer; nothing was sent.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._pusher()(user_id, message)
        raise RuntimeError("ctx.push would hold up the event loop: use `await ctx.push_async(…)` in a coroutine")

    async def push_async(self, user_id: str, message: Any) -> int:
        """As `push`, in a thread: for coroutines and streams."""
        return await asyncio.to_thread(self._pusher(), user_id, message)

    def _pusher(self) -> Callable[[str, Any], int]:
        if self._push is None:
            raise ConfigurationError(
                "nothing can be pushed: set THUNDERAGENT_PUSH_ENDPOINT and THUNDERAGENT_PUSH_CONNECTIONS "
                "(docs/guides/websocket-api.md); in a test, Context(…, push=function)"
            )
        return self._push

    def use_push(self, push: Callable[[str, Any], int], place: tuple[str, str] | None = None) -> None:
        """For the engine: the pusher, and the two settings that it is made of."""
        self._push, self.push_place = push, place

    def take_progress(self) -> str | None:
        """For the engine: the progress since the last call."""
        with self._guard:
            text, self._progress = self._progress, None
        return text

    def keep_progress(self, text: str | None) -> None:
        """For the engine: the progress could not be sent; it rides on the next beat unless there is a newer one."""
        with self._guard:
            self._progress = self._progress or text

    def stop(self, why: TaskStopped) -> bool:
        """For the engine: ask the handler to stop. The first reason stays; True if this was it."""
        with self._guard:
            if self._stop is not None:
                return False
            self._stop = why
            on_stop, stopped = self._on_stop, self._stopped
        if stopped:
            stopped.set()
        if on_stop:
            on_stop(why)
        return True

    # What a stream answers otherwise; see `StreamContext`.

    def not_renewable(self) -> str | None:
        """For the engine: why this lease must not be renewed, or None."""
        return None

    def wedged(self, now: float) -> str | None:
        """For the engine: why this handler makes no progress at this monotonic second, or None."""
        return None

    def unsaved_cursor(self) -> Mapping[str, Any] | None:
        """For the engine: the cursor, if it is not in the row yet."""
        return None

    def cursor_saved(self, cursor: Mapping[str, Any] | None) -> None:
        """For the engine: this cursor is in the row now."""

    def extended(self, deadline: float, lease: Lease | None = None) -> None:
        """For the engine: the renewed lease is good until this monotonic second."""

    @property
    def grace_s(self) -> float:
        """For the engine: how long a handler that ends softly may take."""
        return 0.0

    def ends_softly(self, why: TaskStopped) -> bool:
        """For the engine: the handler ends by itself and need not be cancelled."""
        return False

    @property
    def ended_by(self) -> TaskStopped | None:
        """For the engine: what ended the handler although it returned, or None."""
        return None

    @property
    def has_progressed(self) -> bool:
        """For the engine: this run has shown that it works, so that earlier failures do not count."""
        return False

    def when_stopped(self, call: Callable[[TaskStopped], None]) -> None:
        """For the engine: call this with the reason as soon as the handler should stop."""
        with self._guard:
            self._on_stop = call
            why = self._stop
        if why is not None:
            call(why)
