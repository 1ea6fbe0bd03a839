"""Conditional writes of the arbiter's row, and what a region's grant adds to every other write.

Each is refused when the row has changed since it was seen. Every write moves `updatedAt`, so an order of a person and a
step of an agent cannot both follow one sight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from thunderagent.model.conditions import Absent, Below, Condition, Either, Is, Write
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Row, timestamp
from thunderagent.regions.grant import Record, RegionState, scope_id

SWITCHES_KEPT: Final = 3

JUST_LATER_S: Final = 0.0011
"""As little as a thousandth of a second can show."""

CLAIMS: Final = frozenset({"claim", "take over", "give up", "sentinel"})
"""Verbs that write the epoch: they make an agent the holder of a task, end it for holders of earlier epochs, or give
the sign of the grant."""


def first_row(scope: str, region: str, *, lease_s: float, by: str, now: float, epoch: int = 1) -> Row:
    """The first row of a scope.

    The epoch is over all that the tasks know: a row of a later one could not be claimed.
    """
    return {
        "taskId": scope_id(scope),
        "leaseOwner": region,
        "fence": epoch,
        "hb": 0,
        "leaseSec": lease_s,
        "handoffState": RegionState.ACTIVE.value,
        "updatedAt": timestamp(now),
        "info": {"since": timestamp(now), "by": by, "reason": "the first region"},
    }


def beat(seen: Record, *, now: float) -> Write:
    return _write("beat", seen, now=now, increase={"hb": 1})


def take(seen: Record, region: str, *, lease_s: float, by: str, now: float) -> Write:
    """The grant goes to a region that has seen it stand still for its whole length."""
    is_ordered = seen.state is RegionState.VACANT
    switches = list(seen.switches) if is_ordered else [*seen.switches, timestamp(now)][-SWITCHES_KEPT:]
    reason = seen.reason if is_ordered else f"{seen.holder} was not heard of"
    return _grant("take", seen, region, lease_s=lease_s, by=by, now=now, reason=reason, switches=switches)


def drain(seen: Record, to: str, *, drain_s: float, by: str, reason: str, now: float) -> Write:
    """Ask the holder to give back what it holds, each agent within `drain_s`, and to hand over.

    The time of the order tells it from an earlier one that was taken back: each counts from its own.
    """
    write = _order("drain", seen, RegionState.DRAINING, to, by=by, reason=reason, now=now)
    info = {**write.set["info"], "drain_s": drain_s, "ordered": write.set["updatedAt"]}
    return replace(write, set={**write.set, "info": info})


def hand_over(seen: Record, *, lease_s: float, by: str, now: float) -> Write:
    """The holder has given back everything: the next region has the grant at once."""
    if seen.to is None:
        raise StoreError(
            f"the region {seen.holder} is {seen.state} and names no region to hand over to; take that back with: "
            "thunderagent region stay"
        )
    return _grant("hand over", seen, seen.to, lease_s=lease_s, by=by, now=now, reason=seen.reason)


def vacate(seen: Record, to: str, *, by: str, reason: str, now: float) -> Write:
    """Take the grant from a holder that may not answer; `to` has it when the row has stood still for its length."""
    return _order("vacate", seen, RegionState.VACANT, to, by=by, reason=reason, now=now)


def stay(seen: Record, *, by: str, reason: str, now: float) -> Write:
    """Take back an order to drain: the holder goes on."""
    return _order("stay", seen, RegionState.ACTIVE, None, by=by, reason=reason, now=now)


def freeze(seen: Record, why: str | None, *, by: str, now: float) -> Write:
    """Let no region take the grant by itself; None: let them again, and forget earlier switches."""
    info = {**_info(seen), "by": by, "frozen": why}
    if seen.state is RegionState.DRAINING:
        info |= {"drain_s": seen.drain_s, "ordered": seen.ordered}
    if why is None:
        del info["frozen"]
        info.pop("switches", None)
    return _write("freeze" if why else "thaw", seen, now=now, set={"info": info})


def in_region(write: Write, epoch: int) -> Write:
    """The same write under the grant of a region: it touches no row that an agent of a later epoch has claimed.

    A claim writes the epoch; a holder's write needs it. A lease of an earlier epoch is over, also when the region has
    the grant again.
    """
    is_holder = any(isinstance(one, Is) and one.name == "regionEpoch" for one in write.require)
    changes = {**write.set, "regionEpoch": epoch} if write.verb in CLAIMS else write.set
    return replace(
        write, set=changes, require=(*write.require, Is("regionEpoch", epoch) if is_holder else _not_newer(epoch))
    )


def reasserted(write: Write, refused_by: Row, epoch: int) -> Write | None:
    """A holder's write made again, over a late write of a region whose epoch is over; None: there is none.

    Where tables are replicated the last write of a row wins, whatever its condition: a write of a lost region can
    arrive later. The holder knows all that a lease is. Only a holder that has claimed in this epoch may: an earlier
    lease is over.
    """
    held = {one.name: one.value for one in write.require if isinstance(one, Is)}
    epochs = {one.value for one in write.require if isinstance(one, Is) and one.name == "regionEpoch"}
    theirs = refused_by.get("regionEpoch")
    if epochs != {epoch} or theirs is None or theirs >= epoch:
        return None
    own: dict[str, Any] = {
        name: held[name] for name in ("status", "fence", "leaseOwner") if name in held and name not in write.remove
    }
    if "lockTime" in write.set and "leaseSec" not in refused_by:  # a heartbeat does not write it, and a sweep needs it
        own["leaseSec"] = math.ceil(write.set["lockTime"] - write.set["updatedAt"])
    ended = ("finishedAt", "expireAt", "doneReason", "result", "resultRef")
    remove = tuple(dict.fromkeys((*write.remove, *(name for name in ended if name not in write.set))))
    return replace(
        write,
        verb="reassert",
        set={**own, **write.set, "regionEpoch": epoch},
        remove=remove,
        require=(Is("regionEpoch", theirs),),
    )


def _not_newer(epoch: int) -> Condition:
    return Either((Absent("regionEpoch"), Below("regionEpoch", epoch + 1)))


def _info(seen: Record) -> dict[str, Any]:
    info: dict[str, Any] = {**seen.unknown, "since": seen.since, "by": seen.by, "reason": seen.reason}
    if seen.frozen is not None:
        info["frozen"] = seen.frozen
    if seen.switches:
        info["switches"] = list(seen.switches)
    return info


def _order(verb: str, seen: Record, state: RegionState, to: str | None, *, by: str, reason: str, now: float) -> Write:
    changes: dict[str, Any] = {"handoffState": state.value, "info": {**_info(seen), "by": by, "reason": reason}}
    if to is not None:
        changes["handoffOwner"] = to
    return _write(verb, seen, now=now, set=changes, remove=("handoffOwner",) if to is None else ())


def _grant(
    verb: str,
    seen: Record,
    region: str,
    *,
    lease_s: float,
    by: str,
    now: float,
    reason: str,
    switches: Sequence[float] | None = None,
) -> Write:
    info = {**_info(seen), "since": timestamp(now), "by": by, "reason": reason}
    if switches:
        info["switches"] = list(switches)
    changes = {
        "leaseOwner": region,
        "hb": 0,
        "leaseSec": lease_s,
        "handoffState": RegionState.ACTIVE.value,
        "info": info,
    }
    return _write(verb, seen, now=now, set=changes, increase={"fence": 1}, remove=("handoffOwner",))


def _write(
    verb: str,
    seen: Record,
    *,
    now: float,
    set: Mapping[str, Any] | None = None,
    increase: Mapping[str, int] | None = None,
    remove: tuple[str, ...] = (),
) -> Write:
    return Write(
        verb=verb,
        task_id=scope_id(seen.scope),
        set={**(set or {}), "updatedAt": timestamp(max(now, seen.updated_at + JUST_LATER_S))},
        increase=increase or {},
        remove=remove,
        require=(
            Is("leaseOwner", seen.holder),
            Is("fence", seen.epoch),
            Is("hb", seen.beat),
            Is("updatedAt", seen.updated_at),
        ),
    )
