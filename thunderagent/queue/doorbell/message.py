"""Rings: what processes tell each other so that nobody waits for the next poll.

A ring is a hint and never the truth. Whoever gets one looks at the store, or tries a claim with the conditions that
every claim has: a ring that was lost, doubled, delayed or forged changes when something is looked at and nothing else.
So a message is read with suspicion: what is not exactly a message of ours is no message.
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
MAX_RINGS: Final = 10
"""Rings in one message at most."""

MAX_BYTES: Final = 8 * 1024
"""Length of one message at most."""

LATEST: Final = 10_000_000_000.0
LONGEST_TEXT: Final = 512


class Verb(StrEnum):
    """What a ring asks for.

    * `TASK`: claim this task.
    * `LOOK`: look into this queue.
    * `BEAT`: renew the lease of this task now, as its row has something to tell (a cancel, a stop).
    """

    TASK = "task"
    LOOK = "look"
    BEAT = "beat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One hint. `at` is the moment (epoch seconds) before which there is nothing to do."""

    verb: Verb
    queue: str = ""
    at: float = 0.0
    task_id: str = ""
    status_value: str = ""
    job: str = ""
    kind: str = BATCH
    owner: str = ""

    @classmethod
    def task(cls, task: Task | Candidate) -> Ring:
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
    def look(cls, queue: str, at: float = 0.0) -> Ring:
        """Look into a queue, from a moment on."""
        return cls(verb=Verb.LOOK, queue=queue, at=at)

    @classmethod
    def beat(cls, task_id: str, owner: str) -> Ring:
        """Let the agent that holds a task renew its lease now."""
        return cls(verb=Verb.BEAT, task_id=task_id, owner=owner)

    @property
    def candidate(self) -> Candidate:
        """The index entry that the ring tells of."""
        return Candidate(self.task_id, self.status_value, self.at, self.job, self.kind)


def pack(rings: Iterable[Ring], *, most: int = MAX_RINGS) -> list[str]:
    """The rings as messages of `most` rings and `MAX_BYTES` bytes at most; one that is too long alone is left out."""
    messages: list[str] = []
    batch: list[dict[str, Any]] = []
    for one in map(_as_data, rings):
        if batch and (len(batch) >= most or not _fits([*batch, one])):
            messages.append(_text(batch))
            batch = []
        if _fits([*batch, one]):
            batch.append(one)
    if batch:
        messages.append(_text(batch))
    return messages


def parse(message: str | bytes) -> tuple[Ring, ...] | None:
    """The rings of a message; None for one that is not exactly a message of ours."""
    if not 0 < len(message) <= MAX_BYTES:
        return None
    try:
        data = json.loads(message)
        if type(data) is not dict or data.keys() != {"thunderagent", "rings"} or data["thunderagent"] != VERSION:
            return None
        rings = data["rings"]
        if type(rings) is not list or not 1 <= len(rings) <= MAX_RINGS:
            return None
        return tuple(_ring(one) for one in rings)
    except (ValueError, TypeError, KeyError, RecursionError, ConfigurationError):
        return None


def _text(batch: list[dict[str, Any]]) -> str:
    return json.dumps({"thunderagent": VERSION, "rings": batch}, separators=(",", ":"))


def _fits(batch: list[dict[str, Any]]) -> bool:
    return len(_text(batch)) <= MAX_BYTES  # of ASCII, so that characters are bytes


def _as_data(ring: Ring) -> dict[str, Any]:
    match ring.verb:
        case Verb.TASK:
            keys = {"id": ring.task_id, "status": ring.status_value, "at": ring.at, "job": ring.job, "kind": ring.kind}
        case Verb.LOOK:
            keys = {"queue": ring.queue, "at": ring.at}
        case Verb.BEAT:
            keys = {"id": ring.task_id, "owner": ring.owner}
    return {"verb": str(ring.verb), **keys}


def _ring(data: Mapping[str, Any]) -> Ring:
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
            return Ring.task(candidate)
        case {"verb": "look", "queue": queue, "at": at} if len(data) == 3:
            return Ring.look(Lane(_checked(queue)).queue, _moment(at))
        case {"verb": "beat", "id": task_id, "owner": owner} if len(data) == 3:
            return Ring.beat(_checked(task_id), _checked(owner))
        case _:
            raise ValueError("no ring")


def _checked(text: Any) -> str:
    if type(text) is not str or not text.isprintable() or not 1 <= len(text.encode()) <= LONGEST_TEXT:
        raise ValueError("no text of ours")
    return text


def _moment(at: Any) -> float:
    """Epoch seconds with the three decimals that the table has."""
    if type(at) not in (int, float) or not math.isfinite(at) or not 0 <= at <= LATEST:
        raise ValueError("no moment")
    return float(round(at * 1000) / 1000)
