"""How far the table of a region is behind that of another: a row that the holder of the grant writes with each beat."""

from __future__ import annotations

from thunderagent.model.errors import StoreError
from thunderagent.model.rows import is_number
from thunderagent.model.writes import agents as agent_writes
from thunderagent.regions.grant import Record
from thunderagent.regions.hysteresis import Hysteresis
from thunderagent.stores.tasks import TaskStore


class Sentinel:
    """Writes the sign of its region, and reads those of others, in the table of its region."""

    def __init__(self, store: TaskStore, region: str) -> None:
        self._store = store
        self._region = region

    def write(self) -> None:
        """Give a sign. Where the table does not take it, the others wait with their return, and no more."""
        try:
            now = self._store.clock.now()
            [(is_known, _)] = self._store.write_rows([agent_writes.sentinel(self._region, now=now)])
            if not is_known:
                self._store.insert_row({"taskId": agent_writes.sentinel_id(self._region), "updatedAt": now})
        except StoreError:
            return

    def newest_epoch(self) -> int:
        """The latest epoch that the table knows; 0: none. A new arbiter goes on from there.

        Raises:
            StoreError: the table does not answer.
        """
        entries = [agent.info.get("region") for agent in self._store.agents(lost=True)]
        regions = {self._region, *(str(one["name"]) for one in entries if isinstance(one, dict) and "name" in one)}
        rows = self._store.engine.get([agent_writes.sentinel_id(region) for region in sorted(regions)])
        epochs = (row.get("regionEpoch") for row in rows.values())
        return max((int(epoch) for epoch in epochs if is_number(epoch)), default=0)

    def age_s(self, record: Record) -> float | None:
        """Seconds since the holder's newest sign that has come here; None: there is none, or our table does not
        answer."""
        row_id = agent_writes.sentinel_id(record.holder)
        try:
            row = self._store.engine.get([row_id]).get(row_id)
        except StoreError:
            return None
        at = (row or {}).get("updatedAt")
        return max(0.0, self._store.clock.now() - at) if is_number(at) else None


class TableWellness:
    """How the region is where no canary looks: whether its table answers, asked with each step."""

    def __init__(self, store: TaskStore, region: str) -> None:
        self._store = store
        self._row_id = agent_writes.sentinel_id(region)
        self._seen = Hysteresis(first=1)

    @property
    def is_well(self) -> bool:
        return self._seen.is_up is True

    @property
    def successes(self) -> int:
        return self._seen.successes

    def look(self) -> None:
        try:
            self._store.engine.get([self._row_id])
        except StoreError:
            self._seen = self._seen.after(False)
        else:
            self._seen = self._seen.after(True)
