"""Requests to DynamoDB and the units that they consumed, by purpose."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from thunderagent.model.forks import renewed
from thunderagent.stores.aws import THROTTLES
from thunderagent.stores.dynamo.errors import is_duplicate
from thunderagent.stores.purposes import RequestPurpose

_READS: Final = frozenset({"GetItem", "Query", "BatchGetItem"})


@dataclass(slots=True)
class Spent:
    """Requests and units.

    DynamoDB bills a refused conditional write like one that is done, but does not report its capacity: see `refused`.
    """

    requests: int = 0
    refused: int = 0
    write_units: float = 0.0
    index_write_units: float = 0.0
    read_units: float = 0.0

    @property
    def billed_write_units(self) -> float:
        """Write units with the refused writes, each at one unit: that of a row of up to 1 KB, as nearly all are."""
        return self.write_units + self.refused

    def add(self, action: str, reply: Mapping[str, Any]) -> None:
        capacity = reply.get("ConsumedCapacity") or []
        parts = capacity if isinstance(capacity, list) else [capacity]
        units = sum(part.get("CapacityUnits", 0.0) for part in parts)
        self.requests += 1
        if action in _READS:
            self.read_units += units
            return
        self.write_units += units
        if action == "BatchExecuteStatement":
            self.refused += sum(is_duplicate(member) for member in reply.get("Responses", ()))
        self.index_write_units += sum(
            one.get("CapacityUnits", 0.0) for part in parts for one in part.get("GlobalSecondaryIndexes", {}).values()
        )


@dataclass(slots=True)
class Consumed(Spent):
    """Everything since the start, in all and by purpose; capacity is counted only when `enabled`. Safe in threads."""

    enabled: bool = False
    _by_purpose: dict[RequestPurpose, Spent] = field(default_factory=dict, repr=False)
    _throttles: dict[str, int] = field(default_factory=dict, repr=False)
    _guard: threading.Lock = field(default_factory=lambda: renewed(threading.Lock()), repr=False)

    def add(self, action: str, reply: Mapping[str, Any], purpose: RequestPurpose = RequestPurpose.OTHER) -> None:
        with self._guard:
            Spent.add(self, action, reply)
            self._of(purpose).add(action, reply)

    def add_refused(self, purpose: RequestPurpose = RequestPurpose.OTHER) -> None:
        with self._guard:
            for spent in (self, self._of(purpose)):
                spent.requests += 1
                spent.refused += 1

    def add_throttle(self, reasons: Iterable[str]) -> None:
        """Count a throttled reply, once for each reason that it names."""
        with self._guard:
            for reason in reasons:
                self._throttles[reason] = self._throttles.get(reason, 0) + 1

    def by_purpose(self) -> dict[RequestPurpose, Spent]:
        with self._guard:
            return {purpose: replace(spent) for purpose, spent in self._by_purpose.items()}

    def throttles(self) -> dict[str, int]:
        """Throttled replies by reason, with those that botocore repeated by itself."""
        with self._guard:
            return dict(self._throttles)

    def _of(self, purpose: RequestPurpose) -> Spent:
        return self._by_purpose.setdefault(purpose, Spent())


def throttle_reasons(reply: Mapping[str, Any]) -> list[str]:
    """Why a reply is a throttle; empty when it is none. Without reasons in it, its error code is the reason."""
    code = str(reply.get("Error", {}).get("Code", ""))
    if code not in THROTTLES:
        return []
    reasons = {str(one["reason"]): None for one in reply.get("ThrottlingReasons") or () if one.get("reason")}
    return list(reasons) or [code]
