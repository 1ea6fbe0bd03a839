"""What applications and commands may write where several regions share a global table.

A new task is a row that nobody else writes: it may be put in any region. All other writes change rows that the agents
of the region with the grant change too, and one of two such writes in two regions is lost. They are done in that
region only: the arbiter's row is read before, at most once in five seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import RegionPassive
from thunderagent.model.task import Row
from thunderagent.regions.gate import Gate, GatedEngine
from thunderagent.regions.grant import REGION_LOOK_S, Record, scope_id
from thunderagent.settings import Settings
from thunderagent.stores import fixed, open_engine
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.tasks import TaskStore


class ClientGate(Gate):
    """Open where the arbiter's row gives the grant to the region. Asked before a write.

    Args:
        region: of the client.
        scope: name of the row.
        arbiter: opens the arbiter's table, on first use.
        monotonic: the clock for `REGION_LOOK_S`.
    """

    def __init__(
        self, region: str, scope: str, arbiter: Callable[[], Engine], *, monotonic: Callable[[], float] = since_boot
    ) -> None:
        super().__init__(region, monotonic=monotonic)
        self._scope = scope
        self._open = arbiter
        self._arbiter: Engine | None = None
        self._record: Record | None = None
        self._due = 0.0

    def check(self) -> int:
        """The epoch of the region.

        Raises:
            RegionPassive: another region has the grant.
            StoreError: the arbiter does not answer.
        """
        if self._arbiter is None:
            self._arbiter, self._due = self._open(), self._monotonic()
        if self._monotonic() >= self._due:
            row = self._arbiter.get([scope_id(self._scope)]).get(scope_id(self._scope))
            self._record, self._due = None if row is None else Record.from_row(row), self._monotonic() + REGION_LOOK_S
        record = self._record
        if record is not None and record.holder != self.region:
            raise RegionPassive(
                f"the region {record.holder} has the grant and not {self.region}: only new tasks can be put here; do "
                f"this in {record.holder}, with THUNDERAGENT_STORE and THUNDERAGENT_REGION of that region"
            )
        return 0 if record is None else record.epoch

    def guard(self, row_id: str) -> None:
        """Nothing more: what needs the grant was checked, and this may be a new task."""

    def close(self) -> None:
        if self._arbiter is not None:
            self._arbiter.close()


class ClientEngine(GatedEngine):
    """An engine on which new tasks can always be put, and the rest where the grant is."""

    def __init__(self, engine: Engine, gate: ClientGate) -> None:
        super().__init__(engine, gate)
        self._asked = gate

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        """As the engine. A task that other rows refer to (parents, a unique key, a limit) needs the grant."""
        if not all(_is_alone(row) for row in rows):
            self._asked.check()
        return self.behind.put(rows, fresh=fresh)

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        """As the engine: texts are of a new task."""
        self.behind.put_texts(texts, expire_at=expire_at)

    def sibling(self) -> Engine:
        other = self.behind.sibling()
        return cast(Engine, self if other is self.behind else ClientEngine(other, self._asked))

    def close(self) -> None:
        self._asked.close()
        self.behind.close()


def _is_alone(row: Row) -> bool:
    return "job" in row and not any(name in row for name in ("waitingFor", "uniqueKey", "limitKey"))


def behind_client_gate(store: TaskStore, settings: Settings) -> TaskStore:
    """The store of a client, gated if the settings name an arbiter."""
    if settings.region_arbiter is None or settings.region is None:
        return store
    url = fixed(settings.region_arbiter)
    gate = ClientGate(
        settings.region, settings.region_scope, lambda: open_engine(url, hasty=True), monotonic=store.monotonic
    )
    engine: Any = ClientEngine(store.engine, gate)
    return store.over(engine)
