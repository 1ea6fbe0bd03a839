"""Tasks of an event, and the ids that make a redelivery harmless."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, Unpack, overload
from urllib.parse import quote

from thunderagent.client import Client
from thunderagent.jobs.job import Job
from thunderagent.model.errors import ConfigurationError, DuplicateTask, PayloadInvalid
from thunderagent.model.jsondata import dump_json
from thunderagent.model.names import plain_job
from thunderagent.model.task import Task
from thunderagent.queue.enqueue import EnqueueOptions, check_names

P = TypeVar("P")

_KEPT: Final = "-_.~:@/= "
"""Characters kept in an id beside letters and digits; '+' begins the number of a further task."""


Options: TypeAlias = "EnqueueOptions[Task | str | Enqueue]"
"""Options of `Client.enqueue`; a parent may also be an `Enqueue` of the same answer."""


class Enqueue:
    """A task to enqueue: a job with its payload, and options of `Client.enqueue`.

    Args:
        job: a job, whose payload type is checked; or a name, where the code of the job is elsewhere.
        payload: the input of the handler, made from the event alone: a redelivery must give the same.
        options: those of `Client.enqueue`. `depends_on` may name an `Enqueue` before this one in the same answer.
            A `task_id` replaces the id that is made from the event.

    Raises:
        ConfigurationError: there is no such option.
    """

    __slots__ = ("job", "options", "payload")

    @overload
    def __init__(self, job: Job[P], payload: P, **options: Unpack[Options]) -> None: ...

    @overload
    def __init__(
        self,
        job: str,
        payload: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None: ...

    def __init__(self, job: Job[Any] | str, payload: Any = None, **options: Any) -> None:
        check_names("Enqueue", options, EnqueueOptions.__annotations__)
        self.job = job
        self.payload = payload
        # None must not replace the id that is made from the event: a redelivery would be a new task.
        self.options: Mapping[str, Any] = {
            name: one for name, one in options.items() if (name, one) != ("task_id", None)
        }

    def __repr__(self) -> str:
        return f"Enqueue({self.name!r})"  # the payload may be a secret

    @property
    def name(self) -> str:
        """The job's name without a version: a redelivery after a deploy gives the same ids."""
        return plain_job(self.job) if isinstance(self.job, str) else self.job.name

    def check(self) -> None:
        """Check the payload.

        Raises:
            PayloadInvalid: it does not fit the job or is not JSON data.
        """
        if isinstance(self.job, str):
            dump_json(self.payload, f"the payload of {self.job!r}", PayloadInvalid)
        else:
            self.job.dump_payload(self.payload)


def put_all(client: Client, tasks: Sequence[Enqueue], event_key: str | None, *, may_differ: bool) -> list[Task]:
    """Put the tasks of one event, in order, and return the tasks in the store.

    All payloads are checked first. After a failure in between, the next delivery finds the tasks before it by their
    ids and goes on.

    Args:
        client: puts them.
        tasks: the answer of the route.
        event_key: identifies the event; None: each task gets a new id.
        may_differ: accept an existing task with another payload, as after a change of the route between deliveries.

    Raises:
        PayloadError: a payload does not fit its job, is not JSON data, or is too large.
        DuplicateTask: an id is taken by another task.
        ParentNotFound: a parent does not exist.
        ConfigurationError: an option cannot work, or a parent does not stand before its child.
        StoreError: the store did not take it.
    """
    if len(tasks) > 1:
        for one in tasks:
            one.check()
    put: dict[int, Task] = {}
    for one, task_id in zip(tasks, _task_ids(tasks, event_key), strict=True):
        options = {"task_id": task_id} | dict(one.options)
        if "depends_on" in options:
            options["depends_on"] = _parents(options["depends_on"], put)
        enqueue: Callable[..., Task] = client.enqueue
        try:
            put[id(one)] = enqueue(one.job, one.payload, **options)
        except DuplicateTask:
            if not may_differ or task_id is None or options["task_id"] != task_id:
                raise
            existing = client.get(task_id)
            if existing.job != one.name:
                raise
            put[id(one)] = existing
    return [put[id(one)] for one in tasks]


def event_key(source: str, event_id: str) -> str:
    """The part of task ids that identifies an event, printable whatever the event's id is."""
    return f"{source}:{quote(event_id, safe=_KEPT, errors='replace')}"


def _task_ids(tasks: Sequence[Enqueue], key: str | None) -> Iterator[str | None]:
    """`job@key` for the first task of each job, `job@key+2` for the second.

    With the job in the id, two functions may take the same event, and a further job changes no other id.
    """
    seen = Counter[str]()
    for one in tasks:
        seen[one.name] += 1
        number = "" if seen[one.name] == 1 else f"+{seen[one.name]}"
        yield None if key is None else f"{one.name.replace('#', '%23')}@{key}{number}"


def _parents(given: Any, put: Mapping[int, Task]) -> list[Task | str]:
    parents: list[Task | str] = []
    for one in [given] if isinstance(given, (str, Task, Enqueue)) else given:
        if isinstance(one, Enqueue) and id(one) not in put:
            raise ConfigurationError(f"{one!r} in depends_on must stand before its child in the answer of the route")
        parents.append(put[id(one)] if isinstance(one, Enqueue) else one)
    return parents
