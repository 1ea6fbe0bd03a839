"""The engine of one region of a simulated global table; its writes go to the other regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from thunderagent.model.clock import SharedClock
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Lane, Page, Row
from thunderagent.stores.engine import Applied, Engine, KeptText, Overdue
from thunderagent.testing.global_table.replica import Replica

T = TypeVar("T")


class RegionClock:
    """The shared clock of a region that is ahead by some seconds, or behind."""

    def __init__(self, clock: SharedClock, skew_s: float) -> None:
        self._clock = clock
        self.skew_s = skew_s

    def now(self) -> float:
        return self._clock.now() + self.skew_s

    def earliest(self) -> float:
        return self._clock.earliest() + self.skew_s

    def latest(self) -> float:
        return self._clock.latest() + self.skew_s

    @property
    def is_usable(self) -> bool:
        return self._clock.is_usable

    @property
    def leases(self) -> SharedClock:
        return RegionClock(self._clock.leases, self.skew_s)


@dataclass(frozen=True, slots=True)
class Links:
    """What the engine of a region needs from the table; each call gets the region's name."""

    check: Callable[[str], None]
    """Raises StoreUnavailable while the region does not answer."""
    refusal: Callable[[str, str], StoreError | None]
    """The error of a write that cannot be tried now."""
    note: Callable[[str, str, Row | None, tuple[str, float] | None], None]
    """Sends an item that was written to the other regions."""
    clock: Callable[[str, SharedClock], SharedClock]
    """The region's clock over that of an engine."""
    expires: bool
    """True when the table has a time to live."""


class RegionEngine:
    """The `Engine` of one region. The table closes regions.

    Args:
        engine: connections of its own to the same rows; None: those of the replica.
    """

    def __init__(self, replica: Replica, region: str, links: Links, engine: Engine | None = None) -> None:
        self.region = region
        self._replica = replica
        self._links = links
        self._engine = engine or replica.engine

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def clock(self) -> SharedClock:
        return self._links.clock(self.region, self._engine.clock)

    @property
    def inline_bytes(self) -> int:
        return self._engine.inline_bytes

    @property
    def most_counted(self) -> int | None:
        return self._engine.most_counted

    # Writing

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        return self._write(rows, [row["taskId"] for row in rows], lambda some: self._engine.put(some, fresh=fresh))

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return self._write(batch, [write.task_id for write in batch], self._engine.apply)

    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        def delete(rows: Sequence[Row]) -> list[Applied]:
            return [Applied(won=is_gone) for is_gone in self._engine.delete(rows)]

        answers = self._write(tasks, [row["taskId"] for row in tasks], delete)
        for answer in answers:
            if answer.error:
                raise answer.error
        return [answer.won for answer in answers]

    def expire(self, now: float) -> int:
        self._links.check(self.region)
        if not self._links.expires:
            return 0
        with self._replica.guard:
            number = self._engine.expire(now)
            for item_id in self._replica.vanished() if number else ():
                self._links.note(self.region, item_id, None, None)
            return number

    def overdue(self, now: float) -> Overdue | None:
        return self._read(lambda: self._engine.overdue(now))

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        self._links.check(self.region)
        with self._replica.guard:
            self._engine.put_texts(texts, expire_at=expire_at)
            for text_key, text in texts.items():
                self._links.note(self.region, text_key, None, (text, expire_at))

    def _write(
        self, members: Sequence[T], item_ids: Sequence[str], do: Callable[[Sequence[T]], list[Applied]]
    ) -> list[Applied]:
        """Do writes one by one if they share an item, else in one call, and note those that won.

        Under the replica's guard: no image of the item may arrive in between.
        """
        with self._replica.guard:
            if len(set(item_ids)) < len(item_ids):
                return [self._write([one], [item_id], do)[0] for one, item_id in zip(members, item_ids, strict=True)]
            refusals = [self._refusal(item_id) for item_id in item_ids]
            sent = [one for one, refusal in zip(members, refusals, strict=True) if refusal is None]
            try:
                answers = iter(do(sent) if sent else ())
            except StoreError:
                self._replica.doubt(item_ids)
                raise
            outcomes = []
            for one, item_id, refusal in zip(members, item_ids, refusals, strict=True):
                answer = next(answers) if refusal is None else Applied(won=False, error=refusal)
                if answer.won:
                    self._links.note(self.region, item_id, None if _is_deletion(one) else answer.row, None)
                elif answer.error and refusal is None:
                    self._replica.doubt([item_id])
                outcomes.append(answer)
            return outcomes

    def _refusal(self, item_id: str) -> StoreError | None:
        try:
            self._links.check(self.region)
        except StoreError as error:
            return error
        return self._links.refusal(self.region, item_id)

    # Reading

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        return self._read(lambda: self._engine.get(task_ids))

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        return self._read(lambda: self._engine.get_texts(keys))

    def page(self, status_value: str, **options: Any) -> Page:
        return self._read(lambda: self._engine.page(status_value, **options))

    def count(self, status_value: str, *, until: float | None = None, most: int | None = None) -> int:
        return self._read(lambda: self._engine.count(status_value, until=until, most=most))

    def lanes(self, strange: Callable[[str], None] = lambda suffix: None) -> list[Lane]:
        return self._read(lambda: self._engine.lanes(strange))

    def _read(self, read: Callable[[], T]) -> T:
        self._links.check(self.region)
        return read()

    # The place

    def check(self) -> None:
        self._read(self._engine.check)

    def sibling(self) -> RegionEngine:
        inner = self._engine.sibling()
        return self if inner is self._engine else RegionEngine(self._replica, self.region, self._links, inner)

    def close(self) -> None:
        if self._engine is not self._replica.engine:
            self._engine.close()


def _is_deletion(member: object) -> bool:
    return isinstance(member, Write) and member.delete
