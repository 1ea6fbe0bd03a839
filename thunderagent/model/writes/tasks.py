"""Conditional writes of tasks, as data: one pure function for each verb.

A `Write` says what is set, increased, removed, inserted and discarded, and what must hold for any of it to happen.
`stores/dynamo/expressions.py` renders it to UpdateItem, `stores/sqlite/sql.py` to one SQL statement.

Two rules for a new verb: no write without a condition (an update of a deleted row would create a ghost), and no
`increase` that counts twice when it is repeated (the SDK repeats a write whose reply was lost).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from thunderagent.model.conditions import Absent, Below, Condition, Either, Fewer, Is, OneOf, Write
from thunderagent.model.dependencies import most_dependents
from thunderagent.model.losses import ALONE, Loss
from thunderagent.model.rows import LEASE_ATTRIBUTES
from thunderagent.model.task import (
    STREAM,
    TERMINAL,
    WAITLIST_MARK,
    Candidate,
    Desired,
    Handoff,
    Lease,
    Row,
    Status,
    StatusValue,
    Task,
    timestamp,
)

JUST_BEHIND_S: Final = 0.0011
"""Moves a place in the queue by as little as a thousandth of a second can show."""

ERRORS_KEPT: Final = 10
ERROR_BYTES: Final = 1024


def cut(text: str, limit: int = ERROR_BYTES) -> str:
    """The text within a number of UTF-8 bytes; an ellipsis replaces the rest."""
    raw = text.encode(errors="backslashreplace")  # half a surrogate pair, of a file's name for example
    return raw.decode() if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "…"


def error_history(
    task: Task, message: str, *, agent: str | None, now: float, loss: Loss | None = None
) -> list[dict[str, Any]]:
    """The attribute `errors` after one more failed attempt: bounded in number and size."""
    entry: dict[str, Any] = {"at": timestamp(now), "attempt": task.attempt, "error": cut(message)}
    if agent:
        entry["agent"] = agent
    entry |= loss.kept if loss else {}
    return [*(dict(old) for old in task.errors), entry][-ERRORS_KEPT:]


# Verbs that take a task out of a queue and hold it.


def claim(candidate: Candidate, *, owner: str, lease_s: float, now: float, until: float) -> Write:
    """PENDING to RUNNING under a new fence.

    `createdAt` as seen guards against a stale index page: a task that failed and went back with a later due time is not
    taken early. A fresh task has no `lockTime`, hence both forms of the last condition.
    """
    place = StatusValue.parse(candidate.status_value)
    if place.status != Status.PENDING and place.waitlist is None:
        raise ValueError(f"{candidate.task_id} was seen as {candidate.status_value}, only PENDING can be claimed")
    # A task that was enqueued without its job's code is a batch task in its row; the agent that claims it knows better.
    kind = {"kind": candidate.kind} if candidate.kind == STREAM else {}
    return Write(
        verb="claim",
        task_id=candidate.task_id,
        set={
            **kind,
            "status": f"{Status.RUNNING}{place.suffix}",
            "lockTime": timestamp(until),
            "leaseOwner": owner,
            "leaseSec": lease_s,
            "hb": 0,
            "lastAgent": owner,
            "startedAt": timestamp(now),
            "updatedAt": timestamp(now),
        },
        increase={"fence": 1},
        require=(
            Is("status", candidate.status_value),
            Is("createdAt", candidate.created_at),
            Is("job", candidate.job),  # the doorbell's message may be wrong
            Either((Absent("lockTime"), Below("lockTime", timestamp(until - lease_s)))),
        ),
    )


def renew(
    lease: Lease,
    *,
    now: float,
    until: float,
    progress: str | None = None,
    last_seq: Mapping[str, Any] | None = None,
    forgive: bool = False,
) -> Write:
    """A heartbeat. Conditioned on the fence, not on the beat, so that a repetition is harmless.

    `forgive`: the stream does well, so earlier lost agents and errors do not count any more.
    """
    changes: dict[str, Any] = {"lockTime": timestamp(until), "updatedAt": timestamp(now)}
    if progress is not None:
        changes["progress"] = progress
    if last_seq is not None:
        changes["lastSeq"] = dict(last_seq)
    if forgive:
        changes |= {"retryCount": 0, "crashCount": 0}
    return Write(
        verb="renew",
        task_id=lease.task_id,
        set=changes,
        increase={"hb": 1},
        require=(*_holds(lease), Is("status", _running(lease.task))),
    )


def take_over(seen: Task, *, owner: str, lease_s: float, now: float, until: float, loss: Loss | None = None) -> Write:
    """The task of a lost agent gets a new holder and stays RUNNING; its beats must not have moved since it was seen."""
    loss = loss or Loss(seen.lease_owner)
    return Write(
        verb="take over",
        task_id=seen.task_id,
        set={
            "lockTime": timestamp(until),
            "leaseOwner": owner,
            "leaseSec": lease_s,
            "hb": 0,
            "lastAgent": owner,
            "updatedAt": timestamp(now),
            "crashCount": seen.crash_count + 1,
            "errors": error_history(seen, loss.words, agent=loss.agent, now=now, loss=loss),
        },
        increase={"fence": 1},
        require=_unmoved(seen),
    )


def give_up(seen: Task, *, error: str, now: float, expire_at: float, loss: Loss | None = None) -> Write:
    """FAILED instead of one more takeover: the task has lost as many agents as it may."""
    return Write(
        verb="give up",
        task_id=seen.task_id,
        set={
            **_end(seen, Status.FAILED, now=now, expire_at=expire_at),
            "error": cut(error),
            "crashCount": seen.crash_count + 1,
            "errors": error_history(seen, error, agent=seen.lease_owner, now=now, loss=loss),
        },
        remove=LEASE_ATTRIBUTES,
        require=_unmoved(seen),
    )


BARE_BYTES: Final = 300


def bare(write: Write) -> Write:
    """The same end of a task with nothing but a short reason, as the store does not take more."""
    named = ("status", "finishedAt", "updatedAt", "expireAt", "crashCount")
    kept = {name: value for name, value in write.set.items() if name in named}
    return replace(
        write,
        set={**kept, "error": cut(write.set["error"], BARE_BYTES)},
        remove=tuple(dict.fromkeys((*write.remove, "progress"))),
    )


def set_apart(lease: Lease, *, is_alone: bool, now: float) -> Write:
    """Note that nothing else runs beside a task that has lost agents, or that something does again."""
    *earlier, last = lease.task.errors
    kept = {name: value for name, value in last.items() if name != ALONE}
    entry = {**kept, ALONE: lease.fence} if is_alone else kept
    return Write(
        verb="set apart",
        task_id=lease.task_id,
        set={"errors": [*earlier, entry], "updatedAt": timestamp(now)},
        require=(*_holds(lease), Is("status", _running(lease.task))),
    )


# Verbs of the holder: each ends the lease.


def succeed(
    lease: Lease,
    *,
    now: float,
    expire_at: float,
    result: str | None = None,
    result_ref: str | None = None,
    note: str | None = None,
) -> Write:
    """RUNNING to SUCCESS. `note` says why a result could not be stored, or that the time limit was over."""
    changes = _end(lease.task, Status.SUCCESS, now=now, expire_at=expire_at)
    for name, value in (("result", result), ("resultRef", result_ref), ("error", note)):
        if value is not None:
            changes[name] = value
    return _settle("succeed", lease, changes)


def retry(lease: Lease, *, due: float, error: str, now: float) -> Write:
    """RUNNING to PENDING after a handler's error; one retry is used up."""
    return _settle(
        "retry",
        lease,
        {
            "status": lease.task.lane.value(Status.PENDING),
            "createdAt": timestamp(due),
            "updatedAt": timestamp(now),
            "retryCount": lease.task.retry_count + 1,
            "error": cut(error),
            "errors": error_history(lease.task, error, agent=lease.owner, now=now),
        },
    )


def snooze(lease: Lease, *, due: float, now: float) -> Write:
    """RUNNING to PENDING because the handler asked for later; no retry is used up."""
    return _back("snooze", lease, due=due, now=now)


def release(lease: Lease, *, now: float) -> Write:
    """RUNNING to PENDING because the agent stops; no retry is used up."""
    return _back("release", lease, due=now, now=now)


def put_back(lease: Lease, *, due: float, now: float) -> Write:
    """RUNNING to PENDING because the store could not say whether a permit is free: it was not started."""
    write = _back("put back", lease, due=due, now=now)
    return replace(write, remove=(*LEASE_ATTRIBUTES, "startedAt"))


def let_go(row: Row, *, owner: str, due: float, now: float) -> Write:
    """RUNNING to PENDING of a task that the claim shows to be unreadable here: it was not started."""
    return Write(
        verb="let go",
        task_id=row["taskId"],
        set={
            "status": f"{Status.PENDING}{StatusValue.parse(row['status']).suffix}",
            "createdAt": timestamp(due),
            "updatedAt": timestamp(now),
        },
        remove=(*LEASE_ATTRIBUTES, "startedAt"),
        require=(Is("status", row["status"]), Is("fence", row["fence"]), Is("leaseOwner", owner)),
    )


def wait_for_permit(lease: Lease, *, limit_key: str, now: float) -> Write:
    """RUNNING to BLOCKED, as its limit has no free permit: it was not started, and keeps its place.

    The place moves by a thousandth of a second, so that the new entry can be told from the old one.
    """
    write = _settle(
        "wait for permit",
        lease,
        {
            "status": f"{lease.task.lane.value(Status.BLOCKED)}{WAITLIST_MARK}{limit_key}",
            "createdAt": timestamp(lease.task.created_at + JUST_BEHIND_S),
            "limitKey": limit_key,
            "updatedAt": timestamp(now),
        },
    )
    return replace(write, remove=(*LEASE_ATTRIBUTES, "startedAt"))


def fail(lease: Lease, *, error: str, now: float, expire_at: float) -> Write:
    """RUNNING to FAILED: retries are used up, or the error was fatal."""
    return _settle(
        "fail",
        lease,
        {
            **_end(lease.task, Status.FAILED, now=now, expire_at=expire_at),
            "error": cut(error),
            "errors": error_history(lease.task, error, agent=lease.owner, now=now),
        },
    )


def close(lease: Lease, *, reason: str, now: float, expire_at: float) -> Write:
    """RUNNING to DONE: closed on purpose."""
    changes = _end(lease.task, Status.DONE, now=now, expire_at=expire_at)
    return _settle("close", lease, {**changes, "doneReason": cut(reason)})


def stop(lease: Lease, *, now: float, expire_at: float) -> Write:
    """RUNNING to DONE because a person stopped the stream; it can be started again."""
    changes = _end(lease.task, Status.DONE, now=now, expire_at=expire_at)
    return _settle("stop", lease, {**changes, "doneReason": STOPPED})


def with_cursor(write: Write, last_seq: Mapping[str, Any] | None) -> Write:
    """The same end of a stream's lease, with the cursor that is not yet saved."""
    return write if last_seq is None else replace(write, set={**write.set, "lastSeq": dict(last_seq)})


# Verbs of the handoff of a live stream.


def offer(lease: Lease, *, now: float, until: float) -> Write:
    """RUNNING to PENDING while the holder goes on handling messages, at most to `until` on the shared clock.

    The next holder connects, buffers, and handles nothing before `hand_over` or `until`.
    """
    write = _back("offer", lease, due=now, now=now)
    state = {"handoffOwner": lease.owner, "handoffUntil": timestamp(until), "handoffState": Handoff.OFFERED.value}
    return replace(write, set={**write.set, **state})


def ready(lease: Lease, *, now: float) -> Write:
    """The successor is connected and buffers: the old holder may stop."""
    return Write(
        verb="ready",
        task_id=lease.task_id,
        set={"handoffState": Handoff.READY.value, "updatedAt": timestamp(now)},
        require=(*_holds(lease), OneOf("handoffState", (Handoff.OFFERED.value, Handoff.READY.value))),
    )


def end_handoff(lease: Lease, *, now: float) -> Write:
    """The time of the offer is over: a late `hand_over` is refused."""
    ended = {"handoffState": Handoff.DONE.value, "updatedAt": timestamp(now)}
    return replace(ready(lease, now=now), verb="end handoff", set=ended)


def hand_over(task_id: str, *, owner: str, last_seq: Mapping[str, Any] | None, now: float) -> Write:
    """The old holder has stopped handling messages, behind `last_seq`. Refused when a later offer is open."""
    changes: dict[str, Any] = {"handoffState": Handoff.DONE.value, "updatedAt": timestamp(now)}
    if last_seq is not None:
        changes["lastSeq"] = dict(last_seq)
    return Write(
        verb="hand over",
        task_id=task_id,
        set=changes,
        require=(
            Is("handoffOwner", owner),
            OneOf("handoffState", (Handoff.OFFERED.value, Handoff.READY.value)),
        ),
    )


# Verbs for tasks that nobody holds, each conditioned on the status as seen.


def cancel_waiting(seen: Task, *, reason: str, now: float, expire_at: float) -> Write:
    return Write(
        verb="cancel",
        task_id=seen.task_id,
        set={**_end(seen, Status.DONE, now=now, expire_at=expire_at), "doneReason": cut(reason)},
        remove=("waitingFor",),
        require=(Is("status", seen.status_value), Is("fence", seen.fence)),
    )


def join_waitlist(seen: Candidate, *, limit_key: str, now: float) -> Write:
    """PENDING to BLOCKED on the waitlist of its job's limit, unless it has another limit of its own."""
    place = StatusValue.parse(seen.status_value)
    return Write(
        verb="join waitlist",
        task_id=seen.task_id,
        set={
            "status": f"{Status.BLOCKED}{place.suffix}{WAITLIST_MARK}{limit_key}",
            "limitKey": limit_key,
            "updatedAt": timestamp(now),
        },
        require=(
            Is("status", seen.status_value),
            Is("createdAt", seen.created_at),
            Is("job", seen.job),
            Either((Absent("limitKey"), Is("limitKey", limit_key))),
        ),
    )


def leave_waitlist(seen: Candidate, *, now: float) -> Write:
    """BLOCKED on a waitlist to PENDING in its queue, a little further back as in `wait_for_permit`."""
    place = StatusValue.parse(seen.status_value)
    return Write(
        verb="leave waitlist",
        task_id=seen.task_id,
        set={
            "status": f"{Status.PENDING}{place.suffix}",
            "createdAt": timestamp(seen.created_at + JUST_BEHIND_S),
            "updatedAt": timestamp(now),
        },
        require=(Is("status", seen.status_value), Is("createdAt", seen.created_at)),
    )


def request_cancel(seen: Task, *, now: float) -> Write:
    """Ask the holder of a RUNNING task to stop; the reply to its next heartbeat says so."""
    return _note("request cancel", seen, {"cancelRequested": True}, now=now)


def stop_waiting(seen: Task, *, now: float, expire_at: float) -> Write:
    """PENDING or BLOCKED to DONE because a person stopped the stream."""
    write = cancel_waiting(seen, reason=STOPPED, now=now, expire_at=expire_at)
    return replace(write, verb="stop waiting", set={**write.set, "desiredState": Desired.STOPPED.value})


def request_stop(seen: Task, *, now: float) -> Write:
    """Ask the holder of a stream to stop; the reply to its next heartbeat says so."""
    return _note("request stop", seen, {"desiredState": Desired.STOPPED.value}, now=now)


def request_start(seen: Task, *, now: float) -> Write:
    """Take back a request to stop that came too late: the stream is in its queue again."""
    return _note("request start", seen, {"desiredState": Desired.STARTED.value}, now=now)


def revive(seen: Task, *, now: float, waiting_for: frozenset[str] = frozenset()) -> Write:
    """FAILED or DONE back to the queue by hand, with fresh budgets; `errors` stays as its history."""
    if seen.status not in (Status.FAILED, Status.DONE):
        raise ValueError(f"{seen.task_id} is {seen.status}, only FAILED and DONE can be retried")
    changes: dict[str, Any] = {
        "status": seen.lane.value(Status.BLOCKED if waiting_for else Status.PENDING),
        "createdAt": timestamp(now),
        "updatedAt": timestamp(now),
        "retryCount": 0,
        "crashCount": 0,
    }
    if waiting_for:
        changes["waitingFor"] = waiting_for
    if seen.is_stream or seen.desired_state is not None:  # stopped before any agent knew that it is a stream
        changes["desiredState"] = Desired.STARTED.value
    return Write(
        verb="revive",
        task_id=seen.task_id,
        set=changes,
        remove=("finishedAt", "expireAt", "error", "doneReason", "cancelRequested", "progress", "startedAt"),
        require=(
            Is("status", seen.status_value),
            Is("fence", seen.fence),
            Is("finishedAt", seen.finished_at),
        ),
    )


def stay_ended(seen: Task, *, now: float) -> Write:
    """A new fence for a task that has ended: no caller that saw it before can revive it."""
    still = {"status": seen.status_value}  # differs if it lives again at that moment
    return replace(_note("stay ended", seen, still, now=now), increase={"fence": 1})


# Verbs of dependencies.


def register_dependent(parent: Task, *children: str) -> Write:
    """Note the children at their parent; refused when it is gone, has ended, or its row has no room left."""
    open_values = tuple(parent.lane.value(status) for status in Status if status not in TERMINAL)
    if line := parent.waitlist or parent.limit_key:
        open_values += (f"{parent.lane.value(Status.BLOCKED)}{WAITLIST_MARK}{line}",)
    return Write(
        verb="register dependent",
        task_id=parent.task_id,
        insert={"dependents": frozenset(children)},
        require=(OneOf("status", open_values), Fewer("dependents", most_dependents(parent, children))),
    )


def parent_done(child: Task, parent_id: str) -> Write:
    """Take one parent off a BLOCKED child's list; repeating it changes nothing."""
    return Write(
        verb="parent done",
        task_id=child.task_id,
        discard={"waitingFor": parent_id},
        require=(Is("status", child.lane.value(Status.BLOCKED)),),
    )


def unpark(child: Task, *, now: float, due: float | None = None) -> Write:
    """BLOCKED to PENDING once no parent is open; a later due time of its own is kept."""
    return Write(
        verb="unpark",
        task_id=child.task_id,
        set={
            "status": child.lane.value(Status.PENDING),
            "createdAt": timestamp(max(now, due or now)),
            "updatedAt": timestamp(now),
        },
        require=(Is("status", child.lane.value(Status.BLOCKED)), Absent("waitingFor")),
    )


def doom(child: Task, *, status: Status, reason: str, now: float, expire_at: float) -> Write:
    text = {"error": cut(reason)} if status is Status.FAILED else {"doneReason": cut(reason)}
    return Write(
        verb="doom",
        task_id=child.task_id,
        set={**_end(child, status, now=now, expire_at=expire_at), **text},
        remove=("waitingFor",),
        # The place in the queue too: a child that was revived meanwhile waits for its parents again.
        require=(Is("status", child.lane.value(Status.BLOCKED)), Is("createdAt", child.created_at)),
    )


STOPPED: Final = "stopped"


def _note(verb: str, seen: Task, changes: Mapping[str, Any], *, now: float) -> Write:
    """Change a few attributes of a task unless its status or fence has changed."""
    return Write(
        verb=verb,
        task_id=seen.task_id,
        set={**changes, "updatedAt": timestamp(now)},
        require=(Is("status", seen.status_value), Is("fence", seen.fence)),
    )


def _running(task: Task) -> str:
    return task.lane.value(Status.RUNNING)


def _unmoved(seen: Task) -> tuple[Condition, ...]:
    return (Is("status", _running(seen)), Is("fence", seen.fence), Is("hb", seen.hb))


def _end(task: Task, status: Status, *, now: float, expire_at: float) -> dict[str, Any]:
    return {
        "status": task.lane.value(status),
        "finishedAt": timestamp(now),
        "updatedAt": timestamp(now),
        "expireAt": int(expire_at),
    }


def _settle(verb: str, lease: Lease, changes: Mapping[str, Any]) -> Write:
    return Write(
        verb=verb,
        task_id=lease.task_id,
        set=changes,
        remove=LEASE_ATTRIBUTES,
        require=(*_holds(lease), Is("status", _running(lease.task))),
    )


def _holds(lease: Lease) -> tuple[Condition, ...]:
    """The lease is still this one. The owner too: after a purge the id may be used again, with fences from 1.

    And the epoch: two regions that were cut off from each other may have given the same fence.
    """
    epoch = lease.task.region_epoch
    held = (Is("fence", lease.fence), Is("leaseOwner", lease.owner))
    return held if epoch is None else (*held, Is("regionEpoch", epoch))


def _back(verb: str, lease: Lease, *, due: float, now: float) -> Write:
    return _settle(
        verb,
        lease,
        {
            "status": lease.task.lane.value(Status.PENDING),
            "createdAt": timestamp(due),
            "updatedAt": timestamp(now),
        },
    )
