"""The rules of the queue as an observer sees them: an engine that checks each write that is really done.

Nothing here is taken from `writes.py`: the audit looks at the rows before and after, and at who did it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreRejected
from thunderagent.model.rows import LEASE_ATTRIBUTES
from thunderagent.model.task import TRANSITIONS, Row, Status, Task
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.dynamo.engine import LANES_ID, DynamoEngine
from thunderagent.stores.engine import Applied, Engine, KeptText
from thunderagent.stores.sqlite import boots, sql
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import FaultyEngine

GUARD_S = 2.0
MAX_CRASHES = 2
LATE_S = 1.0
"""A claim that took longer to be carried out was late."""
CROWDED = 5 * MAX_CRASHES
"""Agents that a task may lose which never ran alone at the time."""
CLAIMS = ("claim", "take over")
FROM_OUTSIDE = {"cancelRequested", "dependents", "updatedAt"}
"""What may change in a RUNNING row by others than its holder."""


@dataclass(frozen=True)
class Actor:
    """Who writes: an agent, with the leases it believes in, and the due times of the entries it tries to claim."""

    owner: str = "a client"
    fences: Mapping[str, int] = field(default_factory=dict)
    seen: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """The write that ended a lease, and the row that it left."""

    write: Write
    left: Row


class Audit(FaultyEngine):
    """An engine in front of the real one that has no faults but checks what happens."""

    def __init__(self, engine: Engine, time: FakeClock) -> None:
        super().__init__(engine)
        self.actor = Actor()
        self.time = time
        self.rows: dict[str, Row] = {}
        """Every task as the writes left it."""
        self.holders: dict[tuple[str, int], str] = {}
        self.ends: dict[tuple[str, int], End] = {}
        self.late: set[tuple[str, int]] = set()
        """Claims that were carried out a while after they were sent: their leases are shorter, or over already."""
        self.alone: set[tuple[str, int]] = set()
        """Runs of which the holder has noted that nothing runs beside them."""
        self.begun: set[tuple[str, int]] = set()
        """Runs whose handlers were begun: the machine says so."""
        self.large_texts: dict[str, KeptText] = {}
        """What SQLite is not asked to keep apart from the rows."""
        self.won: list[tuple[str, int]] = []
        self.still_since: dict[str, float] = {}
        self.succeeded: set[str] = set()
        self.failed: set[str] = set()
        """Tasks that at some time ended without success, or are gone."""
        self.forlorn: set[tuple[str, float]] = set()
        """Children, by id and due time, of which a parent was gone or had ended without success while they waited."""
        self.between: dict[str, Callable[[], None]] = {}
        """What somebody else does right before the next write of a verb."""
        self.interrupted = 0
        self.never: set[tuple[str, str]] = set()
        """Tasks and verbs: such writes the store does not take, now or later."""
        self.newer: dict[str, Row] = {}
        """Rows of newer versions: nobody of this version changes them."""

    def put_newer(self, row: Row) -> None:
        """An agent of a newer version writes a row, or changes one that this version knows."""
        name = row["taskId"]
        self._overwrite(row)
        self.rows.pop(name, None)
        self.newer[name] = self._row(name) or {}
        self.still_since[name] = self.time.monotonic()

    def put_known(self, row: Row) -> None:
        """A row of a newer version becomes one that this version can read."""
        name = row["taskId"]
        self._overwrite(row)
        del self.newer[name]
        still_since = self.still_since[name]
        if "leaseOwner" in row:
            self.holders[name, row["fence"]] = row["leaseOwner"]
        self._note(self._row(name) or {})
        self.still_since[name] = still_since

    def _overwrite(self, row: Row) -> None:
        if isinstance(self._engine, SqliteEngine):
            with self._engine._transaction() as cursor:
                cursor.execute('DELETE FROM tasks WHERE "taskId" = ?', (row["taskId"],))
                cursor.execute(*sql.insert(row))
        else:
            assert isinstance(self._engine, DynamoEngine)
            self._engine.connection.call("PutItem", TableName=self._engine.table, Item=expressions.encode_row(row))

    @property
    def tasks(self) -> list[Task]:
        return [Task.from_row(row) for row in self.rows.values()]

    # Texts

    @property
    def inline_bytes(self) -> int:
        return DynamoEngine.inline_bytes

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        if isinstance(self._engine, SqliteEngine):
            self.large_texts |= {key: KeptText(text, expire_at) for key, text in texts.items()}
        else:
            self._engine.put_texts(texts, expire_at=expire_at)

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        if isinstance(self._engine, SqliteEngine):
            return {key: self.large_texts[key] for key in keys if key in self.large_texts}
        return self._engine.get_texts(keys)

    # Writes

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        return [self._put(row, fresh) for row in rows]

    def _put(self, row: Row, fresh: bool) -> Applied:
        before = self._row(row["taskId"])
        [answer] = self._engine.put([row], fresh=fresh)
        after = self._row(row["taskId"])
        assert answer.error is None
        assert answer.won == (before is None)
        assert after == (row if answer.won else before)
        if answer.won and after is not None and is_task(after["taskId"]):
            task = Task.from_row(after)
            if task.status is Status.PENDING:
                self._check_parents(task)
            self._note(after)
        return answer

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return [self._apply(write) for write in batch]

    def _apply(self, write: Write) -> Applied:
        if (come_between := self.between.pop(write.verb, None)) is not None:
            actor, won = self.actor, self.won
            self.won = []
            come_between()
            self.actor, self.won = actor, won
            self.interrupted += 1
        if (write.task_id, write.verb) in self.never:
            return Applied(won=False, error=StoreRejected("the row is too large"))
        before = self._row(write.task_id)
        [answer] = self._engine.apply([write])
        after = self._row(write.task_id)
        assert answer.error is None
        assert answer.row == (after if answer.won else before)
        if not answer.won:
            assert after == before, "a refused write changes nothing"
        else:
            assert before is not None, "a write makes no ghost of a row that is gone"
            assert after is not None
            if is_task(write.task_id):
                self._check(write, before, after)
                self._note(after)
        return answer

    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        before = {row["taskId"]: self._row(row["taskId"]) for row in tasks}
        answers = self._engine.delete(tasks)
        for row, gone in zip(tasks, answers, strict=True):
            if gone and is_task(row["taskId"]):
                old = before[row["taskId"]]
                assert old is not None
                assert Task.from_row(old).status.is_terminal
                self._forget(row["taskId"])
        return answers

    def expire(self, now: float) -> int:
        overdue = [name for name, row in (self.rows | self.newer).items() if row.get("expireAt", now) < now]
        self._engine.expire(now)
        gone = [name for name in overdue if self._row(name) is None]
        for name in gone:
            self._forget(name)
        return len(gone)

    # Rules of one write

    def _check(self, write: Write, before: Row, after: Row) -> None:
        old, new, verb = Task.from_row(before), Task.from_row(after), write.verb
        assert new.status is old.status or new.status in TRANSITIONS[old.status]
        assert new.lane == old.lane
        assert new.fence - old.fence == (verb in CLAIMS), (
            "a fence grows by one at each claim and takeover, and only then"
        )
        if old.status.is_terminal:
            assert verb == "revive", "what has ended changes only by hand"
        if verb in CLAIMS:
            assert (new.task_id, new.fence) not in self.holders, "nobody had this fence before"
            assert new.lease_owner == self.actor.owner
            self.holders[new.task_id, new.fence] = self.actor.owner
            self.won.append((new.task_id, new.fence))
            assert new.lock_time is not None
            if new.lock_time < self._engine.clock.leases.now() + (new.lease_sec or 0.0) - LATE_S:
                self.late.add((new.task_id, new.fence))
        if verb == "claim":
            assert old.status is Status.PENDING
            assert old.created_at == self.actor.seen[new.task_id], "a stale index entry brings no task early"
        if old.status is Status.RUNNING:
            self._check_running(write, old, before, after)
        if verb == "revive":
            assert (new.retry_count, new.crash_count) == (0, 0)
        else:
            assert new.retry_count - old.retry_count == (verb == "retry")
            assert new.crash_count - old.crash_count == (verb in ("take over", "give up"))
        if new.status is Status.PENDING and old.status is not Status.RUNNING:
            self._check_parents(new)
            assert verb != "revive" or not any(map(self._is_open, new.depends_on)), "a retry waits for open parents"
        if verb == "doom":
            assert (old.task_id, old.created_at) in self.forlorn, "a child ends by a parent that ended while it waited"

    def _check_running(self, write: Write, old: Task, before: Row, after: Row) -> None:
        if write.verb in ("take over", "give up"):
            assert old.lock_time is not None
            assert old.lease_sec is not None
            clock = self._engine.clock
            overdue = clock.leases.now() - old.lock_time
            still_for = self.time.monotonic() - self.still_since[old.task_id]
            is_own = old.lease_owner == self.actor.owner  # a claim that was carried out late
            is_over = overdue > GUARD_S or still_for > old.lease_sec + GUARD_S
            assert is_over or is_own, "only a lease that is over is taken"
            if clock.leases is not clock and not is_own and (old.task_id, old.fence) not in self.late:
                assert still_for > old.lease_sec, "nobody can set the clock of leases on one machine"
            is_alone = (old.task_id, old.fence) in self.alone
            is_to_blame = old.crash_count >= (MAX_CRASHES if is_alone else CROWDED)
            is_untakeable = "the store does not take it" in after.get("error", "")  # refused for good: no blame
            assert is_untakeable or is_to_blame == (write.verb == "give up"), (
                "blamed for what it lost alone, or too often"
            )
        elif write.verb in ("request cancel", "register dependent"):
            changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
            assert changed <= FROM_OUTSIDE
        elif write.verb == "put back" and old.task_id not in self.actor.fences:
            assert old.lease_owner == self.actor.owner, "a sweep gives back the claims of its own agent alone"
            assert (old.task_id, old.fence) not in self.begun, "and only those that never ran"
        else:
            mine = self.actor.owner, self.actor.fences.get(old.task_id)
            assert (old.lease_owner, old.fence) == mine, "only the holder of the current fence changes a running task"
            if write.verb == "set apart":
                says = after["errors"][-1].get("alone") == old.fence
                (self.alone.add if says else self.alone.discard)((old.task_id, old.fence))
        if Task.from_row(after).status is not Status.RUNNING:
            self.ends[old.task_id, old.fence] = End(write, after)

    def _check_parents(self, child: Task) -> None:
        """A child leaves for its queue when each parent has succeeded, or ended and it runs all the same."""
        for name in child.depends_on:
            may_run = child.on_parent_failure == "run" and name in self.failed
            assert name in self.succeeded or may_run, f"{child.task_id} runs before its parent {name}"

    def _is_open(self, name: str) -> bool:
        return name in self.newer or (name in self.rows and not Task.from_row(self.rows[name]).status.is_terminal)

    # Memory

    def _note(self, row: Row) -> None:
        name, known = row["taskId"], self.rows.get(row["taskId"], {})
        if (known.get("fence"), known.get("hb")) != (row["fence"], row.get("hb")):
            self.still_since[name] = self.time.monotonic()
        self.rows[name] = row
        status = Task.from_row(row).status
        if status is Status.SUCCESS:
            self.succeeded.add(name)
        elif status.is_terminal:
            self.failed.add(name)
        self._note_forlorn()

    def _note_forlorn(self) -> None:
        for child in self.tasks:
            if child.status is Status.BLOCKED:
                parents = [self.rows.get(name) for name in child.waiting_for if name not in self.newer]
                if any(row is None or Task.from_row(row).status in (Status.FAILED, Status.DONE) for row in parents):
                    self.forlorn.add((child.task_id, child.created_at))

    def _forget(self, name: str) -> None:
        """The task is gone; its id may be used again."""
        self.rows.pop(name, None)
        self.newer.pop(name, None)
        self.failed.add(name)
        self.forlorn = {key for key in self.forlorn if key[0] != name}
        self._note_forlorn()
        for memory in (self.holders, self.ends):
            for key in [key for key in memory if key[0] == name]:
                del memory[key]
        self.alone = {key for key in self.alone if key[0] != name}
        self.late = {key for key in self.late if key[0] != name}
        self.begun = {key for key in self.begun if key[0] != name}

    def _row(self, name: str) -> Row | None:
        return self._engine.get([name]).get(name)

    # Rules of the whole table

    def check_table(self) -> None:
        """What must hold after every step."""
        found = scan(self._engine)
        assert {name: found.pop(name, None) for name in self.newer} == self.newer, "what a newer version wrote stays"
        assert found == self.rows, "nothing changes but by the writes that we saw"
        for name, row in self.rows.items():
            task = Task.from_row(row)
            held = [attribute in row for attribute in LEASE_ATTRIBUTES]
            assert all(held) if task.status is Status.RUNNING else not any(held), f"{name} is {task.status}: {held}"
            assert "createdAt" in row, f"{name} has left the index"
            assert ("finishedAt" in row, "expireAt" in row) == (task.status.is_terminal, task.status.is_terminal)
            assert task.retry_count <= (task.max_retry or 0)
            assert task.crash_count <= CROWDED + (task.status is Status.FAILED)
            assert task.status is Status.BLOCKED or not task.waiting_for
            assert task.waiting_for <= set(task.depends_on)
            if task.status is Status.RUNNING:
                assert task.lease_owner == self.holders[name, task.fence]


def is_task(name: str) -> bool:
    """False for the rows of agents, turns, lanes and large texts."""
    return not name.startswith(("agent:", "turn:")) and name not in (LANES_ID, boots.ROW_ID) and "#" not in name


def scan(engine: Engine) -> dict[str, Row]:
    """Every task of the table, in the index or not."""
    if isinstance(engine, SqliteEngine):
        with engine._reading() as cursor:
            rows = [sql.decode(values) for values in cursor.execute(sql.SELECT)]
    else:
        assert isinstance(engine, DynamoEngine)
        reply = engine.connection.call("Scan", TableName=engine.table, ConsistentRead=True)
        assert "LastEvaluatedKey" not in reply
        rows = [expressions.decode_row(item) for item in reply["Items"]]
    return {row["taskId"]: row for row in rows if is_task(row["taskId"])}
