"""Doorbell messages: hints that save an agent the wait for its next poll.

A message is a hint and never the truth. The agent looks at the store, or claims with the conditions of every claim. A
message that was lost, doubled, delayed or forged changes when something is looked at and nothing else. Messages travel
in packets, and a packet that is not exactly one of ours is dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from thunderagent.model.errors import ConfigurationError
from thunderagent.model.task import BATCH, STREAM, Candidate, Lane, Status, StatusValue, Task

VERSION: Final = 1
MOST_MESSAGES: Final = 10
"""Messages in one packet at most."""

MAX_BYTES: Final = 8 * 1024
"""Length of one packet at most."""

LATEST: Final = 10_000_000_000.0
LONGEST_TEXT: Final = 512


class Verb(StrEnum):
    """What a message asks for.

    * `TASK`: claim this task.
    * `LOOK`: look into this queue.
    * `BEAT`: renew the lease of this task now, as its row has news (a cancel, a stop).
    """

    TASK = "task"
    LOOK = "look"
    BEAT = "beat"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorbellMessage:
    """One hint. Before `at` (epoch seconds) there is nothing to do."""

    verb: Verb
    queue: str = ""
    at: float = 0.0
    task_id: str = ""
    status_value: str = ""
    job: str = ""
    kind: str = BATCH
    owner: str = ""

    @classmethod
    def task(cls, task: Task | Candidate) -> DoorbellMessage:
        """Claim a task that waits in its queue."""
        return cls(
            verb=Verb.TASK,
            queue=Lane.parse(StatusValue.parse(task.status_value).suffix).queue,
            at=task.created_at,
            task_id=task.task_id,
            status_value=task.status_value,
            job=task.job_value if isinstance(task, Task) else task.job,
            kind=task.kind,
        )

    @classmethod
    def look(cls, queue: str, at: float = 0.0) -> DoorbellMessage:
        """Look into a queue, from a moment on."""
        return cls(verb=Verb.LOOK, queue=queue, at=at)

    @classmethod
    def beat(cls, task_id: str, owner: str) -> DoorbellMessage:
        """Let the agent that holds a task renew its lease now."""
        return cls(verb=Verb.BEAT, task_id=task_id, owner=owner)

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.task_id, self.status_value, self.at, self.job, self.kind)


def pack(messages: Iterable[DoorbellMessage], *, most: int = MOST_MESSAGES) -> list[str]:
    """The messages as packets of at most `most` messages and `MAX_BYTES` bytes; one that is too long is left out."""
    packets: list[str] = []
    batch: list[dict[str, Any]] = []
    for one in map(_as_data, messages):
        if batch and (len(batch) >= most or not _fits([*batch, one])):
            packets.append(_text(batch))
            batch = []
        if _fits([*batch, one]):
            batch.append(one)
    if batch:
        packets.append(_text(batch))
    return packets


def parse(packet: str | bytes) -> tuple[DoorbellMessage, ...] | None:
    """The messages of a packet; None for one that is not exactly a packet of ours."""
    if not 0 < len(packet) <= MAX_BYTES:
        return None
    try:
        data = json.loads(packet)
        if type(data) is not dict or data.keys() != {"thunderagent", "rings"} or data["thunderagent"] != VERSION:
            return None
        several = data["rings"]
        if type(several) is not list or not 1 <= len(several) <= MOST_MESSAGES:
            return None
        return tuple(map(_message, several))
    except (ValueError, TypeError, KeyError, RecursionError, ConfigurationError):
        return None


def _text(batch: list[dict[str, Any]]) -> str:
    return json.dumps({"thunderagent": VERSION, "rings": batch}, separators=(",", ":"))


def _fits(batch: list[dict[str, Any]]) -> bool:
    return len(_text(batch)) <= MAX_BYTES  # of ASCII, so that characters are bytes


def _as_data(one: DoorbellMessage) -> dict[str, Any]:
    match one.verb:
        case Verb.TASK:
            keys = {"id": one.task_id, "status": one.status_value, "at": one.at, "job": one.job, "kind": one.kind}
        case Verb.LOOK:
            keys = {"queue": one.queue, "at": one.at}
        case Verb.BEAT:
            keys = {"id": one.task_id, "owner": one.owner}
    return {"verb": str(one.verb), **keys}


def _message(data: Mapping[str, Any]) -> DoorbellMessage:
    match data:
        case {"verb": "task", "id": task_id, "status": value, "at": at, "job": job, "kind": kind} if len(data) == 6:
            status, suffix, line = StatusValue.parse(_checked(value))
            lane = Lane.parse(suffix)
            if (
                line is not None
                or status != Status.PENDING
                or lane.value(status) != value
                or kind not in (BATCH, STREAM)
            ):
                raise ValueError("no task that could be claimed")
            candidate = Candidate(_checked(task_id), value, _moment(at), _checked(job), kind)
            return DoorbellMessage.task(candidate)
        case {"verb": "look", "queue": queue, "at": at} if len(data) == 3:
            return DoorbellMessage.look(Lane(_checked(queue)).queue, _moment(at))
        case {"verb": "beat", "id": task_id, "owner": owner} if len(data) == 3:
            return DoorbellMessage.beat(_checked(task_id), _checked(owner))
        case _:
            raise ValueError("no message of ours")


def _checked(text: Any) -> str:
    if type(text) is not str or not text.isprintable() or not 1 <= len(text.encode()) <= LONGEST_TEXT:
        raise ValueError("no text of ours")
    return text


def _moment(at: Any) -> float:
    """Epoch seconds with the three decimals that the table has."""
    if type(at) not in (int, float) or not math.isfinite(at) or not 0 <= at <= LATEST:
        raise ValueError("no moment")
    return float(round(at * 1000) / 1000)
