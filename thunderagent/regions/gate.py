"""The gate: what an agent may write, by the grant of its region.

`Gate` holds the latest grant for every thread. All parts of such an agent use a `GatedEngine`. Without a valid grant it
sends nothing but the agent's own row; with one, every write has the epoch of the grant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from thunderagent.model.clock import since_boot
from thunderagent.model.conditions import Write
from thunderagent.model.errors import RegionPassive
from thunderagent.model.task import Row
from thunderagent.regions.grant import NO_REGIONS, Grant, no_grant
from thunderagent.regions.writes import in_region, reasserted
from thunderagent.stores.engine import Applied, Engine, Overdue

OWN_ROW: Final = "agent:"
"""Begin of the ids of agents' rows."""

AT_ONCE: Final = 8
"""Writes that leave after one look at the grant: as many as an engine does at once, so that the last one is done
within the time of one call."""


class Gate:
    """The grant as it is known, from any thread.

    Args:
        region: of the agent; None: there is one region, and the gate stands open.
        monotonic: the clock on which grants end.
    """

    def __init__(self, region: str | None = None, *, monotonic: Callable[[], float] = since_boot) -> None:
        self.region = region
        self._monotonic = monotonic
        self.grant = NO_REGIONS if region is None else no_grant("the arbiter was not asked yet")
        """The last answer of the authority."""

    @property
    def is_open(self) -> bool:
        return self.grant.is_valid(self._monotonic())

    @property
    def may_claim(self) -> bool:
        return self.is_open and not self.grant.is_draining

    @property
    def epoch(self) -> int:
        """Epoch of the grant; 0: there is one region."""
        return self.grant.epoch

    @property
    def why_closed(self) -> str:
        return self.grant.reason or "the grant was not renewed in time"

    @property
    def measure_turn(self) -> str:
        """Name of the turn in which agents of the region measure its queues, with and without a grant: a fleet that
        stands still in all regions must be seen."""
        return "measure" if self.region is None else f"measure:{self.region}"

    def is_own(self, row_id: str) -> bool:
        """Whether only this agent, or only agents of this region, write a row: no grant is needed."""
        return row_id.startswith(OWN_ROW) or (self.region is not None and row_id == f"turn:{self.measure_turn}")

    def guard(self, row_id: str) -> None:
        """Checked again when the bytes of a write leave: a thread may have waited, a machine stood still, or an attempt
        failed.

        Raises:
            RegionPassive: no grant is valid any more.
        """
        if not self.is_own(row_id):
            self.check()

    def check(self) -> int:
        """The epoch under which a write may leave now.

        Raises:
            RegionPassive: no grant is valid.
        """
        grant: Grant = self.grant  # one look: another thread may replace it
        if not grant.is_valid(self._monotonic()):
            raise RegionPassive(
                f"the region {self.region} holds no grant, so its agents write nothing ({self.why_closed}); "
                "see: thunderagent region status"
            )
        return grant.epoch


class GatedEngine:
    """An engine whose writes need a grant. Everything else it leaves to the engine behind it."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self.behind = engine
        self._gate = gate
        if (connection := getattr(engine, "connection", None)) is not None:
            connection.guard = gate.guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        """As the engine; rows need a grant, except the agent's own."""
        if not all(self._gate.is_own(str(row["taskId"])) for row in rows):
            self._gate.check()
        return self.behind.put(rows, fresh=fresh)

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        """As the engine, each write under the epoch of the grant; without one, each has an error as its answer.

        A holder's write that a late write of a lost region refuses is made again over it.
        """
        answers: list[Applied] = []
        for part in _parts(batch):
            own = [self._gate.is_own(write.task_id) for write in part]
            try:
                epoch = 0 if all(own) else self._gate.check()
            except RegionPassive as error:
                answers += [Applied(won=False, error=error)] * len(part)
                continue
            made = [one if is_own else in_region(one, epoch) for one, is_own in zip(part, own, strict=True)]
            answers += self._made_again(made, self.behind.apply(made), epoch)
        return answers

    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        """As the engine; without a grant only the agent's own row is deleted."""
        if not all(self._gate.is_own(str(row["taskId"])) for row in tasks):
            self._gate.check()
        return self.behind.delete(tasks)

    def expire(self, now: float) -> int:
        self._gate.check()
        return self.behind.expire(now)

    def overdue(self, now: float) -> Overdue | None:
        return self.behind.overdue(now)

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        self._gate.check()
        self.behind.put_texts(texts, expire_at=expire_at)

    def sibling(self) -> Engine:
        other = self.behind.sibling()
        return cast(Engine, self if other is self.behind else GatedEngine(other, self._gate))

    def _made_again(self, made: Sequence[Write], answers: list[Applied], epoch: int) -> list[Applied]:
        again = {
            index: write
            for index, (one, answer) in enumerate(zip(made, answers, strict=True))
            if not answer.won and answer.row is not None and (write := reasserted(one, answer.row, epoch)) is not None
        }
        if again:
            for index, answer in zip(again, self.behind.apply(list(again.values())), strict=True):
                answers[index] = answer
        return answers


def _parts(batch: Sequence[Write]) -> Iterator[Sequence[Write]]:
    for start in range(0, len(batch), AT_ONCE):
        yield batch[start : start + AT_ONCE]
