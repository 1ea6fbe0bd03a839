"""The grant: what a region may do and until when, and the row at the arbiter that decides who has it.

A grant is a lease like that of a task, and its row has the same attributes: `leaseOwner` is the region, `fence` its
epoch, `hb` the beats so far, `leaseSec` its length. Both sides count on their own monotonic clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from thunderagent.model.errors import StoreError
from thunderagent.model.rows import is_number
from thunderagent.model.task import Row

REGION_LOOK_S: Final = 5.0
"""Time between two readings of the arbiter's row by an agent."""

REGION_HURRY_S: Final = 10.0
"""Time beside `drain_s` for the agents of a region to give back what they hold before the grant moves."""


HOLDER_SHARE: Final = 0.8
"""Share of its length after which a grant ends for its holder, who counts from before the request."""

TAKER_SHARE: Final = 7 / 6
"""Share of its length for which the beat of a grant must stand still before another region takes it.

With 30 s: the holder ends at 24, the taker begins at 35. A write that left at the last moment has these 11 s to arrive;
an agent's calls end within 6 s, whatever the network does.
"""


class RegionState(StrEnum):
    """What is wanted of the holder: the attribute `handoffState` of the row.

    * `ACTIVE`: go on.
    * `DRAINING`: claim nothing, give back what is held, then hand the grant to the region named in `handoffOwner`.
    * `VACANT`: stop at once; the region named there takes the grant when the row has stood still for its length.
    """

    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    VACANT = "VACANT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the agents of a region may do until a monotonic second."""

    epoch: int = 0
    valid_until: float = math.inf
    is_draining: bool = False
    reason: str = ""
    """Why there is none, or why it ends."""

    def is_valid(self, now: float) -> bool:
        """Whether agents may write at this monotonic second."""
        return now < self.valid_until


NO_REGIONS: Final = Grant()
"""The grant where there is one region: always valid, and no epoch is written."""


def no_grant(reason: str, epoch: int = 0) -> Grant:
    return Grant(epoch=epoch, valid_until=-math.inf, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    scope: str
    holder: str
    epoch: int
    beat: int
    lease_s: float
    state: RegionState = RegionState.ACTIVE
    to: str | None = None
    """The next region: while DRAINING or VACANT."""
    updated_at: float
    since: float
    """When the holder got it, in epoch seconds of the arbiter's clock."""
    drain_s: float = 0.0
    """While DRAINING: how long an agent may take to give back what it holds."""
    ordered: float = 0.0
    """While DRAINING: the time of the order, which no two orders have in common."""
    frozen: str | None = None
    """Why no region takes the grant by itself; None: one does."""
    switches: tuple[float, ...] = ()
    """When regions took it by themselves, the last three."""
    by: str = ""
    """The agent or host that wrote last."""
    reason: str = ""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """What a newer version keeps in `info`: written again as it is."""

    @property
    def standing(self) -> tuple[int, int, str]:
        """What changes with every beat and every order."""
        return self.epoch, self.beat, self.state

    @classmethod
    def from_row(cls, row: Row) -> Record:
        """The record of a row.

        Raises:
            StoreError: the row is not one of the arbiter, or of a newer version.
        """
        try:
            info: Mapping[str, Any] = row["info"]
            lease_s, updated_at = float(row["leaseSec"]), row["updatedAt"]
            if not (0 < lease_s < math.inf and updated_at < math.inf and isinstance(row["leaseOwner"], str)):
                raise ValueError(f"leaseSec {lease_s}, updatedAt {updated_at}, leaseOwner {row['leaseOwner']!r}")
            switches = tuple(info.get("switches", ()))
            if not all(map(is_number, switches)):
                raise ValueError(f"switches {switches!r:.80}")
            return cls(
                scope=row["taskId"].removeprefix(PREFIX),
                holder=row["leaseOwner"],
                epoch=int(row["fence"]),
                beat=int(row["hb"]),
                lease_s=lease_s,
                state=RegionState(row["handoffState"]),
                to=row.get("handoffOwner"),
                updated_at=updated_at,
                since=float(info["since"]),
                drain_s=float(info.get("drain_s", 0.0)),
                ordered=float(info.get("ordered", 0.0)),
                frozen=info.get("frozen"),
                switches=switches,
                by=info.get("by", ""),
                reason=info.get("reason", ""),
                unknown={name: value for name, value in info.items() if name not in _KNOWN},
            )
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise StoreError(
                f"the row {row.get('taskId')!r} of the arbiter cannot be read ({error!r:.200}): a newer version has "
                "written it, or a person; upgrade this installation, or mend the row"
            ) from error


PREFIX: Final = "region:"
_KNOWN: Final = frozenset({"since", "by", "reason", "frozen", "switches", "drain_s", "ordered"})
"""The entries of `info` that this version knows."""


def scope_id(scope: str) -> str:
    """Id of the row of a scope: the agents that share a table."""
    return f"{PREFIX}{scope}"
