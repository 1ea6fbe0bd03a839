"""The store: the verbs of the queue over an engine that holds the rows.

An `Engine` has a handful of primitives in batches. `TaskStore` has the verbs, and with them the rules of ownership:

* a claim answers with a `Lease` for each task won, and nothing for those lost;
* every later write of the holder is built from its `Lease`;
* a refused write whose row shows exactly what it would have left is our own, its reply lost: a win;
* a lost race is a value, a broken dependency is an exception (or an `error` beside the others of its batch);
* a row that cannot be read is a value: readers of many rows leave it out, and it is named once (`unread`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from thunderagent.model.clock import BootClock, SharedClock, since_boot
from thunderagent.model.conditions import Write
from thunderagent.model.errors import DuplicateTask, StoreError, StoreRejected, TaskUnreadable
from thunderagent.model.losses import Loss
from thunderagent.model.rows import Unread, Unreadable, is_list, is_number, mistyped
from thunderagent.model.task import BATCH, STREAM, Candidate, Lane, Lease, Page, Row, Status, Task, read_task, timestamp
from thunderagent.model.writes import agents as agent_writes
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.engine import Applied, Blobs, Engine
from thunderagent.stores.large_texts import LargeTexts, is_same_payload

TEXT_DOUBT_S: Final = 300.0
"""Age at which an enqueue writes its payloads once more: `TEXT_SETTLES_S` may be over before its rows came."""


Rejections = Callable[[Write, StoreRejected], None]
"""Called for each write of a batch that the store never takes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A candidate and the length of the lease that its job has."""

    candidate: Candidate
    lease_s: float


@dataclass(frozen=True, slots=True)
class Doubt:
    """A claim without an answer, which may have happened; `sent` is the monotonic second before it was sent."""

    wanted: Wanted
    sent: float


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Outcome of an exchange: one answer for each settlement, the leases won, the claims lost and those in doubt.

    A lease whose payload could not be read has the reason in its task, as `payload_error`.
    """

    settled: list[Settled]
    leases: list[Lease]
    lost: list[Candidate]
    doubts: list[Doubt]
    error: StoreError | None = None
    """Why something had no answer; a write that is rejected for good had one."""
    rejected: list[tuple[Candidate, StoreRejected]] = field(default_factory=list)
    """Of the claims lost, those that the store never takes."""

    @property
    def answered(self) -> bool:
        """Whether at least one part had an answer."""
        return bool(self.leases or self.lost or any(not one.is_unknown for one in self.settled))


@dataclass(frozen=True, slots=True)
class Beat:
    lease: Lease
    progress: str | None = None
    last_seq: Mapping[str, Any] | None = None
    forgive: bool = False


@dataclass(frozen=True, slots=True)
class Renewal:
    """Outcome of one heartbeat: a renewed `lease` with the row as it is now, `lost`, or neither for want of an
    answer."""

    lease: Lease | None = None
    lost: bool = False
    taken_by: str | None = None
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """Outcome of one settlement: `accepted` with the tasks that wait for it, refused, or unknown or rejected by an
    `error`."""

    accepted: bool = False
    dependents: frozenset[str] = frozenset()
    error: StoreError | None = None

    @property
    def is_rejected(self) -> bool:
        """Whether the store never takes the settlement."""
        return isinstance(self.error, StoreRejected)

    @property
    def is_unknown(self) -> bool:
        return self.error is not None and not self.is_rejected


@dataclass(frozen=True, slots=True)
class Enqueued:
    """Outcome of one enqueue: the task in the store, and whether this call created it; or the `error`."""

    task: Task
    created: bool
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """An agent as its row says: `info` has host, pid, version, queues, running, jobs and health; `is_lost`: the row
    is overdue."""

    name: str
    started_at: float
    seen_at: float
    info: Mapping[str, Any]
    is_lost: bool = False


def ignore_rejection(write: Write, error: StoreRejected) -> None:
    """Ignore a write that the store never takes, and go on with those beside it: a later look finds the row."""


def _read_agent(row: Row, earliest: float) -> AgentInfo | Unreadable:
    if name := mistyped(row, ("createdAt", "updatedAt", "expireAt", "info")):
        return Unreadable.of(row, name)
    info = row.get("info", {})
    if not isinstance(info.get("queues"), Mapping) or not is_list(info.get("jobs") or ()):
        return Unreadable.of(row, "info")
    is_lost = row.get("expireAt", 0) <= earliest
    return AgentInfo(row["taskId"].removeprefix("agent:"), row["createdAt"], row.get("updatedAt", 0.0), info, is_lost)


class TaskStore:
    def __init__(
        self,
        engine: Engine,
        *,
        blobs: Blobs | None = None,
        monotonic: Callable[[], float] = since_boot,
        unread: Unread | None = None,
    ) -> None:
        self.engine = engine
        self.large_texts = LargeTexts(engine, blobs)
        self.monotonic = monotonic
        self.unread = unread or Unread(monotonic)
        """The rows that could not be read here, and in the siblings."""

    def over(self, engine: Engine) -> TaskStore:
        """The same store over an engine in front of this one, or beside it."""
        return TaskStore(engine, blobs=self.large_texts.blobs, monotonic=self.monotonic, unread=self.unread)

    @property
    def clock(self) -> SharedClock:
        """The clock of all agents; what holds among them for a time counts on its `leases`."""
        return self.engine.clock

    def sibling(self) -> TaskStore:
        """The same store through connections of its own."""
        return self.over(self.engine.sibling())

    # Putting and reading

    def enqueue(self, tasks: Sequence[Task], *, fresh: bool = False) -> list[Enqueued]:
        """Put new tasks. An id of the same job with the same payload, or of another version, answers with its task."""
        begun, stored = self.monotonic(), [self.large_texts.put_payload(task) for task in tasks]
        rows = [one.to_row() for one in stored if isinstance(one, Task)]
        answers = iter(self.engine.put(rows, fresh=fresh) if rows else ())
        enqueued = [
            self._enqueued(task, next(answers)) if isinstance(one, Task) else Enqueued(task, created=False, error=one)
            for task, one in zip(tasks, stored, strict=True)
        ]
        if self.monotonic() - begun > TEXT_DOUBT_S:
            again = [self.large_texts.put_again(task) for task in tasks]
            enqueued = [replace(one, error=one.error or error) for one, error in zip(enqueued, again, strict=True)]
        return enqueued

    def get(self, task_ids: Iterable[str]) -> dict[str, Task]:
        """Tasks by id with payload and result; ids without a task are left out.

        A text that cannot be read concerns its task alone, as `payload_error` or `result_error`.
        """
        return {task.task_id: task for task in self.large_texts.inflate(self.peek(task_ids).values())}

    def peek(self, task_ids: Iterable[str]) -> dict[str, Task]:
        """As `get`, without texts outside the rows."""
        return {name: one for name, one in self.read(task_ids).items() if isinstance(one, Task)}

    def read(self, task_ids: Iterable[str]) -> dict[str, Task | Unreadable]:
        """As `peek`, with those that cannot be read: a row that is there differs from one that is not."""
        rows = self.engine.get(list(dict.fromkeys(task_ids)))
        return {name: self._read(row) for name, row in rows.items() if "job" in row}

    def lanes(self) -> list[Lane]:
        """Every lane that ever held a task."""

        def strange(suffix: str) -> None:
            self.unread.note(Unreadable(suffix, "status", f"of no lane: {suffix:.100}"))

        return self.engine.lanes(strange)

    def may_try(self, entry: Candidate) -> bool:
        """Whether an entry of the index is worth a claim: not if its row or its kind could not be read here."""
        if entry.kind not in (BATCH, STREAM):
            self.unread.note(Unreadable(entry.task_id, "kind", f"{entry.kind!r:.80}"))
            return False
        return not self.unread.is_left_alone(entry.task_id)

    def ready(self, lane: Lane, *, limit: int, after: Any = None, ahead_s: float = 0.0) -> Page:
        """Entries of a lane's tasks that are due, or will be, oldest first. Maybe stale: only a claim decides."""
        until = self.clock.latest() + ahead_s
        return self.engine.page(lane.value(Status.PENDING), limit=limit, until=until, after=after)

    # Ownership

    def exchange(self, settlements: Sequence[Write], wanted: Sequence[Wanted], *, owner: str) -> Exchanged:
        """Settle what has ended and claim what comes next, in one call to the engine.

        The settlements come first, and each says whether it was accepted: a refused one was of a lost lease.
        """
        now, until = self.clock.now(), self.clock.leases.latest()
        claims = [
            writes.claim(one.candidate, owner=owner, lease_s=one.lease_s, now=now, until=until + one.lease_s)
            for one in wanted
        ]
        sent = self.monotonic()
        answers = self._apply([*settlements, *claims])
        settled = [_settled(answer, won) for answer, won in answers[: len(settlements)]]
        return self._exchanged(settled, wanted, answers[len(settlements) :], owner, sent)

    def claim(self, wanted: Sequence[Wanted], *, owner: str) -> list[Lease]:
        """Try to claim each; the answer holds a lease for each task won.

        Raises:
            StoreError: no claim was won and at least one had no answer.
        """
        return _leases_of(self.exchange((), wanted, owner=owner))

    def settle(self, batch: Sequence[Write]) -> list[Settled]:
        """Do the writes that end leases."""
        return self.exchange(batch, (), owner="").settled

    def resolve(self, doubts: Sequence[Doubt], *, owner: str) -> list[Lease]:
        """Look at claims that had no answer: those that did happen are leases of ours."""
        rows = self.get(doubt.wanted.candidate.task_id for doubt in doubts)
        unread = [doubt.wanted.candidate.task_id for doubt in doubts if doubt.wanted.candidate.task_id not in rows]
        if unread:
            self._let_go(list(self.engine.get(unread).values()), owner)
        return [
            Lease(task=task, owner=owner, fence=task.fence, lease_s=doubt.wanted.lease_s, held_from=doubt.sent)
            for doubt in doubts
            if (task := rows.get(doubt.wanted.candidate.task_id)) is not None
            and (task.status, task.lease_owner) == (Status.RUNNING, owner)
        ]

    def take_over(
        self, seen: Sequence[tuple[Task, float]], *, owner: str, losses: Mapping[str, Loss] | None = None
    ) -> Exchanged:
        """Take tasks of lost agents, each with the length of the new lease.

        Args:
            seen: the tasks and lease lengths.
            owner: the agent that takes them.
            losses: what is known of each loss, by the id of the task.
        """
        now, until = self.clock.now(), self.clock.leases.latest()
        batch = [
            writes.take_over(
                task,
                owner=owner,
                lease_s=lease_s,
                now=now,
                until=until + lease_s,
                loss=losses.get(task.task_id) if losses else None,
            )
            for task, lease_s in seen
        ]
        wanted = [
            Wanted(Candidate(task.task_id, task.status_value, task.created_at, task.job_value, task.kind), lease_s)
            for task, lease_s in seen
        ]
        sent = self.monotonic()
        return self._exchanged([], wanted, self._apply(batch), owner, sent)

    def renew(self, beats: Sequence[Beat]) -> list[Renewal]:
        """Send heartbeats. No answer is neither a win nor a loss: the holder goes on until its deadline."""
        now, until = self.clock.now(), self.clock.leases.latest()
        batch = [
            writes.renew(
                beat.lease,
                now=now,
                until=until + beat.lease.lease_s,
                progress=beat.progress,
                last_seq=beat.last_seq,
                forgive=beat.forgive,
            )
            for beat in beats
        ]
        sent = self.monotonic()
        return [
            self._renewal(beat.lease, answer, sent)
            for beat, answer in zip(beats, self.engine.apply(batch), strict=True)
        ]

    def write_tasks(self, batch: Sequence[Write], *, rejected: Rejections | None = None) -> list[Task | None]:
        """Do writes on tasks that no agent holds; for each the task after it, None for a refused one.

        None also for a task that cannot be read afterwards.

        Raises:
            StoreError: as `write_rows`.
        """
        answers = self.write_rows(batch, rejected=rejected)
        tasks = [self._read(row) if won and row else None for won, row in answers]
        return [task if isinstance(task, Task) else None for task in tasks]

    def take_turn(self, name: str, *, owner: str, lasts_s: float) -> Row | None:
        """The row of the turn, if this agent gets it for `lasts_s` seconds: it does a piece of housekeeping for all."""
        now = self.clock.leases.now()
        turn = agent_writes.take_turn(f"turn:{name}", owner=owner, now=now, until=timestamp(now + lasts_s))
        [(answer, won)] = self._apply([turn])
        is_known = won or answer.row or answer.error
        won, row = (won, answer.row) if is_known else self.insert_row({"taskId": turn.task_id, **turn.set})
        return row if won else None

    def write_rows(
        self, batch: Sequence[Write], *, rejected: Rejections | None = None
    ) -> list[tuple[bool, Row | None]]:
        """Do writes; for each whether it is done, and the row as it is then.

        Args:
            batch: the writes.
            rejected: called for each write that the store never takes; None: the first is raised.

        Raises:
            StoreError: one of the writes had no answer.
        """
        answers = self._apply(batch)
        for write, (answer, _) in zip(batch, answers, strict=True):
            if isinstance(answer.error, StoreRejected) and rejected is not None:
                rejected(write, answer.error)
            elif answer.error:
                raise answer.error
        return [(won, answer.row) for answer, won in answers]

    def insert_row(self, row: Row) -> tuple[bool, Row]:
        """Put a row that is no task unless its id is taken; whether it is ours, and the row as it is."""
        [answer] = self.engine.put([row])
        if answer.error:
            raise answer.error
        return answer.won or answer.row == row, answer.row or row

    # Agents

    def announce(self, agent: str, info: Mapping[str, Any], *, lives_s: float) -> None:
        """Say that an agent is alive for the next `lives_s` seconds, and what it runs.

        Raises:
            StoreError: the store did not answer.
        """
        now, leases = self.clock.now(), self.clock.leases
        agent_id, expire_at = f"agent:{agent}", int(leases.now() + lives_s)
        if isinstance(leases, BootClock):  # when the machine starts again, what this agent held is over
            info = {**info, "boot": leases.boot_id}
        [(is_known, _)] = self.write_rows([agent_writes.announce(agent_id, info=info, now=now, expire_at=expire_at)])
        if not is_known:
            row = {
                "status": agent_writes.AGENT_STATUS,
                "createdAt": timestamp(now),
                "updatedAt": timestamp(now),
                "fence": 0,
            }
            self.insert_row({"taskId": agent_id, "info": dict(info), "expireAt": expire_at, **row})

    def sign_off(self, agent: str) -> None:
        self.engine.delete(list(self.engine.get([f"agent:{agent}"]).values()))

    def agents(self, *, lost: bool = False, most: int = 1_000_000) -> list[AgentInfo]:
        """Agents that are not overdue (with `lost`: all), oldest first, not many over `most`."""
        found: list[AgentInfo] = []
        after = None
        while True:
            page = self.engine.page(agent_writes.AGENT_STATUS, limit=100, after=after)
            rows = self.engine.get([entry.task_id for entry in page.entries]).values()
            for row in rows:
                agent = _read_agent(row, self.clock.leases.earliest())
                if isinstance(agent, Unreadable):
                    self.unread.note(agent)
                elif lost or not agent.is_lost:
                    found.append(agent)
            after = page.after
            if after is None or len(found) >= most:
                return found

    def _enqueued(self, task: Task, answer: Applied) -> Enqueued:
        if answer.error or answer.won or answer.row is None:
            return Enqueued(task, created=answer.error is None, error=answer.error)
        if isinstance(found := self._read(answer.row), Unreadable):
            return Enqueued(task, created=False, error=TaskUnreadable(f"{task.task_id!r} cannot be put: {found}"))
        is_same = found.version == task.version and is_same_payload(found, task)
        [existing] = self.large_texts.inflate([found])
        if existing.job == task.job and (is_same or existing.version != task.version):
            return Enqueued(existing, created=is_same and existing.submitted_at == task.submitted_at)
        return Enqueued(
            existing,
            created=False,
            error=DuplicateTask(
                f"the task {task.task_id!r} exists with "
                + ("another payload" if existing.job == task.job else f"the job {existing.job!r}")
                + f" (status {existing.status}); choose another task_id, or cancel and purge the old task"
            ),
        )

    def _exchanged(
        self,
        settled: list[Settled],
        wanted: Sequence[Wanted],
        answers: Sequence[tuple[Applied, bool]],
        owner: str,
        sent: float,
    ) -> Exchanged:
        won_leases, lost, doubts, unread = dict[str, Lease](), list[Candidate](), list[Doubt](), dict[str, Row]()
        rejected = list[tuple[Candidate, StoreRejected]]()
        for one, (answer, won) in zip(wanted, answers, strict=True):
            if won and answer.row:  # once a task: the refusal of a second claim beside it looks like its lost reply
                task = self._read(answer.row)
                if isinstance(task, Unreadable):
                    unread[one.candidate.task_id] = answer.row
                    continue
                lease = Lease(task=task, owner=owner, fence=task.fence, lease_s=one.lease_s, held_from=sent)
                won_leases.setdefault(task.task_id, lease)
            elif isinstance(answer.error, StoreRejected):
                lost.append(one.candidate)
                rejected.append((one.candidate, answer.error))
            elif answer.error:
                doubts.append(Doubt(one, sent))
            else:
                if answer.row is not None:
                    self._read(answer.row)  # names what is tried in vain, and is not tried again then
                lost.append(one.candidate)
        errors = [one.error for one in settled] + [answer.error for answer, _ in answers]
        error = next((one for one in errors if one is not None and not isinstance(one, StoreRejected)), None)
        several = [one for one in wanted if one.candidate.task_id in unread]
        try:
            self._let_go(list(unread.values()), owner)
            lost += [one.candidate for one in several]
        except StoreError as failure:
            doubts += [Doubt(one, sent) for one in several]
            error = failure
        leases = self._whole(list(won_leases.values()))
        return Exchanged(settled=settled, leases=leases, lost=lost, doubts=doubts, error=error, rejected=rejected)

    def _read(self, row: Row) -> Task | Unreadable:
        task = read_task(row)
        if isinstance(task, Unreadable):
            self.unread.note(task)
        return task

    def _let_go(self, rows: Sequence[Row], owner: str) -> None:
        """Let go of tasks that this agent has claimed and cannot read: other agents may.

        Raises:
            StoreError: one of the writes had no answer.
        """
        now, later = self.clock.now(), self.unread.pause_s
        ours = [row for row in rows if row.get("leaseOwner") == owner and _is_running(row)]
        batch = [writes.let_go(row, owner=owner, due=now + later, now=now) for row in ours]
        self.write_rows(batch, rejected=ignore_rejection)

    def _whole(self, leases: list[Lease]) -> list[Lease]:
        if not any(lease.task.payload_ref for lease in leases):
            return leases
        whole = self.large_texts.inflate([lease.task for lease in leases])
        tasks = self.large_texts.outlive_all(whole, now=self.clock.now())
        return [replace(lease, task=task) for lease, task in zip(leases, tasks, strict=True)]

    def _apply(self, batch: Sequence[Write]) -> list[tuple[Applied, bool]]:
        """The answers, each with whether the write is done: at once, or before a reply that was lost.

        A call that fails as a whole leaves open what it did: each of its writes is without an answer then. No write is
        no
        call: even an empty one is a transaction in a SQLite file, for which others wait.
        """
        if not batch:
            return []
        try:
            answers = self.engine.apply(batch)
        except StoreError as error:
            answers = [Applied(won=False, error=error)] * len(batch)
        return [
            (answer, answer.won or (answer.row is not None and write.landed_on(answer.row)))
            for write, answer in zip(batch, answers, strict=True)
        ]

    def _renewal(self, lease: Lease, answer: Applied, sent: float) -> Renewal:
        if answer.error:
            return Renewal(error=answer.error)
        if answer.won and answer.row:
            before, task = lease.task, self._read(answer.row)
            if isinstance(task, Unreadable):  # what the agent holds goes on, as it was when it could be read
                task = before
            elif task.payload_ref:
                task = replace(task, payload_text=before.payload_text, payload_until=before.payload_until)
            return Renewal(lease=replace(lease, task=task, held_from=sent))
        return Renewal(lost=True, taken_by=answer.row.get("leaseOwner") if answer.row else None)


def _is_running(row: Row) -> bool:
    return str(row.get("status")).startswith(Status.RUNNING) and is_number(row.get("fence"))


def _settled(answer: Applied, won: bool) -> Settled:
    if answer.error:
        return Settled(error=answer.error)
    dependents = answer.row.get("dependents") if won and answer.row else None
    return Settled(won, dependents if isinstance(dependents, frozenset) else frozenset())


def _leases_of(exchanged: Exchanged) -> list[Lease]:
    if not exchanged.leases and (error := exchanged.error or next((why for _, why in exchanged.rejected), None)):
        raise error
    return exchanged.leases
